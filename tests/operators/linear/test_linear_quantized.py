"""A linear layer that leaves 8-bit codes: the codes of ``quantize``, the largest value, two launches on Hopper, wrong
arguments."""

import functools

import pytest
import torch
from hopper_on_cpu import OnGpu
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import random
from where import DEVICE

from weft import ops, registry
from weft.operators.launch import compiling_for
from weft.operators.linear import linear_quantized as module
from weft.operators.linear.dispatch import QUANTIZED, HopperLaunch, QuantizedCall, QuantizedLaunch
from weft.operators.linear.reference import reference
from weft.operators.quantization.formats import format_of
from weft.operators.quantization.quantize import reference as quantized

pytestmark = pytest.mark.device
kernel = registry.get("linear_quantized").find("triton").function
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_quantize(dtype):
    """Of a product with the unit matrix, which is exact: ordinary numbers, ties, subnormal ones, what saturates, infinities."""
    y = torch.cat([random(20, 16) * 4.0**k for k in range(-9, 5)])
    y[0, :4] = torch.tensor([float("inf"), -float("inf"), 1.5, 2.5])
    scale = torch.full((1,), 0.37, device=DEVICE)
    clean = y.nan_to_num(posinf=3e38, neginf=-3e38)  # an infinity times the zeros of the unit matrix would be NaN
    got, amax = kernel(clean, torch.eye(16, device=DEVICE), scale=scale, dtype=dtype)
    want, _ = quantized(y, format_of(dtype), "tensor", scale=scale[0])
    assert same(got, want) and float(amax) == float(clean.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_its_place_and_the_largest_value(dtype):
    bias = torch.tensor([1.0, float("nan"), -3.0], device=DEVICE)
    x, weight, one = random(5, 8), torch.zeros(3, 8, device=DEVICE), torch.ones(1, device=DEVICE)
    q, amax = kernel(x, weight, bias, scale=one, dtype=dtype)
    assert q.float()[:, [0, 2]].tolist() == [[1.0, -3.0]] * 5 and bool(amax.isnan().all())
    assert bool((q[:, 1] == 0).all()) if dtype == torch.int8 else bool(q[:, 1].isnan().all())


def test_the_largest_value_is_of_this_call():
    """No matter what lies past the edge of its last tiles, or how large the last call's was."""
    x, weight, scale = random(33, 8), random(65, 8, seed=1), torch.ones((), device=DEVICE)
    for factor in (1.0, 0.5):
        amax = kernel(factor * x, weight, scale=scale, activation="relu")[1]
        torch.testing.assert_close(amax[0], factor * reference(x, weight, activation="relu").max())
    assert kernel(x[:0], weight, scale=scale)[1].tolist() == [0.0]


def test_leading_dimensions_are_rows_and_nothing_wants_a_gradient():
    x, weight, scale = random(2, 3, 8).requires_grad_(), random(32, 8, seed=1), torch.full((1,), 0.05, device=DEVICE)
    for function in (kernel, ops.linear_quantized):
        q, amax = function(x, weight, scale=scale, activation="swiglu")
        assert q.shape == (2, 3, 16) and q.dtype == torch.float8_e4m3fn and amax.shape == (1,)
        assert not amax.requires_grad


@pytest.mark.parametrize("activation", [None, "silu", "geglu"])
def test_codes_are_made_of_the_main_loops_result_in_a_second_launch(monkeypatch, activation):
    class MainLoop:
        def __init__(self, call, out=None, *, amax=False):
            self.n, self.biased = len(call.weight) // 2 if call.activation.gated else 0, True

        def plan(self, x, gate, y, scale, *, bias, up, amax):
            whole = gate if up is None else torch.cat([gate, up])
            y.copy_(reference(x, whole, bias, activation=activation))
            amax.copy_(y.abs().max())

    monkeypatch.setattr(HopperLaunch, "__init__", MainLoop.__init__)
    monkeypatch.setattr(HopperLaunch, "plan", MainLoop.plan, raising=False)
    x, weight, bias = random(6, 8), random(32, 8, seed=1), random(32, seed=2)
    scale = torch.full((1,), 0.05, device=DEVICE)
    for dtype in DTYPES:
        want = module.usual(x, weight, bias, scale=scale, dtype=dtype, activation=activation)
        q, amax = torch.empty(want[0].shape, dtype=torch.uint8, device=DEVICE), torch.zeros(1, device=DEVICE)
        call = QuantizedCall(x, weight, bias, scale, True, activation, dtype)
        QuantizedLaunch(call, codes=False)(x, weight, bias, scale, q, amax)
        assert (q.view(dtype).float() - want[0].float()).abs().max() <= 0.07 * want[0].float().abs().max()
        torch.testing.assert_close(amax, want[1])


def test_a_launch_on_hopper_has_amax_and_both_halves():
    x, weight = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((8, 64), (128, 64)))
    scale, narrow = torch.empty(1, device="meta"), weight[:72]

    def expression(activation, biased):
        call = QuantizedCall(x, weight, weight[:, 0].contiguous(), scale, biased, activation, torch.int8)
        return QuantizedLaunch(call, codes=False).plan.launch.expression

    with compiling_for(90, lambda *kernel: None):
        assert "true, RELU, false, true, true" in expression("reglu", True)
        assert "false, NONE, false, false, true" in expression(None, False)
        unfused = (weight, torch.int8), (narrow, DTYPES[0])
        for w, dtype, taken in ((weight, DTYPES[0], "cuda"), *((*each, "cuda-unfused") for each in unfused)):
            assert ops.explain("linear_quantized", x, w, scale=scale, dtype=dtype).implementation == taken


