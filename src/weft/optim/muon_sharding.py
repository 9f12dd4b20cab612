"""Muon on several processes: who orthogonalizes which matrices, and whole matrices from shards.

Replicas (DDP, replicated mesh dimensions) share the work out by matrices: one all-gather brings all results to all.

DTensors, as FSDP2 and tensor parallelism make them: a shard of the polar factor is no function of a shard of the matrix. So for
each mesh dimension that parameters are sharded on, every process takes some of them whole: all others send it their shards (one
all-to-all), it works on them and sends each process its shard of the result back (another). That moves a shard's size twice,
where an all-gather would bring all matrices to all.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Work = Callable[[Sequence[Tensor]], list[Tensor]]  # whole matrices or updates → results of the same shapes

# ---- replicas --------------------------------------------------------------------------------------------------------


def cost(rows: int, columns: int) -> float:
    """Of orthogonalising a matrix: a step is about M² · N operations, M the smaller side."""
    return float(min(rows, columns)) * rows * columns


def assign(costs: Sequence[float], processes: int) -> list[list[int]]:
    """Which items each process takes: the costliest first, each to the process that has least to do (Graham 1969: at most a
    third more than the best schedule). The same on every process."""
    taken: list[list[int]] = [[] for _ in range(processes)]
    load = [(0.0, process) for process in range(processes)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        busy, process = heapq.heappop(load)
        taken[process].append(item)
        heapq.heappush(load, (busy + costs[item], process))
    return taken


def share_work(matrices: Sequence[Tensor], work: Work, group: Any, dtype: torch.dtype) -> list[Tensor]:
    """``work`` of matrices, every process of the group of its share; results of ``dtype``. All processes must pass matrices of
    the same shapes in the same order, on devices that the group's back end supports."""
    if not matrices:
        return []
    taken = assign([cost(*m.shape) for m in matrices], dist.get_world_size(group))
    mine = taken[dist.get_rank(group)]
    longest = max(sum(matrices[i].numel() for i in share) for share in taken)
    sent = torch.zeros(longest, dtype=dtype, device=matrices[0].device)
    results = work([matrices[i] for i in mine])
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


# ---- shards ------------------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """A mesh dimension that parameters are sharded on."""

    group: Any
    dim: int  # of the parameter, that it is cut along
    coordinate: int  # of this process


class Layout(NamedTuple):
    """How a parameter is distributed over its mesh."""

    cuts: tuple[Cut, ...]  # the last one made comes first
    replicas: tuple[Any, ...]  # process groups that have the same shard


class Shard(NamedTuple):
    """One parameter's update on this process."""

    update: Tensor
    shapes: tuple[torch.Size, ...]  # this shard's; what the processes of the first cut have together; of the second …
    cost: float


def layout_of(p: Any, batch: bool) -> tuple[Layout, tuple[torch.Size, ...]]:
    """A DTensor's layout, and the shapes from its shard's to the whole one's, without mesh dimensions of one process.

    Args:
        p: a DTensor of two dimensions or more.
        batch: leading dimensions count matrices; cuts along those leave matrices whole, and are left out too.

    Raises:
        NotImplementedError: placements other than shards in order, as ``torch.chunk`` makes them, and replicas.
    """
    mesh, here = p.device_mesh, p.device_mesh.get_coordinate()
    where = f"a parameter of shape {tuple(p.shape)} is placed as {p.placements} on {mesh}"
    placed = [(i, place) for i, place in enumerate(p.placements) if mesh.size(i) > 1]
    replicas = tuple(mesh.get_group(i) for i, place in placed if place.is_replicate())
    sharded = [(i, place) for i, place in placed if not place.is_replicate()]
    if any(not hasattr(place, "dim") or place.is_partial() for _, place in sharded):
        raise NotImplementedError(f"Muon: {where}; expected shards and replicas")
    # FSDP cuts after tensor parallelism, though its mesh dimension comes first: such a shard is strided
    order = sorted(sharded, key=lambda at: hasattr(at[1], "split_factor"))
    for i, place in sharded:
        before = [mesh.size(j) for j, other in sharded if j > i and other.dim == place.dim]
        if hasattr(place, "split_factor") and (len(before) != 1 or before[0] != place.split_factor):
            raise NotImplementedError(f"Muon: {where}; expected strides of one other shard of the same dimension")
    shape, shapes, cuts = list(p.shape), [list(p.shape)], []
    for i, place in order:
        dim = place.dim % p.ndim
        shape[dim] = rows_at(shape[dim], mesh.size(i))[here[i]]
        if not (batch and dim < p.ndim - 2):
            cuts.append(Cut(mesh.get_group(i), dim, here[i]))
            shapes.append(list(shape))
    if tuple(shape) != tuple(p.to_local().shape):
        raise NotImplementedError(
            f"Muon: {where}, and a shard has the shape {tuple(p.to_local().shape)}; expected {tuple(shape)}, as of torch.chunk"
        )
    if batch:
        shapes = [[*shape[:-2], *s[-2:]] for s in shapes]
    return Layout(tuple(reversed(cuts)), replicas), tuple(map(torch.Size, reversed(shapes)))


