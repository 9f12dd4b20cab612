"""Every differentiable operator under ``torch.func`` and forward-mode differentiation: PyTorch's rules hold, or it says that
there are none; never a tangent that is silently zero."""

import threading

import pytest
import torch
import turns
from torch.autograd import forward_ad
from where import DEVICE, ROOT, python

from weft import ops, registry
from weft.bench import cases
from weft.operators.autograd import _one_by_one

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]

OPERATORS = [op for op in registry.select() if op.public and "backward" in op.directions]


def jvp(function, points, tangents):
    return torch.func.jvp(function, points, tangents)[1]


def duals(function, points, tangents):
    with forward_ad.dual_level():
        outputs = function(*map(forward_ad.make_dual, points, tangents))
        return [forward_ad.unpack_dual(out).tangent for out in outputs]


def grad(function, points, tangents):
    def total(*points):
        return sum(out.float().sum() for out in function(*points))

    return torch.func.grad(total, argnums=tuple(range(len(points))))(*points)


def ordinary(op):
    """A small point of random numbers."""
    points = [w for w in op.cases("verify", ("fp32",)) if min(w.axes.values()) > 1 and max(w.axes.values()) <= 300]
    plain = [w for w in points if not w.option("layout", "") and not w.option("values", "")]
    return (plain or points)[0]


@pytest.mark.parametrize("way", [jvp, duals, grad])
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_derivatives_are_those_of_the_reference(op, way):
    g = torch.Generator(DEVICE).manual_seed(0)
    arguments = op.inputs(ordinary(op), g, DEVICE)
    names = [name for name in op.differentiable if isinstance(arguments[name], torch.Tensor)]
    points = tuple(arguments.pop(name) for name in names)
    tangents = tuple(torch.randn(p.shape, generator=g, device=DEVICE, dtype=p.dtype) for p in points)

    def of(function):
        def floats(*points):
            out = function(**dict(zip(names, points, strict=True)), **arguments)
            return [t for t in cases.tensors(out) if t.is_floating_point()]

        return floats

    try:
        want = way(of(op.reference), points, tangents)
    except RuntimeError as error:  # PyTorch has no rule: neither have we, and say so
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            way(of(op.public), points, tangents)
        return
    torch.testing.assert_close(way(of(op.public), points, tangents), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("op", [op for op in OPERATORS if turns.has(f"batch {op.name}", 3)], ids=lambda op: op.name)
def test_a_batch_of_gradients_gives_those_of_each(op):
    """``is_grads_batched``, with which PyTorch takes vectorised Jacobians."""
    arguments = op.inputs(ordinary(op), torch.Generator(DEVICE).manual_seed(0), DEVICE)
    leaves = [arguments[name].requires_grad_() for name in op.differentiable if torch.is_tensor(arguments[name])]
    outs = [t for t in cases.tensors(op.public(**arguments)) if t.requires_grad]
    batch = [torch.linspace(-1, 1, 2 * t.numel(), device=DEVICE).view(2, *t.shape) for t in outs]
    together = torch.autograd.grad(outs, leaves, batch, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        for got, right in zip(
            together, torch.autograd.grad(outs, leaves, [g[i] for g in batch], retain_graph=True), strict=True
        ):
            torch.testing.assert_close(got[i], right)


def test_a_batch_is_found_in_a_thread_that_does_not_know_of_it():
    """As that in which a GPU's gradients are computed."""
    batch, found = torch._add_batch_dim(torch.arange(6.0).view(2, 3), 0, 1), []
    thread = threading.Thread(target=lambda: found.extend(_one_by_one(lambda _, g: (2 * g, None), None, (batch,))))
    thread.start()
    thread.join()
    assert found[1] is None and torch._remove_batch_dim(found[0], 1, 2, 0).tolist() == [[0, 2, 4], [6, 8, 10]]


@pytest.mark.share(2)
def test_dtensors_are_taken_or_refused_by_name(tmp_path):
    script = str(ROOT / "tests/operators/sharded_operators.py")
    done = python(script, str(tmp_path / "meeting"), timeout=300, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


def test_explain_says_why_it_is_pytorch():
    def reason(x):
        reasons.append(ops.explain("softmax", x).reason)
        return x

    reasons = []
    torch.func.vmap(reason)(torch.randn(2, 3, 4, device=DEVICE))
    assert "torch.func" in reasons[0] or "CPU" in reasons[0]
