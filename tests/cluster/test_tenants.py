"""Tenants: fair shares, dominant resource fairness, quotas that are borrowed and reclaimed, by hand and by theory."""

import dataclasses

import numpy as np
import pytest
from random_traces import random_jobs
from sample_traces import TRACES, with_traces
from schedules import both, held_over_time, jobs_of, waits

from weft.cluster import Cluster, Jobs, NodeGroup, Simulator, compare, simulate, trace
from weft.cluster.orders import ORDERS
from weft.cluster.quota import Quota

SHARED = [name for name, order in ORDERS.items() if order.share]


def test_the_example_of_the_drf_paper():
    """9 cores and 18 GB; A's tasks ask 1 core and 4 GB, B's 3 cores and 1 GB: 3 and 2 of them run at once, section 4.1."""
    sim = Simulator("drf")
    sim.add_node("all", gpus=0, cpu=9, memory_gb=18)
    for i in range(5):
        sim.add_job(f"A{i}", gpus=0, cpu=1, memory_gb=4, tenant="A", submit=0, duration=10)
    for i in range(5):
        sim.add_job(f"B{i}", gpus=0, cpu=3, memory_gb=1, tenant="B", submit=0, duration=10)
    sim.step()
    assert [id for _, what, id in sim.history if what == "running"] == ["A0", "B0", "A1", "B1", "A2"]

    names = ("A", "B")
    jobs = Jobs(
        submit=np.zeros(10), duration=np.full(10, 10.0), gpus=np.zeros(10, int), cpu=np.repeat([1000, 3000], 5),
        memory=np.repeat([4096, 1024], 5), tenant=np.repeat([0, 1], 5), tenants=names,
    )  # fmt: skip
    cluster = Cluster.of([NodeGroup(1, 0, cpu=9, memory_gb=18)])
    for mode in ("", "-skip"):
        result = both(jobs, cluster, f"drf{mode}")
        assert np.bincount(jobs.tenant[result.start == 0]).tolist() == [3, 2]
    for order, more, started in (("drf", {"weights": {"B": 99.0}}, [1, 2]), ("fair-share-skip", {}, [4, 1])):
        result = both(jobs, cluster, order, **more)
        assert np.bincount(jobs.tenant[result.start == 0]).tolist() == started


def test_the_tenant_with_the_fewest_gpus_for_its_weight_comes_first():
    rows = [("a", 0, 10, 1)] * 6 + [("b", 1, 10, 1)] * 6
    for mode in ("", "-skip"):
        result = both(jobs_of(*rows), Cluster.parse("1x4"), f"fair-share{mode}")
        # a's four run; at 10 they end together: a and b in turn, a first, whose head was submitted first
        assert result.start.tolist() == [0, 0, 0, 0, 10, 10, 10, 10, 20, 20, 20, 20]
        twice = both(jobs_of(*rows), Cluster.parse("1x4"), f"fair-share{mode}", weights={"b": 3.0})
        assert twice.start.tolist() == [0, 0, 0, 0, 10, 20, 10, 10, 10, 20, 20, 20]


def test_strict_the_head_of_the_first_tenant_blocks_all_jobs():
    rows = [("a", 0, 10, 2), ("b", 1, 10, 4), ("a", 2, 1, 1), ("c", 3, 1, 1)]
    strict = both(jobs_of(*rows), Cluster.parse("1x4"), "fair-share")
    assert strict.start.tolist() == [0, 10, 20, 20]
    assert waits(strict, 3) == {"priority": 7, "capacity": 10}  # it would have fitted until b's four came
    assert both(jobs_of(*rows), Cluster.parse("1x4"), "fair-share-skip").start.tolist() == [0, 10, 2, 3]


# Kueue's own example of a cohort: nominal quotas of 9 and 12.
COHORT = {"team-a": Quota(9), "team-b": Quota(12)}


