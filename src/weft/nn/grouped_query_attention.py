"""``GroupedQueryAttention``: the attention layer of a decoder, from projections to output."""

from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.nn.key_value_cache import KeyValueCache

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

    def cache(self, batch: int, tokens: int) -> KeyValueCache:
        """An empty cache for ``batch`` sequences of up to ``tokens`` tokens, of the parameters' dtype and device."""
        weight = self.k_proj.weight
        return KeyValueCache.empty(batch, tokens, self.kv_heads, self.head_dim, weight.device, weight.dtype)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, *, mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None, cache: KeyValueCache | None = None,
    ) -> Tensor:  # fmt: skip
        """
        Args:
            x: [B, S, dim], or [total, dim] with ``cu_seqlens``.
            rotary: tables (cos, sin) of ``weft.ops.rotary_embedding``, [S, R/2] or [B, S, R/2] (packed: [total, R/2]). With a
                ``cache`` of all positions that it has room for, [tokens, R/2].
            mask: boolean, broadcastable to [B, H, S, S], true is seen; key padding is [B, 1, 1, S].
            cu_seqlens: int32 [N + 1], where packed sequences begin.
            cache: x are the next tokens of its sequences; their keys and values are written into it. The first call is
                ``weft.ops.attention``, later ones are ``weft.ops.decode_attention``, which is made for few tokens. Without
                gradients (``torch.no_grad()``), nothing waits for the device.

        Returns:
            A tensor of x's shape.

        Raises:
            ValueError: an x of other dimensions; a cache beside ``mask`` or ``cu_seqlens``, without room, or where gradients
                are recorded.
        """
        packed = cu_seqlens is not None
        if x.ndim != (2 if packed else 3):
            expected = "[total, dim] beside cu_seqlens" if packed else "[B, S, dim]"
            raise ValueError(f"{NAME}: argument 'x' has shape {tuple(x.shape)}; expected {expected}")
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(q, self.q_norm.weight, self.q_norm.eps)
            k = ops.rms_norm(k, self.k_norm.weight, self.k_norm.eps)
        if cache is not None:
            given = [name for name, t in (("mask", mask), ("cu_seqlens", cu_seqlens)) if t is not None]
            return self._cached(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rotary, cache, given)
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

    def _cached(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: KeyValueCache, given: list[str]
    ) -> Tensor:  # fmt: skip
        """q [B, H, S, D], k and v [B, G, S, D] of new tokens."""
        tokens, room = q.shape[2], cache.k.shape[2]
        if given:
            raise ValueError(
                f"{NAME}: argument '{given[0]}' beside a cache; expected None: its lengths say what is seen"
            )
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise ValueError(
                f"{NAME}: argument 'cache' where gradients are recorded; expected a call under torch.no_grad()"
            )
        if cache.filled + tokens > room:
            raise ValueError(
                f"{NAME}: argument 'cache' has room for {room} tokens, {cache.filled} taken; expected room for {tokens} more"
            )
        cos, sin = rotary or (None, None)
        cache.lengths += tokens  # which count the new ones
        turned: Any = ops.append_to_cache(k, v, cache.k, cache.v, cache.lengths, q=q, cos=cos, sin=sin)
        first, cache.filled = cache.filled == 0, cache.filled + tokens
        call: dict[str, Any] = {
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "causal": self.causal,
        }
        if first:
            o = ops.attention(turned, cache.k[:, :, :tokens], cache.v[:, :, :tokens], **call)
        else:
            o = ops.decode_attention(turned, cache.k, cache.v, lengths=cache.lengths, **call)
        y: Tensor = self.o_proj(o.transpose(1, 2).flatten(-2))
        return y
