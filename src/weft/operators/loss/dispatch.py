"""Which kernel computes cross entropy and its gradient; for ``linear_cross_entropy`` also when the gradients are made.
Thresholds were measured on an H200 (docs/notes/loss.md)."""

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.operators import row_cluster
from weft.operators.call import FLOATS, FLOATS_AND_64, cast_for_products
from weft.operators.checks import (
    check_device,
    check_flag,
    check_places,
    check_same,
    check_shape,
    check_tensor,
    check_value,
    check_values,
    check_vector,
    is_int,
    is_number,
)
from weft.operators.configs import Config, Configurations, bucket
from weft.operators.cuda import CTYPES, CudaPlan, flags
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.hopper import padded
from weft.operators.launch import multiprocessors
from weft.operators.layout import rows_of
from weft.operators.loss import kernels
from weft.operators.loss.beside import LossBeside, gradient_launch
from weft.operators.loss.kernels import LabelSums, Sum
from weft.operators.loss.reference import REDUCTIONS, Options, in_range
from weft.operators.row_cluster import REASON as CLUSTER
from weft.operators.row_cluster import RowCluster
from weft.operators.row_programs import LONG, ONE_PASS, WHOLE

SOURCE = Path(__file__).parent / "cluster.cu"
FP32 = torch.finfo(torch.float32)


@dataclass
class RowsCall(Call):
    """Logits [M, V] with their labels."""

    x: Tensor
    target: Tensor  # [M]
    weight: Tensor | None  # [V], of each class
    options: Options

    def __post_init__(self) -> None:
        self.m, self.v = self.x.shape
        self.w = self.x if self.weight is None else self.weight  # what is passed, also where there are no weights

    @property
    def all_weights(self) -> bool:
        """Whether the sum of all classes' weights is needed."""
        return self.weight is not None and self.options.label_smoothing > 0

    @property
    def numbers(self) -> tuple[Any, ...]:
        o = self.options
        return o.ignore_index, float(o.label_smoothing), float(o.z_loss), float(o.soft_cap or 0.0)

    def flags(self, **more: bool) -> dict[str, Any]:
        """Compile-time constants of the Triton kernels, in the order of their signatures."""
        o = self.options
        flags = {"MEAN": o.reduction == "mean", "SMOOTH": o.label_smoothing > 0, "CAP": bool(o.soft_cap)}
        return {"HAS_WEIGHT": self.weight is not None, **flags, **more, "ACCURATE": self.x.dtype == torch.float32}

    # ---- of CUDA C++ kernels ----

    @property
    def types(self) -> str:
        label = {torch.int64: "i64", torch.int32: "int"}[self.target.dtype]
        return f"{CTYPES[self.x.dtype]}, {label}, {CTYPES[self.w.dtype]}"

    @property
    def words(self) -> str:
        return flags(*(flag for name, flag in self.flags().items() if name != "ACCURATE"))

    def cuda_scalars(self, dx: Tensor, *strides: int) -> tuple[Any, ...]:
        rows = ((rows_of(t) or (0, 0, 0, 0))[2] for t in (self.x, dx))
        strides = (self.target.stride(0), self.w.stride(0), *strides)
        integers = (self.v, *rows, *strides, self.options.ignore_index)
        return (*map(ctypes.c_longlong, integers), *map(ctypes.c_float, self.numbers[1:]))


@dataclass
class LossCall(RowsCall):
    """The loss, and with ``at_once`` the gradient in the same pass."""

    at_once: bool = False
    wanted: bool = False  # autograd needs a gradient
    inplace: bool = False  # it is written over the logits

    @property
    def dx(self) -> Tensor:
        """What lies in memory as the gradient will."""
        return torch.empty_like(self.x, device="meta") if self.at_once and not self.inplace else self.x


@dataclass
class OtherForm(Call):
    """Logits [N, C, d1, …] that are not made rows (``in_rows``), or class probabilities."""

    x: Tensor


def in_rows(logits: Tensor, target: Tensor, copied: bool = False) -> tuple[Tensor, Tensor]:
    """Logits [N, C, d1, …] (or [C]) as rows [M, C], and their targets in the same order. Unless it may be ``copied``, as they
    are where a view cannot do it, and where there is no kernel (for probabilities)."""
    soft = target.is_floating_point()
    if logits.ndim == 2 or not logits.ndim or (soft and not copied):
        return logits, target
    rows, targets = (t[None] if logits.ndim == 1 else t.movedim(1, -1) for t in (logits, target if soft else logits))
    if not (copied or (rows_of(rows) and rows_of(target[..., None]))):
        return logits, target
    shape = math.prod(rows.shape[:-1]), rows.shape[-1]
    return rows.reshape(shape), targets.reshape(shape) if soft else target.reshape(-1)


