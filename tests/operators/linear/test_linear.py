"""A linear layer with its epilogue where what is asked of every operator does not reach: leading dimensions, what is kept for a
gradient, which implementation is taken, launches on Hopper's main loop, wrong arguments."""

import functools

import pytest
import torch
from hopper_on_cpu import OnGpu
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import meta, random
from where import DEVICE

from weft import ops, registry
from weft.operators.launch import compiling_for
from weft.operators.linear import dispatch
from weft.operators.linear.activations import ACTIVATIONS
from weft.operators.linear.dispatch import LinearCall
from weft.operators.linear.reference import reference

pytestmark = pytest.mark.device
kernel = registry.get("linear").find("triton").function
NAMES = (None, *ACTIVATIONS)
BF16, FP32 = torch.bfloat16, torch.float32


def rows(n: int, activation: str | None) -> int:
    return 2 * n if activation is not None and ACTIVATIONS[activation].gated else n


def linear_call(*operands):
    tensors, options = dispatch.arguments(*operands)
    return LinearCall(*tensors, *options)


@pytest.mark.parametrize("lead", [(), (2, 3), (5, 1), (0, 3)])
@pytest.mark.parametrize("function", [kernel, ops.linear])
def test_leading_dimensions_are_rows(function, lead):
    x, weight, bias, residual = random(*lead, 24), random(16, 24, seed=1), random(16, seed=2), random(*lead, 16, seed=3)
    got = function(x, weight, bias, residual, activation="silu")
    assert got.shape == (*lead, 16)
    torch.testing.assert_close(got, reference(x, weight, bias, residual, activation="silu"))


def test_of_what_is_not_rows_nothing_is_copied():
    x, weight = random(3, 5, 24).transpose(0, 1), random(16, 24, seed=1)
    assert "copy" in ops.explain("linear", x, weight).reason or DEVICE == "cpu"
    with pytest.raises(NotImplementedError, match="copy would be needed"):
        kernel(x, weight)
    torch.testing.assert_close(ops.linear(x, weight), torch.nn.functional.linear(x, weight))


def test_the_gates_rows_come_first():
    x, gate, up = torch.eye(4, device=DEVICE), random(8, 4), random(8, 4, seed=1)
    got = kernel(x, torch.cat([gate, up]), activation="swiglu")
    torch.testing.assert_close(got, (torch.nn.functional.silu(gate) * up).t())


@pytest.mark.parametrize("activation", NAMES)
def test_a_gradient_keeps_what_the_activation_was_given_and_no_more(activation):
    """Of relu its result; of none nothing."""
    x, weight = random(6, 8).requires_grad_(), random(rows(16, activation), 8, seed=1).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = kernel(x, weight, activation=activation)
    more = [t.shape for t in kept if t.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
    assert more == ([] if activation is None else [(6, rows(16, activation))])
    assert (activation == "relu") == any(t.data_ptr() == y.data_ptr() for t in kept)


def test_a_residual_alone_wants_a_gradient():
    x, weight, residual = random(6, 8), random(16, 8, seed=1), random(6, 16, seed=2).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = kernel(x, weight, None, residual, activation="gelu")
    (found,) = torch.autograd.grad(y.sum(), residual)
    assert not kept and bool((found == 1).all())


def test_of_a_weight_stored_by_columns_so_is_the_gradient():
    x, weight = random(6, 8).requires_grad_(), random(8, 16, seed=1).t().requires_grad_()
    (found,) = torch.autograd.grad(kernel(x, weight, activation="silu").sum(), weight)
    (want,) = torch.autograd.grad(reference(x, weight, activation="silu").sum(), weight)
    assert found.stride() == weight.stride()
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize(("m", "added"), [(6, False), (6, True), (0, False)])
def test_on_hopper_what_is_kept_is_a_product_of_its_own(monkeypatch, activation, m, added):
    """PyTorch emulates the main loop's launches; the element-wise kernels are their own."""

    class MainLoop:
        @staticmethod
        def of(tensors, biased, added, activation):
            def launch(x, weight, bias, residual, y, pre):
                others = (bias if biased else None, residual if added else None)
                y.copy_(reference(x, weight, *others, activation=activation))

            return launch

    monkeypatch.setattr(dispatch.FORWARD, "kernel", lambda name: MainLoop)
    monkeypatch.setattr(dispatch, "product", torch.mm)
    x, weight, bias = random(m, 8), random(rows(16, activation), 8, seed=1), random(rows(16, activation), seed=2)
    leaves = [t.requires_grad_() for t in (x, weight, bias, *([random(m, 16, seed=3)] if added else []))]
    call = (*leaves, *([] if added else [None]))
    y, dy = dispatch.Linear.apply("cuda", activation, *call), random(m, 16, seed=4)
    want = reference(*call, activation=activation)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, leaves, dy))


