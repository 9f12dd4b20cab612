"""Several policies on one trace: which is best, and how much of that is chance.

A policy runs as it is, and then again with one thing changed at a time: the *seed* of what it leaves to chance, the
rule for *ties*, and the order of the jobs that are submitted at the *same second*, which a trace in whole seconds does
not know.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.cluster import metrics, process_pool, quota
from weft.cluster.model import WHOLE, Cluster, Jobs
from weft.cluster.orders import ORDERS
from weft.cluster.placement import check_ties
from weft.cluster.policy import check_tenants, find_order, find_placement, read_anew
from weft.cluster.quota import NO_TENANTS, Quota
from weft.cluster.result import Result
from weft.cluster.simulation import check_warm_up, simulate
from weft.definition import UnknownName

DEFAULT_PLACEMENTS = ("best", "first", "worst", "consolidate")
OWN, SEEDS, TIES, SAME_SECOND = KINDS = ("own", "seeds", "ties", "same second")
METRICS = (
    *(f"{name}.{statistic}" for name in ("jct", "queueing", "slowdown") for statistic in ("mean", "p50", "p95", "p99")),
    "makespan", "utilisation", "allocation.mean", "fairness.jain",
    "fairness.finish_time.mean", "fairness.finish_time.p99", "fairness.finish_time.above_1",
)  # fmt: skip
INTERRUPTED = "interrupted"
PRIORITY = "priority"  # the same as fifo where all jobs have one priority
SENT: Any = None  # the jobs of a result that another process returns: the caller has them
MORE_IS_BETTER = ("utilisation", "allocation.mean", "fairness.jain")


@dataclass(frozen=True)
class Policy:
    """An order, a placement, and the rule for ties when it is not the placement's own."""

    order: str
    placement: str
    ties: str

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """``fifo:best`` or ``sjf-skip:fgd:random``.

        Raises:
            ValueError: something else.
            UnknownName: no such order, placement or rule.
        """
        order, *rest = text.split(":")
        if len(rest) not in (1, 2):
            raise ValueError(
                f"policy '{text}'; expected ORDER:PLACEMENT or ORDER:PLACEMENT:TIES, such as sjf-skip:best"
            )
        read_anew()
        find_order(order)
        placing = find_placement(rest[0])
        return cls(order, rest[0], check_ties(rest[1] if rest[1:] else placing.ties))

    def __str__(self) -> str:
        own = self.ties == find_placement(self.placement).ties
        return ":".join((self.order, self.placement, *([] if own else [self.ties])))


@dataclass(frozen=True)
class Run:
    """One simulation of a policy.

    Args:
        kind: ``own`` (the policy as it is, with the first seed), or what was changed: ``seeds``, ``ties``, ``same second``.
        shuffle: the seed that put jobs of the same second in another order; None: the trace's order.
        found: of :func:`weft.cluster.metrics.summary`.
        result: None unless it was to be kept.
    """

    kind: str
    ties: str
    seed: int
    shuffle: int | None = None
    found: dict[str, Any] = field(default_factory=dict)
    result: Result | None = None

    def value(self, metric: str) -> float | None:
        value: Any = self.found
        for name in metric.split("."):
            value = value[name]
        return None if value is None else float(value)


@dataclass
class Compared:
    """A policy and its runs; ``failed`` says why a run gave nothing."""

    policy: Policy
    runs: list[Run] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def values(self, metric: str, *kinds: str) -> list[float]:
        found = [run.value(metric) for run in self.runs if run.kind in (kinds or KINDS)]
        return [value for value in found if value is not None]

    def value(self, metric: str) -> float | None:
        """The policy's own: where its ties are random, the mean over seeds."""
        own = self.values(metric, OWN, *([SEEDS] if self.policy.ties == "random" else []))
        return float(np.mean(own)) if own else None

    def band(self, metric: str) -> tuple[float, float] | None:
        """Least and most of all runs."""
        values = self.values(metric)
        return (min(values), max(values)) if values else None

    def matters(self, metric: str, kind: str) -> float | None:
        """How much one thing matters: most less least with it changed, as a share of the policy's own value. Of tie
        rules the means over seeds are compared. None where it was not tried, or where there is nothing to be a share
        of."""
        own = self.value(metric)
        if kind == TIES:
            rules: dict[str, list[float]] = {}
            for run in self.runs:
                if run.kind != SAME_SECOND and (value := run.value(metric)) is not None:
                    rules.setdefault(run.ties, []).append(value)
            values = [float(np.mean(each)) for each in rules.values()]
        elif kind == SEEDS:
            rule = next((run.ties for run in self.runs if run.kind == SEEDS), None)
            values = [] if rule is None else self._of_rule(metric, rule)
        else:
            values = self.values(metric, OWN, SAME_SECOND)
        if own is None or len(values) < 2:
            return None
        spread = max(values) - min(values)
        return spread / abs(own) if own else (None if spread else 0.0)

    def _of_rule(self, metric: str, rule: str) -> list[float]:
        found = [run.value(metric) for run in self.runs if run.ties == rule and run.kind != SAME_SECOND]
        return [value for value in found if value is not None]


