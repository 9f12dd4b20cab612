"""Every public function under PyTorch's process-wide settings (default dtype and device, deterministic mode, grad modes), and
with tensors that PyTorch negates when they are read, as arguments and as gradients that come to it."""

import pytest
import torch
import turns
from every_operator import OPERATORS, by_name, drawn, middling

from weft.bench import cases
from weft.operators.launch import Plans

pytestmark = pytest.mark.device


@pytest.fixture
def other_defaults():
    """A default dtype and device that no operator may use for what it allocates, and deterministic algorithms, which fill
    what is not initialised with NaN."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


def results(op, arguments) -> list:
    """Of a call and, where the operator has one, of its gradient."""
    leaves = [arguments[n].requires_grad_() for n in op.differentiable if isinstance(arguments[n], torch.Tensor)]
    outs = cases.tensors(op.public(**arguments))
    wanted = [t for t in outs if t.requires_grad]
    if not (leaves and wanted):
        return outs
    return [*outs, *torch.autograd.grad(wanted, leaves, [torch.full_like(t, 0.5) for t in wanted])]


@pytest.fixture
def usual(request):
    """Arguments drawn twice before any setting changes."""
    op = request.param
    w = middling(op)
    return op, drawn(op, w), drawn(op, w), drawn(op, w)


@pytest.mark.parametrize(
    "usual", [op for op in OPERATORS if turns.has(f"settings {op.name}", 3)], indirect=True, ids=lambda op: op.name
)
def test_defaults_and_grad_modes_change_nothing(usual, request):
    op, for_inference, under_settings, expected = usual
    request.getfixturevalue("other_defaults")
    with torch.inference_mode():
        op.public(**for_inference)  # what is cached here serves the call with gradients after it
    found = results(op, under_settings)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    for got, right in zip(found, results(op, expected), strict=True):
        assert got.dtype == right.dtype and got.device == right.device
        assert torch.equal(got.nan_to_num(), right.nan_to_num())


def lazily(t):
    """The same numbers, whose memory holds the negative (``Tensor.is_neg``)."""
    if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.itemsize < 2:
        return t
    return torch._neg_view(-t.detach())


def same(got, want) -> None:
    for a, b in zip(cases.tensors(got), cases.tensors(want), strict=True):
        assert a is b or torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5, equal_nan=True)


@by_name(OPERATORS)
def test_lazily_negated_arguments(op):
    w = middling(op)
    given, lazy = drawn(op, w), drawn(op, w)
    lazy = {name: lazily(value) for name, value in lazy.items()}
    if not any(isinstance(v, torch.Tensor) and v.is_neg() for v in lazy.values()):
        pytest.skip("takes no floating tensor itself")
    same(op.public(**lazy), op.public(**given))


@pytest.mark.share(4)
@by_name([op for op in OPERATORS if "backward" in op.directions])
def test_lazily_negated_gradients(op):
    w = middling(op)
    found = []
    for change in (lambda g: g, lazily):
        arguments = drawn(op, w)
        leaves = [arguments[n].requires_grad_() for n in op.differentiable if isinstance(arguments[n], torch.Tensor)]
        outs = [t for t in cases.tensors(op.public(**arguments)) if t.requires_grad]
        weights = [torch.linspace(-1, 1, t.numel(), device=t.device).view(t.shape).to(t.dtype) for t in outs]
        found.append(torch.autograd.grad(outs, leaves, [change(g) for g in weights]))
    same(found[1], found[0])


def test_a_plan_refuses_lazy_negation():
    with pytest.raises(NotImplementedError, match="resolve_neg"):
        Plans(lambda x: None).of((lazily(torch.ones(3)),))
