"""Which tile of a symmetric matrix a program computes: those on and below the diagonal, numbered so that programs which
run together share operands.

Tile rows are taken in bands of GROUP. A band is a rectangle (columns left of its first row's diagonal tile), numbered column
by column, and then the triangle of GROUP tile rows on the diagonal. Bands end where triangular numbers do, so a number's
band follows from one square root.
"""

from __future__ import annotations

import triton
import triton.language as tl


def tiles(rows: int) -> int:
    """Tiles on and below the diagonal of ``rows`` × ``rows`` tiles."""
    return rows * (rows + 1) // 2


@triton.jit
def triangular_root(t):
    """The largest r with r · (r + 1) / 2 <= t, for 0 <= t < 2**29."""
    r = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    r = tl.where(r * (r + 1) // 2 > t, r - 1, r)  # fp32 holds 24 bits of t: off by one at most
    return tl.where((r + 1) * (r + 2) // 2 <= t, r + 1, r)


@triton.jit
def lower_tile(t, rows, GROUP: tl.constexpr):
    """The t-th tile: its (row, column), column <= row."""
    first = triangular_root(t) // GROUP * GROUP  # the band's first tile row
    height = min(rows - first, GROUP)
    t -= first * (first + 1) // 2
    # the rectangle of columns 0 … first - 1
    row, column = first + t % height, t // height
    # the triangle after it
    u = max(t - first * height, 0)
    r = triangular_root(u)
    inside = t < first * height
    return tl.where(inside, row, first + r), tl.where(inside, column, first + u - r * (r + 1) // 2)
