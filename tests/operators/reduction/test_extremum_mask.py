"""Extrema with a gradient: forward saves a mask of the elements that equal the result, or the extrema of spans."""

from __future__ import annotations

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import registry  # noqa: E402
from weft.operators.reduction import extremum_mask  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's of 0 / 0

OPERATORS = {name: registry.get(name) for name in ("max", "min")}

CALLS = ((37, 5), 1), ((9, 3, 20), 1), ((40, 21), 0), ((4, 100), -1), ((7, 6), None), ((3, 50, 4), 1), ((6, 1), 1)


def leaf(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(2).round().to(DEVICE)  # ties
    return x.requires_grad_()


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dim"), CALLS)
@pytest.mark.parametrize("name", OPERATORS)
def test_x_may_be_overwritten_before_the_gradient(name, shape, dim, keepdim):
    op = OPERATORS[name]
    x = leaf(shape)
    want = op.reference(x, dim, keepdim)
    dy = torch.randn_like(want)
    (dx,) = torch.autograd.grad(want, x, dy)
    values = x.detach().clone().requires_grad_()
    inner = values * 1
    got = op.public(inner, dim, keepdim)
    assert len(got.grad_fn.saved_tensors) == 1
    assert got.grad_fn.saved_tensors[0].dtype == torch.uint8
    assert got.grad_fn.saved_tensors[0].numel() <= -(-x.numel() // 8) + 8 * got.numel()
    with torch.no_grad():
        inner.fill_(7)
        got.detach().fill_(7)
    assert torch.equal(torch.autograd.grad(got, values, dy)[0], dx)


@pytest.mark.parametrize(("shape", "dim"), CALLS)
def test_the_gradient_has_a_gradient(shape, dim):
    x = leaf(shape)
    weight = torch.randn_like(x)
    found = []
    for function in (OPERATORS["max"].public, OPERATORS["max"].reference):
        y = function(x, dim)
        dy = torch.ones_like(y).requires_grad_()
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        found.append((dx.detach(), *torch.autograd.grad((dx * weight).sum(), dy)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_a_gradient_of_any_strides_is_taken():
    """An expanded one comes out of a sum of the result; rows that lie side by side in memory become columns."""
    for shape, dims, dim in (((4, 6, 5), (0, 1, 2), 1), ((9, 6), (1, 0), 1), ((4, 6, 5), (2, 0, 1), 0)):
        x = leaf(shape)
        for weight in (1.0, torch.randn([n for i, n in enumerate(x.permute(dims).shape) if i != dim], device=DEVICE)):
            for turned in (False, True):
                two_axes = isinstance(weight, torch.Tensor) and weight.ndim == 2
                by = weight.t().contiguous().t() if turned and two_axes else weight
                found = [
                    torch.autograd.grad((function(x.permute(dims), dim) * by).sum(), x)[0]
                    for function in (OPERATORS["min"].public, OPERATORS["min"].reference)
                ]
                torch.testing.assert_close(*found)


def test_a_mask_is_saved_for_a_gradient_alone():
    x = leaf((5, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extremum_mask.MaskPlan, "save", None)
        with torch.no_grad():
            OPERATORS["max"].public(x, 1)
        OPERATORS["max"].public(x.detach(), 1)
    long = torch.ones(2, 2**14, device=DEVICE).requires_grad_()
    assert len(OPERATORS["max"].public(long, 1).grad_fn.saved_tensors) == 3, "x, the result and the extrema of spans"


@pytest.mark.parametrize(("shape", "dim"), [((2, 20000), 1), ((20000, 3), 0), ((1, 40000), None), ((3, 9000, 2), 1)])
@pytest.mark.parametrize("name", OPERATORS)
def test_of_long_extents_x_is_read_where_the_extremum_is(name, shape, dim):
    op = OPERATORS[name]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    along = x.movedim(dim, 0) if dim is not None else x.view(-1)
    along[:3] = 5 if name == "max" else -5  # three ties, all in the first span
    x.requires_grad_()
    want = op.reference(x, dim)
    dy = torch.randn_like(want)
    (dx,) = torch.autograd.grad(want, x, dy)
    got = op.public(x, dim)
    assert torch.equal(got, want)
    late = x.detach().movedim(dim, 0) if dim is not None else x.detach().view(-1)
    late.data[along.shape[0] // 2 :] = torch.nan  # unseen by autograd, and by the gradient
    x_as_saved = got.grad_fn.saved_tensors[0]
    assert x_as_saved.isnan().any()
    assert torch.equal(torch.autograd.grad(got, x, dy)[0], dx)


def test_of_long_extents_an_overwritten_x_is_noticed():
    x = torch.rand(2, 20000, device=DEVICE).requires_grad_()
    inner = x * 1
    y = OPERATORS["max"].public(inner, 1)
    inner.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)