@pytest.mark.parametrize(("quotas", "of_a", "lacks"), [
    (COHORT, 21, ""),  # what b does not use a borrows
    (COHORT | {"team-a": Quota(9, 1)}, 10, ""),  # up to its borrowing limit
    (COHORT | {"team-a": Quota(9, 0)}, 9, ""),
    (COHORT | {"team-b": Quota(12, lending_limit=1)}, 10, ""),  # what b lends of its own: Kueue's own example
    (COHORT | {"team-b": Quota(12, lending_limit=0)}, 9, ""),
    ({"team-b": Quota(12)}, 12, ""),  # a tenant without a quota has none of its own and borrows
    ({"team-b": Quota(12), "*": Quota(0, 0)}, 0, "it needs 1 GPU, and the quota of tenant 'team-a' is 0"),
])  # fmt: skip
def test_a_tenant_borrows_what_its_cohort_leaves(quotas, of_a, lacks):
    rows = [*[("team-a", 0, 10, 1)] * 30, ("team-b", 1, 10, 12), ("team-b", 30, 10, 12)]
    for order in ("fifo", "fifo-skip", "fair-share", "sjf-skip"):
        result = both(jobs_of(*rows), Cluster.parse("4x8"), order, "counted", quotas=quotas)
        assert (result.start == 0).sum() == of_a and result.unschedulable.get(0, "") == lacks
        # b has its nominal quota once the cohort has it: when a's first ones end, and before a borrows anew
        assert result.start[30] == (1 if of_a <= 9 else 10)
        assert waits(result, 30) == ({"quota": 9} if of_a > 9 else {})


def test_a_job_that_a_quota_holds_keeps_only_its_own_tenant_waiting():
    rows = [("a", 0, 10, 4), ("a", 1, 1, 4), ("a", 2, 1, 1), ("b", 3, 1, 1), ("b", 4, 20, 18), ("b", 5, 1, 1)]
    quotas = {"a": Quota(5, 0), "b": Quota(20)}
    strict = both(jobs_of(*rows), Cluster.parse("2x10"), "fifo", quotas=quotas)
    assert strict.start.tolist() == [0, 10, 10, 3, 11, 11] and waits(strict, 1) == {"quota": 9}
    assert waits(strict, 2) == {"priority": 8}  # the second stands before it
    skip = both(jobs_of(*rows), Cluster.parse("2x10"), "fifo-skip", quotas=quotas)
    assert skip.start.tolist() == [0, 10, 2, 3, 11, 5]
    assert waits(skip, 4) == {"capacity": 7}  # b's quota admits 18, and 16 are free


def test_what_a_tenant_does_not_lend_is_free_for_it():
    rows = [*[("a", 0, 20, 1)] * 30, ("b", 1, 20, 11), ("b", 2, 20, 1), ("a", 3, 1, 11)]
    for order in ("fifo", "fifo-skip", "fair-share-skip"):
        result = both(jobs_of(*rows), Cluster.parse("4x8"), order, quotas={"a": Quota(9), "b": Quota(12, 0, 1)})
        assert (result.start == 0).sum() == 10 and result.start[30:32].tolist() == [1, 20]  # b's last one was lent
        lacks = "it needs 11 GPUs, and tenant 'a' never has more than 10, with all that others lend"
        assert waits(result, 31) == {"quota": 18} and result.unschedulable == {32: lacks}


