"""RMSNorm and LayerNorm as users of PyTorch call them: two dtypes, a weight of several dimensions, no epsilon."""

import pytest
import torch
import torch.nn.functional as F
import turns
from where import DEVICE

from weft import ops

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:Mismatch dtype"),
]  # PyTorch's own, of its fused norm

HALF, EPS = torch.float16, 1e-5


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def agree(ours, theirs, *tensors):
    """Results and gradients, with their dtypes."""
    found = []
    for function in (ours, theirs):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = function(*leaves)
        total = sum((o.float() * drawn(*o.shape, seed=9)).sum() for o in (out if isinstance(out, tuple) else (out,)))
        found.append([*(out if isinstance(out, tuple) else (out,)), *torch.autograd.grad(total, leaves)])
    for got, right in zip(*found, strict=True):
        assert got.dtype == right.dtype and got.shape == right.shape
        torch.testing.assert_close(got, right, rtol=3e-3, atol=3e-3)


def rms(h, weight, eps):
    return F.rms_norm(h, weight.shape, weight, eps), h


def layer(h, weight, eps):
    return F.layer_norm(h, weight.shape, weight.to(h.dtype), None, eps), h


NORMS = {
    "add_rms_norm": (lambda x, r, w: ops.add_rms_norm(x, r, w, EPS), lambda x, r, w: rms(x + r, w, EPS)),
    "add_layer_norm": (lambda x, r, w: ops.add_layer_norm(x, r, w, eps=EPS), lambda x, r, w: layer(x + r, w, EPS)),
    "dropout_add_rms_norm": (
        lambda x, r, w: ops.dropout_add_rms_norm(x, r, w, 0.5, 7, eps=EPS),
        lambda x, r, w: rms(ops.dropout(x, 0.5, 7) + r, w, EPS),
    ),
}


@pytest.mark.parametrize("weight", [torch.float32, HALF])
@pytest.mark.parametrize(("x", "residual"), [(HALF, torch.float32), (torch.float32, HALF), (torch.bfloat16, HALF)])
@pytest.mark.parametrize("name", NORMS)
def test_a_residual_of_another_dtype_is_promoted_as_the_sum_is(name, x, residual, weight):
    tensors = drawn(6, 16, dtype=x), drawn(6, 16, seed=1, dtype=residual), drawn(16, seed=2, dtype=weight)
    agree(*NORMS[name], *tensors)
    with torch.no_grad():
        assert NORMS[name][0](*tensors)[1].dtype == torch.float32
    assert ops.explain(name, *tensors).implementation == ops.explain(name, *(t.float() for t in tensors)).implementation


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float64])
@pytest.mark.parametrize("shape", [(3, 2, 5, 8), (5, 8), (0, 5, 8)])
def test_a_weight_of_several_dimensions_normalises_over_them(shape, dtype):
    x, weight, bias = drawn(*shape, dtype=dtype), drawn(5, 8, seed=1, dtype=dtype), drawn(5, 8, seed=2, dtype=dtype)
    agree(lambda x, w, b: ops.layer_norm(x, w, b), lambda x, w, b: F.layer_norm(x, (5, 8), w, b), x, weight, bias)
    if x.numel():
        agree(lambda x, w: ops.rms_norm(x, w, EPS), lambda x, w: F.rms_norm(x, (5, 8), w, EPS), x, weight)
    agree(
        lambda x, r, w: ops.add_layer_norm(x, r, w),
        lambda x, r, w: (F.layer_norm(x + r, (5, 8), w), x + r),
        x, drawn(*shape, seed=3, dtype=dtype), weight,
    )  # fmt: skip


