# TODO(en): out = x + bias for a matrix x that may be a view: transposed, every second column, a row repeated by expand.
# Element (i, j) of a tensor lies at i * stride(0) + j * stride(1) from its first element. Read x by its strides,
# without a copy of x; out is contiguous. bias[j] is added to every row.
# TODO(zh): out = x + bias，其中矩阵 x 可能只是一个视图（view）：转置的、隔列取的、用 expand 重复一行的。
# 张量的元素 (i, j) 距首元素 i * stride(0) + j * stride(1)。请按步长（stride）读取 x，
# 不要复制 x；out 是连续的。bias[j] 加到每一行上。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def add_bias_kernel(x_ptr, bias_ptr, out_ptr, m, n, x_row_stride, x_col_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
    j = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]  # [1, COLS]
    inside = (i < m) & (j < n)
    # [solution
    x = tl.load(x_ptr + i * x_row_stride + j * x_col_stride, mask=inside)
    # solution]
    # [skeleton
    #: x = tl.load(x_ptr + i * n + j, mask=inside)
    # skeleton]
    bias = tl.load(bias_ptr + j, mask=j < n)
    tl.store(out_ptr + i * n + j, x + bias, mask=inside)


def add_bias(x: torch.Tensor, bias: torch.Tensor, rows: int = 16, cols: int = 32) -> torch.Tensor:
    """x [m, n] of any strides, bias [n] → x + bias [m, n], contiguous."""
    m, n = x.shape
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(m, rows), triton.cdiv(n, cols))
    # [solution
    add_bias_kernel[grid](x, bias, out, m, n, x.stride(0), x.stride(1), ROWS=rows, COLS=cols)
    # solution]
    # [skeleton
    #: add_bias_kernel[grid](x, bias, out, m, n, n, 1, ROWS=rows, COLS=cols)
    # skeleton]
    return out
