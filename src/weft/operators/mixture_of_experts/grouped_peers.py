"""What others make of a grouped product: a product for each group by cuBLAS, and PyTorch's ``torch._grouped_mm``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.definition import Declined

_bounds: Any = WeakIdKeyDictionary()


def bounds_of(offsets: Tensor) -> list[int]:
    """The offsets on the host, kept while they are not written to: waiting for the device is not what this peer is timed
    for."""
    known = _bounds.get(offsets)
    if known is None or known[0] != offsets._version:
        known = _bounds[offsets] = offsets._version, offsets.tolist()
    found: list[int] = known[1]
    return found


def cublas_loop(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    source: Tensor | None = None,
    position: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """``torch.mm`` (``addmm`` with a bias) of each group that has rows, group sizes known beforehand."""
    bounds = bounds_of(offsets)
    rows = x if source is None else x.index_select(0, source)
    parts = []
    for e, matrix in enumerate(w.unbind(0)):
        part = rows[bounds[e] : bounds[e + 1]]
        parts.append(F.linear(part, matrix, None if bias is None else bias[e]))
    if bounds[-1] < rows.shape[0]:
        parts.append(parts[0].new_zeros((rows.shape[0] - bounds[-1], w.shape[1])))
    return _activated(torch.cat(parts), activation)


def torch_grouped_mm(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    source: Tensor | None = None,
    position: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """PyTorch's grouped product in one launch (sizes on the device), with a gather before and an activation after it."""
    if not hasattr(torch, "_grouped_mm"):
        raise Declined("this PyTorch has no torch._grouped_mm")
    if bias is not None:
        raise Declined("torch._grouped_mm takes no bias")
    if x.shape[1] % 8 or w.shape[1] % 8:
        raise Declined("torch._grouped_mm takes rows of multiples of 16 bytes")
    rows = x if source is None else x.index_select(0, source)
    return _activated(torch._grouped_mm(rows, w.transpose(1, 2), offs=offsets[1:]), activation)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up