def default_policies(jobs: Jobs) -> list[Policy]:
    """Every order that neither preempts nor needs tenants, strict and skip, with the default placements;
    priorities only where these jobs have different ones."""
    names = [name for name, order in ORDERS.items() if not order.preemptive and not order.share]
    if not has_priorities(jobs):
        names.remove(PRIORITY)
    return [Policy.parse(f"{o}{skip}:{p}") for o in names for skip in ("", "-skip") for p in DEFAULT_PLACEMENTS]


def has_priorities(jobs: Jobs) -> bool:
    """Whether one job goes before another by its priority."""
    return bool((jobs.priority != jobs.priority[:1]).any())


def compare(
    jobs: Jobs,
    cluster: Cluster,
    policies: Iterable[str | Policy] = (),
    *,
    seeds: int = 10,
    ties: Sequence[str] = (),
    shuffle_same_second: bool = False,
    restart_s: float = 0.0,
    checkpoint_s: float = 0.0,
    weights: Mapping[str, float] = NO_TENANTS,
    quotas: Mapping[str, Quota] = NO_TENANTS,
    warm_up_s: float = 0.0,
    metric: str = "jct.mean",
    processes: int | None = None,
    keep: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Compared]:
    """Runs policies side by side, and ranks them: the best first, those that gave nothing last.

    Its processes do not run the calling script again, and know only those of its orders that are in files
    (``./mine.py:best``).

    Args:
        policies: ``"fifo:best"``, ``"sjf-skip:fgd:random"`` …; by default :func:`default_policies`.
        seeds: how many, for each policy with something random.
        ties: rules to try beside each policy's own: ``lowest``, ``highest``, ``random``.
        shuffle_same_second: also put jobs that are submitted at the same time in ``seeds`` random orders.
        restart_s, checkpoint_s: what a preemption costs, for policies that preempt (:func:`weft.cluster.simulate`).
        weights: of tenants, for policies that use them, and
        quotas: of tenants, for every policy.
        warm_up_s: seconds from the first submission in which jobs count in no metric of jobs.
        metric: of METRICS, to rank by.
        processes: that run side by side; all cores by default, 1: everything in this process.
        keep: keep the :class:`Result` of every run in the trace's own order, for pictures.
        on_progress: called with runs done and runs altogether.

    Raises:
        UnknownName: an unknown order, placement, rule for ties or metric.
        ValueError: fewer than one seed; costs of preemption and no policy that preempts; weights that no policy uses, quotas
            that one of them cannot have.
    """
    if metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    if seeds < 1:
        raise ValueError(f"{seeds} seeds; expected 1 or more")
    chosen = [p if isinstance(p, Policy) else Policy.parse(p) for p in policies] or default_policies(jobs)
    if (restart_s or checkpoint_s) and not any(find_order(p.order)[0].preemptive for p in chosen):
        raise ValueError(f"restart_s is {restart_s} and checkpoint_s {checkpoint_s}, and no policy preempts")
    weighted = [p for p in chosen if find_order(p.order)[0].share]
    for policy in chosen:
        looks = not weighted or policy in weighted
        check_tenants(weights if looks else {}, quotas, *find_order(policy.order))
    quota.weights_of(weights, jobs)  # checks the names of tenants, as does the next
    quota.Limits.of(quotas, jobs)
    check_warm_up(warm_up_s, jobs)
    ties = list(dict.fromkeys(check_ties(rule) for rule in ties))
    compared = [Compared(policy) for policy in dict.fromkeys(chosen)]
    shares = bool((jobs.milli != WHOLE).any())
    tasks = [
        (number, run)
        for number, each in enumerate(compared)
        for run in _runs(each.policy, seeds, ties, shuffle_same_second and same_second(jobs) > 0, shares)
    ]
    for order in ("fifo", *(["fair-share"] if quotas or weighted else [])):
        simulate(jobs.take(np.arange(min(1, len(jobs)))), cluster, order)  # compiles once, for all processes
    more = {
        "restart_s": restart_s, "checkpoint_s": checkpoint_s, "weights": dict(weights), "quotas": dict(quotas),
        "warm_up_s": warm_up_s,
    }  # fmt: skip
    shared = jobs, cluster, [each.policy for each in compared], more, keep
    found: dict[int, Run] = {}
    failed: dict[int, str] = {}
    try:
        with contextlib.closing(process_pool.run(_measure, shared, tasks, processes or os.cpu_count() or 1)) as answers:
            for k, run, why in answers:
                if run is None:
                    failed[k] = why
                elif run.found["complete"]:
                    found[k] = run
                else:
                    raise KeyboardInterrupt  # this very process ran it
                on_progress(len(found) + len(failed), len(tasks))
    except KeyboardInterrupt:
        failed = dict.fromkeys(range(len(tasks)), INTERRUPTED) | failed
    for k, (number, _) in enumerate(tasks):
        if k in found:
            if (result := found[k].result) is not None:
                result.jobs = jobs
            compared[number].runs.append(found[k])
        elif failed[k] not in compared[number].failed:
            compared[number].failed.append(failed[k])
    return ranked(compared, metric)


