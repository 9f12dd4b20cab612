"""The tables of softmax and log-softmax, and the gradient by clusters: each way to lay a row over blocks, and what happens to
rows that clusters do not take."""

import pytest
import torch
from where import DEVICE

from weft import ops, registry
from weft.definition import SHARED_LIMIT, Declined
from weft.operators.cuda import CudaPlan
from weft.operators.launch import Plan, compiling_for
from weft.operators.row_cluster import LONGEST, MAX_CLUSTER, SHORTEST
from weft.operators.softmax import dispatch
from weft.operators.softmax.dispatch import BACKWARD, FORWARD

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLUSTER_ARCHITECTURES = [sm for sm in SHARED_LIMIT if sm >= 90]
CLUSTER = BACKWARD.kernel("cuda")


def rows(n, dtype=torch.float32, m=3, device="meta"):
    return torch.empty(m, n, dtype=dtype, device=device)


@pytest.mark.parametrize("sm", CLUSTER_ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_configuration_holds_the_row_and_fits(sm, dtype):
    n = SHORTEST
    while n <= dispatch.longest_backward(sm, dtype):
        found = list(dispatch.backward_candidates(sm, dtype, n))
        assert dispatch.backward_heuristic(sm, dtype, n) in found
        for c in found:
            held = c["THREADS"] * c["EACH"]
            assert held * MAX_CLUSTER >= n > held // 2 and c["EACH"] * dtype.itemsize % 16 == 0
            assert c["SHARED"] * held * dtype.itemsize < SHARED_LIMIT[sm]
        n *= 2
    assert n > 2**17


@pytest.mark.parametrize("sm", CLUSTER_ARCHITECTURES)
def test_plans_take_what_clusters_hold(sm):
    with compiling_for(sm, lambda *kernel: None):
        for dtype in DTYPES:
            for n in (SHORTEST, 4104, 33000, 2**17, dispatch.longest_backward(sm, dtype)):
                y = rows(n, dtype)
                plan = CLUSTER.of((y, y), -1, False)
                assert plan.grid == (3 * plan.cluster, 1) and plan.cluster <= MAX_CLUSTER
                assert [s.value for s in plan.scalars] == [n, n, n, n]
                sliced = rows(n + 8, dtype)[:, :n]
                strides = [s.value for s in CLUSTER.of((y, sliced), -1, True).scalars]
                assert strides == [n, n, n + 8, n]


@pytest.mark.parametrize(("n", "dtype", "dy", "reason"), [
    (4098, torch.float32, None, "16 bytes"),
    (4096, torch.float32, lambda: rows(4097)[:, :4096], "16 bytes"),
    (4096, torch.float32, lambda: rows(1).expand(3, 4096), "columns 0 elements apart"),
    (4096, torch.float32, lambda: rows(4096, torch.float16), "dtype"),
    (SHORTEST // 2, torch.float16, None, "below"),
    (LONGEST * 2, torch.float16, None, "holds"),
])  # fmt: skip
def test_what_clusters_do_not_take_goes_to_triton(n, dtype, dy, reason):
    with compiling_for(90, lambda *kernel: None):
        y = rows(n, dtype)
        dy = y if dy is None else dy()
        with pytest.raises(Declined, match=reason):
            CLUSTER.of((y, dy), -1, False)
        assert isinstance(BACKWARD.of((y, dy), -1, False), Plan)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_long_rows_are_for_clusters_where_there_are_any(name):
    for sm, n, kernel in (
        (90, 16384, "cuda"),
        (90, 8192, "triton"),
        (80, 2**17, "triton"),
        (120, 2**17, "cuda"),
        (120, LONGEST, "triton"),  # half the shared memory: the longest rows of all are read twice
    ):
        with compiling_for(sm, lambda *kernel: None):
            assert ops.explain(name, rows(n), direction="backward").implementation == kernel, (sm, n)
            assert isinstance(BACKWARD.of((rows(n), rows(n)), -1, False), CudaPlan if kernel == "cuda" else Plan)
            forward = "cuda" if n == LONGEST else kernel
            assert ops.explain(name, rows(n)).implementation == forward


def test_the_gradient_is_pytorchs_where_the_result_is():
    with compiling_for(90, lambda *kernel: None):
        for x in (rows(512).t(), rows(0)):
            for direction in ("forward", "backward"):
                assert ops.explain("softmax", x, direction=direction).implementation == "torch"


@pytest.mark.parametrize(("n", "forward", "backward"), [  # columns of two tiles, or of one
    (128, (128, 0), (128, 0)), (129, (128, 1), (128, 1)), (192, (128, 64), (128, 64)), (193, (256, 0), (256, 0)),
    (300, (512, 0), (512, 0)), (513, (512, 1), (512, 1)), (640, (512, 128), (512, 128)), (641, (1024, 0), (1024, 0)),
    (1280, (1024, 256), (1024, 256)), (2304, (2048, 256), (4096, 0)), (5120, (4096, 1024), (8192, 0)),
    (5121, (8192, 0), (8192, 0)),
])  # fmt: skip
def test_little_padding_is_worth_a_second_tile(n, forward, backward):
    with compiling_for(90, lambda *kernel: None):
        for plan, want in (
            (FORWARD.of((rows(n),), -1, False), forward),
            (BACKWARD.of((rows(n),) * 2, -1, False), backward),
        ):
            assert (plan.constants["BLOCK"], plan.constants["TAIL"]) == want
            assert sum(want) >= n


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_configuration_is_right(name, dtype, monkeypatch):
    """Against the formula in float64 on the same y; dy has a mean, so that what one block sums matters."""
    logs, numbers = name == "log_softmax", torch.finfo(dtype)
    for n in (2048, 4104, 16384, 33000, 2**16 + 8, 2**17, 2**18):
        g = torch.Generator(DEVICE).manual_seed(n)
        x, dy = (torch.randn(3, n, generator=g, device=DEVICE) + 1 for _ in range(2))
        y, dy = registry.get(name).reference(x, -1).to(dtype), dy.to(dtype)
        p, d = y.double(), dy.double()
        want = d - p.exp() * d.sum(-1, keepdim=True) if logs else p * (d - (p * d).sum(-1, keepdim=True))
        allowed = numbers.eps * want.abs() + 4e-6 * want.abs().amax(-1, keepdim=True) + numbers.tiny * numbers.eps
        for c in dispatch.backward_candidates(90, dtype, 1 << (n - 1).bit_length()):
            monkeypatch.setattr(dispatch.cluster_backward_configuration, "trial", c)
            dx = torch.full_like(y, torch.nan)
            CLUSTER.of((y, dy), -1, logs)(y, dy, dx)
            assert bool(((dx.double() - want).abs() <= allowed).all()), (n, c)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_of_any_strides_are_taken(name):
    """Autograd passes expanded, transposed and sliced gradients; each kernel must read them by their strides."""
    for n in (20000, 2**16):
        x = torch.randn(6, n, device=DEVICE).requires_grad_()
        shapes = [
            torch.ones((), device=DEVICE).expand(6, n),
            torch.randn(6, 1, device=DEVICE).expand(6, n),
            torch.randn(1, n, device=DEVICE).expand(6, n),
            torch.randn(n, 6, device=DEVICE).t(),
            torch.randn(6, n + 4, device=DEVICE)[:, 1 : n + 1],
            torch.randn(6, n + 4, device=DEVICE)[:, :n],
        ]
        for dy in shapes:
            reference = registry.get(name).reference
            exact = x.detach().double().requires_grad_()
            (want,) = torch.autograd.grad(reference(exact), exact, dy.double())
            results = (function(x) for function in (getattr(ops, name), reference))
            error, pytorchs = (float((torch.autograd.grad(y, x, dy)[0] - want).abs().max()) for y in results)
            assert error <= 2 * pytorchs + 1e-6 * float(dy.abs().max())
