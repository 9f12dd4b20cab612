# rejected at: safe
# Rows past m are read behind the end of A.
import torch
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_col, b_row, b_col, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr
):
    rows = tl.program_id(0) * TM + tl.arange(0, TM)[:, None]  # [TM, 1]
    cols = tl.program_id(1) * TN + tl.arange(0, TN)[None, :]  # [1, TN]
    acc = tl.zeros([TM, TN], tl.float32)
    for start in range(0, k, TK):
        inner = start + tl.arange(0, TK)
        a_at = rows * a_row + inner[None, :] * a_col  # [TM, TK]
        b_at = inner[:, None] * b_row + cols * b_col  # [TK, TN]
        a = tl.load(a_ptr + a_at, mask=inner[None, :] < k, other=0.0)
        b = tl.load(b_ptr + b_at, mask=(inner[:, None] < k) & (cols < n), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + rows * n + cols, acc, mask=(rows < m) & (cols < n))


def matmul(a: torch.Tensor, b: torch.Tensor, tm: int = 32, tn: int = 32, tk: int = 16) -> torch.Tensor:
    """a [m, k], b [k, n], float32, any strides → a b [m, n], contiguous."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    grid = (triton.cdiv(m, tm), triton.cdiv(n, tn))
    matmul_kernel[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), TM=tm, TN=tn, TK=tk)
    return c
