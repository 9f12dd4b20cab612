# TODO(en): The sum of all elements of x, by many programs. Each sums its block; then all of them add to one address.
# Programs run in any order and at the same time, so reading the total, adding and writing it back loses the
# additions that happen in between. Make the addition one indivisible step.
# TODO(zh): 由许多实例一起求 x 所有元素之和。每个实例先求自己那一块的和，然后都加到同一个地址上。
# 实例的先后次序不定，而且同时运行：先读出总和、加上、再写回，会丢掉这期间别的实例所加的值。
# 请让这次加法成为一个不可分割的步骤。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def total_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    block_sum = tl.sum(x, axis=0)
    # [solution
    tl.atomic_add(out_ptr, block_sum)
    # solution]
    # [skeleton
    #: so_far = tl.load(out_ptr)
    #: tl.store(out_ptr, so_far + block_sum)
    # skeleton]


def total(x: torch.Tensor, block: int = 64) -> torch.Tensor:
    """x [n], float32 → the sum of its elements [1], float32."""
    # [solution
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    # solution]
    # [skeleton
    #: out = torch.empty(1, dtype=torch.float32, device=x.device)
    # skeleton]
    n = x.numel()
    total_kernel[(triton.cdiv(n, block),)](x, out, n, BLOCK=block)
    return out
