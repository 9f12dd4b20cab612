"""Which kernel computes a product of 8-bit matrices, and one of few rows with a weight of codes: the tables are ``SCALED`` and
``WEIGHT_ONLY``. Neither has a kernel backward: quantised values have no gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.operators.call import FLOATS
from weft.operators.checks import check_device, check_shape, check_tensor
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.hopper import gemm
from weft.operators.linear.dispatch import check_bias
from weft.operators.low_precision import scaled_kernels, weight_only_hopper, weight_only_kernels, weight_only_stream
from weft.operators.low_precision.quantized_weight import BITS, GROUPS, SCALES, QuantizedWeight, block
from weft.operators.low_precision.scaled_kernels import BLOCK

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MOST_ROWS = 64  # of x, up to which reading a weight of codes is the limit

# ---- products of 8-bit matrices --------------------------------------------------------------------------------------


class ScaledCall(Call):
    """A call of ``scaled_matmul``, checked: a [M, K], b [K, N]; any tensor is passed for a bias that there is not. Plans are
    called with ``(a, b, a_scale, b_scale, bias, out)``, out [M, N] row-major and of ``dtype``."""

    def __init__(
        self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor, biased: bool, dtype: torch.dtype,
        fast_accumulate: bool,
    ):  # fmt: skip
        self.x = self.a = a
        self.b, self.a_scale, self.b_scale = b, a_scale, b_scale
        self.bias, self.dtype, self.fast_accumulate = bias if biased else None, dtype, fast_accumulate
        self.check()
        self.kind = kind_of(a, b, a_scale, b_scale)

    def check(self) -> None:
        """Raises TypeError or ValueError unless all but the scales' shapes fits."""
        name, a, b, bias = "scaled_matmul", self.a, self.b, self.bias
        for argument, t in (("a", a), ("b", b)):
            check_tensor(name, argument, t, (*FP8, torch.int8))
            check_shape(name, argument, t, t.ndim == 2, "a matrix (two dimensions)")
        if (a.dtype == torch.int8) != (b.dtype == torch.int8):
            raise TypeError(f"{name}: 'a' is {a.dtype} and 'b' {b.dtype}; expected both int8, or both an fp8")
        if a.shape[1] != b.shape[0]:
            raise ValueError(
                f"{name}: 'a' has shape {tuple(a.shape)} and 'b' {tuple(b.shape)}; expected b with {a.shape[1]} rows, "
                "as many as 'a' has columns"
            )
        if self.dtype not in FLOATS:
            raise TypeError(f"{name}: argument 'dtype' is {self.dtype!r:.40}; expected {', '.join(map(str, FLOATS))}")
        others = {"b": b, "a_scale": self.a_scale, "b_scale": self.b_scale}
        for argument in ("a_scale", "b_scale"):
            check_tensor(name, argument, others[argument], (torch.float32,))
            if others[argument].requires_grad:
                raise ValueError(f"{name}: argument '{argument}' wants a gradient, which there is none of")
        if bias is not None:
            check_tensor(name, "bias", bias)
            check_shape(name, "bias", bias, tuple(bias.shape) == (b.shape[1],), f"({b.shape[1]},)")
            others["bias"] = bias
        for argument, t in others.items():
            check_device(name, argument, t, "a", a)

    @property
    def empty(self) -> bool:
        return self.a.shape[0] * self.b.shape[1] == 0


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


def scaled_unsupported(c: ScaledCall) -> str:
    """Why Hopper's main loop cannot take a call."""
    if c.sm != 90:
        return f"wgmma and TMA as it uses them are of sm_90, this is sm_{c.sm}"
    if c.a.dtype == torch.float8_e5m2 or c.b.dtype != c.a.dtype:
        return f"{c.a.dtype} times {c.b.dtype}; it takes two of float8_e4m3fn or two of int8"
    if not (c.a_scale.is_contiguous() and (c.b_scale.t() if c.kind == "block" else c.b_scale).is_contiguous()):
        return "scales that do not lie as quantize makes them"
    if c.bias is not None and (c.bias.dtype != c.dtype or not c.bias.is_contiguous()):
        return "a bias of another dtype than the result's, or with gaps"
    return gemm.why_not(c.a, c.b, c.dtype)