def test_a_job_starts_if_the_quotas_of_all_resources_admit_it():
    """Of a's 8 GPUs two are used at once, by its 8 cores; b has no cores of its own and borrows the 4 that a lends."""
    quotas = {"a": Quota(8, 0, cpu=Quota(8, 0, 4), memory_gb=Quota(40)), "b": Quota(8)}
    rows = [*[("a", 0, 10, 1)] * 3, ("b", 1, 30, 1), ("a", 2, 5, 0), ("b", 3, 5, 1), ("b", 4, 5, 0), ("a", 5, 1, 1)]
    columns = {"cpu": [4000] * 6 + [0, 9000], "memory": [0] * 6 + [41 * 1024, 0]}
    never = {6: "it needs 41 GB of memory, and the quotas of all tenants together are 40",
             7: "it needs 9 cores, and the quotas of all tenants together are 8"}  # fmt: skip
    for order in ("fifo", "fifo-skip"):
        result = both(
            jobs_of(*rows, **columns), Cluster.of([NodeGroup(2, 8, cpu=32, memory_gb=64)]), order, quotas=quotas
        )
        assert result.unschedulable == never and waits(result, 2) == {"quota": 10}
        assert result.start[:6].tolist() == [0, 0, 10, 15, 10, 45]


@pytest.mark.parametrize(("quotas", "rows", "strict", "skip"), [
    # a's head needs 4 of 3 that are free, and would borrow: all 4 are kept, and c does not start
    ({"a": Quota(8), "b": Quota(8), "c": Quota(0)}, [("a", 0, 10, 6), ("b", 0, 20, 7), ("a", 1, 9, 4), ("c", 2, 9, 1)], 10, 2),
    # for a's head 2 are kept, up to its limit; c's fits beside the running jobs alone, so nothing is kept for it
    ({"a": Quota(8, 0), "b": Quota(4), "c": Quota(4), "d": Quota(0)},
     [("a", 0, 10, 6), ("b", 0, 20, 5), ("c", 0, 20, 2), ("a", 1, 9, 4), ("c", 2, 9, 3), ("d", 3, 9, 1)], 3, 10),
    # a's head needs more than a's nominal quota: nothing is kept
    ({"a": Quota(4), "b": Quota(12), "c": Quota(0)}, [("b", 0, 10, 12), ("a", 1, 9, 5), ("c", 2, 9, 1)], 2, 2),
])  # fmt: skip
def test_strict_what_a_waiting_head_lacks_is_kept_for_it(quotas, rows, strict, skip):
    """As Kueue's StrictFIFO; the last job's start."""
    for order, start in (("fifo", strict), ("fifo-skip", skip)):
        assert both(jobs_of(*rows), Cluster.parse("2x8"), order, "counted", quotas=quotas).start[-1] == start


def test_a_job_that_a_quota_can_never_admit_is_reported():
    rows = [("a", 0, 1, 6), ("b", 0, 1, 12), ("b", 0, 1, 40), ("b", 0, 1, 8)]
    result = both(jobs_of(*rows), Cluster.parse("4x8"), "fifo", quotas={"a": Quota(4, 1), "b": Quota(6)})
    assert list(result.unschedulable.values()) == [
        "it needs 6 GPUs, and the quota of tenant 'a' is 4 and it may borrow 1",
        "it needs 12 GPUs, and the quotas of all tenants together are 10",
        "it needs 5 free nodes of 8 GPUs that fit it, and the cluster has 4",
    ]
    sim = Simulator("fifo", quotas={"a": Quota(4)})
    sim.add_node("n", gpus=8)
    words = r"job 'x' can never run: it needs 5 GPUs, and the quotas of all tenants .* are 4"
    with pytest.raises(ValueError, match=words):
        sim.add_job("x", gpus=5, tenant="a")


def waiting(seed: int, count: int, gpus: list[int], tenants: tuple[str, ...]) -> Jobs:
    """Random jobs that are all submitted at 0 s."""
    g = np.random.default_rng(seed)
    columns = np.zeros(count), g.exponential(10, count), g.choice(gpus, count)
    return Jobs(*columns, tenant=g.integers(0, len(tenants), count), tenants=tenants)


