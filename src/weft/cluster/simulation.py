"""``simulate``: a trace, a cluster and a policy in; every job's start and nodes, and why it waited, out."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from weft.cluster import policy, quota
from weft.cluster.model import MOST_SHARED, WHOLE, Cluster, Jobs
from weft.cluster.placement import REQUIRED, check_ties
from weft.cluster.quota import NO_TENANTS, Quota
from weft.cluster.result import REASONS, Result, Stretches
from weft.cluster.unschedulable import why_unschedulable
from weft.words import period

STEP_S = 0.1  # about how often progress is reported and Ctrl-C noticed

Progress = Callable[[int, int], None]


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
    weights: Mapping[str, float] = NO_TENANTS,
    quotas: Mapping[str, Quota] = NO_TENANTS,
    warm_up_s: float = 0.0,
    plain: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> Result:
    """Runs all jobs through the cluster.

    Args:
        order: ``fifo``, ``sjf`` … or with ``-skip``, ``-easy`` or
            ``-conservative``.
        placement: ``best``, ``first``, ``counted`` …
        ties: which of equally good nodes: ``lowest`` or ``highest`` number, or ``random``; the placement's own by default.
        seed: of random ties.
        restart_s: seconds that a preempted job holds its GPUs again before it works on.
        checkpoint_s: seconds of work between two checkpoints; the work since the last one is lost when a job is preempted;
            0: it is saved when it is preempted.
        until: seconds; later events do not happen.
        history: the jobs that a placement such as ``fgd``, or an order such as ``2d-gittins``, takes for typical; these jobs
            by default.
        weights: of tenants, for an order among them such as ``fair-share``; 1 of those that are not named.
        quotas: of tenants, of GPUs, cores and memory (:mod:`weft.cluster.quota`); tenants that are not named have that of
            ``*``, or none of their own and may borrow. With orders that do not preempt, strict or ``-skip``. Strict: a job
            that waits for its quota blocks only its own tenant's jobs.
        warm_up_s: seconds from the first submission in which jobs run but count in no metric of jobs, while the cluster
            fills.
        plain: on the reference simulator, in plain Python: for policies that Numba cannot compile, and thousands of jobs.
        on_progress: called with jobs completed and jobs altogether, now and then.

    Raises:
        ValueError: an unknown order, placement or rule for ties; what cannot be simulated together; no nodes.
    """
    from weft.cluster.engine import (  # Numba: late, so that importing weft.cluster does not need it
        conservative_loop,
        easy_loop,
        preemption_loop,
        simple_loop,
        tables,
        tenant_loop,
    )
    from weft.cluster.engine.classes import classify

    if not len(cluster):
        raise ValueError("the cluster has no nodes; expected at least one")
    policy.read_anew()
    ordering, mode = policy.find_order(order)
    placing = policy.find_placement(placement)
    ties = check_ties(ties or placing.ties)
    used = cluster.as_one() if placing.counted else cluster
    detailed = placing.detailed or bool((jobs.milli != WHOLE).any())
    if detailed and placing.counted:
        raise ValueError(
            "placement 'counted' has no single GPUs to share; expected one that chooses nodes, such as 'best'"
        )
    if detailed and (most := int(used.gpus.max(initial=0))) > MOST_SHARED:
        raise ValueError(
            f"a node has {most} GPUs; shares, and {placement}, are simulated on nodes of up to {MOST_SHARED}"
        )
    if detailed and mode == "-conservative":
        raise ValueError(policy.NO_SHARES)
    policy.check_topology(placing, ordering, mode)
    policy.check_preemption_costs(ordering, restart_s, checkpoint_s)
    policy.check_tenants(weights, quotas, ordering, mode)
    check_warm_up(warm_up_s, jobs)
    weight, limits = quota.weights_of(weights, jobs), quota.Limits.of(quotas, jobs)
    named = (jobs, used, order, placement, ties, seed)
    if ordering.rounds or plain:
        costs: dict[str, Any] = {"restart_s": restart_s, "checkpoint_s": checkpoint_s}
        more: dict[str, Any] = {"weights": weights, "quotas": quotas}
        result = partial(Result, *named, weights=dict(weights), quotas=dict(quotas), warm_up_s=warm_up_s, **costs)
        return _simulate_in_python(result, history or jobs, until, on_progress, **more, **costs)
    cls, classes, pieces, members = classify(jobs, used)
    classes["reason"] = -1
    if mode == "-easy":
        pieces, classes = easy_loop.twice(pieces, classes)
    state = tables.state(history or jobs, used, pieces, classes, members, placing, ties, seed, detailed)
    with _named_errors(order, placement):
        lacking = tables.unschedulable(state)
    never = {
        c: why_unschedulable(jobs, int(np.argmax(cls == c)), used, placing.topology == REQUIRED)
        for c in lacking
        if c in cls
    }
    impossible = {int(j): never[int(cls[j])] for j in np.flatnonzero(np.isin(cls, list(never)))}
    impossible = dict(sorted({**limits.never_admitted(jobs), **impossible}.items()))
    possible = np.ones(len(jobs), bool)
    possible[list(impossible)] = False
    rows = np.flatnonzero(possible)
    spare = int(classes["count"].max(initial=0)) + 1 if mode == "-conservative" else 0
    row = preemption_loop.JOB if ordering.preemption else tables.JOB
    table, of_rank = tables.table_of(jobs, rows, cls, classes, ordering.rank(jobs)[rows], row)
    made = tables.Tables.of(state, table, of_rank, detailed, until, spare)
    preemptive = None
    if ordering.preemption:
        preemptive = preemption_loop.Loop(
            made, jobs, rows, ordering.preemption, restart_s, checkpoint_s, history or jobs
        )
        advance: tables.Advance = preemptive.advance
    elif ordering.share or quotas:
        advance = tenant_loop.loop(made, jobs, rows, used, ordering, mode == "", weight, limits)
    elif mode == "-easy":
        advance = easy_loop.loop(made)
    elif mode == "-conservative":
        advance = conservative_loop.loop(made)
    else:
        advance = simple_loop.loop(made, strict=mode == "")
    advance(0)  # compiles, or loads what was compiled
    begin = time.process_time()
    complete = True
    try:
        most, last = 100, time.perf_counter()
        with _named_errors(order, placement):
            while advance(most):
                on_progress(int(made.progress[tables.COMPLETED]), len(rows))
                now = time.perf_counter()
                most = 1 + min(2 * most, int(most * STEP_S / max(now - last, 1e-9)))
                last = now
    except KeyboardInterrupt:
        complete = False
    cpu_s = time.process_time() - begin
    if preemptive:
        return Result(
            *named,
            **preemptive.result(),
            unschedulable=impossible,
            cpu_s=cpu_s,
            restart_s=restart_s,
            checkpoint_s=checkpoint_s,
            complete=complete,
            warm_up_s=warm_up_s,
        )
    start = np.full(len(jobs), np.nan)
    start[rows] = table["start"]
    waited = np.zeros((len(jobs), len(REASONS)))
    waited[rows] = np.where(np.isnan(table["start"])[:, None], 0.0, made.waits)
    slot = np.zeros(len(jobs) + 1, np.int64)
    slot[rows + 1] = (classes["count"] + (classes["rest"] >= 0))[cls[rows]]
    end, slot = start + jobs.duration, np.cumsum(slot)
    stretches = Stretches(np.arange(len(jobs)), start, end, slot, made.state.where[: slot[-1]], made.state.on)
    stops, lost = np.zeros(len(jobs), np.int64), np.zeros(len(jobs))
    return Result(
        *named, start, end, stretches, waited, stops, lost, impossible, cpu_s, complete=complete, weights=dict(weights),
        quotas=dict(quotas), warm_up_s=warm_up_s,
    )  # fmt: skip


@contextlib.contextmanager
def _named_errors(order: str, placement: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"order '{order}' or placement '{placement}' raised {type(error).__name__}: {error}; --plain "
            "(simulate(…, plain=True)) names the job and the time"
        ) from error


def check_warm_up(warm_up_s: float, jobs: Jobs) -> None:
    """Raises ValueError for a warm-up that is no seconds, or after which no job is submitted."""
    span = float(np.ptp(jobs.submit)) if len(jobs) else 0.0
    if not 0 <= warm_up_s < np.inf:
        raise ValueError(f"warm_up_s is {warm_up_s}; expected seconds, 0 or more")
    if warm_up_s > span:
        raise ValueError(
            f"the warm-up is {period(warm_up_s)}, and all jobs are submitted within {period(span)}; expected less"
        )


def _simulate_in_python(
    result: partial[Result], history: Jobs, until: float, on_progress: Progress, **more: Any
) -> Result:
    """Runs a policy on the reference simulator.

    Args:
        result: a :class:`Result` with jobs, cluster, order, placement, ties and seed.
        more: as :class:`weft.cluster.reference.Simulator`.

    Raises:
        weft.cluster.reference.rounds.PolicyError: see there.
    """
    from weft.cluster import reference

    jobs, cluster, *named = result.args
    sim = reference.simulator(cluster, *named, **more)
    sim.learn(history, cluster)
    never, added = {}, {}
    for j in range(len(jobs)):
        if reason := sim.add(jobs.take(np.array([j]))):
            never[j] = reason
        else:
            added[j] = sim.jobs[jobs.id[j]]
    begin, complete = time.process_time(), True
    try:
        while sim.next_event() <= until:
            if not sim.step():
                break
            on_progress(sum(job.state == "completed" for job in added.values()), len(added))
    except KeyboardInterrupt:
        complete = False
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"order '{sim.order.name}' or placement '{sim.placement.name}' at {sim.now:g} s raised "
            f"{type(error).__name__}: {error}"
        ) from error
    cpu_s = time.process_time() - begin
    number_of = {name: n for n, name in enumerate(cluster.names)}
    start, end, lost = np.full(len(jobs), np.nan), np.full(len(jobs), np.nan), np.zeros(len(jobs))
    stops, waited = np.zeros(len(jobs), np.int64), np.zeros((len(jobs), len(REASONS)))
    rows: list[tuple[int, float, float, list[str], list[int]]] = []  # a stretch each
    for j in range(len(jobs)):
        job = added.get(j)
        if job is None or job.start is None:
            rows.append((j, np.nan, np.nan, [], []))
            continue
        start[j], stops[j], lost[j] = job.start, job.stops, job.lost
        waited[j] = [job.waited.get(reason, 0.0) for reason in REASONS]
        rows += [(j, *stretch) for stretch in job.stretches]
        if job.end is not None:
            end[j] = job.end
            on = [sum(1 << gpu for gpu in gpus) for _, _, gpus in job.placed]
            began = job.last_start if sim.order.preemptive else job.start
            rows.append((j, began, job.end, [node.id for node, _, _ in job.placed], on))
    count = [len(nodes) for *_, nodes, _ in rows]
    stretches = Stretches(
        np.array([j for j, *_ in rows], np.int64),
        np.array([since for _, since, *_ in rows], float),
        np.array([till for _, _, till, *_ in rows], float),
        np.concatenate(([0], np.cumsum(count))).astype(np.int64),
        np.array([number_of[name] for *_, nodes, _ in rows for name in nodes], np.int32),
        np.array([gpus for *_, on in rows if sim.detailed for gpus in on], np.int32),
    )
    return result(
        start=start,
        end=end,
        stretches=stretches,
        waited=waited,
        stops=stops,
        lost=lost,
        unschedulable=never,
        cpu_s=cpu_s,
        complete=complete,
    )
