"""The eager path with a gradient, which by itself needs a GPU: here softmax's is taken in the interpreter."""

from __future__ import annotations

import where  # isort: skip  (decides the device, and sets the interpreter before kernels are imported)
import pytest
import torch

from weft import registry
from weft.operators.softmax import softmax

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, from the interpreter: -inf - -inf in padding
    pytest.mark.skipif(where.DEVICE == "cuda", reason="on a GPU the operators' own tests take this path"),
]


@pytest.fixture
def taken(monkeypatch):
    """Lets CPU tensors take the eager path, and counts how often an eager gradient node is made."""
    counted = []
    monkeypatch.setattr(softmax, "eager", lambda *t, gradient=False: gradient or not any(x.requires_grad for x in t))
    function = softmax.SoftmaxFunction
    monkeypatch.setattr(function, "apply", lambda *a, apply=function.apply: (counted.append(1), apply(*a))[1])
    return counted


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 33)])
def test_gradients_are_the_references(taken, shape):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=g).requires_grad_()
    weight = torch.randn(shape[-1:], generator=g).requires_grad_()
    for name, arguments in (("softmax", (x, -1)), ("rms_norm", (x, weight, 1e-6))):
        op = registry.get(name)
        leaves = [a for a in arguments if isinstance(a, torch.Tensor)]
        out, want = op.public(*arguments), op.reference(*arguments)
        dy = torch.randn(shape, generator=g)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(torch.autograd.grad(out, leaves, dy), torch.autograd.grad(want, leaves, dy))
    assert len(taken) == 1  # the other operators have no second path


def test_softmax_has_a_second_gradient(taken):
    x = torch.randn(3, 7, dtype=torch.float32).requires_grad_()
    dy = torch.randn(3, 7)
    op = registry.get("softmax")
    second = []
    for function in (op.public, op.reference):
        (first,) = torch.autograd.grad(function(x, -1), x, dy, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*second)
    assert taken