@pytest.mark.parametrize("order", [f"{name}{mode}" for name in SHARED for mode in ("", "-skip")])
def test_two_tenants_with_work_hold_gpus_as_their_weights(order):
    """Single GPUs: while both have jobs that wait, they hold 20 and 10 of 30 at all times."""
    jobs = waiting(1, 3000, [1], ("heavy", "light"))
    result = simulate(jobs, Cluster.parse("3x10"), order, weights={"heavy": 2.0})
    moments, held = held_over_time(result)
    busy = moments < min(result.start[jobs.tenant == t].max() for t in (0, 1))
    assert busy.sum() > 1000 and (held[busy] == [20_000, 10_000]).all()


def test_shares_of_large_jobs_tend_to_their_weights():
    """Gangs of other sizes: within a few per cent over time."""
    jobs = waiting(2, 20_000, [1, 2, 4], ("a", "b", "c"))
    result = simulate(jobs, Cluster.parse("200x4"), "fair-share", "counted", weights={"a": 3.0, "b": 2.0})
    moments, held = held_over_time(result)
    last = min(result.start[jobs.tenant == t].max() for t in range(3))
    length = np.diff(np.append(moments, moments[-1])) * (moments < last)
    mean = (held * length[:, None]).sum(axis=0) / length.sum()
    assert mean / mean.sum() == pytest.approx([3 / 6, 2 / 6, 1 / 6], rel=0.03)


def test_work_is_conserved_where_everyone_may_pass():
    """After each moment no job that waits would fit on the free GPUs of a node."""
    g = np.random.default_rng(3)
    count = 600
    jobs = Jobs(
        np.cumsum(g.integers(0, 3, count)).astype(float), g.integers(1, 60, count).astype(float), g.choice([1, 2, 4, 8], count),
        tenant=g.integers(0, 5, count), tenants=tuple("abcde"),
    )  # fmt: skip
    for order in SHARED:
        result = simulate(jobs, Cluster.parse("10x8"), f"{order}-skip", "worst")
        node = result.stretches.where
        for now in np.unique(np.concatenate([jobs.submit, result.end])):
            runs = (result.start <= now) & (result.end > now)
            free = 8 - np.bincount(node[runs], jobs.gpus[runs], minlength=10)
            waits = (jobs.submit <= now) & (result.start > now)
            assert free.min() >= 0 and not (jobs.gpus[waits] <= free.max()).any()


def test_one_tenant_is_served_as_if_there_were_none():
    jobs, cluster = random_jobs(200), Cluster.parse("3x8")
    alone = dataclasses.replace(jobs, tenant=None, tenants=("",))
    for mode in ("", "-skip"):
        fifo = simulate(alone, cluster, f"fifo{mode}")
        for order in SHARED:
            same = simulate(alone, cluster, f"{order}{mode}")
            assert same.start.tobytes() == fifo.start.tobytes() and same.waited == pytest.approx(fifo.waited)
        limitless = simulate(alone, cluster, f"fifo{mode}", quotas={"": Quota(1e6)})
        assert limitless.start.tobytes() == fifo.start.tobytes() and limitless.waited == pytest.approx(fifo.waited)


@with_traces
def test_quotas_without_borrowing_are_virtual_clusters():
    """Helios' two on the nodes of both: vcvGl's jobs wait as published for its 20 nodes alone (strict FIFO)."""
    jobs = trace.load(TRACES / "helios" / "helios_venus_2vc_sept_helios_form.csv.gz", "helios")
    own = jobs.tenant == jobs.tenants.index("vcvGl")
    quotas = {"vcvGl": Quota(160, 0), "vcvlY": Quota(16, 0)}
    result = simulate(jobs, Cluster.parse("22x8"), "fifo", "consolidate", quotas=quotas)
    assert round(result.queueing[own].mean(), 4) == 13_891.1205
    alone = simulate(jobs.take(own), Cluster.parse("20x8"), "fifo", "consolidate")
    assert result.start[own].tolist() == alone.start.tolist()


def reclaim(jobs, quotas, nodes="2x8", **more):
    return simulate(jobs, Cluster.parse(nodes), "reclaim", "counted", quotas=quotas, **more)


