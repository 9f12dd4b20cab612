"""Matrices and their gradients for the tests of Muon, and how far two runs are apart."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.operators.orthogonalization.dispatch import IterationCall  # noqa: E402

SHAPES = ((24, 40), (40, 24), (32, 32), (24, 40), (1, 20))


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch):
    """CPU tensors take PyTorch's products, in bf16 too: the interpreter, which other tests switch on, computes bf16 wrongly."""
    monkeypatch.setattr(IterationCall, "on_gpu", property(lambda call: call.x.is_cuda))


def parameters(shapes=SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in shapes]


def set_gradients(params, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


def train(optimizer, params, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_gradients(params, 100 + step)
        optimizer.step()


def same_bits(ours, theirs) -> bool:
    return all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def moved_apart(ours, theirs, start) -> float:
    """How far two runs are apart, as a share of the way that the second went."""
    with torch.no_grad():
        return max(float((a - b).norm() / (b - s).norm()) for a, b, s in zip(ours, theirs, start, strict=True))


# Both iterate in bf16, of 8 bits, fifteen products deep, and each errs by 1 to 3 % of a step; PyTorch rounds the momentum too,
# before it takes the norm.
BF16 = 0.05
