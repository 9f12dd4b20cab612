"""Vectors and sparse matrices for the tests of sparse containers and products."""

from __future__ import annotations

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.definition import workload  # noqa: E402
from weft.operators.sparse import CSR  # noqa: E402
from weft.operators.sparse.products import random_csr  # noqa: E402


def ints(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


def floats(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


def drawn(m=20, n=30, r=5, **options) -> CSR:
    return random_csr(workload("fp32", M=m, N=n, R=r, **options), torch.Generator(DEVICE).manual_seed(1), DEVICE)


def vector(n, seed=2):
    return torch.randn(n, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
