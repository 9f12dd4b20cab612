# rejected at: right
# The numbers run through the heads of a batch first.
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
    b, h = number % (tl.num_programs(2) // H), number // (tl.num_programs(2) // H)
    q = tl.load(q_ptr + b * q_batch + h * q_head + i * q_row + d[None, :], mask=i < S, other=0.0)  # [M, D]
    k = tl.load(k_ptr + b * k_batch + h * k_head + j * k_row + d[:, None], mask=j < T, other=0.0)  # [D, N]
    s = tl.dot(q, k, input_precision="ieee") * scale  # [M, N]
    tl.store(out_ptr + number * S * T + i * T + j, s, mask=(i < S) & (j < T))


def scores(q: torch.Tensor, k: torch.Tensor, scale: float, m: int = 32, n: int = 32) -> torch.Tensor:
    """q [B, H, S, D], k [B, H, T, D], float32, D contiguous and a power of two from 16 on → scale · q kᵀ [B, H, S, T]."""
    B, H, S, D = q.shape
    T = k.shape[2]
    out = torch.empty(B, H, S, T, device=q.device)
    grid = (triton.cdiv(S, m), triton.cdiv(T, n), B * H)
    scores_kernel[grid](q, k, out, H, S, T, scale, *q.stride()[:3], *k.stride()[:3], M=m, N=n, D=D)
    return out
