"""Products of few rows with a quantised weight where the tests of every operator do not reach: weights and their layout, the
arithmetic that unpacks them, splits, which kernel is taken, gradients, wrong arguments."""

import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import meta, random
from where import DEVICE, DTYPES

from weft import ops, registry
from weft.bench.tune import forget_plans
from weft.definition import SHARED_LIMIT, Declined, torch_dtype
from weft.operators import dispatch
from weft.operators.call import Choice
from weft.operators.launch import compiling_for, early_start
from weft.operators.low_precision import quantized_weight as qw
from weft.operators.low_precision import weight_only_hopper, weight_only_kernels

FORMS = [(f, g) for f in qw.FORMATS for g in ((0, *qw.GROUPS) if f != "int4" else qw.GROUPS)]
pytestmark = pytest.mark.device


def every_code(format: str, n: int, k: int) -> torch.Tensor:
    """Codes as they are usually stored, all of a format's in turn; fp8's NaN left out."""
    codes = (torch.arange(n * k) * 7 % 256).to(torch.uint8).view(n, k)
    if format == "int4":
        return qw.pack_int4(codes & 15)
    if format == "fp8":
        return codes.where(codes & 127 != 127, torch.tensor(1, dtype=torch.uint8)).view(torch.float8_e4m3fn)
    return codes.view(torch.int8)


