"""Products of 8-bit operands where what is asked of every operator does not reach: exactness, scales, wrong arguments."""

import functools

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import random
from where import DEVICE

from weft import ops, registry
from weft.operators.quantization.quantize import reference as quantized

pytestmark = pytest.mark.device
kernel = registry.get("scaled_matmul").find("triton").function


ONE = torch.ones((), device=DEVICE)


def test_every_int8_sum_is_exact():
    a = torch.arange(-128, 128, device=DEVICE).to(torch.int8).view(2, 128)
    b = a.flip(1).t().contiguous()
    got = kernel(a, b, ONE, ONE, dtype=torch.float32)
    assert got.equal((a.double() @ b.double()).float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_fp8_comes_out_as_itself(dtype):
    codes = torch.arange(256, device=DEVICE).to(torch.uint8).view(dtype)
    whole = codes.float().nan_to_num(0.0, 0.0, 0.0).to(dtype)  # a NaN would reach every sum of its row
    for half in (whole[:128], whole[128:]):
        a = torch.diag(half.float()).to(dtype)
        got = kernel(a, torch.eye(128, device=DEVICE).to(dtype), ONE, ONE, dtype=torch.float32)
        assert got.diagonal().equal(half.float()) and int(got.count_nonzero()) == int(half.float().count_nonzero())


def test_nan_and_infinity_reach_what_they_are_multiplied_into():
    a = torch.zeros(3, 32, device=DEVICE).to(torch.float8_e5m2)
    a[1, 5] = float("nan")
    a[2, 7] = float("inf")
    b = torch.ones(32, 4, device=DEVICE).to(torch.float8_e5m2)
    got = kernel(a, b, ONE, ONE, dtype=torch.float32)
    assert bool((got[0] == 0).all()) and bool(got[1].isnan().all()) and bool(got[2].isinf().all())


def test_finer_scales_lose_less():
    """One large column in a spoils the scale of its tensor, less of its row, and least that of its block. (A float's relative
    precision hardly depends on its scale.)"""
    a, w = random(64, 256), random(96, 256, seed=1)
    a[:, 3] *= 300
    exact = a.double() @ w.double().t()
    errors = []
    for of_a, of_w in (("tensor", "tensor"), ("row", "row"), ("group", "block")):
        (qa, sa), (qw, sw) = quantized(a, "int8", of_a), quantized(w, "int8", of_w)
        got = ops.scaled_matmul(qa, qw.t(), sa, sw.t() if sw.ndim else sw, dtype=torch.float32)
        errors.append(float((exact - got.double()).square().mean().sqrt()))
    assert errors[0] > 1.2 * errors[1] > 1.4 * errors[2]  # half of K lies in the other block


def test_a_bias_is_added_once():
    a, b = (torch.ones(s, device=DEVICE).to(torch.int8) for s in ((5, 300), (300, 7)))
    bias = random(7)
    assert torch.equal(kernel(a, b, ONE, ONE, bias, dtype=torch.float32), 300 + bias.expand(5, 7))


@pytest.mark.parametrize("function", [ops.scaled_matmul, registry.get("scaled_matmul").reference])
def test_a_bias_has_a_gradient(function):
    """The sum of the result's rows; its gradient in turn is that of a sum."""
    a, b = (torch.ones(s, device=DEVICE).to(torch.int8) for s in ((5, 30), (30, 7)))
    bias, dy = random(7).requires_grad_(), random(5, 7, seed=1).requires_grad_()
    y = function(a, b, ONE, ONE, bias, dtype=torch.float32)
    (dbias,) = torch.autograd.grad(y, bias, dy, create_graph=True)
    torch.testing.assert_close(dbias, dy.sum(0))
    assert torch.equal(torch.autograd.grad(dbias[2], dy)[0][:, 2], torch.ones(5, device=DEVICE))


def test_of_a_bias_in_half_precision_the_gradient_is_summed_in_single():
    a, b = (torch.zeros(s, device=DEVICE).to(torch.float8_e4m3fn) for s in ((4096, 32), (32, 16)))
    bias = torch.zeros(16, device=DEVICE, dtype=torch.float16, requires_grad=True)
    ops.scaled_matmul(a, b, ONE, ONE, bias, dtype=torch.float16).sum().backward()
    assert bias.grad.dtype == torch.float16 and bool((bias.grad == 4096).all())


def test_the_formula_adds_integers_exactly():
    """Each sum here is beyond fp32's 2²⁴ whole numbers in a row."""
    a, b = (torch.full(shape, 127, dtype=torch.int8) for shape in ((1, 2000), (2000, 1)))
    b[0] = 1
    want = torch.tensor(127 * (1 + 127 * 1999), dtype=torch.float32)
    one = torch.ones(())
    assert registry.get("scaled_matmul").reference(a, b, one, one, dtype=torch.float32).item() == want.item()


@pytest.mark.parametrize(("of_a", "of_b"), [((1,), (1,)), ((1,), ()), ((1, 1), (1,)), ((1, 1), (1, 1))])
def test_a_single_scale_may_have_any_shape(of_a, of_b):
    a, b = (torch.ones(s, device=DEVICE).to(torch.int8) for s in ((5, 300), (300, 7)))
    got = ops.scaled_matmul(a, b, 2 * ONE.reshape(of_a), 3 * ONE.reshape(of_b), dtype=torch.float32)
    assert bool((got == 1800).all())


def operands(m=64, n=128, k=256, dtype=torch.float8_e4m3fn):
    return torch.zeros(m, k, device=DEVICE).to(dtype), torch.zeros(k, n, device=DEVICE).to(dtype)


A, B = operands()
wrong = functools.partial(bad, "scaled_matmul", a=A, b=B, a_scale=ONE, b_scale=ONE)
REFUSED = [
    wrong(TypeError, "'a'", a=torch.zeros(64, 256, device=DEVICE)),
    wrong(TypeError, "both int8, or both an fp8", b=torch.zeros(256, 128, device=DEVICE).to(torch.int8)),
    wrong(ValueError, "256 rows", b=operands(k=255)[1]),
    wrong(ValueError, "(64, 1) and (1, 128)", a_scale=torch.ones(64, device=DEVICE)),
    wrong(ValueError, "of blocks", a_scale=torch.ones(64, 2, device=DEVICE), b_scale=torch.ones(2, 2, device=DEVICE)),
    wrong(TypeError, "a_scale", a_scale=torch.ones((), device=DEVICE).half()),
    wrong(ValueError, "b_scale", b_scale=torch.ones((), device=DEVICE).requires_grad_()),
    wrong(ValueError, "(128,)", bias=torch.ones(64, device=DEVICE)),
    wrong(TypeError, "dtype", dtype=torch.int8),
    wrong(TypeError, "check_scales", check_scales=1),
    wrong(ValueError, "'a_scale' has inf at () (1 such", a_scale=ONE * torch.inf, check_scales=True),
    wrong(ValueError, "'b_scale' has nan at (0, 5) (2 such", a_scale=torch.ones(64, 1, device=DEVICE), check_scales=True,
          b_scale=torch.ones(1, 128, device=DEVICE).index_fill_(1, torch.tensor([5, 9], device=DEVICE), torch.nan)),
]  # fmt: skip


def test_a_scale_that_is_not_finite_spoils_its_row_alone():
    a, b = operands()
    rows = torch.ones(64, 1, device=DEVICE)
    rows[3], rows[7] = torch.nan, torch.inf
    c = ops.scaled_matmul(a, b, rows, torch.ones(1, 128, device=DEVICE))
    spoilt = [row for row in range(64) if not bool(c[row].isfinite().all())]
    assert spoilt == [3, 7]
    ops.scaled_matmul(a, b, ONE, ONE, check_scales=True)
