"""Which tensors are copied because their rows lie side by side, and the copy under autograd."""

import pytest
import torch
from where import DEVICE

from weft import ops
from weft.operators.contiguous import by_rows, contiguous, only_some, side_by_side

pytestmark = pytest.mark.device


def numbered(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=DEVICE).view(shape).to(dtype)


VIEWS = {
    "contiguous": (lambda: numbered(6, 10), False),
    "transposed": (lambda: numbered(10, 6).t(), True),
    "columns further apart than all rows": (lambda: numbered(10, 7)[:, :6].t(), True),
    "sliced": (lambda: numbered(6, 12)[:, 1:11], False),
    "every other element": (lambda: numbered(6, 20)[:, ::2], False),
    "expanded": (lambda: numbered(1, 10).expand(6, 10), False),
    "one row": (lambda: numbered(10, 1).t(), False),
    "a batch, transposed": (lambda: numbered(2, 10, 6).mT, False),  # of no one stride
    "all rows of a batch": (lambda: numbered(10, 2, 6).permute(1, 2, 0), True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", VIEWS)
def test_copies_have_the_elements_of_any_view(name, dtype):
    make, beside = VIEWS[name]
    t = make().to(dtype=dtype).as_strided(make().shape, make().stride()) if name == "transposed" else make()
    assert side_by_side(t) == beside
    copy = contiguous(t)
    assert copy.is_contiguous() and torch.equal(copy, t)
    assert by_rows(t).is_contiguous() == (beside or t.is_contiguous() or name.startswith("a batch"))


def test_the_copy_passes_gradients_on():
    x = numbered(10, 6).requires_grad_()
    factor = numbered(6, 10)
    (dx,) = torch.autograd.grad((by_rows(x.t()) * factor).sum(), x)
    assert torch.equal(dx, factor.t())


def test_only_those_beside_others_are_copied():
    plain, beside = numbered(6, 10), numbered(10, 6).t()
    assert only_some(beside, plain, beside) == [True, False, True]
    assert only_some(beside, beside) == only_some(plain, plain) == [False, False]


@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 5, 33)])
def test_masked_rows_side_by_side_are_those_of_a_copy(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE).mT.contiguous().mT
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for name, mask in (("causal_softmax", ()), ("masked_softmax", (dy > 0.3,))):
        assert ops.explain(name, x, *mask).reason.startswith("of a contiguous copy")
        results = []
        for leaf in (x.detach().requires_grad_(), x.contiguous().requires_grad_()):
            y = getattr(ops, name)(leaf, *mask)
            results.append((y, *torch.autograd.grad(y, leaf, dy)))
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)
