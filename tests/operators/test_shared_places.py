"""What is written over has a place for each element, and two tensors places of their own: on a CPU as on a GPU."""

from __future__ import annotations

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import weft  # noqa: E402
from weft.operators.call import overlapping, sharing  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize(
    "shape, strides, shared",
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 4), (8, 2), False),
        ((3, 4), (0, 1), True),
        ((1, 4), (0, 1), False),
        ((3, 4), (3, 1), True),
        ((3, 6), (1, 1), True),
        ((0, 4), (0, 1), False),
        ((2, 3, 4), (12, 4, 1), False),
        ((2, 3, 4), (4, 8, 1), False),
        ((2, 3, 4), (3, 8, 1), True),
        ((), (), False),
    ],
)
def test_overlapping(shape, strides, shared):
    x = torch.arange(64.0).as_strided(shape, strides)
    assert overlapping(x) is shared
    assert (x.unique().numel() < x.numel()) is shared


def test_sharing():
    packed = torch.randn(2, 3, 12, 8)
    assert not sharing(packed[:, :, :8], packed[:, :, 8:])
    assert not sharing(packed[..., ::2], packed[..., 1::2])
    assert sharing(packed[:, :, :8], packed[:, :, 7:])
    assert sharing(packed, packed[1:, 1:])
    assert not sharing(packed, packed.clone())
    assert not sharing(packed.bfloat16(), packed[:0].bfloat16())
    assert not sharing(packed, packed[:0])


def test_rotary_embedding_in_place_refuses_what_lies_together():
    packed = torch.randn(2, 3, 12, 8, device=DEVICE)
    angles = torch.randn(3, 4, device=DEVICE)
    tables = angles.cos(), angles.sin()
    q, k = packed[:, :, :8], packed[:, :, 8:]
    expected = weft.ops.rotary_embedding(q.clone(), k.clone(), *tables)
    for together in ((packed, packed), (packed, packed[:, :, :8])):
        with pytest.raises(ValueError, match="arguments 'q' and 'k' that share memory"):
            weft.ops.rotary_embedding(*together, *tables, inplace=True)
    with pytest.raises(ValueError, match=r"argument 'k' of shape \(2, 3, 4, 8\) with strides"):
        weft.ops.rotary_embedding(q, k[:, :, :1].expand(-1, -1, 4, -1), *tables, inplace=True)
    for found, wanted in zip(weft.ops.rotary_embedding(q, k, *tables, inplace=True), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("strides", [(0, 1), (3, 1)])
def test_cross_entropy_in_place_refuses_what_lies_together(strides):
    logits = torch.randn(30, device=DEVICE).as_strided((4, 7), strides).detach().requires_grad_()
    labels = torch.tensor([0, 6, 3, 1], device=DEVICE)
    with pytest.raises(ValueError, match=r"inplace_backward=True and argument 'logits' of shape \(4, 7\) with strides"):
        weft.ops.cross_entropy(logits, labels, inplace_backward=True)
    weft.ops.cross_entropy(logits, labels).backward()
    with torch.no_grad():  # nothing is to be written
        weft.ops.cross_entropy(logits, labels, inplace_backward=True)
