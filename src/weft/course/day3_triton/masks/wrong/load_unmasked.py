# rejected at: safe
# The store is masked, so the result is right; the loads still read past the end.
import torch
import triton
import triton.language as tl


@triton.jit
def axpy_kernel(x_ptr, y_ptr, out_ptr, a, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    tl.store(out_ptr + offsets, a * x + y, mask=inside)


def axpy(a: float, x: torch.Tensor, y: torch.Tensor, block: int = 64) -> torch.Tensor:
    """x, y [n], any n → a · x + y [n]."""
    out = torch.empty_like(x)
    n = x.numel()
    programs = triton.cdiv(n, block)
    axpy_kernel[(programs,)](x, y, out, a, n, BLOCK=block)
    return out
