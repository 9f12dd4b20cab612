"""``simulate``: a trace, a cluster and a policy in; every job's start and nodes, and what users and owners ask of it, out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.cluster import ties as tie_rules
from weft.cluster.lacking import closest
from weft.cluster.model import MOST_SHARED, WHOLE, Cluster, Jobs
from weft.cluster.order import find as find_order
from weft.cluster.placement import find as find_placement
from weft.cluster.plan import NO_DETAILS

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
        order: ``fifo``, ``sjf`` … or with ``-skip``, ``-easy`` or
            ``-conservative``.
        placement: ``best``, ``first``, ``counted`` …
        ties: which of equally good nodes: ``lowest`` or ``highest`` number, or ``random``; the placement's own by default.
        seed: of random ties.
        until: seconds; what would happen later does not.
        history: the jobs that a placement such as ``fgd`` takes for typical; these ones by default.
        on_progress: told jobs completed and jobs altogether, now and then.

    Raises:
        ValueError: an unknown order, placement or rule for ties.
    """
    from weft.cluster.engine import prepare, run
    from weft.cluster.engine.kinds import classify

    ordering, mode = find_order(order)
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
    if detailed and mode == "-conservative":
        raise ValueError(NO_DETAILS)
    cls, classes, pieces, members = classify(jobs, seen)
    classes["reason"] = -1
    if mode == "-easy":
        pieces, classes = prepare.twice(pieces, classes)
    state = prepare.state(history or jobs, seen, pieces, members, placing, ties, seed, detailed)
    never = {
        c: closest(jobs, int(np.argmax(cls == c)), seen) for c in prepare.never(state, pieces, classes) if c in cls
    }
    rows = np.flatnonzero(~np.isin(cls, list(never)))
    table, of_rank, where = prepare.table_of(jobs, rows, cls, classes, ordering.rank(jobs)[rows])
    on = np.zeros(len(where) if detailed else 0, np.int32)
    running, progress = np.zeros(len(rows), run.COMPLETION), np.zeros(run.PROGRESS, np.int64)
    total, waits = (np.zeros((count, len(REASONS))) for count in (len(classes), len(rows)))
    if mode == "-conservative":
        where = np.concatenate([where, np.zeros(int(classes["count"].max(initial=0)) + 1, np.int32)])
    given = (state, pieces, classes, table, of_rank, where, on, running, progress, total, waits)
    if mode == "-easy":
        advance = prepare.easy(*given, until)
    elif mode == "-conservative":
        advance = prepare.planned(*given, until)
    else:
        advance = prepare.plain(*given, mode == "", until)
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
        where[: int(slot.sum())], on, waited,
        {int(j): never[int(cls[j])] for j in np.flatnonzero(np.isin(cls, list(never)))}, cpu_s, complete,
    )  # fmt: skip
