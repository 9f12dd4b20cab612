"""Every public function under PyTorch's process-wide settings: default dtype and device, deterministic mode, grad modes."""

import pytest
import torch
import turns
from every_operator import OPERATORS, drawn, middling

from weft.bench import cases

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