def losses_shape(logits: Tensor) -> torch.Size:
    """The shape of the losses of logits [N, C, d1, …], one for each label: [N, d1, …]."""
    return logits.shape[: logits.ndim > 1] + logits.shape[2:]


def in_fp32(*tensors: Any) -> tuple[Any, ...]:
    """The arguments, with 16-bit floats cast to float32 under autocast, as it does for cross entropy on GPUs and CPUs."""

    def narrowed(t: Any) -> bool:
        if not isinstance(t, Tensor) or t.dtype not in FLOATS[1:] or t.device.type not in ("cpu", "cuda"):
            return False
        return torch.is_autocast_enabled(t.device.type)

    return tuple(t.float() if narrowed(t) else t for t in tensors)


def loss_call(name: str, always: bool, logits: Tensor, target: Tensor, *rest: Any) -> LossCall | OtherForm:
    """A call of an operator: ``(logits, target, weight if there is one, *Options, wanted, inplace)``. Unless it is ``always``
    made with the loss, the gradient is not where it needs what is known only in backward: each row's factor (reduction
    "none"), or the loss scale, without which fp16 gradients would underflow."""
    *tensors, wanted, inplace = rest
    weight, options = tensors[:-5], Options(*tensors[-5:])
    check(name, logits, target, weight[0] if weight else None, options)
    check_flag(name, "inplace_backward", inplace)
    if inplace and wanted:
        check_places(name, "logits", logits, "inplace_backward=True")
    if logits.ndim != 2 or target.is_floating_point():
        return OtherForm(logits)
    at_once = always or (wanted and options.reduction != "none" and logits.dtype != torch.float16)
    return LossCall(logits, target, weight[0] if weight else None, options, at_once, wanted, inplace)


def chunk_call(
    logits: Tensor, target: Tensor, weight: Tensor, losses: Tensor, options: Options, weighted: bool, at_once: bool
) -> LossCall:
    """Of a chunk of ``linear_cross_entropy``, whose gradient is written over the logits. ``losses``, a slice, is here for its
    alignment, and ``weight`` the logits where classes are not ``weighted``."""
    return LossCall(logits, target, weight if weighted else None, options, at_once, inplace=True)


@dataclass
class GradientCall(RowsCall):
    """The gradient from the logits, each row's statistics and the gradient of the loss, [M] or []."""

    dloss: Tensor
    dx: Tensor

    @classmethod
    def of(
        cls, x: Tensor, target: Tensor, w: Tensor, dloss: Tensor, dx: Tensor, options: Options, weighted: bool
    ) -> "GradientCall":
        return cls(x, target, w if weighted else None, options, dloss, dx)

    @property
    def dloss_stride(self) -> int:
        return self.dloss.stride(0) if self.dloss.ndim else 0


def check(name: str, logits: Tensor, target: Tensor, weight: Tensor | None, asked: Options) -> None:
    """Raises TypeError or ValueError unless the arguments fit."""
    check_tensor(name, "logits", logits)
    check_tensor(name, "target", target, (torch.int64, torch.int32, *FLOATS_AND_64))
    check_device(name, "target", target, "logits", logits)
    soft = target.is_floating_point()
    if not logits.ndim or target.shape != (logits.shape if soft else losses_shape(logits)):
        raise ValueError(
            f"{name}: arguments 'logits' and 'target' have shapes {tuple(logits.shape)} and {tuple(target.shape)}; "
            "expected [M, V] and [M], or [N, C, d1, …] and [N, d1, …], or probabilities of the shape of 'logits'"
        )
    if weight is not None:
        what = f"one for each class of 'logits' {tuple(logits.shape)}"
        check_class_weight(name, "weight", weight, classes_of(logits), what, "logits", logits)
    ignored, smoothing, z, cap, reduction = asked
    check_value(name, "ignore_index", ignored, is_int(ignored), "an int", TypeError)
    check_value(name, "ignore_index", ignored, -(2**63) <= ignored < 2**63, "an int of 64 bits")
    expected = "labels in 'target', which holds probabilities"
    check_value(name, "ignore_index", ignored, not soft or ignored < 0, expected)
    check_value(name, "label_smoothing", smoothing, is_number(smoothing) and 0 <= smoothing <= 1, "0 … 1")
    check_value(name, "z_loss", z, is_number(z) and 0 <= z <= FP32.max, "a number of at least 0 that fp32 can hold")
    fits = cap is None or (is_number(cap) and FP32.tiny <= cap <= FP32.max)
    check_value(name, "soft_cap", cap, fits, "a positive number that fp32 can hold, or None")
    check_value(name, "reduction", reduction, reduction in REDUCTIONS, ", ".join(REDUCTIONS))


