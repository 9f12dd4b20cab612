"""``scaled_matmul(a, b, a_scale, b_scale)``: the product of two matrices of 8-bit values, fp8 or int8, times their scales.

2·M·N·K operations on half the bytes of 16-bit operands, at twice the rate of the tensor cores; what it costs is in the numbers
(docs/notes/low_precision.md).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction
from weft.operators.call import Choice, guarded, on_gpu
from weft.operators.checks import check_flag, check_values
from weft.operators.low_precision.dispatch import SCALED, kind_of
from weft.operators.low_precision.scaled_kernels import BLOCK
from weft.operators.quantization.formats import FORMATS, scale_shape, spread
from weft.operators.quantization.quantize import reference as quantized
from weft.operators.random_inputs import random_tensor

SCALES = ("tensor", "row", "block")


class Operands(NamedTuple):
    """What a call multiplies."""

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    bias: Tensor | None = None


def reference(
    *operands: Any, dtype: torch.dtype = torch.bfloat16, fast_accumulate: bool = False, **named: Any
) -> Tensor:
    """Dequantised operands multiplied in fp32 (in float64 if the scales are, or for int8: its sums are exact) and rounded
    once."""
    o = Operands(*operands, **named)
    wide = torch.float64 if o.a.dtype == torch.int8 else o.a_scale.dtype
    out = dequantised(o.a, o.b, o.a_scale.to(wide), o.b_scale.to(wide), o.bias, dtype=dtype)
    return out if o.a_scale.dtype == torch.float64 else out.to(dtype)


def dequantised(
    *operands: Any, dtype: torch.dtype = torch.bfloat16, fast_accumulate: bool = False, **named: Any
) -> Tensor:
    """What a user of PyTorch writes: all in the scales' dtype."""
    a, b, a_scale, b_scale, bias = Operands(*operands, **named)
    wide = a_scale.dtype
    if kind_of(a, b, a_scale, b_scale) == "block":
        a_scale = spread(a_scale, tuple(a.shape), "group", BLOCK)
        b_scale = spread(b_scale.t(), tuple(b.t().shape), "block", BLOCK).t()
    out = (a.to(wide) * a_scale) @ (b.to(wide) * b_scale)
    if bias is not None:
        out = out + bias.to(wide)
    return out if wide == torch.float64 else out.to(dtype)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Random matrices, quantised; b lies as its transpose does (a linear layer's weight), unless ``layout=NN``."""
    format, scales = w.option("format", "fp8_e4m3"), w.option("scales", "tensor")
    b_format = w.option("b_format", format)

    def operand(rows: int, granularity: str, format: str) -> tuple[Tensor, Tensor]:
        x = random_tensor(g, (rows, w["K"]), "fp32", device)
        if device == "meta":
            of_scale = scale_shape((rows, w["K"]), granularity, BLOCK)
            return x.to(FORMATS[format].dtype), torch.empty(of_scale, dtype=torch.float32, device=device)
        return quantized(x, format, granularity)

    a, a_scale = operand(w["M"], "group" if scales == "block" else scales, format)
    b, b_scale = operand(w["N"], scales, b_format)
    if w.option("layout", "NT") == "NN":
        b = b.t().contiguous().t()
    bias = random_tensor(g, (w["N"],), w.dtype, device) if w.option("bias", False) else None
    b_scale = b_scale.t() if b_scale.ndim else b_scale
    operands = Operands(a, b.t(), a_scale, b_scale, bias)
    return {**operands._asdict(), "dtype": torch_dtype(w.dtype), "fast_accumulate": w.option("fast", False)}


def cost(w: Workload, direction: str) -> Cost:
    m, n, k = w["M"], w["N"], w["K"]
    unit = "int8" if w.option("format", "fp8_e4m3") == "int8" else "fp8"
    return Cost((m + n) * k, m * n * w.bytes_per_element, {unit: 2.0 * m * n * k})


def terms(w: Workload) -> int:
    """Tensor cores add fp8 products to 14 bits (docs/notes/low_precision.md), whatever the result's dtype: n of them err as
    4⁹ n would in fp32."""
    return w["K"] if w.option("format", "fp8_e4m3") == "int8" else 4**9 * w["K"]


def _last_block_left_out(a: Tensor, **named: Any) -> Tensor:
    keep = torch.arange(a.shape[1], device=a.device) < max(a.shape[1] - 8, 0)
    return reference(a=torch.where(keep, a.float(), 0.0).to(a.dtype), **named)


LAYERS = ((6144, 4096), (28672, 4096), (4096, 14336))
SQUARES = tuple(
    workload("bf16", M=n, N=n, K=n, format=f, scales=s)
    for n in (4096, 8192)
    for f, s in (("fp8_e4m3", "tensor"), ("fp8_e4m3", "row"), ("fp8_e4m3", "block"), ("int8", "row"))
)


scaled_matmul = Operator(
    name="scaled_matmul",
    axes={"M": "rows of a", "N": "columns of b", "K": "columns of a, rows of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "format": ("fp8_e4m3", "fp8_e5m2", "int8"),
        "b_format": ("fp8_e4m3", "fp8_e5m2", "int8"),
        "scales": SCALES,
        "layout": ("NT", "NN"),
        "bias": (True, False),
        "fast": (True, False),
    },
    tolerance=Tolerance(scale="tensor", ulps=2.0, terms=terms),
    workloads={
        "verify": [
            *(workload(M=m, N=n, K=k) for m, n, k in ((1, 1, 1), (33, 65, 17), (64, 48, 256))),
            *(workload(M=40, N=48, K=160, format=f, scales=s) for f in ("fp8_e4m3", "int8") for s in SCALES),
            workload(M=40, N=48, K=160, fast=True),
            workload(M=33, N=140, K=300, scales="block", bias=True),
            workload(M=40, N=48, K=96, format="fp8_e5m2", b_format="fp8_e4m3", layout="NN", bias=True),
            *(workload(M=m, N=n, K=k) for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0))),
        ],
        "full": [workload(M=257, N=129, K=1000, format=f, scales=s) for f in ("fp8_e4m3", "int8") for s in SCALES],
        "huge": [workload("bf16", M=2**16 + 8, N=2**15 + 16, K=64)],
        "bench": list(SQUARES),
        "quick": [SQUARES[0]],
        "compile": [*SQUARES[:4], workload(M=512, N=512, K=500, format="fp8_e5m2", bias=True)],
        "tune": [*SQUARES],
        "model": [workload("bf16", M=4096, N=n, K=k, scales="row") for n, k in LAYERS],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("a neighbour's scale", mutants.changed(reference, a_scale=lambda s: s.roll(1) * 1.05)),
        Mutant("last terms left out", _last_block_left_out),
        Mutant("bias left out", mutants.changed(reference, bias=lambda bias: None)),
    ],
)


