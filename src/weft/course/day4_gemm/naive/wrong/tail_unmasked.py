# rejected at: safe
# The last step reads into the next row of A and behind the end of B.
import torch
import triton
import triton.language as tl


@triton.jit
def naive_kernel(a_ptr, b_ptr, c_ptr, n, k, BLOCK: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    partial = tl.zeros([BLOCK], tl.float32)
    for start in range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + i * k + at)
        b = tl.load(b_ptr + at * n + j)
        partial += a * b
    tl.store(c_ptr + i * n + j, tl.sum(partial, axis=0))


def matmul(a: torch.Tensor, b: torch.Tensor, block: int = 32) -> torch.Tensor:
    """a [m, k], b [k, n], float32, contiguous → a b [m, n]."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    naive_kernel[(m, n)](a, b, c, n, k, BLOCK=block)
    return c
