"""Which kernel computes RMSNorm and LayerNorm, with or without a residual, forward and backward: the tables are ``FORWARD`` and
``BACKWARD``. Above them are the launches of the CUDA C++ kernels (Triton's are in ``kernels.py``), below is :class:`Norm`,
which the public functions call.

M rows of N columns; h = x + residual is what is normalised (x where no residual is added).
"""

import ctypes
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.definition import Declined, Operator
from weft.operators import peers, row_cluster
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, eager, guarded, is_distributed, on_gpu, promoted, traced, transformed
from weft.operators.checks import check_device, check_eps, check_shape, check_tensor, check_vector
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.contiguous import as_if_contiguous, only_some, side_by_side
from weft.operators.cuda import CTYPES, CudaPlan, flags, not_resident, pointer_aligned, resident, shared_limit
from weft.operators.dispatch import EMPTY, ON_CPU, Call, Dispatch, Route
from weft.operators.launch import Plans
from weft.operators.layout import rows_of, views, within_reach
from weft.operators.normalization import kernels, ring
from weft.operators.normalization.beside import beside_launch
from weft.operators.normalization.kernels import with_copies
from weft.operators.normalization.reference import normalised
from weft.operators.partial_sums import SummedPlan
from weft.operators.row_cluster import MAX_CLUSTER, RowCluster
from weft.operators.row_programs import ONE_PASS

CLUSTER_SHORTEST = 8192  # columns; below, all multiprocessors read the same few lines of the weight out of L2 and wait
HERE = Path(__file__).parent


class NormConfig(NamedTuple):
    """Which norm: ``h = x + residual`` if ``added``; ``y = (h - mean) / deviation`` if ``centered`` (LayerNorm), else
    ``h / root mean square`` (RMSNorm); times a weight, plus a bias."""

    name: str
    centered: bool
    added: bool
    weighted: bool
    biased: bool

    @property
    def registered(self) -> bool:
        """Whether a compiler sees ``torch.ops.weft.<name>``, whose kernels are Triton's; the others it sees as PyTorch's
        operators."""
        return not (self.centered or self.added)

    @property
    def flags(self) -> dict[str, bool]:
        return {"CENTERED": self.centered, "WEIGHTED": self.weighted}


class NormCall(Call):
    """A forward call, checked: ``(x, [residual,] [weight,] [bias,] eps, config, saved)``. A plan is called with ``(x, residual,
    weight, bias, y, h, mean, rstd)``, where any tensor may stand for one that the norm does not have; y and h are
    ``torch.empty_like(x)``, mean and rstd (fp32 [M]) are written if ``saved`` for backward."""

    def __init__(self, *arguments: Any):
        *tensors, self.eps, config, self.saved = arguments
        self.config: NormConfig = config
        self.unlike = False  # of two dtypes, say
        self.x, *others = tensors
        present = iter(others)
        self.residual: Any
        self.residual, self.weight, self.bias = (
            next(present) if has else None for has in (config.added, config.weighted, config.biased)
        )
        check(self)
        self.n = self.x.shape[-1]

    @property
    def read(self) -> list[tuple[str, Tensor]]:
        """The tensors of rows that are read, by name."""
        return [("x", self.x), *([("residual", self.residual)] if self.residual is not None else [])]

    @property
    def beside(self) -> bool:
        """Whether rows of a tensor that is read or written lie side by side."""
        return any(map(side_by_side, (*(t for _, t in self.read), torch.empty_like(self.x, device="meta"))))

    @property
    def copied(self) -> list[int]:
        """The arguments of a plan that it copies: a weight or bias that is strided."""
        return [i for i, t in ((2, self.weight), (3, self.bias)) if t is not None and not t.is_contiguous()]

    @property
    def like_weight(self) -> Tensor:
        return self.x if self.weight is None else self.weight