HALVES = {"a": Quota(8), "b": Quota(8)}


@pytest.mark.parametrize(("rows", "more", "expected"), [
    # a borrows 8; b claims 4: the last of a's jobs is stopped, and goes on when b has ended
    ([("a", 0, 100, 4)] * 3 + [("a", 1, 100, 4), ("b", 10, 20, 4)], {},
     {"start": [0, 0, 0, 1, 10], "stops": [0, 0, 0, 1, 0], "end": [100, 100, 100, 1 + 100 + 20, 30]}),
    # b may not borrow while a uses its own, and waits for a's end
    ([("a", 0, 100, 8), ("b", 5, 10, 8), ("b", 6, 10, 4)], {}, {"start": [0, 5, 15], "stops": [0, 0, 0]}),
    ([("a", 0, 50, 6), ("a", 1, 50, 6), ("b", 10, 5, 8)], {}, {"stops": [0, 1, 0], "end": [50, 56, 15]}),
    ([("a", 0, 50, 8)] * 2 + [("b", 10, 5, 8)], {"restart_s": 3, "checkpoint_s": 4},
     {"end": [50, 15 + 3 + 42, 15], "lost": [0, 5, 0]}),
], ids=["last started", "within nominal", "partly within nominal", "costs"])  # fmt: skip
def test_quota_is_reclaimed(rows, more, expected):
    result = reclaim(jobs_of(*rows), HALVES, **more)
    assert {name: getattr(result, name).tolist() for name in expected} == expected


def test_only_what_is_lent_is_borrowed_and_reclaimed():
    """Of b's 8 a may borrow 4. b's first job needs none of these; its second takes them back."""
    rows = [("a", 0, 100, 4)] * 3 + [("a", 1, 100, 4), ("b", 10, 20, 4), ("b", 11, 20, 4)]
    result = reclaim(jobs_of(*rows), {"a": Quota(8), "b": Quota(8, lending_limit=4)})
    assert result.start.tolist() == [0, 0, 0, 100, 10, 11] and result.stops.tolist() == [0, 0, 1, 0, 0, 0]
    assert result.end.tolist() == [100, 100, 30 + 89, 200, 30, 31]


def test_of_several_resources_what_is_lacking_is_reclaimed():
    """b lacks cores: the job of a that holds borrowed cores is stopped, not the one started last, which borrows GPUs."""
    jobs = jobs_of(("a", 0, 50, 4), ("a", 1, 50, 4), ("a", 2, 50, 4), ("b", 10, 5, 1), cpu=[4000, 8000, 0, 4000])
    result = reclaim(jobs, {name: Quota(8, cpu=Quota(6)) for name in "ab"})
    assert result.stops.tolist() == [0, 1, 0, 0] and result.start[3] == 10


def test_a_tenant_below_its_quota_after_a_preemption_goes_before_those_that_borrow():
    """c's claim at 4 s stops a's job of 4 GPUs. a then holds 5 of its 8: its job of 2 starts, not b's, which would borrow."""
    first = ("a", 0, 50, 5), ("b", 0, 50, 6), ("c", 0, 50, 1)
    jobs = jobs_of(*first, ("a", 1, 50, 4), ("b", 2, 9, 2), ("a", 3, 9, 2), ("c", 4, 9, 1))
    result = reclaim(jobs, {"a": Quota(8), "b": Quota(6, 2), "c": Quota(2)})
    assert result.stops.tolist() == [0, 0, 0, 1, 0, 0, 0] and result.start.tolist() == [0, 0, 0, 1, 50, 4, 4]


def test_the_less_important_borrowing_job_is_preempted_first():
    jobs = jobs_of(("a", 0, 50, 8), ("a", 1, 50, 4), ("a", 2, 50, 4), ("b", 10, 5, 4), priority=[0, 0, 1, 0])
    assert reclaim(jobs, HALVES).stops.tolist() == [0, 1, 0, 0]


