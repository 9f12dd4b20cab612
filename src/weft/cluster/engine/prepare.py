"""What the compiled loops need: nodes and their trees, jobs and their classes, and a loop of its own for each mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster import ties as tie_rules
from weft.cluster.engine import backfill, conservative, promise, run
from weft.cluster.engine import index as trees
from weft.cluster.engine import node as engine
from weft.cluster.model import MOST_SHARED, WHOLE, Cluster, Jobs
from weft.cluster.placement import TIGHTEST, Placement
from weft.cluster.placements import PLACEMENTS


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
    """The engine's nodes, and its trees, to be built when they are first asked (engine/index.py)."""
    count = len(cluster)
    nodes = np.zeros(count, engine.NODE)
    for name in ("gpus", "gpu_type", "gpu_memory", "cpu", "memory"):
        nodes[name] = getattr(cluster, name)
    for name in ("gpus", "cpu", "memory"):
        nodes[f"free_{name}"] = nodes[name]
    nodes["groups"] = members
    nodes["note"] = np.nan
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
    meta[engine.GPU_RULE] = rules.get(placing.gpu, engine.BY_SCORE)
    best = np.full((len(pieces), levels[-1]), trees.NEVER)
    ways = np.ones((len(pieces), levels[-1] if ties == "random" else 1), np.int32)
    log = np.zeros(1 << max(10, (count - 1).bit_length()), np.int32)
    context = placing.context(jobs, cluster)
    return nodes, best, ways, np.array(levels, np.int64), log, meta, context, room.astype(np.int64)


def table_of(
    jobs: Jobs, rows: NDArray[Any], cls: NDArray[Any], classes: NDArray[Any], ranks: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The engine's jobs, the job of each rank, and room for all pieces' nodes. ``classes`` learn their part of the heap."""
    table = np.zeros(len(rows), run.JOB)
    for name in ("submit", "duration", "estimate"):
        table[name] = getattr(jobs, name)[rows]
    table["start"], table["begins"], table["cls"] = np.nan, np.nan, cls[rows]
    of_rank = np.argsort(ranks).astype(np.int32)
    table["rank"][of_rank] = np.arange(len(rows), dtype=np.int32)
    pieces = (classes["count"] + (classes["rest"] >= 0))[table["cls"]]
    table["slot"] = np.cumsum(pieces) - pieces
    classes["jobs"] = np.bincount(table["cls"], minlength=len(classes))
    classes["first"] = classes["begin"] = np.cumsum(classes["jobs"]) - classes["jobs"]
    return table, of_rank, np.full(int(pieces.sum()), -1, np.int32)


def never(state: tuple[NDArray[Any], ...], pieces: NDArray[Any], classes: NDArray[Any]) -> list[int]:
    """Classes that an empty cluster could not run."""
    nodes, best, ways, levels, log, meta, context, room = state
    random = meta[engine.RANDOM_STATE]
    lacking = []
    for c in range(len(classes)):
        where, on = np.zeros((2, int(classes[c]["count"]) + 1), np.int32)
        if run.place(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, 0):
            run.give_back(nodes, pieces, log, meta, room, classes, c, where, on, 0)
        else:
            lacking.append(c)
    meta[engine.RANDOM_STATE] = random
    return lacking


def plain(
    state: tuple[NDArray[Any], ...], pieces: NDArray[Any], classes: NDArray[Any], table: NDArray[Any], of_rank: NDArray[Any],
    where: NDArray[Any], on: NDArray[Any], running: NDArray[Any], progress: NDArray[Any], total: NDArray[Any],
    waits: NDArray[Any], strict: bool, until: float,
) -> Callable[[int], bool]:  # fmt: skip
    """The loop without reservations: ``advance(most)``."""
    nodes, best, ways, levels, log, meta, context, room = state
    heap = np.zeros(len(table), np.int32)
    return lambda most: run.advance(
        table, of_rank, heap, running, progress, where, on,
        nodes, pieces, best, ways, levels, log, meta, context, room, classes, total, waits, strict, until, most,
    )  # fmt: skip


def easy(
    state: tuple[NDArray[Any], ...], pieces: NDArray[Any], classes: NDArray[Any], table: NDArray[Any], of_rank: NDArray[Any],
    where: NDArray[Any], on: NDArray[Any], running: NDArray[Any], progress: NDArray[Any], total: NDArray[Any],
    waits: NDArray[Any], until: float,
) -> Callable[[int], bool]:  # fmt: skip
    """The loop with a reservation for the head. ``state``, ``pieces`` and ``classes`` have every kind and class twice."""
    nodes, best, ways, levels, log, meta, context, room = state
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
        table, by_class, tree, running, progress, where, on, first, places, soon, read, promised, held, moments, may, made,
        nodes, pieces, best, ways, levels, log, meta, context, room, classes, total, waits, until, most,
    )  # fmt: skip


def planned(
    state: tuple[NDArray[Any], ...], pieces: NDArray[Any], classes: NDArray[Any], table: NDArray[Any], of_rank: NDArray[Any],
    where: NDArray[Any], on: NDArray[Any], running: NDArray[Any], progress: NDArray[Any], total: NDArray[Any],
    waits: NDArray[Any], until: float,
) -> Callable[[int], bool]:  # fmt: skip
    """The loop with a plan for everyone. ``where`` has room for one more job at its end."""
    nodes, best, ways, levels, log, meta, context, room = state
    first, places = np.full(len(nodes), -1, np.int32), np.zeros(len(where), promise.PLACE)
    queue, ready, view = np.zeros(len(table) + 1, np.int64), np.zeros(len(nodes)), np.zeros(1, engine.NODE)
    overruns = bool((np.maximum(table["estimate"], conservative.LEAST_S) < table["duration"]).any())
    return lambda most: conservative.advance(
        table, queue, running, progress, where, on, first, places, ready, view, overruns,
        nodes, pieces, best, ways, levels, log, meta, context, room, classes, total, waits, until, most,
    )  # fmt: skip


def twice(pieces: NDArray[Any], classes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Kinds and classes once more, for jobs that outlast a reservation."""
    more, again = pieces.copy(), classes.copy()
    more["outlasting"] = True
    again["piece"] += len(pieces)
    again["rest"] += np.where(again["rest"] >= 0, len(pieces), 0)
    return np.concatenate([pieces, more]), np.concatenate([classes, again])
