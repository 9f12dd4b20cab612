# rejected at: right
# A query sees its own key.
import torch
import triton
import triton.language as tl


@triton.jit
def causal_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, S, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    z = tl.program_id(1)  # the head
    q_ptr += z * S * D
    k_ptr += z * S * D
    v_ptr += z * S * D
    o_ptr += z * S * D
    i = tl.program_id(0) * M + tl.arange(0, M)  # queries [M]
    d = tl.arange(0, D)
    q = tl.load(q_ptr + i[:, None] * D + d[None, :], mask=i[:, None] < S, other=0.0)  # [M, D]
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    stop = tl.minimum((tl.program_id(0) + 1) * M, S)  # the last query of this program sees the keys before this one
    for start in range(0, stop, N):
        j = start + tl.arange(0, N)  # keys [N]
        k = tl.load(k_ptr + j[None, :] * D + d[:, None], mask=j[None, :] < S, other=0.0)  # [D, N]
        v = tl.load(v_ptr + j[:, None] * D + d[None, :], mask=j[:, None] < S, other=0.0)  # [N, D]
        s = tl.dot(q, k, input_precision="ieee") * scale  # [M, N]
        s = tl.where(j[None, :] < i[:, None], s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, axis=1))
        shrink = tl.exp(peak - new_peak)
        p = tl.exp(s - new_peak[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    tl.store(o_ptr + i[:, None] * D + d[None, :], acc / total[:, None], mask=i[:, None] < S)
    tl.store(lse_ptr + z * S + i, peak + tl.log(total), mask=i < S)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, m: int = 32, n: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, v [Z, S, D], float32, contiguous → causal attention [Z, S, D], logsumexp of the scores that are seen [Z, S]."""
    Z, S, D = q.shape
    o, lse = torch.empty_like(q), torch.empty(Z, S, device=q.device)
    causal_kernel[(triton.cdiv(S, m), Z)](q, k, v, o, lse, S, scale, M=m, N=n, D=D)
    return o, lse
