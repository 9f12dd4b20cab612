"""``scaled_matmul(a, b, a_scale, b_scale)``: the product of two matrices of 8-bit values, fp8 or int8, times their scales.

2·M·N·K operations on half the bytes of 16-bit operands, at twice the rate of the tensor cores; what it costs is in the numbers
(theory, accuracy: README.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Declined, Operator, Tolerance
from weft.operators import peers
from weft.operators.call import (
    FLOATS,
    Choice,
    KernelFunction,
    check_device,
    check_flag,
    check_tensor,
    check_values,
    guarded,
    on_gpu,
    traced,
)
from weft.operators.hopper import gemm
from weft.operators.launch import target_sm
from weft.operators.low_precision.scaled_definition import (
    MUTANTS,
    OPTIONS,
    WORKLOADS,
    cost,
    dequantised,
    inputs,
    kind_of,
    reference,
    terms,
)
from weft.operators.low_precision.scaled_kernels import plans

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

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
    return gemm.why_not(a, b, dtype)


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
        plan = gemm.plans.of((a, b), dtype, *counts, blocks, two_levels, bias is not None)
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


scaled_matmul = Operator(
    name="scaled_matmul",
    axes={"M": "rows of a", "N": "columns of b", "K": "columns of a, rows of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options=OPTIONS,
    tolerance=Tolerance(scale="tensor", ulps=2.0, terms=terms),
    workloads=WORKLOADS,
    mutants=MUTANTS,
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
        raise TypeError(f"scaled_matmul: argument 'dtype' is {dtype!r:.40}; expected {', '.join(map(str, FLOATS))}")
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
@guarded
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
    check_scales: bool = False,
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
    check_flag("scaled_matmul", "check_scales", check_scales)
    check_flag("scaled_matmul", "fast_accumulate", fast_accumulate)
    named: dict[str, Any] = {"dtype": dtype, "fast_accumulate": fast_accumulate}
    chosen = PRODUCTS[choose(a, b, a_scale, b_scale, bias, **named).implementation]

    if check_scales:
        for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
            check_values(
                "scaled_matmul",
                name,
                scale,
                lambda t: ~t.isfinite(),
                flag="check_scales",
                expected="finite fp32 numbers",
            )

    def product(bias: Tensor | None) -> Tensor:
        return chosen(a, b, a_scale, b_scale, bias, **named)

    if bias is not None and bias.requires_grad and torch.is_grad_enabled() and on_gpu(a):
        out: Tensor = BiasGradient.apply(bias, product)
        return out
    return product(bias)
