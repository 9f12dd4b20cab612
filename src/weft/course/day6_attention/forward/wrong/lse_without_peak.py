# rejected at: right
# The sum is relative to the peak; its logarithm alone is not the logsumexp.
import torch
import triton
import triton.language as tl


@triton.jit
def forward_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, S, T, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    z = tl.program_id(1)  # the head
    q_ptr += z * S * D
    k_ptr += z * T * D
    v_ptr += z * T * D
    o_ptr += z * S * D
    i = tl.program_id(0) * M + tl.arange(0, M)  # queries [M]
    d = tl.arange(0, D)
    q = tl.load(q_ptr + i[:, None] * D + d[None, :], mask=i[:, None] < S, other=0.0)  # [M, D]
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for start in range(0, T, N):
        j = start + tl.arange(0, N)  # keys [N]
        k = tl.load(k_ptr + j[None, :] * D + d[:, None], mask=j[None, :] < T, other=0.0)  # [D, N]
        v = tl.load(v_ptr + j[:, None] * D + d[None, :], mask=j[:, None] < T, other=0.0)  # [N, D]
        s = tl.dot(q, k, input_precision="ieee") * scale  # [M, N]
        s = tl.where(j[None, :] < T, s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, axis=1))
        shrink = tl.exp(peak - new_peak)
        p = tl.exp(s - new_peak[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    out = acc / total[:, None]
    lse = tl.log(total)
    tl.store(o_ptr + i[:, None] * D + d[None, :], out, mask=i[:, None] < S)
    tl.store(lse_ptr + z * S + i, lse, mask=i < S)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, m: int = 32, n: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Z, S, D], k, v [Z, T, D], float32, contiguous → output [Z, S, D], logsumexp of the scaled scores [Z, S]."""
    Z, S, D = q.shape
    o, lse = torch.empty_like(q), torch.empty(Z, S, device=q.device)
    forward_kernel[(triton.cdiv(S, m), Z)](q, k, v, o, lse, S, k.shape[1], scale, M=m, N=n, D=D)
    return o, lse
