"""Codes of the dynamic map by a look-up: the line that counts intervals, of every cell of numbers.

A cell is what a float16 has in its upper byte: sign, exponent and two bits of mantissa, so there are four to a power of two. In
most cells x(y), which counts intervals up to y, is one straight line (``dynamic_map``). Six have a power of ten in them, where
two lines meet in a whole number N. ``SCALE`` moves these six so close to an end of their cells that less than one interval is
on that side: there the line of the other side counts N - 1 or N as well, and a code is made of nothing else.

So a code is ceil(a y SCALE + b): 126 + x or 127 - x rounded up for the signed map, x - 2 for the unsigned one.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from weft.operators.optimizer.dynamic_map import DECADES, codebook, interval_lines

SCALE = 1.54297 * 2**15  # 1 is below float16's largest, and 0 … 2**-31.6 one cell
CELLS = 256
ROUNDING = 2.0**-11  # of a number to float16, which its cell is read from


def ends(cell: int) -> tuple[float, float]:
    """The positive numbers whose float16, of SCALE times them, has this upper byte."""
    edges = [
        float(torch.tensor([c << 8], dtype=torch.int32).to(torch.int16).view(torch.float16)) for c in (cell, cell + 1)
    ]
    return edges[0] / SCALE * (1 - ROUNDING), min(edges[1], 65504.0) / SCALE * (1 + ROUNDING)


@functools.cache
def _line(cell: int, signed: bool) -> tuple[float, float]:
    """Slope and value at 0 of x in a cell of positive numbers."""
    lines = interval_lines(signed)
    low, high = ends(cell)
    meets = [10.0 ** (i - 6) for i in range(DECADES - 1)]  # lines i and i + 1
    inside = [i for i, meet in enumerate(meets) if low < meet < high]
    if not inside:
        return min(lines, key=lambda line: line[0] * (low + high) / 2 + line[1])
    (i,) = inside
    one = 1 / lines[i][0]  # the width of an interval below the power of ten, less than that of one above
    if meets[i] - low < one:
        return lines[i + 1]
    if high - meets[i] < one:
        return lines[i]
    raise ValueError(f"cell {cell} has an interval on either side of {meets[i]}; expected another SCALE")


def _code_line(cell: int, signed: bool) -> tuple[float, float]:
    """Slope, by the scaled number, and value at 0 of what is rounded up to a code."""
    negative, cell = divmod(cell, CELLS // 2)
    if cell == 0 and not signed:  # 0 stays 0, and anything above is 1
        return 2.0**15, 0.0
    a, b = _line(cell, signed)
    low, high = ends(cell)
    if not signed:
        return (a / SCALE, b - 2) if a * high + b >= 3 else (0.0, 1.0)
    if not negative:
        return a / SCALE, b + 126
    if low < 1 < high:  # -1 has no code of its own: a flatter line, from the last interval's begin, stays in it
        begin = (127 - b) / a
        a *= 0.9
        b = 127 - a * begin
    return a / SCALE, 127 - b


@functools.cache
def tables(device: torch.device) -> Tensor:
    """[1536] fp32: what codes stand for (``codebook``), then [cell, (signed, unsigned), (slope, value at 0)]."""
    lines = [_code_line(cell, signed) for cell in range(CELLS) for signed in (True, False)]
    made = torch.tensor(lines, dtype=torch.float32, device=device)
    return torch.cat([codebook(device), made.flatten()])
