# TODO(en): The first step: scores[b, h, i, j] = scale * (q[b, h, i] · k[b, h, j]). A program makes a tile of M queries and N keys of
# one head; the third axis of the grid numbers the heads of all batches. q and k are views: a model has them as
# [B, S, H, D] and transposes, so follow their strides. Elements of a head (D) are contiguous.
# TODO(zh): 第一步：scores[b, h, i, j] = scale * (q[b, h, i] · k[b, h, j])。一个实例负责一个头的 M 个查询和 N 个键；
# 网格的第三个轴给所有批次的头编号。q 和 k 是视图：模型里它们是 [B, S, H, D]，再转置，所以要按步长走。
# 头内的 D 个元素是连续的。
# I AM NOT DONE

import torch
import triton
import triton.language as tl


@triton.jit
def scores_kernel(
    q_ptr, k_ptr, out_ptr, H, S, T, scale, q_batch, q_head, q_row, k_batch, k_head, k_row,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * M + tl.arange(0, M)[:, None]  # queries [M, 1]
    j = tl.program_id(1) * N + tl.arange(0, N)[None, :]  # keys [1, N]
    d = tl.arange(0, D)
    number = tl.program_id(2)  # of the head, among B * H
    # [solution
    b, h = number // H, number % H
    q = tl.load(q_ptr + b * q_batch + h * q_head + i * q_row + d[None, :], mask=i < S, other=0.0)  # [M, D]
    k = tl.load(k_ptr + b * k_batch + h * k_head + j * k_row + d[:, None], mask=j < T, other=0.0)  # [D, N]
    s = tl.dot(q, k, input_precision="ieee") * scale  # [M, N]
    # solution]
    # [skeleton
    #: q = tl.load(q_ptr + number * S * D + i * D + d[None, :], mask=i < S, other=0.0)  # [M, D]
    #: k = tl.load(k_ptr + number * T * D + j * D + d[:, None], mask=j < T, other=0.0)  # [D, N]
    #: s = tl.dot(q, k, input_precision="ieee")  # [M, N]
    # skeleton]
    tl.store(out_ptr + number * S * T + i * T + j, s, mask=(i < S) & (j < T))


def scores(q: torch.Tensor, k: torch.Tensor, scale: float, m: int = 32, n: int = 32) -> torch.Tensor:
    """q [B, H, S, D], k [B, H, T, D], float32, D contiguous and a power of two from 16 on → scale · q kᵀ [B, H, S, T]."""
    B, H, S, D = q.shape
    T = k.shape[2]
    out = torch.empty(B, H, S, T, device=q.device)
    grid = (triton.cdiv(S, m), triton.cdiv(T, n), B * H)
    scores_kernel[grid](q, k, out, H, S, T, scale, *q.stride()[:3], *k.stride()[:3], M=m, N=n, D=D)
    return out
