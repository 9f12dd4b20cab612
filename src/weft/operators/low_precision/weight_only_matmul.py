"""``weight_only_matmul(x, weight, bias=None)``: a linear layer's product for few rows with a weight of int8, int4 or fp8 codes.

Reads N·K codes of 8 or 4 bits and their scales; x and y have 16 bits, sums 32. Reading the codes is the limit (theory and
measurements: README.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Operator, Tolerance
from weft.operators.call import (
    Choice,
    cast_for_products,
    check_device,
    check_same,
    check_tensor,
    eager,
    guarded,
    on_gpu,
)
from weft.operators.launch import Plans, compile_request
from weft.operators.low_precision import skinny_hopper
from weft.operators.low_precision.quantized_weight import (
    BITS,
    GROUPS,
    SCALES,
    QuantizedWeight,
    block,
    dequantize_weight,
)
from weft.operators.low_precision.weight_only_definition import MUTANTS, OPTIONS, WORKLOADS, cost, inputs, reference
from weft.operators.low_precision.weight_only_kernels import plans
from weft.operators.low_precision.weight_only_peers import dense, int8pack, tinygemm

MOST_ROWS = 64  # of x, up to which the rate of the memory is the limit
MEASURED = (
    "few rows of x: codes come by TMA and become floats on their way to wgmma; for 1 to 64 rows at 8192 x 8192 an H200 took "
    "15 to 26 µs of int4 in groups of 128 (Triton's kernel 22 to 85), 22 to 26 of int8 and fp8 (Triton's 25 to 84)"
)

# ---- PyTorch operators -----------------------------------------------------------------------------------------------


@torch.library.triton_op("weft::weight_only_matmul", mutates_args=())
def weight_only_matmul_op(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, format: str, group: int
) -> Tensor:
    weight = QuantizedWeight(words, scale, zero, format, group, x.shape[1])
    return _launched(x, weight, bias) if on_gpu(x) else reference(x, weight, bias)


def _launched(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, plans: Plans = plans) -> Tensor:
    y = torch.empty((x.shape[0], weight.words.shape[0]), dtype=x.dtype, device=x.device)
    if y.numel():
        operands, options = _operands(x, weight, bias), _options(weight, bias)
        plans.of(operands, *options)(*operands, y)
    return y


def _operands(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> tuple[Tensor, ...]:
    """What the kernel's five pointers are: ``words`` where it reads nothing."""
    words, scale, zero, *_ = weight
    return x, words, scale, words if zero is None else zero, words if bias is None else bias


