"""Which kernel computes each operator of a mixture of experts, forward and backward, with the launches on Hopper's main loop;
Triton's launches are in ``kernels.py``.

T tokens of D columns, E experts, k of them for each token, R = T·k rows.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from weft.operators.checks import check_device, check_shape, check_tensor
from weft.operators.configs import Config, Configurations, bucket
from weft.operators.cuda import CudaPlan
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.elementwise import swiglu
from weft.operators.elementwise.pointwise import KERNEL
from weft.operators.embedding import dispatch as embedding
from weft.operators.hopper import gemm, padded, tile_sizes
from weft.operators.hopper.gemm import SIXTEEN_BITS, TYPES, Factors, Shape
from weft.operators.hopper.tensor_maps import FirstRows, LastRows, Maps, map_why_not
from weft.operators.hopper.tile_sizes import LINE, ROWS
from weft.operators.launch import multiprocessors
from weft.operators.mixture_of_experts import kernels
from weft.operators.mixture_of_experts.reference import check_bias, check_choice, check_indices, check_matrix


class RouteCall(Call):
    """``(logits[, bias], k, normalise, scoring)``. A plan is called with ``(logits, bias or None, weights, experts, offsets,
    source, position)``, all results contiguous."""

    def __init__(self, logits: Tensor, *rest: Any):
        check_tensor("route_top_k", "logits", logits, sharded=False)
        check_shape("route_top_k", "logits", logits, logits.ndim == 2, "[tokens, experts]")
        *bias, self.k, self.normalise, self.scoring = rest
        self.x, self.bias, self.experts = logits, bias[0] if bias else None, logits.shape[1]
        check_choice("route_top_k", logits.shape[0], self.experts, self.k, self.normalise, self.scoring)
        check_bias("route_top_k", self.bias, "logits", logits, self.experts)

    @property
    def empty(self) -> bool:
        return self.x.shape[0] == 0


class Arguments(Call):
    """The arguments of a kernel's plan, of whose tensors the first says where the call runs."""

    def __init__(self, *arguments: Any):
        self.x, self.arguments = arguments[0], arguments


class PermuteCall(Call):
    """``(x, source[, position])``. A plan is called with ``(source, x, out)``, out contiguous."""

    def __init__(self, x: Tensor, source: Tensor, *position: Tensor):
        check_matrix("permute_tokens", "x", x, sharded=False)
        check_indices("permute_tokens", "source", source, 1, "[rows]", "x", x)
        for t in position:
            check_indices("permute_tokens", "position", t, 2, "[tokens, k]", "x", x)
            fits = t.shape[0] == x.shape[0] and t.numel() == source.shape[0]
            expected = f"{x.shape[0]} rows and {source.shape[0]} elements, as 'x' has tokens and 'source' rows"
            check_shape("permute_tokens", "position", t, fits, expected)
        self.x, self.source = x, source

    @property
    def empty(self) -> bool:
        return self.x.numel() == 0 or self.source.numel() == 0


class TokenSumsCall(Call):
    """``(dy, source, out[, position])``. A plan is called with ``(dy, source, position or None, out)``, out contiguous."""

    def __init__(self, dy: Tensor, source: Tensor, out: Tensor, *position: Tensor):
        self.x, self.source, self.out, self.position = dy, source, out, position[0] if position else None


class CombineCall(Call):
    """``(y, position, weights)``. A plan is called with ``(y, position, weights, out)``, out contiguous."""

    def __init__(self, y: Tensor, position: Tensor, weights: Tensor):
        name = "combine_tokens"
        check_matrix(name, "y", y, sharded=False)
        check_indices(name, "position", position, 2, "[tokens, k]", "y", y)
        check_tensor(name, "weights", weights, tuple(dict.fromkeys((torch.float32, y.dtype))))
        check_device(name, "weights", weights, "y", y)
        expected = f"{y.shape[0]} elements: 'y' has one row for each position"
        check_shape(name, "position", position, position.numel() == y.shape[0], expected)
        expected = f"{tuple(position.shape)}, that of 'position'"
        check_shape(name, "weights", weights, weights.shape == position.shape, expected)
        self.x, self.position, self.weights = y, position, weights

    @property
    def empty(self) -> bool:
        return self.position.shape[0] * self.x.shape[1] == 0


