# TODO(en): The softmax of each row, fused: the row is read once, stays in registers, and is written once. BLOCK is the next
# power of two of n, so one block holds a row. It must not overflow for large scores, nor count lanes past the end.
# State first, at the bottom, how many bytes the fused and the unfused version move.
# TODO(zh): 对每一行做融合（fused）的 softmax：一行只读一次，一直留在寄存器里，只写一次。BLOCK 是不小于 n 的最小 2 的幂，
# 所以一个块装得下一行。分数很大时不得溢出，越过行末的通道不得计入。
# 请先在文件末尾写出融合版和未融合版各要搬运多少字节。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    # [solution
    x = tl.load(x_ptr + row * n + j, mask=j < n, other=float("-inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    out = e / tl.sum(e, axis=0)
    # solution]
    # [skeleton
    #: x = tl.load(x_ptr + row * n + j, mask=j < n, other=0.0)
    #: out = x
    # skeleton]
    tl.store(out_ptr + row * n + j, out, mask=j < n)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """x [m, n], float32, contiguous → its softmax along the rows [m, n]."""
    m, n = x.shape
    out = torch.empty_like(x)
    softmax_kernel[(m,)](x, out, n, BLOCK=triton.next_power_of_2(n))
    return out


def bytes_fused(m: int, n: int, element_size: int) -> int:
    # [solution
    return 2 * m * n * element_size  # x in, out out
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def bytes_unfused(m: int, n: int, element_size: int) -> int:
    """
    [en
    peak = x.max(1); d = x - peak; e = d.exp(); total = e.sum(1); out = e / total: five kernels, one after another.
    en]
    [zh
    peak = x.max(1); d = x - peak; e = d.exp(); total = e.sum(1); out = e / total：五个核函数，一个接一个。
    zh]
    """
    # [solution
    matrix, column = m * n * element_size, m * element_size
    return (
        (matrix + column)  # max: reads x, writes peak
        + (matrix + column + matrix)  # subtract: reads x and peak, writes d
        + (matrix + matrix)  # exp
        + (matrix + column)  # sum
        + (matrix + column + matrix)  # divide
    )
    # solution]
    # [skeleton
    #: return 0
    # skeleton]
