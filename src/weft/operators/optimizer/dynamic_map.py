"""The dynamic map: 256 numbers of [-1, 1], or of [0, 1], that codes of 8 bits stand for, in PyTorch.

Seven decades from 10⁻⁷ to 1; decade i = 0 … 6 is cut into 2ⁱ equal intervals (signed: the same with a minus sign) or 2ⁱ⁺¹
(unsigned), whose middles are the values; 0 and 1 are values too. Codes count the values from the least to the greatest.

Let x be a real number that counts intervals: interval n lies in [n, n + 1) and n + ½ is its middle. As a function of x the
map is a straight line in each decade, from 2ⁱ to 2ⁱ⁺¹, and a number y lies in interval floor(x(y)). The lines of x(y) grow
flatter from decade to decade, each by a factor of 5, so x(y) is the *least* of the seven: no decade is looked for.

Within its interval a number is at most half an interval from its code. Only beside a power of ten, in the lowest fifth of the
first interval above, and in the upper half of the interval below 1, another code would be nearer.

For stochastic rounding the values themselves are joined by straight lines, of the chords between decades too (this function is
concave as well), so that the expectation is the number.

Source: Dettmers, Lewis, Shleifer & Zettlemoyer 2021, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.
"""

import functools
import itertools

import torch
from torch import Tensor

DECADES = 7
ZERO = 127  # the signed code of 0; the unsigned one is 0
Line = tuple[float, float]  # slope, value at 0


def values(signed: bool) -> list[float]:
    """What the codes 0 … 255 stand for, ascending."""
    positive = []
    for i in range(DECADES):
        cells = 2**i if signed else 2 ** (i + 1)
        positive += [10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / cells) for j in range(cells)]
    return [*(-v for v in reversed(positive) if signed), 0.0, *positive, 1.0]


def interval_lines(signed: bool) -> list[Line]:
    """The lines whose least is x(y): interval n of the positive numbers is [n, n + 1), n = 1 … 127 or 2 … 255."""
    first = 1 if signed else 2
    return [(first * 2**i * 10.0 ** (6 - i) / 0.9, first * 2**i * 0.8 / 0.9) for i in range(DECADES)]


def value_lines(signed: bool) -> list[Line]:
    """The lines whose least goes through (value of interval n, n + ½), and through 0 at half a unit below the first."""
    first = 1 if signed else 2
    positive = values(signed)[ZERO + 1 if signed else 1 : -1]
    joined = [(0.0, first - 0.5), (positive[0], first + 0.5)]
    for i in range(1, DECADES):
        at = first * 2**i - first  # the first value of decade i
        joined += [(positive[at - 1], first * 2**i - 0.5), (positive[at], first * 2**i + 0.5)]
    joined.append((positive[-1], first * 2**DECADES - 0.5))
    pairs = [pair for pair in itertools.pairwise(joined) if pair[0] != pair[1]]
    slopes = [(x1 - x0) / (y1 - y0) for (y0, x0), (y1, x1) in pairs]
    return [(a, x0 - y0 * a) for a, ((y0, x0), _) in zip(slopes, pairs, strict=True)]


@functools.cache
def codebook(device: torch.device) -> Tensor:
    """[512] fp32: what the signed codes stand for, then the unsigned ones."""
    return torch.tensor(values(True) + values(False), dtype=torch.float32, device=device)