def call_of(operands: Operands, dtype: Any, fast_accumulate: bool) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """The tensors and the options of a :class:`ScaledCall`."""
    bias = operands.a_scale if operands.bias is None else operands.bias
    return (*operands[:4], bias), (operands.bias is not None, dtype, fast_accumulate)


def by_kernel(
    name: str, *operands: Any, dtype: torch.dtype = torch.bfloat16, fast_accumulate: bool = False, **named: Any
) -> Tensor:
    tensors, options = call_of(Operands(*operands, **named), dtype, fast_accumulate)
    out = torch.empty((tensors[0].shape[0], tensors[1].shape[1]), dtype=dtype, device=tensors[0].device)
    if out.numel():
        SCALED.kernel(name).of(tensors, *options)(*tensors, out)
    return out


def cublas(*operands: Any, dtype: torch.dtype = torch.bfloat16, fast_accumulate: bool = False, **named: Any) -> Tensor:
    """``torch._scaled_mm`` of fp8, ``torch._int_mm`` of int8; on a CPU, and for int8 in blocks, the formula."""
    a, b, a_scale, b_scale, bias = Operands(*operands, **named)
    kind = kind_of(a, b, a_scale, b_scale)
    if not a.is_cuda or not a.numel() or not b.numel():
        return reference(a, b, a_scale, b_scale, bias, dtype=dtype)
    if a.dtype == torch.int8:
        if kind == "block":
            return dequantised(a, b, a_scale, b_scale, bias, dtype=dtype)
        try:
            product = torch._int_mm(a, b).float() * (a_scale * b_scale)
        except RuntimeError as error:  # sizes that are no multiple of 8, or fewer than 17 rows
            raise Declined(str(error).splitlines()[0]) from error
        return (product if bias is None else product + bias.float()).to(dtype)
    try:
        scales = (a_scale.reshape(()), b_scale.reshape(())) if kind == "tensor" else (a_scale, b_scale)
        if kind == "block":  # cuBLAS wants a's scales column by column, and b's with rows of whole 16 bytes
            if b_scale.shape[0] % 4:
                raise Declined(f"{b_scale.shape[0]} blocks along K, no multiple of 4")
            scales = (a_scale.t().contiguous().t(), b_scale)
        return torch._scaled_mm(a, b, *scales, bias=bias, out_dtype=dtype, use_fast_accum=fast_accumulate)
    except (RuntimeError, ValueError) as error:  # layouts, sizes and dtypes that cuBLASLt has no kernel for
        raise Declined(str(error).splitlines()[0]) from error


