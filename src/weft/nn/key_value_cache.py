"""``KeyValueCache``: the keys and values of one attention layer, of sequences that grow."""

from dataclasses import dataclass

import torch
from torch import Tensor

# B batch, S tokens that there is room for, G heads of keys and values, D head dim


@dataclass
class KeyValueCache:
    """A static cache: its memory is allocated once, so that a step can be captured in a CUDA graph.
    ``GroupedQueryAttention.cache`` makes one; the layer's call writes new tokens into it.

    Args:
        k, v: [B, G, S, D].
        lengths: int32 [B], tokens of each sequence. Read on the device: a prompt that was padded at its end is cut by setting
            them.
        filled: the most tokens that a sequence may have, on the host; 0 says that there are none.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    filled: int = 0

    @classmethod
    def empty(
        cls, batch: int, tokens: int, heads: int, head_dim: int, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "KeyValueCache":  # fmt: skip
        k, v = torch.zeros((2, batch, heads, tokens, head_dim), device=device, dtype=dtype).unbind()
        return cls(k, v, torch.zeros(batch, dtype=torch.int32, device=device))

    def reset(self) -> None:
        """Forgets all tokens."""
        self.lengths.zero_()
        self.filled = 0
