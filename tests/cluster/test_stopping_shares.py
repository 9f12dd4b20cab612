"""Orders that stop jobs where single GPUs are looked at: by hand, and both engines on random clusters and jobs."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("numba")
pytest.importorskip("hypothesis")

from schedules import check_equal, check_schedule  # noqa: E402

from weft.cluster import Cluster, Jobs, NodeGroup, reference, simulate  # noqa: E402
from weft.cluster.fragmentation import free_at  # noqa: E402
from weft.cluster.orders import ORDERS  # noqa: E402
from weft.cluster.placements import PLACEMENTS  # noqa: E402

STOPPING = [name for name, order in ORDERS.items() if order.preemptive and not (order.rounds and order.rounds.quotas)]
ON_NODES = [name for name, each in PLACEMENTS.items() if not each.counted and not each.topology]


def run(jobs: Jobs, cluster: Cluster, order: str = "srtf", placement: str = "best", ties: str = "", seed=0, **costs):
    """The compiled engine's result, which the plain one has too."""
    fast = simulate(jobs, cluster, order, placement, ties=ties, seed=seed, **costs)
    check_equal(fast, reference.simulate(jobs, cluster, order, placement, ties, seed, **costs))
    check_schedule(fast)
    return fast


def stretches(result) -> list[tuple[int, float, float, int]]:
    """Of jobs of one piece: the job, when, and on which GPUs."""
    held = result.stretches
    return list(
        zip(held.job.tolist(), held.begin.tolist(), held.end.tolist(), held.on[held.slot[:-1]].tolist(), strict=True)
    )


def test_a_share_stops_no_more_of_its_gpu_than_it_needs():
    """Two halves on GPU 0, a whole job on GPU 1: half a GPU stops the longer half, and 0.8 both."""
    jobs = Jobs([0, 1, 2, 10], [100, 50, 30, 20], [1, 1, 1, 1], milli=[500, 500, 1000, 500])
    half = run(jobs, Cluster.parse("1x2"))
    assert stretches(half) == [(0, 0, 10, 1), (0, 30, 120, 1), (1, 1, 51, 1), (2, 2, 32, 2), (3, 10, 30, 1)]
    jobs.milli[3] = 800
    more = run(jobs, Cluster.parse("1x2"), restart_s=5)
    assert stretches(more) == [
        (0, 0, 10, 1), (0, 30, 125, 1), (1, 1, 10, 1), (1, 30, 76, 1), (2, 2, 32, 2), (3, 10, 30, 1),
    ]  # fmt: skip
    assert more.lost.tolist() == [5, 5, 0, 0]


def test_a_whole_gpu_is_made_of_the_halves_of_one():
    """GPU 0 has jobs of 500 and 500, GPU 1 of 600 and 400, the longest of all. That one is lifted first and goes on in the
    end, since it is the two on GPU 0 that make one whole."""
    jobs = Jobs([0, 1, 2, 3, 5], [40, 20, 30, 50, 3], [1] * 5, milli=[500, 600, 500, 400, 1000])
    result = run(jobs, Cluster.parse("1x2"))
    assert result.stops.tolist() == [1, 0, 1, 0, 0] and result.end.tolist() == [43, 21, 35, 53, 8]
    assert stretches(result)[-1] == (4, 5, 8, 1)


def test_who_goes_on_has_its_very_gpu():
    """The third job needs three cores of four. Both others are lifted, it would take GPU 0, and the first goes on there: so it
    takes GPU 1."""
    jobs = Jobs([0, 0.5, 1], [100, 90, 5], [1, 1, 1], milli=[1000, 1000, 500], cpu=[1000, 3000, 3000])
    result = run(jobs, Cluster.of([NodeGroup(1, 2, cpu=4)]))
    assert stretches(result) == [(0, 0, 100, 1), (1, 0.5, 1, 2), (1, 6, 95.5, 2), (2, 1, 6, 2)]


@pytest.mark.parametrize("order", ["srtf", "time-slices"])
def test_what_is_free_after_stops_is_known(order):
    jobs = Jobs([0, 0, 360], [900, 10, 50], [1, 1, 1], milli=[500, 250, 1000])
    result = run(jobs, Cluster.parse("1x1"), order)
    assert result.stops.tolist() == [1, 0, 0]
    for now, free in ((5.0, 250), (100.0, 500), (365.0, 0), (np.inf, 500)):
        assert free_at(result, now)[0][0, 0] == free


def random_case(seed: int) -> tuple:
    g = np.random.default_rng(seed)
    count = int(g.integers(5, 40))
    groups = [
        NodeGroup(
            int(g.integers(1, 4)), int(g.choice([2, 4, 8])), str(g.choice(["A", "A", "B"])), float(g.choice([0, 16, 48])),
            float(g.choice([0, 0, 8, 16])), float(g.choice([0, 0, 64])),
        )
        for _ in range(int(g.integers(1, 3)))
    ]  # fmt: skip
    pods, gpus = g.choice([0, 0, 0, 1, 2, 3], count), g.choice([0, 1, 1, 1, 2, 2, 3, 4, 8, 12], count)
    slow = float(g.choice([1, 1, 400]))  # so long that levels of service are passed
    jobs = Jobs(
        submit=np.sort(g.integers(0, 40, count)) * slow,
        duration=g.choice([0, 1, 2, 3.5, 10, 20, 30], count) * slow,
        gpus=np.where(pods > 1, np.minimum(gpus, 4) * pods, gpus),
        pods=pods,
        milli=g.choice([1000, 1000, 700, 500, 500, 300, 250], count) if g.random() < 0.85 else None,
        estimate=g.choice([1, 2, 10, 30], count) * slow,
        gpu_memory=g.choice([0, 0, 0, 16, 32], count),
        cpu=g.choice([0, 0, 1000, 4000], count),
        memory=g.choice([0, 0, 1024, 20_000], count),
        types=g.choice([0, 0, 0, 1], count),
        type_sets=((), ("B",)),
        priority=g.integers(0, 4, count),
    )
    policy = (
        str(g.choice(STOPPING)),
        str(g.choice(ON_NODES)),
        str(g.choice(["lowest", "highest", "random"])),
        seed % 5,
    )
    return jobs, Cluster.of(groups), policy, {"restart_s": g.choice([0, 0, 1.5]), "checkpoint_s": g.choice([0, 0, 2.0])}


def test_both_engines_stop_the_same_jobs():
    stops = np.zeros(2, int)  # of whole GPUs, and of shares
    for seed in range(250):
        jobs, cluster, policy, costs = random_case(seed)
        result = run(jobs, cluster, *policy, **costs)
        np.add.at(stops, (jobs.milli < 1000).astype(int), result.stops)
    assert stops.min() > 250


def test_larger_runs_agree():
    """Trees of several levels, and a log that wraps around."""
    g = np.random.default_rng(2)
    jobs = Jobs(
        np.cumsum(g.exponential(0.3, 300)), g.exponential(60, 300).round(), g.choice([1, 1, 1, 2, 4], 300),
        milli=g.choice([1000, 500, 250], 300), cpu=g.choice([1000, 4000], 300),
    )  # fmt: skip
    for order, placement in (("srtf", "fgd"), ("las", "gpu-packing"), ("priority-preemptive", "best")):
        jobs.priority[:] = np.arange(300) % 4
        result = run(jobs, Cluster.of([NodeGroup(18, 2, cpu=16)]), order, placement)
        assert order == "las" or result.stops.sum() > 30