class ProductCall(Call):
    """``(rows, w[, bias], r, gather, gated, keep)``: r rows (gathered, or those of ``rows``) in groups, times w [E, N, K]
    (2N with a gate); ``keep``: gate and up are results too. A plan is called with ``(rows, w, offsets, source, bias, y,
    pre)``, results contiguous; any tensor is passed for one that there is not."""

    def __init__(self, rows: Tensor, w: Tensor, *rest: Any):
        *bias, self.r, self.gather, self.gated, self.keep = rest
        self.rows, self.w, self.bias = rows, w, bias[0] if bias else None
        self.x = w  # says where the call runs: rows that are not computed yet are on the meta device

    @property
    def empty(self) -> bool:
        return self.r * self.w.shape[1] == 0


class WeightGradientCall(Call):
    """``(a, b, r, e, gather_a, gather_b)``: c[e] = a_eᵀ · b_e of r rows in e groups, each matrix gathered or not. A plan is
    called with ``(a, b, offsets, order, a_source, b_source, c)``, c contiguous; any tensor is passed for a source that there
    is not; ``order``: groups by falling size."""

    def __init__(self, a: Tensor, b: Tensor, r: int, e: int, gather_a: bool, gather_b: bool):
        self.a, self.b, self.r, self.e, self.gather = a, b, r, e, (gather_a, gather_b)
        self.x = b  # says where the call runs: a may be on the meta device

    @property
    def gathered(self) -> tuple[Tensor, Tensor]:
        """a and b as the main loop reads them: gathered rows are written to contiguous memory first."""
        a, b = (
            torch.empty((self.r, t.shape[1]), dtype=t.dtype, device="meta") if gather else t
            for t, gather in zip((self.a, self.b), self.gather, strict=True)
        )
        return a, b


# ---- grouped products on Hopper's main loop (hopper/gemm.cu) ---------------------------------------------------------
#
# R rows in E groups, N columns of y (2·N rows of each matrix for gate and up), K terms; of weights' gradients P by Q. Group
# sizes stay on the device, so a launch has one block per multiprocessor, and no more than the largest possible number of tiles.

DEPTH = LINE // 2  # terms of a stage, of 16-bit floats
FROM_L2 = 40  # bytes a cycle and multiprocessor that L2 is assumed to deliver under load
FORMS = ((1, 0), (2, 0), (2, 1))  # blocks of a cluster; whether they are side by side, sharing rows of A


def size(columns: int, cluster: int, abreast: int, gated: bool) -> tuple[int, int]:
    """Rows and columns of C that a cluster computes at a time."""
    width = columns // 2 if gated else columns
    return (ROWS, width * cluster) if abreast else (ROWS * cluster, width)


def tiles(layout: str) -> Iterable[tuple[int, int, int]]:
    """Columns of a tile, and forms of a cluster. Boxes of B have 64 columns, and so have slabs of C. ``layout`` ends in G for a
    gate."""
    for columns, (cluster, abreast) in itertools.product(tile_sizes.widths(layout), FORMS):
        if columns // max(1 if abreast else cluster, 2 if layout.endswith("G") else 1) >= 64:
            yield columns, cluster, abreast


