# rejected at: fast
# One program for everything is right, and leaves all but one multiprocessor idle.
import torch
import triton
import triton.language as tl


@triton.jit
def total_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    block_sum = 0.0
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        block_sum += tl.sum(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0), axis=0)
    tl.atomic_add(out_ptr, block_sum)


def total(x: torch.Tensor, block: int = 64) -> torch.Tensor:
    """x [n], float32 → the sum of its elements [1], float32."""
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    n = x.numel()
    total_kernel[(1,)](x, out, n, BLOCK=block)
    return out