def hopper_launch(c: ScaledCall) -> Any:
    blocks, biased = c.kind == "block", c.bias is not None
    counts = (0, 0) if blocks else (c.a_scale.numel(), c.b_scale.numel())
    two_levels = c.a.dtype != torch.int8 and not c.fast_accumulate
    plan = gemm.HopperPlan(c.a, c.b, c.dtype, gemm.Epilogue(*counts, blocks, biased), two_levels)

    def run(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor, out: Tensor) -> None:
        plan(a, b, out, a_scale, b_scale, bias if biased else None)

    return run


SCALED = Dispatch(
    ScaledCall,
    Route("torch", lambda c: not c.on_gpu, "the tensors are on the CPU, where weft runs the formula in full precision"),
    TRACED, EMPTY,
    Route("cuda", lambda c: True, "two of e4m3 or of int8 by TMA and wgmma, scales in the epilogue",
          hopper_launch, scaled_unsupported, sm=90),
    Route("triton", lambda c: True, "codes go to the tensor cores as they are", scaled_kernels.plan),
)  # fmt: skip

# ---- few rows with a weight of codes ---------------------------------------------------------------------------------


class WeightOnlyCall(Call):
    """A call of ``weight_only_matmul``, checked: x [M, K] with the parts of a :class:`QuantizedWeight`, and what surrounds the
    product; any tensor is passed for what there is not. Plans are called with ``(x, words, scale, zero, bias, norm, residual,
    y)``, y [M, outputs] row-major."""

    def __init__(
        self, x: Tensor, words: Tensor, scale: Tensor, zero: Tensor, bias: Tensor, norm: Tensor, residual: Tensor,
        has_zero: bool, has_bias: bool, normed: bool, added: bool, activation: str | None, eps: float, format: str, group: int,
        columns: int,
    ):  # fmt: skip
        name, self.x, self.bias, self.eps = "weight_only_matmul", x, bias if has_bias else None, eps
        self.norm, self.residual, self.gated = (
            norm if normed else None,
            residual if added else None,
            activation is not None,
        )
        self.weight = QuantizedWeight(words, scale, zero if has_zero else None, format, group, columns)
        check_tensor(name, "x", x)
        check_shape(name, "x", x, x.ndim == 2, "a matrix (two dimensions)")
        check_parts(x, self.weight)
        if x.shape[1] != columns:
            raise ValueError(f"{name}: 'x' has shape {tuple(x.shape)} and 'weight' {columns} columns; expected as many")
        check_bias(name, self.bias, x, "weight", words.shape[0])
        if activation not in (None, "swiglu") or (activation and words.shape[0] % 2):
            raise ValueError(
                f"{name}: activation {activation!r:.40} of a weight of {words.shape[0]} rows; expected None, or swiglu of an "
                "even number"
            )
        self.outputs = words.shape[0] // (2 if activation else 1)
        for argument, t, shape in (
            ("norm", self.norm, (columns,)),
            ("residual", self.residual, (len(x), self.outputs)),
        ):
            if t is not None:
                check_tensor(name, argument, t, (x.dtype,))
                check_device(name, argument, t, "x", x)
                check_shape(name, argument, t, tuple(t.shape) == shape, str(shape))

    @property
    def empty(self) -> bool:
        return len(self.x) * len(self.weight.words) == 0


