"""Projections made together, and one behind a gated activation, against the layers called one by one."""

import pytest
import torch
from where import DEVICE

from weft import nn, ops
from weft.nn import projections
from weft.nn.projections import GEGLU, GEGLU_TANH, SWIGLU

pytestmark = pytest.mark.device


class Layer(torch.nn.Module):
    """Three projections of one input, two of them gated, and one behind; ``apart`` calls PyTorch's alone."""

    def __init__(self, gated, make=torch.nn.Linear, bias=True):
        super().__init__()
        self.gated = gated
        self.three = torch.nn.ModuleList(make(6, n, bias=bias) for n in (5, 5, 3))
        self.last = make(5, 6, bias=bias)

    def forward(self, x, apart=False):
        if apart:
            gate, up, other = (layer(x) for layer in self.three)
            call, form = self.gated
            reference = call.formula.reference if form is None else call.of(form).reference
            return self.last(reference(gate, up)), other
        *halves, other = projections.projected(x, *self.three)
        return projections.gated_projection(tuple(halves), self.last, self.gated), other


def made(gated=SWIGLU, **options):
    torch.manual_seed(0)
    return Layer(gated, **options).to(DEVICE), torch.randn(2, 4, 6, device=DEVICE)


def gradients(layer, x, **call):
    x = x.clone().requires_grad_()
    y, other = layer(x, **call)
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [y, other, *torch.autograd.grad(y.cos().sum() + other.square().sum(), wanted)]


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", [SWIGLU, GEGLU, GEGLU_TANH], ids=["swiglu", "geglu", "tanh"])
@pytest.mark.parametrize("make", [torch.nn.Linear, nn.Linear], ids=["torch", "weft"])
@pytest.mark.parametrize("bias", [False, True])
def test_results_and_gradients_are_those_of_the_layers(gated, make, bias):
    layer, x = made(gated, make=make, bias=bias)
    close(gradients(layer, x), gradients(layer, x, apart=True))
    for frozen in (layer.last.weight, layer.three[0].weight):
        frozen.requires_grad_(False)
    close(gradients(layer, x), gradients(layer, x, apart=True))


def test_the_activation_is_not_kept():
    layer, x = made()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y, _ = layer(x.requires_grad_())
    a = ops.swiglu(*(one(x) for one in layer.three[:2]))
    assert kept and not any(t.shape == a.shape and torch.allclose(t, a) for t in kept)
    y.sum().backward(retain_graph=True)
    before = x.grad.clone()
    y.sum().backward()  # once more, of the same graph
    close([x.grad], [2 * before])


@pytest.mark.parametrize("change", ["hook", "forward", "half", "subclass", "autocast"])
def test_layers_that_do_more_than_multiply_are_called(change):
    layer, x = made()
    plain, _ = made()
    calls = []
    if change == "hook":
        layer.three[1].register_forward_hook(lambda module, args, y: calls.append(1))
        layer.last.register_forward_pre_hook(lambda module, args: calls.append(1))
    elif change == "forward":
        for one in (layer.three[1], layer.last):
            one.forward = lambda x, one=one: calls.append(1) or type(one).forward(one, x)
    elif change == "subclass":

        class Counted(torch.nn.Linear):
            def forward(self, x):
                calls.append(1)
                return super().forward(x)

        layer.three[1].__class__ = layer.last.__class__ = Counted
    if change in ("half", "autocast"):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=change == "autocast"):
            x = x.bfloat16() if change == "half" else x
            layer = layer.bfloat16() if change == "half" else layer
            assert projections.projected_at_once(x.requires_grad_(), *layer.three) == (change == "half")
        return
    close(gradients(layer, x), gradients(plain, x))
    assert len(calls) == 2


def test_second_gradients():
    layer, x = made()

    def second(**call):
        leaf = x.clone().requires_grad_()
        y, other = layer(leaf, **call)
        first = torch.autograd.grad((y.sin() + other.sum(-1, True).cos()).sum(), leaf, create_graph=True)
        return torch.autograd.grad(first[0].square().sum(), [leaf, *layer.parameters()], allow_unused=True)

    found, expected = second(), second(apart=True)
    assert [g is None for g in found] == [g is None for g in expected]
    close([g for g in found if g is not None], [g for g in expected if g is not None])