def check_class_weight(name: str, argument: str, value: Any, classes: int, what: str, other: str, x: Tensor) -> None:
    check_vector(name, argument, value, classes, what, other, x)
    if value.requires_grad:
        raise ValueError(
            f"{name}: argument '{argument}' requires a gradient, which is not computed; expected a constant"
        )


def classes_of(logits: Tensor) -> int:
    return logits.shape[min(1, logits.ndim - 1)]


def check_range(name: str, target: Tensor, classes: int, ignore_index: int, wanted: Any) -> None:
    """With ``wanted`` (the argument ``check_labels``) raises ValueError where a label is out of range."""
    check_flag(name, "check_labels", wanted)
    if wanted and not target.is_floating_point():
        words = {"flag": "check_labels", "expected": f"0 … {classes - 1}, or ignore_index {ignore_index}"}
        check_values(name, "target", target, lambda t: in_range(t, classes, ignore_index)[1], **words)


# ---- CUDA C++: a row by a cluster of blocks (sm_90 and later) -----------------------------------------------------------

# Bytes of logits a multiprocessor from which shared memory holds some too: with fewer, all rows are there at once.
SHARED_FROM = 2**18
LEAST = 8192  # bytes of a row that a block should read
MOST_BLOCKS = 2**31 - 1  # of a grid


def shared_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """128 bytes of registers and as many of shared memory a thread; four blocks share a multiprocessor where a cluster of
    such blocks holds a row."""
    each = 256 // dtype.itemsize
    threads = 128 if n <= 128 * each else 256 if n <= 256 * each * row_cluster.MAX_CLUSTER else 512
    return {"THREADS": threads, "EACH": each}


