"""``GroupedQueryAttention``: the attention layer of a decoder, from projections to output."""

from typing import Any

import torch
from torch import Tensor

from weft import ops

# B batch, S tokens, H heads of queries, G heads of keys and values, D head dim, R rotated columns
NAME = "GroupedQueryAttention"


class GroupedQueryAttention(torch.nn.Module):
    """Causal self-attention in which H / G heads of queries share a head of keys and values (Ainslie et al. 2023, arXiv
    2305.13245); with one such head multi-query, with as many multi-head attention.

    Parameters are named as in Hugging Face's Llama, Qwen3 and gpt-oss, whose layers' ``state_dict`` it takes.

    Args:
        dim: width of the input and output.
        heads, kv_heads: H and G; G divides H.
        head_dim: D; dim / H if None.
        bias: of the four projections.
        qk_norm: epsilon of an RMS normalisation of each head of queries and keys, before rotation (Qwen3); None for none.
        causal, window, softcap, dropout: as for ``weft.ops.attention``; dropout in training alone.
        sinks: a learned logit for each head of a key without a value (gpt-oss).
        device, dtype: of the parameters.

    Raises:
        ValueError: heads that do not divide.
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int, *, head_dim: int | None = None, bias: bool = False,
        qk_norm: float | None = None, causal: bool = True, window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None, sinks: bool = False, dropout: float = 0.0, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{NAME}: argument 'kv_heads' is {kv_heads}; expected a divisor of heads = {heads}")
        if head_dim is None and dim % heads:
            raise ValueError(
                f"{NAME}: argument 'heads' is {heads}; expected a divisor of dim = {dim}, or head_dim beside it"
            )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim or dim // heads
        self.causal, self.window, self.softcap, self.dropout = causal, window, softcap, dropout
        new: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = torch.nn.Linear(dim, heads * self.head_dim, bias, **new)
        self.k_proj = torch.nn.Linear(dim, kv_heads * self.head_dim, bias, **new)
        self.v_proj = torch.nn.Linear(dim, kv_heads * self.head_dim, bias, **new)
        self.o_proj = torch.nn.Linear(heads * self.head_dim, dim, bias, **new)
        self.q_norm = None if qk_norm is None else torch.nn.RMSNorm(self.head_dim, qk_norm, **new)
        self.k_norm = None if qk_norm is None else torch.nn.RMSNorm(self.head_dim, qk_norm, **new)
        self.sinks = torch.nn.Parameter(torch.zeros(heads, **new)) if sinks else None

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, *, mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """
        Args:
            x: [B, S, dim], or [total, dim] with ``cu_seqlens``.
            rotary: tables (cos, sin) of ``weft.ops.rotary_embedding``, [S, R/2] or [B, S, R/2] (packed: [total, R/2]).
            mask: boolean, broadcastable to [B, H, S, S], true is seen; key padding is [B, 1, 1, S].
            cu_seqlens: int32 [N + 1], where packed sequences begin.

        Returns:
            A tensor of x's shape.
        """
        packed = cu_seqlens is not None
        if x.ndim != (2 if packed else 3):
            expected = "[total, dim] beside cu_seqlens" if packed else "[B, S, dim]"
            raise ValueError(f"{NAME}: argument 'x' has shape {tuple(x.shape)}; expected {expected}")
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(q, self.q_norm.weight, self.q_norm.eps)
            k = ops.rms_norm(k, self.k_norm.weight, self.k_norm.eps)
        if rotary is not None:
            q, k = (t[None] for t in (q, k)) if packed else (q, k)  # [B, S, H, D]
            q, k = ops.rotary_embedding(q, k, *rotary)
            q, k = (t[0] for t in (q, k)) if packed else (q, k)
        if not packed:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, S, D], read in place
        o = ops.attention(
            q, k, v, causal=self.causal, window=self.window, softcap=self.softcap, sinks=self.sinks, mask=mask,
            dropout=self.dropout if self.training else 0.0, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        )  # fmt: skip
        y: Tensor = self.o_proj((o if packed else o.transpose(1, 2)).flatten(-2))
        return y
