"""``linear_quantized(x, weight, bias, scale=...)``: a linear layer whose result leaves as 8-bit codes of a given scale.

Delayed scaling (Micikevicius et al. 2022, arXiv 2209.05433): the scale comes from the largest values of earlier steps, so the
result is quantised while it is in registers, and its own largest value comes back for the next step's scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Declined, Operator, Tolerance
from weft.operators import peers
from weft.operators.call import Choice, cast_for_products, check_device, check_tensor, guarded, rows_of
from weft.operators.hopper.gemm import HopperPlan
from weft.operators.launch import Plans, target_sm
from weft.operators.linear import linear_activations
from weft.operators.linear.linear import COPY, NOT_HOPPER, check, flat, handed_over, without_hopper
from weft.operators.linear.linear_calls import hopper_declines
from weft.operators.linear.linear_quantized_definition import (
    E4M3,
    MUTANTS,
    NAMES,
    OPTIONS,
    WORKLOADS,
    Quantized,
    cost,
    inputs,
    reference,
    usual,
)
from weft.operators.linear.linear_quantized_kernels import plans
from weft.operators.matmul.matmul import default_precision
from weft.operators.quantization.dispatch import QUANTIZE
from weft.operators.quantization.formats import FORMATS, Scheme, format_of

DTYPES = tuple(FORMATS[name].dtype for name in NAMES)

# ---- implementations -------------------------------------------------------------------------------------------------


def results(x: Tensor, weight: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    """Room for codes (as bytes), and a zero."""
    n = weight.shape[0] // (2 if linear_activations.of(activation).gated else 1)
    return (
        torch.empty((*x.shape[:-1], n), dtype=torch.uint8, device=x.device),
        torch.zeros(1, dtype=torch.float32, device=x.device),
    )


@torch.no_grad()
def linear_quantized_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor,
    dtype: torch.dtype = E4M3,
    activation: str | None = None,
) -> Quantized:
    if rows_of(x) is None:
        raise Declined(COPY)
    q, amax = results(x, weight, activation)
    if q.numel():
        call = (flat(x), weight, x if bias is None else bias)
        ready = plans.of(call, activation, bias is not None, format_of(dtype), default_precision())
        ready(*call, scale, q, amax.view(torch.int32))
    return q.view(dtype), amax


class HopperWithAmax:
    """The main loop's launch with the largest |y| before it is rounded; y in x's dtype, or codes in e4m3."""

    def __init__(self, x: Tensor, weight: Tensor, activation: str | None, biased: bool, codes: bool):
        chosen = linear_activations.of(activation)
        self.n = weight.shape[0] // 2 if chosen.gated else 0
        gate, up = self.halves(weight)
        self.plan = HopperPlan(
            x,
            gate.t(),
            E4M3 if codes else None,
            biased=biased,
            activation=chosen.on_hopper,
            up=None if up is None else up.t(),
            amax=True,
        )

    def halves(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return (weight[: self.n], weight[self.n :]) if self.n else (weight, None)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, y: Tensor, amax: Tensor
    ) -> None:
        gate, up = self.halves(weight)
        self.plan(x, gate, y, scale, bias=bias, up=up, amax=amax)


hopper_plans = Plans(HopperWithAmax)


@torch.no_grad()
def linear_quantized_hopper(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor,
    dtype: torch.dtype = E4M3,
    activation: str | None = None,
) -> Quantized:
    """One launch, which leaves codes in e4m3."""
    if dtype != E4M3:
        raise Declined(f"codes in {dtype}; the main loop leaves float8_e4m3fn")
    if rows_of(x) is None:
        raise Declined(COPY)
    matrix = flat(x)
    if reason := hopper_declines(matrix, weight, bias, None, activation, E4M3):
        raise Declined(reason)
    q, amax = results(x, weight, activation)
    q = q.view(E4M3)
    if q.numel():
        ready = hopper_plans.of((matrix, weight), activation, bias is not None, True)
        ready(matrix, weight, bias, scale, q, amax)
    return q, amax


@torch.no_grad()
def linear_quantized_apart(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor,
    dtype: torch.dtype = E4M3,
    activation: str | None = None,
) -> Quantized:
    """y by the main loop, which also finds its largest value, and codes of it in a second launch."""
    if rows_of(x) is None:
        raise Declined(COPY)
    matrix = flat(x)
    if reason := hopper_declines(matrix, weight, bias, None, activation):
        raise Declined(reason)
    q, amax = results(x, weight, activation)
    if q.numel():
        y = torch.empty((matrix.shape[0], q.shape[-1]), dtype=x.dtype, device=x.device)
        hopper_plans.of((matrix, weight), activation, bias is not None, False)(matrix, weight, bias, None, y, amax)
        scheme = Scheme(format_of(dtype), "tensor")
        QUANTIZE.kernel("triton").of((y, scale), *scheme)(y, q, scale, y, 0, 0)
    return q.view(dtype), amax


linear_quantized = Operator(
    name="linear_quantized",
    axes={"M": "rows of x", "N": "columns of y", "K": "columns of x and of weight"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options=OPTIONS,
    tolerance=Tolerance(scale="tensor", terms=lambda w: max(w.axes.values()), neighbours=0.25),
    workloads=WORKLOADS,
    mutants=MUTANTS,
)

linear_quantized.implementation("triton", arch=">=sm_80")(linear_quantized_triton)
for _name, _function in (("cuda", linear_quantized_hopper), ("cuda-apart", linear_quantized_apart)):
    linear_quantized.implementation(_name, backend="cuda", arch="==sm_90", dtypes=("bf16", "fp16"), devices=("cuda",))(
        _function
    )
linear_quantized.implementation("torch")(usual)
linear_quantized.implementation("torch.compile", devices=("cuda",))(peers.Compiled(usual))

# ---- what users call -------------------------------------------------------------------------------------------------


@linear_quantized.choice
@guarded
def choose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor,
    dtype: torch.dtype = E4M3,
    activation: str | None = None,
) -> Choice:
    x, weight, bias = cast_for_products(x, weight, bias)
    name = "linear_quantized"
    check(name, x, weight, bias, None, activation)
    if dtype not in DTYPES:
        raise TypeError(f"{name}: argument 'dtype' is {dtype!r:.40}; expected {', '.join(map(str, DTYPES))}")
    check_tensor(name, "scale", scale, (torch.float32,))
    check_device(name, "scale", scale, "x", x)
    if scale.numel() != 1 or scale.ndim > 1:
        raise ValueError(f"{name}: argument 'scale' has shape {tuple(scale.shape)}; expected (1,) or ()")
    if reason := handed_over(x, weight, None, bias, scale):
        return Choice("torch", reason)
    reason = NOT_HOPPER
    if target_sm(x.device) == 90:
        if dtype == E4M3 and not hopper_declines(flat(x), weight, bias, None, activation, E4M3):
            return Choice("cuda", "Hopper's main loop, which leaves codes and finds the largest value")
        if not (reason := hopper_declines(flat(x), weight, bias, None, activation)):
            return Choice("cuda-apart", "Hopper's main loop finds the largest value; codes in a second launch")
    return without_hopper(x.shape[-1], reason)


WAYS = {
    "triton": linear_quantized_triton,
    "cuda": linear_quantized_hopper,
    "cuda-apart": linear_quantized_apart,
}


@linear_quantized.function
def linear_quantized_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor,
    dtype: dtype = E4M3,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """A linear layer's result as 8-bit codes of a given scale, and its largest value: delayed scaling.

    Args:
        x, weight, bias, activation: as of ``weft.ops.linear``, which gives y.
        scale: float32, [1] or []: what a code of 1 stands for. Commonly the largest |y| of earlier steps divided by the dtype's
            largest value. Its value is not looked at: of zero, NaN or an infinity codes are what y · (1 / scale) makes of them.
        dtype: of the codes: float8_e4m3fn (± 448), float8_e5m2 (± 57344) or int8 (± 127).

    Returns:
        (q, amax). q [..., N]: y · (1 / scale), held within ± the dtype's largest value and rounded to nearest, ties to even, as
        ``weft.ops.quantize`` does it; of NaN it is NaN, and 0 in int8. amax, float32 [1]: the largest |y| before any rounding;
        NaN if any y is.

    Raises:
        TypeError: tensors of other dtypes, or another ``dtype``.
        ValueError: shapes or devices that do not fit, or an unknown activation.

    Results have no gradient. Where PyTorch's product is taken, and where codes are made in a second launch
    (``weft.ops.explain``), y is rounded to x's dtype first.
    """
    named: dict[str, Any] = {"scale": scale, "dtype": dtype, "activation": activation}
    x, weight, bias = cast_for_products(x, weight, bias)
    chosen = choose(x, weight, bias, **named).implementation
    if chosen in WAYS:
        return WAYS[chosen](x, weight, bias, **named)
    return (usual if x.is_cuda else reference)(x, weight, bias, **named)
