"""``weight_only_matmul(x, weight, bias=None)``: a linear layer's product for few rows with a weight of int8, int4 or fp8 codes,
and what surrounds it in a decoder: the norm of x, a gated activation, a residual.

Reads N·K codes of 8 or 4 bits and their scales; x and y have 16 bits, sums 32. Reading the codes is the limit (README.md).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, torch_dtype, workload, workloads
from weft.operators import mutants
from weft.operators.call import Choice, cast_for_products, eager, guarded
from weft.operators.checks import check_tensor
from weft.operators.hopper.gemm import ON_HOPPER
from weft.operators.launch import Plans
from weft.operators.linear.skinny_matmul import DECODE, LAYERS
from weft.operators.low_precision import quantized_weight
from weft.operators.low_precision.dispatch import WEIGHT_ONLY
from weft.operators.low_precision.quantized_weight import QuantizedWeight, dequantize_weight, quantize_weight
from weft.operators.random_inputs import LAYOUTS, VALUES, of_vectors, random_tensor

EPS = 1e-6


def around(
    product: Callable[..., Tensor], x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm: Tensor | None, eps: float,
    residual: Tensor | None, activation: str | None,
) -> Tensor:  # fmt: skip
    """``product(x, weight, bias)``, and what surrounds it by PyTorch's operators."""
    y = product(x if norm is None else F.rms_norm(x, x.shape[-1:], norm, eps), weight, bias)
    if activation == "swiglu":
        gate, up = y.chunk(2, 1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual


def by_pytorch(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, dequantize_weight(weight, x.dtype), bias)


def reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = EPS,
    residual: Tensor | None = None, activation: str | None = None,
) -> Tensor:  # fmt: skip
    return around(by_pytorch, x, weight, bias, norm, eps, residual, activation)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x [M, K] and a weight [N, K] of normal random numbers, quantised. Options: ``format``, ``group`` (of int4 128, else whole
    rows), ``zero`` (int4 with zero points), ``bias``, ``layout`` (of x and the bias), ``values`` (of x), and what surrounds the
    product: ``norm``, ``activation``, ``residual``."""
    m, n, k = (w[a] for a in "MNK")
    layout = w.option("layout", "contiguous")
    x = random_tensor(g, (m, k), w.dtype, device, layout=layout, values=w.option("values", "normal"))
    bias = random_tensor(g, (n,), w.dtype, device, layout=of_vectors(layout)) if w.option("bias", True) else None
    norm = random_tensor(g, (k,), w.dtype, device) if w.option("norm", False) else None
    outputs = n // 2 if w.option("activation", None) else n
    residual = random_tensor(g, (m, outputs), w.dtype, device, layout=layout) if w.option("residual", False) else None
    more = {"norm": norm, "eps": 1e-5, "residual": residual, "activation": w.option("activation", None)}
    return {"x": x, "weight": _weight(w, g, device, n, k), "bias": bias, **more}


def _form(w: Workload) -> tuple[str, int]:
    format = w.option("format", "int8")
    return format, w.option("group", 128 if format == "int4" else 0)


def _weight(w: Workload, g: Any, device: str, n: int, k: int) -> QuantizedWeight:
    (format, group), zero_points = _form(w), w.option("zero", False)
    if device != "meta":
        return quantize_weight(random_tensor(g, (n, k), w.dtype, device), format, group, zero_points=zero_points)
    words = torch.empty((n, -(-k // quantized_weight.block(format)) * 64), dtype=torch.int32, device=device)
    if group and k % group:
        raise ValueError(f"weight_only_matmul: K={k} in groups of {group}; expected a multiple of the group")
    if not group:
        return QuantizedWeight(words, torch.empty(n, dtype=torch.float32, device=device), None, format, 0, k)
    scale = torch.empty((k // group, n), dtype=torch_dtype(w.dtype), device=device).t()
    zero = torch.empty((k // group, n), dtype=torch.uint8, device=device).t() if zero_points else None
    return QuantizedWeight(words, scale, zero, format, group, k)


def cost(w: Workload, direction: str) -> Cost:
    (m, n, k), size, (format, group) = (w[a] for a in "MNK"), w.bytes_per_element, _form(w)
    bias = n if w.option("bias", True) else 0
    scales = n * (k // group) * (size + w.option("zero", False)) if group else n * 4
    outputs = m * (n // 2 if w.option("activation", None) else n)
    more = k * w.option("norm", False) + outputs * w.option("residual", False)
    reads = n * k * quantized_weight.BITS[format] // 8 + scales + (m * k + bias + more) * size
    return Cost(reads, outputs * size, {w.dtype: 2.0 * m * n * k + m * bias})


def _last_block_left_out(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *others: Any, **named: Any
) -> Tensor:
    k = max(x.shape[1] - 1, 0) // quantized_weight.block(weight.format) * quantized_weight.block(weight.format)

    def without(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        return F.linear(x[:, :k], dequantize_weight(weight, x.dtype)[:, :k], bias)

    return around(without, x, weight, bias, *others, **named)


def _gate_and_up_exchanged(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *others: Any, **named: Any
) -> Tensor:
    def exchanged(*operands: Any) -> Tensor:
        y = by_pytorch(*operands)
        return y.roll(y.shape[1] // 2, 1)

    return around(exchanged, x, weight, bias, *others, **named)


def _other(change: Callable[[QuantizedWeight], dict[str, Any]]) -> Callable[..., Tensor]:
    """The reference with parts of the weight changed."""
    return mutants.changed(reference, weight=lambda weight: weight._replace(**change(weight)))


def quantised(dtype: str, m: int, n: int, k: int, format: str, group: int = 0, **options: Any) -> Workload:
    """As decoder layers are: without a bias."""
    return workload(dtype, M=m, N=n, K=k, format=format, group=group, bias=False, **options)


FORMS = (("int8", 0), ("fp8", 0), ("int4", 128))


weight_only_matmul = Operator(
    name="weight_only_matmul",
    axes={"M": "rows of x", "N": "rows of the weight", "K": "columns of both"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "format": tuple(quantized_weight.BITS),
        "group": (0, *quantized_weight.GROUPS),
        "zero": (False, True),
        "bias": (False, True),
        "layout": LAYOUTS,
        "values": VALUES,
        "norm": (False, True),
        "activation": (None, "swiglu"),
        "residual": (False, True),
    },
    tolerance=Tolerance(scale="tensor", terms=lambda w: max(w.axes.values())),
    workloads={
        "verify": [
            *(workload(M=m, N=n, K=k) for m, n, k in ((1, 1, 1), (1, 40, 256), (3, 33, 17), (9, 16, 300), (33, 5, 70))),
            *(workload(M=m, N=n, K=k) for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0), (70, 9, 33))),
            *(workload(M=2, N=20, K=k, format="fp8") for k in (33, 256)),
            *(workload(M=3, N=20, K=384, format="int8", group=g) for g in quantized_weight.GROUPS),
            workload(M=3, N=20, K=128, format="fp8", group=64),
            *workloads("MNK", (2, 20, 512), (2, 20, 640), format="int4", group=128),
            *(workload(M=2, N=20, K=3 * g, format="int4", group=g) for g in (64, 32)),
            *(workload(M=4, N=7, K=256, format="int4", group=g, zero=True) for g in quantized_weight.GROUPS),
            workload(M=17, N=20, K=1152, format="int4", group=128, zero=True, bias=False),
            workload(M=64, N=66, K=256, format="int4", group=32, zero=True),
            *(workload(M=40, N=70, K=200, format=f) for f in ("int8", "fp8")),
            *(workload(M=3, N=20, K=72, layout=at) for at in LAYOUTS[1:]),
            *(workload(M=4, N=20, K=128, format=f, values="nonfinite") for f in quantized_weight.BITS),
            *(workload(M=m, N=38, K=1152, format="int4", group=128, norm=True, activation="swiglu") for m in (1, 9)),
            *(workload(M=m, N=20, K=344, format="fp8", residual=True, bias=False) for m in (3, 65)),
            workload(M=2, N=34, K=512, format="int8", norm=True, activation="swiglu", residual=True, layout="strided"),
        ],
        "full": [workload(M=m, N=300, K=1280, format=f, group=g) for m in (1, 7, 64) for f, g in FORMS],
        "huge": [quantised("bf16", m, 2**17 + 8, 2**14 + 128, f, g) for m in (1, 16) for f, g in FORMS],
        "bench": [quantised("bf16", m, 8192, 8192, f, g) for f, g in FORMS for m in DECODE],
        "quick": [quantised("bf16", 1, 8192, 8192, f, g) for f, g in FORMS],
        "compile": [
            *(quantised("bf16", m, 8192, 8192, f, g) for f, g in FORMS for m in (1, 16)),
            *(quantised("bf16", 64, 8192, 8192, f, g) for f, g in FORMS[1:]),
            *(quantised("fp16", 16, 8192, 8192, f, g) for f, g in FORMS[1:]),
            *(quantised("bf16", 16, 4096, 4096, "int4", g, zero=True) for g in quantized_weight.GROUPS),
            quantised("bf16", 5, 4096, 4096, "int8", 64),
            quantised("fp32", 16, 8192, 8192, "int4", 128),
            workload("bf16", M=3, N=500, K=1000, format="fp8"),
            *(quantised("bf16", m, 8192, 8192, f, g, norm=True, activation="swiglu") for f, g in FORMS for m in (1, 8)),
            *(quantised("bf16", m, 4096, 14336, f, g, residual=True) for f, g in FORMS for m in (1, 4)),
        ],
        "tune": [
            *(quantised("bf16", m, n, n, f, g) for f, g in FORMS for m in (1, 8, 16, 64) for n in (4096, 8192)),
            *(quantised("bf16", 1, n, k, f, g) for f, g in FORMS for n, k in LAYERS),
            *(quantised("bf16", m, 8192, 8192, "int4", g) for m in (1, 16) for g in (32, 64)),
        ],
        "model": [quantised("bf16", m, n, k, f, g) for f, g in FORMS for m in (1, 16) for n, k in LAYERS],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("last block left out", _last_block_left_out),
        Mutant("halves of a word swapped", _other(lambda w: {"words": w.words << 16 | w.words >> 16 & 0xFFFF})),
        Mutant("the next group's scale", _other(lambda w: {"scale": w.scale.roll(1, -1)})),
        Mutant("zero points left out", _other(lambda w: {"zero": None})),
        Mutant("norm left out", mutants.changed(reference, norm=lambda norm: None)),
        Mutant("residual left out", mutants.changed(reference, residual=lambda residual: None)),
        Mutant("gate and up exchanged", _gate_and_up_exchanged),
    ],
)


def _operands(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, ...]:
    """What the kernels' pointers are: ``words`` where they read nothing."""
    words, scale, zero, *_ = weight
    return x, words, scale, *(words if t is None else t for t in (zero, bias, norm, residual))


