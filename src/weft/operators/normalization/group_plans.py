"""The launches of GroupNorm: how groups are laid over programs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weft.definition import Declined
from weft.operators import partial_sums
from weft.operators.axis_view import collapsed
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import INTERPRETING, Plan, Plans, multiprocessors
from weft.operators.normalization.group_kernels import held_gradients, held_groups
from weft.operators.normalization.group_parts import streamed_gradients, streamed_groups
from weft.operators.row_programs import row_tiles

HELD = 512 if INTERPRETING else 32768  # elements of a tile that one program holds in registers
HELD_BACKWARD = 512 if INTERPRETING else 16384  # it holds x and dy
SHORT = 4096  # tiles that are held even where there are few
LARGEST = 2**20  # groups beyond are configured alike
MOST_PARTS = (
    8 if INTERPRETING else 256
)  # of a group, unless groups are few: whoever normalises a part reads a word of each

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


def why_not(x: Tensor, groups: int) -> str:
    """Why no kernel takes these (an empty string when they do)."""
    if view_of(x) is None or view_of(like(x)) is None:
        return "the spatial dimensions do not collapse into one stride, so a copy would be needed"
    return "2**31 groups or more" if x.shape[0] * groups >= 2**31 else ""


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


def views_of(groups: int, *tensors: Tensor) -> list[View]:
    """Raises Declined as :func:`why_not` says."""
    for t in tensors:
        if reason := why_not(t, groups):
            raise Declined(reason)
    return [v for v in map(view_of, tensors) if v is not None]


def unit_of(views: Iterable[View], groups: int) -> dict[str, int]:
    """What kernels know of strides: the axis along which all have stride 1, and the largest power of two up to 16 that divides
    its extent and the other strides."""
    views = list(views)
    if all(v.s == 1 for v in views):
        return {"UNIT": math.gcd(16, views[0].S, *(v.b for v in views), *(v.c for v in views)), "DENSE": 2}
    if all(v.c == 1 for v in views):
        unit = math.gcd(16, views[0].C // groups, *(v.b for v in views), *(v.s for v in views))
        return {"UNIT": unit, "DENSE": 1}
    return {"UNIT": 1, "DENSE": 0}


# ---- configurations, by the tile that would hold a group: channels × space, each the next power of two ----------------------


def streamed(tensors: int) -> list[Config]:
    """TILE elements a step, AHEAD parts a multiprocessor between a part's two tasks."""
    every = grid_of({"TILE": (2048, 4096, 8192), "AHEAD": (2, 4, 8), "num_warps": (4, 8, 16)})
    return [c for c in every if 8 <= tensors * c["TILE"] // (c["num_warps"] * 32) <= 64]


def forward_heuristic(sm: int, dtype: torch.dtype, tile: int) -> Config:
    if tile > HELD:
        return {"TILE": 16384 // dtype.itemsize, "AHEAD": 4, "num_warps": 8}
    rows = max(1, 2048 // tile)
    return {"ROWS": rows, "num_warps": min(max(rows * tile // 512, 1), 32)}


def forward_candidates(sm: int, dtype: torch.dtype, tile: int) -> list[Config]:
    held = row_tiles(tile, {"num_warps": (1, 2, 4, 8, 16, 32)}, per_thread=(4, 64)) if tile <= HELD else []
    return [*held, *(streamed(1) if tile >= 8192 else [])]


def backward_heuristic(sm: int, dtype: torch.dtype, tile: int) -> Config:
    if tile > HELD_BACKWARD:
        return {"TILE": 4096, "AHEAD": 4, "num_warps": 8}
    rows = max(1, 1024 // tile)
    return {"ROWS": rows, "num_warps": min(max(rows * tile // 256, 1), 32)}


def backward_candidates(sm: int, dtype: torch.dtype, tile: int) -> list[Config]:
    held = row_tiles(tile, {"num_warps": (1, 2, 4, 8, 16, 32)}, per_thread=(4, 32)) if tile <= HELD_BACKWARD else []
    return [*held, *(streamed(2) if tile >= 4096 else [])]


forward_configuration = Configurations(__file__, "group_forward", forward_heuristic, forward_candidates)
backward_configuration = Configurations(__file__, "group_backward", backward_heuristic, backward_candidates)


# ---- plans -----------------------------------------------------------------------------------------------------------


class Groups:
    """Groups over programs.

    Args:
        v: of x.
        groups: of each batch entry.
        configuration: measured, of tiles that are ``held`` or of parts that are streamed.
        held: elements up to which a tile may be.
    """

    def __init__(self, v: View, groups: int, x: Tensor, configuration: Configurations, held: int):
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
        self.tile = {
            "CHANNELS": channels,
            "SPACE": space,
            "WALK_C": walk_c,
            "WALK_S": walk_s,
            "MOST": bucket(self.parts),
        }

    @property
    def sizes(self) -> tuple[int | float, ...]:
        return self.groups, self.channels, self.v.S, float(self.n)

    def state(self, device: torch.device) -> Tensor:
        """Of a streamed launch: nothing is published yet."""
        return torch.zeros(1 + self.tasks, dtype=torch.int64, device=device)


def strides_of(*views: View) -> tuple[int, ...]:
    return tuple(stride for v in views for stride in (v.b, v.c, v.s))


def stride_of(weight: Tensor | None) -> int:
    return 0 if weight is None else weight.stride(0)


class ForwardPlan:
    """Call with ``(x, weight, bias, y, mean, rstd)``: y of x's strides where that is dense, mean and rstd fp32 [B * groups],
    written if ``kept``. What is not there is stood in for by any tensor."""

    def __init__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, kept: bool):
        v, y = views_of(groups, x, like(x))
        g = Groups(v, groups, x, forward_configuration, HELD)
        strides = (*strides_of(v, y), stride_of(weight), stride_of(bias), eps)
        flags = {"WEIGHTED": weight is not None, "BIASED": bias is not None, "KEPT": kept, **unit_of((v, y), groups)}
        warps = g.config["num_warps"]
        self.groups = g
        if g.held:
            rows = g.config["ROWS"]
            scalars = (g.rows, *g.sizes, *strides)
            tile = {"ROWS": rows, **g.tile, **flags}
            self.launch = Plan(held_groups, (triton.cdiv(g.rows, rows),), scalars, tile, warps)
        else:
            scalars = (*g.numbers, *g.sizes, *g.split, *strides)
            self.launch = Plan(streamed_groups, (2 * g.tasks,), scalars, {**g.tile, **flags}, warps)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mean: Tensor, rstd: Tensor) -> None:
        if self.groups.held:
            self.launch(x, weight, bias, y, mean, rstd)
        else:
            self.launch(x, weight, bias, y, mean, rstd, self.groups.state(x.device))


class BackwardPlan:
    """Call with ``(x, dy, weight, mean, rstd, dx, dweights)``: dweights [2, C] takes the gradients of weight and bias if
    ``summed``. Programs leave partial sums of these, which a second launch adds up in a fixed order."""

    def __init__(self, x: Tensor, dy: Tensor, weight: Tensor | None, groups: int, summed: bool):
        v, of_dy, dx = views_of(groups, x, dy, like(x))
        g = Groups(v, groups, x, backward_configuration, HELD_BACKWARD)
        strides = (*strides_of(v, of_dy, dx), stride_of(weight))
        flags = {"WEIGHTED": weight is not None, "SUMMED": summed, **unit_of((v, of_dy, dx), groups)}
        warps = g.config["num_warps"]
        self.groups, self.summed = g, summed
        if g.held:
            rows = min(g.config["ROWS"], bucket(v.B))
            walk = self._walk(rows, x.device)
            blocks = triton.cdiv(v.B, rows * walk)
            tile = {"ROWS": rows, "WALK": walk, **g.tile, **flags}
            scalars = (v.B, *g.sizes, *strides)
            self.launch = Plan(held_gradients, (blocks * groups,), scalars, tile, warps)
            self.partial = (2, blocks, v.C)
        else:
            scalars = (*g.numbers, *g.sizes, *g.split, g.tiles_s, *strides)
            self.launch = Plan(streamed_gradients, (2 * g.tasks,), scalars, {**g.tile, **flags}, warps)
            self.partial = (2, v.B * g.tiles_s, v.C)
        self.total = partial_sums.plan(self.partial[1], v.C, 2)

    def _walk(self, rows: int, device: torch.device) -> int:
        """Steps of a program: with little space, several, since each program writes two sums a channel; as long as programs
        are enough."""
        v = self.groups.v
        steps = triton.cdiv(v.B, rows) * self.groups.groups // (8 * multiprocessors(device))
        return max(1, min(bucket(triton.cdiv(512, rows * v.S)), bucket(steps + 1) // 2))

    def __call__(
        self, x: Tensor, dy: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dx: Tensor, dweights: Tensor
    ) -> None:
        partial = torch.empty(self.partial if self.summed else (2, 0), dtype=torch.float32, device=x.device)
        tensors = (x, dy, weight, mean, rstd, dx, partial[0], partial[1])
        self.launch(*tensors) if self.groups.held else self.launch(*tensors, self.groups.state(x.device))
        if self.summed:
            self.total(partial, dweights)


def forward_plan(*call: Any) -> ForwardPlan:
    """Of ``(x, [weight,] [bias,] groups, eps, weighted, biased, kept, dtype)``."""
    x, weight, bias, groups, eps, kept = taken_apart(*call)
    return ForwardPlan(x, weight, bias, groups, eps, kept)


def taken_apart(*call: Any) -> tuple[Tensor, Tensor | None, Tensor | None, int, float, bool]:
    *tensors, groups, eps, weighted, biased, kept, _ = call
    there = iter(tensors)
    x = next(there)
    weight, bias = (next(there) if given else None for given in (weighted, biased))
    return x, weight, bias, groups, eps, kept


def backward_plan(*call: Any) -> BackwardPlan:
    """Of ``(x, dy, like, groups, weighted, summed)``: like is the weight if ``weighted``, else of dweights' dtype."""
    x, dy, like, groups, weighted, summed = call
    return BackwardPlan(x, dy, like if weighted else None, groups, summed)


forward_plans = Plans(forward_plan)
backward_plans = Plans(backward_plan)
