# rejected at: right
# repeat puts copies one after another: query head h then meets key head h % G instead of h // (H/G).
from collections.abc import Callable

import torch
from torch import Tensor


def make_sdpa(attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> Callable[..., Tensor]:
    def sdpa(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """query [B, H, S, D], key and value [B, G, S, D], G = H unless enable_gqa → [B, H, S, D]."""
        B, H, S, D = query.shape
        if attn_mask is not None or dropout_p or not is_causal or key.shape[2] != S:
            raise NotImplementedError("this kernel is causal, without mask and dropout, for as many keys as queries")
        if enable_gqa:
            group = H // key.shape[1]
            key, value = key.repeat(1, group, 1, 1), value.repeat(1, group, 1, 1)
        q, k, v = (x.reshape(B * H, S, D) for x in (query, key, value))
        return attention(q, k, v, D**-0.5 if scale is None else scale).view(B, H, S, D)

    return sdpa