class GradientCall(Call):
    """A backward call: ``(h, dy, more, weight, eps, config, added)``. A plan is called with ``(h, dy, more, weight, mean, rstd,
    dx, dweights)``: the gradient of ``norm(h) * weight + bias``, to which ``more`` is added if ``added``; mean and rstd, fp32
    [M], are LayerNorm's; dweights is [1, N] for the weight's gradient, or [2, N] with the bias's. Any tensor may stand for one
    that the norm does not have. Of h, dy and more, those whose rows lie side by side are copied where others' do not; dx is
    contiguous then."""

    def __init__(
        self, x: Tensor, dy: Tensor, more: Tensor, weight: Tensor, eps: float, config: NormConfig, added: bool
    ):
        self.weight, self.eps, self.config, self.added, self.n = weight, eps, config, added, x.shape[-1]
        self.sums = config.weighted * (2 if config.centered else 1)
        of_x, of_dy, *of_more = only_some(*read_by_gradient(x, dy, more, added))
        copied = {
            0: of_x,
            1: of_dy or rows_of(dy) is None,
            2: any(of_more) or rows_of(more) is None,
            3: not weight.is_contiguous(),
        }
        self.copied = [i for i, needed in copied.items() if needed]
        self.x = as_if_contiguous(x) if of_x else x
        more = more if added else self.x
        # autograd may bring gradients of any strides (expanded, say)
        self.dy, self.more = (
            torch.empty(t.shape, dtype=t.dtype, device="meta") if i in self.copied else t
            for i, t in ((1, dy), (2, more))
        )


def read_by_gradient(h: Tensor, dy: Tensor, more: Any, added: bool) -> tuple[Tensor, ...]:
    return (h, dy, more) if added else (h, dy)


def check(c: NormCall) -> None:
    """Raises TypeError or ValueError, naming the argument."""
    name, x = c.config.name, c.x
    check_tensor(name, "x", x)
    check_shape(name, "x", x, x.ndim > 0, "at least one dimension, not a scalar")
    if c.config.added:
        check_tensor(name, "residual", c.residual)
        check_device(name, "residual", c.residual, "x", x)
        check_shape(name, "residual", c.residual, c.residual.shape == x.shape, f"{tuple(x.shape)}, the shape of 'x'")
    c.unlike = (c.config.added and c.residual.dtype != x.dtype) or over_several(x, c.weight)
    if c.unlike:
        return
    if c.eps is None and not c.config.centered:
        c.eps = default_eps(x)
    what = f"the last dimension of 'x' {tuple(x.shape)}"
    for argument, value in (("weight", c.weight), ("bias", c.bias)):
        if value is not None:
            check_vector(name, argument, value, x.shape[-1], what, "x", x)
    if c.bias is not None and (c.weight is None or c.bias.dtype != c.weight.dtype):
        found = "None" if c.weight is None else f"of dtype {c.weight.dtype}"
        raise TypeError(
            f"{name}: argument 'weight' is {found}; expected a weight of dtype {c.bias.dtype}, which 'bias' has"
        )
    check_eps(name, c.eps)


def default_eps(x: Any) -> float:
    """What ``F.rms_norm`` takes for None: of the dtype that it computes in."""
    return torch.finfo(torch.float64 if getattr(x, "dtype", None) == torch.float64 else torch.float32).eps


def over_several(x: Any, weight: Any) -> bool:
    """Whether a weight has several dimensions, x's last ones."""
    both = isinstance(x, Tensor) and isinstance(weight, Tensor)
    return both and weight.ndim > 1 and x.shape[-weight.ndim :] == weight.shape


def alike(x: Any, residual: Any, *weights: Any) -> tuple[Any, ...]:
    """x and residual in the dtype of their sum; where theirs differ, weights of a narrower dtype as well."""
    if getattr(x, "dtype", None) is getattr(residual, "dtype", None):
        return (x, residual, *weights)
    x, residual = promoted(x, residual)
    return (x, residual, *promoted(x, *weights)[1:])


def no_rows(c: NormCall) -> str:
    """Why no kernel can read the tensors in place (an empty string when kernels can)."""
    for name, t in c.read:
        if not within_reach(t):
            return (
                f"the leading dimensions of '{name}' do not collapse into rows of one stride, so a copy would be needed"
            )
    return ""


# ---- forward: a row on a cluster of blocks (cluster.cu) --------------------------------------------------------------


