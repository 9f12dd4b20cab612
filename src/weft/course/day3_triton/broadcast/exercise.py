# TODO(en): out[i, j] = x[i] * y[j]. A program makes a tile of ROWS x COLS elements of out, so its offsets are two-dimensional:
# i as a column [ROWS, 1], j as a row [1, COLS]; together they broadcast to [ROWS, COLS].
# out is contiguous: element (i, j) lies at i * n + j. Neither m nor n is a multiple of the tile.
# TODO(zh): out[i, j] = x[i] * y[j]。一个实例负责 out 中 ROWS x COLS 的一块（tile），因此它的偏移是二维的：
# i 写成列 [ROWS, 1]，j 写成行 [1, COLS]，两者按广播（broadcasting）规则合成 [ROWS, COLS]。
# out 连续存放：元素 (i, j) 在 i * n + j 处。m 和 n 都不一定是块大小的整数倍。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def outer_kernel(x_ptr, y_ptr, out_ptr, m, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    # [solution
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
    j = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]  # [1, COLS]
    x = tl.load(x_ptr + i, mask=i < m)
    y = tl.load(y_ptr + j, mask=j < n)
    tl.store(out_ptr + i * n + j, x * y, mask=(i < m) & (j < n))
    # solution]
    # [skeleton
    #: i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    #: x = tl.load(x_ptr + i, mask=i < m)
    #: y = tl.load(y_ptr + i, mask=i < n)
    #: tl.store(out_ptr + i * n + i, x * y, mask=(i < m) & (i < n))
    # skeleton]


def outer(x: torch.Tensor, y: torch.Tensor, rows: int = 16, cols: int = 32) -> torch.Tensor:
    """x [m], y [n] → out [m, n]."""
    m, n = x.numel(), y.numel()
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    outer_kernel[(triton.cdiv(m, rows), triton.cdiv(n, cols))](x, y, out, m, n, ROWS=rows, COLS=cols)
    return out