def rows_at(rows: int, processes: int) -> list[int]:
    """Rows of each process's shard."""
    most = -(-rows // processes)
    return [max(min(most, rows - at * most), 0) for at in range(processes)]


def work_on_whole(shards: Sequence[Shard], cuts: Sequence[Cut], work: Work, dtype: torch.dtype) -> list[Tensor]:
    """This process's shards of what ``work`` makes of the whole updates, of ``dtype``.

    Args:
        shards: of one dtype and device; the same parameters in the same order on all processes.
        cuts: how all of them are cut.
        work: is called on every process once, with the updates that it has taken.
    """
    if not shards:
        return []
    if not cuts:
        return [r.to(dtype) for r in work([s.update for s in shards])]
    cut = cuts[0]
    processes = dist.get_world_size(cut.group)
    taken = assign([s.cost for s in shards], processes)
    mine = taken[cut.coordinate]

    def shapes_at(i: int) -> list[torch.Size]:
        """Of a parameter's shards at each process."""
        whole = shards[i].shapes[1]
        return [
            torch.Size((*whole[: cut.dim], rows, *whole[cut.dim + 1 :])) for rows in rows_at(whole[cut.dim], processes)
        ]

    sent = [shards[i].update for share in taken for i in share]
    leaving = [sum(shards[i].update.numel() for i in share) for share in taken]
    shapes = [[shapes_at(i)[process] for i in mine] for process in range(processes)]
    came = all_to_all(sent, leaving, shapes, shards[0].update, cut.group)
    wholes = [
        Shard(torch.cat(pieces, cut.dim), shards[i].shapes[1:], shards[i].cost)
        for i, pieces in zip(mine, zip(*came, strict=True), strict=True)
    ]
    results = work_on_whole(wholes, cuts[1:], work, dtype)
    sizes = [rows_at(shards[i].shapes[1][cut.dim], processes) for i in mine]
    back = [
        result.narrow(cut.dim, [0, *accumulate(rows)][process], rows[process])
        for process in range(processes)
        for result, rows in zip(results, sizes, strict=True)
    ]
    leaving = [sum(shape.numel() for shape in row) for row in shapes]
    like = shards[0].update.new_empty(0, dtype=dtype)
    returned = all_to_all(back, leaving, [[shards[i].update.shape for i in share] for share in taken], like, cut.group)
    found = {i: r for share, row in zip(taken, returned, strict=True) for i, r in zip(share, row, strict=True)}
    return [found[i] for i in range(len(shards))]


def all_to_all(
    sent: Sequence[Tensor], leaving: Sequence[int], shapes: Sequence[Sequence[torch.Size]], like: Tensor, group: Any
) -> list[list[Tensor]]:
    """One all-to-all of tensors of the dtype and on the device of ``like``.

    Args:
        sent: in the order of the processes that get them.
        leaving: elements for each process.
        shapes: of what comes from each process.
    """
    size = like.element_size()
    out = torch.cat([like.new_empty(0), *(t.reshape(-1) for t in sent)])
    coming = [sum(shape.numel() for shape in row) for row in shapes]
    came = like.new_empty(sum(coming))
    dist.all_to_all_single(  # as bytes: not every back end knows bf16
        came.view(torch.uint8),
        out.view(torch.uint8),
        [size * n for n in coming],
        [size * n for n in leaving],
        group=group,
    )
    return [
        [piece.view(shape) for piece, shape in zip(part.split([s.numel() for s in row]), row, strict=True)]
        for part, row in zip(came.split(coming), shapes, strict=True)
    ]
