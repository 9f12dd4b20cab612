"""Triton kernels of the embedding: gathered rows, and the gradient as one sum for each row of the table.

The gradient needs the ids sorted. A program holds a tile of table rows; a row's run in the sorted ids says which rows of the
output's gradient it sums, in fp32, always in the same order. A run may be long (a frequent token): ``sum_chunks`` sums every
chunk of ``CHUNK`` sorted ids that lies inside one run beforehand, by programs of their own, and the run takes these sums.
Rows that no id names are written as zeros by the same kernel, so the table's gradient is written once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, tiles
from weft.operators.launch import Plan
from weft.operators.row_programs import in_pieces

SLICE_BYTES = 2**23  # of the table that stay in an L2 of 40 MB and more while they are read again and again
SECTORS = 256  # bytes of a row that a slice has at least: half as many took 1.25 times as long
CHUNK = 64  # sorted ids that are summed beforehand where they are all the same


@triton.jit
def gather(
    ids_ptr, table_ptr, out_ptr, N, V, D, ids_stride, table_row, table_col,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SLICED: tl.constexpr,
):  # fmt: skip
    """out[n, :] = table[ids[n], :]; NaN for an id out of range, which is never read. Programs side by side take whole rows,
    or (SLICED) the same columns of many rows: then what is read at one time is a slice of the table, and what is written
    makes room for it first."""
    blocks, tiles = tl.cdiv(D, BLOCK), tl.cdiv(N, ROWS)
    tile = tl.program_id(0) % tiles if SLICED else tl.program_id(0) // blocks
    block = tl.program_id(0) // tiles if SLICED else tl.program_id(0) % blocks
    n = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = block * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + n * ids_stride, mask=n < N, other=0).to(tl.int64)
    known = (row >= 0) & (row < V)
    row = tl.where(known, row, 0)
    inside = (n[:, None] < N) & (col[None, :] < D)
    at = table_ptr + row[:, None] * table_row + col[None, :] * table_col
    x = tl.load(at, mask=inside, eviction_policy="evict_last")
    x = tl.where(known[:, None], x, float("nan"))
    LEAVES: tl.constexpr = "evict_first" if SLICED else ""
    x = x.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + n[:, None] * D + col[None, :], x, mask=inside, eviction_policy=LEAVES)


@triton.jit
def sum_chunks(
    ids_ptr, order_ptr, dy_ptr, sums_ptr, N, D, dy_row, dy_col,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums[c, :] = the sum of the chunk's rows of dy, where all its ids are the same; else nothing."""
    chunk = tl.program_id(0).to(tl.int64)
    first = tl.load(ids_ptr + chunk * CHUNK)
    last = tl.load(ids_ptr + chunk * CHUNK + CHUNK - 1)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, tl.where(first == last, CHUNK, 0), ROWS):
        n = tl.load(order_ptr + chunk * CHUNK + start + tl.arange(0, ROWS))
        at = dy_ptr + n[:, None] * dy_row + col[None, :] * dy_col
        total += tl.load(at, mask=col[None, :] < D, other=0.0).to(tl.float32)
    tl.store(sums_ptr + chunk * D + col, tl.sum(total, axis=0), mask=(col < D) & (first == last))


