"""``scaled_dot_product_attention``: the call of ``torch.nn.functional`` with its conventions, on ``weft.ops.attention``."""

import torch
from torch import Tensor

from weft import ops
from weft.operators.checks import check_flag, check_shape, check_tensor

# H heads of query, G heads of key and value, L queries, S keys, E and Ev head dims
NAME = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What ``torch.nn.functional.scaled_dot_product_attention`` computes, by ``weft.ops.attention``.

    A query that a mask leaves no key gets zeros, and zero gradients. ``torch.nn.attention.sdpa_kernel`` has no say in it.

    Args:
        query: [..., H, L, E].
        key, value: [..., G, S, E] and [..., G, S, Ev]. Dimensions before the last two broadcast, as PyTorch's do.
        attn_mask: broadcastable to [..., H, L, S]; boolean, true is seen, or of query's dtype or float32, added to the scores.
        dropout_p: probability of setting a weight to 0, also in evaluation.
        is_causal: query i sees keys 0 … i (*top-left*; ``weft.ops.attention`` aligns the last query with the last key).
        scale: of the products; E**-0.5 if None.
        enable_gqa: G divides H, and head h of the queries reads head h // (H / G).

    Returns:
        [..., H, L, Ev] of query's dtype.

    Raises:
        TypeError, ValueError: tensors, shapes or options that do not fit; ``attn_mask`` beside ``is_causal``.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_tensor(NAME, name, t)
        check_shape(NAME, name, t, t.ndim >= (3 if enable_gqa else 2), "[..., heads, length, head dim]")
    check_flag(NAME, "is_causal", is_causal)
    if is_causal and attn_mask is not None:
        raise ValueError(f"{NAME}: argument 'attn_mask' is given beside is_causal=True; expected one of them")
    if attn_mask is not None:
        floats = tuple(dict.fromkeys((torch.bool, query.dtype, torch.float32)))
        check_tensor(NAME, "attn_mask", attn_mask, floats)
    own = 3 if enable_gqa else 2  # dimensions of each tensor's own: they do not broadcast
    try:
        lead = torch.broadcast_shapes(*(t.shape[:-own] for t in (query, key, value)))
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(f"{NAME}: query, key and value have shapes {shapes}; expected ones that broadcast") from None
    query, key, value = (t.expand(*lead, *t.shape[-own:]) for t in (query, key, value))
    shape = query.shape
    if attn_mask is not None and max(attn_mask.ndim, len(shape)) > 4:
        attn_mask = attn_mask.expand(*shape[:-1], key.shape[-2]).flatten(0, -4)
    query, key, value = (_four_dimensions(t) for t in (query, key, value))

    window = None
    queries, keys = query.shape[-2], key.shape[-2]
    if is_causal and queries < keys:  # the others are seen by no query
        key, value = key[:, :, :queries], value[:, :, :queries]
    elif is_causal and queries > keys:
        window, is_causal = (None, queries - keys), False
    mask, bias = (attn_mask, None) if attn_mask is None or attn_mask.dtype == torch.bool else (None, attn_mask)
    o: Tensor = ops.attention(
        query, key, value, causal=is_causal, window=window, scale=scale, mask=mask, bias=bias, dropout=dropout_p
    )
    return o.reshape(*shape[:-1], o.shape[-1])


def _four_dimensions(t: Tensor) -> Tensor:
    return t[(None,) * (4 - t.ndim)] if t.ndim <= 4 else t.flatten(0, -4)
