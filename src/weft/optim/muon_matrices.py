"""From parameters to matrices and back: what Muon orthogonalises, in how few calls, on which process.

A parameter's update is cut into matrices (a fused projection by rows, a convolution flattened, stacked experts one by one).
Matrices of one shape are stacked and orthogonalised in one batched call. With a process group each process takes its share of
the matrices, and one all-gather a parameter group brings all results to all. DTensors are brought together in ``muon_shards``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STACKED = 2**28  # elements of a batched call, at most: 1 GiB of fp32 beside the parameters
HIGHER_DIMS = ("flatten", "batch")

Orthogonalise = Callable[[Tensor], Tensor]  # [B, M, N] → [B, M, N]
Each = Callable[[Sequence[Tensor]], list[Tensor]]  # matrices of any shapes


def cut(update: Tensor, higher_dims: str, split_rows: int | Sequence[int] | None) -> list[Tensor]:
    """The matrices of an update, in the order of its elements.

    Args:
        update: of a parameter's shape, two dimensions or more.
        higher_dims: more than two dimensions are *flatten*\\ ed to [M, rest], as of convolutions, or a *batch* of matrices.
        split_rows: into how many equal parts, or parts of which sizes, the rows of each matrix are cut.
    """
    if update.ndim == 2 or higher_dims == "flatten":
        matrices = [update.flatten(1)]
    else:
        matrices = list(update.flatten(0, -3))
    if split_rows is None:
        return matrices
    return [part for m in matrices for part in m.split(rows_of_parts(m.shape[0], split_rows))]


def shapes_of(shape: Sequence[int], higher_dims: str, split_rows: int | Sequence[int] | None) -> list[tuple[int, int]]:
    """Rows and columns of the matrices that :func:`cut` makes of a parameter of this shape."""
    if len(shape) == 2 or higher_dims == "flatten":
        count, rows, columns = 1, shape[0], math.prod(shape[1:])
    else:
        count, (rows, columns) = math.prod(shape[:-2]), shape[-2:]
    parts = [rows] if split_rows is None else rows_of_parts(rows, split_rows)
    return [(part, columns) for _ in range(count) for part in parts]


def cost(rows: int, columns: int) -> float:
    """Of orthogonalising a matrix: a step is about M² · N operations, M the smaller side."""
    return float(min(rows, columns)) * rows * columns


def rows_of_parts(rows: int, split_rows: int | Sequence[int]) -> list[int]:
    """Rows of each part.

    Raises:
        ValueError: parts that do not add up to the rows.
    """
    if isinstance(split_rows, int):
        if rows % split_rows:
            raise ValueError(f"split_rows is {split_rows}, which does not divide the {rows} rows of a parameter")
        return [rows // split_rows] * split_rows
    if sum(split_rows) != rows:
        raise ValueError(
            f"split_rows is {tuple(split_rows)}, {sum(split_rows)} rows together; expected the {rows} rows of a parameter"
        )
    return list(split_rows)


def joined(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """The update again, from its matrices."""
    if len(parts) == 1:
        return parts[0].reshape(shape)
    return torch.cat([part.reshape(-1) for part in parts]).view(shape)


def batched(matrices: Sequence[Tensor], orthogonalise: Orthogonalise) -> list[Tensor]:
    """Each matrix orthogonalised, those of one shape in one call."""
    found: dict[int, Tensor] = {}
    for same in by_shape(matrices):
        for index, result in zip(same, orthogonalise(torch.stack([matrices[i] for i in same])), strict=True):
            found[index] = result
    return [found[i] for i in range(len(matrices))]


def by_shape(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Places of matrices of one shape, dtype and device, no more together than ``STACKED`` elements."""
    groups: dict[Any, list[int]] = {}
    for i, m in enumerate(matrices):
        groups.setdefault((m.shape, m.dtype, m.device), []).append(i)
    cuts = []
    for (shape, _, _), places in groups.items():
        most = max(STACKED // max(shape.numel(), 1), 1)
        cuts += [places[i : i + most] for i in range(0, len(places), most)]
    return cuts


def shares(costs: Sequence[float], processes: int) -> list[list[int]]:
    """Which items each process takes: the costliest first, each to the process that has least to do (Graham 1969: at most a
    third more than the best schedule). The same on every process."""
    taken: list[list[int]] = [[] for _ in range(processes)]
    load = [(0.0, process) for process in range(processes)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        busy, process = heapq.heappop(load)
        taken[process].append(item)
        heapq.heappush(load, (busy + costs[item], process))
    return taken


def shared_out(matrices: Sequence[Tensor], each: Each, group: Any, dtype: torch.dtype) -> list[Tensor]:
    """What ``each`` makes of matrices, every process of the group of its share; results of ``dtype``. All processes must come
    with matrices of the same shapes in the same order and on devices that the group's back end takes."""
    if not matrices:
        return []
    taken = shares([cost(*m.shape) for m in matrices], dist.get_world_size(group))
    mine = taken[dist.get_rank(group)]
    longest = max(sum(matrices[i].numel() for i in share) for share in taken)
    sent = torch.zeros(longest, dtype=dtype, device=matrices[0].device)
    results = each([matrices[i] for i in mine])
    if mine:
        flat = torch.cat([r.reshape(-1) for r in results])
        sent[: len(flat)] = flat
    came = torch.empty(len(taken) * longest, dtype=dtype, device=sent.device)
    # as bytes: not every back end knows bf16
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # PyTorch 2.13's name
    all_gather(came.view(torch.uint8), sent.view(torch.uint8), group=group)
    found: dict[int, Tensor] = {}
    for share, buffer in zip(taken, came.view(len(taken), longest), strict=True):
        start = 0
        for i in share:
            found[i] = buffer[start : start + matrices[i].numel()].view(matrices[i].shape)
            start += matrices[i].numel()
    return [found[i] for i in range(len(matrices))]


def scale_of(rule: str | None, rows: int, columns: int) -> float:
    """What an orthogonal update is multiplied with: *original* (also None) √max(1, rows / columns) (Jordan et al. 2024);
    *match_rms_adamw* 0.2 · √max(rows, columns), the root mean square that AdamW's updates have (Liu et al. 2025, "Muon is
    Scalable for LLM Training", arXiv 2502.16982)."""
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(columns, 1)))
