# TODO(en): Models call F.scaled_dot_product_attention. Make a function with its arguments from your kernel,
# attention(q, k, v, scale): causal, on q, k, v [Z, S, D]. Three things differ: the shape [B, H, S, D]; the scale, 1/√D where None; and
# grouped heads (enable_gqa): H query heads share G key heads, each key head serves H/G neighbouring query heads.
# What your kernel cannot do must raise NotImplementedError, never compute something else: a mask, dropout, no causal
# mask, S unequal T.
# TODO(zh): 模型调用的是 F.scaled_dot_product_attention。请用你的核函数 attention(q, k, v, scale)（因果，q、k、v 为 [Z, S, D]）
# 做一个参数相同的函数。有三处不同：形状是 [B, H, S, D]；scale 为 None 时取 1/√D；
# 以及分组的头（enable_gqa）：H 个查询头共用 G 个键头，每个键头服务相邻的 H/G 个查询头。
# 核函数做不到的，必须抛出 NotImplementedError，绝不能算成别的：掩码、dropout、没有因果掩码、S 不等于 T。
# I AM NOT DONE

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
        # [solution
        if attn_mask is not None or dropout_p or not is_causal or key.shape[2] != S:
            raise NotImplementedError("this kernel is causal, without mask and dropout, for as many keys as queries")
        if enable_gqa:
            group = H // key.shape[1]
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        q, k, v = (x.reshape(B * H, S, D) for x in (query, key, value))
        return attention(q, k, v, D**-0.5 if scale is None else scale).view(B, H, S, D)
        # solution]
        # [skeleton
        #: q, k, v = (x.reshape(B * H, S, D) for x in (query, key, value))
        #: return attention(q, k, v, scale).view(B, H, S, D)
        # skeleton]

    return sdpa
