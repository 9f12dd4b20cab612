"""The plans of ``masked_rows.cu``: causal and masked softmax of rows that a block holds, and the causal one's gradient."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import rows_of
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plans, target_sm
from weft.operators.softmax import masked_kernels
from weft.operators.softmax.masked_kernels import ADDITIVE, BOOLEAN, CAUSAL, levels

SOURCE = Path(__file__).parent / "masked_rows.cu"
FROM = 256  # columns from which public functions take it: a warp has an access of 16 bits a thread
MANY = 2**20  # elements from which they do: below, launching is what counts
GROUPS = 4  # rows of one warp each that share a block
MOST_ROWS = 2**31 - 1
HELD = 32  # bytes of a row that a thread holds where it fetches the next one too


# ---- what is taken ---------------------------------------------------------------------------------------------------


def measured(x: Tensor) -> bool:
    """Whether x's size and device are among those that the kernel was found faster for (README.md)."""
    return x.shape[-1] >= FROM and x.numel() >= MANY and target_sm(x.device) >= 90


def why_not(most: int, *tensors: Tensor) -> str:
    """Why rows of these tensors of one shape are not taken (an empty string when they are)."""
    for t in tensors:
        rows = rows_of(t)
        if rows is None:
            return "the leading dimensions do not collapse into rows of one stride, so a copy would be needed"
        m, n, row, column = rows
        count = 16 // t.element_size()
        if t.dtype != tensors[0].dtype:
            return f"a gradient of dtype {t.dtype} for a result of {tensors[0].dtype}"
        if n > most or m > MOST_ROWS:
            return f"{m} rows of {n} columns; the kernel takes {MOST_ROWS} of {most}"
        if n % count or (m > 1 and row % count) or (n > 1 and column != 1) or not pointer_aligned(t):
            return "rows that do not begin and end on 16 bytes"
    return ""


def why_not_mask(mask: Tensor, x: Tensor) -> str:
    """The same of a mask that is expanded to x's shape."""
    found, count = levels(mask), 16 // x.element_size()
    if found is None:
        return "the mask's leading dimensions do not merge into three, so a copy would be needed"
    *strides, column = found[2:]
    if column != 1 or any(s % count for s in strides) or not pointer_aligned(mask):
        return "a mask whose rows do not begin on 16 bytes, or whose columns are not adjacent"
    return ""


# ---- configurations --------------------------------------------------------------------------------------------------


