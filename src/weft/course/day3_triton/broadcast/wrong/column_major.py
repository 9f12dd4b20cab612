# rejected at: right
# The leading dimension is n, not m.
import torch
import triton
import triton.language as tl


@triton.jit
def outer_kernel(x_ptr, y_ptr, out_ptr, m, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
    j = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]  # [1, COLS]
    x = tl.load(x_ptr + i, mask=i < m)
    y = tl.load(y_ptr + j, mask=j < n)
    tl.store(out_ptr + i + j * m, x * y, mask=(i < m) & (j < n))


def outer(x: torch.Tensor, y: torch.Tensor, rows: int = 16, cols: int = 32) -> torch.Tensor:
    """x [m], y [n] → out [m, n]."""
    m, n = x.numel(), y.numel()
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    outer_kernel[(triton.cdiv(m, rows), triton.cdiv(n, cols))](x, y, out, m, n, ROWS=rows, COLS=cols)
    return out