def encode(y: Tensor, signed: bool, uniform: Tensor | None = None) -> Tensor:
    """Codes (uint8) of fp32 or fp64 numbers in [-1, 1] or [0, 1], rounded up or down by ``uniform`` random ones in (0, 1), else
    the interval's; what is not finite gets code 0. A positive number never gets the unsigned code of 0: as a second moment that
    would let the next step divide by almost nothing."""
    lines = interval_lines(signed) if uniform is None else value_lines(signed)
    top = 128 if signed else 256
    size = y.abs()
    x = functools.reduce(torch.minimum, (size * a + b for a, b in lines))
    if uniform is None:
        n = x.floor()
    else:  # between the last middle and 1 lies half a unit: stretched to a whole one
        n = (x + (x - (top - 0.5)).clamp_min(0) - 0.5 + uniform).floor()
    n = torch.where(size >= 1, float(top), n.clamp_max(top - 1 if uniform is None else top))
    if signed:
        code = torch.where(y < 0, (ZERO - n).clamp_min(0), ZERO + n)
    else:
        code = torch.where(y > 0, (n - 1).clamp_min(1), 0.0)
    return torch.where(y.isfinite(), code, 0.0).to(torch.uint8)


def fp32_pairs(lines: list[Line], shift: float) -> tuple[float, ...]:
    """Slopes and values at 0, the latter shifted, one after the other, for a kernel."""
    return tuple(number for a, b in lines for number in (a, b + shift))


# ---- the look-up tables of adamw_8bit.cu ------------------------------------------------------------------------------
#
# Each cell of numbers has the line that counts intervals in it. A cell is what a float16 has in its upper byte: sign, exponent
# and two bits of mantissa, so there are four to a power of two. In most cells x(y), which counts intervals up to y, is one
# straight line. Six have a power of ten in them, where two lines meet in a whole number N. ``CELL_SCALE`` moves these six so
# close to an end of their cells that less than one interval is on that side: there the line of the other side counts N - 1 or N
# as well, and a code is made of nothing else.
#
# So a code is ceil(a y CELL_SCALE + b): 126 + x or 127 - x rounded up for the signed map, x - 2 for the unsigned one.

CELL_SCALE = 1.54297 * 2**15  # 1 is below float16's largest, and 0 … 2**-31.6 one cell
CELLS = 256
ROUNDING = 2.0**-11  # of a number to float16, which its cell is read from


def cell_ends(cell: int) -> tuple[float, float]:
    """The positive numbers whose float16, of CELL_SCALE times them, has this upper byte."""
    edges = [
        float(torch.tensor([c << 8], dtype=torch.int32, device="cpu").to(torch.int16).view(torch.float16))
        for c in (cell, cell + 1)
    ]
    return edges[0] / CELL_SCALE * (1 - ROUNDING), min(edges[1], 65504.0) / CELL_SCALE * (1 + ROUNDING)


@functools.cache
def _line(cell: int, signed: bool) -> tuple[float, float]:
    """Slope and value at 0 of x in a cell of positive numbers."""
    lines = interval_lines(signed)
    low, high = cell_ends(cell)
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
    raise ValueError(f"cell {cell} has an interval on either side of {meets[i]}; expected another CELL_SCALE")


def _code_line(cell: int, signed: bool) -> tuple[float, float]:
    """Slope, by the scaled number, and value at 0 of what is rounded up to a code."""
    negative, cell = divmod(cell, CELLS // 2)
    if cell == 0 and not signed:  # 0 stays 0, and anything above is 1
        return 2.0**15, 0.0
    a, b = _line(cell, signed)
    low, high = cell_ends(cell)
    if not signed:
        return (a / CELL_SCALE, b - 2) if a * high + b >= 3 else (0.0, 1.0)
    if not negative:
        return a / CELL_SCALE, b + 126
    if low < 1 < high:  # -1 has no code of its own: a flatter line, from the last interval's begin, stays in it
        begin = (127 - b) / a
        a *= 0.9
        b = 127 - a * begin
    return a / CELL_SCALE, 127 - b


@functools.cache
def lookup_tables(device: torch.device) -> Tensor:
    """[1536] fp32: what codes stand for (``codebook``), then [cell, (signed, unsigned), (slope, value at 0)]."""
    lines = [_code_line(cell, signed) for cell in range(CELLS) for signed in (True, False)]
    made = torch.tensor(lines, dtype=torch.float32, device=device)
    return torch.cat([codebook(device), made.flatten()])
