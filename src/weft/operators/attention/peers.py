"""What attention is compared with: PyTorch's two, FlashAttention-3."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Declined
from weft.operators.attention.reference import reference
from weft.operators.call import traced


def _given(named: dict[str, Any]) -> dict[str, Any]:
    """The arguments that ask for something."""
    return {n: a for n, a in named.items() if isinstance(a, Tensor) or (a is not None and a is not False and a != 0.0)}


def in_torch(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """PyTorch's ``scaled_dot_product_attention``; the plain form for what it has no argument for."""
    n = _given(named)
    beyond = {"softcap", "sinks", "score", "cu_seqlens_q", "return_lse"} & set(n)
    if beyond or (n.get("dropout") and "seed" in n) or (n.get("bias") is not None and n["bias"].dtype != q.dtype):
        return reference(q, k, v, **named)
    q, k, v = (aligned(t) for t in (q, k, v))
    top = dict(dropout_p=n.get("dropout", 0.0), scale=n.get("scale"), enable_gqa=q.shape[1] != k.shape[1])
    if n.get("causal") and q.shape[2] == k.shape[2] and not {"window", "alibi", "mask", "bias"} & set(n):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **top)
    return F.scaled_dot_product_attention(q, k, v, _one_mask(q, k, **n), **top)


def aligned(t: Tensor) -> Tensor:
    """A copy where not all rows begin on 16 bytes: PyTorch 2.11's kernels for fp32, for few queries of grouped heads, and for
    any dtype with a mask, read 16 there all the same, and fault."""
    if not t.is_cuda or traced(t):
        return t
    off = t.data_ptr() % 16 or any(n * t.element_size() % 16 for n in t.stride()[:-1])
    return t.clone(memory_format=torch.contiguous_format) if off else t


def same_as_torchs(q: Tensor, k: Tensor, **named: Any) -> bool:
    """Whether SDPA means the same by a call: it has no more options than scale and causal, where the first query and the last
    see alike. Then a compiler, which sees no kernel of ours, keeps attention in one operator."""
    more = set(_given(named)) - {"scale"}
    return not more or (more == {"causal"} and q.shape[2] == k.shape[2])


def _one_mask(
    q: Tensor, k: Tensor, causal: bool = False, window: Any = None, alibi: Tensor | None = None, mask: Tensor | None = None,
    bias: Tensor | None = None, **rest: Any,
) -> Tensor | None:  # fmt: skip
    """All that hides or adds to scores in one tensor, as SDPA wants it; None for nothing."""
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)
    left, right = window or (None, None)
    right = 0 if causal else right
    seen = mask
    for bound, distance in ((left, i - j), (right, j - i)):
        if bound is not None:
            seen = distance <= bound if seen is None else seen & (distance <= bound)
    if alibi is not None:
        slopes = -(alibi[..., None, None] * (i - j).abs()).to(q.dtype)
        bias = slopes if bias is None else bias + slopes
    if bias is None:
        return None if seen is None else torch.atleast_2d(seen)
    return torch.atleast_2d(bias if seen is None else torch.where(seen, bias, -torch.inf))


@functools.cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(16)
def _blocks(left: int | None, right: int | None, queries: int, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    shift = keys - queries

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = j >= 0
        if left is not None:
            near = near & (i + shift - j <= left)
        return near & (j - i - shift <= right) if right is not None else near

    return create_block_mask(seen, None, None, queries, keys, device=str(device))


def flex(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """PyTorch's ``flex_attention``, compiled, its block mask made once."""
    if more := sorted(set(_given(named)) - {"causal", "window", "scale"}):
        raise Declined(f"not written for flex_attention here: {', '.join(more)}")
    left, right = named.get("window") or (None, None)
    right = 0 if named.get("causal") else right
    blocks = None if left is None and right is None else _blocks(left, right, q.shape[2], k.shape[2], q.device)
    return _flex()(q, k, v, block_mask=blocks, scale=named.get("scale"), enable_gqa=q.shape[1] != k.shape[1])


def fa3(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """FlashAttention-3, forward."""
    from fa3_fwd_interface import flash_attn_func

    n = _given(named)
    if set(n) - {"causal", "window", "scale", "softcap"} or q.dtype == torch.float32:
        raise Declined("FlashAttention-3 takes 16-bit floats, causal, window, scale and softcap")
    window = tuple(-1 if w is None else w for w in n.get("window", (None, None)))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = flash_attn_func(
        q, k, v, n.get("scale"), causal="causal" in n, window_size=window, softcap=n.get("softcap", 0.0)
    )
    return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)
