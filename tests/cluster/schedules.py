"""Whether both engines give the same schedule, and what must hold of any schedule."""

import math
from fractions import Fraction

import numpy as np
import pytest

from weft.cluster import Cluster, Jobs, reference, simulate
from weft.cluster.metrics import summary
from weft.cluster.model import accepts
from weft.cluster.quota import Quota
from weft.cluster.result import REASONS


def jobs_of(*rows, **more) -> Jobs:
    """Rows of (tenant, submit, duration, gpus)."""
    tenants = tuple(dict.fromkeys(row[0] for row in rows))
    columns = {name: np.array([row[i] for row in rows]) for i, name in enumerate(("submit", "duration", "gpus"), 1)}
    return Jobs(**columns, tenant=np.array([tenants.index(row[0]) for row in rows]), tenants=tenants, **more)


def both(jobs: Jobs, cluster: Cluster, order: str = "fifo", placement: str = "best", **more):
    """The compiled engine's result, after the reference simulator has given the same."""
    fast = simulate(jobs, cluster, order, placement, **more)
    check_equal(fast, reference.simulate(jobs, cluster, order, placement, **more))
    check_schedule(fast)
    return fast


def check_equal(fast, plain) -> None:
    """Both engines have the same starts, ends, nodes, GPUs, stops, losses and reasons."""
    held, jobs, stops = fast.stretches, fast.jobs, plain.order.preemptive
    for j in range(len(jobs)):
        job = plain.jobs.get(jobs.id[j])
        mine = [k for k in np.flatnonzero(held.job == j) if not np.isnan(held.begin[k])]
        if job is None:
            assert j in fast.unschedulable and not mine and np.isnan(fast.start[j])
        else:
            assert j not in fast.unschedulable
            found = fast.start[j], fast.end[j], fast.stops[j], fast.lost[j]
            assert found == (job.start, job.end, job.stops, job.lost)
            on = [sum(1 << g for g in gpus) for _, _, gpus in job.placed]
            last = (job.last_start if stops else job.start, job.end, [node.id for node, _, _ in job.placed], on)
            found = [(held.begin[k], held.end[k], names_of(fast, k)) for k in mine]
            assert found == [each[:3] for each in (*job.stretches, last)]
            if len(held.on):
                found = [held.on[held.slot[k] : held.slot[k + 1]].tolist() for k in mine]
                assert found == [each[3] for each in (*job.stretches, last)]
            assert fast.waited[j] == pytest.approx([job.waited.get(reason, 0.0) for reason in REASONS], abs=1e-9)
            assert fast.waited[j].sum() == pytest.approx(fast.queueing[j], abs=1e-9)


def names_of(result, stretch: int) -> list[str]:
    held = result.stretches
    return [result.cluster.names[n] for n in held.where[held.slot[stretch] : held.slot[stretch + 1]]]