def most_each(dtype: torch.dtype, tensors: int) -> int:
    """Elements of so many tensors that a thread has registers for."""
    return min(32, 128 // (tensors * dtype.itemsize))


def longest(dtype: torch.dtype, two: bool) -> int:
    """Columns of the longest rows that 1024 threads hold of a tensor, or of ``two``."""
    return 1024 * most_each(dtype, 1 + two)


def candidates(sm: int, dtype: torch.dtype, n: int, kind: str, *, backward: bool = False) -> Iterable[Config]:
    """Rows by 32 to 1024 threads; those that share a mask up to 16 at a time, the next one under way."""
    tensors = 2 if backward or kind == ADDITIVE else 1
    shares = (1, 2, 4, 8, 16) if kind in (BOOLEAN, ADDITIVE) else (1,)
    for c in grid_of({"EACH": (4, 8, 16, 32), "SHARE": shares}):
        threads, held = n // c["EACH"], c["EACH"] * dtype.itemsize
        fits = held >= 16 and c["EACH"] <= most_each(dtype, tensors) and (c["SHARE"] == 1 or held <= HELD)
        if fits and 32 <= threads <= 1024:
            yield {"THREADS": threads, **c}


def heuristic(sm: int, dtype: torch.dtype, n: int, kind: str, *, backward: bool = False) -> Config:
    """32 bytes a thread and one warp at least, at most 512 threads (1024 where rows share a mask) unless registers say no."""
    masks = kind in (BOOLEAN, ADDITIVE)
    held = max(HELD, n * dtype.itemsize // (1024 if masks else 512))
    most = most_each(dtype, 2 if backward or kind == ADDITIVE else 1)
    each = min(max(min(held, n * dtype.itemsize // 32), 16) // dtype.itemsize, most)
    return {"THREADS": max(n // each, 32), "EACH": each, "SHARE": 8 if masks and held == HELD else 1}


forward_configuration = Configurations(__file__, "masked_rows", heuristic, candidates)
backward_configuration = Configurations(
    __file__,
    "masked_rows_backward",
    functools.partial(heuristic, backward=True),
    functools.partial(candidates, backward=True),
)


# ---- plans -----------------------------------------------------------------------------------------------------------


def launch(kernel: str, config: Config, share: int, m: int, scalars: Sequence[Any]) -> CudaPlan:
    threads = config["THREADS"]
    groups = GROUPS if threads == 32 else 1
    return CudaPlan(SOURCE, kernel, (-(-m // (share * groups)), 1), threads * groups, scalars)


def forward_plan(x: Tensor, mask: Tensor, scale: float, kind: str) -> CudaPlan:
    """Of ``(x, mask, y)``, as ``masked_kernels.forward_plan``; raises Declined as ``why_not`` and ``why_not_mask`` say."""
    y = torch.empty_like(x, device="meta")
    masks = kind in (BOOLEAN, ADDITIVE)
    if reason := why_not(longest(x.dtype, kind == ADDITIVE), x, y) or (why_not_mask(mask, x) if masks else ""):
        raise Declined(reason)
    (m, n, x_row, _), (_, _, y_row, _) = rows_of(x) or (0,) * 4, rows_of(y) or (0,) * 4
    m1, m2, s0, s1, s2, _ = (levels(mask) if masks else None) or (1, 1, 0, 0, 0, 0)
    config = forward_configuration(x.device, x.dtype, bucket(n), kind)
    share = config["SHARE"] if s1 == 0 else 1
    while m1 % share:
        share //= 2
    of_mask = {BOOLEAN: "Kept", ADDITIVE: CTYPES.get(mask.dtype, "")}.get(kind, "None")
    flags = f"{str(kind == CAUSAL).lower()}, {config['THREADS']}, {config['EACH']}, {share}"
    s = x.shape[-2] if kind == CAUSAL else 1
    scalars = (
        *(ctypes.c_uint(v) for v in (m, n, s, m1, m2)),
        *(ctypes.c_longlong(v) for v in (x_row, y_row, s0, s1, s2)),
        ctypes.c_float(scale),
    )
    return launch(f"masked_softmax<{CTYPES[x.dtype]}, {of_mask}, {flags}>", config, share, m, scalars)


def backward_plan(y: Tensor, dy: Tensor, scale: float, causal: bool) -> CudaPlan:
    """Of ``(y, dy, dx)``, as ``masked_kernels.backward_plan``; Declined without a causal mask, or as ``why_not`` says."""
    dx = torch.empty_like(y, device="meta")
    if reason := why_not(longest(y.dtype, True), y, dy, dx) if causal else "no causal mask":
        raise Declined(reason)
    m, n, _, _ = rows_of(y) or (0,) * 4
    config = backward_configuration(y.device, y.dtype, bucket(n), CAUSAL)
    strides = (ctypes.c_longlong((rows_of(t) or (0,) * 4)[2]) for t in (y, dy, dx))
    scalars = (*(ctypes.c_uint(v) for v in (m, n, y.shape[-2])), *strides, ctypes.c_float(scale))
    kernel = f"causal_softmax_backward<{CTYPES[y.dtype]}, {config['THREADS']}, {config['EACH']}>"
    return launch(kernel, config, 1, m, scalars)


forward_plans = Plans(forward_plan)
backward_plans = Plans(backward_plan)


def _or_triton(taken: Callable[..., CudaPlan], otherwise: Callable[..., Any]) -> Plans:
    """Plans of the CUDA kernel where public functions take it, else of Triton's."""

    def build(x: Tensor, *call: Any) -> Any:
        if measured(x):
            with contextlib.suppress(Declined):
                return taken(x, *call)
        return otherwise(x, *call)

    return Plans(build)


TRITON = masked_kernels.forward_plans, masked_kernels.backward_plans
CUDA = forward_plans, backward_plans
PUBLIC = _or_triton(forward_plan, masked_kernels.forward_plan), _or_triton(backward_plan, masked_kernels.backward_plan)
