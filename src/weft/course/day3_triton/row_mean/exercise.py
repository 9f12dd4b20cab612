# TODO(en): out[i] = mean of row i of x, in float32, for x of float16 and rows longer than BLOCK. One program makes one row.
# Walk along the row in steps of BLOCK, add up in float32, and reduce the BLOCK partial sums once, after the loop.
# Lanes past the end must add nothing: say so with other=.
# TODO(zh): out[i] 是 x 第 i 行的平均值，用 float32 表示；x 是 float16，行可以比 BLOCK 长。一个实例负责一行。
# 沿着行每次前进 BLOCK 个元素，用 float32 累加，循环结束后再把 BLOCK 个部分和归约（reduce）一次。
# 越过行末的通道不得对和有任何贡献：用 other= 写明。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def row_mean_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    # [solution
    partial = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        partial += tl.load(x_ptr + row * n + j, mask=j < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(partial, axis=0) / n)
    # solution]
    # [skeleton
    #: j = tl.arange(0, BLOCK)
    #: x = tl.load(x_ptr + row * n + j)
    #: tl.store(out_ptr + row, tl.sum(x, axis=0) / BLOCK)
    # skeleton]


def row_mean(x: torch.Tensor, block: int = 64) -> torch.Tensor:
    """x [m, n], float16, contiguous → the mean of each row [m], float32."""
    m, n = x.shape
    out = torch.empty(m, dtype=torch.float32, device=x.device)
    row_mean_kernel[(m,)](x, out, n, BLOCK=block)
    return out
