"""Reclaimed quotas: by hand, and what must hold of every schedule."""

from __future__ import annotations

import numpy as np
import pytest

from weft.cluster import Cluster, Jobs, simulate
from weft.cluster.quota import Quota


def jobs_of(*rows, priority=None):
    """Of (submit, duration, GPUs, tenant)."""
    submit, duration, gpus, tenant = zip(*rows, strict=True)
    names = tuple(sorted(set(tenant)))
    return Jobs(submit, duration, gpus, tenant=[names.index(t) for t in tenant], tenants=names, priority=priority)


def run(jobs, quotas, nodes="2x8", **more):
    return simulate(jobs, Cluster.parse(nodes), "reclaim", "counted", quotas=quotas, **more)


HALVES = {"a": Quota(8), "b": Quota(8)}


def test_quota_is_reclaimed_from_the_last_started_job():
    """a borrows 8; b claims 4: the last of a's jobs is stopped, and goes on when b has ended."""
    jobs = jobs_of((0, 100, 4, "a"), (0, 100, 4, "a"), (0, 100, 4, "a"), (1, 100, 4, "a"), (10, 20, 4, "b"))
    result = run(jobs, HALVES)
    assert result.start.tolist() == [0, 0, 0, 1, 10] and result.stops.tolist() == [0, 0, 0, 1, 0]
    assert result.end.tolist() == [100, 100, 100, 1 + 100 + 20, 30]


def test_jobs_within_a_nominal_quota_are_never_preempted():
    """b may not borrow while a uses its own, and waits for a's end."""
    jobs = jobs_of((0, 100, 8, "a"), (5, 10, 8, "b"), (6, 10, 4, "b"))
    result = run(jobs, HALVES)
    assert not result.stops.any() and result.start.tolist() == [0, 5, 15]


def test_a_job_partly_within_the_nominal_quota_counts_as_borrowing():
    jobs = jobs_of((0, 50, 6, "a"), (1, 50, 6, "a"), (10, 5, 8, "b"))
    result = run(jobs, HALVES)
    assert result.stops.tolist() == [0, 1, 0] and result.end.tolist() == [50, 56, 15]


def test_the_less_important_borrowing_job_is_preempted_first():
    jobs = jobs_of((0, 50, 8, "a"), (1, 50, 4, "a"), (2, 50, 4, "a"), (10, 5, 4, "b"), priority=[0, 0, 1, 0])
    result = run(jobs, HALVES)
    assert result.stops.tolist() == [0, 1, 0, 0]


def test_reclaiming_costs_what_preemption_costs():
    jobs = jobs_of((0, 50, 8, "a"), (0, 50, 8, "a"), (10, 5, 8, "b"))
    result = run(jobs, HALVES, restart_s=3, checkpoint_s=4)
    assert result.end.tolist() == [50, 15 + 3 + 42, 15] and result.lost.tolist() == [0, 5, 0]


def test_a_borrowed_share_is_reclaimed():
    """a's last two halves of a GPU are lent; b claims one half, and the last of them is stopped on its GPU."""
    jobs = jobs_of(*((t, 100, 1, "a") for t in range(4)), (10, 20, 1, "b"))
    jobs.milli[:] = 500
    result = simulate(jobs, Cluster.parse("1x2"), "reclaim", quotas={"a": Quota(1), "b": Quota(1)})
    assert result.stops.tolist() == [0, 0, 0, 1, 0] and result.end.tolist() == [100, 101, 102, 123, 30]
    assert result.stretches.on.tolist() == [1, 1, 2, 2, 2, 2]


def test_the_wait_for_what_is_the_others_own_is_for_the_quota():
    jobs = jobs_of((0, 10, 8, "a"), (0, 10, 8, "b"), (0, 10, 8, "b"))
    result = run(jobs, HALVES)
    assert result.waited[2, 1] == result.queueing[2] == 10


