"""Tensors that PyTorch negates when they are read (``Tensor.is_neg``), whose memory holds the negative: as arguments of every
public function, and as gradients that come to it."""

import pytest
import torch
from every_operator import OPERATORS, by_name, drawn, middling

from weft.bench import cases
from weft.operators.launch import Plans

pytestmark = pytest.mark.device


def lazily(t):
    """The same numbers, negated in memory."""
    if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.itemsize < 2:
        return t
    return torch._neg_view(-t.detach())


def same(got, want) -> None:
    for a, b in zip(cases.tensors(got), cases.tensors(want), strict=True):
        assert a is b or torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5, equal_nan=True)


@by_name(OPERATORS)
def test_arguments(op):
    w = middling(op)
    given, lazy = drawn(op, w), drawn(op, w)
    lazy = {name: lazily(value) for name, value in lazy.items()}
    if not any(isinstance(v, torch.Tensor) and v.is_neg() for v in lazy.values()):
        pytest.skip("takes no floating tensor itself")
    same(op.public(**lazy), op.public(**given))


@by_name([op for op in OPERATORS if "backward" in op.directions])
def test_gradients(op):
    w = middling(op)
    found = []
    for change in (lambda g: g, lazily):
        arguments = drawn(op, w)
        leaves = [arguments[n].requires_grad_() for n in op.differentiable if isinstance(arguments[n], torch.Tensor)]
        outs = [t for t in cases.tensors(op.public(**arguments)) if t.requires_grad]
        weights = [torch.linspace(-1, 1, t.numel(), device=t.device).view(t.shape).to(t.dtype) for t in outs]
        found.append(torch.autograd.grad(outs, leaves, [change(g) for g in weights]))
    same(found[1], found[0])


def test_a_plan_refuses_them():
    with pytest.raises(NotImplementedError, match="resolve_neg"):
        Plans(lambda x: None).of((lazily(torch.ones(3)),))
