"""``simulate``: a trace, a cluster and a policy in; every job's start and nodes, and what users and owners ask of it, out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from weft.cluster import quota, topology
from weft.cluster import ties as tie_rules
from weft.cluster.lacking import closest
from weft.cluster.model import MOST_SHARED, WHOLE, Cluster, Jobs
from weft.cluster.order import Order
from weft.cluster.order import find as find_order
from weft.cluster.orders import ORDERS
from weft.cluster.placement import REQUIRED
from weft.cluster.placement import find as find_placement
from weft.cluster.plan import NO_DETAILS
from weft.cluster.quota import NONE_GIVEN, Quota
from weft.cluster.result import REASONS, Result, Stretches

STEP_S = 0.1  # about so often progress is told and Ctrl-C noticed


def simulate(
    jobs: Jobs,
    cluster: Cluster,
    order: str = "fifo",
    placement: str = "best",
    *,
    ties: str = "",
    seed: int = 0,
    restart_s: float = 0.0,
    checkpoint_s: float = 0.0,
    until: float = np.inf,
    history: Jobs | None = None,
    weights: Mapping[str, float] = NONE_GIVEN,
    quotas: Mapping[str, Quota] = NONE_GIVEN,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Runs all jobs through the cluster.

    Args:
        order: ``fifo``, ``sjf`` … or with ``-skip``, ``-easy`` or
            ``-conservative``.
        placement: ``best``, ``first``, ``counted`` …
        ties: which of equally good nodes: ``lowest`` or ``highest`` number, or ``random``; the placement's own by default.
        seed: of random ties.
        restart_s: seconds that a job which was stopped holds its GPUs before it works on.
        checkpoint_s: seconds of work between two checkpoints; what was done since the last one is lost when a job is stopped.
            0: it is saved when it is stopped.
        until: seconds; what would happen later does not.
        history: the jobs that a placement such as ``fgd``, or an order such as ``2d-gittins``, takes for typical; these ones by
            default.
        weights: of tenants, for an order among them such as ``fair-share``; 1 of those that are not named.
        quotas: of tenants, in GPUs (:mod:`weft.cluster.quota`); tenants that are not named have that of ``*``, or none of their
            own and may borrow. With orders that stop no jobs, strict or ``-skip``. Strictly, who waits for a quota keeps only
            its own tenant's jobs waiting.
        on_progress: told jobs completed and jobs altogether, now and then.

    Raises:
        ValueError: an unknown order, placement or rule for ties; what cannot be simulated together; no nodes.
    """
    from weft.cluster import reference, rounds
    from weft.cluster.engine import preemptive, prepare, run, standing, tenants
    from weft.cluster.engine.kinds import classify

    if not len(cluster):
        raise ValueError("the cluster has no nodes; expected at least one")
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
    topology.check(placing, ordering, mode)
    _check_stopping(ordering, restart_s, checkpoint_s)
    quota.check(weights, quotas, ordering, mode)
    weight, limits = quota.weights_of(weights, jobs), quota.Limits.of(quotas, jobs)
    named = (jobs, seen, order, placement, ties, seed)
    if ordering.rounds:
        sim = reference.simulator(
            seen, order, placement, ties, seed, restart_s=restart_s, checkpoint_s=checkpoint_s, quotas=quotas
        )
        sim.learn(history or jobs, seen)
        return rounds.run(sim, jobs, seen, partial(Result, *named, quotas=dict(quotas)), until, on_progress)
    cls, classes, pieces, members = classify(jobs, seen)
    classes["reason"] = -1
    if mode == "-easy":
        pieces, classes = prepare.twice(pieces, classes)
    state = prepare.state(history or jobs, seen, pieces, members, placing, ties, seed, detailed)
    never = {
        c: closest(jobs, int(np.argmax(cls == c)), seen, placing.topology == REQUIRED)
        for c in prepare.never(state, pieces, classes)
        if c in cls
    }
    impossible = {int(j): never[int(cls[j])] for j in np.flatnonzero(np.isin(cls, list(never)))}
    impossible = dict(sorted({**limits.never(jobs), **impossible}.items()))
    possible = np.ones(len(jobs), bool)
    possible[list(impossible)] = False
    rows = np.flatnonzero(possible)
    spare = int(classes["count"].max(initial=0)) + 1 if mode == "-conservative" else 0
    row = standing.JOB if ordering.preemption else run.JOB
    table, of_rank = prepare.table_of(jobs, rows, cls, classes, ordering.rank(jobs)[rows], row)
    tables = prepare.Tables.of(state, pieces, classes, table, of_rank, detailed, until, spare)
    kept = None
    if ordering.preemption:
        kept = preemptive.Kept(tables, jobs, rows, ordering.preemption, restart_s, checkpoint_s, history or jobs)
        advance: prepare.Advance = kept.advance
    elif ordering.share or quotas:
        advance = tenants.tenanted(tables, jobs, rows, seen, ordering, mode == "", weight, limits)
    elif mode == "-easy":
        advance = prepare.easy(tables)
    elif mode == "-conservative":
        advance = prepare.planned(tables)
    else:
        advance = prepare.plain(tables, strict=mode == "")
    advance(0)  # compiles, or loads what was compiled
    begin = time.process_time()
    complete = True
    try:
        most, last = 100, time.perf_counter()
        while advance(most):
            on_progress(int(tables.progress[run.COMPLETED]), len(rows))
            now = time.perf_counter()
            most = 1 + min(2 * most, int(most * STEP_S / max(now - last, 1e-9)))
            last = now
    except KeyboardInterrupt:
        complete = False
    except Exception as error:
        raise ValueError(
            f"order '{order}' or placement '{placement}' raised {type(error).__name__}: {error}; the plain engine, "
            "weft.cluster.reference.simulate with the same arguments, names the job and the moment"
        ) from error
    cpu_s = time.process_time() - begin
    if kept:
        return Result(
            *named,
            **kept.result(),
            unschedulable=impossible,
            cpu_s=cpu_s,
            restart_s=restart_s,
            checkpoint_s=checkpoint_s,
            complete=complete,
        )
    start = np.full(len(jobs), np.nan)
    start[rows] = table["start"]
    waited = np.zeros((len(jobs), len(REASONS)))
    waited[rows] = np.where(np.isnan(table["start"])[:, None], 0.0, tables.waits)
    slot = np.zeros(len(jobs) + 1, np.int64)
    slot[rows + 1] = (classes["count"] + (classes["rest"] >= 0))[cls[rows]]
    end, slot = start + jobs.duration, np.cumsum(slot)
    stretches = Stretches(np.arange(len(jobs)), start, end, slot, tables.where[: slot[-1]], tables.on)
    stops, lost = np.zeros(len(jobs), np.int64), np.zeros(len(jobs))
    return Result(
        *named, start, end, stretches, waited, stops, lost, impossible, cpu_s, complete=complete, weights=dict(weights),
        quotas=dict(quotas),
    )  # fmt: skip


def _check_stopping(order: Order, restart_s: float, checkpoint_s: float) -> None:
    """Raises ValueError for what an order cannot do."""
    for name, value in (("restart_s", restart_s), ("checkpoint_s", checkpoint_s)):
        if not 0 <= value < np.inf:
            raise ValueError(f"{name} is {value}; expected seconds, 0 or more")
        if value and not order.stops_jobs:
            stopping = ", ".join(name for name, each in ORDERS.items() if each.stops_jobs)
            raise ValueError(f"{name} is {value}, and order '{order.name}' stops no jobs; expected one of {stopping}")