def test_dimensions_that_do_not_flatten_are_named():
    x, weight = drawn(3, 8, 5), drawn(5, 8)
    with pytest.raises(ValueError, match=r"'x' has shape \(3, 5, 8\) and strides \(40, 1, 5\).*to be contiguous"):
        ops.rms_norm(x.mT, weight)
    with pytest.raises(ValueError, match=r"'weight' has shape \(8, 5\) and strides \(1, 8\).*to be contiguous"):
        ops.rms_norm(x, weight.mT)
    with pytest.raises(ValueError, match=r"'bias' has shape \(8,\); expected \(40,\)"):
        ops.layer_norm(x.mT.contiguous(), weight, weight[0])


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float64])
def test_no_epsilon_is_pytorchs(dtype):
    x, weight = drawn(6, 16, dtype=dtype) * 1e-3, drawn(16, seed=1, dtype=dtype)
    agree(lambda x, w: ops.rms_norm(x, w, None), lambda x, w: F.rms_norm(x, (16,), w), x, weight)
    agree(lambda x, w: ops.add_rms_norm(x, x, w, None)[0], lambda x, w: F.rms_norm(x + x, (16,), w), x, weight)
    y, h = ops.dropout_add_rms_norm(x, x, weight, 0.5, 7, eps=None)
    torch.testing.assert_close(y, F.rms_norm(h, (16,), weight), rtol=3e-3, atol=3e-3)
    with torch.no_grad():
        torch.testing.assert_close(ops.rms_norm(x, weight, None), F.rms_norm(x, (16,), weight), rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("norm", ["rms_norm", "add_rms_norm", "dropout_add_rms_norm"])
def test_rows_that_are_not_there_add_nothing_to_the_weights_gradient_without_an_epsilon(norm):
    x, dy = torch.randn(2, 3, 157, device=DEVICE)
    weight = torch.ones(157, device=DEVICE, requires_grad=True)
    others = () if norm == "rms_norm" else (torch.zeros_like(x),)
    options = {"p": 2**-16, "seed": 1} if norm.startswith("dropout") else {}  # drops none of these
    y = getattr(ops, norm)(x, *others, weight, eps=0.0, **options)
    (got,) = torch.autograd.grad(y[0] if others else y, weight, dy)
    torch.testing.assert_close(got, (dy * F.rms_norm(x, (157,), eps=0.0)).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [2100, 5000])
@pytest.mark.parametrize("offset", [0, 1000])
def test_long_rows_that_lie_side_by_side_have_the_right_mean_and_variance(columns, offset):
    """Of parts of rows; a mean far from zero costs no more than in PyTorch."""
    x = (drawn(columns, 37) + offset).t()
    y, wanted = ops.layer_norm(x), F.layer_norm(x.double(), (columns,))
    assert y.stride() == x.stride()
    errors = [float((t.double() - wanted).abs().max()) for t in (y, F.layer_norm(x, (columns,)))]
    assert errors[0] <= max(2 * errors[1], 2e-6)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(3, 40), (2, 2, 1030)])
def test_without_a_residual_what_is_passed_on_is_x_and_its_gradient_is_added(centered, dtype, shape):
    add, alone = (ops.add_layer_norm, ops.layer_norm) if centered else (ops.add_rms_norm, ops.rms_norm)
    x, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], seed=1, dtype=dtype)
    agree(lambda x, w: add(x, None, w), lambda x, w: (alone(x, w), x * 1), x, weight)
    y, h = add(x.requires_grad_(), None, weight)
    assert type(y.grad_fn).__name__ == "PassedOnBackward" and h.data_ptr() == x.data_ptr()
    assert add(x.detach(), None)[1].data_ptr() == x.data_ptr()
    name = "add_layer_norm" if centered else "add_rms_norm"
    assert ops.explain(name, x, None, weight) == ops.explain(name.removeprefix("add_"), x, weight)
    if dtype == torch.float32:  # in float64, so once
        x, most = x.detach().double().requires_grad_(), 1000 if turns.WANTED == "all" else 100
        assert torch.autograd.gradcheck(lambda x: add(x, None), (x,), fast_mode=x.numel() > most)
