# TODO(en): The simplest matrix product: program (i, j) makes the one element C[i, j], the dot product of row i of A and
# column j of B. Walk along k in steps of BLOCK. All matrices are float32 and contiguous.
# It is right and slow; how many bytes it reads is the number that the next exercise beats.
# TODO(zh): 最简单的矩阵乘法：实例 (i, j) 只算一个元素 C[i, j]，即 A 的第 i 行与 B 的第 j 列的点积。
# 沿 k 每次前进 BLOCK。所有矩阵都是 float32，连续存放。
# 它正确但慢；它读取的字节数，就是下一个练习要超过的数。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def naive_kernel(a_ptr, b_ptr, c_ptr, n, k, BLOCK: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    partial = tl.zeros([BLOCK], tl.float32)
    for start in range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        # [solution
        a = tl.load(a_ptr + i * k + at, mask=at < k, other=0.0)
        b = tl.load(b_ptr + at * n + j, mask=at < k, other=0.0)
        partial += a * b
        # solution]
        # [skeleton
        #: a = tl.load(a_ptr + i * k + at, mask=at < k, other=0.0)
        #: b = tl.load(b_ptr + j * k + at, mask=at < k, other=0.0)
        #: partial = a * b
        # skeleton]
    tl.store(c_ptr + i * n + j, tl.sum(partial, axis=0))


def matmul(a: torch.Tensor, b: torch.Tensor, block: int = 32) -> torch.Tensor:
    """a [m, k], b [k, n], float32, contiguous → a b [m, n]."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    naive_kernel[(m, n)](a, b, c, n, k, BLOCK=block)
    return c
