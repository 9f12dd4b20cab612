"""What decoding is compared with: PyTorch, FlashInfer, FlashAttention-3."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Declined
from weft.operators.attention.decode_reference import decode, dequantized, gathered, known, paged_decode, positions
from weft.operators.attention.peers import aligned


def in_torch(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """PyTorch's ``scaled_dot_product_attention``; the plain form for what it has no argument for."""
    if named.get("softcap") is not None or named.get("sinks") is not None or named.get("return_lse"):
        return decode(q, k, v, **named)
    lengths, window, alibi, there = (named.get(n) for n in ("lengths", "window", "alibi", "there"))
    causal = named.get("causal", True)
    k, v = dequantized(k, named.get("k_scale"), q.dtype), dequantized(v, named.get("v_scale"), q.dtype)
    q, k, v = (aligned(t) for t in (q, k, v))
    attend = functools.partial(
        F.scaled_dot_product_attention, scale=named.get("scale"), enable_gqa=q.shape[1] != k.shape[1]
    )
    if lengths is None and window is None and alibi is None and there is None and (q.shape[2] == 1 or not causal):
        return attend(q, k, v)
    seen, distance = positions(q, k, lengths, causal, window, there)
    nothing = ~seen.any(-1, keepdim=True)  # whose softmax would be NaN
    mask = seen | nothing
    if alibi is not None:
        mask = torch.where(mask, -(alibi[..., None, None] * distance.abs()).to(q.dtype), -torch.inf)
    return attend(q, k, v, mask).masked_fill(nothing, 0.0)


def paged_in_torch(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, **named: Any
) -> Any:
    """Gathers the pages, as is done without a kernel for them."""
    if q.device.type == "meta":
        return paged_decode(q, k_pages, v_pages, page_table, lengths, **named)
    there = known(page_table, k_pages.shape[0]).repeat_interleave(k_pages.shape[1], 1)
    k, v = (gathered(pages, page_table) for pages in (k_pages, v_pages))
    return in_torch(q, k, v, lengths=lengths, there=there, **named)


def _plain(named: dict[str, Any], takes: set[str]) -> dict[str, Any]:
    """The arguments that ask for something; Declined for others than ``takes``."""
    asked = {n: a for n, a in named.items() if a is not None and a is not False}
    if more := sorted(set(asked) - takes - {"causal", "lengths", "page_table", "plan"}):
        raise Declined(f"not written for this peer here: {', '.join(more)}")
    return asked


def fa3(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """FlashAttention-3's function for caches, its number of splits by its own heuristic."""
    return _fa3(q, k.transpose(1, 2), v.transpose(1, 2), None, named)


def paged_fa3(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, **named: Any) -> Any:
    return _fa3(q, k_pages, v_pages, page_table, named)


def _fa3(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, named: dict[str, Any]) -> Any:
    from fa3_fwd_interface import flash_attn_with_kvcache

    asked = _plain(named, {"window", "scale", "softcap"})
    if q.dtype == torch.float32 or k.dtype != q.dtype:
        raise Declined("here FlashAttention-3 takes caches of 16-bit floats")
    window = tuple(-1 if w is None else w for w in asked.get("window", (None, None)))
    o = flash_attn_with_kvcache(
        q.transpose(1, 2), k, v, cache_seqlens=asked.get("lengths"), page_table=page_table, softmax_scale=asked.get("scale"),
        causal=bool(asked.get("causal")), window_size=window, softcap=asked.get("softcap", 0.0),
    )  # fmt: skip
    return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)


def flashinfer(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """FlashInfer's decoding wrapper, which takes pages: a cache in one piece is pages of 64 tokens."""
    if k.shape[2] % 64 or not k.transpose(1, 2).is_contiguous():
        raise Declined("FlashInfer takes a cache as pages: [B, S, G, D] with 64 | S")
    pages = tuple(t.transpose(1, 2).view(-1, 64, t.shape[1], t.shape[3]) for t in (k, v))
    table = torch.arange(len(pages[0]), dtype=torch.int32, device=q.device).view(q.shape[0], -1)
    lengths = named.pop("lengths", None)
    if lengths is None:
        lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)
    return paged_flashinfer(q, pages[0], pages[1], table, lengths, **named)


def paged_flashinfer(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, **named: Any
) -> Any:
    asked = _plain(named, {"scale", "softcap"})
    if q.shape[2] != 1 or q.dtype == torch.float32 or k_pages.dtype != q.dtype:
        raise Declined("here FlashInfer takes one query and caches of 16-bit floats")
    wrapper = _planned(q, k_pages, page_table, lengths, asked.get("scale"), asked.get("softcap"))
    return wrapper.run(q.squeeze(2), (k_pages, v_pages)).unsqueeze(2)


_plans: dict[Any, Any] = {}


def _planned(
    q: Tensor, k_pages: Tensor, page_table: Tensor, lengths: Tensor, scale: float | None, softcap: float | None
) -> Any:
    """The wrapper, planned once for these tensors, which is not timed: a model plans once for all its layers."""
    import flashinfer

    key = (page_table.data_ptr(), lengths.data_ptr(), q.shape, k_pages.shape, q.dtype, scale, softcap)
    if key not in _plans:
        _plans.clear()
        size = k_pages.shape[1]
        pages = (lengths + size - 1) // size
        first = F.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
        used = torch.arange(page_table.shape[1], device=q.device) < pages[:, None]
        last = ((lengths - 1) % size + 1).to(torch.int32)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(q.device), "NHD", use_tensor_cores=True)
        wrapper.plan(
            first, page_table[used].contiguous(), last, q.shape[1], k_pages.shape[2], q.shape[3], size, q_data_type=q.dtype,
            kv_data_type=k_pages.dtype, sm_scale=scale, logits_soft_cap=softcap,
        )  # fmt: skip
        _plans[key] = wrapper
    return _plans[key]


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(2**27, dtype=torch.uint8, device=device)
