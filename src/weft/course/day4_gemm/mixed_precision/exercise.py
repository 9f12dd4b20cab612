# TODO(en): relu(A B + bias) for float16 operands, as tensor cores want them: multiply float16, accumulate in float32, do bias
# and relu on the float32 accumulator while it is in registers, and round to float16 once, at the store.
# m, n, k are multiples of the tile, so that only this idea is left.
# TODO(zh): 对 float16 操作数计算 relu(A B + bias)，按张量核心（tensor core）的用法：float16 相乘，float32 累加，
# 趁累加器还在寄存器里，用 float32 加 bias、做 relu，最后在写入时只舍入一次到 float16。
# m、n、k 都是块大小的整数倍，这样就只剩这一个想法。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def linear_relu_kernel(a_ptr, b_ptr, bias_ptr, c_ptr, n, k, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    rows = tl.program_id(0) * TM + tl.arange(0, TM)[:, None]  # [TM, 1]
    cols = tl.program_id(1) * TN + tl.arange(0, TN)[None, :]  # [1, TN]
    # [solution
    acc = tl.zeros([TM, TN], tl.float32)
    # solution]
    # [skeleton
    #: acc = tl.zeros([TM, TN], tl.float16)
    # skeleton]
    for start in range(0, k, TK):
        inner = start + tl.arange(0, TK)
        a = tl.load(a_ptr + rows * k + inner[None, :])  # [TM, TK] float16
        b = tl.load(b_ptr + inner[:, None] * n + cols)  # [TK, TN] float16
        # [solution
        acc = tl.dot(a, b, acc)
        # solution]
        # [skeleton
        #: acc += tl.dot(a, b).to(tl.float16)
        # skeleton]
    bias = tl.load(bias_ptr + cols).to(tl.float32)  # [1, TN]
    # [solution
    out = tl.maximum(acc + bias, 0.0)
    # solution]
    # [skeleton
    #: out = acc
    # skeleton]
    tl.store(c_ptr + rows * n + cols, out.to(tl.float16))


def linear_relu(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, tm: int = 32, tn: int = 32, tk: int = 32
) -> torch.Tensor:
    """a [m, k], b [k, n], bias [n], float16, contiguous → relu(a b + bias) [m, n], float16."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float16, device=a.device)
    linear_relu_kernel[(m // tm, n // tn)](a, b, bias, c, n, k, TM=tm, TN=tn, TK=tk)
    return c
