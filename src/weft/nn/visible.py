"""A mask of attention that is described instead of stored."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# B batch, Sq queries, Sk keys


class Visible(Tensor):
    """A boolean mask [B, 1, Sq, Sk], true is seen, without memory.

    A query sees keys by position (``causal`` and ``window`` as for ``weft.ops.attention``); of those the ones that ``padding``
    [B, 1, 1, Sk] has true; and the tokens of its own sequence, where ``sequences`` (int32 [N + 1]) says where each begins in
    the flattened batch. Of a static cache there are ``length`` keys, a number or a tensor of one, and the last query has the
    position of the last of these. Attention reads the description. Any operator of PyTorch gets the mask itself, made at that
    moment.
    """

    causal: bool
    window: tuple[int, int | None] | None
    padding: Tensor | None
    sequences: Tensor | None
    length: Tensor | int | None

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: Any, *, causal: bool, window: tuple[int, int | None] | None = None,
        padding: Tensor | None = None, sequences: Tensor | None = None, length: Tensor | int | None = None,
    ) -> "Visible":  # fmt: skip
        made: Visible = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.causal, made.window, made.padding, made.sequences, made.length = causal, window, padding, sequences, length
        return made

    def dense(self) -> Tensor:
        """The mask as a plain tensor."""
        batch, _, queries, keys = self.shape
        last = keys if self.length is None else self.length
        at = torch.arange(queries, device=self.device)[:, None] + last - queries
        j = torch.arange(keys, device=self.device)
        seen = torch.ones(self.shape, dtype=torch.bool, device=self.device)
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        if left is not None:
            seen &= at - j <= left
        if right is not None:
            seen &= j - at <= right
        if self.padding is not None:
            seen &= self.padding
        if self.sequences is not None:
            tokens = torch.arange(batch * keys, dtype=torch.int32, device=self.device)
            number = torch.bucketize(tokens, self.sequences, right=True).view(batch, 1, 1, keys)
            seen &= number.transpose(-1, -2) == number
        return seen

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Visible({tuple(self.shape)}, causal={self.causal}, window={self.window}, padding={self.padding}, …)"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Visible, Visible.dense, (args, kwargs or {}))
        return func(*args, **kwargs)