def loss_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Small blocks, of which a multiprocessor holds eight: they wait at different times."""
    return {"THREADS": 128 if n * dtype.itemsize <= 2**17 else 256}


def gradient_candidates(sm: int, dtype: torch.dtype, n: int) -> Iterator[Config]:
    each = 128 // dtype.itemsize
    return ({"THREADS": t, "EACH": e} for t in (64, 128, 256, 512) for e in (each // 4, each // 2, each))


with_gradient_configuration = Configurations(
    __file__, "cluster_with_gradient", row_cluster.heuristic, row_cluster.candidates
)
shared_candidates = functools.partial(row_cluster.candidates, most_bytes=256, threads=(128, 256, 512))
shared_configuration = Configurations(__file__, "cluster_shared", shared_heuristic, shared_candidates)
loss_configuration = Configurations(
    __file__, "cuda_loss", loss_heuristic, lambda sm, dtype, n: ({"THREADS": t} for t in (128, 256, 512))
)
gradient_configuration = Configurations(
    __file__, "cuda_gradient", lambda sm, dtype, n: {"THREADS": 128, "EACH": 128 // dtype.itemsize}, gradient_candidates
)


def cluster_unsupported(c: LossCall | GradientCall) -> str:
    if c.all_weights:
        return "label smoothing with class weights, which every column would have to read"
    if reason := row_cluster.why_not(c.x) or row_cluster.why_not(c.dx):
        return reason
    blocks = c.m * (parts_of_row(c)[0] if isinstance(c, GradientCall) else row_cluster.MAX_CLUSTER)
    return f"{c.m} rows; a grid has {MOST_BLOCKS} blocks" if blocks > MOST_BLOCKS else ""


def launch_cluster(c: LossCall) -> CudaPlan:
    """Of ``(x, target, weight, sums, loss, stats, dx)``: with the gradient a cluster of blocks holds a row; without it a
    block reads a row, or a cluster where there are too few rows to fill the GPU."""
    if c.at_once:
        shared = c.x.numel() * c.x.element_size() >= SHARED_FROM * multiprocessors(c.x.device)
        config = (shared_configuration if shared else with_gradient_configuration)(c.x.device, c.x.dtype, bucket(c.v))
        rows = RowCluster.of(c.x, config)
        kernel = f"cross_entropy_cluster<{c.types}, {rows.template}, {flags(shared)}, {c.words}>"
        shared_bytes = rows.elements * c.x.element_size() // 2 if shared else 0
        return CudaPlan(SOURCE, kernel, rows.grid, rows.threads, c.cuda_scalars(c.dx), rows.cluster, shared_bytes)
    count = 16 // c.x.element_size()
    threads = loss_configuration(c.x.device, c.x.dtype, bucket(c.v))["THREADS"]
    wanted = -(-multiprocessors(c.x.device) * (1024 // threads) // c.m)  # blocks of a row that fill the GPU
    blocks = min(bucket(wanted), bucket(max(c.v * c.x.element_size() // LEAST, 1)), row_cluster.MAX_CLUSTER)
    each = -(-c.v // (blocks * count)) * count
    kernel = f"cross_entropy_loss<{c.types}, {threads}, {c.words}>"
    scalars = (*c.cuda_scalars(c.dx), ctypes.c_longlong(each))
    return CudaPlan(SOURCE, kernel, (c.m * blocks, 1), threads, scalars, blocks)


def parts_of_row(c: GradientCall) -> tuple[int, int, int]:
    """Blocks of a row, threads of a block, elements of a thread."""
    config = gradient_configuration(c.x.device, c.x.dtype, bucket(c.v))
    threads, each = config["THREADS"], config["EACH"]
    return -(-c.v // (threads * each)), threads, each


def launch_cuda_gradient(c: GradientCall) -> CudaPlan:
    """Of ``(x, target, weight, sums, stats, dloss, dx)``; dx may be x."""
    parts, threads, each = parts_of_row(c)
    kernel = f"cross_entropy_gradient<{c.types}, {CTYPES[c.dloss.dtype]}, {threads}, {each}, {c.words}>"
    scalars = (*c.cuda_scalars(c.dx, c.dloss_stride), ctypes.c_uint(parts))
    return CudaPlan(SOURCE, kernel, (c.m * parts, 1), threads, scalars)


# ---- what a plan of cross entropy is -----------------------------------------------------------


@dataclass
class Forward:
    """Of ``(x, target, weight, dx)``: the loss; each row's maximum and sum of exponentials (stats, fp32 [2, M]); and the label
    sums (an empty tensor where nothing needs them). With ``at_once`` the gradient goes into dx; weight and dx are x itself
    where there are none."""

    options: Options
    at_once: bool
    wanted: bool
    rows: Callable[..., None]
    sums: LabelSums | None
    total: Sum | None

    def __call__(self, x: Tensor, target: Tensor, weight: Tensor, dx: Tensor) -> tuple[Tensor, Any, Any]:
        loss = torch.empty(x.shape[0], device=x.device, dtype=torch.float32)
        stats = torch.empty((2, x.shape[0]), device=x.device, dtype=torch.float32)
        sums = torch.empty(0, device=x.device, dtype=torch.float32) if self.sums is None else self.sums(target, weight)
        self.rows(x, target, weight, sums if self.sums else stats, loss, stats, dx)
        if self.total is not None:
            total = torch.empty((), device=x.device, dtype=x.dtype)
            self.total(loss, total)
            loss = total
        return loss if loss.dtype == x.dtype else loss.to(x.dtype), stats, sums


class SingleProgram(Forward):
    """The same without the statistics (None): a gradient that is asked for again needs another launch."""

    def __call__(self, x: Tensor, target: Tensor, weight: Tensor, dx: Tensor) -> tuple[Tensor, Any, Any]:
        loss = x.new_empty(())
        self.rows(x, target, weight, loss, dx)
        return loss, None, None


def label_sums(target: Tensor, w: Tensor, v: int, options: Options, weighted: bool) -> LabelSums | None:
    """What kernels over rows divide by; None where they need nothing."""
    all_weights = weighted and options.label_smoothing > 0
    if options.reduction != "mean" and not all_weights:
        return None
    return LabelSums(target, w, v, options.ignore_index, weighted, all_weights)


def with_sums(launch: Callable[[LossCall], Any]) -> Callable[[LossCall], Forward]:
    """The labels' sums, a launch over rows, and the sum of the losses."""

    def launches(c: LossCall) -> Forward:
        sums = label_sums(c.target, c.w, c.v, c.options, c.weight is not None)
        total = None if c.options.reduction == "none" else Sum(c.m)
        return Forward(c.options, c.at_once, c.wanted, launch(c), sums, total)

    return launches


