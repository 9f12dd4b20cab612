"""Which kernels compute symmetric products and the iteration: the family's tables, and the launches that they choose.

On Hopper, the main loop of ``hopper/gemm.cu`` computes bf16 and fp16: the tiles that touch the lower triangle, and stores each
slab with its mirror image. The second operand of a product of symmetric matrices is read transposed, which is the same
matrix: then K is contiguous in both.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from weft.operators.call import FLOATS
from weft.operators.checks import check_shape, check_tensor, either
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import shared_limit
from weft.operators.dispatch import EMPTY, ON_CPU, Call, Dispatch, Route
from weft.operators.hopper import gemm, padded, tile_sizes
from weft.operators.hopper.gemm import SIXTEEN_BITS, HopperPlan
from weft.operators.hopper.tile_sizes import COLUMN_COST, LINE, MULTIPROCESSORS, ROWS
from weft.operators.launch import INTERPRETING, Plan, Plans, multiprocessors
from weft.operators.matmul.dispatch import default_precision
from weft.operators.matmul.kernels import layout_of
from weft.operators.orthogonalization import iteration
from weft.operators.orthogonalization.coefficients import Coefficients, known, margin, schedule
from weft.operators.orthogonalization.iteration import flops
from weft.operators.orthogonalization.kernels import mirror, product, quotients, square_sums, symmetric_product, tiles

# ---- Triton: configurations ------------------------------------------------------------------------------------------

UNALIGNED = "-unaligned"


def symmetric_heuristic(sm: int, dtype: torch.dtype, layout: str, precision: str, b: int, m: int, k: int) -> Config:
    """Tiles of 128 where there are enough of them to fill the machine, else of 64."""
    large = b * m * m >= 1024 * 1024 and _tensor_cores(dtype, layout, precision)
    return {"BLOCK": 32 if INTERPRETING else 128 if large else 64, **_depth(sm, dtype, layout)}


def tile_heuristic(sm: int, dtype: torch.dtype, layout: str, precision: str, b: int, m: int, n: int, k: int) -> Config:
    """A wide tile for Hopper's tensor cores; elsewhere 128 × 128 where there are enough of them, else 64 × 64."""
    large = b * m * n >= 1024 * 1024 and _tensor_cores(dtype, layout, precision)
    wide = sm == 90 and large and dtype != torch.float32
    sides = (32, 64) if INTERPRETING else (128, 256) if wide else (128, 128) if large else (64, 64)
    return {"BLOCK_M": sides[0], "BLOCK_N": sides[1], **_depth(sm, dtype, layout)}


def _tensor_cores(dtype: torch.dtype, layout: str, precision: str) -> bool:
    """Whether tensor cores are what limits: not in full fp32, nor where elements are loaded one by one, whose pointers fill
    the registers that a large tile's sums would need."""
    return (dtype, precision) != (torch.float32, "ieee") and not layout.endswith(UNALIGNED)