def test_no_job_waits_for_its_tenants_nominal_quota():
    assert sum(preemptions_of_a_checked_schedule(seed) for seed in range(12)) > 50


def preemptions_of_a_checked_schedule(seed: int) -> int:
    """After every moment: limits are kept, and no tenant lacks its nominal quota while it has a job that fits in it."""
    g = np.random.default_rng(seed)
    count, names = 80, "abc"
    rows = [
        (float(g.integers(0, 100)), float(g.integers(1, 60)), int(g.choice([1, 2, 4])), names[g.integers(3)])
        for _ in range(count)
    ]
    jobs = jobs_of(*sorted(rows))
    quotas = {"a": Quota(8), "b": Quota(6, 2), "c": Quota(2, float(g.choice([0, 4, np.inf])))}
    result = run(jobs, quotas)
    nominal = np.array([quotas[name].nominal for name in names])
    most = nominal + [quotas[name].borrowing_limit for name in names]
    held = result.stretches
    done = np.bincount(held.job, held.end - held.begin, minlength=count)
    possible = np.setdiff1d(np.arange(count), list(result.unschedulable))
    assert done[possible] == pytest.approx(jobs.duration[possible])
    for now in np.unique(np.concatenate([jobs.submit, result.start[possible], result.end[possible]])):
        runs = held.job[(held.begin <= now) & (held.end > now)]
        assert len(set(runs.tolist())) == len(runs)
        has = np.bincount(jobs.tenant[runs], jobs.gpus[runs], minlength=3)
        assert has.sum() <= 16 and (has <= most).all()
        waits = np.setdiff1d(np.flatnonzero((jobs.submit <= now) & (result.end > now)), runs)
        assert (has[jobs.tenant[waits]] + jobs.gpus[waits] > nominal[jobs.tenant[waits]]).all()
        may = has.sum() + jobs.gpus[waits] <= 16
        assert (has[jobs.tenant[waits]] + jobs.gpus[waits] > most[jobs.tenant[waits]])[may].all()  # nor what is free
    return int(result.stops.sum())


def test_without_borrowing_it_is_fifo_skip_with_quotas():
    g = np.random.default_rng(5)
    rows = sorted(
        (float(g.integers(0, 80)), float(g.integers(1, 60)), int(g.choice([1, 2, 4])), "ab"[g.integers(2)])
        for _ in range(60)
    )
    quotas = {"a": Quota(8, 0), "b": Quota(8, 0)}
    mine = run(jobs_of(*rows), quotas)
    other = simulate(jobs_of(*rows), Cluster.parse("2x8"), "fifo-skip", "counted", quotas=quotas)
    assert not mine.stops.any() and mine.start.tolist() == other.start.tolist()


def test_it_needs_quotas():
    with pytest.raises(ValueError, match="order 'reclaim' reclaims borrowed quota; expected quotas"):
        run(jobs_of((0, 1, 1, "a")), {})
    with pytest.raises(ValueError, match="unknown tenant 'c'"):
        run(jobs_of((0, 1, 1, "a")), {"c": Quota(4)})
    lacking = run(jobs_of((0, 1, 9, "a"), (0, 1, 1, "b")), {"a": Quota(4, 4), "b": Quota(8)})
    assert lacking.unschedulable == {0: "it needs 9 GPUs, and the quota of tenant 'a' is 4 and it may borrow 4"}


def test_it_is_compared_with_policies_that_take_nothing_back():
    from weft.cluster.comparison import compare

    jobs = jobs_of((0, 100, 8, "a"), (0, 100, 8, "a"), (10, 5, 8, "b"))
    found = compare(jobs, Cluster.parse("2x8"), ["reclaim:counted", "fifo-skip:counted"], quotas=HALVES, seeds=1)
    stops = {each.policy.order: each.runs[0].found["preemptions"] for each in found}
    assert stops == {"reclaim": 1, "fifo-skip": 0}
