"""The plans of ``masked_rows.cu``: causal and masked softmax of rows that a block holds, and the causal one's gradient."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import rows_of
from weft.operators.configs import Config, Configurations, bucket
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plans, multiprocessors, target_sm
from weft.operators.softmax import masked_kernels
from weft.operators.softmax.masked_kernels import ADDITIVE, BOOLEAN, CAUSAL, levels

SOURCE = Path(__file__).parent / "masked_rows.cu"
FROM = 256  # columns from which public functions take it: each thread of a warp has an access of 16 bytes
MANY = 2**20  # elements from which they do: below, launching is what counts
GROUPS = 4  # rows of one warp each that share a block
MOST_ROWS = 2**31 - 1
HELD = 32  # bytes of a row that a thread holds where it fetches the next one too
BUSY = 4  # blocks a multiprocessor, at least, where rows share a mask


# ---- what is taken ---------------------------------------------------------------------------------------------------


def measured(x: Tensor) -> bool:
    """Whether public functions take the kernel for a tensor of x's size on its device (README.md)."""
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
        return "a mask that does not begin on 16 bytes, rows of it that are no accesses apart, or columns not adjacent"
    return ""


# ---- configurations --------------------------------------------------------------------------------------------------


def most_each(dtype: torch.dtype, tensors: int) -> int:
    """Elements of so many tensors that a thread has registers for."""
    return min(32, 128 // (tensors * dtype.itemsize))


def longest(dtype: torch.dtype, two: bool) -> int:
    """Columns of the longest rows that 1024 threads hold of a tensor, or of ``two``."""
    return 1024 * most_each(dtype, 1 + two)


def tiles(dtype: torch.dtype, n: int, tensors: int) -> Iterable[Config]:
    """Rows of n columns by 32 to 1024 threads that hold so many tensors."""
    for each in (4, 8, 16, 32):
        if each * dtype.itemsize >= 16 and each <= most_each(dtype, tensors) and 32 <= n // each <= 1024:
            yield {"THREADS": n // each, "EACH": each}


def usual(dtype: torch.dtype, n: int, tensors: int, most_threads: int = 512) -> Config:
    """32 bytes a thread and a warp at least, and at most so many threads, unless there are no registers for that."""
    held = HELD if n * dtype.itemsize <= HELD * most_threads else n * dtype.itemsize // 512
    each = max(min(held, n * dtype.itemsize // 32), 16) // dtype.itemsize
    each = min(each, most_each(dtype, tensors))
    return {"THREADS": max(n // each, 32), "EACH": each}


def candidates(sm: int, dtype: torch.dtype, n: int, kind: str, shares: bool) -> Iterable[Config]:
    """Where rows share a mask, up to 16 of them one after another with the next one under way."""
    for c in tiles(dtype, n, 1 + (kind == ADDITIVE)):
        few = c["EACH"] * dtype.itemsize <= HELD
        yield from ({**c, "SHARE": share} for share in ((1, 2, 4, 8, 16) if shares and few else (1,)))


def heuristic(sm: int, dtype: torch.dtype, n: int, kind: str, shares: bool) -> Config:
    c = usual(dtype, n, 1 + (kind == ADDITIVE), 1024 if shares else 512)
    return {**c, "SHARE": 8 if shares and c["EACH"] * dtype.itemsize <= HELD else 1}


forward_configuration = Configurations(__file__, "masked_rows", heuristic, candidates)
backward_configuration = Configurations(
    __file__, "masked_rows_backward", lambda sm, dtype, n: usual(dtype, n, 2), lambda sm, dtype, n: tiles(dtype, n, 2)
)


# ---- plans -----------------------------------------------------------------------------------------------------------


def groups(config: Config) -> int:
    """Rows that a block holds at a time."""
    return GROUPS if config["THREADS"] == 32 else 1


def launch(kernel: str, config: Config, units: int, scalars: Sequence[Any]) -> CudaPlan:
    """Of ``units`` rows, or rows that share a mask."""
    at_once = groups(config)
    return CudaPlan(SOURCE, kernel, (-(-units // at_once), 1), config["THREADS"] * at_once, scalars)


def forward_plan(x: Tensor, mask: Tensor, scale: float, kind: str) -> CudaPlan:
    """Of ``(x, mask, y)``, as ``masked_kernels.forward_plan``; raises Declined as ``why_not`` and ``why_not_mask`` say."""
    y = torch.empty_like(x, device="meta")
    masks = kind in (BOOLEAN, ADDITIVE)
    if reason := why_not(longest(x.dtype, kind == ADDITIVE), x, y) or (why_not_mask(mask, x) if masks else ""):
        raise Declined(reason)
    (m, n, x_row, _), (_, _, y_row, _) = rows_of(x) or (0,) * 4, rows_of(y) or (0,) * 4
    m1, m2, s0, s1, s2, _ = (levels(mask) if masks else None) or (1, 1, 0, 0, 0, 0)
    shares = masks and s1 == 0 and m1 > 1
    config = forward_configuration(x.device, x.dtype, bucket(n), kind, shares)
    most = min(config["SHARE"], m // (BUSY * multiprocessors(x.device) * groups(config)))
    share = max((d for d in range(1, most + 1) if m1 % d == 0), default=1)
    of_mask = {BOOLEAN: "Kept", ADDITIVE: CTYPES.get(mask.dtype, "")}.get(kind, "None")
    flags = f"{str(kind == CAUSAL).lower()}, {config['THREADS']}, {config['EACH']}, {share}"
    s = x.shape[-2] if kind == CAUSAL else 1
    scalars = (
        *(ctypes.c_uint(v) for v in (m, n, s, m1, m2)),
        *(ctypes.c_longlong(v) for v in (x_row, y_row, s0, s1, s2)),
        ctypes.c_float(scale),
    )
    return launch(f"masked_softmax<{CTYPES[x.dtype]}, {of_mask}, {flags}>", config, m // share, scalars)


def backward_plan(y: Tensor, dy: Tensor, scale: float, causal: bool) -> CudaPlan:
    """Of ``(y, dy, dx)``, as ``masked_kernels.backward_plan``; Declined without a causal mask, or as ``why_not`` says."""
    dx = torch.empty_like(y, device="meta")
    if reason := why_not(longest(y.dtype, True), y, dy, dx) if causal else "no causal mask":
        raise Declined(reason)
    m, n, _, _ = rows_of(y) or (0,) * 4
    config = backward_configuration(y.device, y.dtype, bucket(n))
    strides = (ctypes.c_longlong((rows_of(t) or (0,) * 4)[2]) for t in (y, dy, dx))
    scalars = (*(ctypes.c_uint(v) for v in (m, n, y.shape[-2])), *strides, ctypes.c_float(scale))
    kernel = f"causal_softmax_backward<{CTYPES[y.dtype]}, {config['THREADS']}, {config['EACH']}>"
    return launch(kernel, config, m, scalars)


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
