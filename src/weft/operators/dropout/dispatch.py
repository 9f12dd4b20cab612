"""Which kernel computes dropout (``DROPOUT``, whose gradient is dropout too), and dropout + residual + RMSNorm (``FORWARD``,
``BACKWARD``), with the launches of CUDA C++ kernels; Triton's are in ``kernels.py`` and ``norm_kernels.py``."""

import ctypes
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.operators.call import FLOATS
from weft.operators.checks import check_device, check_eps, check_same, check_tensor
from weft.operators.configs import Config, Configurations, bucket
from weft.operators.contiguous import as_if_contiguous, contiguous, side_by_side
from weft.operators.cuda import not_resident
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.dropout import kernels, norm_kernels
from weft.operators.dropout.philox import GROUP
from weft.operators.dropout.seeds import check_probability, scale_of, threshold_of
from weft.operators.layout import rows_of, views, within_reach
from weft.operators.normalization import ring
from weft.operators.normalization.dispatch import BACKWARD as NORM_BACKWARD
from weft.operators.normalization.dispatch import NormConfig, default_eps
from weft.operators.normalization.kernels import with_copies
from weft.operators.row_programs import ONE_PASS

# ---- dropout ---------------------------------------------------------------------------------------------------------

COPIED_FROM = 2**18  # elements; fewer are read out of L2 in less time than another launch takes


class DropoutCall(Call):
    """``(x, p, training, in_memory)``: with a seed ``in_memory`` the kernel reads it from a tensor."""

    def __init__(self, x: Tensor, p: float, training: bool, in_memory: bool):
        check_tensor("dropout", "x", x)
        check_probability("dropout", p, training)
        self.x, self.in_memory = x, in_memory
        self.threshold = threshold_of(p) if training else 0


def not_launchable(c: DropoutCall) -> str:
    if kernels.launchable(c.x) and kernels.launchable(torch.empty_like(c.x, device="meta")):
        return ""
    return "strides that do not collapse into rows: a copy would be needed"


class DropoutPlan:
    """Call with ``(x, seed, offset)``; returns the result. Many rows that lie side by side are copied, since neighbours that
    share random numbers are far apart; the result then is the copy."""

    def __init__(self, c: DropoutCall):
        self.threshold, self.in_memory = c.threshold, c.in_memory
        self.numbers = (c.threshold * 2**16 - 1, scale_of(c.threshold))
        self.copied = c.x.numel() >= COPIED_FROM and side_by_side(c.x)
        self.plan: Any = kernels.plan(as_if_contiguous(c.x) if self.copied else c.x, c.in_memory)

    def __call__(self, x: Tensor, seed: Any, offset: int) -> Tensor:
        x = contiguous(x) if self.copied else x
        out = x if self.copied else torch.empty_like(x)
        if not self.threshold:
            return out.copy_(x)
        if self.in_memory:
            self.plan(x, out, seed, 0, offset, *self.numbers)
        else:
            self.plan(x, out, x, seed % 2**64, offset, *self.numbers)
        return out


DROPOUT = Dispatch(
    DropoutCall, ON_CPU, TRACED,
    Route("torch", lambda c: not c.threshold, "nothing is dropped: x itself is the result"),
    EMPTY,
    Route("torch", lambda c: not_launchable(c) != "", "strides do not collapse into rows: a kernel would need a copy"),
    Route("triton", lambda c: True, "the mask is made from the seed, not stored", DropoutPlan, not_launchable),
)  # fmt: skip

# ---- dropout + residual + RMSNorm ------------------------------------------------------------------------------------

NAME = "dropout_add_rms_norm"
LONGEST = 32768  # columns of the CUDA gradient, as of forward; a third tensor of 131072 would not fit
TENSORS = 3  # that the gradient reads: h, dy and dh
RANDOM_REGISTERS = 24  # of a thread, about, for random numbers and a second result
SOURCE = Path(ring.__file__).with_name("dropped_backward.cu")  # beside backward.cuh