@pytest.mark.parametrize(("format", "group"), FORMS)
def test_codes_come_out_of_the_prepared_layout_as_they_went_in(format, group):
    n, k = 5, 640 if group else 333
    codes = every_code(format, n, k)
    scale = torch.rand((n, k // group) if group else (n,)) + 0.5
    weight = qw.prepare_weight(codes, scale)
    assert weight.words.dtype == torch.int32 and weight.words.is_contiguous()
    assert (weight.format, weight.group, weight.columns) == (format, group, k)
    assert weight.scale.equal(scale) and weight.words.nbytes == n * -(-k // qw.block(format)) * 256
    got, want = qw.unpack_weight(weight), codes
    if format == "int4":
        want = torch.stack((codes & 15, codes >> 4), 2).view(n, k)  # the low nibble is the even column
    assert got.dtype == want.dtype and got.view(torch.uint8).equal(want.view(torch.uint8))


def test_words_of_the_prepared_layout_are_those_documented():
    codes = torch.arange(512, dtype=torch.int64).view(1, 512) % 16
    codes[0, [0, 1, 128, 129, 256, 257, 384, 385]] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    packed = qw.pack_int4(codes.to(torch.uint8))
    assert packed[0, 0] == 0x21
    words = qw.prepare_weight(packed, torch.ones(1, 4)).words
    assert words.shape == (1, 64) and int(words[0, 0]) & 0xFFFFFFFF == 0x86427531
    eight = torch.zeros(1, 256, dtype=torch.int8)
    eight[0, [0, 1, 128, 129]] = torch.tensor([-128, 1, 127, -1], dtype=torch.int8)
    assert int(qw.prepare_weight(eight, torch.ones(1)).words[0, 0]) & 0xFFFFFFFF == 0x7F81FF00


@pytest.mark.parametrize(("format", "group"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_to_the_nearest_code(format, group, dtype):
    w = random(6, 256, dtype=dtype)
    w[1] = 0
    weight = qw.quantize_weight(w, format, group)
    error = (qw.dequantize_weight(weight, torch.float32) - w.float()).abs()
    scale = weight.scale.float().repeat_interleave(group, 1) if group else weight.scale[:, None]
    half = scale / 2 if format != "fp8" else (w.float().abs() / 16).maximum(scale * 2**-10)  # 3 bits of mantissa
    outermost = scale * 2**-8 * 127 if dtype == torch.bfloat16 and group else 0  # the scale's own rounding: 8 bits
    assert bool((error <= half * 1.001 + outermost).all()) and not bool(error[1].any())


@pytest.mark.parametrize("group", qw.GROUPS)
def test_zero_points_halve_the_error_of_one_sided_weights(group):
    w = random(8, 256).abs()
    both = [qw.quantize_weight(w, "int4", group, zero_points=z) for z in (False, True)]
    errors = [(qw.dequantize_weight(of, torch.float32) - w).norm() for of in both]
    assert errors[1] < 0.6 * errors[0]


def test_a_weight_moves_between_devices():
    weight = qw.quantize_weight(random(4, 128), "int4", zero_points=True)
    moved = weight.to("meta")
    assert all(t.is_meta for t in moved[:3]) and moved[3:] == weight[3:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_read_as_floats_are_multiples_of_the_smallest_subnormal(dtype):
    smallest = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}[dtype]
    up = {torch.bfloat16: 2.0**127, torch.float16: 2.0**15}[dtype]
    codes = torch.arange(256, dtype=torch.int16)
    values = codes.view(dtype).double()
    assert values.equal(codes.double() * smallest)
    for zero, highest in ((128, 256), *((z, 16) for z in range(16))):
        steps = (codes[:highest].double() - zero) * weight_only_kernels.unit_of(dtype, "int4")
        assert steps.equal(values[:highest] * up - zero * smallest * up)
        assert steps.equal(steps.to(dtype).double())  # nothing is rounded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", qw.FORMATS)
def test_every_code_is_multiplied_by_its_value(format, dtype):
    """Products with unit vectors give single weights back, exactly."""
    k = 256 if format != "int4" else 128
    codes = every_code(format, 16, k).to(DEVICE)
    weight = qw.prepare_weight(codes, torch.ones((16, 1) if format == "int4" else 16, device=DEVICE))
    x = torch.eye(k, device=DEVICE, dtype=torch_dtype(dtype))[::9][:15]
    got = registry.get("weight_only_matmul").find("triton").function(x, weight)
    assert got.equal(qw.dequantize_weight(weight, x.dtype).t()[::9][:15])


@pytest.mark.parametrize("sm", SHARED_LIMIT)
@pytest.mark.parametrize(("format", "group"), FORMS)
def test_configurations_fit_shared_memory(sm, format, group):
    for m in (1, 2, 4, 8, 16, 32, 64):
        found = list(weight_only_kernels.candidates(sm, torch.bfloat16, format, group, m, 8192, 8192))
        assert 10 < len(found) < 100
        assert all(c["TOKENS"] >= min(m, 32) and c["BLOCK_N"] >= 16 * c["num_warps"] for c in found)


@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_a_split_sum_adds_the_bias_once(m, parts, monkeypatch):
    x, w, bias = random(m, 700), random(9, 700, seed=1), random(9, seed=2)
    weight = qw.quantize_weight(w, "int8")
    key = (torch.float32, "int8", 0, m if m == 1 else 16, 16, 1024)
    configuration = weight_only_kernels.configuration
    forget_plans()  # a GPU keeps those of the parts tried before
    monkeypatch.setattr(configuration, "trial", {**configuration.heuristic(90, *key), "SPLIT": parts})
    got = registry.get("weight_only_matmul").find("triton").function(x, weight, bias)
    want = x.double() @ qw.dequantize_weight(weight, torch.float64).t() + bias
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("sm", "few", "more"), [(90, "stream", "cuda"), (80, "triton", "triton"), (100, "stream", "triton")]
)
def test_the_public_function_takes_the_kernels_that_were_faster(sm, few, more):
    def chosen(name, x, w):
        return ops.explain(name, x, w).implementation

    with compiling_for(sm, lambda *kernel: None):
        for format, group in FORMS:
            weight = qw.quantize_weight(torch.ones(24, 512), format, group).to("meta")
            assert {chosen("weight_only_matmul", meta(m, 512), weight) for m in (1, 2)} == {few}
            assert {chosen("weight_only_matmul", meta(m, 512), weight) for m in (16, 17, 64)} == {more}
            assert chosen("weight_only_matmul", meta(65, 512), weight) == "dequantized"
            assert chosen("weight_only_matmul", meta(4, 512, dtype=torch.float32), weight) == "triton"
            assert chosen("weight_only_matmul", meta(4, 516)[:, :512], weight) == "triton", "rows off 16 bytes"


def test_elsewhere_hoppers_kernel_declines_in_words():
    x, weight = random(3, 128, dtype=torch.float16), qw.quantize_weight(random(8, 128, dtype=torch.float16), "int4")
    with compiling_for(80, lambda *kernel: None), pytest.raises(Declined, match="sm_80"):
        registry.get("weight_only_matmul").find("cuda").function(x, weight)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_traced_for_hopper_what_tma_cannot_take_is_tritons(monkeypatch):
    """The compiler sees no addresses; when the call comes, x begins off 16 bytes, and the table is read again."""
    x = random(129, dtype=torch.float16)[1:].view(1, 128)
    w, bias = random(8, 128, dtype=torch.float16, seed=1), random(8, dtype=torch.float16, seed=2)
    weight, called = qw.quantize_weight(w, "int4"), []

    def backend(graph, example):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    for module in (dispatch, weight_only_hopper):
        monkeypatch.setattr(module, "target_sm", lambda device: 90)
    torch._dynamo.reset()
    got = torch.compile(ops.weight_only_matmul, fullgraph=True, dynamic=False, backend=backend)(x, weight, bias)
    assert called == ["weft.weight_only_matmul.default"]
    want = x.double() @ qw.dequantize_weight(weight, w.dtype).double().t() + bias.double()
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))


def test_many_rows_take_a_dequantised_weight():
    x, weight = random(65, 128), qw.quantize_weight(random(8, 128), "int4")
    assert "over 64 rows" in ops.explain("weight_only_matmul", x, weight).reason
    for rows in (x, x[:64]):
        dense = qw.dequantize_weight(weight, x.dtype)
        torch.testing.assert_close(ops.weight_only_matmul(rows, weight), rows @ dense.t(), rtol=1e-4, atol=1e-4)
    assert ops.explain("weight_only_matmul", x[:64], weight).implementation == "triton"


@pytest.mark.parametrize("k", [128, 136, 132, 131])
def test_rows_of_any_length_and_alignment(k):
    """Multiples of 16, 8 and 4 elements, and an odd number; x as a slice of wider rows, and one element off."""
    wide, w = random(4 * (k + 8) + 1, dtype=torch.float16), random(9, k, dtype=torch.float16, seed=1)
    weight = qw.quantize_weight(w, "int8")
    dense = qw.dequantize_weight(weight, torch.float64)
    for x in (wide[:-1].view(4, k + 8)[:, :k], wide[1:].view(4, k + 8)[:, 3 : 3 + k], wide[: 4 * k].view(k, 4).t()):
        got, want = ops.weight_only_matmul(x, weight).double(), x.double() @ dense.t()
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(("format", "group"), FORMS)
def test_a_layers_parameter_becomes_a_constant(format, group):
    """As the README has it: ``quantize_weight(linear.weight, …)``."""
    linear, x = torch.nn.Linear(512, 24), torch.randn(3, 512, requires_grad=True)
    ops.weight_only_matmul(x, qw.quantize_weight(linear.weight, format, group), linear.bias).sum().backward()
    assert linear.weight.grad is None and x.grad is not None and linear.bias.grad is not None


@pytest.mark.skipif(DEVICE == "cuda", reason="autocast of a CPU")
def test_a_quantised_weights_kernel_is_chosen_for_what_autocast_makes_of_x(monkeypatch):
    module = importlib.import_module("weft.operators.low_precision.weight_only_matmul")
    seen = []
    monkeypatch.setattr(module, "choose", lambda x, *rest: seen.append(x.dtype) or Choice("torch", ""))
    weight = qw.quantize_weight(random(8, 64), "int8")
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.weight_only_matmul(random(3, 64).requires_grad_(), weight, random(8)).dtype == torch.bfloat16
    assert seen == [torch.bfloat16]


def test_gradients_of_x_and_bias_through_a_quantised_weight():
    weight, bias = qw.quantize_weight(random(9, 128), "int4", zero_points=True), random(9).requires_grad_()
    x = random(5, 128, seed=3).requires_grad_()
    for function in (ops.weight_only_matmul, registry.get("weight_only_matmul").find("triton").function):
        first = torch.autograd.grad((function(x, weight, bias) ** 2).sum(), (x, bias), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), x)
        dense = qw.dequantize_weight(weight, torch.float64)
        wide, wide_bias = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
        loss = ((wide @ dense.t() + wide_bias) ** 2).sum()
        want = torch.autograd.grad(loss, (wide, wide_bias), create_graph=True)
        want += torch.autograd.grad(want[0].square().sum(), wide)
        for got, right in zip((*first, *second), want, strict=True):
            torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4 * float(right.detach().abs().max()))


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_gradients_of_what_surrounds_a_product(activation):
    weight = qw.quantize_weight(random(10, 128), "int4")
    x, norm, residual = (random(*of, seed=i) for i, of in enumerate(((3, 128), (128,), (3, 5 if activation else 10))))
    leaves = [t.requires_grad_() for t in (x, norm, residual)]
    y = ops.weight_only_matmul(x, weight, None, norm, 1e-5, residual, activation)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = F.rms_norm(wide[0], (128,), wide[1], 1e-5) @ qw.dequantize_weight(weight, torch.float64).t()
    want = (F.silu(want[:, :5]) * want[:, 5:] if activation else want) + wide[2]
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    for got, right in zip(
        torch.autograd.grad((y**2).sum(), leaves), torch.autograd.grad((want**2).sum(), wide), strict=True
    ):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


