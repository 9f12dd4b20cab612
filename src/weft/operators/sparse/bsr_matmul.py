"""``bsr_matmul(matrix, b)``: a matrix of dense blocks times a dense matrix, on tensor cores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import BYTES, Cost, Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants
from weft.operators.call import Choice, guarded
from weft.operators.configs import Config, Configurations, bucket, tiles
from weft.operators.cuda import shared_limit
from weft.operators.dispatch import ON_CPU, Call, Dispatch, Route
from weft.operators.launch import Plan, multiprocessors
from weft.operators.matmul.dispatch import default_precision
from weft.operators.random_inputs import LAYOUTS, random_tensor
from weft.operators.sparse.bsr import BLOCKS, BSR
from weft.operators.sparse.products import TRACED_DENSE, cast, check_product, distinct, random_pattern


@triton.jit
def blocks_times_dense(
    offsets_ptr, columns_ptr, values_ptr, b_ptr, y_ptr, K, b_row, b_col,
    BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One TILE_M × TILE_K tile of Y within a block row: its blocks one after the other, DEPTH columns of a block at a time."""
    tiles_k = tl.cdiv(K, TILE_K)
    tile_m = tl.program_id(0) // tiles_k
    block_row = tile_m // (BLOCK // TILE_M)
    m = (tile_m % (BLOCK // TILE_M)) * TILE_M + tl.arange(0, TILE_M)
    k = ((tl.program_id(0) % tiles_k) * TILE_K + tl.arange(0, TILE_K)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    first = tl.load(offsets_ptr + block_row)
    last = tl.load(offsets_ptr + block_row + 1)
    total = tl.zeros([TILE_M, TILE_K], tl.float32)
    for step in range(0, (last - first) * (BLOCK // DEPTH)):  # one loop, so that loads run ahead across blocks
        z = first + step // (BLOCK // DEPTH)
        start = step % (BLOCK // DEPTH) * DEPTH
        column = tl.load(columns_ptr + z).to(tl.int64)
        a = tl.load(values_ptr + z.to(tl.int64) * (BLOCK * BLOCK) + m[:, None] * BLOCK + (start + depth)[None, :])
        n = column * BLOCK + start + depth
        b = tl.load(b_ptr + n[:, None] * b_row + k[None, :] * b_col, mask=k[None, :] < K, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    row = block_row.to(tl.int64) * BLOCK + m
    tl.store(y_ptr + row[:, None] * K + k[None, :], total.to(y_ptr.dtype.element_ty), mask=k[None, :] < K)


def heuristic(sm: int, dtype: torch.dtype, block: int, k: int) -> Config:
    """A tile of Y as wide as registers allow; two stages where shared memory is 99 KiB."""
    tile_k = max(min(k, 128), 16)
    depth = min(block, 32 if dtype == torch.float32 else 64)
    stages = 2 if sm in (86, 89, 120) else 3
    warps = 8 if block * tile_k >= 128 * 128 else 4
    return {"TILE_M": block, "TILE_K": tile_k, "DEPTH": depth, "num_warps": warps, "num_stages": stages}


def candidates(sm: int, dtype: torch.dtype, block: int, k: int) -> Any:
    sides = [side for side in (16, 32, 64, 128) if side <= block]
    sizes = {"TILE_M": sides, "TILE_K": (32, 64, 128, 256), "DEPTH": sides}
    for c in tiles({**sizes, "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)}, 8, 128, of=("TILE_M", "TILE_K")):
        if (c["TILE_M"] + c["TILE_K"]) * c["DEPTH"] * dtype.itemsize * c["num_stages"] <= shared_limit(sm):
            yield c


configuration = Configurations(__file__, "bsr_matmul", heuristic, candidates)


@dataclass
class BsrCall(Call):
    """A plan is called with ``(row_offsets, columns, values, b, y)``, y contiguous."""

    row_offsets: Tensor
    columns: Tensor
    values: Tensor
    x: Tensor
    precision: str


def plan(c: BsrCall) -> Plan:
    b, k, block = c.x, c.x.shape[1], c.values.shape[1]
    config = configuration(b.device, b.dtype, block, bucket(k, 16))
    tile = {name: config[name] for name in ("TILE_M", "TILE_K", "DEPTH")}
    tile["TILE_K"] = min(tile["TILE_K"], bucket(k, 16))

    def programs() -> int:
        return (len(c.row_offsets) - 1) * (block // tile["TILE_M"]) * triton.cdiv(k, tile["TILE_K"])

    # in fp32 the time of a program is its multiplications, and its few warps wait for one another: smaller tiles, so that a
    # multiprocessor has two programs
    while (
        b.dtype == torch.float32
        and max(tile["TILE_M"], tile["TILE_K"]) > 16
        and programs() <= multiprocessors(b.device)
    ):
        tile["TILE_K" if tile["TILE_K"] > tile["TILE_M"] else "TILE_M"] //= 2
    grid, stages = (programs(),), config["num_stages"]
    # few programs wait for memory, for a block's column and then for rows of b: two of each are in flight with five stages
    held = (tile["TILE_M"] + tile["TILE_K"]) * tile["DEPTH"] * b.element_size() * 5
    if grid[0] <= 2 * multiprocessors(b.device) and 2 * held <= shared_limit(c.sm):
        stages = max(stages, 5)
    constants = {"BLOCK": block, **tile, "PRECISION": c.precision}
    return Plan(blocks_times_dense, grid, (k, *b.stride()), constants, config["num_warps"], stages)


FORWARD = Dispatch(
    BsrCall, ON_CPU, TRACED_DENSE,
    Route("triton", lambda c: True, "stored blocks on the matrix units", plan),
)  # fmt: skip


def reference(matrix: BSR, b: Tensor) -> Tensor:
    """As a dense product, in fp32 or wider."""
    wide = torch.promote_types(b.dtype, torch.float32)
    return (matrix.to_dense(wide) @ b.to(wide)).to(b.dtype)


def torch_bsr(matrix: BSR, b: Tensor) -> Tensor:
    """``torch.mm`` of a ``sparse_bsr`` tensor of the same memory."""
    if not len(matrix.columns) or not b.numel() or not b.is_cuda:
        return reference(matrix, b)
    return torch.mm(matrix.to_torch(), b)


def bsr_triton(matrix: BSR, b: Tensor) -> Tensor:
    y = b.new_empty((matrix.shape[0], b.shape[1]))
    if y.numel():
        tensors = (matrix.row_offsets, matrix.columns, matrix.values, b)
        FORWARD.kernel("triton").of(tensors, default_precision())(*tensors, y)
    return y


def blocks_of(w: Workload) -> tuple[int, int, int]:
    """Block rows, block columns and stored blocks of a workload."""
    block = w.option("block", 16)
    if w["M"] % block or w["N"] % block:
        raise ValueError(f"bsr_matmul: M={w['M']},N={w['N']} in blocks of {block}; expected multiples of the block")
    rows, columns = w["M"] // block, w["N"] // block
    return rows, columns, rows * w["R"] if columns else 0


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """M/B·R blocks, dealt out over the block rows at random (the same for every draw), and b [N, K]."""
    (rows, columns, z), block = blocks_of(w), w.option("block", 16)
    values = random_tensor(g, (z, block, block), w.dtype, device)
    b = random_tensor(g, (w["N"], w["K"]), w.dtype, device, layout=w.option("layout", "contiguous"))
    pattern = random_pattern(w, rows, columns, z, device)
    return {"matrix": BSR(*pattern, values, (rows * block, columns * block), check=False), "b": b}


def cost(w: Workload, direction: str) -> Cost:
    (rows, columns, z), block, k = blocks_of(w), w.option("block", 16), w["K"]
    index, size = BYTES[w.option("indices", "int32")], w.bytes_per_element
    matrix = z * (block * block * size + index) + (rows + 1) * index
    reads = matrix + distinct(columns, z) * block * k * size
    flops = 2.0 * z * block * block * k
    return Cost(reads, rows * block * k * size, {w.dtype: flops}, vector_flops=1)


def scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """How large a row's terms are: sums of random signs cancel."""
    matrix = arguments["matrix"]
    return [reference(matrix.with_values(matrix.values.square()), arguments["b"].square()).sqrt()]


def _of_values(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda matrix, b: reference(matrix.with_values(change(matrix.values)), b)


def _next_column(matrix: BSR, b: Tensor) -> Tensor:
    columns = (matrix.columns + 1) % max(matrix.shape[1] // matrix.block, 1)
    return reference(BSR(matrix.row_offsets, columns, matrix.values, matrix.shape, check=False), b)


TIMED = tuple(workload("bf16", M=8192, N=8192, R=r, K=4096, block=b) for b, r in ((32, 64), (64, 32), (128, 16)))

bsr_matmul = Operator(
    name="bsr_matmul",
    axes={"M": "rows", "N": "columns", "R": "stored blocks in a block row, in the mean", "K": "columns of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"block": BLOCKS, "indices": ("int32", "int64"), "layout": LAYOUTS[:-1]},
    tolerance=Tolerance(scale=scale, ulps=2.0, terms=lambda w: max(w["R"] * w.option("block", 16), 32)),
    workloads={
        "verify": [
            *workloads("MNRK", (64, 48, 2, 20), (16, 16, 1, 1)),
            *(workload(M=m, N=n, R=2, K=k, block=b) for m, n, k, b in ((96, 64, 33, 32), (128, 192, 40, 64))),
            workload(M=256, N=128, R=1, K=16, block=128),
            workload(M=64, N=32, R=3, K=130, indices="int64"),
            *workloads("MNRK", (0, 32, 3, 4), (32, 0, 3, 4), (32, 32, 0, 4), (32, 32, 1, 0)),
            *(workload(M=48, N=32, R=2, K=24, layout=at) for at in LAYOUTS[1:-1]),
        ],
        "full": [workload(M=1024, N=1024, R=8, K=512, block=b) for b in (16, 32)],
        "bench": TIMED,
        "quick": [workload("bf16", M=4096, N=4096, R=16, K=4096, block=64)],
        "host": [workload("fp32", M=64, N=64, R=2, K=32)],
        "compile": [
            *(workload(t, M=1024, N=1024, R=4, K=512, block=b) for t in ("bf16", "fp32") for b in BLOCKS),
            workload("fp16", M=1024, N=1024, R=4, K=20, block=16, layout="transposed"),
        ],
        "tune": TIMED,
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("blocks transposed", _of_values(lambda v: v.transpose(1, 2))),
        Mutant("block column off by one", _next_column),
        Mutant("last columns of a block left out", _of_values(lambda v: v.index_fill(2, v.new_tensor([15]).long(), 0))),
    ],
)

bsr_matmul.implementation("triton", arch=">=sm_80")(bsr_triton)
bsr_matmul.implementation("torch")(torch_bsr)


@bsr_matmul.choice
@guarded
def choose(matrix: BSR, b: Tensor) -> Choice:
    expected = "({}, K), as many rows as the matrix has columns"
    check_product("bsr_matmul", matrix, (BSR,), "BSR (BSR.from_torch)", b, expected)
    return FORWARD.choose(matrix.row_offsets, matrix.columns, matrix.values, b, "ieee")


@bsr_matmul.function
def bsr_matmul_function(matrix: BSR, b: Tensor) -> Tensor:
    """A matrix of dense blocks times a dense one.

    Args:
        matrix: [M, N] of blocks of 16, 32, 64 or 128; values in float32, float16 or bfloat16.
        b: [N, K], of the values' dtype and device, any strides.

    Returns:
        [M, K] of b's dtype, contiguous, summed in fp32 in a fixed order: the same bits every time. float32 is multiplied as
        ``torch.get_float32_matmul_precision()`` says. Under autocast, values and b are cast as ``torch.mm`` casts them.

    Raises:
        TypeError: not a :class:`BSR`, dtypes that differ or are not these.
        ValueError: a b that is no matrix of N rows, or on another device.
        NotImplementedError: a gradient is wanted.
    """
    choice = choose(matrix, b)
    matrix, b = cast(matrix, b)
    return reference(matrix, b) if choice.implementation == "torch" else bsr_triton(matrix, b)
