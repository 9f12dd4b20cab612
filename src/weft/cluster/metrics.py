"""Metrics of a schedule: how long jobs took and waited, how full the cluster was, how fair and how local it was."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster import allocations
from weft.cluster.check import assumptions
from weft.cluster.model import WHOLE
from weft.cluster.policy import find_order, find_placement
from weft.cluster.result import REASONS, Result

LEAST_S = 10.0  # shorter jobs count as this long in slowdowns, so that very short ones do not dominate


def distribution(values: NDArray[np.float64]) -> dict[str, float | None]:
    """``mean``, ``p50``, ``p95`` and ``p99``; None of nothing."""
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p95", "p99"))
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def slowdown(jct: NDArray[np.float64], duration: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bounded slowdown (Feitelson et al., JSSPP 1997): completion time over duration, at least 1, where durations below 10 s
    count as 10 s."""
    return np.maximum(jct / np.maximum(duration, LEAST_S), 1.0)


def times(result: Result) -> dict[str, NDArray[np.float64]]:
    """``jct`` and ``queueing`` (seconds) and ``slowdown`` (times) of every job, [J]; NaN for one that never started."""
    jct = result.end - result.jobs.submit
    return {"jct": jct, "queueing": result.queueing, "slowdown": slowdown(jct, result.jobs.duration)}


def gpu_seconds(result: Result) -> NDArray[np.float64]:
    """What every job used, [J]: shares of a GPU count as such, work that was lost does not; 0 for a job that did not
    run."""
    return np.where(result.ran, result.gpus * result.jobs.duration, 0.0)


def summary(result: Result) -> dict[str, Any]:
    """The object of ``weft simulate --json``: seconds throughout; jobs that never started count in no distribution. Those
    of the warm-up count only in ``completed``, ``makespan``, ``gpu_s``, ``utilisation``, ``locality`` and preemptions."""
    order, mode = find_order(result.order)
    jobs, ran, counted = result.jobs, result.ran, result.counted
    every = times(result)
    first = float(jobs.submit.min()) if len(jobs) else 0.0
    last = float(result.end[ran].max()) if ran.any() else None
    makespan = 0.0 if last is None else last - first
    gpus, used = result.cluster.total_gpus, float(gpu_seconds(result).sum())
    return {
        "order": result.order,
        "placement": result.placement,
        "ties": result.ties,
        "seed": result.seed,
        "validated": {
            "order": order.validated.get(mode, ""),
            "placement": find_placement(result.placement).validated,
        },
        "jobs": len(jobs),
        "completed": int(ran.sum()),
        "generated": jobs.generated,
        "dropped": jobs.dropped,
        "warnings": list(jobs.warnings),
        "assumed": assumptions(jobs),
        "nodes": len(result.cluster),
        "nodes_dropped": result.cluster.dropped,
        "gpus": gpus,
        "warm_up": {"seconds": result.warm_up_s, "jobs": int(result.warm_up.sum())},
        **{name: distribution(values[counted]) for name, values in every.items()},
        "makespan": makespan,
        "last_completion": last,
        "gpu_s": used,
        "utilisation": used / (gpus * makespan) if makespan and gpus else None,
        "allocation": allocation(result),
        "locality": locality(result),
        "preemptions": int(result.stops.sum()),
        "lost_gpu_s": float((result.lost * result.gpus).sum()),
        "restart_s": result.restart_s,
        "checkpoint_s": result.checkpoint_s,
        "weights": dict(result.weights),
        "quotas": {name: quota.as_json() for name, quota in result.quotas.items()},
        "wait_reasons": {
            name: float(column.sum()) for name, column in zip(REASONS, result.waited[~result.warm_up].T, strict=True)
        },
        "by_size": by_size(result, every),
        "by_tenant": by_tenant(result, every),
        "by_type": by_type(result, every),
        "fairness": fairness(result, every["slowdown"]),
        "unschedulable": [{"job": jobs.id[j], "reason": why} for j, why in result.unschedulable.items()],
        "complete": result.complete,
        "cpu_s": result.cpu_s,
        "peak_memory_mib": peak_memory_mib(),
    }


