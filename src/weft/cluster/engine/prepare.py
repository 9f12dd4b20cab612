"""What the compiled loops need: nodes and their trees, jobs and their classes, and a loop of its own for each mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster import ties as tie_rules
from weft.cluster.engine import (
    allocate,
    backfill,
    conservative,
    heaps,
    holes,
    promise,
    run,
    shelves,
    standing,
    timeline,
)
from weft.cluster.engine import node as engine
from weft.cluster.engine import tree as trees
from weft.cluster.model import MOST_SHARED, WHOLE, Cluster, Jobs
from weft.cluster.placement import TIGHTEST, Placement
from weft.cluster.placements import PLACEMENTS
from weft.cluster.result import REASONS

Advance = Callable[[int], int]  # runs up to so many moments; says whether anything is left to happen


def state(
    jobs: Jobs,
    cluster: Cluster,
    pieces: NDArray[Any],
    members: NDArray[np.int64],
    placing: Placement,
    ties: str,
    seed: int,
    detailed: bool,
) -> tuple[NDArray[Any], ...]:
    """The engine's nodes, and their index, to be built when it is first asked (engine/index.py)."""
    count = len(cluster)
    nodes = np.zeros(count, engine.NODE)
    for name in ("gpus", "gpu_type", "gpu_memory", "cpu", "memory"):
        nodes[name] = getattr(cluster, name)
    for name in ("gpus", "cpu", "memory"):
        nodes[f"free_{name}"] = nodes[name]
    nodes["groups"] = members
    nodes["note"] = np.nan
    _number_racks(nodes, cluster)
    nodes["milli"] = np.where(np.arange(MOST_SHARED) < nodes["gpus"][:, None], WHOLE, 0)
    room = np.array(
        [nodes["gpus"][members >> g & 1 > 0].sum() * WHOLE for g in range(int(members.max(initial=0)).bit_length())]
    )
    levels, width = [0], count
    while True:
        padded = 1 if width == 1 and len(levels) > 1 else -(-width // trees.FAN) * trees.FAN
        levels.append(levels[-1] + padded)
        if padded == 1:
            break
        width = padded // trees.FAN
    meta = np.zeros(engine.META, np.int64)
    meta[engine.PLACEMENT], meta[engine.TIES] = list(PLACEMENTS).index(placing.name), tie_rules.RULES.index(ties)
    meta[engine.RANDOM_STATE], meta[engine.DETAILED] = tie_rules.first_state(seed), detailed
    rules = {TIGHTEST: engine.BY_TIGHTNESS, "random": engine.BY_CHANCE}
    meta[engine.TOPOLOGY], meta[engine.RACKS] = placing.topology, len(np.unique(cluster.rack))
    meta[engine.GPU_RULE] = rules.get(placing.gpu, engine.BY_SCORE)
    log = np.zeros(1 << max(10, (count - 1).bit_length()), np.int32)
    context = placing.context(jobs, cluster)
    plain = not detailed and not placing.topology and ties != "random"
    if plain and (found := shelves.orders(placing.score, context, pieces, nodes)):
        ways, shelf_of, meta[engine.SHELVES] = found
        best = shelves.rows(shelf_of, int(meta[engine.SHELVES]), levels[-1], pieces)
        meta[engine.FEWEST], meta[engine.READ] = pieces["gpus"].min(), -1
    else:
        best = np.full((len(pieces), levels[-1]), trees.NEVER)
        ways = np.ones((len(pieces), levels[-1] if ties == "random" else 1), np.int32)
    return nodes, best, ways, np.array(levels, np.int64), log, meta, context, room.astype(np.int64)


def _number_racks(nodes: NDArray[Any], cluster: Cluster) -> None:
    """Racks by number, and their domains in that order."""
    order = np.lexsort((cluster.domain, cluster.rack))
    nodes["member"] = order
    for name, number in (("rack", cluster.rack[order]), ("domain", cluster.domain[order])):
        begins = np.flatnonzero(np.diff(number, prepend=-1))
        nodes[f"{name}_end"][: len(begins)] = np.append(begins[1:], len(nodes))
        nodes[name][order] = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(nodes)))
        nodes[f"{name}_free"][: len(begins)] = np.bincount(nodes[name], cluster.gpus * WHOLE)


