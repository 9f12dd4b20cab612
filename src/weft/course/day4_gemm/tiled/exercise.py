# TODO(en): Now a program makes a tile of C: TM x TN elements. For each step of TK along k it loads a tile of A [TM, TK] and
# one of B [TK, TN] and adds their product with tl.dot. Each loaded element is used TN (or TM) times instead of once.
# m, n and k are multiples of the tile here. On a GPU tl.dot rounds float32 to TF32 unless input_precision="ieee".
# TODO(zh): 现在一个实例负责 C 的一块（tile）：TM x TN 个元素。沿 k 每前进 TK，读入 A 的一块 [TM, TK] 和 B 的一块 [TK, TN]，
# 用 tl.dot 把它们的乘积加上去。每个读入的元素用 TN（或 TM）次，而不是一次。
# 这里 m、n、k 都是块大小的整数倍。在 GPU 上，不写 input_precision="ieee" 时 tl.dot 会把 float32 舍入成 TF32。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def tiled_kernel(a_ptr, b_ptr, c_ptr, n, k, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    rows = tl.program_id(0) * TM + tl.arange(0, TM)  # [TM] of A and C
    cols = tl.program_id(1) * TN + tl.arange(0, TN)  # [TN] of B and C
    acc = tl.zeros([TM, TN], tl.float32)
    for start in range(0, k, TK):
        inner = start + tl.arange(0, TK)  # [TK]
        # [solution
        a = tl.load(a_ptr + rows[:, None] * k + inner[None, :])  # [TM, TK]
        b = tl.load(b_ptr + inner[:, None] * n + cols[None, :])  # [TK, TN]
        acc = tl.dot(a, b, acc, input_precision="ieee")
        # solution]
        # [skeleton
        #: a = tl.load(a_ptr + rows[:, None] * k + inner[None, :])  # [TM, TK]
        # skeleton]
    tl.store(c_ptr + rows[:, None] * n + cols[None, :], acc)


def matmul(a: torch.Tensor, b: torch.Tensor, tm: int = 32, tn: int = 32, tk: int = 16) -> torch.Tensor:
    """a [m, k], b [k, n], float32, contiguous, multiples of the tile → a b [m, n]."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    tiled_kernel[(m // tm, n // tn)](a, b, c, n, k, TM=tm, TN=tn, TK=tk)
    return c
