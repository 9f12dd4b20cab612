"""How scans are launched: the tile of a program, and one launch or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import INTERPRETING, Plan, multiprocessors
from weft.operators.reduction.views import View
from weft.operators.scan import columns, gradient_columns, gradient_vectors, kernels, logarithm_vectors, vectors

ONE_TILE = 512 if INTERPRETING else 16384  # longer rows look back, or are walked
WALKED, FEW = 640 if INTERPRETING else 2 * ONE_TILE, 2**16  # so long rows of tensors of so few elements are walked
MOST_PARTS = 1024
INF = float("inf")


@dataclass(frozen=True)
class Formula:
    """What a scan computes; Triton functions of ``kernels``.

    Args:
        scan, total, join: of a tile along its axis 1: all results, the last one; of two results.
        neutral: what joins without effect.
        cuda: the type of ``scan.cu`` that computes it, ``{}`` for an element's.
        columns: the kernel of columns in CUDA C++.
        bytes_held: of a row, that a thread of ``scan.cu`` can hold.
        vectors: heuristic and candidates of its configurations.
    """

    scan: Any
    total: Any
    join: Any
    neutral: float
    cuda: str
    columns: columns.Kernel
    bytes_held: int = 128
    vectors: tuple[Any, Any] = (vectors.heuristic, vectors.candidates)

    @property
    def constants(self) -> dict[str, Any]:
        return {"SCAN": self.scan, "TOTAL": self.total, "JOIN": self.join, "NEUTRAL": self.neutral}

    @property
    def scaled(self) -> bool:
        return self.columns.scaled


SUM = Formula(
    kernels.running_sum,
    kernels.total_sum,
    kernels.plus,
    0.0,
    "Sum",
    columns.Kernel("columns.cu", "scan_columns<{}, Sum", across=(16, 16), held=(128, 128)),
)
PRODUCT = Formula(
    kernels.running_product,
    kernels.total_product,
    kernels.times,
    1.0,
    "Product",
    columns.Kernel("columns.cu", "scan_columns<{}, Product", across=(16, 16), held=(128, 128), scaled=True),
)
LOGSUMEXP = Formula(
    kernels.running_logsumexp,
    kernels.total_logsumexp,
    kernels.log_plus,
    -INF,
    "Logarithm<{}>",
    columns.Kernel("logarithm_columns.cu", "log_columns<{}", across=(16, 8), held=(128, 64)),
    bytes_held=logarithm_vectors.BYTES,
    vectors=(logarithm_vectors.heuristic, logarithm_vectors.candidates),
)

# ---- configurations --------------------------------------------------------------------------------------------------


def rows_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Whole rows in one tile: about 16 elements a thread."""
    tile = max(2048, n)
    return {"TILE": tile, "num_warps": min(max(tile // 512, 4), 16)}


def rows_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = grid_of({"TILE": (512, 1024, 2048, 4096, 8192, 16384), "num_warps": (1, 2, 4, 8, 16, 32)})
    return [c for c in every if 4 <= c["TILE"] // (32 * c["num_warps"]) <= 32 and n <= c["TILE"] <= max(n, 4096)]


def columns_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    return {"TILE": 2048, "WIDTH": 32 if dtype == torch.float32 else 64, "num_warps": 4}


def columns_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = grid_of({"TILE": (1024, 2048, 4096, 8192), "WIDTH": (16, 32, 64, 128, 256), "num_warps": (1, 2, 4, 8)})
    return [c for c in every if 8 <= c["TILE"] // (32 * c["num_warps"]) <= 32]


def long_heuristic(sm: int, dtype: torch.dtype) -> Config:
    return {"BLOCK": 8192, "GROUP": 64, "num_warps": 8}


def long_candidates(sm: int, dtype: torch.dtype) -> Any:
    every = grid_of({"BLOCK": (2048, 4096, 8192, 16384), "GROUP": (32, 64, 128), "num_warps": (4, 8, 16)})
    return [c for c in every if 8 <= c["BLOCK"] // (32 * c["num_warps"]) <= 32]


def gradient_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    return {"TILE": 1024, "WIDTH": 64, "num_warps": 4}


def gradient_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = grid_of({"TILE": (1024, 2048, 4096), "WIDTH": (16, 32, 64, 128), "num_warps": (2, 4, 8)})
    return [c for c in every if 4 <= c["TILE"] // (32 * c["num_warps"]) <= 16]


# Kernels of one name differ in registers and arithmetic by formula, so each has configurations of its own.
LONGEST = 2**16  # extents beyond are configured alike


@dataclass(frozen=True)
class Kernels:
    """The configurations of one formula's kernels."""

    rows: Configurations
    columns: Configurations
    long: Configurations
    gradient: Configurations
    vectors: Configurations
    gradient_vectors: Configurations
    gradient_columns: Configurations
    columns_vectors: Configurations

    @classmethod
    def of(cls, name: str, formula: Formula) -> Kernels:
        return cls(
            Configurations(__file__, f"{name}_rows", rows_heuristic, rows_candidates),
            Configurations(__file__, f"{name}_columns", columns_heuristic, columns_candidates),
            Configurations(__file__, f"{name}_long_rows", long_heuristic, long_candidates),
            Configurations(__file__, f"{name}_gradient", gradient_heuristic, gradient_candidates),
            Configurations(__file__, f"{name}_vectors", *formula.vectors),
            Configurations(
                __file__, f"{name}_gradient_vectors", gradient_vectors.heuristic, gradient_vectors.candidates
            ),
            Configurations(
                __file__, f"{name}_gradient_columns", gradient_columns.heuristic, gradient_columns.candidates
            ),
            Configurations(__file__, f"{name}_columns_vectors", formula.columns.heuristic, formula.columns.candidates),
        )


@dataclass(frozen=True)
class Tiling:
    """Tiles [rows, reach, cols] that walk along N, of which each program takes ``chunk``."""

    rows: int
    reach: int
    cols: int
    chunk: int
    num_warps: int

    @classmethod
    def of(cls, v: View, config: Config, device: torch.device, *, cut: bool) -> Tiling:
        """Args: cut: N may be cut into parts, so that there are programs enough."""
        most = min(config["TILE"], 256) if INTERPRETING else config["TILE"]
        cols = min(bucket(v.K), config.get("WIDTH", 1), most)
        reach = min(bucket(v.N), most // cols)
        rows = min(most // (cols * reach), bucket(v.M)) if reach >= v.N else 1
        whole = triton.cdiv(v.N, reach) * reach
        blocks = triton.cdiv(v.M, rows) * triton.cdiv(v.K, cols)
        few = cut and blocks < multiprocessors(device)
        parts = min(4 * multiprocessors(device) // blocks, whole // (4 * reach), MOST_PARTS) if few else 1
        chunk = triton.cdiv(triton.cdiv(v.N, max(parts, 1)), reach) * reach
        return cls(rows, reach, cols, chunk, config["num_warps"])

    def parts(self, v: View) -> int:
        return triton.cdiv(v.N, self.chunk)

    def grid(self, v: View) -> tuple[int]:
        return (triton.cdiv(v.M, self.rows) * triton.cdiv(v.K, self.cols) * self.parts(v),)

    @property
    def constants(self) -> dict[str, int]:
        return {"ROWS": self.rows, "REACH": self.reach, "COLS": self.cols, "CHUNK": self.chunk}


def vector(v: View, x: Tensor, reach: int, reverse: bool) -> int:
    """Elements of an access that a tile has to be turned by (``kernels.offsets``); 1 where none need be."""
    most = 2 if INTERPRETING else 16 // x.element_size()
    return min(most, reach) if reverse and v.K == 1 and v.n == 1 else 1


# ---- plans -----------------------------------------------------------------------------------------------------------


class TilesPlan:
    """A scan by tiles that walk: call with ``(x, y)``. One launch, or three where M and K alone give too few programs: the
    totals of each part of N, their scan, and the scan of the parts, which reads x a second time."""

    def __init__(
        self, v: View, y: View, config: Config, x: Tensor, formula: Formula, shift: int, reverse: bool,
        *, cut: bool = True,
    ):  # fmt: skip
        t = Tiling.of(v, config, x.device, cut=cut)
        parts = t.parts(v)
        scalars = (v.M, v.N, v.K, parts, v.m, v.n, v.k, y.m, y.n, y.k)

        def launch(*, totals: bool = False, carried: bool = False) -> Plan:
            constants = {
                **formula.constants,
                "REVERSE": reverse,
                "SHIFT": -shift if reverse else shift,
                "TOTALS": totals,
                "CARRIED": carried,
                **t.constants,
                "ONCE": t.chunk == t.reach,
                "VECTOR": vector(v, x, t.reach, reverse),
                "UNIT": v.unit(y),
                "DENSE": v.dense_axis,
                "SCALED": totals and formula.scaled,
            }
            return Plan(kernels.scan_tiles, t.grid(v), scalars, constants, t.num_warps)

        self.size, self.scaled = v.M * parts * v.K, formula.scaled
        self.scan = launch(carried=parts > 1)
        self.totals: Plan | None = None
        self.carries: TilesPlan | Plan | None = None
        if parts > 1:
            self.totals = launch(totals=True)
            if self.scaled:
                self.carries = columns.carry_products(v, parts, reverse)
            else:
                between = View(v.M, parts, v.K, parts * v.K, v.K, 1)
                self.carries = TilesPlan(between, between, config, x, formula, 1, reverse, cut=False)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        carry = x
        if self.totals is not None and self.carries is not None:
            carry, *_ = between = torch.empty((2 + self.scaled, self.size), dtype=torch.float32, device=x.device)
            self.totals(x, between[1:], y)
            self.carries(between[1:], carry)
        self.scan(x, carry, y)


class LongRowsPlan:
    """A scan of long rows in one pass, by look-back: call with ``(x, y)``."""

    def __init__(self, v: View, y: View, config: Config, x: Tensor, formula: Formula, shift: int, reverse: bool):
        block, group = (64, 4) if INTERPRETING else (config["BLOCK"], config["GROUP"])
        tiles = triton.cdiv(v.N, block)
        self.words = 1 + v.M * (tiles + triton.cdiv(tiles, group) + triton.cdiv(tiles, group**2))
        constants = {
            **formula.constants,
            "REVERSE": reverse,
            "SHIFT": -shift if reverse else shift,
            "BLOCK": block,
            "GROUP": group,
            "VECTOR": vector(v, x, block, reverse),
        }
        scalars = (v.N, tiles, v.m, v.n, y.m, y.n)
        self.launch = Plan(kernels.scan_long_rows, (v.M * tiles,), scalars, constants, config["num_warps"])

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self.launch(x, torch.zeros(self.words, dtype=torch.int64, device=x.device), y)


def scan_plan(
    v: View, y: View, x: Tensor, formula: Formula, configured: Kernels, shift: int, reverse: bool
) -> TilesPlan | LongRowsPlan:
    """Of the scan of a view into another. A long row looks back, for which words have to be cleared first: one launch more,
    which is what counts where there is little to scan."""
    walked = v.K == 1 and ONE_TILE < v.N <= WALKED and x.numel() <= FEW
    if v.K == 1 and v.N > ONE_TILE and not walked:
        return LongRowsPlan(v, y, configured.long(x.device, x.dtype), x, formula, shift, reverse)
    kind = configured.rows if v.K == 1 else configured.columns
    config = kind(x.device, x.dtype, ONE_TILE // 2 if walked else min(bucket(v.N), LONGEST))
    return TilesPlan(v, y, config, x, formula, shift, reverse, cut=not walked)


class GradientPlan:
    """The gradient of a running product or logsumexp: call with ``(x, y, dy, dx)``. One launch, or three as ``TilesPlan``."""

    def __init__(
        self, views: list[View], x: Tensor, configured: Kernels, *, log: bool, shift: int, reverse: bool
    ):  # fmt: skip
        """Args: reverse: of the scan; the recurrence runs the other way."""
        v = views[0]
        t = Tiling.of(v, configured.gradient(x.device, x.dtype, min(bucket(v.N), LONGEST)), x.device, cut=True)
        self.parts, self.lanes = t.parts(v), v.M * v.K
        scalars = (v.M, v.N, v.K, self.parts, *(s for view in views for s in (view.m, view.n, view.k)))

        def launch(*, totals: bool = False, carried: bool = False) -> Plan:
            constants = {
                "LOG": log,
                "REVERSE": not reverse,
                "SHIFT": shift,
                "TOTALS": totals,
                "CARRIED": carried,
                **t.constants,
                "VECTOR": vector(v, x, t.reach, not reverse),
            }
            return Plan(kernels.gradient_tiles, t.grid(v), scalars, constants, t.num_warps)

        self.gradient = launch(carried=self.parts > 1)
        self.totals = launch(totals=True)
        tile = {"REVERSE": not reverse, "BLOCK": bucket(self.parts)}
        self.carries = Plan(kernels.carry_parts, (self.lanes,), (v.K, self.parts), tile, 4)

    def __call__(self, x: Tensor, y: Tensor, dy: Tensor, dx: Tensor) -> None:
        carry = x
        if self.parts > 1:
            every = torch.empty((3, self.lanes * self.parts), dtype=torch.float32, device=x.device)
            totals, scales, carry = every.unbind(0)
            self.totals(x, y, dy, totals, scales, dx)
            self.carries(totals, scales, carry)
        self.gradient(x, y, dy, carry, carry, dx)
