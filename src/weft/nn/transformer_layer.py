"""``TransformerLayer``: a layer of a Llama-style decoder."""

from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.nn.feed_forward import SwiGLU
from weft.nn.grouped_query_attention import GroupedQueryAttention
from weft.nn.key_value_cache import KeyValueCache
from weft.nn.norms import RMSNorm

# B batch, S tokens, R rotated columns


class TransformerLayer(torch.nn.Module):
    """Attention and a SwiGLU layer, each behind an RMSNorm and added to its input; the first addition and the norm behind it
    are one pass. Parameters are named as in Hugging Face's Llama and Qwen3, whose layers' ``state_dict`` it takes.

    Args:
        dim, heads, kv_heads: of :class:`~weft.nn.GroupedQueryAttention`.
        hidden: of :class:`~weft.nn.SwiGLU`.
        eps: of both norms.
        mlp: another feed-forward layer in SwiGLU's place, such as :class:`~weft.nn.MixtureOfExperts`.
        fp8: of the feed-forward layer's products.
        device, dtype: of the parameters.
        attention: further arguments of attention: ``head_dim``, ``bias``, ``qk_norm``, ``window``, ``sinks``, …
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int, hidden: int, *, eps: float = 1e-6, mlp: torch.nn.Module | None = None,
        fp8: bool = False, device: Any = None, dtype: Any = None, **attention: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        new: dict[str, Any] = {"device": device, "dtype": dtype}
        self.input_layernorm = RMSNorm(dim, eps, **new)
        self.self_attn = GroupedQueryAttention(dim, heads, kv_heads, **attention, **new)
        self.post_attention_layernorm = RMSNorm(dim, eps, **new)
        self.mlp = SwiGLU(dim, hidden, fp8=fp8, **new) if mlp is None else mlp

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, *, mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None, cache: KeyValueCache | None = None,
    ) -> Tensor:  # fmt: skip
        """x: [B, S, dim], or [total, dim] with ``cu_seqlens``; the others as for attention. -> x's shape."""
        attended = self.self_attn(self.input_layernorm(x), rotary, mask=mask, cu_seqlens=cu_seqlens, cache=cache)
        norm = self.post_attention_layernorm
        y, summed = ops.add_rms_norm(attended, x, norm.weight, norm.eps)
        added: Tensor = summed + self.mlp(y)
        return added
