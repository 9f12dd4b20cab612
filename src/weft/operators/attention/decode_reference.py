"""Decoding in PyTorch: standard attention over each sequence's own keys, and a paged cache gathered into one piece."""

from typing import Any

import torch
from torch import Tensor

from weft.operators.attention.reference import reference

# B batch, H heads of q, G heads of the cache, Sq queries, S keys, D and Dv head dims, P pages


def decode(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, causal: bool = True, window: Any = None,
    scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None, alibi: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, return_lse: bool = False, there: Tensor | None = None,
    **of_kernels: Any,
) -> Any:  # fmt: skip
    """``there`` [B, S]: which keys there are besides."""
    seen, distance = positions(q, k, lengths, causal, window, there)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = dequantized(k, k_scale, dtype), dequantized(v, v_scale, dtype)
    hidden = ~seen.any(2).unsqueeze(-1)  # behind a sequence's end memory may hold anything
    k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    bias = None if alibi is None else -alibi.to(dtype)[..., None, None] * distance.abs()
    return reference(q, k, v, scale=scale, softcap=softcap, sinks=sinks, mask=seen, bias=bias, return_lse=return_lse)


def positions(
    q: Tensor, k: Tensor, lengths: Tensor | None, causal: bool, window: Any, there: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[B, 1, Sq, S]: which keys a query sees, and how far behind it they are."""
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    j = torch.arange(keys, device=q.device)
    length = torch.full((batch,), keys, device=q.device) if lengths is None else lengths.long().clamp(0, keys)
    i = length[:, None] - queries + torch.arange(queries, device=q.device)
    distance = i[:, None, :, None] - j
    left, right = window or (None, None)
    right = 0 if causal else right
    seen = (j < length[:, None])[:, None, None].expand(batch, 1, queries, keys)
    if left is not None:
        seen = seen & (distance <= left)
    if right is not None:
        seen = seen & (-distance <= right)
    return seen if there is None else seen & there[:, None, None], distance


def dequantized(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[B, G, S, D] in ``dtype``, times the scale of all heads or of each."""
    x = x.to(dtype)
    return x if scale is None else x * scale.to(dtype).reshape(-1, 1, 1)


def paged_decode(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, **named: Any) -> Any:
    there = known(page_table, k_pages.shape[0]).repeat_interleave(k_pages.shape[1], 1)
    k, v = (gathered(pages, page_table) for pages in (k_pages, v_pages))
    return decode(q, k, v, lengths=lengths, there=there, **named)


def known(page_table: Tensor, pages: int) -> Tensor:
    return (page_table >= 0) & (page_table < pages)


def gathered(pages: Tensor, page_table: Tensor) -> Tensor:
    """[P, page, G, D] → [B, G, S, D]; what lies in place of a page that is none is hidden."""
    if not pages.shape[0]:
        return pages.new_zeros(
            (page_table.shape[0], pages.shape[2], page_table.shape[1] * pages.shape[1], pages.shape[3])
        )
    if pages.dtype == torch.float8_e4m3fn:  # which PyTorch does not index everywhere
        return gathered(pages.view(torch.uint8), page_table).view(pages.dtype)
    return pages[page_table.long().clamp(0, pages.shape[0] - 1)].flatten(1, 2).transpose(1, 2)
