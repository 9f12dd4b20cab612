"""Programmatic dependent launch: who asks for it, and what is compiled for it."""

import itertools
import threading

import pytest
import torch
import triton
import triton.language as tl

from weft.operators import launch


@triton.jit
def doubled(x_ptr, y_ptr, N, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    launch.wait_for_predecessor(EARLY)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < N), mask=at < N)


def plan(device) -> launch.Plan:
    early = launch.starts_early(torch.device(device))
    return launch.Plan(doubled, (8,), (1000,), {"BLOCK": 128, "EARLY": early}, early=early)


def test_an_early_start_is_asked_for_by_a_thread_within_a_block():
    seen = []
    with launch.early_start():
        with launch.early_start():
            seen.append(launch.early_wanted())
            other = threading.Thread(target=lambda: seen.append(launch.early_wanted()))
            other.start()
            other.join()
        seen.append(launch.early_wanted())
    assert [*seen, launch.early_wanted()] == [True, False, True, False]


@pytest.mark.gpu  # elsewhere kernels are interpreted
@pytest.mark.parametrize(("sm", "asked", "starts"), [(90, True, True), (80, True, False), (90, False, False)])
def test_a_kernel_waits_where_it_starts_early(sm, asked, starts):
    found = []
    x = torch.empty(1000, device="meta")
    with launch.compiling_for(sm, lambda *kernel: found.append(kernel)):
        if asked:
            with launch.early_start():
                made = plan("meta")
                made(x, x)
        else:
            made = plan("meta")
            made(x, x)
    assert (made.early, len(found)) == (starts, 1)


@pytest.mark.gpu
def test_a_chain_of_early_starts_gives_the_bits_of_launches_one_after_another():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm_90")
    x = torch.ones(1000, device="cuda")
    tensors = [x, *(torch.empty_like(x) for _ in range(30))]
    with launch.early_start():
        kernel = plan("cuda")

    def chain():
        for a, b in itertools.pairwise(tensors):
            kernel(a, b)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for i in range(200):
        x.fill_(i)
        graph.replay()
        if i % 50 == 0:
            assert torch.equal(tensors[-1], x * 2.0**30)
