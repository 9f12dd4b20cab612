"""Of scans, what the tests of every operator leave out: non-finite numbers, zeros, look-back over several groups."""

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE

from weft import ops, registry
from weft.definition import ARCHITECTURES, SHARED_LIMIT, Declined
from weft.operators.random_inputs import random_tensor
from weft.operators.scan import cumsum, dispatch, logcumsumexp
from weft.operators.scan.dispatch import FORWARD

pytestmark = pytest.mark.device
NAMES = ("cumsum", "cumprod", "logcumsumexp")


def drawn(*shape: int, values: str = "normal") -> torch.Tensor:
    return random_tensor(torch.Generator(DEVICE).manual_seed(0), shape, "fp32", DEVICE, values=values)


@pytest.mark.parametrize("values", ["nonfinite", "minus_inf_rows"])
@pytest.mark.parametrize("shape", [(4, 300), (2, 700)])
@pytest.mark.parametrize("name", NAMES)
def test_nonfinite_numbers_go_where_pytorch_has_them(name, shape, values):
    x = drawn(*shape, values=values)
    torch.testing.assert_close(getattr(ops, name)(x), getattr(torch, name)(x, -1), equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_whole_numbers_add_up_exactly_over_many_groups(exclusive, reverse):
    x = drawn(2, 1500).mul(4).round()
    want = registry.get("cumsum").reference(x, -1, exclusive, reverse)
    assert ops.cumsum(x, exclusive=exclusive, reverse=reverse).equal(want)


@pytest.mark.parametrize("zeros", [(), (0,), (7,), (3, 8), (2, 3, 39)])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_products_with_zeros_are_exact(zeros, dim):
    x = drawn(3, 40).sign()
    x[:, list(zeros)] = 0.0
    x = (x if dim else x.T.contiguous()).requires_grad_()
    dy = drawn(*x.shape).mul(4).round()
    got, want = (torch.autograd.grad(f(x, dim), x, dy)[0] for f in (ops.cumprod, torch.cumprod))
    assert got.equal(want)


@pytest.mark.parametrize("name", NAMES)
def test_few_long_columns_and_rows_are_cut_into_parts(name):
    for shape, dim in (((900, 2), 0), ((1, 900), 1)):
        x = (1 + drawn(*shape) / 64).requires_grad_()
        dy = drawn(*shape)
        got, want = (f(x, dim) for f in (getattr(ops, name), getattr(torch, name)))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (got, want)), rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("reverse", [False, True])
def test_products_of_columns_in_parts_are_right_where_a_part_is_more_than_a_float_holds(reverse):
    x = torch.full((900, 4), 1.6)
    x[0, 0], x[1, 1], x[:450, 2], x[2, 3] = 0.0, 1e-38, 0.5, float("inf")
    if reverse:
        x = x.flip(0)
    got, want = ops.cumprod(x, 0, reverse=reverse), torch.cumprod(x.flip(0) if reverse else x, 0)
    torch.testing.assert_close(got.flip(0) if reverse else got, want, rtol=1e-4, atol=1e-37)


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [cumsum, logcumsumexp])
def test_every_configuration_of_rows_and_rings_fits_the_machine(module, sm, dtype):
    rows = module.scan.rows
    for e in range(3, 21):
        for c in [rows.heuristic(sm, dtype, 2**e), *rows.candidates(sm, dtype, 2**e)]:
            if "BYTES" in c:
                threads = 32 * dispatch.warps_of(2**e * dtype.itemsize, c["BYTES"])
                assert threads <= c["THREADS"] * 16 or sm < 90
            else:
                assert sm >= 90 and dispatch.warps_of_ring(c) * c["PER_SM"] <= 32
                assert dispatch.shared_bytes(c) * c["PER_SM"] <= SHARED_LIMIT[sm] + dispatch.SYSTEM
                assert dispatch.shared_bytes(c) - dispatch.SYSTEM <= SHARED_LIMIT[sm]
                assert 1 <= c["LOADS"] <= c["SLOTS"] >= c["TEAMS"]


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("n", [4, 8, 24, 260, 4096, 20000, 2**17 + 8, 2**19, 2**23 + 8])
def test_whole_numbers_add_up_exactly_in_rows_clusters_and_rings(n, exclusive, reverse):
    x = drawn(5 if n < 2**20 else 1, n).round()
    want = cumsum.scan.reference(x.double(), -1, exclusive, reverse).float()
    assert registry.get("cumsum").find("cuda").function(x, -1, exclusive, reverse).equal(want)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
def test_the_element_that_is_left_out_has_derivatives_of_zero(name, reverse):
    scan = getattr(ops, name)
    x, dy = (torch.randn(2, 4, device=DEVICE, requires_grad=True) for _ in range(2))
    (dx,) = torch.autograd.grad(scan(x, exclusive=True, reverse=reverse), x, dy, create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), dy)
    assert again.isfinite().all() and not again[:, -1 if reverse else 0].any()
    for shape in ((3, 0), ()):
        nothing = torch.zeros(shape, device=DEVICE, requires_grad=True)
        scan(nothing, exclusive=True, reverse=reverse).sum().backward()
        assert nothing.grad.equal(torch.zeros(shape, device=DEVICE))


X = drawn(3, 4)
REFUSED = [
    *(bad(FORWARD.kernel("cuda").of, Declined, words, (x,), cumsum.scan, -1, False, False, x.dtype) for x, words in (
        (torch.empty(4, 2**20 + 1, device="meta"), "16 bytes"),
        (torch.empty(4, 1000, device="meta")[:, ::2], "side by side"),
        (torch.empty(1000, 8, device="meta")[:, ::2].T, "side by side"))),
    bad("cumsum", TypeError, "'x' is a list", [1.0]),
    bad("cumsum", ValueError, "'dim' is 2", X, 2),
    bad("cumprod", TypeError, "'exclusive' is 1", X, exclusive=1),
    bad("logcumsumexp", TypeError, "'reverse' is None", X, reverse=None),
]  # fmt: skip