@dataclass
class Tables:
    """What every loop works on.

    Args:
        state: of :func:`state`.
        pieces, classes: of :func:`weft.cluster.engine.kinds.classify`.
        jobs: the engine's jobs.
        of_rank: the job of each rank.
        where: the node of each piece, from a job's ``slot``.
        on: in a detailed run beside it the GPUs that are taken, a bit for each.
        running: the heap of completions.
        progress: counters.
        total, waits: seconds that each class, and each job, has waited for each of REASONS.
        until: seconds; nothing later happens.
    """

    state: tuple[NDArray[Any], ...]
    pieces: NDArray[Any]
    classes: NDArray[Any]
    jobs: NDArray[Any]
    of_rank: NDArray[np.int32]
    where: NDArray[np.int32]
    on: NDArray[np.int32]
    running: NDArray[Any]
    progress: NDArray[np.int64]
    total: NDArray[np.float64]
    waits: NDArray[np.float64]
    until: float

    @classmethod
    def of(
        cls, state: tuple[NDArray[Any], ...], pieces: NDArray[Any], classes: NDArray[Any], jobs: NDArray[Any],
        of_rank: NDArray[np.int32], detailed: bool, until: float, spare: int = 0,
    ) -> Tables:  # fmt: skip
        """For the jobs and classes of :func:`table_of`; ``spare``: so many entries of ``where`` more."""
        places = int((classes["count"] + (classes["rest"] >= 0))[jobs["cls"]].sum())
        where = np.full(places + spare, -1, np.int32)
        on = np.zeros(places if detailed else 0, np.int32)
        total, waits = (np.zeros((count, len(REASONS))) for count in (len(classes), len(jobs)))
        running, progress = np.zeros(len(jobs), run.COMPLETION), np.zeros(standing.PROGRESS, np.int64)
        return cls(state, pieces, classes, jobs, of_rank, where, on, running, progress, total, waits, until)


