"""``Embedding``: PyTorch's module over weft's operator."""

import torch
from torch import Tensor

from weft import ops


class Embedding(torch.nn.Embedding):
    """As ``torch.nn.Embedding``: arguments, ``state_dict``, results and gradients, which are the same bits every time.
    ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` are PyTorch's."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            return super().forward(ids)
        rows: Tensor = ops.embedding(ids, self.weight, self.padding_idx)
        return rows