def single_program_unsupported(c: LossCall) -> str:
    if c.options.reduction == "none":
        return "each row's loss: one launch without a sum makes them"
    if c.wanted and c.x.dtype == torch.float16:
        return "a gradient in float16, which waits for the loss's"
    if c.empty:
        return "empty: nothing to launch"
    m, v = bucket(c.m), bucket(c.v)
    if m > kernels.SINGLE_ROWS or v > kernels.SINGLE_TILE or m * v > kernels.SINGLE_MOST:
        return f"{c.m} rows of {c.v}: more than one program reads in a few steps"
    return ""


OTHER_FORM = Route(
    "torch", lambda c: isinstance(c, OtherForm), "class probabilities, or [N, C, d1, …] that no view makes rows"
)
FEW = "few logits: the labels' sums, the loss and the gradient in one launch"


def by_rows(finish: Callable[..., Any]) -> tuple[Route, ...]:
    """Kernels over rows, whose launches ``finish`` completes."""
    long = Route(
        "cuda", lambda c: c.v >= 16384 and not c.traced, CLUSTER, finish(launch_cluster), cluster_unsupported, sm=90
    )
    rows = finish(kernels.launch_rows)
    return (
        long,
        Route(
            "triton", kernels.long_beside, "long rows that lie side by side: parts of them first", finish(LossBeside)
        ),
        Route("triton", lambda c: c.v <= ONE_PASS, WHOLE, rows),
        Route("triton", lambda c: True, LONG, rows),
    )


FORWARD = Dispatch(
    functools.partial(loss_call, "cross_entropy", False), ON_CPU, EMPTY, OTHER_FORM,
    Route("single-program", lambda c: not c.traced, FEW,
          lambda c: SingleProgram(c.options, c.at_once, c.wanted, kernels.launch_single_program(c), None, None),
          single_program_unsupported),
    *by_rows(with_sums),
)  # fmt: skip
WITH_GRADIENT = Dispatch(
    functools.partial(loss_call, "cross_entropy_with_gradient", True),
    ON_CPU,
    EMPTY,
    OTHER_FORM,
    TRACED,
    *by_rows(with_sums),
)

CHUNK = Dispatch(chunk_call, *by_rows(lambda launch: launch))  # of logits of linear_cross_entropy

BACKWARD = Dispatch(  # where the gradient is not made with the loss, or asked for again
    GradientCall.of,
    Route("cuda", lambda c: c.v >= 16384, "16 bytes at a time", launch_cuda_gradient, cluster_unsupported, sm=90),
    Route(
        "triton", kernels.beside, "tiles of rows that lie side by side", lambda c: gradient_launch(c, c.dloss_stride)
    ),
    Route("triton", lambda c: True, "programs over tiles of the logits", kernels.launch_gradient),
)


# ---- linear cross entropy -----------------------------------------------------------

CHUNK_BYTES = 2**30  # of logits that lie in memory at once
TILE_ROWS = 128  # of a product: chunks are multiples of it, and never fewer


