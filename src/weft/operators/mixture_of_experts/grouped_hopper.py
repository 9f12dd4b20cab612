"""Grouped products on Hopper's main loop (``hopper/gemm.cu``): plans, and the choice of their tiles.

Shapes: R rows in E groups, N columns of y (2·N rows of each matrix where they are gate and up), K terms; of weights' gradients
P by Q. Group sizes stay on the device, so a launch has a block for each multiprocessor and no more than the most tiles there
can be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CudaPlan
from weft.operators.hopper import gemm, tile_sizes
from weft.operators.hopper.gemm import SIXTEEN_BITS, TYPES, Factors, Shape
from weft.operators.hopper.tensor_maps import FirstRows, LastRows, Maps
from weft.operators.hopper.tensor_maps import why_not as map_why_not
from weft.operators.hopper.tile_sizes import LINE, ROWS
from weft.operators.launch import Plans, multiprocessors

DEPTH = LINE // 2  # terms of a stage, of 16-bit floats

# ---- tiles -----------------------------------------------------------------------------------------------------------

FROM_L2 = 40  # bytes a cycle that a multiprocessor is assumed to get while all ask
FORMS = ((1, 0), (2, 0), (2, 1))  # blocks of a cluster; whether they lie beside one another, and share rows of A


def size(columns: int, cluster: int, abreast: int, gated: bool) -> tuple[int, int]:
    """Rows and columns of C that a cluster computes at a time."""
    width = columns // 2 if gated else columns
    return (ROWS, width * cluster) if abreast else (ROWS * cluster, width)


def wide_enough(columns: int, cluster: int, abreast: int, gated: bool) -> bool:
    """Boxes of B have 64 columns, and so have slabs of C."""
    return columns // max(1 if abreast else cluster, 2 if gated else 1) >= 64


def stage_cycles(columns: int, cluster: int, abreast: int) -> float:
    """Of the tensor cores, or of L2 where its bytes take longer."""
    fetched = (ROWS // cluster + columns if abreast else ROWS + columns // cluster) * LINE
    return max(4 * columns * tile_sizes.COLUMN_COST[columns], fetched / FROM_L2)


def heuristic(sm: int, dtype: str, layout: str, groups: int, rows: int, n: int, k: int) -> Config:
    """What ends first, by a count of cycles: of the last tile of an uneven group half is empty in the mean. ``layout`` ends in
    G for a gate; ``groups`` 0 stands for groups of terms, of which ``k`` are then in each."""
    gated = layout.endswith("G")
    ends: dict[tuple[int, int, int], float] = {}
    for columns in tile_sizes.widths(layout):
        for cluster, abreast in FORMS:
            if not wide_enough(columns, cluster, abreast, gated):
                continue
            height, width = size(columns, cluster, abreast, gated)
            tiles = groups * (rows / height + 0.5) if groups else -(-rows // height)
            waves = max(tiles * -(-n // width) / (tile_sizes.MULTIPROCESSORS // cluster), 1)
            cycles = (-(-k // DEPTH) + 1) * stage_cycles(columns, cluster, abreast)
            ends[columns, cluster, abreast] = waves * cycles
    columns, cluster, abreast = min(ends, key=ends.__getitem__)
    stages = tile_sizes.stages_that_fit(columns, 2, gated)
    return {"COLUMNS": columns, "STAGES": stages, "CLUSTER": cluster, "ABREAST": abreast, "GROUP": 16}


def candidates(sm: int, dtype: str, layout: str, groups: int, rows: int, n: int, k: int) -> Iterable[Config]:
    gated = layout.endswith("G")
    for c in grid_of({"COLUMNS": tile_sizes.widths(layout), "FORM": (0, 1, 2), "GROUP": tile_sizes.GROUPS}):
        cluster, abreast = FORMS[c.pop("FORM")]
        if wide_enough(c["COLUMNS"], cluster, abreast, gated):
            stages = tile_sizes.stages_that_fit(c["COLUMNS"], 2, gated)
            yield {**c, "STAGES": stages, "CLUSTER": cluster, "ABREAST": abreast}


configuration = Configurations(__file__, "grouped_hopper", heuristic, candidates)

# ---- what the kernels take -------------------------------------------------------------------------------------------


def why_not(x: Tensor, w: Tensor, gated: bool, bias: Tensor | None = None) -> str:
    """Why they do not take x [R, K] and w [E, N, K] (an empty string when they do); gathered rows are contiguous by then."""
    if x.dtype not in SIXTEEN_BITS:
        return f"{x.dtype}: grouped products on Hopper's main loop are of 16-bit floats"
    if not x.shape[1]:
        return "no terms: nothing to multiply"
    halves = w.chunk(2, 1) if gated else (w,)
    for half in halves:
        if reason := gemm.why_not(x, half.transpose(1, 2), x.dtype):
            return reason
    if bias is not None and not bias.is_contiguous():
        return "a bias that is not contiguous"
    return _too_many(x.shape[0] // ROWS + w.shape[0] + 1, halves[0].shape[1])


def why_not_terms(a: Tensor, b: Tensor, groups: int) -> str:
    """Why they do not take a [R, P] and b [R, Q] for c [E, P, Q]."""
    if a.dtype not in SIXTEEN_BITS or b.dtype != a.dtype:
        return f"{a.dtype} and {b.dtype}: grouped products on Hopper's main loop are of 16-bit floats"
    if not a.shape[0]:
        return "no terms: nothing to multiply"
    for name, t in (("a", a), ("b", b)):
        if reason := map_why_not(name, t, t.element_size(), False):
            return reason
        if t.shape[1] * t.element_size() % 16:
            return f"rows of {t.shape[1]} elements do not begin on 16 bytes, which TMA wants"
    return _too_many(-(-a.shape[1] // ROWS) * groups, b.shape[1])


def _too_many(rows_of_tiles: int, columns: int) -> str:
    return "2³¹ tiles or more" if rows_of_tiles * -(-columns // 64) >= 2**31 else ""


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class GroupedPlan:
    """A launch on tensors of the forms that it was made for.

    Args:
        maps: of A, B, what stands beside B (up), and C.
    """

    maps: tuple[Maps, Maps, Maps, Maps]
    shape: Shape
    launch: CudaPlan
    known: dict[tuple[int, ...], CudaPlan] = dataclasses.field(default_factory=dict)

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        up: Tensor,
        c: Tensor,
        offsets: Tensor,
        order: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        launch = self.launch
        if c.is_cuda:
            key = (a.data_ptr(), b.data_ptr(), up.data_ptr(), c.data_ptr())
            if (found := self.known.get(key)) is None:
                if len(self.known) >= 256:
                    self.known.clear()
                found = self.known[key] = dataclasses.replace(launch, scalars=self.scalars(a, b, up, c))
            launch = found
        none = c  # stands in for what the kernel was not made to read
        launch(none, none, none if bias is None else bias, none, none, none, offsets, none if order is None else order)

    def scalars(self, a: Tensor, b: Tensor, up: Tensor, c: Tensor) -> tuple[Any, ...]:
        of_a, of_b, of_up, of_c = (of(t) for of, t in zip(self.maps, (a, b, up, c), strict=True))
        return (of_a, of_b, of_up, of_c, of_c, self.shape, Factors(0, 0, 1.0, 1.0, 1.0))


def _launch(
    device: torch.device,
    dtype: torch.dtype,
    c: Config,
    across: tuple[bool, bool],
    biased: bool,
    gated: bool,
    grouped: str,
    tiles: int,
) -> CudaPlan:
    """Of at most so many tiles of a cluster."""
    cluster, of = c["CLUSTER"], TYPES[dtype]
    a_across, b_across, bias, gate, abreast = (str(bool(f)).lower() for f in (*across, biased, gated, c["ABREAST"]))
    kernel = (
        f"matmul_hopper<{of}, {of}, {c['COLUMNS']}, {c['STAGES']}, {cluster}, {a_across}, {b_across}, UNSCALED, false, {bias}, "
        f"{'SILU' if gated else 'NONE'}, false, {gate}, false, false, false, false, {of}, {grouped}, {abreast}>"
    )
    grid = min(tiles, multiprocessors(device) // cluster) * cluster
    shared = tile_sizes.shared_bytes(c, 2, gated)
    return CudaPlan(gemm.SOURCE, kernel, (grid, 1), tile_sizes.THREADS, (), cluster, shared)


def _box_of_b(c: Config, across: bool, gated: bool) -> tuple[int, int]:
    """Inner and outer, of what a block fetches at a time: blocks that lie on one another fetch parts of the same columns."""
    part = c["COLUMNS"] if c["ABREAST"] else c["COLUMNS"] // c["CLUSTER"]
    if across:
        return 64, DEPTH // 2 if part % 64 else DEPTH
    return DEPTH, min(part, c["COLUMNS"] // 2 if gated else c["COLUMNS"])


def _rows_plan(x: Tensor, w: Tensor, biased: bool, gated: bool) -> GroupedPlan:
    """Of x [R, K], w [E, N, K] (or its halves, gate and up), y [R, N], offsets and a bias."""
    if reason := why_not(x, w, gated):
        raise Declined(reason)
    (r, k), e = x.shape, w.shape[0]
    gate = w.chunk(2, 1)[0] if gated else w
    n, b = gate.shape[1], gate.transpose(1, 2)
    across = gemm.across(x, -1), gemm.across(b, -2)
    layout = ("T" if across[0] else "N") + ("N" if across[1] else "T") + ("G" if gated else "")
    rows = bucket(max(r // e, 1), 16)
    c = configuration(x.device, x.dtype, layout, e, rows, n, k)
    height, width = size(c["COLUMNS"], c["CLUSTER"], c["ABREAST"], gated)
    of_b = Maps(b, not across[1], _box_of_b(c, across[1], gated))
    y = torch.empty((r, n), dtype=x.dtype, device="meta")
    box_of_a = (64, DEPTH) if across[0] else (DEPTH, 64 if c["ABREAST"] else ROWS)
    tiles = (r // height + e + 1) * -(-n // width)
    launch = _launch(x.device, x.dtype, c, across, biased, gated, "ROWS_IN_GROUPS", tiles)
    maps = (Maps(x, across[0], box_of_a), of_b, of_b, FirstRows(y, (64, 64)))
    return GroupedPlan(maps, Shape(r, n, k, e, c["GROUP"], 0, 0, 0), launch)


def _terms_plan(a: Tensor, b: Tensor, e: int) -> GroupedPlan:
    """Of a [R, P], b [R, Q], c [E, P, Q], offsets and the order of groups: c[e] = a_eᵀ · b_e."""
    if reason := why_not_terms(a, b, e):
        raise Declined(reason)
    (r, p), q = a.shape, b.shape[1]
    c = configuration(a.device, a.dtype, "TN", 0, e * p, q, bucket(max(r // e, 1), 16))
    height, width = size(c["COLUMNS"], c["CLUSTER"], c["ABREAST"], False)
    of_b = LastRows(b, _box_of_b(c, True, False))
    out = torch.empty((e, p, q), dtype=a.dtype, device="meta")
    tiles = e * -(-p // height) * -(-q // width)
    launch = _launch(a.device, a.dtype, c, (True, True), False, False, "TERMS_IN_GROUPS", tiles)
    return GroupedPlan(
        (LastRows(a, (64, DEPTH)), of_b, of_b, Maps(out, False, (64, 64))),
        Shape(p, q, r, e, c["GROUP"], 0, 0, 0),
        launch,
    )


plans = Plans(_rows_plan)
terms_plans = Plans(_terms_plan)
