"""The products of the family on Hopper's main loop (``hopper/gemm.cu``), in bf16 and fp16: a batch is one launch.

Symmetric ones compute the tiles that touch the lower triangle and store each slab with its mirror image. The second operand of
a product of symmetric matrices is read transposed, which is the same matrix: then K is contiguous in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, grid_of
from weft.operators.hopper import gemm, tile_sizes
from weft.operators.hopper.gemm import SIXTEEN_BITS, HopperPlan
from weft.operators.hopper.tile_sizes import COLUMN_COST, LINE, MULTIPROCESSORS, ROWS, SHARED
from weft.operators.launch import Plans, target_sm

# ---- configurations --------------------------------------------------------------------------------------------------

FROM_L2 = 48  # bytes a cycle that a block is assumed to get before tensor cores wait, until `weft tune` has measured


def _stages(columns: int) -> int:
    """As many as fit."""
    rest = tile_sizes.shared_bytes({"COLUMNS": columns, "STAGES": 0}, 2, symmetric=True)
    return min(8, (SHARED - rest) // ((ROWS + columns) * LINE))


def ends(columns: int, cluster: int, stream: int, m: int, k: int, matrices: int) -> float:
    """When the last tile ends, in cycles of the tensor cores: a stage is 4 a column or what is fetched for it, a tile's way out
    two stages. Tiles are taken one after another, or streamed: then all end together, but sums are handed over."""
    fetched = (ROWS + columns / cluster) * LINE / FROM_L2
    stage, stages = max(4 * columns * COLUMN_COST[columns], fetched), -(-k * 2 // LINE)
    tiles, clusters = tile_sizes.triangle(m, columns, cluster) * matrices, MULTIPROCESSORS // cluster
    if not stream:
        return -(-tiles // clusters) * (stages + 2) * stage
    if not (count := tile_sizes.streamed(tiles, stages, clusters)):
        return math.inf
    clusters = min(clusters, count * stages // tile_sizes.LEAST_SHARE)
    handed = (1 + -(-clusters // count)) * (ROWS * columns * 4 / tile_sizes.HANDED_OVER + tile_sizes.MEETING)
    return tile_sizes.GAIN * (tiles * (stages + 2) / clusters * stage + handed)


def shapes() -> Iterable[tuple[int, int]]:
    """Columns of a tile and blocks of a cluster: boxes of B have 64 columns."""
    return ((columns, cluster) for columns in COLUMN_COST for cluster in (2, 1) if columns >= 64 * cluster)


def heuristic(sm: int, dtype: str, layout: str, matrices: int, m: int, k: int) -> Config:
    """What ends first (README.md counts it for a few sizes); of equals, clusters of two."""
    columns, cluster, stream = min(
        ((*shape, stream) for shape in shapes() for stream in (0, 1)),
        key=lambda c: ends(c[0], c[1], c[2], m, k, matrices),
    )
    return {
        "COLUMNS": columns, "STAGES": _stages(columns), "CLUSTER": cluster, "GROUP": 16 // cluster, "STREAM": stream
    }  # fmt: skip


def candidates(sm: int, dtype: str, layout: str, matrices: int, m: int, k: int) -> Iterable[Config]:
    for columns, cluster in shapes():
        for c in grid_of({"GROUP": tile_sizes.GROUPS, "STREAM": (0, 1)}):
            if ends(columns, cluster, c["STREAM"], m, k, matrices) < math.inf:
                yield {"COLUMNS": columns, "STAGES": _stages(columns), "CLUSTER": cluster, **c}


configuration = Configurations(__file__, "hopper_symmetric", heuristic, candidates)

# ---- launches --------------------------------------------------------------------------------------------------------


def _layout(a: Tensor, b: Tensor) -> str:
    return ("T" if gemm.across(a, -1) else "N") + ("N" if gemm.across(b, -2) else "T")


def symmetric_plan(a: Tensor, b: Tensor, of_a: bool, of_b: bool) -> HopperPlan:
    """C = beta·A·B + of_a·A + of_b·B, symmetric, for a [B, M, K] and b [B, K, M], into a contiguous c [B, M, M].

    Raises:
        Declined: when TMA cannot take the operands.
    """
    if reason := gemm.why_not(a, b, a.dtype):
        raise Declined(reason)
    matrices, m, k = a.shape
    config = configuration(a.device, a.dtype, _layout(a, b), matrices, m, k)
    added = [t for t, is_added in ((a, of_a), (b.mT, of_b)) if is_added]
    return HopperPlan(
        a, b, symmetric=config, residual=added[0] if added else None, second=added[1] if len(added) > 1 else None
    )


def product_plan(a: Tensor, b: Tensor, residual: Tensor, dtype: torch.dtype) -> HopperPlan:
    """C = A·B + of_r·R for a [B, M, K], b [B, K, N] and r [B, M, N], into a contiguous c of ``dtype``."""
    return HopperPlan(a, b, dtype, residual=residual)


symmetric_plans = Plans(symmetric_plan)
product_plans = Plans(product_plan)


def launch_symmetric(a: Tensor, b: Tensor, c: Tensor, beta: float, of_a: float = 0.0, of_b: float = 0.0) -> None:
    """Writes beta·A·B + of_a·A + of_b·B into a contiguous c [B, M, M]; with of_a or of_b, A and B are symmetric."""
    if not c.numel():
        return
    adds = bool(of_a), bool(of_b)
    if not any(adds) and beta == 1.0:
        symmetric_plans.of((a, b), *adds)(a, b, c)
        return
    if not any(adds):
        adds = True, False  # the factor comes with a residual
    plan = symmetric_plans.of((a, b.mT), *adds)
    (first, by), *second = [(t, f) for t, f, is_added in ((a, of_a, adds[0]), (b, of_b, adds[1])) if is_added]
    if second:
        plan(a, b.mT, c, residual=first, second=second[0][0], alpha=beta, beta=by, gamma=second[0][1])
    else:
        plan(a, b.mT, c, residual=first, alpha=beta, beta=by)


def launch_product(a: Tensor, b: Tensor, c: Tensor, beta: float, of_b: float) -> None:
    """Writes beta·A·B + of_b·B into c [B, M, N], for symmetric A; of tall matrices, whose columns are contiguous, as
    Cᵀ = Bᵀ·A."""
    if not c.numel():
        return
    lying = c.stride(-1) == 1 or c.shape[-1] == 1
    left, right, residual, out = (a, b, b, c) if lying else (b.mT, a.mT, b.mT, c.mT)
    product_plans.of((left, right, residual), c.dtype)(left, right, out, residual=residual, alpha=beta, beta=of_b)


# ---- which operands --------------------------------------------------------------------------------------------------


def available(t: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernels are there for its device and dtype (or another): Hopper, a 16-bit float."""
    return (dtype or t.dtype) in SIXTEEN_BITS and target_sm(t.device) == 90


def why_not_gram(x: Tensor) -> str:
    """Why X·Xᵀ of x [B, M, N] is not for the kernels (an empty string when it is)."""
    if x.shape[-2] % 8:
        return f"rows of {x.shape[-2]} elements in the result do not begin on 16 bytes, which TMA wants"
    return gemm.why_not(x, x.mT, x.dtype)


def why_not_polynomial(a: Tensor, alpha: float) -> str:
    """Why alpha·A + beta·A·A of a [B, M, M] is not for the kernels (an empty string when it is)."""
    if not alpha:
        return "alpha is 0, but the kernel's factors come with a residual"
    return gemm.why_not(a, a.mT, a.dtype) or gemm.map_why_not("a", a, a.element_size(), False)


def why_not_iteration(rows: int, columns: int) -> str:
    """Why an iteration on [rows, columns], whose operands are its own, is not for the kernels."""
    if rows % 8 or columns % 8:
        return f"rows of {rows} and {columns} 16-bit floats do not all begin on 16 bytes, which TMA wants"
    return ""