@pytest.mark.parametrize("stored", ["rows", "columns"])
def test_a_launch_on_hopper_maps_both_halves_of_the_weight(launched, stored):
    weight = torch.empty(128, 64, dtype=BF16) if stored == "rows" else torch.empty(64, 128, dtype=BF16).t()
    x, residual, y, bias = (torch.empty(s, dtype=BF16) for s in ((8, 64), (8, 64), (8, 64), (128,)))
    x, weight, residual, y, bias = (t.as_subclass(OnGpu) for t in (x, weight, residual, y, bias))
    made = dispatch.HopperLaunch(linear_call(x, weight, bias, residual, "geglu_tanh"))
    assert "true, GELU_TANH, true, true, false" in made.plan.launch.expression  # bias, residual, gate, no amax
    made(x, weight, bias, residual, y, y)
    plan, tensors = launched[0]
    half = 64 * weight.stride(0) * 2
    mapped = ((x, 0), (weight, 0), (weight, half), (residual, 0), (y, 0))
    assert [m.opaque[0] for m in plan.scalars[:5]] == [t.data_ptr() + more for t, more in mapped]
    assert tensors[2].data_ptr() == bias.data_ptr()
    plain = dispatch.HopperLaunch(linear_call(x, weight[:64], None, None, None))
    assert "false, NONE, false, false, false" in plain.plan.launch.expression


@pytest.mark.parametrize(("sm", "call", "named", "taken", "why"), [
    (90, (meta(8, 8, 4096), meta(128, 4096)), {}, "torch", "skinny_matmul"),
    (90, (meta(1024, 4096), meta(1024, 4096)), {}, "cuda", ""),
    (90, (meta(96, 4096), meta(128, 4096)), {}, "torch", ""),
    (90, (meta(1024, 4096), meta(1032, 4096)), {}, "torch", ""),
    (90, (meta(1024, 4096), meta(1032, 4096)), {"activation": "gelu"}, "cuda", ""),
    (90, (meta(8, 64, 4096), meta(128, 4096), meta(128)), {"activation": "swiglu"}, "cuda", ""),
    (90, (meta(96, 4096), meta(130, 4096)), {}, "torch", "16 bytes"),
    (90, (meta(96, 1000), meta(130, 1000)), {}, "triton", "16 bytes"),
    (90, (meta(96, 4096), meta(144, 4096)), {"activation": "reglu"}, "cuda", ""),
    (90, (meta(96, 4096), meta(136, 4096)), {"activation": "reglu"}, "epilogue", "68 elements"),
    (90, (meta(96, 4096), meta(128, 4096), meta(256)[::2]), {}, "torch", "gaps"),
    (90, (meta(96, 4096), meta(128, 4096), None, meta(96, 256)[:, ::2]), {}, "epilogue", "'residual'"),
    (90, (meta(96, 64, dtype=FP32), meta(128, 64, dtype=FP32)), {}, "torch", "float32"),
    (90, (meta(96, 64, dtype=FP32), meta(128, 64, dtype=FP32)), {"activation": "silu"}, "epilogue", "float32"),
    (80, (meta(96, 4096), meta(128, 4096)), {}, "torch", "sm_80"),
    (80, (meta(96, 512), meta(128, 512)), {}, "triton", "sm_80"),
    (90, (meta(0, 512), meta(128, 512)), {}, "torch", None),
])  # fmt: skip
def test_which_implementation_is_taken(sm, call, named, taken, why):
    """``why``: what Hopper's main loop says against the call."""
    with compiling_for(sm, lambda *kernel: None):
        for direction in ("forward", "backward"):
            assert ops.explain("linear", *call, **named, direction=direction).implementation == taken
        if why not in (None, "skinny_matmul"):
            call = (*call, *(None,) * (4 - len(call)))
            against = dispatch.hopper_unsupported(linear_call(*call, named.get("activation")))
            assert why in against and bool(why) == bool(against)


GOOD = {"x": random(4, 8), "weight": random(16, 8), "bias": random(16), "residual": random(4, 16)}
wrong = functools.partial(bad, "linear", **GOOD)
REFUSED = [
    wrong(TypeError, "'x' is a list", x=[1.0]),
    wrong(TypeError, "'x' has dtype int32", x=random(4, 8).int()),
    wrong(ValueError, "'x' is a scalar", x=torch.ones((), device=DEVICE)),
    wrong(TypeError, "'weight' has dtype float16", weight=random(16, 8).half()),
    wrong(ValueError, "'weight' has shape (16, 9); [N, 8]", weight=random(16, 9)),
    wrong(ValueError, "[N, 8]", weight=random(8)),
    wrong(ValueError, "[2N, 8] (gate, then up", weight=random(15, 8), activation="swiglu"),
    wrong(ValueError, "'bias' has shape (15,); (16,)", bias=random(15)),
    wrong(TypeError, "'bias' has dtype float16", bias=random(16).half()),
    wrong(ValueError, "'residual' has shape (4, 16); (4, 8)", activation="swiglu"),
    wrong(ValueError, "not broadcast", residual=random(16)),
    wrong(ValueError, "'activation' is 'swish'; expected 'relu', 'silu'", activation="swish"),
    wrong(ValueError, "'activation' is 3", activation=3),
]