def cluster_heuristic(sm: int, dtype: torch.dtype, n: int, centered: bool) -> Config:
    """Two rows of LayerNorm on a cluster, each thread with half as much of each."""
    config = row_cluster.heuristic(sm, dtype, n)
    halves = centered and n <= config["THREADS"] * config["EACH"] // 2 * MAX_CLUSTER
    return {**config, "EACH": config["EACH"] // 2, "ROWS": 2} if halves else {**config, "ROWS": 1}


def cluster_candidates(sm: int, dtype: torch.dtype, n: int, centered: bool) -> Iterable[Config]:
    for c in row_cluster.candidates(sm, dtype, n):
        yield {**c, "ROWS": 1}
        if centered:
            yield {**c, "ROWS": 2}
            if n <= c["THREADS"] * c["EACH"] // 4 * MAX_CLUSTER:
                yield {**c, "EACH": c["EACH"] // 4, "ROWS": 2}


cluster_configuration = Configurations(__file__, "cluster", cluster_heuristic, cluster_candidates)


def unaligned(c: NormCall) -> str:
    """Why the CUDA kernels cannot read 16 bytes at a time (an empty string when they can)."""
    for _, t in c.read:
        if reason := row_cluster.why_not(t):
            return reason
    if c.n < CLUSTER_SHORTEST:
        return f"{c.n} columns; below {CLUSTER_SHORTEST} all blocks read the same few lines of the weight at once"
    if not all(t is None or not t.is_contiguous() or pointer_aligned(t) for t in (c.weight, c.bias)):
        return "a weight or bias that does not begin on 16 bytes"
    return ""


def _weight_bytes(c: NormCall) -> int:
    """Of a block's slice of weight and bias, in shared memory."""
    config = cluster_configuration(c.x.device, c.x.dtype, bucket(c.n), c.config.centered)
    slice_ = config["THREADS"] * config["EACH"]
    return slice_ * c.like_weight.element_size() * (c.config.weighted + c.config.biased)


def cluster_unsupported(c: NormCall) -> str:
    if reason := unaligned(c):
        return reason
    shared = _weight_bytes(c)
    if shared > shared_limit(c.sm):
        return f"{c.n} columns: weight and bias take {shared} bytes of a block's shared memory"
    return ""


def _cuda_forward(c: NormCall, source: str, kernel: str, sizes: str) -> CudaPlan:
    """The launch for all rows, its grid and shared memory still open."""
    config = c.config
    known = flags(config.centered, config.weighted, config.biased, config.added, c.saved)
    types = f"{CTYPES[c.x.dtype]}, {CTYPES[c.like_weight.dtype]}"
    expression = f"{kernel}<{types}, {sizes}, {known}>"
    residual = c.x if c.residual is None else c.residual
    (m, n, x_row, _), (_, _, r_row, _), (_, _, y_row, _) = views(c.x, residual, torch.empty_like(c.x, device="meta"))
    scalars = (*(ctypes.c_longlong(v) for v in (m, n, x_row, r_row, y_row, y_row)), ctypes.c_float(c.eps))
    return CudaPlan(HERE / source, expression, (0, 1), 0, scalars)


@with_copies
def cluster_launch(c: NormCall) -> CudaPlan:
    config = cluster_configuration(c.x.device, c.x.dtype, bucket(c.n), c.config.centered)
    rows = RowCluster.of(c.x, config)
    plan = _cuda_forward(c, "cluster.cu", "norm_cluster", f"{rows.template}, {config['ROWS']}")
    m = rows.grid[0] // rows.cluster
    plan.grid, plan.block, plan.cluster = (-(-m // config["ROWS"]) * rows.cluster, 1), rows.threads, rows.cluster
    plan.shared_bytes = _weight_bytes(c)
    return plan


# ---- forward: the longest rows on clusters that take row after row (persistent.cu) -----------------------------------

FEWEST_SLOTS = 3  # of a ring: one row is written, the next one is summed, a third one is in flight
PERSISTENT_OWN = 2304  # bytes of a block's shared memory, at most, besides the ring: CUDA's, barriers, sums


def slots(sm: int, c: Config, item: int, added: bool) -> int:
    """Rows of which a block's shared memory holds a slice."""
    room = (shared_limit(sm) + ring.SYSTEM) // c["PER_SM"] - PERSISTENT_OWN
    return min(room // (c["THREADS"] * c["EACH"] * item * (1 + added)), 8)


def persistent_candidates(sm: int, dtype: torch.dtype, n: int, centered: bool, added: bool) -> Iterable[Config]:
    """Slices of 8 to 64 elements a thread by 1, 2 or 4 blocks a multiprocessor."""
    item = dtype.itemsize
    for c in grid_of({"THREADS": (256, 512, 1024), "EACH": (8, 16, 32, 64), "PER_SM": (1, 2, 4)}):
        threads, blocks = c["THREADS"] * c["PER_SM"], bucket(-(-n // (c["THREADS"] * c["EACH"])))
        # an estimate: weight and bias in their own dtype, and the rest; more where elements are unpacked
        registers = c["EACH"] * item * (1 + centered) // 4 + (32 if item == 4 else 48)
        fits = registers * threads <= ring.REGISTERS
        enough = threads == 256 if c["EACH"] == 64 else 512 <= threads <= 1024
        if fits and enough and 2 <= blocks <= MAX_CLUSTER and slots(sm, c, item, added) >= FEWEST_SLOTS:
            yield c


def persistent_heuristic(sm: int, dtype: torch.dtype, n: int, centered: bool, added: bool) -> Config:
    """16 elements a thread and one block a multiprocessor were the fastest everywhere; empty where no slice fits."""
    found = persistent_candidates(sm, dtype, n, centered, added)
    return min(found, key=lambda c: (abs(c["EACH"] - 16), c["PER_SM"], c["THREADS"]), default={})


persistent_configuration = Configurations(__file__, "persistent", persistent_heuristic, persistent_candidates)


def persistent_is_faster(c: NormCall) -> bool:
    """Where it was measured to be: LayerNorm of the longest rows on sm_90."""
    if c.traced or c.sm != 90 or not c.config.centered:
        return False
    if c.x.dtype == torch.float32:
        return bucket(c.n) == (2**17 if c.config.added else 2**18)
    return c.config.added and bucket(c.n) in (2**17, 2**18)


def _one_persistent_cluster(c: NormCall) -> CudaPlan | str:
    """The launch of one cluster, or why there is none."""
    config = persistent_configuration(c.x.device, c.x.dtype, bucket(c.n), c.config.centered, c.config.added)
    if not config:
        return f"{c.n} columns; no slice fits a block's registers and shared memory {FEWEST_SLOTS} times"
    threads, each, item = config["THREADS"], config["EACH"], c.x.element_size()
    ring_slots = slots(c.sm, config, item, c.config.added)
    cluster, rest = divmod(c.n, threads * each)
    if ring_slots < FEWEST_SLOTS or rest or not 2 <= cluster <= MAX_CLUSTER:
        return f"{c.n} columns; it takes 2 to {MAX_CLUSTER} whole slices of {threads * each}, {FEWEST_SLOTS} in shared memory"
    plan = _cuda_forward(c, "persistent.cu", "norm_persistent", f"{threads}, {each}, {ring_slots}, {config['PER_SM']}")
    plan.grid, plan.block, plan.cluster = (cluster, 1), threads, cluster
    plan.shared_bytes = ring_slots * (1 + c.config.added) * threads * each * item
    return plan


def persistent_unsupported(c: NormCall) -> str:
    if c.traced:
        return "traced: a compiler would follow the choice of a configuration"
    if reason := unaligned(c):
        return reason
    one = _one_persistent_cluster(c)
    if isinstance(one, str):
        return one
    return not_resident(one, c.x.device)


@with_copies
def persistent_launch(c: NormCall) -> CudaPlan:
    one = _one_persistent_cluster(c)
    assert isinstance(one, CudaPlan)  # it is supported
    clusters = min(c.x.numel() // c.n, resident(one, c.x.device))
    return dataclasses.replace(one, grid=(clusters * one.cluster, 1))


# ---- backward --------------------------------------------------------------------------------------------------------


def measured_for_two(sm: int, *key: Any) -> Config:
    """What was measured for two tensors, where nothing is known of three."""
    return ring_configuration.table(sm).get(ring_configuration.key(*key)) or ring.heuristic(sm, *key)


ring_configuration = Configurations(__file__, "backward_cluster", ring.heuristic, ring.candidates)
# With a third tensor fewer blocks fit on a multiprocessor: a choice for two that has few warps is left with too few.
added_ring_configuration = Configurations(
    __file__, "backward_cluster_added", measured_for_two, functools.partial(ring.candidates, tensors=3)
)


def _one_gradient_cluster(c: GradientCall) -> ring.OneCluster | None:
    configuration = added_ring_configuration if c.added else ring_configuration
    config = configuration(c.x.device, c.x.dtype, bucket(c.n), c.config.centered)
    weight_bytes, known = c.config.weighted * c.weight.element_size(), (c.config.centered, c.config.weighted, c.added)
    (m, n, *_), *_ = found = kernels.gradient_views(c)
    scalars = (*(ctypes.c_longlong(v) for v in (m, n, *(row for _, _, row, _ in found))), ctypes.c_float(c.eps))
    source = HERE / "backward.cu"
    return ring.one_cluster(source, "norm_backward", c.x, c.weight, config, 2 + c.added, weight_bytes, known, scalars)


def gradient_clusters_unsupported(c: GradientCall) -> str:
    others = (c.dy, c.more) if c.added else (c.dy,)
    weight = c.weight if c.config.weighted else None
    if reason := ring.unsupported(c.x, *others, weight=weight, centered=c.config.centered):
        return reason
    one = _one_gradient_cluster(c)
    if one is None:
        return f"{c.n} columns with a third tensor or a float32 weight; shared memory holds fewer"
    return not_resident(one.plan, c.x.device)


@with_copies
def gradient_clusters_launch(c: GradientCall) -> SummedPlan:
    rows, clusters = ring.all_clusters(_one_gradient_cluster(c), c.x)
    return SummedPlan(rows, clusters, c.n, c.sums)


FUSED = "traced: a compiler fuses PyTorch's operators"
FUSED_UP_TO = 2048  # columns; measured in the layers of a decoder (docs/notes/training.md), longer rows were not
FUSED_SHORT = "traced, short rows: a compiler fuses the norm with the addition before it and those behind its gradient"
UNLIKE = "x and residual of two dtypes, or a weight of several dimensions: cast, or flattened, first"
ONE_STRIDE = "leading dimensions do not collapse into rows of one stride: a kernel would need a copy"
PERSISTENT = (
    "LayerNorm of 131,072 columns and more: clusters of blocks keep the weight in registers and take row after row"
)
CLUSTER = "16,384 columns or more: a cluster of blocks holds a row"
SHORT_BESIDE = 2048  # columns
BESIDE = "longer rows that lie side by side: sums of parts of them first"
WHOLE = "a program holds whole rows in registers"
TWICE = "a program reads a row twice, the second time out of L2"

FORWARD = Dispatch(
    NormCall,
    ON_CPU,
    Route("torch", lambda c: transformed() or (c.traced and not c.config.registered) or is_distributed(c.x), FUSED),
    Route("torch", lambda c: c.traced and c.n <= FUSED_UP_TO, FUSED_SHORT),
    EMPTY,
    Route("torch", lambda c: c.unlike, UNLIKE),
    Route("torch", lambda c: no_rows(c) != "", ONE_STRIDE),
    Route("cuda-persistent", persistent_is_faster, PERSISTENT, persistent_launch, persistent_unsupported, sm=90),
    Route("cuda", lambda c: not c.traced and c.n >= 16384, CLUSTER, cluster_launch, cluster_unsupported, sm=90),
    Route("triton", lambda c: c.n > SHORT_BESIDE and c.beside, BESIDE, beside_launch, no_rows),
    Route("triton", lambda c: c.n <= ONE_PASS, WHOLE, kernels.rows_launch, no_rows),
    Route("triton", lambda c: True, TWICE, kernels.rows_launch, no_rows),
)

RINGS = "clusters of blocks hold a row and take row after row: it is read once"
ONE_PASS_WHOLE = "a program holds whole rows: one pass"
SUMS_FIRST = "two passes: sums of the rows first, then columns"

BACKWARD = Dispatch(  # where forward is PyTorch's, backward is too
    GradientCall,
    Route("cuda", lambda c: not c.traced and (c.n >= 512 or c.added or (c.config.centered and c.x.dtype != torch.float32)),
          RINGS, gradient_clusters_launch, gradient_clusters_unsupported, sm=90),
    Route("triton", kernels.holds_rows, ONE_PASS_WHOLE, kernels.gradient_rows_launch),
    Route("triton", lambda c: True, SUMS_FIRST, kernels.gradient_columns_launch),
)  # fmt: skip

# ---- the public functions' call --------------------------------------------------------------------------------------

Kernels = tuple[Plans, Plans]  # that make the plans of forward and of backward
Statistics = tuple[Tensor, Tensor]  # mean and 1 / deviation of each row, fp32 [M]


def normalise(
    plans: Plans, tensors: tuple[Any, ...], eps: float, config: NormConfig, saved: bool
) -> tuple[Tensor, Tensor, Statistics]:
    """``(y, h, statistics)`` of ``(x, residual, weight, bias)``: h is x where nothing is added, and so are statistics that are
    not ``saved``."""
    x = tensors[0]
    y = torch.empty_like(x)
    h = torch.empty_like(x) if config.added else x
    rows = x.numel() // max(x.shape[-1], 1) if saved else 0
    mean, rstd = torch.empty((2, rows), dtype=torch.float32, device=x.device).unbind(0) if saved else (x, x)
    if y.numel():
        plan = plans.of(tuple(t for t in tensors if t is not None), eps, config, saved)
        if plan is None:
            raise Declined(FORWARD.choose(*(t for t in tensors if t is not None), eps, config, saved).reason)
        plan(*(x if t is None else t for t in tensors), y, h, mean, rstd)
    return y, h, (mean, rstd)


def gradients(
    plans: Plans, tensors: tuple[Any, ...], statistics: Statistics, eps: float, config: NormConfig
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(dh, dweight, dbias)`` of ``(h, dy, more, weight)``; ``more`` is added to dh."""
    h, dy, more, weight = tensors
    copied = not h.is_contiguous() and only_some(*read_by_gradient(h, dy, more, more is not None))[0]
    dh = torch.empty_like(h, memory_format=torch.contiguous_format if copied else torch.preserve_format)
    sums = 0 if weight is None else 2 if config.centered else 1
    dweights = torch.empty((sums, h.shape[-1]), dtype=h.dtype if weight is None else weight.dtype, device=h.device)
    if dh.numel() == 0:
        dweights.zero_()
    else:
        tensors = (h, dy, h if more is None else more, h if weight is None else weight)
        plans.of(tensors, eps, config, more is not None)(*tensors, *statistics, dh, dweights)
    dw, db = (*dweights.unbind(0), None, None)[:2]
    return dh, dw, db


class NormFunction(KernelFunction):
    """The norm under autograd, by kernels that ``kernels`` makes the plans of."""

    @staticmethod
    def forward(ctx: Any, config: NormConfig, kernels: Kernels, *call: Any) -> Any:
        x, residual, weight, bias, eps = call
        saved = config.centered and any(ctx.needs_input_grad)
        y, h, statistics = normalise(kernels[0], (x, residual, weight, bias), eps, config, saved)
        ctx.config, ctx.kernels, ctx.eps = config, kernels, eps
        ctx.save_for_backward(h, weight, bias, *statistics)
        return (y, h) if config.added else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor | None = None) -> tuple[Tensor | None, ...]:
        h, weight, bias, mean, rstd = ctx.saved_tensors
        config, eps = ctx.config, ctx.eps
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            inputs = (h, weight, bias)
            wanted = [t is not None and t.requires_grad for t in inputs]
            dx, dw, db = reference_gradients(
                lambda h, weight, bias: normalised(h, weight, bias, eps, config.centered), inputs, wanted, (dy,)
            )
            dx = dx if dh is None or dx is None else dx + dh
        else:
            dx, dw, db = gradients(ctx.kernels[1], (h, dy, dh, weight), (mean, rstd), eps, config)
        return None, None, dx, dx if config.added else None, dw, db if config.biased else None, None


class PassedOn(NormFunction):
    """The norm of x, and x itself: what comes back by both is added in the pass that makes the norm's gradient."""

    @staticmethod
    def forward(ctx: Any, config: NormConfig, kernels: Kernels, *call: Any) -> Any:
        return NormFunction.forward(ctx, config, kernels, *call), call[0]


# The gradient of a width that the forward kernel does not take has a forward by the table.
NAMED = {
    "triton": (FORWARD.kernel("triton"), FORWARD.kernel("triton"), BACKWARD.kernel("triton")),
    "cuda": (FORWARD.kernel("cuda"), FORWARD, BACKWARD.kernel("cuda")),
    "cuda-persistent": (FORWARD.kernel("cuda-persistent"), FORWARD, BACKWARD),
}


class Norm:
    """One of the four norms.

    Args:
        name: the operator's.
        in_torch: the same in PyTorch, with the operator's arguments.
        centered: LayerNorm, else RMSNorm.
        alone: where a residual is added first, the norm without one; the call then returns (y, h).
    """

    def __init__(self, name: str, in_torch: Callable[..., Any], *, centered: bool, alone: "Norm | None" = None):
        self.name, self.in_torch, self.centered, self.alone = name, in_torch, centered, alone
        self.added = added = alone is not None
        self.signature = inspect.signature(in_torch)
        self.registered = not (centered or added)
        self.configs = {
            (weighted, biased): NormConfig(name, centered, added, weighted, biased)
            for weighted in (False, True)
            for biased in (False, True)
        }

    def arguments(self, *args: Any, **named: Any) -> tuple[Any, ...]:
        """Of a call of the operator → (x, residual, weight, bias, eps)."""
        given = self.signature.bind(*args, **named)
        given.apply_defaults()
        return tuple(given.arguments.get(name) for name in ("x", "residual", "weight", "bias", "eps"))

    def register(self, operator: Operator) -> None:
        """The operator's kernels, PyTorch, and the choice between them."""
        cuda: dict[str, Any] = {"backend": "cuda", "arch": ">=sm_90", "devices": ("cuda",)}
        forward: dict[str, Any] = {**cuda, "directions": ("forward",)}
        for kernel, declared in (("triton", {"arch": ">=sm_80"}), ("cuda", cuda), ("cuda-persistent", forward)):
            operator.implementation(kernel, **declared)(functools.partial(self.by_kernel, kernel))
        peers.register(operator, self.in_torch)
        operator.choice(guarded(self.choose))

    def reference(self, *args: Any, **named: Any) -> Any:
        return self._formula(*self.arguments(*args, **named))

    def _formula(self, x: Tensor, residual: Any, weight: Any, bias: Any, eps: float) -> Any:
        h = x if residual is None else x + residual
        y = normalised(h, weight, bias, eps, self.centered)
        return (y, h) if self.added else y

    def by_kernel(self, kernel: str, *args: Any, **named: Any) -> Any:
        """The named kernels, whatever :meth:`choose` says (on CPU tensors the reference)."""
        x, _, weight, _, eps = call = self.arguments(*args, **named)
        if kernel == "triton" and self.registered and (traced(x) or not on_gpu(x)):
            return getattr(torch.ops.weft, self.name)(x, weight, eps)
        if not on_gpu(x):
            return self._formula(*call)
        alone, before_backward, backward = NAMED[kernel]
        wanted = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in call)
        return self._differentiable((before_backward if wanted else alone, backward), call)

    def choose(self, *args: Any, direction: str = "forward", **named: Any) -> Choice:
        x, residual, weight, bias, eps = self.arguments(*args, **named)
        if self.alone is not None and residual is None:
            given = (t for t in (x, weight, bias) if t is not None)
            return self.alone.choose(*given, eps=eps, direction=direction)
        x, residual, weight, bias, eps = self.fitted(x, residual, weight, bias, eps)
        config = self.configs[weight is not None, bias is not None]
        forward = FORWARD.choose(*self._tensors(x, residual, weight, bias), eps, config, False)
        if direction == "forward" or forward.implementation == "torch":
            return forward
        h, dy = x if not self.added else torch.empty_like(x), torch.empty_like(x)
        return BACKWARD.choose(h, dy, dy, h if weight is None else weight, eps, config, self.added)

    def __call__(self, x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> Any:
        """What the public function does."""
        if eps.__class__ is int and abs(eps) <= 3e38:
            eps = float(eps)  # of more bits than a kernel's scalar may have
        if self.alone is not None and residual is None:
            return self.alone.passed_on(x, weight, bias, eps)
        tensors = self._tensors(x, residual, weight, bias)
        config = self.configs[weight is not None, bias is not None]
        if all(isinstance(t, Tensor) for t in tensors) and eager(*tensors, gradient=True):
            plan = FORWARD.of(tensors, eps, config, False)
            if plan is not None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                eps = default_eps(x) if eps is None else eps
                return self._differentiable((FORWARD, BACKWARD), (x, residual, weight, bias, eps))
            if plan is not None:
                y = torch.empty_like(x)
                h = torch.empty_like(x) if self.added else x
                r, w = x if residual is None else residual, x if weight is None else weight
                plan(x, r, w, x if bias is None else bias, y, h, x, x)
                return (y, h) if self.added else y
        chosen = FORWARD.choose(*tensors, eps, config, False).implementation
        if (self.added and x.dtype is not residual.dtype) or (weight is not None and weight.ndim > 1):
            out = self(*self.fitted(x, residual, weight, bias, eps))
            if weight is None or weight.ndim == 1:
                return out
            return tuple(t.view(x.shape) for t in out) if self.added else out.view(x.shape)
        eps = default_eps(x) if eps is None else eps
        if chosen == "torch":
            return self._formula(x, residual, weight, bias, eps)
        if self.registered and traced(x):
            return getattr(torch.ops.weft, self.name)(x, weight, eps)
        return self._differentiable((FORWARD, BACKWARD), (x, residual, weight, bias, eps))

    def passed_on(self, x: Any, weight: Any, bias: Any, eps: Any) -> tuple[Any, Any]:
        """Of a norm without a residual: its result, and x."""
        tensors, config = self._tensors(x, None, weight, bias), self.configs[weight is not None, bias is not None]
        if (
            all(isinstance(t, Tensor) for t in tensors)
            and torch.is_grad_enabled()
            and x.requires_grad
            and not traced(x)
        ):
            if eager(*tensors, gradient=True):
                ours = FORWARD.of(tensors, eps, config, False) is not None
            else:
                ours = FORWARD.choose(*tensors, eps, config, False).implementation != "torch"
            if ours:
                eps, kernels = default_eps(x) if eps is None else eps, (FORWARD, BACKWARD)
                passed: tuple[Any, Any] = differentiable(PassedOn, config, kernels, x, None, weight, bias, eps)
                return passed
        return self(x, None, weight, bias, eps), x

    def fitted(self, x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> tuple[Any, ...]:
        """The arguments as kernels take them: of one dtype, and with the dimensions that the weight has flattened (a view;
        raises ValueError where there is none)."""
        tensors = alike(x, residual, weight, bias) if self.added else (x, residual, weight, bias)
        if over_several(x, weight):
            names = ("x", "residual", "weight", "bias")
            tensors = tuple(self._flat(n, t, weight.shape) for n, t in zip(names, tensors, strict=True))
        return (*tensors, eps)

    def _flat(self, argument: str, t: Any, of: torch.Size) -> Any:
        """With its last dimensions, which are ``of``, as one (as it is where they are others, which is then refused)."""
        kept = getattr(t, "ndim", 0) - len(of)
        if kept < 0 or t.shape[kept:] != of:
            return t
        try:
            return t.view(*t.shape[:kept], of.numel())
        except RuntimeError as error:
            raise ValueError(
                f"{self.name}: argument '{argument}' has shape {tuple(t.shape)} and strides {t.stride()}; expected the last "
                f"{len(of)} dimensions, those of 'weight', to be contiguous"
            ) from error

    def _tensors(self, x: Any, residual: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
        """Those that the norm has."""
        return (x, *((residual,) if self.added else ()), *(t for t in (weight, bias) if t is not None))

    def _differentiable(self, kernels: Kernels, call: tuple[Any, ...]) -> Any:
        config = self.configs[call[2] is not None, call[3] is not None]
        return differentiable(NormFunction, config, kernels, *call)