class AddNormCall(Call):
    """``(x, residual, weight, p, eps, in_memory)``. A plan is called with ``(x, residual, weight, y, h, seed tensor, seed,
    offset, last, scale)``."""

    def __init__(self, x: Tensor, residual: Tensor, weight: Tensor, p: float, eps: float, in_memory: bool):
        check_tensor(NAME, "x", x)
        check_tensor(NAME, "residual", residual)
        check_same(NAME, "residual", residual, "x", x)
        eps = default_eps(x) if eps is None else eps
        check_tensor(NAME, "weight", weight, tuple(dict.fromkeys((x.dtype, *FLOATS[:1]))))
        check_device(NAME, "weight", weight, "x", x)
        if x.ndim == 0 or residual.shape != x.shape or weight.shape != x.shape[-1:]:
            raise ValueError(
                f"{NAME}: arguments 'x', 'residual' and 'weight' have shapes {tuple(x.shape)}, {tuple(residual.shape)} and "
                f"{tuple(weight.shape)}; expected [..., N], the same and [N]"
            )
        check_probability(NAME, p, True)
        check_eps(NAME, eps)
        self.x, self.residual, self.weight, self.eps, self.in_memory = x, residual, weight, eps, in_memory
        self.n, self.threshold = x.shape[-1], threshold_of(p)


def unsupported(c: AddNormCall) -> str:
    if not c.threshold:
        return "nothing is dropped: add_rms_norm does it"
    if not (within_reach(c.x) and within_reach(c.residual)):
        return "the leading dimensions do not collapse into rows of one stride: a copy would be needed"
    return ""


FORWARD = Dispatch(
    AddNormCall, ON_CPU, TRACED, EMPTY,
    Route("torch", lambda c: not c.threshold, "nothing is dropped: add_rms_norm does it"),
    Route("torch", lambda c: unsupported(c) != "",
          "leading dimensions do not collapse into rows of one stride: a kernel would need a copy"),
    Route("triton", lambda c: c.n <= ONE_PASS, "a program holds whole rows; the mask is made from the seed",
          norm_kernels.forward_plan, unsupported),
    Route("triton", lambda c: True, "a program walks a row twice; the mask is made from the seed", norm_kernels.forward_plan,
          unsupported),
)  # fmt: skip


class GradientCall(Call):
    """``(h, dy, dh, weight, eps, in_memory)``. A plan is called with ``(h, dy, dh, weight, dr, dx, dw, seed tensor, seed,
    offset, last, scale)``: h, dr and dx contiguous [M, N], dy and dh rows [M, N], weight and dw [N]. The seed is the tensor's
    element (int64) if ``in_memory``, else the number; an element is dropped whose 16 random bits, in the upper half of a word,
    are at most ``last``."""

    def __init__(self, h: Tensor, dy: Tensor, dh: Tensor, weight: Tensor, eps: float, in_memory: bool):
        self.x = self.h = h
        self.weight, self.eps, self.in_memory = weight, eps, in_memory
        self.m, self.n, *_ = rows_of(h) or (0, 0)
        # autograd may bring gradients of any strides (expanded, say)
        self.copied = [i for i, t in ((1, dy), (2, dh)) if rows_of(t) is None]
        self.dy, self.dh = (
            torch.empty_like(t, device="meta").contiguous() if rows_of(t) is None else t for t in (dy, dh)
        )


# ---- its gradient by clusters (dropped_backward.cu) ------------------------------------------------------------------


def fits(sm: int, c: Config, dtype: torch.dtype) -> bool:
    """Whether registers hold PER_SM such blocks."""
    each = ring.registers(c["EACH"], c["ROWS"], dtype, False) + RANDOM_REGISTERS
    return c["THREADS"] * each * c["PER_SM"] <= ring.REGISTERS


