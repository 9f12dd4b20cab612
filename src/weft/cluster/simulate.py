"""``simulate``: a trace, a cluster and a policy in; every job's start and nodes, and what users and owners ask of it, out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster import ties as tie_rules
from weft.cluster.lacking import closest
from weft.cluster.model import MOST_SHARED, WHOLE, Cluster, Jobs
from weft.cluster.order import find as find_order
from weft.cluster.placement import TIGHTEST, Placement
from weft.cluster.placement import find as find_placement

# What a waiting job waits for: the first of these that holds for it alone.
REASONS = {
    "priority": "it would fit, but others stand before it in the queue",
    "capacity": "fewer GPUs are free in the whole cluster than it asks",
    "type": "fewer are free of a type that it accepts",
    "memory": "fewer are free with as much memory",
    "gang": "enough are free, but not on enough nodes at once",
    "host": "enough are free on a node, but not enough cores or main memory",
    "fragmentation": "enough are free, but not on any one node",
}

STEP_S = 0.1  # about so often progress is told and Ctrl-C noticed


@dataclass
class Result:
    """What a simulation gave.

    Args:
        start: seconds, [J]; NaN for a job that never started.
        end: seconds, [J].
        slot: [J + 1]; the nodes of job j are ``where[slot[j]:slot[j + 1]]``, and
        where: node numbers.
        on: beside ``where`` a bit for each GPU that is taken of the node; empty where the placement does not choose GPUs.
        waited: seconds that each job waited for each of REASONS, [J, 7]; together its wait.
        unschedulable: for jobs that can never run, the nearest node and what it lacks.
        cpu_s: CPU seconds of the engine, compiling apart.
        complete: False when it was interrupted.
    """

    jobs: Jobs
    cluster: Cluster
    order: str
    placement: str
    ties: str
    seed: int
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    slot: NDArray[np.int64]
    where: NDArray[np.int32]
    on: NDArray[np.int32]
    waited: NDArray[np.float64]
    unschedulable: dict[int, str]
    cpu_s: float
    complete: bool = True


def simulate(
    jobs: Jobs,
    cluster: Cluster,
    order: str = "fifo",
    placement: str = "best",
    *,
    ties: str = "",
    seed: int = 0,
    until: float = np.inf,
    history: Jobs | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Runs all jobs through the cluster.

    Args:
        order: ``fifo``, ``sjf`` … or with ``-skip``.
        placement: ``best``, ``first``, ``counted`` …
        ties: which of equally good nodes: ``lowest`` or ``highest`` number, or ``random``; the placement's own by default.
        seed: of random ties.
        until: seconds; what would happen later does not.
        history: the jobs that a placement such as ``fgd`` takes for typical; these ones by default.
        on_progress: told jobs completed and jobs altogether, now and then.

    Raises:
        ValueError: an unknown order, placement or rule for ties.
    """
    from weft.cluster.engine import run
    from weft.cluster.engine.kinds import classify

    ordering, skip = find_order(order)
    placing = find_placement(placement)
    ties = tie_rules.check(ties or placing.ties)
    seen = cluster.as_one() if placing.counted else cluster
    detailed = placing.detailed or bool((jobs.milli != WHOLE).any())
    if detailed and placing.counted:
        raise ValueError(
            "placement 'counted' has no single GPUs to share; expected one that chooses nodes, such as 'best'"
        )
    if detailed and (most := int(seen.gpus.max(initial=0))) > MOST_SHARED:
        raise ValueError(
            f"a node has {most} GPUs; shares, and {placement}, are simulated on nodes of up to {MOST_SHARED}"
        )
    cls, classes, pieces, members = classify(jobs, seen)
    classes["reason"] = -1
    state = _state(history or jobs, seen, pieces, members, placing, ties, seed, detailed)
    never = {c: closest(jobs, int(np.argmax(cls == c)), seen) for c in _never(state, pieces, classes)}
    rows = np.flatnonzero(~np.isin(cls, list(never)))
    table, of_rank, where = _table(jobs, rows, cls, classes, ordering.rank(jobs)[rows])
    on = np.zeros(len(where) if detailed else 0, np.int32)
    heap = np.zeros(len(rows), np.int32)
    running = np.zeros(len(rows), run.COMPLETION)
    progress = np.zeros(run.PROGRESS, np.int64)
    total, waits = (np.zeros((count, len(REASONS))) for count in (len(classes), len(rows)))
    nodes, best, ways, levels, log, meta, context, room = state

    def advance(most: int) -> bool:
        return run.advance(
            table, of_rank, heap, running, progress, where, on,
            nodes, pieces, best, ways, levels, log, meta, context, room, classes, total, waits, not skip, until, most,
        )  # fmt: skip

    advance(0)  # compiles, or loads what was compiled
    begin = time.process_time()
    complete = True
    try:
        most, last = 100, time.perf_counter()
        while advance(most):
            on_progress(int(progress[run.COMPLETED]), len(rows))
            now = time.perf_counter()
            most = 1 + min(2 * most, int(most * STEP_S / max(now - last, 1e-9)))
            last = now
    except KeyboardInterrupt:
        complete = False
    cpu_s = time.process_time() - begin
    start = np.full(len(jobs), np.nan)
    start[rows] = table["start"]
    waited = np.zeros((len(jobs), len(REASONS)))
    waited[rows] = np.where(np.isnan(table["start"])[:, None], 0.0, waits)
    slot = np.zeros(len(jobs) + 1, np.int64)
    slot[rows + 1] = (classes["count"] + (classes["rest"] >= 0))[cls[rows]]
    return Result(
        jobs, seen, order, placement, ties, seed, start, start + jobs.duration, np.cumsum(slot),
        where, on, waited, {int(j): never[int(cls[j])] for j in np.flatnonzero(np.isin(cls, list(never)))}, cpu_s, complete,
    )  # fmt: skip


def _state(
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
    from weft.cluster.engine import index as trees
    from weft.cluster.engine import node as engine
    from weft.cluster.placements import PLACEMENTS

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


def _table(
    jobs: Jobs, rows: NDArray[Any], cls: NDArray[Any], classes: NDArray[Any], ranks: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The engine's jobs, the job of each rank, and room for all pieces' nodes. ``classes`` learn their part of the heap."""
    from weft.cluster.engine import run

    table = np.zeros(len(rows), run.JOB)
    table["submit"], table["duration"], table["start"], table["cls"] = (
        jobs.submit[rows],
        jobs.duration[rows],
        np.nan,
        cls[rows],
    )
    of_rank = np.argsort(ranks).astype(np.int32)
    table["rank"][of_rank] = np.arange(len(rows), dtype=np.int32)
    pieces = (classes["count"] + (classes["rest"] >= 0))[table["cls"]]
    table["slot"] = np.cumsum(pieces) - pieces
    each = np.bincount(table["cls"], minlength=len(classes))
    classes["begin"] = np.cumsum(each) - each
    return table, of_rank, np.full(int(pieces.sum()), -1, np.int32)


def _never(state: tuple[NDArray[Any], ...], pieces: NDArray[Any], classes: NDArray[Any]) -> list[int]:
    """Classes that an empty cluster could not run."""
    from weft.cluster.engine import node as engine
    from weft.cluster.engine import run

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
