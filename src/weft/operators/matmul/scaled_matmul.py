"""``scaled_matmul(a, b, a_scale, b_scale)``: the product of two matrices of 8-bit values, fp8 or int8, times their scales.

2·M·N·K operations on half the bytes of 16-bit operands, at twice the rate of the tensor cores; what it costs is in the numbers
(theory, accuracy: README.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import mutants, peers
from weft.operators.call import FLOATS, Choice, check_device, check_tensor, on_gpu, traced
from weft.operators.launch import target_sm
from weft.operators.matmul import hopper
from weft.operators.matmul.scaled_kernels import BLOCK, plans
from weft.operators.quantization.formats import FORMATS
from weft.operators.quantization.quantize import reference as quantized
from weft.operators.random_inputs import random_tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("tensor", "row", "block")


def kind_of(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> str:
    """By which scales' shapes fit: "tensor" [] and [], "row" [M, 1] and [1, N], "block" [M, K / 128] and [K / 128, N / 128]."""
    (m, k), n = a.shape, b.shape[1]
    blocks = -(-k // BLOCK)
    if a_scale.numel() == b_scale.numel() == 1 and max(a_scale.ndim, b_scale.ndim) <= 2:
        return "tensor"
    if tuple(a_scale.shape) == (m, 1) and tuple(b_scale.shape) == (1, n):
        return "row"
    if tuple(a_scale.shape) == (m, blocks) and tuple(b_scale.shape) == (blocks, -(-n // BLOCK)):
        return "block"
    raise ValueError(
        f"scaled_matmul: 'a_scale' has shape {tuple(a_scale.shape)} and 'b_scale' {tuple(b_scale.shape)}; expected [] and [] "
        f"(of a tensor), {(m, 1)} and {(1, n)} (of rows and columns), or {(m, blocks)} and {(blocks, -(-n // BLOCK))} "
        f"(of blocks of {BLOCK})"
    )


def reference(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulate: bool = False,
) -> Tensor:
    """Dequantised operands multiplied in fp32 (in float64 if the scales are, or for int8: its sums are exact) and rounded
    once."""
    wide = torch.float64 if a.dtype == torch.int8 else a_scale.dtype
    out = dequantised(a, b, a_scale.to(wide), b_scale.to(wide), bias, dtype=dtype)
    return out if a_scale.dtype == torch.float64 else out.to(dtype)


def dequantised(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulate: bool = False,
) -> Tensor:
    """What a user of PyTorch writes: all in the scales' dtype."""
    wide = a_scale.dtype
    by_a, by_b = a_scale, b_scale
    if a_scale.ndim == 2 and a_scale.shape[1] > 1:
        by_a = a_scale.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
    if (
        b_scale.ndim == 2
        and b_scale.shape[0] == -(-b.shape[0] // BLOCK)
        and b_scale.shape[1] == -(-b.shape[1] // BLOCK)
    ):
        by_b = b_scale.repeat_interleave(BLOCK, 0)[: b.shape[0]].repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    out = (a.to(wide) * by_a) @ (b.to(wide) * by_b)
    if bias is not None:
        out = out + bias.to(wide)
    return out if wide == torch.float64 else out.to(dtype)


# ---- implementations -------------------------------------------------------------------------------------------------


def scaled_matmul_triton(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulate: bool = False,
) -> Tensor:
    out = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    if out.numel():
        call = (a.view(torch.uint8), b.view(torch.uint8), a_scale, b_scale, a_scale if bias is None else bias, out)
        blockwise = kind_of(a, b, a_scale, b_scale) == "block"
        plans.of(call, blockwise, bias is not None, (a.dtype, b.dtype), fast_accumulate)(*call)
    return out


def hopper_declines(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> str:
    """Why Hopper's main loop does not take a call (an empty string when it does)."""
    kind = kind_of(a, b, a_scale, b_scale)
    if a.dtype == torch.float8_e5m2 or b.dtype != a.dtype:
        return f"{a.dtype} times {b.dtype}; it takes two of float8_e4m3fn or two of int8"
    if not (a_scale.is_contiguous() and (b_scale.t() if kind == "block" else b_scale).is_contiguous()):
        return "scales that do not lie as quantize makes them"
    if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
        return "a bias of another dtype than the result's, or with gaps"
    return hopper.why_not(a, b, dtype)


def scaled_matmul_hopper(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulate: bool = False,
) -> Tensor:
    if reason := hopper_declines(a, b, a_scale, b_scale, bias, dtype):
        raise Declined(reason)
    out = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    if out.numel():
        blocks = kind_of(a, b, a_scale, b_scale) == "block"
        counts = (0, 0) if blocks else (a_scale.numel(), b_scale.numel())
        two_levels = a.dtype != torch.int8 and not fast_accumulate
        plan = hopper.plans.of((a, b), dtype, *counts, blocks, two_levels, bias is not None)
        plan(a, b, out, a_scale, b_scale, bias)
    return out


def cublas(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulate: bool = False,
) -> Tensor:
    """``torch._scaled_mm`` of fp8, ``torch._int_mm`` of int8; on a CPU, and for int8 in blocks, the formula."""
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


PRODUCTS = {"torch": cublas, "cuda": scaled_matmul_hopper, "triton": scaled_matmul_triton}


class BiasGradient(torch.autograd.Function):
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


# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Random matrices, quantised; b lies as its transpose does (a linear layer's weight), unless ``layout=NN``."""
    format, scales = w.option("format", "fp8_e4m3"), w.option("scales", "tensor")
    b_format = w.option("b_format", format)

    def operand(rows: int, granularity: str, format: str) -> tuple[Tensor, Tensor]:
        x = random_tensor(g, (rows, w["K"]), "fp32", device)
        if device == "meta":
            shapes = {
                "tensor": (),
                "row": (rows, 1),
                "group": (rows, -(-w["K"] // BLOCK)),
                "block": (-(-rows // BLOCK), -(-w["K"] // BLOCK)),
            }
            return x.to(FORMATS[format].dtype), torch.empty(shapes[granularity], device=device)
        return quantized(x, format, granularity)

    a, a_scale = operand(w["M"], "group" if scales == "block" else scales, format)
    b, b_scale = operand(w["N"], scales, b_format)
    if w.option("layout", "NT") == "NN":
        b = b.t().contiguous().t()
    bias = random_tensor(g, (w["N"],), w.dtype, device) if w.option("bias", False) else None
    return {
        "a": a,
        "b": b.t(),
        "a_scale": a_scale,
        "b_scale": b_scale.t() if b_scale.ndim else b_scale,
        "bias": bias,
        "dtype": torch_dtype(w.dtype),
        "fast_accumulate": w.option("fast", False),
    }


def cost(w: Workload, direction: str) -> Cost:
    m, n, k = w["M"], w["N"], w["K"]
    unit = "int8" if w.option("format", "fp8_e4m3") == "int8" else "fp8"
    return Cost((m + n) * k, m * n * w.bytes_per_element, {unit: 2.0 * m * n * k})


def _terms(w: Workload) -> int:
    """Tensor cores add fp8 products to 14 bits (README), whatever the result's dtype: n of them err as 4⁹ n would in fp32."""
    return w["K"] if w.option("format", "fp8_e4m3") == "int8" else 4**9 * w["K"]


def _scales_swapped(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *more: Any, **named: Any) -> Tensor:
    return reference(a, b, a_scale.flatten().roll(1).view(a_scale.shape) * 1.05, b_scale, *more, **named)


def _last_block_left_out(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *more: Any, **named: Any) -> Tensor:
    keep = torch.arange(a.shape[1], device=a.device) < max(a.shape[1] - 8, 0)
    wide = torch.where(keep, a.float(), 0.0).to(a.dtype)
    return reference(wide, b, a_scale, b_scale, *more, **named)


def _no_bias(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None, **named: Any
) -> Tensor:
    return reference(a, b, a_scale, b_scale, None, **named)


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
    tolerance=Tolerance(scale="tensor", ulps=2.0, terms=_terms),
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
        "compile": [
            *(w for w in SQUARES if w["M"] == 4096),
            workload(M=512, N=512, K=500, format="fp8_e5m2", bias=True),
        ],
        "tune": [*SQUARES],
        "model": [
            workload("bf16", M=4096, N=n, K=k, scales="row") for n, k in ((6144, 4096), (28672, 4096), (4096, 14336))
        ],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("a neighbour's scale", _scales_swapped),
        Mutant("last terms left out", _last_block_left_out),
        Mutant("bias left out", _no_bias),
    ],
)

scaled_matmul.implementation("triton", arch=">=sm_80")(scaled_matmul_triton)
scaled_matmul.implementation("cuda", arch="==sm_90", devices=("cuda",))(scaled_matmul_hopper)
scaled_matmul.implementation("torch")(cublas)
scaled_matmul.implementation("torch.compile", devices=("cuda",))(peers.Compiled(dequantised))

# ---- what users call -------------------------------------------------------------------------------------------------


def check(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    for name, t in (("a", a), ("b", b)):
        check_tensor("scaled_matmul", name, t, (*FP8, torch.int8))
        if t.ndim != 2:
            raise ValueError(
                f"scaled_matmul: argument '{name}' has shape {tuple(t.shape)}; expected a matrix (two dimensions)"
            )
    if (a.dtype == torch.int8) != (b.dtype == torch.int8):
        raise TypeError(f"scaled_matmul: 'a' is {a.dtype} and 'b' {b.dtype}; expected both int8, or both an fp8")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"scaled_matmul: 'a' has shape {tuple(a.shape)} and 'b' {tuple(b.shape)}; expected b with {a.shape[1]} rows, "
            "as many as 'a' has columns"
        )
    if dtype not in FLOATS:
        raise TypeError(f"scaled_matmul: argument 'dtype' is {dtype}; expected {', '.join(map(str, FLOATS))}")
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        check_tensor("scaled_matmul", name, scale, (torch.float32,))
        if scale.requires_grad:
            raise ValueError(f"scaled_matmul: argument '{name}' wants a gradient, which there is none of")
    kind_of(a, b, a_scale, b_scale)
    if bias is not None:
        check_tensor("scaled_matmul", "bias", bias)
        if tuple(bias.shape) != (b.shape[1],):
            raise ValueError(f"scaled_matmul: argument 'bias' has shape {tuple(bias.shape)}; expected ({b.shape[1]},)")
    for name, t in (
        ("b", b),
        ("a_scale", a_scale),
        ("b_scale", b_scale),
        *((("bias", bias),) if bias is not None else ()),
    ):
        check_device("scaled_matmul", name, t, "a", a)


@scaled_matmul.choice
def choose(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulate: bool = False,
) -> Choice:
    check(a, b, a_scale, b_scale, bias, dtype)
    if not on_gpu(a):
        return Choice("torch", "the tensors are on the CPU, where weft runs the formula in full precision")
    if traced(a, b):
        return Choice("torch", "traced: PyTorch's own product, which a compiler sees")
    if not a.shape[0] * b.shape[1]:
        return Choice("torch", "empty: nothing to launch")
    if target_sm(a.device) == 90 and not hopper_declines(a, b, a_scale, b_scale, bias, dtype):
        return Choice("cuda", "TMA, wgmma and warps that only fetch (README of the operator)")
    return Choice("triton", f"scales of a {kind_of(a, b, a_scale, b_scale)}: codes go to the tensor cores as they are")


@scaled_matmul.function
def scaled_matmul_function(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: dtype = torch.bfloat16,
    fast_accumulate: bool = False,
) -> Tensor:
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

    Returns:
        [M, N]. fp8 is added up in fp32; int8 in int32, which K beyond 133,000 may overflow. NaN and infinities are what the
        products make of them; scales are not looked at.

    Raises:
        TypeError: other dtypes.
        ValueError: not matrices; sizes, devices or shapes of scales that do not fit; a scale that wants a gradient.

    The bias has a gradient, summed in fp32. There is no other: quantised values have none.
    """
    named: dict[str, Any] = {"dtype": dtype, "fast_accumulate": fast_accumulate}
    chosen = PRODUCTS[choose(a, b, a_scale, b_scale, bias, **named).implementation]

    def product(bias: Tensor | None) -> Tensor:
        return chosen(a, b, a_scale, b_scale, bias, **named)

    if bias is not None and bias.requires_grad and torch.is_grad_enabled() and on_gpu(a):
        out: Tensor = BiasGradient.apply(bias, product)
        return out
    return product(bias)