def test_a_borrowed_share_is_reclaimed():
    """a's last two halves of a GPU are lent; b claims one half, and the last of them is stopped on its GPU."""
    jobs = jobs_of(*(("a", t, 100, 1) for t in range(4)), ("b", 10, 20, 1))
    jobs.milli[:] = 500
    result = simulate(jobs, Cluster.parse("1x2"), "reclaim", quotas={"a": Quota(1), "b": Quota(1)})
    assert result.stops.tolist() == [0, 0, 0, 1, 0] and result.end.tolist() == [100, 101, 102, 123, 30]
    assert result.stretches.on.tolist() == [1, 1, 2, 2, 2, 2]


def test_the_wait_for_what_is_the_others_own_is_for_the_quota():
    result = reclaim(jobs_of(("a", 0, 10, 8), ("b", 0, 10, 8), ("b", 0, 10, 8)), HALVES)
    assert result.waited[2, 1] == result.queueing[2] == 10


def drawn(seed: int, tenants: str) -> Jobs:
    g = np.random.default_rng(seed)
    return Jobs(
        np.sort(g.integers(0, 100, 80)), g.integers(1, 60, 80), g.choice([1, 2, 4], 80),
        tenant=g.integers(0, len(tenants), 80), tenants=tuple(tenants),
    )  # fmt: skip


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 40), marks=pytest.mark.long)])
def test_no_job_waits_for_its_tenants_nominal_quota(seeds):
    assert sum(preemptions_of_a_checked_schedule(seed) for seed in seeds) > 4 * len(seeds)


def preemptions_of_a_checked_schedule(seed: int) -> int:
    """After every moment: limits are kept, and no tenant lacks its nominal quota while it has a job that fits in it."""
    jobs = drawn(seed, "abc")
    quotas = {"a": Quota(8), "b": Quota(6, 2), "c": Quota(2, (0, 4, np.inf)[seed % 3])}
    result = reclaim(jobs, quotas)
    nominal = np.array([quota.nominal for quota in quotas.values()])
    most = nominal + [quota.borrowing_limit for quota in quotas.values()]
    held = result.stretches
    done = np.bincount(held.job, held.end - held.begin, minlength=len(jobs))
    possible = np.setdiff1d(np.arange(len(jobs)), list(result.unschedulable))
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
    jobs, quotas = drawn(5, "ab"), {"a": Quota(8, 0), "b": Quota(8, 0)}
    mine = reclaim(jobs, quotas)
    other = simulate(jobs, Cluster.parse("2x8"), "fifo-skip", "counted", quotas=quotas)
    assert not mine.stops.any() and mine.start.tolist() == other.start.tolist()


def test_it_needs_quotas():
    with pytest.raises(ValueError, match="order 'reclaim' reclaims borrowed quota; expected quotas"):
        reclaim(jobs_of(("a", 0, 1, 1)), {})
    with pytest.raises(ValueError, match="unknown tenant 'c'"):
        reclaim(jobs_of(("a", 0, 1, 1)), {"c": Quota(4)})
    lacking = reclaim(jobs_of(("a", 0, 1, 9), ("b", 0, 1, 1)), {"a": Quota(4, 4), "b": Quota(8)})
    assert lacking.unschedulable == {0: "it needs 9 GPUs, and the quota of tenant 'a' is 4 and it may borrow 4"}


def test_it_is_compared_with_policies_that_take_nothing_back():
    jobs = jobs_of(("a", 0, 100, 8), ("a", 0, 100, 8), ("b", 10, 5, 8))
    found = compare(jobs, Cluster.parse("2x8"), ["reclaim:counted", "fifo-skip:counted"], quotas=HALVES, seeds=1)
    assert {each.policy.order: each.runs[0].found["preemptions"] for each in found} == {"reclaim": 1, "fifo-skip": 0}
