"""``weight_only.cu`` with a weight of x's own 16-bit dtype: products of up to 16 rows."""

from __future__ import annotations

from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CudaPlan, pointer_aligned
from weft.operators.launch import Plans
from weft.operators.matmul.weight_only_cuda import columns_of, launch
from weft.operators.matmul.weight_only_cuda import why_not as weight_only_why_not

FORMAT = "wide"


def why_not(x: Tensor, w: Tensor) -> str:
    """Why the kernel does not take these tensors (an empty string when it does)."""
    if reason := weight_only_why_not(x, w):
        return reason
    if x.shape[1] % columns_of(FORMAT):
        return f"{x.shape[1]} columns; warps take {columns_of(FORMAT)} at a time"
    if w.stride(1) != 1 or w.stride(0) % 8 or not pointer_aligned(w):
        return "rows of w that do not begin on 16 bytes"
    return ""


class SkinnyPlan:
    """Call it with ``(x, w, bias, y)``; y is row-major [M, N] of x's dtype; without a bias, w takes its place."""

    def __init__(self, plan: CudaPlan):
        self.plan = plan

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor, y: Tensor) -> None:
        self.plan(x, w, w, w, bias, y)


def plan(x: Tensor, w: Tensor, bias: Tensor | None) -> SkinnyPlan:
    """Raises Declined as :func:`why_not` says."""
    if reason := why_not(x, w):
        raise Declined(reason)
    strides = (*x.stride(), w.stride(0) // 2, 0, 0, 0, 0, 0 if bias is None else bias.stride(0))
    options = (False, False, bias is not None)
    steps = x.shape[1] // columns_of(FORMAT)
    return SkinnyPlan(launch(x, w.shape[0], strides, steps, x.dtype, FORMAT, 0, options))


plans = Plans(plan)
