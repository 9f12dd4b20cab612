# TODO(en): out = a · x + y for any length n. The last program may reach beyond the end: its lanes past n must touch nothing.
# Start enough programs to cover n, and mask both the loads and the store.
# TODO(zh): 对任意长度 n 计算 out = a · x + y。最后一个实例可能越过末尾：下标超出 n 的通道（lane）不得访问任何内存。
# 请启动足够多的实例以覆盖 n，并给读取（load）和写入（store）都加上掩码（mask）。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def axpy_kernel(x_ptr, y_ptr, out_ptr, a, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # [solution
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, a * x + y, mask=inside)
    # solution]
    # [skeleton
    #: x = tl.load(x_ptr + offsets)
    #: y = tl.load(y_ptr + offsets)
    #: tl.store(out_ptr + offsets, a * x + y)
    # skeleton]


def axpy(a: float, x: torch.Tensor, y: torch.Tensor, block: int = 64) -> torch.Tensor:
    """x, y [n], any n → a · x + y [n]."""
    out = torch.empty_like(x)
    n = x.numel()
    # [solution
    programs = triton.cdiv(n, block)
    # solution]
    # [skeleton
    #: programs = n // block
    # skeleton]
    axpy_kernel[(programs,)](x, y, out, a, n, BLOCK=block)
    return out
