"""``LinearCrossEntropy``: the head of a language model and its loss, without the logits."""

from typing import Any

import torch
from torch import Tensor

from weft import ops

# D width, V vocabulary


class LinearCrossEntropy(torch.nn.Linear):
    """``torch.nn.Linear(dim, vocabulary)`` and ``torch.nn.CrossEntropyLoss`` in one (``weft.ops.linear_cross_entropy``). Its
    parameters are the Linear's, so it takes the ``state_dict`` of an ``lm_head``, or shares its weight with an embedding.

    Args:
        dim, vocabulary, bias, device, dtype: as for ``torch.nn.Linear``.
        loss: options of ``weft.ops.linear_cross_entropy``: ``ignore_index``, ``label_smoothing``, ``z_loss``, ``soft_cap``,
            ``reduction``, ``chunk_rows``.
    """

    def __init__(
        self, dim: int, vocabulary: int, bias: bool = False, device: Any = None, dtype: Any = None, **loss: Any
    ) -> None:
        super().__init__(dim, vocabulary, bias, device, dtype)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        """x: [..., D]; target: [...], labels. -> the loss, or without labels the logits [..., V]."""
        if target is None:
            return super().forward(x)
        loss: Tensor = ops.linear_cross_entropy(
            x.flatten(0, -2), self.weight, target.flatten(), bias=self.bias, **self.loss
        )
        return loss.view(target.shape) if self.loss.get("reduction") == "none" else loss