def table_of(
    jobs: Jobs,
    rows: NDArray[Any],
    cls: NDArray[Any],
    classes: NDArray[Any],
    ranks: NDArray[Any],
    row: np.dtype[Any] = run.JOB,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The engine's jobs, and the job of each rank. ``classes`` learn their part of the heap."""
    table = np.zeros(len(rows), row)
    for name in ("submit", "duration", "estimate"):
        table[name] = getattr(jobs, name)[rows]
    table["start"], table["begins"], table["cls"] = np.nan, np.nan, cls[rows]
    of_rank = np.argsort(ranks).astype(np.int32)
    table["rank"][of_rank] = np.arange(len(rows), dtype=np.int32)
    pieces = (classes["count"] + (classes["rest"] >= 0))[table["cls"]]
    table["slot"] = np.cumsum(pieces) - pieces
    classes["jobs"] = np.bincount(table["cls"], minlength=len(classes))
    classes["first"] = classes["begin"] = np.cumsum(classes["jobs"]) - classes["jobs"]
    return table, of_rank


def never(state: tuple[NDArray[Any], ...], pieces: NDArray[Any], classes: NDArray[Any]) -> list[int]:
    """Classes that an empty cluster could not run."""
    nodes, best, ways, levels, log, meta, context, room = state
    random = meta[engine.RANDOM_STATE]
    lacking = []
    for c in range(len(classes)):
        where, on = np.zeros((2, int(classes[c]["count"]) + 1), np.int32)
        if allocate.place(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, 0):
            allocate.give_back(nodes, pieces, log, meta, room, classes, c, where, on, 0)
        else:
            lacking.append(c)
    meta[engine.RANDOM_STATE] = random
    return lacking


def plain(tables: Tables, strict: bool) -> Advance:
    """The loop without reservations: ``advance(most)``."""
    t, (nodes, best, ways, levels, log, meta, context, room) = tables, tables.state
    heap = np.zeros(len(t.jobs), np.int32)
    active, ready = np.zeros((2, len(t.classes)), np.int64)
    return lambda most: run.advance(
        t.jobs, t.of_rank, heap, t.running, t.progress, t.where, t.on, nodes, t.pieces, best, ways, levels, log, meta, context,
        room, t.classes, t.total, t.waits, active, ready, strict, t.until, most,
    )  # fmt: skip


def easy(tables: Tables) -> Advance:
    """The loop with a reservation for the head. The tables have every kind and class twice."""
    t, (nodes, best, ways, levels, log, meta, context, room) = tables, tables.state
    table, classes, pieces, where, of_rank = t.jobs, t.classes, t.pieces, t.where, t.of_rank
    by_class = of_rank[np.argsort(table["cls"][of_rank], kind="stable")]
    half = len(classes) // 2
    table["place"][by_class] = np.arange(len(table)) - classes["first"][table["cls"][by_class]]
    sizes = []
    for count in classes["jobs"][:half].tolist():
        sizes.append(count)
        while count > 1:
            count = -(-count // trees.FAN)
            sizes[-1] += count
    classes["begin"][:half] = np.cumsum(sizes) - sizes
    tree = np.full(sum(sizes), np.inf)
    first, places = np.full(len(nodes), -1, np.int32), np.zeros(len(where), promise.PLACE)
    soon, read = np.full((len(pieces) // 2, levels[-1]), trees.NEVER), np.full(len(pieces) // 2, -1, np.int64)
    most_pieces = int((classes["count"] + 1).max(initial=1))
    promised, held = np.zeros((2, most_pieces), np.int64)
    moments, may, made = np.zeros(most_pieces), np.zeros(half, np.int64), np.full(backfill.PROMISE, -1.0)
    return lambda most: backfill.advance(
        table, by_class, tree, t.running, t.progress, where, t.on, first, places, soon, read, promised, held, moments, may,
        made, nodes, pieces, best, ways, levels, log, meta, context, room, classes, t.total, t.waits, t.until, most,
    )  # fmt: skip


def planned(tables: Tables) -> Advance:
    """The loop with a plan for everyone. ``where`` has room for one more job at its end."""
    t, (nodes, best, ways, levels, log, meta, context, room) = tables, tables.state
    table, where, count = t.jobs, t.where, len(nodes)
    first, stays = np.full((count, 2), -1, np.int32), np.zeros(len(where), timeline.STAY)
    queue, due = (np.zeros(len(table), kind) for kind in (np.int64, heaps.ENTRY))
    counts = np.zeros(conservative.COUNTS, np.int64)
    ready, able, values = np.zeros(count), np.zeros(count, np.int64), np.zeros(count)
    lengths = np.maximum(table["estimate"], conservative.LEAST_S)
    asked, t.pieces["level"] = np.unique(t.pieces["gpus"], return_inverse=True)
    spans = lengths  # where no job can run
    if len(lengths):
        spans = np.unique(np.quantile(lengths, np.arange(holes.MOST_SPANS) / holes.MOST_SPANS, method="lower"))
    opens = np.full((len(asked) * len(spans), levels[-1]), trees.NEVER)
    looked, scratch = np.full(count, trees.NEVER), np.zeros((2, len(asked)))
    changed = np.append(np.arange(count), count)  # nobody has looked at any
    overruns = bool((lengths < table["duration"]).any())
    return lambda most: conservative.advance(
        table, queue, due, counts, t.running, t.progress, where, t.on, first, stays, asked, spans, opens, looked, changed,
        scratch, ready, able, values, overruns, nodes, t.pieces, best, ways, levels, log, meta, context, room, t.classes,
        t.total, t.waits, t.until, most,
    )  # fmt: skip


def twice(pieces: NDArray[Any], classes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Kinds and classes once more, for jobs that outlast a reservation."""
    more, again = pieces.copy(), classes.copy()
    more["outlasting"] = True
    again["piece"] += len(pieces)
    again["rest"] += np.where(again["rest"] >= 0, len(pieces), 0)
    return np.concatenate([pieces, more]), np.concatenate([classes, again])
