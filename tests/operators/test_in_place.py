"""Results written in place have the tensor's own strides and increment its version for autograd. A tensor whose elements share
memory, and two tensors that overlap, are refused."""

import pytest
import torch
import torch.nn.functional as F
from where import DEVICE

from weft import ops
from weft.operators.layout import overlapping, sharing

pytestmark = pytest.mark.device

PAIRS = {"relu": (ops.relu, torch.relu), "silu": (ops.silu, F.silu), "gelu": (ops.gelu, F.gelu)}
VIEWS = {
    "columns": lambda b: b[:, :3], "every other column": lambda b: b[:, ::2], "every other row": lambda b: b[::2],
    "transposed": lambda b: b.t(), "one column": lambda b: b[:, 3],
    "three dimensions": lambda b: b.view(2, 2, 8)[:, :, 1:5],
    "no rows of one stride": lambda b: b.view(2, 2, 8).permute(1, 2, 0)[:, ::3], "all": lambda b: b,
}  # fmt: skip


def numbers():
    return torch.arange(-16.0, 16.0, device=DEVICE).view(4, 8)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_view_alone_changes(name, view):
    ours, theirs = PAIRS[name]
    got, want = numbers(), numbers()
    out = ours(VIEWS[view](got), inplace=True)
    place = VIEWS[view](want)
    place.copy_(theirs(place))
    torch.testing.assert_close(got, want)
    assert out.untyped_storage().data_ptr() == got.untyped_storage().data_ptr()


@pytest.mark.parametrize("view", VIEWS)
def test_gradients_through_a_view(view):
    dy = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = []
    for relu in (lambda x: ops.relu(x, inplace=True), torch.relu_):
        x = numbers().requires_grad_()
        y = x * 1
        relu(VIEWS[view](y))
        y.backward(dy)
        found.append((y.detach(), x.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", PAIRS)
def test_what_must_not_be_written_is_not(name):
    ours, _ = PAIRS[name]
    with pytest.raises(RuntimeError, match="single memory location"):
        ours(torch.randn(3, 1, device=DEVICE).expand(3, 4), inplace=True)
    leaf = numbers().clone().requires_grad_()
    for x in (leaf, leaf[1:]):
        with pytest.raises(ValueError, match=r"inplace=True overwrites 'x', .*; expected inplace=False"):
            ours(x, inplace=True)
    with pytest.raises(TypeError, match="'inplace' is 'yes'; expected True or False"):
        ours(leaf, inplace="yes")
    assert torch.equal(leaf, numbers())
    with torch.no_grad():
        assert ours(leaf, inplace=True).min() > -1


@pytest.mark.parametrize("name", PAIRS)
def test_a_gradient_that_needs_what_was_overwritten_says_so(name):
    a, w = torch.ones(3, device=DEVICE, requires_grad=True), torch.ones(3, device=DEVICE)
    y = a * w
    PAIRS[name][0](w, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["silu", "gelu", "swiglu"])
def test_gradients_of_any_strides_come_back(name):
    """Of a transposed result, and of channels last."""
    x, other = (torch.randn(2, 5, 8, 3, device=DEVICE, requires_grad=True) for _ in range(2))
    more = (other,) if name == "swiglu" else ()
    formula = {"silu": F.silu, "gelu": F.gelu, "swiglu": lambda a, b: F.silu(a) * b}[name]
    for order in ((0, 2, 1, 3), (0, 2, 3, 1), (3, 2, 1, 0)):
        found = []
        for function in (getattr(ops, name), formula):
            y = function(x, *more).permute(order).contiguous().square().sum()
            found.append(torch.autograd.grad(y, (x, *more)))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("shape, strides, shared", [
    ((3, 4), (4, 1), False), ((3, 4), (1, 3), False), ((3, 4), (8, 2), False), ((3, 4), (0, 1), True),
    ((1, 4), (0, 1), False), ((3, 4), (3, 1), True), ((3, 6), (1, 1), True), ((0, 4), (0, 1), False),
    ((2, 3, 4), (12, 4, 1), False), ((2, 3, 4), (4, 8, 1), False), ((2, 3, 4), (3, 8, 1), True), ((), (), False),
])  # fmt: skip
def test_overlapping(shape, strides, shared):
    x = torch.arange(64.0).as_strided(shape, strides)
    assert overlapping(x) is shared and (x.unique().numel() < x.numel()) is shared


def test_sharing():
    packed = torch.randn(2, 3, 12, 8)
    assert not sharing(packed[:, :, :8], packed[:, :, 8:])
    assert not sharing(packed[..., ::2], packed[..., 1::2]) and sharing(packed[:, :, :8], packed[:, :, 7:])
    assert sharing(packed, packed[1:, 1:]) and not sharing(packed, packed.clone())
    assert not sharing(packed.bfloat16(), packed[:0].bfloat16()) and not sharing(packed, packed[:0])


def test_rotary_embedding_in_place_refuses_what_lies_together():
    packed = torch.randn(2, 3, 12, 8, device=DEVICE)
    angles = torch.randn(3, 4, device=DEVICE)
    tables = angles.cos(), angles.sin()
    q, k = packed[:, :, :8], packed[:, :, 8:]
    expected = ops.rotary_embedding(q.clone(), k.clone(), *tables)
    for together in ((packed, packed), (packed, packed[:, :, :8])):
        with pytest.raises(ValueError, match="arguments 'q' and 'k' that share memory"):
            ops.rotary_embedding(*together, *tables, inplace=True)
    with pytest.raises(ValueError, match=r"argument 'k' of shape \(2, 3, 4, 8\) with strides"):
        ops.rotary_embedding(q, k[:, :, :1].expand(-1, -1, 4, -1), *tables, inplace=True)
    torch.testing.assert_close(ops.rotary_embedding(q, k, *tables, inplace=True), expected)


@pytest.mark.parametrize("strides", [(0, 1), (3, 1)])
def test_cross_entropy_in_place_refuses_what_lies_together(strides):
    logits = torch.randn(30, device=DEVICE).as_strided((4, 7), strides).detach().requires_grad_()
    labels = torch.tensor([0, 6, 3, 1], device=DEVICE)
    with pytest.raises(ValueError, match=r"inplace_backward=True and argument 'logits' of shape \(4, 7\) with strides"):
        ops.cross_entropy(logits, labels, inplace_backward=True)
    ops.cross_entropy(logits, labels).backward()
    with torch.no_grad():  # nothing is to be written
        ops.cross_entropy(logits, labels, inplace_backward=True)
