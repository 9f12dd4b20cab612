# rejected at: right
# Without other lanes past the end hold anything: on a GPU this may pass by luck.
import torch
import triton
import triton.language as tl


@triton.jit
def row_mean_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    partial = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        partial += tl.load(x_ptr + row * n + j, mask=j < n).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(partial, axis=0) / n)


def row_mean(x: torch.Tensor, block: int = 64) -> torch.Tensor:
    """x [m, n], float16, contiguous → the mean of each row [m], float32."""
    m, n = x.shape
    out = torch.empty(m, dtype=torch.float32, device=x.device)
    row_mean_kernel[(m,)](x, out, n, BLOCK=block)
    return out
