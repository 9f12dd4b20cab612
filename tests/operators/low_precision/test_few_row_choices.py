"""Which kernel the public products of few rows take, also where a compiler traces them and where gradients are wanted."""

from __future__ import annotations

import importlib

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from few_row_products import FORMS, random  # noqa: E402

from weft import ops, registry  # noqa: E402
from weft.definition import Declined  # noqa: E402
from weft.operators.call import Choice  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.low_precision import quantized_weight as qw  # noqa: E402
from weft.operators.low_precision import skinny_hopper  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize(("sm", "taken"), [(90, "cuda"), (80, "triton"), (100, "triton")])
def test_the_public_functions_take_hoppers_kernel_where_it_was_faster(sm, taken):
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    def chosen(name, x, w):
        return ops.explain(name, x, w).implementation

    with compiling_for(sm, lambda *kernel: None):
        for format, group in FORMS:
            weight = qw.quantize_weight(torch.ones(24, 512), format, group).to("meta")
            assert {chosen("weight_only_matmul", meta(m, 512), weight) for m in (1, 2, 16, 17, 64)} == {taken}
            assert chosen("weight_only_matmul", meta(65, 512), weight) == "torch"
            assert chosen("weight_only_matmul", meta(4, 512, dtype=torch.float32), weight) == "triton"
            assert chosen("weight_only_matmul", meta(4, 516)[:, :512], weight) == "triton", "rows off 16 bytes"
        w = meta(24, 512)
        assert {chosen("skinny_matmul", meta(m, 512), w) for m in (1, 2, 16)} == {"triton"}
        assert {chosen("skinny_matmul", meta(m, 512), w) for m in (17, 64, 65)} == {"torch"}
        assert chosen("skinny_matmul", meta(1, 516)[:, :513], meta(24, 513)) == "triton"


@pytest.mark.parametrize(("format", "group"), FORMS)
def test_a_layers_parameter_becomes_a_constant(format, group):
    """As the README has it: ``quantize_weight(linear.weight, …)``."""
    linear, x = torch.nn.Linear(512, 24), torch.randn(3, 512, requires_grad=True)
    ops.weight_only_matmul(x, qw.quantize_weight(linear.weight, format, group), linear.bias).sum().backward()
    assert linear.weight.grad is None and x.grad is not None and linear.bias.grad is not None


@pytest.mark.parametrize("name", ["skinny_matmul", "weight_only_matmul"])
def test_elsewhere_hoppers_kernel_declines_in_words(name):
    x, w = random(3, 128, dtype=torch.float16), random(8, 128, dtype=torch.float16)
    operand = w if name == "skinny_matmul" else qw.quantize_weight(w, "int4")
    with compiling_for(80, lambda *kernel: None), pytest.raises(Declined, match="sm_80"):
        registry.get(name).find("cuda").function(x, operand)


@pytest.mark.parametrize("name", ["skinny_matmul", "weight_only_matmul"])
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_traced_for_hopper_what_tma_cannot_take_is_tritons(name, monkeypatch):
    """The compiler sees no addresses; when the call comes, x begins off 16 bytes."""
    x = random(129, dtype=torch.float16)[1:].view(1, 128)
    w, bias = random(8, 128, dtype=torch.float16, seed=1), random(8, dtype=torch.float16, seed=2)
    operand = w if name == "skinny_matmul" else qw.quantize_weight(w, "int4")
    dense = w if name == "skinny_matmul" else qw.dequantize_weight(operand, w.dtype)
    called = []

    def backend(graph, example):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    monkeypatch.setattr(skinny_hopper, "target_sm", lambda device: 90)
    function = ops.weight_only_matmul if name == "weight_only_matmul" else registry.get(name).find("cuda").function
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
    got = compiled(x, operand, bias)
    assert called == [f"weft.{name}_cuda"]
    want = x.double() @ dense.double().t() + bias.double()
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))


def test_gradients_of_hoppers_operator_are_those_of_a_linear_layer():
    x, w, bias = (t.requires_grad_() for t in (random(1, 64), random(5, 64, seed=1), random(5, seed=2)))
    y = torch.ops.weft.skinny_matmul_cuda(x, w, bias)
    want = torch.nn.functional.linear(x, w, bias)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    dy = random(1, 5, seed=3)
    for got, right in zip(
        torch.autograd.grad(y, (x, w, bias), dy), torch.autograd.grad(want, (x, w, bias), dy), strict=True
    ):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("off", [0, 1])
def test_a_layer_is_compiled_with_its_gradients(m, off):
    """Also where x begins off 16 bytes, which is not seen while tracing."""
    x = random(m * 512 + off, dtype=torch.bfloat16)[off:].view(m, 512).requires_grad_()
    w, bias = (random(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((64, 512), (64,)))
    dy = random(m, 64, dtype=torch.bfloat16, seed=1)
    torch._dynamo.reset()
    compiled = torch.compile(ops.skinny_matmul, fullgraph=True, dynamic=False)
    want = torch.nn.functional.linear(x.double(), w.double(), bias.double())
    right = torch.autograd.grad(want, (x, w, bias), dy.double())
    for function in (compiled, ops.skinny_matmul):
        y = function(x, w, bias)
        torch.testing.assert_close(y.double(), want, rtol=2.0**-8, atol=1e-4 * float(want.abs().max()))
        for got, exact in zip(torch.autograd.grad(y, (x, w, bias), dy), right, strict=True):
            torch.testing.assert_close(got, exact, rtol=2.0**-7, atol=2e-2 * float(exact.abs().max()))


@pytest.mark.skipif(DEVICE == "cuda", reason="autocast of a CPU")
def test_a_quantised_weights_kernel_is_chosen_for_what_autocast_makes_of_x(monkeypatch):
    module = importlib.import_module("weft.operators.low_precision.weight_only_matmul")
    seen = []
    monkeypatch.setattr(module, "choose", lambda x, *rest: seen.append(x.dtype) or Choice("torch", ""))
    weight = qw.quantize_weight(random(8, 64), "int8")
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.weight_only_matmul(random(3, 64).requires_grad_(), weight, random(8)).dtype == torch.bfloat16
    assert seen == [torch.bfloat16]