def check_schedule(result) -> None:
    """Nothing is over-committed at any moment, gangs are whole, nothing is lost, jobs do their work."""
    jobs, cluster, held = result.jobs, result.cluster, result.stretches
    ran = np.flatnonzero(~np.isnan(result.start))
    assert len(ran) + len(result.unschedulable) == len(jobs) and (result.start[ran] >= jobs.submit[ran]).all()
    length = np.bincount(held.job, np.nan_to_num(held.end - held.begin), minlength=len(jobs))
    assert length[ran] == pytest.approx((jobs.duration + result.lost)[ran], abs=1e-9)
    for now in np.unique(held.begin[~np.isnan(held.begin)]):
        free, milli = cluster.gpus * 1000, np.full((len(cluster), 16), 1000)
        for s in np.flatnonzero((held.begin <= now) & (held.end > now)):
            j, where = held.job[s], held.where[held.slot[s] : held.slot[s + 1]]
            assert len(where) == max(jobs.pods[j], 1) or not jobs.pods[j]
            sizes = np.full(len(where), jobs.gpus[j] // len(where))
            if not jobs.pods[j] and len(where) > 1:
                largest = largest_accepted(jobs, j, cluster)
                sizes = np.array([min(largest, jobs.gpus[j] - k * largest) for k in range(len(where))])
                assert len(set(where.tolist())) == len(where)
            assert sizes.sum() == jobs.gpus[j]
            np.subtract.at(free, where, sizes * jobs.milli[j])
            for k, n in enumerate(where if len(held.on) else ()):
                on = held.on[held.slot[s] + k]
                assert on < 1 << cluster.gpus[n] and bin(on).count("1") == sizes[k]
                milli[n] -= jobs.milli[j] * (on >> np.arange(16) & 1)
            for n in where:
                assert not (0 <= cluster.gpu_memory[n] < jobs.gpu_memory[j])
                wanted = jobs.type_sets[jobs.types[j]]
                assert accepts(wanted, cluster.types[cluster.gpu_type[n]])
        assert (free >= 0).all() and (milli >= 0).all()
    check_locality(result)
    if result.order.endswith("-skip"):
        assert not waited_for(result, "priority").any(), "a job waits that could start"
    check_quotas(result)


def waited_for(result, reason: str):
    return result.waited[:, list(REASONS).index(reason)]


def waits(result, j: int) -> dict[str, float]:
    """What job j waited for, without the zeros."""
    return {reason: seconds for reason, seconds in zip(REASONS, result.waited[j].tolist(), strict=True) if seconds}


def held_over_time(result, resource: str = "gpus"):
    """Moments [M], and the thousandths of GPUs (or cores, or MiB) that each tenant holds from each of them on [M, T]."""
    jobs, ran = result.jobs, np.flatnonzero(result.ran & (result.jobs.duration > 0))
    moments = np.unique(np.concatenate([result.start[ran], result.end[ran]]))
    held = np.zeros((len(moments) + 1, len(jobs.tenants)), np.int64)
    asked = {"gpus": jobs.gpus * jobs.milli, "cpu": jobs.cpu, "memory_gb": jobs.memory}[resource][ran]
    np.add.at(held, (np.searchsorted(moments, result.start[ran]), jobs.tenant[ran]), asked)
    np.add.at(held, (np.searchsorted(moments, result.end[ran]), jobs.tenant[ran]), -asked)
    return moments, held.cumsum(axis=0)[:-1]


def check_quotas(result) -> None:
    """From starts and ends alone."""
    if not result.quotas:
        assert not waited_for(result, "quota").any()
        return
    each = [result.quotas.get(name, result.quotas.get("*", Quota(0))) for name in result.jobs.tenants]
    for resource, unit in (("gpus", 1000), ("cpu", 1000), ("memory_gb", 1024)):
        if resource != "gpus" and not any(getattr(quota, resource) for quota in result.quotas.values()):
            continue
        of = [quota if resource == "gpus" else getattr(quota, resource) or Quota(0) for quota in each]
        _, held = held_over_time(result, resource)
        nominal, borrowed, lent = (
            np.array([(q.nominal, q.borrowing_limit, min(q.lending_limit, q.nominal)) for q in of]).T * unit
        )
        assert (held <= nominal + borrowed).all() and (held.sum(axis=1) <= nominal.sum()).all()
        for t in range(len(each)):  # what a tenant does not lend is free for it
            others = held.sum(axis=1) - held[:, t]
            assert (others <= nominal.sum() - nominal[t] + lent[t]).all()
        assert (np.maximum(held - (nominal - lent), 0).sum(axis=1) <= lent.sum()).all()


def largest_accepted(jobs: Jobs, j: int, cluster: Cluster) -> int:
    """The GPUs of the largest node that, empty, takes as many of a job's GPUs as it has, with their cores and memory."""
    wanted, largest = jobs.type_sets[jobs.types[j]], 0
    for n in range(len(cluster)):
        part = Fraction(int(min(cluster.gpus[n], jobs.gpus[j])), int(jobs.gpus[j]))
        fits = not wanted or cluster.types[cluster.gpu_type[n]] in wanted
        cores, memory = (math.ceil(int(asked[j]) * part) for asked in (jobs.cpu, jobs.memory))
        needs = (cluster.gpu_memory, jobs.gpu_memory[j]), (cluster.cpu, cores), (cluster.memory, memory)
        fits = fits and all(has[n] < 0 or has[n] >= asked for has, asked in needs)
        largest = max(largest, int(cluster.gpus[n]) if fits else 0)
    return largest


def check_locality(result) -> None:
    """The slow count of what ``locality`` says; a required rack is one."""
    held, cluster, count, gpu_s, racks = result.stretches, result.cluster, [0, 0, 0], [0.0, 0.0, 0.0], 0
    for s in range(len(held)):
        where = {int(n) for n in held.where[held.slot[s] : held.slot[s + 1]]}
        if np.isnan(held.begin[s]) or len(where) < 2:
            continue
        in_racks, domains = {int(cluster.rack[n]) for n in where}, {int(cluster.domain[n]) for n in where}
        assert result.placement != "topology-required" or len(in_racks) == 1
        level = 0 if len(domains) == 1 else 1 if len(in_racks) == 1 else 2
        count[level] += 1
        gpu_s[level] += float((held.end[s] - held.begin[s]) * result.gpus[held.job[s]])
        racks += len(in_racks)
    found = summary(result)["locality"]
    assert found["gangs"] == sum(count)
    names = ("one_domain", "one_rack", "several_racks")
    assert [found[n] for n in names] == pytest.approx([c / sum(count) for c in count] if sum(count) else [None] * 3)
    shares = [part / sum(gpu_s) for part in gpu_s] if sum(gpu_s) else [None] * 3
    assert [found[f"gpu_s_{n}"] for n in names] == pytest.approx(shares)
    assert found["racks_mean"] == pytest.approx(racks / sum(count) if sum(count) else None)