def _options(
    weight: QuantizedWeight, bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
    activation: str | None,
) -> tuple[Any, ...]:  # fmt: skip
    there = tuple(t is not None for t in (weight.zero, bias, norm, residual))
    return *there, activation, eps, weight.format, weight.group, weight.columns


def launched(
    plans: Plans, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, norm: Tensor | None = None,
    eps: float = EPS, residual: Tensor | None = None, activation: str | None = None,
) -> Tensor:  # fmt: skip
    operands = _operands(x, weight, bias, norm, residual)
    options = _options(weight, bias, norm, eps, residual, activation)
    plan = plans.of(operands, *options) if len(x) * len(weight.words) else None
    if plan is None:
        return reference(x, weight, bias, norm, eps, residual, activation)
    return _computed(plan, operands, activation)


def _computed(plan: Any, operands: tuple[Tensor, ...], activation: str | None) -> Tensor:
    x, words, *_ = operands
    y = torch.empty((x.shape[0], words.shape[0] // (2 if activation else 1)), dtype=x.dtype, device=x.device)
    plan(*operands, y)
    return y


@torch.library.custom_op("weft::weight_only_matmul", mutates_args=())
def weight_only_matmul_op(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, format: str, group: int
) -> Tensor:
    return launched(WEIGHT_ONLY, x, QuantizedWeight(words, scale, zero, format, group, x.shape[1]), bias)


@weight_only_matmul_op.register_fake
def _(x: Tensor, words: Tensor, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], words.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, words, scale, zero, _, *form = inputs
    ctx.save_for_backward(words, scale, zero)
    ctx.form = (*form, x.shape[1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = None
    if ctx.needs_input_grad[0]:
        dx = torch.mm(dy, dequantize_weight(QuantizedWeight(*ctx.saved_tensors, *ctx.form), dy.dtype))
    return dx, None, None, None, dy.sum(0) if ctx.needs_input_grad[4] else None, None, None


weight_only_matmul_op.register_autograd(_backward, setup_context=_save)


def by_operator(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    words, scale, zero, format, group, _ = weight
    return weight_only_matmul_op(x, words, scale, zero, bias, format, group)


def by_kernel(
    name: str, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = EPS,
    residual: Tensor | None = None, activation: str | None = None,
) -> Tensor:  # fmt: skip
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, bias, norm, residual)):
        return around(by_operator, x, weight, bias, norm, eps, residual, activation)
    return launched(WEIGHT_ONLY.kernel(name), x, weight, bias, norm, eps, residual, activation)


_made: Any = WeakIdKeyDictionary()


def _beforehand(weight: QuantizedWeight, what: str, make: Callable[[], Any]) -> Any:
    """``make()``, kept as long as the weight lives and is not written to."""
    versions = [t._version for t in weight[:3] if t is not None]
    known = _made.setdefault(weight.words, {})
    if what not in known or known[what][0] != versions:
        known[what] = versions, make()
    return known[what][1]


def peer(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product of others, and what surrounds it by PyTorch's operators."""

    @functools.wraps(product)
    def run(
        x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = EPS,
        residual: Tensor | None = None, activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        return around(product, x, weight, bias, norm, eps, residual, activation)

    return run


@peer
def dense(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """PyTorch's linear layer on the dequantised weight: what the same model takes without quantisation."""
    return F.linear(x, _beforehand(weight, f"dense {x.dtype}", lambda: dequantize_weight(weight, x.dtype)), bias)


@peer
def tinygemm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """``torch._weight_int4pack_mm``, which PyTorch has for bf16 with groups; its value is (code - 8) · scale + offset."""
    if weight.format != "int4":
        raise Declined("tinygemm takes int4")

    def make() -> tuple[Tensor, Tensor]:
        codes, scale = quantized_weight.unpack_weight(weight), weight.scale.to(x.dtype)
        offset = torch.zeros_like(scale)
        if weight.zero is not None:
            offset = (quantized_weight.MIDDLE - weight.zero.to(x.dtype)) * scale
        packed = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        return packed, torch.stack((scale.t(), offset.t()), 2).contiguous()

    packed, scales = _beforehand(weight, "tinygemm", make)
    y = torch._weight_int4pack_mm(x, packed, weight.group, scales)
    return y if bias is None else y + bias


@peer
def int8pack(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """``torch._weight_int8pack_mm``: int8 with a scale for each row."""
    if weight.format != "int8" or weight.group:
        raise Declined("_weight_int8pack_mm takes int8 with a scale for each row")
    codes = _beforehand(weight, "int8pack", lambda: (quantized_weight.unpack_weight(weight), weight.scale.to(x.dtype)))
    y = torch._weight_int8pack_mm(x, *codes)
    return y if bias is None else y + bias


weight_only_matmul.implementation("stream", backend="cuda", arch=">=sm_90")(functools.partial(by_kernel, "stream"))
weight_only_matmul.implementation("triton", arch=">=sm_80")(functools.partial(by_kernel, "triton"))
weight_only_matmul.implementation("dequantized", backend="triton", arch=">=sm_80")(
    functools.partial(by_kernel, "dequantized")
)
weight_only_matmul.implementation("cuda", **ON_HOPPER)(functools.partial(by_kernel, "cuda"))
weight_only_matmul.implementation("torch")(reference)
weight_only_matmul.implementation("dense", devices=("cuda",))(dense)
weight_only_matmul.implementation("tinygemm", devices=("cuda",), dtypes=("bf16",))(tinygemm)
weight_only_matmul.implementation("int8pack", devices=("cuda",), dtypes=("bf16",))(int8pack)


@weight_only_matmul.choice
@guarded
def choose(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = EPS,
    residual: Tensor | None = None, activation: str | None = None,
) -> Choice:  # fmt: skip
    if not isinstance(weight, QuantizedWeight):
        check_tensor("weight_only_matmul", "x", x)
        raise TypeError(
            f"weight_only_matmul: argument 'weight' is a {type(weight).__name__}; expected a QuantizedWeight, as "
            "quantize_weight or prepare_weight of weft.operators.low_precision.quantized_weight make one"
        )
    check_tensor("weight_only_matmul", "x", x, sharded=False)
    options = _options(weight, bias, norm, eps, residual, activation)
    return WEIGHT_ONLY.choose(*_operands(x, weight, bias, norm, residual), *options)


@weight_only_matmul.function
def weight_only_matmul_function(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = EPS,
    residual: Tensor | None = None, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """A linear layer's product for few rows with a quantised weight: x · wᵀ + bias.

    Args:
        x: [M, K]; float16 or bfloat16 (float32 is right, but multiplied without tensor cores), any strides. Made for M up to
            64; for more the weight is dequantised and multiplied by PyTorch.
        weight: [N, K] in int8, int4 or fp8, made once by ``quantize_weight`` or ``prepare_weight`` of
            ``weft.operators.low_precision.quantized_weight``.
        bias: [N], of x's dtype and device, or None.
        norm, eps: a weight [K] of x's dtype: x is ``rms_norm(x, norm, eps)`` then, in the same launch for up to 8 rows.
        residual: [M, outputs] of x's dtype, added to the result.
        activation: ``swiglu``: the weight's first N / 2 rows are the gate's, and y = silu(gate) · up.

    Returns:
        [M, N] of x's dtype ([M, N / 2] with an activation), accumulated in fp32; codes are multiplied without rounding, scales
        in fp32. Up to 8 rows of 16 bits are rounded once, after activation and residual, else after each. Under autocast x
        and the vectors are cast as ``torch.nn.functional.linear`` does. Gradients are of all but the weight.

    Raises:
        TypeError: x, bias, norm or residual of another dtype, a weight that is not prepared.
        ValueError: shapes, devices or parts of the weight that do not fit, a scale that wants a gradient, another activation.
    """
    if weight.__class__ is QuantizedWeight:
        operands = _operands(x, weight, bias, norm, residual)
        if eager(*operands):
            ready = WEIGHT_ONLY.of(operands, *_options(weight, bias, norm, eps, residual, activation))
            if ready is not None:
                return _computed(ready, operands, activation)
    x, bias, norm, residual = cast_for_products(x, bias, norm, residual)
    if choose(x, weight, bias, norm, eps, residual, activation).implementation == "torch":
        return reference(x, weight, bias, norm, eps, residual, activation)
    return around(by_operator, x, weight, bias, norm, eps, residual, activation)
