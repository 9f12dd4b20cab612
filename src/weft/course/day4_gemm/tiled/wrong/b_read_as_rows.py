# rejected at: right
# B[inner, cols] is inner · n + cols; this reads the transposed matrix.
import torch
import triton
import triton.language as tl


@triton.jit
def tiled_kernel(a_ptr, b_ptr, c_ptr, n, k, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    rows = tl.program_id(0) * TM + tl.arange(0, TM)  # [TM] of A and C
    cols = tl.program_id(1) * TN + tl.arange(0, TN)  # [TN] of B and C
    acc = tl.zeros([TM, TN], tl.float32)
    for start in range(0, k, TK):
        inner = start + tl.arange(0, TK)  # [TK]
        a = tl.load(a_ptr + rows[:, None] * k + inner[None, :])  # [TM, TK]
        b = tl.load(b_ptr + inner[:, None] + cols[None, :] * k)  # [TK, TN]
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * n + cols[None, :], acc)


def matmul(a: torch.Tensor, b: torch.Tensor, tm: int = 32, tn: int = 32, tk: int = 16) -> torch.Tensor:
    """a [m, k], b [k, n], float32, contiguous, multiples of the tile → a b [m, n]."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    tiled_kernel[(m // tm, n // tn)](a, b, c, n, k, TM=tm, TN=tn, TK=tk)
    return c
