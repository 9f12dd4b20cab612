# TODO(en): Causal self-attention: query i sees the keys 0 … i. Mask the scores behind the query, and do not even visit tiles of
# keys that no query of the program sees: half of all the work. Here S = T.
# TODO(zh): 因果（causal）自注意力：查询 i 只看键 0 … i。把查询之后的分数屏蔽掉；对本实例所有查询都看不到的键块，连访问都不要：
# 这占全部工作量的一半。这里 S = T。
# I AM NOT DONE

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
    # [solution
    stop = tl.minimum((tl.program_id(0) + 1) * M, S)  # the last query of this program sees the keys before this one
    # solution]
    # [skeleton
    #: stop = S
    # skeleton]
    for start in range(0, stop, N):
        j = start + tl.arange(0, N)  # keys [N]
        k = tl.load(k_ptr + j[None, :] * D + d[:, None], mask=j[None, :] < S, other=0.0)  # [D, N]
        v = tl.load(v_ptr + j[:, None] * D + d[None, :], mask=j[:, None] < S, other=0.0)  # [N, D]
        s = tl.dot(q, k, input_precision="ieee") * scale  # [M, N]
        # [solution
        s = tl.where(j[None, :] <= i[:, None], s, float("-inf"))
        # solution]
        # [skeleton
        #: s = tl.where(j[None, :] < S, s, float("-inf"))
        # skeleton]
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