def heuristic(sm: int, dtype: str, layout: str, groups: int, rows: int, n: int, k: int) -> Config:
    """What ends first, by a count of cycles: of the last tile of an uneven group half is empty in the mean. A stage takes those
    of the tensor cores, or of L2 where its bytes take longer. ``groups`` 0 stands for groups of terms, of which ``k`` are then
    in each."""
    gated = layout.endswith("G")

    def end(tile: tuple[int, int, int]) -> float:
        columns, cluster, abreast = tile
        height, width = size(*tile, gated)
        fetched = (ROWS // cluster + columns if abreast else ROWS + columns // cluster) * LINE
        stage = max(4 * columns * tile_sizes.COLUMN_COST[columns], fetched / FROM_L2)
        count = groups * (rows / height + 0.5) if groups else -(-rows // height)
        waves = max(count * -(-n // width) / (tile_sizes.MULTIPROCESSORS // cluster), 1)
        return waves * (-(-k // DEPTH) + 1) * stage

    columns, cluster, abreast = min(tiles(layout), key=end)
    stages = tile_sizes.stages_that_fit(columns, 2, gated)
    return {"COLUMNS": columns, "STAGES": stages, "CLUSTER": cluster, "ABREAST": abreast, "GROUP": 16}


def candidates(sm: int, dtype: str, layout: str, groups: int, rows: int, n: int, k: int) -> Iterable[Config]:
    for (columns, cluster, abreast), group in itertools.product(tiles(layout), tile_sizes.GROUPS):
        stages = tile_sizes.stages_that_fit(columns, 2, layout.endswith("G"))
        yield {"COLUMNS": columns, "GROUP": group, "STAGES": stages, "CLUSTER": cluster, "ABREAST": abreast}


configuration = Configurations(__file__, "grouped_hopper", heuristic, candidates)


def rows_unsupported(x: Tensor, w: Tensor, gated: bool, bias: Tensor | None = None) -> str:
    """Why the main loop does not take x [R, K] and w [E, N, K] ("" when it does)."""
    if x.dtype not in SIXTEEN_BITS:
        return f"{x.dtype}: grouped products on Hopper's main loop are of 16-bit floats"
    if not x.shape[1]:
        return "no terms: nothing to multiply"
    halves = w.chunk(2, 1) if gated else (w,)
    for half in halves:
        if reason := gemm.why_not(x, half.transpose(1, 2), x.dtype, loose=True):
            return reason
    if bias is not None and not bias.is_contiguous():
        return "a bias that is not contiguous"
    return _too_many(x.shape[0] // ROWS + w.shape[0] + 1, halves[0].shape[1])


def terms_unsupported(a: Tensor, b: Tensor, groups: int) -> str:
    """Why the main loop does not take a [R, P] and b [R, Q] for c [E, P, Q]."""
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


@dataclasses.dataclass
class GroupedPlan:
    """A launch on tensors of the forms that it was made for."""

    maps: tuple[Maps, ...]  # of A, B, what stands beside B (up), and of C where TMA stores it
    shape: Shape
    launch: CudaPlan

    def __call__(
        self, a: Tensor, b: Tensor, up: Tensor, c: Tensor, *groups: Tensor, bias: Tensor | None = None
    ) -> None:
        """``groups``: the offsets, and of groups of terms their order."""
        launch = self.launch.at(self.scalars, a, b, up, c) if c.is_cuda else self.launch
        offsets, order = (*groups, c)[:2]  # c: for tensors that this kernel does not read
        launch(c, c, c if bias is None else bias, c, c, c, offsets, order)

    def scalars(self, a: Tensor, b: Tensor, up: Tensor, c: Tensor) -> tuple[Any, ...]:
        of_a, of_b, of_up, of_c = (
            of(t) for of, t in zip((*self.maps, self.maps[0])[:4], (a, b, up, c if self.maps[3:] else a), strict=True)
        )
        return (of_a, of_b, of_up, of_c, of_c, self.shape, Factors(0, 0, 1.0, 1.0, 1.0))


def _launch(
    device: torch.device, dtype: torch.dtype, c: Config, across: tuple[bool, bool], biased: bool, gated: bool, grouped: str,
    tiles: int, *, loose: bool = False,
) -> CudaPlan:  # fmt: skip
    """Of at most so many tiles of a cluster."""
    cluster, of = c["CLUSTER"], TYPES[dtype]
    flags = (*across, biased, gated, c["ABREAST"], loose)
    a_across, b_across, bias, gate, abreast, anywhere = (str(bool(f)).lower() for f in flags)
    kernel = (
        f"matmul_hopper<{of}, {of}, {c['COLUMNS']}, {c['STAGES']}, {cluster}, {a_across}, {b_across}, UNSCALED, false, {bias}, "
        f"{'SILU' if gated else 'NONE'}, false, {gate}, false, false, false, false, {of}, {grouped}, {abreast}, {anywhere}>"
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


def hopper_rows(x: Tensor, w: Tensor, biased: bool, gated: bool, device: torch.device | None = None) -> GroupedPlan:
    """Of x [R, K], w [E, N, K] (or its halves, gate and up), y [R, N], offsets and a bias."""
    (r, k), e, device = x.shape, w.shape[0], device or x.device
    gate = w.chunk(2, 1)[0] if gated else w
    n, b = gate.shape[1], gate.transpose(1, 2)
    across = gemm.across(x, -1), gemm.across(b, -2)
    layout = ("T" if across[0] else "N") + ("N" if across[1] else "T") + ("G" if gated else "")
    rows = bucket(max(r // e, 1), 16)
    c = configuration(device, x.dtype, layout, e, rows, n, k)
    height, width = size(c["COLUMNS"], c["CLUSTER"], c["ABREAST"], gated)
    of_b = Maps(b, not across[1], _box_of_b(c, across[1], gated))
    y = torch.empty((r, n), dtype=x.dtype, device="meta")
    box_of_a = (64, DEPTH) if across[0] else (DEPTH, 64 if c["ABREAST"] else ROWS)
    most = (r // height + e + 1) * -(-n // width)
    launch = _launch(device, x.dtype, c, across, biased, gated, "ROWS_IN_GROUPS", most, loose=n % 8 > 0)
    maps = (Maps(x, across[0], box_of_a), of_b, of_b, *([] if n % 8 else [FirstRows(y, (64, 64))]))
    return GroupedPlan(maps, Shape(r, n, k, e, c["GROUP"], 0, 0, 0), launch)


def hopper_terms(a: Tensor, b: Tensor, e: int, device: torch.device) -> GroupedPlan:
    """Of a [R, P], b [R, Q], c [E, P, Q], offsets and the order of groups: c[e] = a_eᵀ · b_e."""
    (r, p), q = a.shape, b.shape[1]
    c = configuration(device, a.dtype, "TN", 0, e * p, q, bucket(max(r // e, 1), 16))
    height, width = size(c["COLUMNS"], c["CLUSTER"], c["ABREAST"], False)
    of_b = LastRows(b, _box_of_b(c, True, False))
    out = torch.empty((e, p, q), dtype=a.dtype, device="meta")
    most = e * -(-p // height) * -(-q // width)
    launch = _launch(device, a.dtype, c, (True, True), False, False, "TERMS_IN_GROUPS", most)
    maps = (LastRows(a, (64, DEPTH)), of_b, of_b, Maps(out, False, (64, 64)))
    return GroupedPlan(maps, Shape(p, q, r, e, c["GROUP"], 0, 0, 0), launch)


def _elsewhere(c: Call) -> str:
    if c.traced:
        return "traced: a compiler sees Triton's kernel"
    return "" if c.sm == 90 else f"wgmma and TMA as the kernel uses them are of sm_90, this is sm_{c.sm}"


GATHERED = "rows to gather, which TMA on Hopper cannot: Triton's kernel gathers them as it reads"


def product_unsupported(c: ProductCall) -> str:
    """Why Hopper's main loop cannot take a product."""
    if c.gather and not _elsewhere(c):
        return GATHERED
    return _elsewhere(c) or rows_unsupported(c.rows, c.w, c.gated, c.bias)


def weight_gradient_unsupported(c: WeightGradientCall) -> str:
    """Why Hopper's main loop cannot take a weight's gradient."""
    return _elsewhere(c) or terms_unsupported(*c.gathered, c.e)


def hopper_product(c: ProductCall, device: torch.device | None = None) -> Callable[..., None]:
    """With gate and up as results, they are the product and SwiGLU is a launch of its own."""
    biased, keep, gated = c.bias is not None, c.keep, c.gated and not c.keep
    plan = hopper_rows(c.rows, c.w, biased, gated, device)

    def run(x: Tensor, w: Tensor, offsets: Tensor, source: Tensor, bias: Tensor, y: Tensor, pre: Tensor) -> None:
        gate, up = w.chunk(2, 1) if gated else (w, w)
        plan(x, gate, up, pre if keep else y, offsets, bias=bias if biased else None)
        if keep:
            halves = pre.chunk(2, -1)
            KERNEL.of(halves, swiglu.call.formula)(*halves, y)

    return run


def copies_unsupported(c: ProductCall) -> str:
    return _elsewhere(c) or (GATHERED if c.gather else rows_unsupported(*fitting(c, "meta"), c.gated, c.bias))


def fitting(c: ProductCall, device: str | None = None) -> tuple[Tensor, Tensor]:
    """x and w, or copies of them, with rows that begin on 16 bytes; on another ``device`` empty ones."""
    return padded.fitting(c.rows, device), padded.fitting(c.w, device)


def copies_pay(c: ProductCall) -> bool:
    """Without, Triton's kernel loses as much as cuBLAS: 1,549 µs on an H200 for 25967 x 1087 x 535, 177 of copies."""
    copies = padded.copying([t.numel() for t in (c.rows, c.w) if not padded.fits(t)])
    return c.r * c.w.shape[1] * c.w.shape[2] / padded.PRODUCTS > copies


def hopper_product_of_copies(c: ProductCall) -> Callable[..., None]:
    made = copy.copy(c)
    made.rows, made.w = fitting(c, "meta")
    plan = hopper_product(made, c.w.device)

    def run(x: Tensor, w: Tensor, *others: Tensor) -> None:
        plan(padded.fitting(x), padded.fitting(w), *others)

    return run


def hopper_weight_gradient(c: WeightGradientCall) -> Callable[..., None]:
    """Gathered rows are written out first."""
    gather_a, gather_b = c.gather
    plan = hopper_terms(*c.gathered, c.e, c.x.device)

    def run(a: Tensor, b: Tensor, offsets: Tensor, order: Tensor, a_at: Tensor, b_at: Tensor, c: Tensor) -> None:
        a, b = gathered(a, a_at) if gather_a else a, gathered(b, b_at) if gather_b else b
        plan(a, b, b, c, offsets, order)

    return run


def gathered(x: Tensor, source: Tensor) -> Tensor:
    """[R, D], contiguous: rows of x; NaN for a source out of range."""
    out = x.new_empty((source.shape[0], x.shape[1]))
    if out.numel():
        PERMUTE.kernel("triton").of((x, source))(source, x, out)
    return out


def token_sums(dy: Tensor, source: Tensor, position: Tensor | None, t: int) -> Tensor:
    """[T, D]: the sum of each token's rows of dy, in fp32 and in a fixed order."""
    out = dy.new_empty((t, dy.shape[1]))
    if not dy.numel() or not out.numel():
        return out.zero_()
    tensors = (dy, source, out) if position is None else (dy, source, out, position)
    PERMUTE_GRADIENT.of(tensors)(dy, source, position, out)
    return out


def sums_by_position(c: TokenSumsCall) -> Any:
    assert c.position is not None  # this route's condition
    plan = kernels.combine_plan(c.x, c.position)
    return lambda dy, source, position, out: plan(dy, position, dy, out)


def sums_by_sorting(c: TokenSumsCall) -> Any:
    plan = embedding.BACKWARD.of((c.source, c.x, c.out), -1)
    return lambda dy, source, position, out: plan(source, dy, out)


ROUTE = Dispatch(
    RouteCall, ON_CPU, TRACED, EMPTY,
    Route("torch", lambda c: c.experts > kernels.MOST_EXPERTS, "so many experts do not fit a tile: PyTorch's sort"),
    Route("triton", lambda c: True, "top-k in registers and a counting sort, in three launches",
          lambda c: kernels.RoutePlan(c.x, c.bias, c.k, c.normalise, c.scoring)),
)  # fmt: skip
ROUTE_GRADIENT = Dispatch(
    Arguments,
    Route("triton", lambda c: True, "scores are computed again from the logits: one pass",
          lambda c: kernels.top_k_gradient_plan(*c.arguments)),
)  # fmt: skip

PERMUTE = Dispatch(
    PermuteCall, ON_CPU, TRACED, EMPTY,
    Route("triton", lambda c: True, "rows are copied from their addresses in x",
          lambda c: embedding.FORWARD.kernel("triton").of((c.source, c.x), None)),
)  # fmt: skip
PERMUTE_GRADIENT = Dispatch(
    TokenSumsCall,
    Route("triton", lambda c: c.position is not None, "each token's rows are added, found by position", sums_by_position),
    Route("triton", lambda c: True, "without position rows are sorted by their token first", sums_by_sorting),
)  # fmt: skip

COMBINE = Dispatch(
    CombineCall, ON_CPU, TRACED, EMPTY,
    Route("triton", lambda c: True, "rows are gathered, weighted and added in one pass",
          lambda c: kernels.combine_plan(c.x, c.position, c.weights)),
)  # fmt: skip
COMBINE_GRADIENT = Dispatch(
    Arguments,
    Route("triton", lambda c: True, "both gradients in one pass over y and dout",
          lambda c: kernels.combine_gradient_plan(*c.arguments)),
)  # fmt: skip

GROUPED = Dispatch(  # grouped_matmul, the gradient of its rows, and both products of moe_feed_forward
    ProductCall, ON_CPU, EMPTY,
    Route("cuda", lambda c: True, "one launch over all groups by TMA and wgmma; group sizes stay on the device",
          hopper_product, product_unsupported, sm=90),
    Route("cuda", copies_pay, "the same of copies, as matmul's",
          hopper_product_of_copies, copies_unsupported, sm=90),
    Route("triton", lambda c: True, "one launch over all groups, whose sizes stay on the device",
          lambda c: kernels.product_plan(c.rows, c.w, c.bias, c.r, c.gather, c.gated, c.keep)),
)  # fmt: skip
GROUPED_WEIGHT_GRADIENT = Dispatch(
    WeightGradientCall, ON_CPU,
    Route("cuda", lambda c: True, "one launch over all groups by TMA and wgmma; gathered rows are written out first",
          hopper_weight_gradient, weight_gradient_unsupported, sm=90),
    Route("triton", lambda c: True, "one launch over all groups, large groups first",
          lambda c: kernels.outer_plan(c.a, c.b, c.r, c.e, *c.gather)),
)  # fmt: skip
