# rejected at: parse
# A copy of x is right and costs a whole read and write of x; the exercise asks for none.
import torch
import triton
import triton.language as tl


@triton.jit
def add_bias_kernel(x_ptr, bias_ptr, out_ptr, m, n, x_row_stride, x_col_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
    j = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]  # [1, COLS]
    inside = (i < m) & (j < n)
    x = tl.load(x_ptr + i * x_row_stride + j * x_col_stride, mask=inside)
    bias = tl.load(bias_ptr + j, mask=j < n)
    tl.store(out_ptr + i * n + j, x + bias, mask=inside)


def add_bias(x: torch.Tensor, bias: torch.Tensor, rows: int = 16, cols: int = 32) -> torch.Tensor:
    """x [m, n] of any strides, bias [n] → x + bias [m, n], contiguous."""
    m, n = x.shape
    x = x.clone(memory_format=torch.contiguous_format)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(m, rows), triton.cdiv(n, cols))
    add_bias_kernel[grid](x, bias, out, m, n, x.stride(0), x.stride(1), ROWS=rows, COLS=cols)
    return out
