"""Of reductions, what the tests of every operator leave out: gradients that are views, orders, and bad arguments."""

from __future__ import annotations

import math

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import ops  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_the_gradient_of_a_sum_is_a_view(name, dim, keepdim):
    x = drawn(3, 5, 4).requires_grad_()
    got = getattr(ops, name)(x, dim, keepdim)
    want = getattr(torch, name)(x, dim, keepdim)
    dy = torch.randn_like(want)
    (dx,) = torch.autograd.grad(got, x, dy)
    torch.testing.assert_close(dx, torch.autograd.grad(want, x, dy)[0])
    assert dx.untyped_storage().nbytes() <= dy.nbytes


@pytest.mark.parametrize("name", ["max", "min", "norm"])
def test_a_gradient_of_any_strides_is_taken(name):
    """The gradient of a sum of the result is expanded."""
    x = drawn(4, 6, 5).requires_grad_()
    got = getattr(ops, name)(x, dim=1).sum()
    want = (torch.linalg.vector_norm(x, dim=1) if name == "norm" else getattr(torch, f"a{name}")(x, 1)).sum()
    torch.testing.assert_close(*(torch.autograd.grad(y, x)[0] for y in (got, want)))


@pytest.mark.parametrize("layout", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("name", ["sum", "max", "argmax"])
def test_permuted_tensors_are_reduced_in_their_own_order(name, layout):
    """Memory order is enough for a sum, not for an index."""
    x = drawn(3, 5, 7).permute(layout)
    for dim in (None, 0, 1, 2):
        want = getattr(torch, f"a{name}" if name == "max" else name)(x, *(() if dim is None else (dim,)))
        torch.testing.assert_close(getattr(ops, name)(x, dim), want)


@pytest.mark.parametrize("p", [0.5, 1, 2, 3, math.inf])
def test_the_norm_of_no_elements_is_zero(p):
    for shape, dim in (((0,), None), ((3, 0), 1), ((0, 4), 0), ((0, 4), None)):
        x = torch.zeros(shape, device=DEVICE, requires_grad=True)
        y = ops.norm(x, p, dim)
        assert y.equal(torch.zeros_like(torch.sum(x, dim) if dim is not None else torch.sum(x)))
        assert torch.autograd.grad(y.sum(), x)[0].shape == shape
    assert ops.norm(torch.zeros(0, 4, device=DEVICE), p, 1).shape == (0,)


@pytest.mark.parametrize("p", [0.5, 0, 3, -math.inf])
def test_other_norms_are_handed_over(p):
    x = drawn(3, 9)
    assert ops.explain("norm", x=x, p=p, dim=1, keepdim=False).implementation == "torch"
    torch.testing.assert_close(ops.norm(x, p, 1), torch.linalg.vector_norm(x, p, 1))


def test_bad_arguments_are_named():
    x = drawn(3, 4)
    for call, error, words in (
        (lambda: ops.sum([1.0]), TypeError, "'x' is a list"),
        (lambda: ops.sum(x, 2), ValueError, "'dim' is 2"),
        (lambda: ops.sum(x, 1.0), TypeError, "'dim' is 1.0"),
        (lambda: ops.sum(x, 1, 1), TypeError, "'keepdim' is 1"),
        (lambda: ops.max(x[:0], 0), ValueError, "no elements along dim=0"),
        (lambda: ops.argmax(x[:0]), ValueError, "no elements"),
        (lambda: ops.norm(x, "two"), TypeError, "'p' is 'two'"),
        (lambda: ops.norm(x[:0], -1.0), ValueError, r"'p' is -1.0 .* \(0, 4\), no elements along dim=None"),
        (lambda: ops.mean(x.int()), TypeError, "dtype int32"),
    ):
        with pytest.raises(error, match=words):
            call()
