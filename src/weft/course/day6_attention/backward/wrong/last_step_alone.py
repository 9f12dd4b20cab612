# rejected at: right
# Each step replaces the gradient of the steps before.
import torch
import triton
import triton.language as tl


@triton.jit
def tile(ptr, rows, S, D: tl.constexpr):
    """[ROWS, D] of a contiguous [S, D], 0 behind its end."""
    return tl.load(ptr + rows[:, None] * D + tl.arange(0, D)[None, :], mask=rows[:, None] < S, other=0.0)


@triton.jit
def forward_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, S, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    first = tl.program_id(1) * S * D  # of the head
    i = tl.program_id(0) * M + tl.arange(0, M)  # queries [M]
    q = tile(q_ptr + first, i, S, D)
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * M, S), N):
        j = start + tl.arange(0, N)  # keys [N]
        k, v = tile(k_ptr + first, j, S, D), tile(v_ptr + first, j, S, D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(j[None, :] <= i[:, None], s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, axis=1))
        shrink, p = tl.exp(peak - new_peak), tl.exp(s - new_peak[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    d = tl.arange(0, D)
    tl.store(o_ptr + first + i[:, None] * D + d[None, :], acc / total[:, None], mask=i[:, None] < S)
    tl.store(lse_ptr + tl.program_id(1) * S + i, peak + tl.log(total), mask=i < S)


@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, S, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """
    A program owns N keys and walks over the queries that see them.
    """
    z = tl.program_id(1)
    first = z * S * D
    j = tl.program_id(0) * N + tl.arange(0, N)  # keys [N]
    k, v = tile(k_ptr + first, j, S, D), tile(v_ptr + first, j, S, D)
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    for start in range(tl.program_id(0) * N // M * M, S, M):
        i = start + tl.arange(0, M)  # queries [M]
        q, do = tile(q_ptr + first, i, S, D), tile(do_ptr + first, i, S, D)
        lse = tl.load(lse_ptr + z * S + i, mask=i < S, other=0.0)
        delta = tl.load(delta_ptr + z * S + i, mask=i < S, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [M, N]
        seen = (j[None, :] <= i[:, None]) & (i[:, None] < S)
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        dv = tl.dot(tl.trans(p), do, dv, input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")  # [M, N]
        ds = p * (dp - delta[:, None])
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    at = first + j[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + at, dk * scale, mask=j[:, None] < S)
    tl.store(dv_ptr + at, dv, mask=j[:, None] < S)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, S, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """
    A program owns M queries and walks over the keys that they see.
    """
    z = tl.program_id(1)
    first = z * S * D
    i = tl.program_id(0) * M + tl.arange(0, M)  # queries [M]
    q, do = tile(q_ptr + first, i, S, D), tile(do_ptr + first, i, S, D)
    lse = tl.load(lse_ptr + z * S + i, mask=i < S, other=0.0)
    delta = tl.load(delta_ptr + z * S + i, mask=i < S, other=0.0)
    dq = tl.zeros([M, D], tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * M, S), N):
        j = start + tl.arange(0, N)  # keys [N]
        k, v = tile(k_ptr + first, j, S, D), tile(v_ptr + first, j, S, D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [M, N]
        p = tl.where(j[None, :] <= i[:, None], tl.exp(s - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds, k, input_precision="ieee")
    at = first + i[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dq_ptr + at, dq * scale, mask=i[:, None] < S)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, m, n):
        Z, S, D = q.shape
        o, lse = torch.empty_like(q), torch.empty(Z, S, device=q.device)
        forward_kernel[(triton.cdiv(S, m), Z)](q, k, v, o, lse, S, scale, M=m, N=n, D=D)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.constants = scale, m, n
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        scale, m, n = ctx.constants
        Z, S, D = q.shape
        do = do.contiguous()
        delta = (do * o).sum(-1)  # [Z, S]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        common = (q, k, v, do, lse, delta)
        dq_kernel[(triton.cdiv(S, m), Z)](*common, dq, S, scale, M=m, N=n, D=D)
        dk_dv_kernel[(triton.cdiv(S, n), Z)](*common, dk, dv, S, scale, M=m, N=n, D=D)
        return dq, dk, dv, None, None, None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, m: int = 32, n: int = 32
) -> torch.Tensor:
    """q, k, v [Z, S, D], float32 → causal attention [Z, S, D], with gradients."""
    return Attention.apply(q.contiguous(), k.contiguous(), v.contiguous(), scale, m, n)
