"""Which kernel computes group normalisation: the tables ``FORWARD`` and ``BACKWARD``, and the launches above them.

x is [B, C, S], with S all spatial dimensions; a group is C / G channels of one batch entry, n elements; M = B * G groups.
"""

import ctypes
import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weft.operators import row_cluster
from weft.operators.axis_view import collapsed
from weft.operators.checks import check_eps, check_same, check_shape, check_tensor, check_value, check_vector, is_int
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, flags, shared_limit
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import INTERPRETING, Plan, multiprocessors
from weft.operators.normalization.group_norm import adjacent, kernels
from weft.operators.partial_sums import SummedPlan
from weft.operators.row_cluster import MAX_CLUSTER, RowCluster
from weft.operators.row_programs import row_tiles

HELD = 512 if INTERPRETING else 32768  # elements of a tile that one program holds in registers
HELD_BACKWARD = 512 if INTERPRETING else 16384  # it holds x and dy
SHORT = 4096  # tiles that a program holds even where there are few
LARGEST = 2**20  # groups beyond are configured alike
MOST_PARTS = 8 if INTERPRETING else 256  # of a group, unless groups are few: a program reads the sums of all parts
HERE = Path(__file__).parent

# ---- views -----------------------------------------------------------------------------------------------------------


class View(NamedTuple):
    """A tensor as [B, C, S] with a stride each (0 along an axis of one element)."""

    B: int
    C: int
    S: int
    b: int
    c: int
    s: int


def view_of(x: Tensor) -> View | None:
    """None where the spatial dimensions have no single stride."""
    space = collapsed(x.shape[2:], x.stride()[2:])
    if space is None:
        return None
    b, c = (stride if size > 1 else 0 for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True))
    return View(x.shape[0], x.shape[1], space[0], b, c, space[1])


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


def views_of(*tensors: Tensor) -> list[View]:
    """Of tensors that have one."""
    return [v for v in map(view_of, tensors) if v is not None]