def _depth(sm: int, dtype: torch.dtype, layout: str) -> Config:
    """Stages of 128 bytes along K; of 64 bytes where a block has 99 KiB of shared memory."""
    bytes_along_k = 64 if sm in (86, 89, 120) or layout.endswith(UNALIGNED) else 128
    return {"BLOCK_K": bytes_along_k // dtype.itemsize, "GROUP": 8, "num_warps": 8, "num_stages": 3}


def _candidates(sides: tuple[str, ...], sm: int, dtype: torch.dtype, *rest: Any) -> Iterable[Config]:
    limit = shared_limit(sm)
    depths = tuple(bytes_ // dtype.itemsize for bytes_ in (64, 128, 256))
    tile = {**dict.fromkeys(sides, (64, 128, 256)), "BLOCK_K": depths}
    for c in grid_of({**tile, "GROUP": (4, 8), "num_warps": (4, 8), "num_stages": (2, 3, 4)}):
        m, n = c[sides[0]], c[sides[-1]]
        sums_a_thread = m * n // (c["num_warps"] * 32)
        if 32 <= sums_a_thread <= 128 and (m + n) * c["BLOCK_K"] * dtype.itemsize * c["num_stages"] <= limit:
            yield c


one_side, two_sides = partial(_candidates, ("BLOCK",)), partial(_candidates, ("BLOCK_M", "BLOCK_N"))
symmetric_configuration = Configurations(__file__, "symmetric_product", symmetric_heuristic, one_side)
product_configuration = Configurations(__file__, "product", tile_heuristic, two_sides)


def _layout(*tensors: Tensor) -> str:
    """NN, NT, TN or TT of the operands, and whether their elements can be loaded 16 bytes at a time: sizes and strides are
    multiples of 16, as Triton requires."""
    aligned = all(
        value == 1 or value % 16 == 0 for t in tensors for value in (*t.shape[1:], *t.stride()[t.shape[0] == 1 :])
    )
    return layout_of(tensors[0][0], tensors[1][0]) + ("" if aligned else UNALIGNED)


@Plans
def symmetric_plans(a: Tensor, b: Tensor, precision: str, beta: float, of_a: float, of_b: float) -> Plan:
    """C = beta·A·B + of_a·A + of_b·B, symmetric, for a [B, M, K] and b [B, K, M] of any strides, into a contiguous c [B, M, M].
    Call it with (a, b, c), where any tensor of the same memory will do for a and b: strides are in the plan."""
    batch, m, k = a.shape
    key = (a.dtype, _layout(a, b), precision, bucket(batch), bucket(m), bucket(k))
    config = symmetric_configuration(a.device, *key)
    tile = {name: config[name] for name in ("BLOCK", "BLOCK_K", "GROUP")}
    grid, scalars = (batch * tiles(triton.cdiv(m, tile["BLOCK"])),), (m, k, *a.stride(), *b.stride(), beta, of_a, of_b)
    flags = {"EVEN_K": k % tile["BLOCK_K"] == 0, "PRECISION": precision, "ADDS_A": of_a != 0, "ADDS_B": of_b != 0}
    return Plan(symmetric_product, grid, scalars, {**tile, **flags}, config["num_warps"], config["num_stages"])


@Plans
def product_plans(a: Tensor, b: Tensor, c: Tensor, precision: str, beta: float, of_b: float) -> Plan:
    """C = beta·A·B + of_b·B for a [B, M, M], b and c [B, M, N], all of any strides. Call it with (a, b, c)."""
    batch, m, n = b.shape
    key = (a.dtype, _layout(a, b, c), precision, bucket(batch), bucket(m), bucket(n), bucket(m))
    config = product_configuration(a.device, *key)
    tile = {name: config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP")}
    grid = (batch * triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)
    scalars = (m, n, m, *a.stride(), *b.stride(), *c.stride(), beta, of_b)
    flags = {"EVEN_K": m % tile["BLOCK_K"] == 0, "PRECISION": precision}
    return Plan(product, grid, scalars, {**tile, **flags}, config["num_warps"], config["num_stages"])


def symmetric_by_triton(a: Tensor, b: Tensor, c: Tensor, beta: float, of_a: float = 0.0, of_b: float = 0.0) -> None:
    if c.numel():
        symmetric_plans.of((a, b), default_precision(), beta, of_a, of_b)(a, b, c)


def product_by_triton(a: Tensor, b: Tensor, c: Tensor, beta: float, of_b: float) -> None:
    if c.numel():
        product_plans.of((a, b, c), default_precision(), beta, of_b)(a, b, c)


# ---- fp32: cuBLAS ------------------------------------------------------------------------------------------------------

STRIP = 1536  # rows from which a strip's product fills the GPU
MOST_STRIPS = 4
MIRROR = 32 if INTERPRETING else 64  # rows and columns of a tile


@Plans
def mirror_plans(c: Tensor) -> Plan:
    batch, m, _ = c.shape
    return Plan(mirror, (batch * tiles(triton.cdiv(m, MIRROR)),), (m,), {"BLOCK": MIRROR})


def symmetric_in_strips(a: Tensor, b: Tensor, c: Tensor, beta: float, of_a: float = 0.0, of_b: float = 0.0) -> None:
    """beta·A·B + of_a·A + of_b·B by cuBLAS's products of strips of rows, up to the diagonal; what is above it is mirrored."""
    if not c.numel():
        return
    m = c.shape[-1]
    c = c.view(-1, m, m)
    a, b = (t if 1 in t.stride()[1:] else t.contiguous() for t in (a, b))
    strips = max(1, min(MOST_STRIPS, int(len(c) ** 0.5 * m) // STRIP))
    height = -(-m // strips)
    for first in range(0, m, height):
        rows, columns = slice(first, first + height), slice(first + height)
        _plus_product(
            a[:, rows, columns] if of_a else None, a[:, rows], b[..., columns], c[:, rows, columns], beta, of_a
        )
        if of_b:
            c[:, rows, columns].add_(b[:, rows, columns], alpha=of_b)
    mirror_plans.of((c,))(c)


def product_by_cublas(a: Tensor, b: Tensor, c: Tensor, beta: float, of_b: float) -> None:
    if c.numel():
        _plus_product(b, a, b, c, beta, of_b)


def _plus_product(added: Tensor | None, a: Tensor, b: Tensor, c: Tensor, beta: float, factor: float) -> None:
    """Writes beta·A·B, plus factor times a matrix, into c. Of a factor of 0 the matrix is not read."""
    operands = c if added is None else added, a, b
    if len(c) == 1:
        torch.addmm(*(t[0] for t in operands), beta=factor, alpha=beta, out=c[0])
    else:
        torch.baddbmm(*operands, beta=factor, alpha=beta, out=c)


# ---- Hopper: configurations ------------------------------------------------------------------------------------------

FROM_L2 = 48  # bytes a cycle that a block is assumed to get before tensor cores wait, until `weft tune` has measured


_stages = partial(tile_sizes.stages_that_fit, itemsize=2, symmetric=True)


def end_time(columns: int, cluster: int, stream: int, m: int, k: int, matrices: int) -> float:
    """When the last tile ends, in cycles of the tensor cores: a stage takes 4 a column or as long as its loads, an epilogue two
    stages. Tiles run one after another, or streamed: then all end together, but sums are handed over."""
    fetched = (ROWS + columns / cluster) * LINE / FROM_L2
    stage, stages = max(4 * columns * COLUMN_COST[columns], fetched), -(-k * 2 // LINE)
    count, clusters = tile_sizes.triangle(m, columns, cluster) * matrices, MULTIPROCESSORS // cluster
    if not stream:
        return -(-count // clusters) * (stages + 2) * stage
    if not (parts := tile_sizes.streamed(count, stages, clusters)):
        return math.inf
    clusters = min(clusters, parts * stages // tile_sizes.LEAST_SHARE)
    handed = (1 + -(-clusters // parts)) * (ROWS * columns * 4 / tile_sizes.HANDED_OVER + tile_sizes.MEETING)
    return tile_sizes.GAIN * (count * (stages + 2) / clusters * stage + handed)


def tile_shapes() -> Iterable[tuple[int, int]]:
    """Columns of a tile and blocks of a cluster: boxes of B have 64 columns."""
    whole = [columns for columns in COLUMN_COST if columns % 64 == 0]  # a mirrored slab has rows of 128 bytes
    return ((columns, cluster) for columns in whole for cluster in (2, 1) if columns >= 64 * cluster)


def hopper_heuristic(sm: int, dtype: str, layout: str, matrices: int, m: int, k: int) -> Config:
    """What ends first (docs/notes/orthogonalization.md counts it for a few sizes); of equals, clusters of two."""
    every = ((*shape, stream) for shape in tile_shapes() for stream in (0, 1))
    columns, cluster, stream = min(every, key=lambda c: end_time(c[0], c[1], c[2], m, k, matrices))
    tile = {"COLUMNS": columns, "STAGES": _stages(columns), "CLUSTER": cluster}
    return {**tile, "GROUP": 16 // cluster, "STREAM": stream}


def hopper_candidates(sm: int, dtype: str, layout: str, matrices: int, m: int, k: int) -> Iterable[Config]:
    for columns, cluster in tile_shapes():
        for c in grid_of({"GROUP": tile_sizes.GROUPS, "STREAM": (0, 1)}):
            if end_time(columns, cluster, c["STREAM"], m, k, matrices) < math.inf:
                yield {"COLUMNS": columns, "STAGES": _stages(columns), "CLUSTER": cluster, **c}


hopper_configuration = Configurations(__file__, "hopper_symmetric", hopper_heuristic, hopper_candidates)


@Plans
def hopper_symmetric_plans(a: Tensor, b: Tensor, of_a: bool, of_b: bool) -> HopperPlan:
    """C = beta·A·B + of_a·A + of_b·B, symmetric, for a [B, M, K] and b [B, K, M], into a contiguous c [B, M, M]."""
    matrices, m, k = a.shape
    layout = ("T" if gemm.across(a, -1) else "N") + ("N" if gemm.across(b, -2) else "T")
    config = hopper_configuration(a.device, a.dtype, layout, matrices, m, k)
    added = [t for t, is_added in ((a, of_a), (b.mT, of_b)) if is_added]
    residual, second = (*added, None, None)[:2]
    return HopperPlan(a, b, symmetric=config, residual=residual, second=second)


hopper_product_plans = Plans(lambda a, b, residual, dtype: HopperPlan(a, b, dtype, residual=residual))


def symmetric_on_hopper(a: Tensor, b: Tensor, c: Tensor, beta: float, of_a: float = 0.0, of_b: float = 0.0) -> None:
    """Writes beta·A·B + of_a·A + of_b·B into a contiguous c [B, M, M]; with of_a or of_b, A and B are symmetric."""
    if not c.numel():
        return
    adds = bool(of_a), bool(of_b)
    if not any(adds) and beta == 1.0:
        hopper_symmetric_plans.of((a, b), *adds)(a, b, c)
        return
    if not any(adds):
        adds = True, False  # the factor comes with a residual
    plan = hopper_symmetric_plans.of((a, b.mT), *adds)
    added = [(t, factor) for t, factor, is_added in ((a, of_a, adds[0]), (b, of_b, adds[1])) if is_added]
    (first, by), (second, gamma) = (*added, (None, 1.0))[:2]
    plan(a, b.mT, c, residual=first, second=second, alpha=beta, beta=by, gamma=gamma)


def product_on_hopper(a: Tensor, b: Tensor, c: Tensor, beta: float, of_b: float) -> None:
    """Writes beta·A·B + of_b·B into c [B, M, N], for symmetric A; of tall matrices, whose columns are contiguous, as
    Cᵀ = Bᵀ·A."""
    if not c.numel():
        return
    wide = c.stride(-1) == 1 or c.shape[-1] == 1
    left, right, residual, out = (a, b, b, c) if wide else (b.mT, a.mT, b.mT, c.mT)
    plan = hopper_product_plans.of((left, right, residual), c.dtype)
    plan(left, right, out, residual=residual, alpha=beta, beta=of_b)


# ---- norms -----------------------------------------------------------------------------------------------------------

NORM_BLOCK = 256 if INTERPRETING else 2048  # elements: 16 bytes of 16-bit floats for each of 256 threads
NORM_PROGRAMS = 8  # a multiprocessor
MAX_PARTS = 1024  # of a matrix, whose sums one program adds up


@dataclass
class NormalizeCall(Call):
    """``x`` [..., M, N] over ``margin`` times each matrix's norm, or over ``eps`` where that is larger."""

    x: Tensor
    dtype: torch.dtype
    margin: float
    eps: float

    def obstacle(self) -> str:
        x = self.x
        if x.dtype not in FLOATS or not x.is_contiguous():
            return "float64, or strided matrices"
        return "more matrices than a grid has rows" if x.shape[:-2].numel() >= 2**16 else ""


def normalize_plan(c: NormalizeCall) -> Callable[[Tensor], Tensor]:
    size = c.x.shape[-2] * c.x.shape[-1]
    batch = c.x.numel() // size
    wanted = min(-(-NORM_PROGRAMS * multiprocessors(c.x.device) // batch), -(-size // (2 * NORM_BLOCK)), MAX_PARTS)
    parts = 1 << (max(wanted, 1).bit_length() - 1)
    share = -(-size // (parts * NORM_BLOCK)) * NORM_BLOCK
    constants, dtype = {"BLOCK": NORM_BLOCK, "PARTS": parts}, c.dtype
    sums = Plan(square_sums, (parts, batch), (size, share), constants, num_warps=8)
    divide = Plan(quotients, (parts, batch), (size, share, c.margin, c.eps), constants, num_warps=8)

    def run(x: Tensor) -> Tensor:
        of_parts = torch.empty((batch, parts), dtype=torch.float32, device=x.device)
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        sums(x, of_parts)
        divide(x, of_parts, y)
        return y

    return run


NORMALIZE = Dispatch(
    NormalizeCall, ON_CPU, EMPTY,
    Route("triton", lambda c: True, "two launches: sums of squares, quotients", normalize_plan, NormalizeCall.obstacle),
    Route("torch", lambda c: True, "float64, strided matrices, or more of them than a grid has rows"),
)  # fmt: skip


def normalized(x: Tensor, margin: float, eps: float, dtype: torch.dtype) -> Tensor:
    plan = NORMALIZE.of((x,), dtype, margin, eps)
    return iteration.normalized(x, margin, eps, dtype, traced=False) if plan is None else plan(x)


BY_TRITON = iteration.Products(symmetric_by_triton, product_by_triton, normalized)
ON_HOPPER = iteration.Products(symmetric_on_hopper, product_on_hopper, normalized, 8)
BY_CUBLAS = iteration.Products(symmetric_in_strips, product_by_cublas, normalized)

# ---- symmetric products ----------------------------------------------------------------------------------------------


def matrices(x: Tensor) -> Tensor | None:
    """x [..., M, N] as [B, M, N] without a copy, or None where its leading dimensions have no common stride."""
    if x.ndim == 3:
        return x
    if x.ndim == 2:
        return x.unsqueeze(0)
    try:
        return x.view(x.shape[:-2].numel(), *x.shape[-2:])
    except RuntimeError:
        return None


def check_matrices(operator: str, name: str, x: Any) -> None:
    check_tensor(operator, name, x)
    check_shape(operator, name, x, x.ndim >= 2, "[..., M, N], a matrix or a batch of them")


STRIDES = "the leading dimensions do not collapse into one stride, so a copy would be needed"
LEAST_PADDED, LONG = (
    2**26,
    1024,
)  # multiplications, and terms of a sum, from which two copies cost less than Triton's loop
HALF = "half of the tiles are computed, the others are their mirror images"


class SymmetricCall(Call):
    """What the calls of ``gram`` and ``gram_polynomial`` have in common: products of x by its transpose (``own``) or by itself,
    with the factors of the product and of x."""

    own: ClassVar[bool] = False
    factors: tuple[float, ...] = (1.0,)

    @property
    def empty(self) -> bool:
        return self.x.shape[:-1].numel() == 0

    def strides(self) -> str:
        return STRIDES if matrices(self.x) is None else ""

    def hopper_obstacle(self) -> str:
        """Why Hopper's main loop cannot take the call ("" when it can)."""
        x = matrices(self.x)
        if x is None:
            return STRIDES
        if self.sm != 90:
            return f"compiled for sm_90, this is sm_{self.sm}"
        if x.dtype not in SIXTEEN_BITS:
            return f"{x.dtype}; the kernel takes bfloat16 and float16"
        return self.operand_obstacle(x) or gemm.why_not(x, x.mT, x.dtype)

    def padded_obstacle(self) -> str:
        """The same of a copy of x that ends with zeros."""
        x = matrices(self.x)
        if x is None or self.sm != 90 or x.dtype not in SIXTEEN_BITS:
            return self.hopper_obstacle()
        x = torch.empty((len(x), *map(padded.up_to, x.shape[1:])), dtype=x.dtype, device="meta")
        return self.operand_obstacle(x) or gemm.why_not(x, x.mT, x.dtype)

    @property
    def worth_padding(self) -> bool:
        *batch, m, n = self.x.shape
        return math.prod(batch) * m * m * n >= LEAST_PADDED or n >= LONG

    def strips_obstacle(self) -> str:
        return self.strides() or ("" if self.x.dtype == torch.float32 else f"{self.x.dtype}; it is for float32")

    def operand_obstacle(self, x: Tensor) -> str:
        raise NotImplementedError


@dataclass
class GramCall(SymmetricCall):
    own: ClassVar[bool] = True
    x: Tensor

    def __post_init__(self) -> None:
        check_matrices("gram", "x", self.x)

    def operand_obstacle(self, x: Tensor) -> str:
        if x.shape[-2] % 8:
            return f"rows of {x.shape[-2]} elements in the result do not begin on 16 bytes, as TMA requires"
        return ""


@dataclass
class PolynomialCall(SymmetricCall):
    x: Tensor
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        check_tensor("gram_polynomial", "a", self.x)
        square = self.x.ndim >= 2 and self.x.shape[-1] == self.x.shape[-2]
        check_shape("gram_polynomial", "a", self.x, square, "[..., M, M], symmetric matrices")
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"gram_polynomial: argument '{name}' is {value!r:.40}; expected a number")
        self.factors = float(self.beta), float(self.alpha)

    def operand_obstacle(self, x: Tensor) -> str:
        if not self.alpha:
            return "alpha is 0, but the kernel's factors come with a residual"
        return gemm.map_why_not("a", x, x.element_size(), False)


def symmetric_launch(products: iteration.Products, c: SymmetricCall) -> Callable[[Tensor], Tensor]:
    own, factors = c.own, c.factors

    def run(x: Tensor) -> Tensor:
        wide = matrices(x)
        assert wide is not None  # the route's condition
        out = torch.empty((*x.shape[:-1], x.shape[-2]), dtype=x.dtype, device=x.device)
        products.symmetric(wide, wide.mT if own else wide, out, *factors)
        return out

    return run


def padded_launch(c: SymmetricCall) -> Callable[[Tensor], Tensor]:
    own, factors = c.own, c.factors

    def run(x: Tensor) -> Tensor:
        m, n = x.shape[-2:]
        wide = matrices(x)
        assert wide is not None  # the route's condition
        wide = padded.copied_to(wide, padded.up_to(m), padded.up_to(n))
        out = wide.new_empty((len(wide), wide.shape[1], wide.shape[1]))
        symmetric_on_hopper(wide, wide.mT if own else wide, out, *factors)
        return (out if m % 8 == 0 else padded.copied_to(out, m, m)).view(*x.shape[:-1], m)

    return run


STRIPS = "fp32: cuBLAS's products of strips of rows up to the diagonal, mirrored"


def _symmetric_table(call: type[SymmetricCall]) -> Dispatch:
    return Dispatch(
        call, ON_CPU, EMPTY,
        Route("torch", lambda c: bool(c.strides()), STRIDES),
        Route("cuda", lambda c: not c.traced, f"Hopper's main loop: {HALF}",
              partial(symmetric_launch, ON_HOPPER), SymmetricCall.hopper_obstacle, sm=90),
        Route("cuda", lambda c: not c.traced and c.worth_padding, "the same of copies whose rows begin on 16 bytes",
              padded_launch, SymmetricCall.padded_obstacle, sm=90),
        Route("strips", lambda c: not c.traced, STRIPS,
              partial(symmetric_launch, BY_CUBLAS), SymmetricCall.strips_obstacle),
        Route("triton", lambda c: True, HALF, partial(symmetric_launch, BY_TRITON), SymmetricCall.strides),
    )  # fmt: skip


GRAM = _symmetric_table(GramCall)
POLYNOMIAL = _symmetric_table(PolynomialCall)

# ---- the iteration ---------------------------------------------------------------------------------------------------

FORMS = ("auto", "symmetric", "gram")
WORTH = 0.9  # of the symmetric form's operations, below which the gram form is taken: it has more and smaller launches


@dataclass
class IterationCall(Call):
    x: Tensor
    steps: int = 5
    coefficients: Coefficients = "classic"
    eps: float = 1e-7
    form: str = "auto"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_matrices("newton_schulz", "x", self.x)
        schedule(self.coefficients, self.steps)
        eps, form, dtype = self.eps, self.form, self.dtype
        if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not eps > 0 or math.isinf(eps):
            raise ValueError(f"newton_schulz: argument 'eps' is {eps!r}; expected a number above 0")
        if form not in FORMS:
            raise ValueError(f"newton_schulz: argument 'form' is {form!r}; expected {', '.join(FORMS)}")
        if dtype is not None and dtype not in FLOATS:
            raise TypeError(
                f"newton_schulz: argument 'dtype' is {dtype!r}; expected {either(FLOATS)}, or None for that of 'x'"
            )

    @property
    def result_dtype(self) -> torch.dtype:
        return self.dtype or self.x.dtype

    @property
    def gram_form(self) -> bool:
        """Asked for, or fewer operations; only of bf16 and named coefficients is it as exact as the symmetric form."""
        if self.form != "auto":
            return self.form == "gram"
        m, n = self.x.shape[-2:]
        exact = self.result_dtype == torch.bfloat16 and known(self.coefficients)
        return exact and flops("gram", m, n, self.steps) < WORTH * flops("symmetric", m, n, self.steps)

    def hopper_obstacle(self) -> str:
        """Why Hopper's main loop cannot take the iteration, whose operands are its own ("" when it can)."""
        if self.result_dtype not in SIXTEEN_BITS:
            return f"{self.result_dtype}; the kernel takes bfloat16 and float16"
        return "" if self.sm == 90 else f"compiled for sm_90, this is sm_{self.sm}"

    def on_hopper(self) -> str:
        faster = not self.traced and not self.hopper_obstacle()
        return "on sm_90 cuda-gram takes these sizes and is faster" if faster else ""


def iteration_plan(products: iteration.Products, form: str, c: IterationCall) -> Callable[[Tensor], Tensor]:
    steps, enlarged = schedule(c.coefficients, c.steps), margin(c.coefficients)
    eps, dtype = c.eps, c.result_dtype
    return lambda x: iteration.launched(x, steps, enlarged, eps, form, dtype, products)


FEWER = "the gram form has fewer operations (or was asked for)"
SYMMETRIC = "the symmetric form: the gram form has hardly fewer operations, in more launches, or is less exact"

NEWTON_SCHULZ = Dispatch(
    IterationCall, ON_CPU, EMPTY,
    Route("cuda-gram", lambda c: c.gram_form and not c.traced, FEWER,
          partial(iteration_plan, ON_HOPPER, "gram"), IterationCall.hopper_obstacle, sm=90),
    Route("triton-gram", lambda c: c.gram_form, FEWER, partial(iteration_plan, BY_TRITON, "gram"), IterationCall.on_hopper),
    Route("cuda", lambda c: not c.gram_form and not c.traced, SYMMETRIC,
          partial(iteration_plan, ON_HOPPER, "symmetric"), IterationCall.hopper_obstacle, sm=90),
    Route("strips", lambda c: not c.gram_form and not c.traced, STRIPS, partial(iteration_plan, BY_CUBLAS, "symmetric"),
          lambda c: "" if c.result_dtype == torch.float32 else f"{c.result_dtype}; it is for float32"),
    Route("triton", lambda c: True, SYMMETRIC, partial(iteration_plan, BY_TRITON, "symmetric")),
)  # fmt: skip
