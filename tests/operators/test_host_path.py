"""What an eager call of few elements does on the host once it has been decided: that is what ``weft bench --host`` times on a
GPU. Here CPU tensors take that path, and what it does is counted."""

import where  # isort: skip  (decides the device, and sets the interpreter before kernels are imported)
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft import registry
from weft.bench import cases, host
from weft.operators import call, launch
from weft.operators.dropout import dropout
from weft.operators.loss import kernels as loss_kernels
from weft.operators.scan import dispatch as scan_dispatch
from weft.operators.softmax import softmax

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, from the interpreter: -inf - -inf in padding
    pytest.mark.skipif(where.DEVICE == "cuda", reason="on a GPU `weft bench --host` takes this path"),
]
NAMES = ("cross_entropy", "cumsum", "dropout")
# what a kernel takes at most, which is less in the interpreter
ON_A_GPU = [(loss_kernels, name, most) for name, most in (("SINGLE_TILE", 8192), ("SINGLE_MOST", 32768))]
ON_A_GPU += [(scan_dispatch, name, most) for name, most in (("ONE_TILE", 16384), ("WALKED", 32768))]


class Operations(TorchDispatchMode):
    """The PyTorch operators that reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """CPU tensors pass for CUDA's in the test for the eager path and in what remembers plans."""

    def of(plans, tensors, *options):
        key = launch._key(tensors, options)
        if key not in plans.known:
            plans.known[key] = plans.build(*tensors, *options)
        return plans.known[key]

    def eager(*tensors, gradient=False, autocast=False):
        return gradient or not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))

    for plans in launch.Plans.all:
        monkeypatch.setattr(plans, "known", {})
    monkeypatch.setattr(launch.Plans, "of", of)
    for name in (*NAMES, "softmax"):
        registry.get(name)  # so that its modules are there
    real = call.eager
    for module in [m for name, m in sys.modules.items() if name.startswith("weft.operators.")]:
        if getattr(module, "eager", None) is real:
            monkeypatch.setattr(module, "eager", eager)


def drawn(name, *, gradient):
    op = registry.get(name)
    arguments = op.inputs(host.small(op), torch.Generator().manual_seed(3), "cpu")
    if gradient:
        arguments = {n: cases.leaf(a) if n in op.differentiable else a for n, a in arguments.items()}
    return op, arguments


def refuse(*_):
    raise AssertionError("a call that is known was decided again")


@pytest.fixture
def ready(as_on_a_gpu, monkeypatch, request):
    """A call whose plans are known and may not be made again, with its launches left out."""
    for module, name, value in ON_A_GPU:
        monkeypatch.setattr(module, name, value)
    op, arguments = drawn(request.param[0], gradient=request.param[1])
    monkeypatch.setattr(launch.Plan, "_first", lambda self, *tensors: setattr(self, "_launch", lambda *tensors: None))
    monkeypatch.setattr(dropout, "draw", lambda device: (5, 0))  # a GPU's generator says it
    op.public(**arguments)
    for plans in launch.Plans.all:
        monkeypatch.setattr(plans, "build", refuse)
    return lambda: op.public(**arguments)


CASES = [(name, gradient) for name in NAMES for gradient in (False, True)]
each_case = pytest.mark.parametrize("ready", CASES, ids=[f"{n}{'-gradient' * g}" for n, g in CASES], indirect=True)


@each_case
def test_it_launches_once_and_allocates_what_it_returns(ready, request):
    name, gradient = request.node.callspec.params["ready"]
    with host._recording() as launches, Operations() as operations:
        ready()
    allocated = [n for n in operations.names if n.startswith(("empty", "new_empty"))]
    assert len(launches) == 1
    assert len(allocated) == (2 if name == "cross_entropy" and gradient else 1)  # the loss, and the gradient with it
    assert set(operations.names) - set(allocated) <= {"detach", "alias", "view"}  # autograd's, for what it saves


@each_case
def test_it_makes_few_calls_in_python(ready, request):
    """Each costs a tenth of a microsecond or more: arguments checked again, options built anew, a second look-up show here."""
    count = 0

    def counting(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        ready()
    finally:
        sys.setprofile(None)
    _, gradient = request.node.callspec.params["ready"]
    assert count <= (60 if gradient else 25)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", ["cross_entropy", "cumsum"])
def test_it_computes_what_is_asked(as_on_a_gpu, name, gradient):
    op, arguments = drawn(name, gradient=gradient)
    if name == "cumsum":
        arguments["x"] = arguments["x"].detach()[:, :600].clone().requires_grad_(gradient)
    else:
        arguments["logits"] = arguments["logits"].detach()[:9, :40].clone().requires_grad_(gradient)
        arguments["target"] = arguments["target"][:9] % 40
    got = [op.public(**arguments) for _ in range(2)]  # the second time from what the first remembered
    want = op.reference(**arguments)
    for y in got:
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
        assert y.requires_grad is gradient
    if gradient:
        leaf = next(t for t in cases.tensors(arguments) if t.requires_grad)
        dy = torch.randint_like(want, -8, 9)  # their sums are exact
        torch.testing.assert_close(*(torch.autograd.grad(y, leaf, dy)[0] for y in (got[1], want)))


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 33)])
def test_softmax_has_gradients_of_both_orders(as_on_a_gpu, monkeypatch, shape):
    taken, node = [], softmax.SoftmaxFunction
    monkeypatch.setattr(node, "apply", lambda *a, apply=node.apply: (taken.append(1), apply(*a))[1])
    g = torch.Generator().manual_seed(1)
    x, dy = torch.randn(shape, generator=g).requires_grad_(), torch.randn(shape, generator=g)
    op, found = registry.get("softmax"), []
    for function in (op.public, op.reference):
        y = function(x, -1)
        (first,) = torch.autograd.grad(y, x, dy, create_graph=True)
        found.append((y, first, *torch.autograd.grad(first.square().sum(), x)))
    torch.testing.assert_close(*found)
    assert len(taken) == 1


def test_host_times_are_taken_in_turn_and_compared_within_a_round(monkeypatch):
    order, slower = [], iter([1.0] * 5 + [3.0] * 100)

    def timed(call, calls):
        order.append(call)
        if len(order) % len(names) == 1:
            timed.factor = next(slower)  # a machine that is slower from the sixth round on
        return timed.factor * (1 + (len(order) - 1) % len(names))

    names = ["weft.ops", "torch", host.BARE]
    monkeypatch.setattr(host, "_calls", lambda op, arguments: {name: name for name in names})
    monkeypatch.setattr(host, "host_time_us", timed)
    context = {"gpu": "G", "device": "cpu", "machine": {}, "versions": {}, "commit": "", "run": "", "time": ""}
    found = list(host.measure(SimpleNamespace(device="cpu", context=lambda: context), [registry.get("relu")]))
    assert order == names * host.ROUNDS and [m.time_us for m in found] == [1, 2, 3]
    assert [m.details["ratio_to_bare_launch"] for m in found] == [0.333, 0.667, 1]


def test_what_pytorch_cannot_do_is_timed_without_it():
    op = registry.get("adamw_8bit")
    calls = host._calls(op, op.inputs(host.small(op), torch.Generator().manual_seed(0), "cpu"))
    assert not any(name.startswith("torch") for name in calls)
    calls["weft.ops"]()
