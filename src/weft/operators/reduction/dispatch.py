"""Which kernel a reduction takes, why, and its launch: one table for forward and one for the gradient.

The six operators share both tables. The gradients of sums and means are views of the result's gradient and take no kernel.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.operators.axis_view import AxisView, axis_views
from weft.operators.checks import check_dim, check_dtype, check_flag, check_tensor, check_value
from weft.operators.cuda import CTYPES, CudaPlan, flags, pointer_aligned
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import INTERPRETING
from weft.operators.reduction import extremum_mask
from weft.operators.reduction.argmax_groups import ArgmaxPlan
from weft.operators.reduction.extremum_mask import MaskPlan, SpansPlan
from weft.operators.reduction.kernels import Formula, GradientPlan, ReducePlan, negative

COPY = "dimensions beside 'dim' that do not collapse into one stride each"
LARGE = 2**20  # elements; of fewer, launching is what counts, and Triton's plans serve


@dataclass(frozen=True, eq=False)
class Reduction:
    """One of the six operators."""

    name: str
    reference: Callable[..., Tensor]  # in PyTorch, (x, dim, keepdim, order[, dtype]); order is that of a norm
    formula: Callable[[float], Formula | None] | None  # of an order; None where no kernel has it, and at all for argmax
    mean: bool = False  # results are divided by the number of elements
    empty: bool = False  # a reduction of no elements has a result
    wide_in_autocast: bool = False  # PyTorch gives fp32 under autocast

    def check(self, x: Tensor, dim: Any, keepdim: bool) -> Any:
        """``dim`` from the front; of several a sorted tuple, or None if they are all. Raises TypeError or ValueError."""
        check_tensor(self.name, "x", x)
        check_flag(self.name, "keepdim", keepdim)
        if isinstance(dim, (tuple, list)) and self.formula is not None:
            front: Any = tuple(sorted(check_dim(self.name, d, x.ndim) for d in dim))
            check_value(self.name, "dim", dim, len(set(front)) == len(front), "each dimension once")
            front = None if len(front) in (0, x.ndim) else front if len(front) > 1 else front[0]
        else:
            front = None if dim is None else check_dim(self.name, dim, x.ndim)
        if self.along(x, front) == 0 and not self.empty:
            raise ValueError(
                f"{self.name}: argument 'x' has shape {tuple(x.shape)}, no elements along dim={dim}; expected at least one"
            )
        return front

    def along(self, x: Tensor, front: Any) -> int:
        """How many elements a result is of; ``front`` is what ``check`` returned."""
        return math.prod(x.shape if front is None else x.shape[front : front + 1] if isinstance(front, int)
                         else [x.shape[d] for d in front])  # fmt: skip


@dataclass
class ReductionCall(Call):
    """What conditions and launches look at."""

    x: Tensor
    op: Reduction
    dim: Any  # several only where no view makes them one
    keepdim: bool
    order: float
    into: torch.dtype | None = None  # of the result, where the caller or autocast asks for one
    gradient: bool = True  # one is wanted, so that an extremum saves which elements equal it
    dy: Any = None  # the result's gradient, for a launch of the gradient

    def __post_init__(self) -> None:
        self.several = isinstance(self.dim, (tuple, list))
        self.dim = self.op.check(self.x, self.dim, self.keepdim)
        check_dtype(self.op.name, self.into)

    # Any: what is None here, no route with a launch supports

    @functools.cached_property
    def formula(self) -> Any:
        return None if self.op.formula is None else self.op.formula(self.order)

    @functools.cached_property
    def view(self) -> Any:
        found = axis_views(self.x, self.dim, in_order=self.op.formula is None)
        return found and found[0].by_rows

    @functools.cached_property
    def views(self) -> Any:
        """Of x and of its gradient."""
        return axis_views(self.x, self.dim, torch.empty_like(self.x, device="meta"))

    @property
    def large(self) -> bool:
        return self.x.numel() >= LARGE and not INTERPRETING

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        if self.op.formula is None:
            return torch.int64
        return self.into or self.x.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        if self.dim is None:
            return (1,) * self.x.ndim if self.keepdim else ()
        return (*self.x.shape[: self.dim], *((1,) if self.keepdim else ()), *self.x.shape[self.dim + 1 :])

    @property
    def divisor(self) -> float:
        n = self.x.numel() if self.dim is None else self.x.shape[self.dim]
        return float(n) if self.op.mean else 1.0

    @property
    def transposed(self) -> bool:
        """Whether the rows of x are columns of its view."""
        return self.dim is not None and self.views[0].M == 1 and self.x.shape[: self.dim].numel() > 1

    @functools.cached_property
    def strides(self) -> Any:
        """Of dy, in M and K of the view."""
        how = (self.dim, self.keepdim)
        return None if self.views is None else extremum_mask.strides_of(self.dy, *how, self.transposed)


# ---- Triton ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardPlan:
    """Call with x: makes the result and launches ``launch(x, out)``."""

    launch: Callable[[Tensor, Tensor], None]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=x.device)
        self.launch(x, out)
        return out


def no_formula(c: ReductionCall) -> bool:
    return c.op.formula is not None and c.formula is None


def reduce_unsupported(c: ReductionCall) -> str:
    if no_formula(c):
        return f"a norm of order {c.order}; the kernels take 1, 2 and infinity"
    return COPY if c.view is None else ""


def reduce_launch(c: ReductionCall) -> ForwardPlan:
    v, x = c.view, c.x
    total = c.dim is None and v.M * v.K > 1
    if c.formula is None:
        return ForwardPlan(ArgmaxPlan(v, x.device, x.dtype, total=total), c.shape, c.dtype)
    return ForwardPlan(ReducePlan(v, x.device, x.dtype, c.formula, c.divisor, total=total, x=x), c.shape, c.dtype)


def gradient_unsupported(c: ReductionCall) -> str:
    if c.formula is None or c.formula.gradient is None:
        return "the gradient reads no x: the kernels take norms of order 1, 2 and infinity"
    return COPY if c.strides is None else ""


# ---- extrema that save what their gradient needs ---------------------------------------------------------------------


def mask_unsupported(c: ReductionCall) -> str:
    if c.formula is None or not c.formula.extremum:
        return "the gradient takes more than which elements equal the result"
    if c.views is None:
        return COPY
    v = c.views[0]
    if c.dim is None and v.M * v.K > 1:
        return "all elements of a tensor that is not dense"
    return "" if extremum_mask.fits_a_tile(v) else f"{v.N} elements are more than a tile holds"


def spans_unsupported(c: ReductionCall) -> str:
    reason = mask_unsupported(c)
    if not reason:
        return "a tile holds all that shares a result"
    return reason if c.formula is None or not c.formula.extremum or c.views is None else ""


# ---- CUDA C++: dense rows of 2 to 8 elements, read 16 bytes at a time ------------------------------------------------

FOLDER = Path(__file__).parent
EXTENTS = (3, 5, 6, 7)  # Triton reads rows of 2, 4 and 8 as one contiguous range
THREADS = 256
MOST_BLOCKS = 2**31 - 1  # of a grid, along x
# argmax of rows that Triton is faster at, by bytes of an element: 630 us against 621, 997 against 960, 1120 against 1085 (H200)
ARGMAX_SLOWER = {2: (6,), 4: (6, 7)}


def rows_of_block(x: Tensor) -> int:
    return THREADS * 16 // x.element_size()


def rows_unsupported(c: ReductionCall, *views: AxisView, extents: tuple[int, ...] = EXTENTS) -> str:
    """Why x, or its gradient, is not dense rows of these extents."""
    v = views[0]
    if c.dim is None and v.M > 1:
        return "all elements of a tensor; the kernel takes rows"
    if v.N not in extents or any(w.K != 1 or w.n != 1 or (w.M > 1 and w.m != w.N) for w in views):
        return f"not dense rows of {', '.join(map(str, extents))} elements of {c.x.dtype}"
    if not pointer_aligned(c.x):
        return "memory that does not begin on 16 bytes"
    if -(-v.M // rows_of_block(c.x)) > MOST_BLOCKS:
        return f"{v.M} rows; a grid has at most {MOST_BLOCKS} blocks"
    return ""


def rows_plan(c: ReductionCall, v: AxisView, source: str, kernel: str, *scalars: Any) -> CudaPlan:
    """Args: kernel: its name with ``{}`` for the dtype and the extent."""
    rows, expression = rows_of_block(c.x), kernel.format(f"{CTYPES[c.x.dtype]}, {v.N}")
    every, shared = (ctypes.c_longlong(v.M), *scalars), rows * v.N * c.x.element_size()
    return CudaPlan(FOLDER / source, expression, (-(-v.M // rows), 1), THREADS, every, shared_bytes=shared)


def short_rows_unsupported(c: ReductionCall) -> str:
    if c.formula is None:
        return "the kernel takes sums, means, extrema and norms of order 1, 2 and infinity"
    if c.x.dtype not in (torch.float16, torch.bfloat16) or c.dtype != c.x.dtype:
        return f"{c.x.dtype} to {c.dtype}; the kernel takes 16-bit floats and gives the same"
    return COPY if c.view is None else rows_unsupported(c, c.view)


def short_rows_launch(c: ReductionCall) -> ForwardPlan:
    f = c.formula
    names = ", ".join(part.fn.__name__ for part in (f.map, f.join[0], f.finish))  # of structs in short_rows.cu
    kernel = f"reduce_short_rows<{{}}, {names}, {THREADS}>"
    return ForwardPlan(rows_plan(c, c.view, "short_rows.cu", kernel, ctypes.c_float(c.divisor)), c.shape, c.dtype)


def short_rows_mask_unsupported(c: ReductionCall) -> str:
    return mask_unsupported(c) or rows_unsupported(c, *c.views)


def short_rows_mask_launch(c: ReductionCall) -> MaskPlan:
    v, smallest = c.views[0], flags(c.formula.map is negative)
    forward = rows_plan(c, v, "short_rows_mask.cu", f"mask_short_rows<{{}}, {smallest}, {THREADS}>")
    return MaskPlan(c, forward, rows_plan(c, v, "short_rows_mask.cu", f"gradient_of_mask<{{}}, {THREADS}>"))


def short_rows_gradient_unsupported(c: ReductionCall) -> str:
    if reason := gradient_unsupported(c):
        return reason
    if c.dim is None or c.formula.tie is not None:
        return "the kernel takes gradients of norms of order 1 and 2 of rows"
    if reason := rows_unsupported(c, *c.views):
        return reason
    if c.dy.dtype != c.x.dtype:
        return f"a gradient of {c.dy.dtype} for {c.x.dtype}; the kernel takes one dtype for both"
    dense = c.views[0].M == 1 or c.strides[0] == 1
    return "" if dense and pointer_aligned(c.dy) else "a gradient that is not dense, or does not begin on 16 bytes"


def short_rows_gradient_launch(c: ReductionCall) -> CudaPlan:
    name = c.formula.gradient.fn.__name__  # short_rows_gradient.cu has a struct of this name
    return rows_plan(c, c.views[0], "short_rows_gradient.cu", f"gradient_of_short_rows<{{}}, {name}, {THREADS}>")


def short_rows_argmax_unsupported(c: ReductionCall) -> str:
    if c.op.formula is not None:
        return "the kernel takes argmax"
    most = 8 if c.x.element_size() == 2 else 7  # fp32 rows of 8: all lanes' vectors would lie in the same banks
    return COPY if c.view is None else rows_unsupported(c, c.view, extents=tuple(range(2, most + 1)))


def short_rows_argmax_launch(c: ReductionCall) -> ForwardPlan:
    kernel = f"argmax_short_rows<{{}}, {THREADS}>"
    return ForwardPlan(rows_plan(c, c.view, "short_rows_argmax.cu", kernel), c.shape, c.dtype)


# fmt: off
FIRST = (
    ON_CPU, TRACED, EMPTY,
    Route("torch", lambda c: c.x.ndim == 0, "a scalar: nothing to reduce"),
    Route("torch", lambda c: c.several, "several dimensions that no view makes one"),
    Route("torch", lambda c: c.dtype not in (c.x.dtype, torch.float32, torch.int64), "a result narrower than x, or float64"),
    Route("torch", no_formula, "a norm of another order than 1, 2 and infinity"),
)
MASKS = (
    Route("cuda-mask", lambda c: c.gradient and c.large,
          "max or min with a gradient, dense rows of 3, 5, 6 or 7: a byte a row says which elements equal the result",
          short_rows_mask_launch, short_rows_mask_unsupported),
    Route("triton-mask", lambda c: c.gradient,
          "max or min with a gradient, extents that a tile holds: forward saves a bit of each element, backward reads no x",
          MaskPlan, mask_unsupported),
    Route("triton-mask", lambda c: c.gradient,
          "max or min with a gradient, longer extents: forward saves the extrema of spans, backward reads x in few spans",
          SpansPlan, spans_unsupported),
)
TRITON = "any tensor with one stride before, along and after the reduced axis"

FORWARD = Dispatch(
    ReductionCall,
    *FIRST,
    Route("torch", lambda c: c.view is None, COPY),
    *MASKS,
    Route("cuda", lambda c: c.large,
          "dense rows of 3, 5, 6 or 7 elements of 16 bits: moved 16 bytes at a time through shared memory",
          short_rows_launch, short_rows_unsupported),
    Route("cuda", lambda c: c.large and c.view.N not in ARGMAX_SLOWER[c.x.element_size()],
          "argmax of dense rows of 2 to 8 elements: moved 16 bytes at a time through shared memory",
          short_rows_argmax_launch, short_rows_argmax_unsupported),
    Route("triton", lambda c: True, TRITON, reduce_launch, reduce_unsupported),
)

BACKWARD = Dispatch(
    lambda x, dy, op, dim, keepdim, order: ReductionCall(x, op, dim, keepdim, order, dy=dy),
    *FIRST,
    Route("torch", lambda c: c.strides is None, COPY),
    *MASKS,
    Route("cuda", lambda c: c.large,
          "a norm of order 1 or 2, dense rows of 3, 5, 6 or 7 elements: moved 16 bytes at a time through shared memory",
          short_rows_gradient_launch, short_rows_gradient_unsupported),
    Route("triton", lambda c: True, TRITON, GradientPlan, gradient_unsupported),
)