def unit_of(views: Iterable[View], groups: int) -> dict[str, int]:
    """What kernels know of strides: the axis along which all have stride 1, and the largest power of two up to 16 that divides
    its extent and the other strides."""
    views = list(views)
    if all(v.s == 1 for v in views):
        return {"UNIT": math.gcd(16, views[0].S, *(v.b for v in views), *(v.c for v in views)), "DENSE": 2}
    if all(v.c == 1 for v in views):
        return {"UNIT": math.gcd(16, views[0].C // groups, *(v.b for v in views), *(v.s for v in views)), "DENSE": 1}
    return {"UNIT": 1, "DENSE": 0}


NAME = "group_norm"
SECTOR = 32  # bytes


def in_slivers(x: Tensor, groups: int) -> bool:
    """Whether channels are adjacent and those of a group fill no sector, so that each would be moved for several groups."""
    return x.shape[1] // groups * x.element_size() < SECTOR and (x.numel() >= 2**20 or INTERPRETING)


class OfGroups(Call):
    """What both directions' calls have."""

    groups: int

    @property
    def n(self) -> int:
        """Elements of a group."""
        return math.prod(self.x.shape[1:]) // self.groups

    @property
    def space(self) -> int:
        """Elements of a channel."""
        return math.prod(self.x.shape[2:])


class GroupNormCall(OfGroups):
    """A forward call, checked: ``(x, [weight,] [bias,] num_groups, eps, weighted, biased, saved, dtype)``, with the result's
    dtype. A plan is called with ``(x, weight, bias, y, mean, rstd)``, where any tensor may stand for one that is not there: y
    of x's strides where x is dense, mean and rstd fp32 [M], written if ``saved`` for backward."""

    def __init__(self, *arguments: Any):
        *tensors, self.groups, self.eps, weighted, biased, self.saved, self.dtype = arguments
        self.x, *others = tensors
        present = iter(others)
        self.weight, self.bias = (next(present) if has else None for has in (weighted, biased))
        check(self)

    @property
    def like_weight(self) -> Tensor:
        return self.weight if self.weight is not None else self.bias if self.bias is not None else self.x

    @property
    def layout(self) -> "Groups":
        return Groups(self.x, self.groups, forward_configuration, HELD)

    @property
    def views(self) -> list[View]:
        """Of x and of the result."""
        return views_of(self.x, like(self.x))

    @property
    def slivers(self) -> bool:
        return in_slivers(self.x, self.groups) and all(v.c == 1 and v.s > 1 for v in self.views)


class GradientCall(OfGroups):
    """A backward call: ``(x, dy, like, num_groups, weighted, summed)``, where ``like`` is the weight if ``weighted``, else of
    dweights' dtype. A plan is called with ``(x, dy, weight, mean, rstd, dx, dweights)``: dweights, [2, C], takes the gradients
    of weight and bias if ``summed``."""

    def __init__(self, x: Tensor, dy: Tensor, like: Tensor, groups: int, weighted: bool, summed: bool):
        self.x, self.dy, self.like_weight, self.groups = x, dy, like, groups
        self.weight = like if weighted else None
        self.summed = summed

    @property
    def layout(self) -> "Groups":
        return Groups(self.x, self.groups, backward_configuration, HELD_BACKWARD)


def check(c: GroupNormCall) -> None:
    """Raises TypeError or ValueError, naming the argument."""
    x, num_groups, eps = c.x, c.groups, c.eps
    check_tensor(NAME, "x", x)
    check_shape(NAME, "x", x, x.ndim >= 2, "[B, C, ...], at least two dimensions")
    check_value(NAME, "num_groups", num_groups, is_int(num_groups), "an int", TypeError)
    divides = num_groups > 0 and x.shape[1] % num_groups == 0
    expected = f"a positive divisor of {x.shape[1]}, the channels of 'x' {tuple(x.shape)}"
    check_value(NAME, "num_groups", num_groups, divides, expected)
    for name, value in (("weight", c.weight), ("bias", c.bias)):
        if value is not None:
            check_vector(NAME, name, value, x.shape[1], f"the channels of 'x' {tuple(x.shape)}", "x", x)
    if c.weight is not None and c.bias is not None:
        check_same(NAME, "bias", c.bias, "weight", c.weight)
    check_eps(NAME, eps)


def unsupported(c: GroupNormCall) -> str:
    """Why no Triton kernel takes this (an empty string when one does)."""
    if view_of(c.x) is None or view_of(like(c.x)) is None:
        return "the spatial dimensions do not collapse into one stride, so a copy would be needed"
    return "2**31 groups or more" if c.x.shape[0] * c.groups >= 2**31 else ""


# ---- configurations, by the tile that would hold a group: channels × space, each the next power of two ----------------------


def heuristic(tensors: int, held: int, sm: int, dtype: torch.dtype, tile: int) -> Config:
    """Of kernels that read so many tensors: TILE elements a step, AHEAD parts a multiprocessor between a part's two tasks."""
    if tile > held:
        return {"TILE": 16384 // dtype.itemsize if tensors == 1 else 4096, "AHEAD": 4, "num_warps": 8}
    rows = max(1, 2048 // tensors // tile)
    return {"ROWS": rows, "num_warps": min(max(tensors * rows * tile // 512, 1), 32)}


def candidates(tensors: int, held: int, sm: int, dtype: torch.dtype, tile: int) -> Iterable[Config]:
    if tile <= held:
        yield from row_tiles(tile, {"num_warps": (1, 2, 4, 8, 16, 32)}, per_thread=(4, 64 // tensors))
    for c in grid_of({"TILE": (2048, 4096, 8192), "AHEAD": (2, 4, 8), "num_warps": (4, 8, 16)}):
        if tile >= 8192 // tensors and 8 <= tensors * c["TILE"] // (c["num_warps"] * 32) <= 64:
            yield c


def _configured(name: str, tensors: int, held: int) -> Configurations:
    of = functools.partial(heuristic, tensors, held), functools.partial(candidates, tensors, held)
    return Configurations(__file__, name, *of)


forward_configuration = _configured("forward", 1, HELD)
backward_configuration = _configured("backward", 2, HELD_BACKWARD)


# ---- launches of Triton kernels ---------------------------------------------------------------------------------------


class Groups:
    """Groups over programs: ``groups`` of each batch entry of x. The configuration is of tiles that a program holds, of up to
    ``held`` elements, or of parts that are streamed."""

    def __init__(self, x: Tensor, groups: int, configuration: Configurations, held: int):
        (v,) = views_of(x)
        self.v, self.groups, self.rows = v, groups, v.B * groups
        self.channels = v.C // groups
        self.n = self.channels * v.S
        tile = bucket(self.channels) * bucket(v.S)
        config = configuration(x.device, x.dtype, min(tile, LARGEST))
        programs = multiprocessors(x.device)
        few = self.rows < programs // 2 and tile > (64 if INTERPRETING else SHORT)
        self.held = "ROWS" in config and tile <= held and not few
        if self.held:
            self.config = config
            self.tile = {"CHANNELS": bucket(self.channels), "SPACE": bucket(v.S)}
            return
        self.config = config if "TILE" in config else configuration.heuristic(0, x.dtype, 2 * held)
        self._cut(programs)

    def _cut(self, programs: int) -> None:
        """Parts of about TILE elements; of fewer where there are few groups, of more where a group has too many parts."""
        v, most = self.v, self.config["TILE"]
        if INTERPRETING:
            most = 128 if self.n <= 4096 else 4096
        while most > 1024 and self.rows * self.n < 2 * programs * most:
            most //= 2
        if v.c == 1 and v.S > 1:  # channels_last: whole pieces of C / groups elements lie side by side
            channels = min(bucket(self.channels), most)
            space = min(bucket(v.S), most // channels)
        else:
            space = min(bucket(v.S), most)
            channels = min(bucket(self.channels), most // space)
        tiles_s = triton.cdiv(v.S, space)
        parts = MOST_PARTS if INTERPRETING else max(MOST_PARTS, bucket(8 * programs // self.rows))
        walk = bucket(triton.cdiv(tiles_s * triton.cdiv(self.channels, channels), parts))
        walk_s = min(walk, bucket(tiles_s))
        walk_c = walk // walk_s
        parts_s = triton.cdiv(tiles_s, walk_s)
        self.parts = parts_s * triton.cdiv(self.channels, channels * walk_c)
        self.tasks = self.rows * self.parts
        self.tiles_s = tiles_s
        self.numbers = (self.tasks, min(self.tasks, self.parts + self.config["AHEAD"] * programs))
        self.split = (self.parts, parts_s)
        walks = {"WALK_C": walk_c, "WALK_S": walk_s, "MOST": bucket(self.parts)}
        self.tile = {"CHANNELS": channels, "SPACE": space, **walks}

    @property
    def sizes(self) -> tuple[int | float, ...]:
        return self.groups, self.channels, self.v.S, float(self.n)

    def state(self, device: torch.device) -> Tensor:
        """Of a streamed launch: nothing is published yet."""
        return torch.zeros(1 + self.tasks, dtype=torch.int64, device=device)


def strides_of(*views: View) -> tuple[int, ...]:
    return tuple(stride for v in views for stride in (v.b, v.c, v.s))


def _forward_arguments(c: GroupNormCall) -> tuple[tuple[int | float, ...], dict[str, Any]]:
    """Scalars and flags that both forward kernels take last."""
    v, y = c.views
    scalars = (*strides_of(v, y), *(0 if t is None else t.stride(0) for t in (c.weight, c.bias)), c.eps)
    known = {"WEIGHTED": c.weight is not None, "BIASED": c.bias is not None, "SAVED": c.saved}
    return scalars, {**known, **unit_of((v, y), c.groups)}


def held_launch(c: GroupNormCall) -> Plan:
    g, (strides, known) = c.layout, _forward_arguments(c)
    rows = g.config["ROWS"]
    scalars = (g.rows, *g.sizes, *strides)
    grid = (triton.cdiv(g.rows, rows),)
    return Plan(kernels.held_groups, grid, scalars, {"ROWS": rows, **g.tile, **known}, g.config["num_warps"])


def streamed_launch(c: GroupNormCall) -> Any:
    g, (strides, known) = c.layout, _forward_arguments(c)
    scalars = (*g.numbers, *g.sizes, *g.split, *strides)
    plan = Plan(kernels.streamed_groups, (2 * g.tasks,), scalars, {**g.tile, **known}, g.config["num_warps"])
    return lambda x, *tensors: plan(x, *tensors, g.state(x.device))


def _gradient_arguments(c: GradientCall) -> tuple[tuple[int | float, ...], dict[str, Any]]:
    v, of_dy, dx = views_of(c.x, c.dy, like(c.x))
    strides = (*strides_of(v, of_dy, dx), 0 if c.weight is None else c.weight.stride(0))
    return strides, {"WEIGHTED": c.weight is not None, "SUMMED": c.summed, **unit_of((v, of_dy, dx), c.groups)}


def held_gradient_launch(c: GradientCall) -> SummedPlan:
    """With little space a program takes several steps, since it writes two sums a channel; as long as programs are enough."""
    g, (strides, known) = c.layout, _gradient_arguments(c)
    v, rows = g.v, min(g.config["ROWS"], bucket(g.v.B))
    steps = triton.cdiv(v.B, rows) * g.groups // (8 * multiprocessors(c.x.device))
    walk = max(1, min(bucket(triton.cdiv(512, rows * v.S)), bucket(steps + 1) // 2))
    blocks = triton.cdiv(v.B, rows * walk)
    tile = {"ROWS": rows, "WALK": walk, **g.tile, **known}
    warps = g.config["num_warps"]
    if known["UNIT"] * c.x.element_size() < 16:  # threads load single elements: fewer warps were twice as fast
        warps = min(warps, max(rows * g.tile["CHANNELS"] * g.tile["SPACE"] // 1024, 1))
    plan = Plan(kernels.held_gradients, (blocks * g.groups,), (v.B, *g.sizes, *strides), tile, warps)
    return SummedPlan(plan, blocks, g.v.C, 2 * c.summed)


def streamed_gradient_launch(c: GradientCall) -> SummedPlan:
    g, (strides, known) = c.layout, _gradient_arguments(c)
    scalars = (*g.numbers, *g.sizes, *g.split, g.tiles_s, *strides)
    plan = Plan(kernels.streamed_gradients, (2 * g.tasks,), scalars, {**g.tile, **known}, g.config["num_warps"])
    return SummedPlan(lambda x, *tensors: plan(x, *tensors, g.state(x.device)), g.v.B * g.tiles_s, g.v.C, 2 * c.summed)


# ---- forward: a group on a cluster of blocks (cluster.cu) ------------------------------------------------------------

cluster_configuration = Configurations(__file__, "cluster", row_cluster.heuristic, row_cluster.candidates)


def rows_of_groups(x: Tensor, groups: int) -> Tensor:
    """[M, n] of a contiguous x."""
    return x.view(x.shape[0] * groups, -1)


def _cluster_grid(c: GroupNormCall) -> RowCluster:
    """Even shares of a group for the blocks."""
    config = cluster_configuration(c.x.device, c.x.dtype, bucket(c.n))
    threads, count = config["THREADS"], 16 // c.x.element_size()
    blocks = bucket(-(-c.n // (threads * config["EACH"])))
    each = -(-c.n // (blocks * threads * count)) * count
    return RowCluster.of(rows_of_groups(c.x, c.groups), {"THREADS": threads, "EACH": each})


def _cluster_bytes(c: GroupNormCall, grid: RowCluster) -> int:
    """Of weight and bias of a block's channels, in shared memory."""
    return (grid.elements // c.space + 2) * 8


def cluster_unsupported(c: GroupNormCall) -> str:
    present = [t for t in (c.weight, c.bias) if t is not None]
    if any(t.dtype != present[0].dtype or (t.stride(0) != 1 and len(t) > 1) for t in present):
        return "a weight and a bias of two dtypes, or not contiguous"
    if not c.x.is_contiguous():
        return "it takes a contiguous tensor"
    if c.dtype != c.x.dtype:
        return "a result of another dtype than x's (autocast)"
    if reason := row_cluster.why_not(rows_of_groups(c.x, c.groups)):
        return f"groups: {reason}"
    if c.space * c.x.element_size() % 16:
        return "channels that do not begin and end on 16 bytes"
    if _cluster_bytes(c, _cluster_grid(c)) > shared_limit(c.sm):
        return f"{c.space} elements a channel: too many channels for a block's shared memory"
    return ""


def cluster_launch(c: GroupNormCall) -> CudaPlan:
    grid = _cluster_grid(c)
    known = flags(c.weight is not None, c.bias is not None, c.saved)
    kernel = f"group_norm_cluster<{CTYPES[c.x.dtype]}, {CTYPES[c.like_weight.dtype]}, {grid.template}, {known}>"
    sizes = (ctypes.c_uint(v) for v in (c.groups, c.x.shape[1] // c.groups, c.space))
    scalars = (*grid.scalars, *sizes, ctypes.c_float(c.eps))
    shared = _cluster_bytes(c, grid)
    return CudaPlan(HERE / "cluster.cu", kernel, grid.grid, grid.threads, scalars, grid.cluster, shared)


# ---- backward: the same (gradient.cu) --------------------------------------------------------------------------------

LEAST_SPACE = 128  # elements of a channel below which a warp would go through too many channels


def gradient_each(dtype: torch.dtype) -> int:
    """Elements of x, and as many of dy, that a thread holds: 64 bytes of each, half of its registers; with 64 of fp32 some
    were spilled."""
    return 32 if dtype.itemsize == 2 else 12


def gradient_longest(dtype: torch.dtype) -> int:
    """Elements of a group."""
    return 1024 * gradient_each(dtype) * MAX_CLUSTER


def gradient_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """At most 512 threads a block where that is enough, so that two or more share a multiprocessor."""
    return {"THREADS": 512 if 2 * n <= gradient_longest(dtype) else 1024, "EACH": gradient_each(dtype)}


def gradient_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    each = gradient_each(dtype)
    for c in grid_of({"THREADS": (128, 256, 512, 1024), "EACH": (16 if each == 32 else 8, each)}):
        if n <= c["THREADS"] * c["EACH"] * MAX_CLUSTER:
            yield c


gradient_configuration = Configurations(__file__, "gradient", gradient_heuristic, gradient_candidates)


class Spread(NamedTuple):
    """A group over the blocks of a cluster."""

    blocks: int
    share: int  # elements of a block, whole vectors
    threads: int  # that hold them
    slots: int  # blocks that a channel may touch
    channels: int  # that a share may touch
    shared: int  # bytes


def spread(n: int, space: int, dtype: torch.dtype, config: Config) -> Spread:
    """Of a group of n elements, in channels of ``space``: even shares, and whole warps that are enough for one."""
    count, piece = 16 // dtype.itemsize, 32 * config["EACH"]
    blocks = bucket(-(-n // (config["THREADS"] * config["EACH"])))
    share = -(-n // (blocks * count)) * count
    warps = -(-share // piece)
    slots = max((c * space + space - 1) // share - c * space // share + 1 for c in range(n // space))
    channels = min(share // space + 2, n // space)
    return Spread(blocks, share, warps * 32, slots, channels, warps * 8 + channels * 12)


def gradient_unsupported(c: GradientCall) -> str:
    x, dy = c.x, c.dy
    if not (x.is_contiguous() and dy.is_contiguous()) or dy.dtype != x.dtype:
        return "it takes contiguous tensors of one dtype"
    if c.weight is not None and c.weight.stride(0) != 1 and len(c.weight) > 1:
        return "a weight that is not contiguous"
    for t in (x, dy):
        if reason := row_cluster.why_not(rows_of_groups(t, c.groups)):
            return f"groups: {reason}"
    if c.n > (most := gradient_longest(x.dtype)):
        return f"{c.n} elements a group; a cluster of {MAX_CLUSTER} blocks holds {most}"
    if c.space < LEAST_SPACE or c.space * x.element_size() % 16:
        return f"channels of {c.space} elements; it takes {LEAST_SPACE} and more, whole multiples of 16 bytes"
    return ""


def gradient_launch(c: GradientCall) -> SummedPlan:
    batch, channels = c.x.shape[:2]
    m, of_group = batch * c.groups, channels // c.groups
    config = gradient_configuration(c.x.device, c.x.dtype, bucket(c.n))
    over = spread(c.n, c.space, c.x.dtype, config)
    known = flags(c.weight is not None, c.summed)
    types = f"{CTYPES[c.x.dtype]}, {CTYPES[c.like_weight.dtype]}"
    kernel = f"group_norm_gradient<{types}, {over.threads}, {config['EACH']}, {known}>"
    numbers = (over.share, c.groups, of_group, c.space, over.slots, over.channels)
    longs, words = map(ctypes.c_longlong, (c.n, m * of_group)), map(ctypes.c_uint, numbers)
    scalars = (*longs, *words, ctypes.c_float(1 / c.n))
    grid = (m * over.blocks, 1)
    plan = CudaPlan(HERE / "gradient.cu", kernel, grid, over.threads, scalars, over.blocks, over.shared)
    return SummedPlan(plan, over.slots * batch, channels, 2 * c.summed)


def cluster_is_faster(c: GroupNormCall) -> bool:
    """As measured: from 10240 elements, fp32 up to 25088 and from 65536; at 2048 slower, fp32 at 40960 too."""
    if not 10240 <= c.n <= 2**18:
        return False
    return c.x.itemsize == 2 or c.n < 2**15 or c.n >= 2**16


def gradient_cluster_is_faster(c: GradientCall) -> bool:
    """As measured: 16-bit floats up to 131072 elements, beyond which nothing was; fp32 is slower from 65536."""
    return c.n >= row_cluster.SHORTEST and (c.n <= 2**17 if c.x.itemsize == 2 else c.n < 2**16)


ONE_STRIDE = "spatial dimensions do not collapse into one stride: a kernel would need a copy"
CLUSTER = "10,240 elements a group or more: a cluster of blocks holds a group, which is read once"
OF_BOTH = "a cluster of blocks holds x and dy of a group, which are read once"
WHOLE = "a program holds whole groups in registers"
SLIVERS = "channels of a group fill no sector: statistics of channels come first"
PARTS = "groups are cut into parts, read again out of L2"

FORWARD = Dispatch(
    GroupNormCall,
    ON_CPU,
    TRACED,
    EMPTY,
    Route("torch", lambda c: unsupported(c) != "", ONE_STRIDE),
    Route("cuda", cluster_is_faster, CLUSTER, cluster_launch, cluster_unsupported, sm=90),
    Route("triton", lambda c: c.slivers, SLIVERS, adjacent.launch, unsupported),
    Route("triton", lambda c: c.layout.held, WHOLE, held_launch, unsupported),
    Route("triton", lambda c: True, PARTS, streamed_launch, unsupported),
)

BACKWARD = Dispatch(  # where forward is PyTorch's, backward is too
    GradientCall,
    Route("cuda", gradient_cluster_is_faster, OF_BOTH, gradient_launch, gradient_unsupported, sm=90),
    Route("triton", lambda c: c.layout.held, WHOLE, held_gradient_launch),
    Route("triton", lambda c: True, PARTS, streamed_gradient_launch),
)