def check_parts(x: Tensor, weight: QuantizedWeight) -> None:
    """That the parts of a weight fit each other: a caller may have put them together."""
    name, (words, scale, zero, format, group, k) = "weight_only_matmul", weight
    if format not in BITS or group not in ((0, *GROUPS) if format != "int4" else GROUPS) or (group and k % group):
        raise ValueError(
            f"{name}: 'weight' has format {format!r}, group {group!r} and {k} columns; expected one of "
            f"{', '.join(BITS)} and a group of 0 (not int4), 32, 64 or 128 that divides the columns"
        )
    n = words.shape[0] if isinstance(words, Tensor) and words.ndim else 0
    of_scale = (n, k // group) if group else (n,)
    parts: list[Any] = [
        ("words", words, (torch.int32,), (n, -(-k // block(format)) * 64)),
        ("scale", scale, SCALES, of_scale),
    ]
    if zero is not None:
        parts.append(("zero", zero, (torch.uint8,), of_scale))
    for part, t, dtypes, _ in parts:
        check_tensor(name, f"weight.{part}", t, dtypes)
    for part, t, _, wanted in parts:
        check_device(name, f"weight.{part}", t, "x", x)
        if tuple(t.shape) != wanted:
            raise ValueError(
                f"{name}: 'weight.{part}' has shape {tuple(t.shape)}; expected {wanted} for {format} with "
                f"group {group} and {k} columns"
            )
    if not words.is_contiguous():
        raise ValueError(f"{name}: 'weight.words' has strides {words.stride()}; expected a contiguous tensor")
    if torch.is_grad_enabled() and scale.requires_grad:
        raise ValueError(
            f"{name}: 'weight.scale' requires a gradient; expected a constant weight (gradients are of x and bias)"
        )


class Apart:
    """A plan of the product alone, ``(x, words, scale, zero, bias, y)``, with PyTorch's operators before and behind it."""

    def __init__(self, c: WeightOnlyCall, made: Callable[..., Any]):
        x = c.x if c.norm is None else torch.empty(c.x.shape, dtype=c.x.dtype, device=c.x.device)
        self.product, self.eps = made(x, c.weight, c.bias), c.eps
        self.normed, self.gated, self.added = c.norm is not None, c.gated, c.residual is not None

    def __call__(
        self,
        x: Tensor,
        words: Tensor,
        scale: Tensor,
        zero: Tensor,
        bias: Tensor,
        norm: Tensor,
        residual: Tensor,
        y: Tensor,
    ) -> None:
        if self.normed:
            x = F.rms_norm(x, x.shape[-1:], norm, self.eps)
        whole = y.new_empty(len(x), len(words)) if self.gated or self.added else y
        self.product(x, words, scale, zero, bias, whole)
        if self.gated:
            gate, up = whole.chunk(2, 1)
            whole = torch.mul(F.silu(gate), up, out=None if self.added else y)
        if self.added:
            torch.add(whole, residual, out=y)


WEIGHT_ONLY = Dispatch(
    WeightOnlyCall, ON_CPU, EMPTY,
    Route("dequantized", lambda c: len(c.x) > MOST_ROWS,
          "over 64 rows of x: the weight is dequantised in one pass, and the product is cuBLAS's",
          lambda c: Apart(c, weight_only_kernels.DequantizedPlan)),
    Route("stream", lambda c: True,
          "up to 8 rows of x: each warp streams its own part of the codes, with norm, activation and residual in one launch",
          lambda c: weight_only_stream.StreamPlan(c.x, c.weight, c.bias, c.norm, c.residual, c.eps, c.gated),
          lambda c: weight_only_stream.why_not(c.x, c.weight, c.norm, c.residual), sm=90),
    Route("cuda", lambda c: True,
          "few rows of x: codes come by TMA and become floats on their way to wgmma, 1.1 to 2.4 times Triton's kernel",
          lambda c: Apart(c, weight_only_hopper.WeightOnlyPlan),
          lambda c: weight_only_hopper.why_not(c.x, c.weight.words), sm=90),
    Route("triton", lambda c: True, "few rows of x: codes are read once and unpacked in registers",
          lambda c: Apart(c, weight_only_kernels.plan)),
)  # fmt: skip