def chunk_rows(t: int, v: int, element_size: int, asked: int | None = None) -> int:
    """How many of ``t`` tokens have their logits in memory at once: equal chunks of whole tiles within CHUNK_BYTES."""
    if asked is not None:
        return max(min(asked, t), 1)
    most = max(CHUNK_BYTES // (max(v, 1) * element_size) // TILE_ROWS * TILE_ROWS, TILE_ROWS)
    if t <= most:
        return max(t, 1)
    chunks = -(-t // most)
    return min(-(-t // chunks // TILE_ROWS) * TILE_ROWS, most)


@dataclass(frozen=True)
class LinearCall(Call):
    """The loss of x · weightᵀ + bias, and what is asked of it."""

    x: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [T]
    bias: Tensor | None  # [V]
    class_weight: Tensor | None  # [V]
    options: Options
    chunk_rows: int | None = None  # tokens of a chunk, as the user passed them
    accumulate: torch.dtype | None = None  # that dweight is summed in; None for its own of few chunks, else fp32
    wanted: bool = True  # a gradient of x, weight or bias is needed

    @property
    def empty(self) -> bool:
        return not self.x.numel() or not self.weight.numel()

    @property
    def rows(self) -> int:
        """Tokens of a chunk."""
        return chunk_rows(self.x.shape[0], self.weight.shape[0], self.x.element_size(), self.chunk_rows)

    @property
    def one_chunk(self) -> bool:
        return self.rows >= self.x.shape[0]

    @property
    def scaled_later(self) -> bool:
        """Whether the gradient of logits needs what is known in backward alone."""
        return self.options.reduction == "none" or self.x.dtype == torch.float16

    @property
    def aligned(self) -> bool:
        """Whether 16-bit products are fast: rows of x and the weight begin on 16 bytes."""
        fit = self.x.shape[1] % 8 == 0 and padded.fits(self.x) and padded.fits(self.weight)
        return self.x.element_size() > 2 or fit

    @property
    def w(self) -> Tensor:
        """What is passed as the classes' weights, also where there are none."""
        return self.x if self.class_weight is None else self.class_weight


def linear_call(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    chunk_rows: int | None = None, accumulate: torch.dtype | None = None, wanted: bool = True, **options: Any,
) -> LinearCall:  # fmt: skip
    """Under autocast its tensors are cast as ``F.linear`` and ``F.cross_entropy`` cast them."""
    x, weight, bias = cast_for_products(x, weight, bias)
    (class_weight,) = in_fp32(class_weight)
    asked = Options(**options)
    return LinearCall(x, weight, target, bias, class_weight, asked, chunk_rows, accumulate, wanted=wanted)


def checked(name: str, c: LinearCall, check_labels: bool) -> LinearCall:
    """Raises TypeError or ValueError unless the arguments fit."""
    x, weight = c.x, c.weight
    check_tensor(name, "x", x)
    check_tensor(name, "weight", weight)
    check_same(name, "weight", weight, "x", x)
    check_tensor(name, "target", c.target, (torch.int64, torch.int32))
    check_device(name, "target", c.target, "x", x)
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{name}: arguments 'x' and 'weight' have shapes {tuple(x.shape)} and {tuple(weight.shape)}; expected "
            "[T, D] and [V, D] (flatten leading dimensions)"
        )
    fits = c.target.shape == x.shape[:1]
    if not fits:  # only then is a text made of a size: it would be a constant for a compiler
        check_shape(name, "target", c.target, fits, f"({x.shape[0]},), a label for each row of 'x'")
    classes, what = weight.shape[0], f"one for each class of 'weight' {tuple(weight.shape)}"
    if c.bias is not None:
        check_vector(name, "bias", c.bias, classes, what, "x", x, (x.dtype,))
    if c.class_weight is not None:
        check_class_weight(name, "class_weight", c.class_weight, classes, what, "x", x)
    rows = c.chunk_rows
    fits = rows is None or (is_int(rows) and rows >= 1)
    check_value(name, "chunk_rows", rows, fits, "a number of tokens, at least 1, or None")
    sums = tuple(dict.fromkeys((x.dtype, torch.float32)))
    expected = f"{', '.join(map(str, sums))} or None"
    check_value(name, "accumulate", c.accumulate, c.accumulate in (None, *sums), expected)
    logits = x.detach().new_empty(()).expand(x.shape[0], weight.shape[0])  # for its shape
    check(name, logits, c.target, None, c.options)
    check_range(name, c.target, weight.shape[0], c.options.ignore_index, check_labels)
    return c


HELD = "traced: PyTorch's formulas, which a compiler sees (all logits are held)"
FACTORS = "the gradients need each row's factor: made in backward, a chunk of tokens at a time"
SCALED = "float16 would underflow without the loss scale: made in backward, by chunks"

LINEAR_FORWARD = Dispatch(
    checked, ON_CPU, EMPTY, Route("torch", lambda c: c.traced and c.scaled_later, HELD),
    Route("chunked", lambda c: c.traced, "traced: one operator for the compiler, which alone holds all logits", lambda c: True),
    Route("chunked", lambda c: not c.wanted and (c.x.dtype == torch.float32 or not c.aligned),
          "fp32, or rows that do not begin on 16 bytes: a chunk at a time by cuBLAS, of copies", lambda c: True),
    Route("triton", lambda c: not c.wanted, "no gradient is needed: no logit is written", lambda c: True),
    Route("held", lambda c: c.one_chunk, "logits of one chunk stay in memory until backward", lambda c: True),
    Route("triton", lambda c: c.options.reduction == "none", FACTORS, lambda c: True),
    Route("triton", lambda c: c.x.dtype == torch.float16, SCALED, lambda c: True),
    Route("chunked", lambda c: True, "the gradients come with the loss, a chunk of tokens at a time", lambda c: True),
)  # fmt: skip

LINEAR_WITH_GRADIENT = Dispatch(
    checked, ON_CPU, EMPTY, Route("torch", lambda c: c.traced, HELD),
    Route("chunked", lambda c: True, "three products, a chunk of tokens at a time", lambda c: True),
)  # fmt: skip
