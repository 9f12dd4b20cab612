"""Checks that the operators of a mixture of experts share, and random routes to try them with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import torch_dtype
from weft.operators.call import check_device, check_tensor

LOADS = ("zipf", "even", "one", "empty")


def check_indices(
    operator: str, name: str, indices: Any, ndim: int, expected: str, other: str, reference: Tensor
) -> None:
    """Raises unless ``indices`` is an int32 tensor of ``ndim`` dimensions on the device of ``reference``."""
    check_tensor(operator, name, indices, (torch.int32,))
    check_device(operator, name, indices, other, reference)
    if indices.ndim != ndim:
        raise ValueError(f"{operator}: argument '{name}' has shape {tuple(indices.shape)}; expected {expected}")


def check_matrix(operator: str, name: str, value: Any) -> None:
    check_tensor(operator, name, value)
    if value.ndim != 2:
        raise ValueError(f"{operator}: argument '{name}' has shape {tuple(value.shape)}; expected a matrix")


def check_range(operator: str, name: str, indices: Tensor, size: int) -> None:
    """Raises ValueError for an index that is not 0 … size - 1: on a GPU this waits for the device."""
    wrong = (indices < 0) | (indices >= size)
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"{operator}: argument '{name}' has {int(indices[at])} at {at} ({int(wrong.sum())} such in all); "
            f"expected 0 … {size - 1}"
        )


# ---- random routes ---------------------------------------------------------------------------------------------------


def random_places(g: Any, t: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    """``(source [T·k], position [T, k])``: pairs of (token, slot) in random order, and where each went."""
    if device == "meta":
        source, position = (torch.zeros(s, dtype=torch.int32, device=device) for s in ((t * k,), (t, k)))
        return source, position
    order = torch.randperm(t * k, generator=g, device=g.device)
    position = torch.empty_like(order)
    position[order] = torch.arange(t * k, device=g.device)
    return (order // max(k, 1)).to(device, torch.int32), position.view(t, k).to(device, torch.int32)


def random_offsets(g: Any, rows: int, groups: int, loads: str, device: str) -> Tensor:
    """Offsets [groups + 1] of rows in groups: ``zipf`` (the n-th largest has a share of 1 / n, in random order), ``even``,
    ``one`` (all rows in one), ``empty`` (every second one has none)."""
    if device == "meta":
        return torch.zeros(groups + 1, dtype=torch.int32, device=device)
    at = g.device
    rank = torch.randperm(groups, generator=g, device=at)
    share = torch.ones(groups, device=at) if loads == "even" else 1 / (1 + rank).float()
    if loads == "one":
        share = (rank == 0).float()
    if loads == "empty":
        share = share * (torch.arange(groups, device=at) % 2)
        share[-1] += 1
    drawn = torch.multinomial(share, rows, replacement=True, generator=g) if rows else rank[:0]
    offsets = torch.zeros(groups + 1, dtype=torch_dtype("int64"), device=at)
    offsets[1:] = torch.bincount(drawn, minlength=groups).cumsum(0)
    return offsets.to(device, torch.int32)
