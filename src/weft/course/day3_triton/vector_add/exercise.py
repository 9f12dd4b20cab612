# TODO(en): A kernel runs as many programs at once. Each has its own number, tl.program_id(0), and handles BLOCK elements.
# Compute which elements belong to this program, so that programs 0, 1, 2 … together cover x from end to end.
# Here the length is always a multiple of BLOCK; the next exercise drops that.
# TODO(zh): 一个核函数（kernel）会同时以许多个程序实例（program）运行。每个实例有自己的编号 tl.program_id(0)，负责 BLOCK 个元素。
# 请算出本实例负责哪些元素，使 0、1、2……号实例合起来正好覆盖整个 x。
# 这里长度总是 BLOCK 的整数倍；下一个练习会去掉这个前提。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    # [solution
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # solution]
    # [skeleton
    #: offsets = tl.arange(0, BLOCK)
    # skeleton]
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    # [solution
    tl.store(out_ptr + offsets, x + y)
    # solution]
    # [skeleton
    #: tl.store(out_ptr + offsets, x)
    # skeleton]


def add(x: torch.Tensor, y: torch.Tensor, block: int = 64) -> torch.Tensor:
    """x, y [n], n a multiple of block → x + y [n]."""
    out = torch.empty_like(x)
    add_kernel[(x.numel() // block,)](x, y, out, BLOCK=block)
    return out
