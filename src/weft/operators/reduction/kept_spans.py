"""An extremum of extents longer than a tile, whose gradient reads x only where the extremum lies.

Forward keeps the extremum of each span of some thousand elements, which it takes on its way to the whole. In backward most
spans have another than the result's, so nothing in them equals it: x is read in the others alone, to count what shares a
gradient and to write it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import reference_gradients
from weft.operators.configs import bucket
from weft.operators.launch import Plan, Plans
from weft.operators.reduction import kept_kernels, kernels
from weft.operators.reduction.kept import rows_became_columns, with_strides
from weft.operators.reduction.plans import (
    COLUMNS,
    PARTIALS,
    ROWS,
    Formula,
    ReducePlan,
    Spread,
    SpreadPlan,
    partial_view,
    reduce_launch,
    tiling,
)
from weft.operators.reduction.views import View

TILE = 2048  # elements that are counted at once


class SpansReady:
    """As ``kept.KeptReady``, which keeps bits; this keeps x, the result and the extrema of spans, [M, spans, K] in fp32.

    Args:
        found: views of x and of dx.
        reference: the reduction of x in PyTorch, for a gradient of the gradient.
    """

    dtype = torch.float32

    def __init__(
        self, x: Tensor, dim: int | None, keepdim: bool, shape: tuple[int, ...], found: tuple[View, View],
        formula: Formula, spread: Spread, reference: Any,
    ):  # fmt: skip
        v, total = found[0], dim is None
        later = SpreadPlan(*found, (0, 0), x, spread, total=total)
        if later.count != 2:
            raise Declined("a tile holds all that shares a result: its bits may be kept")
        self.shape, self.reference = shape, reference
        self.dy = (dim, keepdim, rows_became_columns(x, dim, v))
        self.views, self.ties = found, later.ties
        self.kept = (v.M, later.spans, v.K)
        tiles = replace(tiling(v, x.device, x.dtype, (ROWS, COLUMNS)), chunk=later.span, rows=1, flat=False)
        self.first = reduce_launch(v, tiles, formula, kernels.keep)
        every = partial_view((1, v.M * later.spans * v.K, 1) if total else self.kept)
        self.rest = ReducePlan(every, x.device, torch.float32, formula.again, kinds=PARTIALS)
        cols = min(bucket(v.K), 256)
        reach = min(bucket(later.span), TILE // cols)
        self.tile = {"REACH": reach, "COLS": cols, "SPAN": later.span}
        self.grid = (v.M * later.spans * triton.cdiv(v.K, cols),)
        self.scalars = (v.M, v.N, v.K, later.spans, v.m, v.n, v.k, *((0, 0) if total else (v.K, 1)))
        how = {"FINISH": formula.finish, **self.tile, "UNIT": v.unit(), "DENSE": v.dense_axis}
        self.count = Plan(kept_kernels.count_in_spans, self.grid, self.scalars, how)

    def share_plan(self, strides: tuple[int, int]) -> Plan:
        v, dx = self.views
        how = {**self.tile, "UNIT": v.unit(dx), "DENSE": v.dense_axis}
        scalars = (*self.scalars, *strides, dx.m, dx.n, dx.k)
        return Plan(kept_kernels.share_in_spans, self.grid, scalars, how)

    def __call__(self, x: Tensor, out: Tensor, best: Tensor) -> None:
        self.first(x, x, best)  # in the place of y, which the formula compares with nothing
        self.rest(best, out)

    def saved(self, x: Tensor, out: Tensor, best: Tensor) -> tuple[Tensor, ...]:
        return x, out, best

    def gradient(self, dy: Tensor, x: Tensor, y: Tensor, best: Tensor) -> Tensor:
        dx = torch.empty_like(x)
        dy, strides = with_strides(dy, *self.dy)
        hits = torch.empty_like(best)
        ties = torch.empty(self.kept[0] * self.kept[2], dtype=torch.float32, device=x.device)
        self.count(x, y, best, hits)
        self.ties(hits, ties)
        share_plans.of((dy, dx), self, strides)(x, y, dy, ties, hits, dx)
        return dx

    def differentiable(self, dy: Tensor, x: Tensor, y: Tensor, best: Tensor) -> Tensor | None:
        return reference_gradients(self.reference, (x,), (True,), (dy,))[0]


share_plans = Plans(lambda dy, dx, ready, strides: ready.share_plan(strides))
