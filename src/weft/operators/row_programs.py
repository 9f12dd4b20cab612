"""Rows held by Triton programs: the configurations that the row kernels of all families share."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.operators.configs import Config, bucket, grid_of
from weft.operators.cuda import pointer_aligned
from weft.operators.launch import Plan, multiprocessors
from weft.operators.layout import views

ONE_PASS = 32768  # columns that one program holds in registers: 1024 threads × 32 fp32 values
WHOLE = "a program holds rows in registers"
LONG = "longer rows than a program holds are read twice"


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """For rows of up to n columns (a power of two): about 2048 elements a program and 16 a thread, at most 1024 threads; for
    longer ones than ``ONE_PASS``, the BLOCK of columns that a program walks a row by."""
    if n > ONE_PASS:
        return {"BLOCK": 8192, "num_warps": 16}
    rows = max(1, 2048 // n)
    return {"ROWS": rows, "num_warps": min(max(rows * n // 512, 1), 32)}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n > ONE_PASS:
        return grid_of({"BLOCK": (4096, 8192, 16384), "num_warps": (8, 16, 32)})
    return row_tiles(n, {"num_warps": (1, 2, 4, 8, 16, 32)}, per_thread=(4, 64))


def in_pieces(*tensors: Tensor) -> bool:
    """Whether rows do not begin and end on 16 bytes, or columns are not neighbours: threads then load less than 16 bytes at
    once, so that a warp has few columns, and each sum needs all warps."""
    for t, (_, n, row, column) in zip(tensors, views(*tensors), strict=True):
        count = 16 // t.element_size()
        if column != 1 or n % count or row % count or not pointer_aligned(t):
            return True
    return False


def fitted(config: Config, x: Tensor, n: int, pieces: bool) -> Config:
    """The measured configuration, which is of a power of two; of short rows in pieces, or with a fifth of padding, one or two
    warps instead (measured at 12 such shapes)."""
    b = bucket(n)
    if b == 2048 and pieces:
        return {"ROWS": 1, "num_warps": 4}
    if b > 1024 or not (pieces or 5 * n < 4 * b):
        return config
    return {"ROWS": max(2, 2048 // x.element_size() // b), "num_warps": 2 if b == 1024 else 1}


def tail_of(n: int) -> int:
    """Columns of a row's second tile, where one of half the next power of two and a small one behind it hold a row of n
    columns in less time than one tile, whose padding costs the instructions of columns; else 0. Both are powers of two: the
    second is at most half of 128, a quarter of 512 and more. Of 256 both were level."""
    block = bucket(n) // 2
    tail = bucket(n - block)
    return tail if tail <= {128: 64, 256: 0}.get(block, block // 4) and block >= 128 else 0


def lie_apart(strides: Iterable[int]) -> bool:
    """Whether columns of a tensor, given its row stride, column stride, the next one's, …, are further apart than its rows,
    which then lie side by side."""
    rows_and_columns = iter(strides)
    return any(row < column for row, column in zip(rows_and_columns, rows_and_columns, strict=True))


def side_by_side(x: Tensor, m: int, n: int, column_bytes: int = 64) -> Config:
    """For rows that lie side by side: so many bytes of each column, or fewer where there would be too few programs, if a
    program holds the rows; else tiles of 4096 elements."""
    rows, least = column_bytes // x.element_size(), 32 // x.element_size()
    while rows > least and m < 2 * multiprocessors(x.device) * rows:
        rows //= 2
    if n <= 256:
        return {"ROWS": rows, "num_warps": min(max(rows * bucket(n) // 512, 1), 16)}
    rows = min(32 if x.element_size() == 2 else 64, max(rows, bucket(m // (2 * multiprocessors(x.device)) + 1) // 2))
    return {"ROWS": rows, "BLOCK": 4096 // rows, "num_warps": 8 if x.element_size() == 2 else 16}


def plan(
    kernels: tuple[Any, Any], config: Config, m: int, n: int, scalars: tuple[Any, ...], flags: dict[str, Any]
) -> Plan:
    """The launch of m rows of n columns: by a kernel of which a program holds ROWS whole rows, or by one of which it walks
    rows, BLOCK columns at a time."""
    kernel, rows = kernels["BLOCK" in config], config.get("ROWS", 1)
    tile = {"ROWS": rows} if "ROWS" in kernel.arg_names else {}
    tail = config.get("TAIL", 0)
    tile["BLOCK"] = config.get("BLOCK", bucket(n) // 2 if tail else bucket(n))
    if "TAIL" in kernel.arg_names:
        tile["TAIL"] = tail
    return Plan(kernel, (-(-m // rows),), scalars, {**flags, **tile}, config["num_warps"])


def row_tiles(n: int, options: dict[str, tuple[int, ...]], per_thread: tuple[int, int]) -> list[Config]:
    """Every choice of ROWS (tiles of at most 8192 elements) and of the options that gives a thread so many elements."""
    rows = tuple(r for r in (1, 2, 4, 8, 16, 32) if r * n <= 8192) or (1,)
    least, most = per_thread
    tiles = grid_of({"ROWS": rows, **options})
    return [c for c in tiles if least <= c["ROWS"] * n // (c["num_warps"] * 32) <= most]
