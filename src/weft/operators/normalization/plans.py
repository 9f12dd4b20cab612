"""The launches of the Triton norms: tiles, grids, and the sums that programs leave for each other."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from weft.operators import partial_sums
from weft.operators.call import views
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import Plan, Plans, multiprocessors
from weft.operators.normalization.kernels import (
    gradient_columns,
    gradient_rows,
    gradient_sums,
    norm_long_rows,
    norm_rows,
)
from weft.operators.normalization.kind import Given, Kind
from weft.operators.row_programs import ONE_PASS, candidates, heuristic, row_tiles

ONE_PASS_BACKWARD = 8192  # backward holds x, dy and the weight's partial gradient


def backward_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """PROGRAMS a multiprocessor; about 8 elements a thread, since three tensors and a partial sum are held."""
    if n > ONE_PASS_BACKWARD:
        return {"STRIP": 64, "ROWS": 4, "BLOCK": 1024, "num_warps": 8}
    rows = max(1, 2048 // n)
    return {"ROWS": rows, "PROGRAMS": 2, "num_warps": min(max(rows * n // 256, 4), 16)}


def backward_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n > ONE_PASS_BACKWARD:
        return grid_of({"STRIP": (32, 64, 128), "ROWS": (1, 2, 4, 8), "BLOCK": (512, 1024, 2048), "num_warps": (4, 8)})
    return row_tiles(n, {"PROGRAMS": (1, 2, 4, 8), "num_warps": (4, 8, 16)}, per_thread=(4, 32))


# Of LayerNorm and RMSNorm apart: two sums, one after the other, want other tiles than one.
forward_configuration = Configurations(
    __file__,
    "forward",
    lambda sm, dtype, n, centered: heuristic(sm, dtype, n),
    lambda sm, dtype, n, centered: candidates(sm, dtype, n),
)
backward_configuration = Configurations(__file__, "backward", backward_heuristic, backward_candidates)


def forward_plan(*call: Any) -> Plan:
    """Of ``(*given.key(kind), eps, kind, kept)``: the launch of ``(x, residual, weight, bias, y, h, mean, rstd)``, with y and h
    = ``torch.empty_like(x)``, mean and rstd fp32 [M] (written if ``kept``), weight and bias contiguous."""
    given, eps, kind, kept = Given.of_call(call)
    x, like = given.x, torch.empty_like(given.x, device="meta")
    (m, n, *x_s), (_, _, *r_s), (_, _, *y_s) = views(x, given.residual, like)
    config = forward_configuration(x.device, x.dtype, bucket(n), kind.centered)
    scalars = (m, n, *x_s, *r_s, *y_s, *y_s, eps)
    flags = {**flags_of(kind), "BIASED": kind.biased, "ADDED": kind.added, "KEPT": kept}
    if n > ONE_PASS:
        return Plan(norm_long_rows, (m,), scalars, {"BLOCK": config["BLOCK"], **flags}, config["num_warps"])
    tile = {"ROWS": config["ROWS"], "BLOCK": bucket(n), **flags}
    return Plan(norm_rows, (triton.cdiv(m, config["ROWS"]),), scalars, tile, config["num_warps"])


def flags_of(kind: Kind) -> dict[str, bool]:
    return {"CENTERED": kind.centered, "WEIGHTED": kind.weighted}


class BackwardPlan:
    """The launches of the gradients: call with ``(x, dy, more, weight, mean, rstd, dx, dweights)``, which
    :class:`backward.BackwardPlan` explains; that is the faster one where it can be."""

    def __init__(self, x: Tensor, dy: Tensor, more: Tensor, weight: Tensor, eps: float, kind: Kind, added: bool):
        (m, n, *x_s), (_, _, *dy_s), (_, _, *more_s), (_, _, *dx_s) = views(
            x, dy, more, torch.empty_like(x, device="meta")
        )
        self.m, self.n, self.sums = m, n, kind.weighted * (2 if kind.centered else 1)
        config = backward_configuration(x.device, x.dtype, bucket(n))
        flags = flags_of(kind)
        strides = (m, n, *x_s, *dy_s, *more_s, *dx_s)
        self.statistics: Plan | None = None
        if n <= ONE_PASS_BACKWARD:
            rows = config["ROWS"]
            self.programs = min(triton.cdiv(m, rows), multiprocessors(x.device) * config["PROGRAMS"])
            tile = {"ROWS": rows, "BLOCK": bucket(n), **flags, "MORE": added}
            self.rows = Plan(gradient_rows, (self.programs,), (*strides, eps), tile, config["num_warps"])
        else:
            self.statistics = Plan(gradient_sums, (m,), (n, *x_s, *dy_s, eps), {"BLOCK": 8192, **flags}, 16)
            strip = max(config["STRIP"], bucket(-(-m // 65535)))  # the grid's second dimension ends at 65535
            self.programs = triton.cdiv(m, strip)
            tile = {"STRIP": strip, "ROWS": config["ROWS"], "BLOCK": config["BLOCK"], **flags, "MORE": added}
            grid = (triton.cdiv(n, config["BLOCK"]), self.programs)
            self.rows = Plan(gradient_columns, grid, strides, tile, config["num_warps"])
        self.total = partial_sums.plan(self.programs, n, max(self.sums, 1))

    def __call__(
        self,
        x: Tensor,
        dy: Tensor,
        more: Tensor,
        weight: Tensor,
        mean: Tensor,
        rstd: Tensor,
        dx: Tensor,
        dweights: Tensor,
    ) -> None:
        shape = (max(self.sums, 1), self.programs, self.n if self.sums else 1)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        if self.statistics is None:
            self.rows(x, dy, more, weight, mean, rstd, dx, partial[0], partial[-1])
        else:
            scale, along, level = torch.empty((3, self.m), dtype=torch.float32, device=x.device).unbind(0)
            self.statistics(x, dy, weight, mean, rstd, scale, along, level)
            self.rows(x, dy, more, weight, mean, scale, along, level, dx, partial[0], partial[-1])
        if self.sums:
            self.total(partial, dweights)


forward_plans = Plans(forward_plan)
backward_plans = Plans(BackwardPlan)
