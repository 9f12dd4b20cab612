"""Products that overlap with their communication: the decompositions over ranks that are threads, exactly, by integers."""

import contextlib

import pytest
import torch
from symmetric_threads import on_ranks

from weft.comm.symmetric.overlapped_matmul import all_gather_matmul, matmul_reduce_scatter

M, N, K = 4, 6, 8


def integers(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=g).float()


@pytest.mark.parametrize("n", [2, 3, 5])
def test_all_gather_matmul(n):
    """Three calls one after another, so that what is gathered overwrites the call before."""

    def rank(memory):
        found = []
        for call in range(3):
            x, weight = integers(100 * call + memory.rank, M, K), integers(50 + memory.rank, N, K)
            out = torch.full((n, M, N), float("nan"))
            all_gather_matmul(memory, contextlib.nullcontext(), x, weight, out)
            found.append(out.view(n * M, N))
        return found

    for r, found in enumerate(on_ranks(n, n * M * K * 4, rank)):
        for call, y in enumerate(found):
            x = torch.cat([integers(100 * call + s, M, K) for s in range(n)])
            assert torch.equal(y, x @ integers(50 + r, N, K).t())


@pytest.mark.parametrize("n", [2, 3, 5])
def test_matmul_reduce_scatter(n):
    def rank(memory):
        found = []
        for call in range(3):
            x, weight = integers(100 * call + memory.rank, n * M, K), integers(50 + memory.rank, N, K)
            out = torch.full((M, N), float("nan"))
            matmul_reduce_scatter(memory, x, weight, out)
            found.append(out)
        return found

    for r, found in enumerate(on_ranks(n, (n - 1) * M * N * 4, rank)):
        for call, y in enumerate(found):
            whole = sum(integers(100 * call + s, n * M, K) @ integers(50 + s, N, K).t() for s in range(n))
            assert torch.equal(y, whole[r * M : (r + 1) * M])