def _options(weight: QuantizedWeight, bias: Tensor | None) -> tuple[Any, ...]:
    return weight.zero is not None, bias is not None, weight.format, weight.group


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, words, scale, zero, _, *form = inputs
    ctx.save_for_backward(words, scale, zero)
    ctx.form = (*form, x.shape[1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = None
    if ctx.needs_input_grad[0]:
        dx = torch.mm(dy, dequantize_weight(QuantizedWeight(*ctx.saved_tensors, *ctx.form), dy.dtype))
    return dx, None, None, None, dy.sum(0) if ctx.needs_input_grad[4] else None, None, None


@torch.library.custom_op("weft::weight_only_matmul_cuda", mutates_args=())
def cuda_op(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, format: str, group: int
) -> Tensor:
    weight = QuantizedWeight(words, scale, zero, format, group, x.shape[1])
    # the choice may have been made while tracing, when alignment was not known
    return _launched(x, weight, bias, plans if skinny_hopper.why_not(x, words) else skinny_hopper.plans)


@cuda_op.register_fake
def _(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, format: str, group: int
) -> Tensor:
    return x.new_empty((x.shape[0], words.shape[0]))


for _op in (weight_only_matmul_op, cuda_op):
    _op.register_autograd(_backward, setup_context=_save)

# ---- implementations -------------------------------------------------------------------------------------------------


def weight_only_matmul_triton(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    if eager(*_operands(x, weight, bias)):
        return _launched(x, weight, bias)
    words, scale, zero, format, group, _ = weight
    y: Tensor = torch.ops.weft.weight_only_matmul(x, words, scale, zero, bias, format, group)
    return y


def weight_only_matmul_cuda(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    if reason := skinny_hopper.why_not(x, weight.words):
        raise Declined(reason)
    if eager(*_operands(x, weight, bias)) or compile_request():
        return _launched(x, weight, bias, skinny_hopper.plans)
    words, scale, zero, format, group, _ = weight
    y: Tensor = torch.ops.weft.weight_only_matmul_cuda(x, words, scale, zero, bias, format, group)
    return y


# ---- definition ------------------------------------------------------------------------------------------------------

weight_only_matmul = Operator(
    name="weight_only_matmul",
    axes={"M": "rows of x", "N": "rows of the weight", "K": "columns of both"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options=OPTIONS,
    tolerance=Tolerance(scale="tensor", terms=lambda w: max(w.axes.values())),
    workloads=WORKLOADS,
    mutants=MUTANTS,
)

weight_only_matmul.implementation("triton", arch=">=sm_80")(weight_only_matmul_triton)
weight_only_matmul.implementation("cuda", arch="==sm_90", devices=("cuda",), dtypes=("fp16", "bf16"))(
    weight_only_matmul_cuda
)
weight_only_matmul.implementation("torch")(reference)
weight_only_matmul.implementation("dense", devices=("cuda",))(dense)
weight_only_matmul.implementation("tinygemm", devices=("cuda",), dtypes=("bf16",))(tinygemm)
weight_only_matmul.implementation("int8pack", devices=("cuda",), dtypes=("bf16",))(int8pack)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    check_tensor("weight_only_matmul", "x", x)
    if x.ndim != 2:
        raise ValueError(
            f"weight_only_matmul: argument 'x' has shape {tuple(x.shape)}; expected a matrix (two dimensions)"
        )
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(
            f"weight_only_matmul: argument 'weight' is a {type(weight).__name__}; expected a QuantizedWeight, as "
            "quantize_weight or prepare_weight of weft.operators.low_precision.quantized_weight make one"
        )
    _check_weight(x, weight)
    if x.shape[1] != weight.columns:
        raise ValueError(
            f"weight_only_matmul: 'x' has shape {tuple(x.shape)} and 'weight' {weight.columns} columns; expected as many"
        )
    if bias is not None:
        check_tensor("weight_only_matmul", "bias", bias)
        check_same("weight_only_matmul", "bias", bias, "x", x)
        n = weight.words.shape[0]
        if tuple(bias.shape) != (n,):
            raise ValueError(
                f"weight_only_matmul: argument 'bias' has shape {tuple(bias.shape)}; expected ({n},), an element for each "
                "row of 'weight'"
            )


def _check_weight(x: Tensor, weight: QuantizedWeight) -> None:
    """That the parts of a weight fit each other: somebody may have put them together."""
    words, scale, zero, format, group, k = weight
    if format not in BITS or group not in ((0, *GROUPS) if format != "int4" else GROUPS) or (group and k % group):
        raise ValueError(
            f"weight_only_matmul: 'weight' has format {format!r}, group {group!r} and {k} columns; expected one of "
            f"{', '.join(BITS)} and a group of 0 (not int4), 32, 64 or 128 that divides the columns"
        )
    check_tensor("weight_only_matmul", "weight.words", words, (torch.int32,))
    check_tensor("weight_only_matmul", "weight.scale", scale, SCALES)
    n = words.shape[0] if words.ndim else 0
    wanted = {"words": (n, -(-k // block(format)) * 64), "scale": (n, k // group) if group else (n,)}
    parts = {"words": words, "scale": scale}
    if zero is not None:
        check_tensor("weight_only_matmul", "weight.zero", zero, (torch.uint8,))
        wanted["zero"], parts["zero"] = wanted["scale"], zero
    for name, t in parts.items():
        check_device("weight_only_matmul", f"weight.{name}", t, "x", x)
        if tuple(t.shape) != wanted[name]:
            raise ValueError(
                f"weight_only_matmul: 'weight.{name}' has shape {tuple(t.shape)}; expected {wanted[name]} for {format} with "
                f"group {group} and {k} columns"
            )
    if not words.is_contiguous():
        raise ValueError(
            f"weight_only_matmul: 'weight.words' has strides {words.stride()}; expected a contiguous tensor"
        )
    if torch.is_grad_enabled() and scale.requires_grad:
        raise ValueError(
            "weight_only_matmul: 'weight.scale' requires a gradient; expected a constant weight (gradients are of x and bias)"
        )


@weight_only_matmul.choice
@guarded
def choose(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Choice:
    check(x, weight, bias)
    if not on_gpu(x):
        return Choice(
            "torch", "the tensors are on the CPU, where weft runs PyTorch's product with the dequantised weight"
        )
    if x.shape[0] * weight.words.shape[0] == 0:
        return Choice("torch", "empty: nothing to launch")
    if x.shape[0] > MOST_ROWS:
        return Choice("torch", f"over {MOST_ROWS} rows of x: the weight is dequantised and the product is cuBLAS's")
    if not skinny_hopper.why_not(x, weight.words):
        return Choice("cuda", MEASURED, skinny_hopper.plans)
    return Choice("triton", "few rows of x: codes are read once and unpacked in registers", plans)


def _public_plan(*arguments: Any) -> Any:
    x, words, scale, zero, bias, has_zero, has_bias, format, group, columns = arguments
    weight = QuantizedWeight(words, scale, zero if has_zero else None, format, group, columns)
    plans = choose(x, weight, bias if has_bias else None).plans
    return None if plans is None else plans.build(*arguments[:-1])


public_plans = Plans(_public_plan)


@weight_only_matmul.function
def weight_only_matmul_function(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """A linear layer's product for few rows with a quantised weight: x · wᵀ + bias.

    Args:
        x: [M, K]; float16 or bfloat16 (float32 is right, but multiplied without tensor cores), any strides. Made for M up to
            64; for more the weight is dequantised and multiplied by PyTorch.
        weight: [N, K] in int8, int4 or fp8, made once by ``quantize_weight`` or ``prepare_weight`` of
            ``weft.operators.low_precision.quantized_weight``.
        bias: [N], of x's dtype and device, or None.

    Returns:
        [M, N] of x's dtype, accumulated in fp32; codes are multiplied without rounding, scales in fp32. Under autocast x and
        the bias are cast as ``torch.nn.functional.linear`` does. Gradients are of x and the bias.

    Raises:
        TypeError: x or the bias of another dtype, a weight that is not prepared.
        ValueError: shapes, devices or parts of the weight that do not fit, a scale that wants a gradient.
    """
    if weight.__class__ is QuantizedWeight:
        operands = _operands(x, weight, bias)
        if eager(*operands):
            ready = public_plans.of(operands, *_options(weight, bias), weight.columns)
            if ready is not None:
                y = torch.empty((x.shape[0], weight.words.shape[0]), dtype=x.dtype, device=x.device)
                ready(*operands, y)
                return y
    x, bias = cast_for_products(x, bias)
    chosen = choose(x, weight, bias).implementation
    if chosen == "torch":
        return reference(x, weight, bias)
    words, scale, zero, format, group, _ = weight
    launch = torch.ops.weft.weight_only_matmul_cuda if chosen == "cuda" else torch.ops.weft.weight_only_matmul
    out: Tensor = launch(x, words, scale, zero, bias, format, group)
    return out
