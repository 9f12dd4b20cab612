"""Decoding on a CPU: what all layers of a step share is made once, and attention is PyTorch's on keys that are gathered."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import ops

# B sequences, Q queries of each, S keys of the longest, H heads of queries, G heads of keys and values, D head dim


@dataclass
class CpuStep:
    """Of lengths int32 [B] with the new tokens, and page tables int32 [B, pages]."""

    position: Tensor  # int64 [B, Q], of each new token
    keys: Tensor  # int64 [B, S], slots of the cache; where a sequence has no key, its first one's
    cos: Tensor  # [B · Q, R / 2]
    sin: Tensor
    there: Tensor  # int64, new tokens that have a slot; of padding none has
    slots: Tensor  # int64, where they are written
    masks: dict[Any, Tensor] = field(default_factory=dict)  # by window, [B, 1, Q, S]

    @classmethod
    def of(cls, lengths: Tensor, tables: Tensor, queries: int, page: int, angles: tuple[Tensor, Tensor]) -> "CpuStep":
        lengths = lengths.long()
        position = lengths[:, None] - queries + torch.arange(queries, device="cpu")
        slots = (tables.long()[:, :, None] * page + torch.arange(page, device="cpu")).flatten(1)
        known = (torch.arange(slots.shape[1], device="cpu") < lengths[:, None]) & (slots >= 0)
        keys = torch.where(known, slots, slots[:, :1]).clamp(min=0)
        inside = position.clamp(0, slots.shape[1] - 1)
        new = torch.where(position >= 0, slots.gather(1, inside), -1).flatten()
        there = (new >= 0).nonzero()[:, 0]
        cos, sin = (t[inside.flatten()] for t in angles)
        return cls(position, keys, cos, sin, there, new[there])

    def mask(self, window: tuple[int, None] | None, dtype: torch.dtype) -> Tensor:
        """0 for keys that a query sees, -inf for others."""
        if window not in self.masks:
            behind = self.position.clamp(min=0)[:, None, :, None] - torch.arange(self.keys.shape[1], device="cpu")
            hidden = (behind < 0) | (behind > window[0]) if window else behind < 0
            self.masks[window] = torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, -torch.inf)
        return self.masks[window]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, window: Any) -> Tensor:
        """q [B · Q, H, D], k and v [B · Q, G, D], which are appended to pages [P, page, G, D] → [B · Q, H, D]."""
        turned: Any = ops.rotary_embedding(q[None], k[None], self.cos, self.sin)
        (batch, queries), (heads, d), groups = self.position.shape, q.shape[1:], k.shape[1]
        there, gathered = self.there, []
        for new, pages in ((turned[1][0], k_pages), (v, v_pages)):
            flat = pages.flatten(0, 1)
            flat.index_copy_(0, self.slots, new if len(there) == len(new) else new[there])
            # [B, G, S, D]; index_select copies whole rows, an index goes element by element
            gathered.append(flat.index_select(0, self.keys.flatten()).view(batch, -1, groups, d).transpose(1, 2))
        # heads of a group are queries of one head: keys need no copies
        rows = turned[0][0].view(batch, queries, groups, -1, d).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = self.mask(window, q.dtype)
        if queries > 1:
            mask = mask.repeat(1, 1, heads // groups, 1)
        keys, values = gathered
        o = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
        return o.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4).reshape(batch * queries, heads, d)