def test_the_main_loop_leaves_codes_of_a_scale(launched):
    """In one launch: the scale is its first pointer, the bias has x's dtype, and C is of bytes."""
    x, weight, bias = (torch.empty(s, dtype=torch.float16).as_subclass(OnGpu) for s in ((8, 64), (256, 64), (256,)))
    scale, amax, q = torch.ones(1), torch.zeros(1), torch.empty(8, 128, dtype=torch.uint8).as_subclass(OnGpu)
    made = QuantizedLaunch(QuantizedCall(x, weight, bias, scale, True, "swiglu", DTYPES[0]), codes=True)
    assert made.plan.launch.expression.startswith("matmul_hopper<fp16, e4m3, 256, ")
    assert made.plan.launch.expression.endswith("true, SILU_FAST, false, true, true, false, false, false, fp16>")
    made(x, weight, bias, scale, q, amax)
    plan, tensors = launched[0]
    *_, of_c, shape, _ = plan.scalars
    assert [t.data_ptr() for t in (tensors[0], tensors[2], tensors[3])] == [t.data_ptr() for t in (scale, bias, amax)]
    assert of_c.opaque[0] == q.data_ptr() and shape.n == 128
    with compiling_for(90, lambda *kernel: None):
        for w, dtype, words in ((weight, torch.int8, "float8_e4m3fn"), (weight[:72], DTYPES[0], "72 elements")):
            with pytest.raises(NotImplementedError, match=words):
                QUANTIZED.kernel("cuda").of((x, w, x, scale), False, None, dtype)


GOOD = {"x": random(4, 8), "weight": random(16, 8), "scale": torch.ones(1, device=DEVICE)}
wrong = functools.partial(bad, "linear_quantized", **GOOD)
REFUSED = [
    wrong(ValueError, "linear_quantized: argument 'weight' has shape (16, 9)", weight=random(16, 9)),
    wrong(TypeError, "'scale' is a float", scale=1.0),
    wrong(TypeError, "'scale' has dtype float16", scale=torch.ones(1, device=DEVICE).half()),
    wrong(ValueError, "'scale' has shape (16,); expected (1,) or ()", scale=torch.ones(16, device=DEVICE)),
    wrong(TypeError, "'dtype' is torch.bfloat16; expected torch.float8_e4m3fn", dtype=torch.bfloat16),
    wrong(ValueError, "'activation' is 'tanh'", activation="tanh"),
]