def peak_memory_mib() -> float | None:
    """The largest resident size that this process has had."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


# ---- allocation over time --------------------------------------------------------------------------------------------


PERCENTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95}


def allocation(result: Result) -> dict[str, float | None]:
    """The share of the cluster's GPUs that jobs held, from the first arrival, or the end of the warm-up, to the last
    start: ``mean``, ``max``, and ``p50``, which it was at most for half of that time.

    After the last start nothing is decided and the cluster only drains: ``utilisation`` counts that time, this does
    not. Where all jobs started at once the time until the last completion counts.
    """
    jobs, held = result.jobs, result.stretches
    ran = ~np.isnan(held.begin)
    capacity = result.cluster.total_gpus * WHOLE
    begin = float(jobs.submit.min()) + result.warm_up_s if len(jobs) else 0.0
    until = float(held.begin[ran].max()) if ran.any() else begin
    if until == begin and ran.any():
        until = float(held.end[ran].max())
    if not capacity or until <= begin:
        return dict.fromkeys(("mean", "max", *PERCENTILES))
    taken = (jobs.gpus * jobs.milli)[held.job[ran]]
    time = np.clip(np.concatenate((held.begin[ran], held.end[ran])), begin, until)
    order = np.argsort(time, kind="stable")
    time = np.concatenate(([begin], time[order], [until]))
    value = np.concatenate(([0], np.cumsum(np.concatenate((taken, -taken))[order])))  # from time[i] to time[i + 1]
    length = np.diff(time)
    value, length = value[length > 0], length[length > 0]
    order = np.argsort(value)
    value, upto = value[order], np.cumsum(length[order])
    found = {name: value[np.searchsorted(upto, share * upto[-1])] for name, share in PERCENTILES.items()}
    found |= {"mean": float((value * length[order]).sum() / upto[-1]), "max": value[-1]}
    return {name: float(found[name]) / capacity for name in ("mean", "max", *PERCENTILES)}


# ---- groups of jobs --------------------------------------------------------------------------------------------------


CLASSES = {"1 GPU": (0, 1), "2–8 GPUs": (2, 8), "more than 8": (9, 2**62)}
MOST_TENANTS = 20  # those that used the most GPU seconds

Times = Mapping[str, NDArray[np.float64]]  # of metrics.times


def size_classes(gpus: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
    """Which jobs belong to each size class; classes without a job are left out. Jobs without a GPU are with the
    smallest."""
    found = {name: (gpus >= low) & (gpus <= high) for name, (low, high) in CLASSES.items()}
    return {name: mask for name, mask in found.items() if mask.any()}


def by_size(result: Result, times: Times) -> dict[str, dict[str, Any]]:
    """Of each size class the jobs that ran, and their times."""
    ran = result.counted
    return {name: _group(times, np.flatnonzero(mask & ran)) for name, mask in size_classes(result.jobs.gpus).items()}


def by_tenant(result: Result, times: Times) -> dict[str, dict[str, Any]]:
    """The same of the tenants that used most, most first, and their ``gpu_s``; nothing of a trace that names none."""
    jobs = result.jobs
    if len(jobs.tenants) < 2 and not any(jobs.tenants):
        return {}
    rows = np.flatnonzero(result.counted)
    used = np.bincount(jobs.tenant, gpu_seconds(result) * ~result.warm_up, minlength=len(jobs.tenants))
    rows = rows[np.argsort(jobs.tenant[rows], kind="stable")]
    edge = np.searchsorted(jobs.tenant[rows], np.arange(len(jobs.tenants) + 1))
    most = [t for t in np.argsort(-used, kind="stable").tolist() if edge[t] < edge[t + 1]][:MOST_TENANTS]
    return {
        jobs.tenants[t]: {"gpu_s": float(used[t]), **_group(times, np.sort(rows[edge[t] : edge[t + 1]]))} for t in most
    }


def by_type(result: Result, times: Times) -> dict[str, dict[str, Any]]:
    """Of each type of GPU how many there are, the jobs that held some to their end and their times, ``gpu_s`` for which
    they were held, and the share of its GPUs × makespan that this is; nothing of a cluster with one type. A job on
    several types is with each of them."""
    cluster, jobs = result.cluster, result.jobs
    if len(cluster.types) < 2:
        return {}
    held = allocations.of(result)
    kind = cluster.gpu_type[held.node]
    held_s = held.gpus * jobs.milli[held.job] / WHOLE * (held.end - held.start)
    used = np.bincount(kind, held_s, minlength=len(cluster.types))
    there = np.bincount(cluster.gpu_type, cluster.gpus, minlength=len(cluster.types))
    span = held.end.max(initial=-np.inf) - jobs.submit.min(initial=np.inf)
    found = {}
    for t, name in enumerate(cluster.types):
        rows = np.flatnonzero(np.bincount(held.job[kind == t], minlength=len(jobs)) > 0)
        found[name] = {
            "gpus": int(there[t]),
            "gpu_s": float(used[t]),
            "allocation": float(used[t] / (there[t] * span)) if there[t] and span > 0 else None,
            **_group(times, rows[result.counted[rows]]),
        }
    return found


def _group(times: Times, rows: NDArray[np.int64]) -> dict[str, Any]:
    return {"jobs": len(rows), **{name: distribution(values[rows]) for name, values in times.items()}}


# ---- fairness --------------------------------------------------------------------------------------------------------


def fairness(result: Result, slowdown: NDArray[np.float64]) -> dict[str, Any]:
    """``jain``: Jain's index (Jain, Chiu, Hawe 1984) over the mean slowdowns of the ``tenants`` of whom a job ran: 1
    where all are alike, 1/n where one of n has all the slowdown; None of fewer than two tenants. ``finish_time``: mean,
    p50, p95, p99 and ``max`` of :func:`finish_time_ratio`, and ``above_1``, the share of jobs that sharing made
    later."""
    ran = result.counted
    tenant = result.jobs.tenant[ran]
    count = np.bincount(tenant)
    total = np.bincount(tenant, slowdown[ran])
    mean = total[count > 0] / count[count > 0]
    index = min(float(mean.sum() ** 2 / (len(mean) * (mean**2).sum())), 1.0) if len(mean) > 1 else None
    ratio = finish_time_ratio(result)[ran]
    late = {
        **distribution(ratio),
        "max": float(ratio.max()) if len(ratio) else None,
        "above_1": float((ratio > 1 + 1e-9).mean()) if len(ratio) else None,
    }
    return {"jain": index, "tenants": len(mean), "finish_time": late}


def finish_time_ratio(result: Result) -> NDArray[np.float64]:
    """Completion time over what it had been with an equal part of the cluster's time, [J] (finish-time fairness;
    Mahajan et al., NSDI 2020): at most 1 for a job that fared no worse; NaN for one that did not run to its end.

    With an equal part a job takes its duration times the contention while it was there: the GPUs that all jobs there
    asked, waiting or running, over those of the cluster, on average, and at least 1. Durations below 10 s count as 10
    s.
    """
    jobs, capacity = result.jobs, max(result.cluster.total_gpus, 1)
    there = np.ones(len(jobs), bool)
    there[list(result.unschedulable)] = False  # they compete with no job
    time = np.concatenate((jobs.submit[there], np.nan_to_num(result.end[there], nan=np.inf)))
    asks = np.concatenate((result.gpus[there], -result.gpus[there]))
    order = np.argsort(time, kind="stable")
    time, asked = time[order], np.cumsum(asks[order])
    time, asked = time[np.isfinite(time)], asked[np.isfinite(time)]
    passed = np.concatenate(([0.0], np.cumsum(asked[:-1] * np.diff(time))))  # GPU seconds asked until time[i]
    ratio = np.full(len(jobs), np.nan)
    ran = np.flatnonzero(result.ran & there)
    begin, end = jobs.submit[ran], result.end[ran]
    jct = end - begin
    during = passed[np.searchsorted(time, end)] - passed[np.searchsorted(time, begin)]
    contention = np.maximum(during / (np.maximum(jct, 1e-9) * capacity), 1.0)
    ratio[ran] = jct / (np.maximum(jobs.duration[ran], LEAST_S) * contention)
    return ratio


# ---- locality --------------------------------------------------------------------------------------------------------


def locality(result: Result) -> dict[str, float | int | None]:
    """Of the stretches of time in which a job held several nodes (a job that was not preempted has one):

    ``gangs``, how many there were; ``one_domain``, ``one_rack`` and ``several_racks``, the shares of them whose nodes
    lay in one NVLink domain, otherwise in one rack, or in several; ``gpu_s_one_domain`` …, the same of their GPU
    seconds; and ``racks_mean``, racks a gang. None where there were none.
    """
    held, cluster = result.stretches, result.cluster
    ran = np.flatnonzero(~np.isnan(held.begin) & (np.diff(held.slot) > 1))
    first, last = held.slot[ran], held.slot[ran + 1]
    length = last - first
    where = held.where[np.repeat(first - (np.cumsum(length) - length), length) + np.arange(length.sum())]
    owner = np.repeat(np.arange(len(ran)), length)
    nodes, domains, racks = (
        _different(owner, number, len(ran)) for number in (where, cluster.domain[where], cluster.rack[where])
    )
    gangs = nodes > 1
    job = held.job[ran[gangs]]
    gpu_s = (result.jobs.gpus * result.jobs.milli)[job] / WHOLE * (held.end - held.begin)[ran[gangs]]
    domains, racks = domains[gangs], racks[gangs]
    near = {"one_domain": domains == 1, "one_rack": (domains > 1) & (racks == 1), "several_racks": racks > 1}
    count, total = len(job), float(gpu_s.sum())
    return {
        "gangs": count,
        **{name: float(those.mean()) if count else None for name, those in near.items()},
        **{f"gpu_s_{name}": float(gpu_s[those].sum()) / total if total else None for name, those in near.items()},
        "racks_mean": float(racks.mean()) if count else None,
    }


def _different(owner: NDArray[np.int64], number: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """How many different numbers each owner has, [count]."""
    pairs = np.sort(owner * (int(number.max(initial=0)) + 1) + number)  # np.unique, by hashing, takes ten times as long
    pairs = pairs[np.append(True, np.diff(pairs) > 0)[: len(pairs)]]
    return np.bincount(pairs // (int(number.max(initial=0)) + 1), minlength=count)