class BiasGradient(KernelFunction):
    """The one gradient there is: the bias's, the sum of the result's rows. Kernels and cuBLAS's product know of none."""

    @staticmethod
    def forward(bias: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        return product(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.sum(0, dtype=torch.float32).to(ctx.dtype), None


scaled_matmul.implementation("triton", arch=">=sm_80")(functools.partial(by_kernel, "triton"))
scaled_matmul.implementation("cuda", arch="==sm_90")(functools.partial(by_kernel, "cuda"))
peers.register(scaled_matmul, cublas, dequantised)


@scaled_matmul.choice
@guarded
def choose(
    *operands: Any,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulate: bool = False,
    check_scales: bool = False,
    **named: Any,
) -> Choice:
    check_flag("scaled_matmul", "check_scales", check_scales)
    check_flag("scaled_matmul", "fast_accumulate", fast_accumulate)
    given = Operands(*operands, **named)
    tensors, options = call_of(given, dtype, fast_accumulate)
    choice = SCALED.choose(*tensors, *options)
    for name, scale in (("a_scale", given.a_scale), ("b_scale", given.b_scale)) if check_scales else ():
        words = {"flag": "check_scales", "expected": "finite fp32 numbers"}
        check_values("scaled_matmul", name, scale, lambda t: ~t.isfinite(), **words)
    return choice


@scaled_matmul.function
def scaled_matmul_function(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None, *,
    dtype: dtype = torch.bfloat16, fast_accumulate: bool = False, check_scales: bool = False,
) -> Tensor:  # fmt: skip
    """Product of two quantised matrices: (a · a_scale) @ (b · b_scale) + bias.

    Args:
        a: [M, K]; float8_e4m3fn, float8_e5m2 or int8, as ``weft.ops.quantize`` makes them.
        b: [K, N]; an fp8 if a is one, else int8. A linear layer's weight [N, K] is passed as ``weight.t()``.
        a_scale, b_scale: float32 factors (``quantize``'s scales): single numbers ([], [1] or [1, 1]); or [M, 1] and [1, N],
            of rows and columns; or [M, ceil(K / 128)] and [ceil(K / 128), ceil(N / 128)], of blocks.
        bias: [N], float32, float16 or bfloat16, or None.
        dtype: of the result: float32, float16 or bfloat16.
        fast_accumulate: fp8 products are added up in the tensor core's accumulator of about 14 bits throughout (as
            ``torch._scaled_mm(use_fast_accum=True)``); without it, in fp32 after every slice of K. Without meaning for int8 and
            for blocks.
        check_scales: raise ValueError for a scale that is not finite: waits for the device. Without it such a scale makes what
            it multiplies NaN or infinite.

    Returns:
        [M, N]. fp8 is added up in fp32; int8 in int32, which K beyond 133,000 may overflow. NaN and infinities are what the
        products make of them.

    Raises:
        TypeError: other dtypes.
        ValueError: not matrices; sizes, devices or shapes of scales that do not fit; a scale that wants a gradient; with
            ``check_scales``, one that is not finite.

    The bias has a gradient, summed in fp32. There is no other: quantised values have none.
    """
    named: dict[str, Any] = {"dtype": dtype, "fast_accumulate": fast_accumulate}
    chosen = choose(a, b, a_scale, b_scale, bias, check_scales=check_scales, **named).implementation

    def product(bias: Tensor | None) -> Tensor:
        run = cublas if chosen == "torch" else functools.partial(by_kernel, chosen)
        return run(a, b, a_scale, b_scale, bias, **named)

    if bias is not None and bias.requires_grad and torch.is_grad_enabled() and on_gpu(a):
        return BiasGradient.apply(bias, product)
    return product(bias)
