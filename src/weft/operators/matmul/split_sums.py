"""Products whose sums over K are shared out over programs, in two launches: fp32 parts, then their sum in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.operators import partial_sums
from weft.operators.launch import Plan


class SplitPlan:
    """``products`` into fp32 [split, elements], then ``total``. Call with the operands and the result, which comes last."""

    def __init__(self, products: Plan, split: int, elements: int):
        self.products, self.shape = products, (split, elements)
        self.total = partial_sums.plan(split, elements)

    def __call__(self, *tensors: Tensor) -> None:
        *operands, y = tensors
        parts = torch.empty(self.shape, dtype=torch.float32, device=y.device)
        self.products(*operands, parts)
        self.total(parts, y)


def in_parts(products: Plan, split: int, elements: int) -> Plan | SplitPlan:
    """The launches of a product with ``elements`` results whose sums are split; one alone where they are not."""
    return products if split == 1 else SplitPlan(products, split, elements)


def parts_of(wanted: int, steps: int) -> int:
    """How many parts of whole steps a sum has, at most ``wanted``, none of them empty."""
    each = -(-steps // max(min(wanted, steps), 1))
    return max(-(-steps // max(each, 1)), 1)