@triton.jit
def sum_runs(
    starts_ptr, order_ptr, dy_ptr, sums_ptr, dtable_ptr, V, D, padding, dy_row, dy_col, dtable_row, dtable_col,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dtable[v, :] = the sum of dy[order[p], :] for p = starts[v] ... starts[v + 1] - 1, of ROWS rows side by side: ids before
    the run's first whole chunk, the chunks' sums, ids after its last."""
    blocks = tl.cdiv(D, BLOCK)
    v = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(starts_ptr + v, mask=v < V, other=0)
    end = tl.load(starts_ptr + v + 1, mask=v < V, other=0)
    end = tl.where(v == padding, begin, end)
    chunk = (begin + CHUNK - 1) // CHUNK
    chunks = tl.maximum(end // CHUNK - chunk, 0)
    before = tl.where(chunks > 0, chunk * CHUNK - begin, end - begin)
    alone = end - begin - chunks * CHUNK
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.range(0, tl.max(alone, axis=0), loop_unroll_factor=4):  # several rows in flight
        inside_run = k < alone
        p = begin + k + tl.where(k < before, 0, chunks * CHUNK)
        n = tl.load(order_ptr + p, mask=inside_run, other=0)
        at = dy_ptr + n[:, None] * dy_row + col[None, :] * dy_col
        inside = inside_run[:, None] & (col[None, :] < D)
        total += tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    for k in tl.range(0, tl.max(chunks, axis=0), loop_unroll_factor=4):
        at = sums_ptr + (chunk + k)[:, None] * D + col[None, :]
        total += tl.load(at, mask=(k < chunks)[:, None] & (col[None, :] < D), other=0.0)
    at = dtable_ptr + v[:, None] * dtable_row + col[None, :] * dtable_col
    tl.store(at, total.to(dtable_ptr.dtype.element_ty), mask=(v[:, None] < V) & (col[None, :] < D))


def tile_of(d: int, elements: int) -> Config:
    """A tile of so many elements."""
    block = min(d, 1024)
    return {"ROWS": max(1, min(elements // block, 32)), "BLOCK": block, "num_warps": 4}


def candidates(d: int, most: int) -> list[Config]:
    blocks = [b for b in (256, 512, 1024, 2048, 4096) if b <= d] or [d]
    every = {"ROWS": (1, 2, 4, 8, 16, 32), "BLOCK": blocks, "num_warps": (1, 2, 4, 8)}
    return tiles(every, 4, most, of=("ROWS", "BLOCK"))


gather_configuration = Configurations(  # 32 elements a thread, so that several rows are in flight
    __file__, "gather", lambda sm, dtype, d: tile_of(d, 4096), lambda sm, dtype, d: candidates(d, 64)
)
gradient_configuration = Configurations(  # 8 a thread: sums are kept in fp32, and four rows are in flight to each
    __file__, "gradient", lambda sm, dtype, d: tile_of(d, 1024), lambda sm, dtype, d: candidates(d, 16)
)


def _tile(config: Config, d: int) -> dict[str, int]:
    return {"ROWS": config["ROWS"], "BLOCK": min(config["BLOCK"], bucket(d))}


def launch_rows(c: Any) -> Plan:
    """Of an ``EmbeddingCall`` (dispatch.py): ``(ids, table, out)``, out [N, D] contiguous; programs take whole rows."""
    config = gather_configuration(c.table.device, c.table.dtype, bucket(c.d))
    if not c.vectors and c.table.element_size() == 2:
        config = {"ROWS": max(2048 // bucket(c.d), 1), "BLOCK": 2048, "num_warps": 4}
    return _gather(c, config, sliced=False)


def launch_slices(c: Any) -> Plan:
    """The same with programs that take the same columns of many rows."""
    config = gather_configuration(c.table.device, c.table.dtype, bucket(c.d))
    columns = max(SLICE_BYTES // c.v, SECTORS) // c.table.element_size()
    block = min(bucket(columns + 1) // 2, config["BLOCK"], bucket(c.d))  # a power of two, not above what fits
    return _gather(c, {"ROWS": max(1, 8192 // block), "BLOCK": block, "num_warps": 8}, sliced=True)


def _gather(c: Any, config: Config, sliced: bool) -> Plan:
    tile = _tile(config, c.d)
    grid = (triton.cdiv(c.n, tile["ROWS"]) * triton.cdiv(c.d, tile["BLOCK"]),)
    scalars = (c.n, c.v, c.d, c.vector.stride(0), *c.table.stride())
    return Plan(gather, grid, scalars, {**tile, "SLICED": sliced}, config["num_warps"])


class Backward:
    """Of ``(ids, dy, dtable)``, ids [N], dy [N, D], dtable [V, D]: sorts the ids and sums each run."""

    def __init__(self, c: Any):
        dy, dtable = c.dy, c.x
        (n,), (v, d) = c.ids.shape, dtable.shape
        config = gradient_configuration(dtable.device, dtable.dtype, bucket(d))
        if d > 512 and dtable.element_size() == 2 and in_pieces(dy, dtable):
            config = {"ROWS": 1, "BLOCK": 512, "num_warps": 2}  # 771 columns: 183 µs, 224 by 256
        tile = _tile(config, d)
        self.chunks = n // CHUNK
        block = min(bucket(d), 512)
        scalars = (n, d, *dy.stride())
        chunk_tile = {"CHUNK": CHUNK, "ROWS": 8, "BLOCK": block}
        self.sum_chunks = Plan(sum_chunks, (self.chunks, triton.cdiv(d, block)), scalars, chunk_tile, 4)
        grid = (triton.cdiv(v, tile["ROWS"]) * triton.cdiv(d, tile["BLOCK"]),)
        scalars = (v, d, c.padding, *dy.stride(), *dtable.stride())
        self.sum_runs = Plan(sum_runs, grid, scalars, {"CHUNK": CHUNK, **tile}, config["num_warps"])

    def __call__(self, ids: Tensor, dy: Tensor, dtable: Tensor) -> None:
        ordered, order = torch.sort(ids, stable=True)
        rows = torch.arange(dtable.shape[0] + 1, device=ids.device, dtype=ids.dtype)
        starts = torch.searchsorted(ordered, rows)
        sums = torch.empty((self.chunks, dy.shape[1]), device=dy.device, dtype=torch.float32)
        self.sum_chunks(ordered, order, dy, sums)
        self.sum_runs(starts, order, dy, sums, dtable)