WEIGHT = qw.quantize_weight(random(7, 512), "int4", zero_points=True)
product = functools.partial(bad, "weight_only_matmul")


def changed(error: type[Exception], said: str, **parts):
    """A product with a weight of which some parts are others."""
    return product(error, said, random(3, 512), WEIGHT._replace(**parts))


W = random(7, 96).abs()
SCALE, ZERO = W[:, :6], W[:, :6].to(torch.uint8)
of_floats = functools.partial(bad, qw.quantize_weight, ValueError)
of_codes = functools.partial(bad, qw.prepare_weight)
REFUSED = [
    product(TypeError, "'weight' is a Tensor; expected a QuantizedWeight", random(3, 128), random(7, 128)),
    product(ValueError, "'x' has shape (3, 100) and 'weight' 512 columns", random(3, 100), WEIGHT),
    product(ValueError, "'norm' has shape (3,); expected (512,)", random(3, 512), WEIGHT, None, random(3)),
    product(TypeError, "'norm' has dtype float16", random(3, 512), WEIGHT, None, random(512).half()),
    product(ValueError, "'residual' has shape (3, 5); expected (3, 7)", random(3, 512), WEIGHT, residual=random(3, 5)),
    product(
        ValueError,
        "activation 'relu' of a weight of 7 rows; expected None, or swiglu",
        random(3, 512),
        WEIGHT,
        activation="relu",
    ),
    product(ValueError, "activation 'swiglu' of a weight of 7 rows", random(3, 512), WEIGHT, activation="swiglu"),
    changed(TypeError, "'weight.words' has dtype float32; expected int32", words=WEIGHT.words.float()),
    changed(ValueError, "'weight.words' has shape (7, 8); expected (7, 64)", words=WEIGHT.words[:, :8]),
    changed(ValueError, "'weight.words' has strides", words=WEIGHT.words.t().contiguous().t()),
    changed(ValueError, "'weight.scale' has shape (7, 2); expected (7, 4)", scale=WEIGHT.scale[:, :2]),
    changed(TypeError, "'weight.scale' has dtype float64", scale=WEIGHT.scale.double()),
    changed(ValueError, "'weight.scale' requires a gradient", scale=WEIGHT.scale.clone().requires_grad_()),
    changed(ValueError, "'weight.zero' has shape (5, 4)", zero=WEIGHT.zero[:5]),
    changed(TypeError, "'weight.zero' has dtype int32", zero=WEIGHT.zero.int()),
    changed(ValueError, "group 48", group=48),
    changed(ValueError, "'int3'", format="int3"),
    changed(ValueError, "'weight.scale' has shape (7, 4); expected (7, 2)", columns=256),
    bad(qw.quantize_weight, TypeError, "'w' has dtype int32", W.int(), "int8"),
    of_floats("'w' has shape (96,)", W[0], "int8"),
    of_floats("'format' is 'int3'; expected int8, int4, fp8", W, "int3"),
    of_floats("K is 96 and the group 128", W, "int4"),
    of_floats("int4 with a group of 0; expected 32, 64, 128", W, "int4", 0),
    of_floats("a group of 48", W, "int8", 48),
    of_floats("only int4 has zero points", W, "int8", zero_points=True),
    of_floats("'w' has NaN or infinities", W / 0, "int8"),
    of_codes(TypeError, "'codes' is float32", W, W[:, 0]),
    of_codes(ValueError, "'codes' has shape (96,)", W[0].to(torch.int8), W[:, 0]),
    of_codes(TypeError, "'scale' has dtype int32", W.to(torch.int8), W[:, 0].int()),
    of_codes(ValueError, "'scale' has shape (3,) for int8", W.to(torch.int8), W[:3, 0]),
    of_codes(ValueError, "'scale' has shape (7,) for int4", W.to(torch.uint8), W[:, 0]),
    of_codes(ValueError, "'scale' has 7 NaN or infinite", W.to(torch.int8), W[:, 0] / 0),
    of_codes(ValueError, "only int4 has zero points", W.to(torch.int8), W[:, 0], W[:, 0]),
    of_codes(ValueError, "'codes' has NaN; expected finite", (W * torch.nan).to(torch.float8_e4m3fn), W[:, 0]),
    of_codes(ValueError, "'zero' has ; expected 0 … 15", W.to(torch.uint8), SCALE, ZERO + 16),
    of_codes(TypeError, "'zero' has dtype float32", W.to(torch.uint8), SCALE, SCALE),
    of_codes(
        ValueError, "'zero' has shape (7, 5); expected the scale's, (7, 6)", W.to(torch.uint8), SCALE, ZERO[:, :5]
    ),
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("format", qw.FORMATS)
def test_a_quantised_layer_is_compiled_and_captured(format):
    x, weight = random(3, 512, dtype=torch.bfloat16), qw.quantize_weight(random(64, 512, dtype=torch.bfloat16), format)
    want = ops.weight_only_matmul(x, weight)
    torch._dynamo.reset()
    compiled = torch.compile(ops.weight_only_matmul, fullgraph=True, dynamic=False)
    assert compiled(x, weight).equal(want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.weight_only_matmul(x, weight)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert captured.equal(want)


@pytest.mark.gpu
@pytest.mark.parametrize(("format", "group"), FORMS)
@pytest.mark.parametrize("m", [1, 16, 64])
def test_peers_compute_the_same_product(format, group, m):
    x, w = random(m, 1024, dtype=torch.bfloat16), random(512, 1024, dtype=torch.bfloat16)
    weight, operator = qw.quantize_weight(w, format, group), registry.get("weight_only_matmul")
    want = x.double() @ qw.dequantize_weight(weight, torch.float64).t()
    for made in operator.implementations.values():
        try:
            got = made.function(x, weight)
        except NotImplementedError:  # declined
            continue
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 12])
@pytest.mark.parametrize(("format", "group"), [("int4", 128), ("int4", 32), ("fp8", 0), ("int8", 64)])
def test_an_early_start_changes_no_bits(format, group, m):
    """A chain of small layers, each of which reads what the one before wrote, replayed with other inputs."""
    k, layers = 512, 24
    make = functools.partial(random, dtype=torch.bfloat16)
    chain = [
        (qw.quantize_weight(make(2 * k, k, seed=2 * i) / 16, format, group), qw.quantize_weight(
            make(k, k, seed=2 * i + 1) / 16, format, group), make(k, seed=i))
        for i in range(layers)
    ]  # fmt: skip

    def run(h: torch.Tensor) -> torch.Tensor:
        for gate_up, down, norm in chain:
            x = ops.weight_only_matmul(h, gate_up, None, norm, 1e-5, None, "swiglu")
            h = ops.weight_only_matmul(x, down, residual=h)
        return h

    given, graph = make(m, k), torch.cuda.CUDAGraph()
    with early_start():
        run(given)
        with torch.cuda.graph(graph):
            found = run(given)
    for seed in range(40):
        given.copy_(make(m, k, seed=seed))
        for _ in range(5):
            graph.replay()
        assert found.equal(run(given))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 33, 64])
@pytest.mark.parametrize(("format", "group"), FORMS)
def test_the_cuda_kernels_give_the_same_bits_every_time(format, group, m):
    """N and K that no tile divides; ten launches beside one another, into memory that was NaN."""
    x, w = random(m, 4224, dtype=torch.bfloat16), random(1160, 4224, dtype=torch.bfloat16)
    weight = qw.quantize_weight(w, format, group)
    want = x.double() @ qw.dequantize_weight(weight, torch.float64).t()
    for name in ("cuda", "stream"):
        kernel = registry.get("weight_only_matmul").find(name).function
        try:
            made = [kernel(x, weight) for _ in range(10)]
        except NotImplementedError:
            assert torch.cuda.get_device_capability() != (9, 0) or name == "stream"
            continue
        assert all(y.equal(made[0]) for y in made)
        torch.testing.assert_close(made[0].double(), want, rtol=2.0**-8, atol=2e-6 * float(want.abs().max()))
