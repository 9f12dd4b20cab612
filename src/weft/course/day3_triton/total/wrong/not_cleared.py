# rejected at: right
# torch.empty holds whatever was there.
import torch
import triton
import triton.language as tl


@triton.jit
def total_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    block_sum = tl.sum(x, axis=0)
    tl.atomic_add(out_ptr, block_sum)


def total(x: torch.Tensor, block: int = 64) -> torch.Tensor:
    """x [n], float32 → the sum of its elements [1], float32."""
    out = torch.empty(1, dtype=torch.float32, device=x.device)
    n = x.numel()
    total_kernel[(triton.cdiv(n, block),)](x, out, n, BLOCK=block)
    return out