def candidates(sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
    """Those of RMSNorm's gradient that hold a third tensor: at least 8 warps a multiprocessor, at most twice the fewest
    blocks a row, and 2 to 4 vectors of a thread in a group, which share what is done once a group."""
    vector = 16 // dtype.itemsize
    found = [c for c in ring.candidates(sm, dtype, n, False, TENSORS) if fits(sm, c, dtype)]
    fewest = min(blocks(c, n) for c in found)
    for c in found:
        shared = 2 * vector <= c["EACH"] * c["ROWS"] <= 4 * vector and blocks(c, n) <= 2 * fewest
        if c["THREADS"] * c["PER_SM"] >= 256 and shared:
            yield c


def blocks(c: Config, n: int) -> int:
    """That share a row."""
    return bucket(-(-n // (c["THREADS"] * c["EACH"])))


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """The fewest blocks a row, at most two vectors of it a thread, and of 16-bit floats four of a group, since instructions
    are many there: what the gradients of both norms were measured to want."""
    vector = 16 // dtype.itemsize
    group = 4 * vector if dtype.itemsize == 2 else 2 * vector

    def rank(c: Config) -> tuple[int, ...]:
        wide = max(c["EACH"] - 2 * vector, 0)
        shape = abs(c["EACH"] * c["ROWS"] - group), abs(c["THREADS"] - 256)
        return (blocks(c, n), wide, *shape, -c["STAGES"], -c["PER_SM"])

    return min(candidates(sm, dtype, n), key=rank)


configuration = Configurations(__file__, "dropped_backward", heuristic, candidates)


def _one_cluster(c: GradientCall) -> ring.OneCluster | None:
    config, item = configuration(c.h.device, c.h.dtype, bucket(c.n)), c.weight.element_size()
    strides = (row for _, _, row, _ in views(c.dy, c.dh))
    scalars = (*(ctypes.c_longlong(v) for v in (c.m, c.n, *strides)), ctypes.c_float(c.eps))
    flags = (c.in_memory,)
    return ring.one_cluster(SOURCE, "dropped_norm_backward", c.h, c.weight, config, TENSORS, item, flags, scalars)


def clusters_unsupported(c: GradientCall) -> str:
    if c.n % GROUP or c.n > LONGEST or not c.h.is_contiguous():
        return f"h of {c.n} columns, strides {c.h.stride()}; it takes contiguous rows of multiples of {GROUP} up to {LONGEST}"
    if reason := ring.unsupported(c.h, c.dy, c.dh, weight=c.weight, centered=False):
        return reason
    one = _one_cluster(c)
    if one is None:
        return f"{c.n} columns with a float32 weight; shared memory holds fewer"
    return not_resident(one.plan, c.h.device)


@with_copies
def clusters_launch(c: GradientCall) -> norm_kernels.GradientPlan:
    plan, clusters = ring.all_clusters(_one_cluster(c), c.h)

    def rows(*arguments: Any) -> None:
        *read, dr, dx, partial, seed_at, seed, offset, last, scale = arguments
        numbers = ctypes.c_ulonglong(seed), ctypes.c_ulonglong(offset), ctypes.c_uint(last), ctypes.c_float(scale)
        now = dataclasses.replace(plan, scalars=(*plan.scalars, *numbers))
        now(*read, dr, partial, dx, seed_at)
        plan._ready = now._ready  # the kernel, loaded once

    return norm_kernels.GradientPlan(c.m, c.n, rows, clusters)


class InTwo:
    """The launches of the gradient as those of ``add_rms_norm``'s, and dropout's of that; called as ``GradientPlan`` is."""

    def __init__(self, c: GradientCall):
        config = NormConfig(NAME, centered=False, added=True, weighted=True, biased=False)
        self.norm = NORM_BACKWARD.of((c.h, c.dy, c.dh, c.weight), c.eps, config, True)
        self.drop = kernels.plan(c.h, c.in_memory)

    def __call__(self, h: Tensor, *tensors: Any) -> None:
        *read, dr, dx, dw = tensors[:6]
        self.norm(h, *read, h, h, dr, dw.unsqueeze(0))
        self.drop(dr, dx, *tensors[6:])


BACKWARD = Dispatch(  # where forward is PyTorch's, backward is too
    GradientCall,
    Route("cuda", lambda c: True, "clusters of blocks hold a row and take row after row: it is read once",
          clusters_launch, clusters_unsupported, sm=90),
    Route("triton", lambda c: c.n % GROUP != 0, "rows that cut groups of random numbers: the norm's gradient, then dropout's",
          with_copies(InTwo)),
    Route("triton", lambda c: c.n <= norm_kernels.ONE_PASS_BACKWARD, "a program holds whole rows: one pass",
          with_copies(norm_kernels.gradient_rows)),
    Route("triton", lambda c: True, "two passes: sums of the rows first, then columns",
          with_copies(norm_kernels.gradient_columns)),
)  # fmt: skip