def ranked(compared: Sequence[Compared], metric: str) -> list[Compared]:
    sign = -1 if metric in MORE_IS_BETTER else 1

    def key(each: Compared) -> tuple[bool, float]:
        value = each.value(metric)
        return value is None, 0.0 if value is None else sign * value

    return sorted(compared, key=key)


def same_second(jobs: Jobs) -> int:
    """How many jobs are submitted at the same time as another one."""
    _, count = np.unique(jobs.submit, return_counts=True)
    return int(count[count > 1].sum())


def shuffled(jobs: Jobs, seed: int) -> Jobs:
    """Jobs that are submitted at the same time, in a random order."""
    random = np.random.default_rng(seed)
    return jobs.take(np.lexsort((random.random(len(jobs)), jobs.submit)))


def _runs(policy: Policy, seeds: int, ties: Sequence[str], shuffle: bool, shares: bool) -> list[Run]:
    """What to simulate. What does not depend on chance runs once."""

    def chance(rule: str) -> bool:
        return rule == "random" or (shares and find_placement(policy.placement).gpu == "random")

    runs = [Run(OWN, policy.ties, 0)]
    if chance(policy.ties):
        runs += [Run(SEEDS, policy.ties, seed) for seed in range(1, seeds)]
    for rule in ties:
        if rule != policy.ties:
            runs.append(Run(TIES, rule, 0))
            if rule == "random" and not chance(policy.ties):
                runs += [Run(SEEDS, rule, seed) for seed in range(1, seeds)]
    if shuffle:
        runs += [Run(SAME_SECOND, policy.ties, 0, shuffle=seed) for seed in range(seeds)]
    return runs


def _measure(shared: tuple[Jobs, Cluster, list[Policy], dict[str, Any], bool], task: tuple[int, Run]) -> Run:
    jobs, cluster, policies, more, keep = shared
    number, run = task
    if run.shuffle is not None:
        jobs = shuffled(jobs, run.shuffle)
    policy = policies[number]
    order, _ = find_order(policy.order)
    names = (
        "quotas",
        "warm_up_s",
        *(("restart_s", "checkpoint_s") if order.preemptive else ()),
        *(("weights",) if order.share else ()),
    )
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
        result = simulate(
            jobs,
            cluster,
            policy.order,
            policy.placement,
            ties=run.ties,
            seed=run.seed,
            **{name: more[name] for name in names},
        )
    found = metrics.summary(result)
    kept = dataclasses.replace(result, jobs=SENT) if keep and run.shuffle is None else None
    return dataclasses.replace(run, found=found, result=kept)
