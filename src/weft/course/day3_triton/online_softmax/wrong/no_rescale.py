# rejected at: right
# The sum so far is relative to an old maximum.
import torch
import triton
import triton.language as tl


@triton.jit
def online_softmax_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * n
    out_ptr += tl.program_id(0) * n
    peak = float("-inf")
    total = 0.0
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + j, mask=j < n, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(x, axis=0))
        total = total + tl.sum(tl.exp(x - new_peak), axis=0)
        peak = new_peak
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + j, mask=j < n)
        tl.store(out_ptr + j, tl.exp(x - peak) / total, mask=j < n)


def online_softmax(x: torch.Tensor, block: int = 64) -> torch.Tensor:
    """x [m, n], float32, contiguous, any n → its softmax along the rows [m, n]."""
    m, n = x.shape
    out = torch.empty_like(x)
    online_softmax_kernel[(m,)](x, out, n, BLOCK=block)
    return out
