"""Preemption where single GPUs are tracked: by hand, and both engines on random clusters and jobs."""

from __future__ import annotations

import numpy as np
import pytest
from random_traces import preemption_case
from schedules import both

from weft.cluster import Cluster, Jobs, NodeGroup
from weft.cluster.fragmentation import free_at


def stretches(result) -> list[tuple[int, float, float, int]]:
    """Of jobs of one piece: the job, when, and on which GPUs."""
    held = result.stretches
    return list(
        zip(held.job.tolist(), held.begin.tolist(), held.end.tolist(), held.on[held.slot[:-1]].tolist(), strict=True)
    )


def test_a_share_preempts_no_more_of_its_gpu_than_it_needs():
    """Two halves on GPU 0, a whole job on GPU 1: half a GPU stops the longer half, and 0.8 both."""
    jobs = Jobs([0, 1, 2, 10], [100, 50, 30, 20], [1, 1, 1, 1], milli=[500, 500, 1000, 500])
    half = both(jobs, Cluster.parse("1x2"), "srtf")
    assert stretches(half) == [(0, 0, 10, 1), (0, 30, 120, 1), (1, 1, 51, 1), (2, 2, 32, 2), (3, 10, 30, 1)]
    jobs.milli[3] = 800
    more = both(jobs, Cluster.parse("1x2"), "srtf", restart_s=5)
    assert stretches(more) == [
        (0, 0, 10, 1), (0, 30, 125, 1), (1, 1, 10, 1), (1, 30, 76, 1), (2, 2, 32, 2), (3, 10, 30, 1),
    ]  # fmt: skip
    assert more.lost.tolist() == [5, 5, 0, 0]


def test_a_whole_gpu_is_made_of_the_halves_of_one():
    """GPU 0 has jobs of 500 and 500, GPU 1 of 600 and 400, the longest of all. That one is lifted first and goes on in the
    end, since it is the two on GPU 0 that make one whole."""
    jobs = Jobs([0, 1, 2, 3, 5], [40, 20, 30, 50, 3], [1] * 5, milli=[500, 600, 500, 400, 1000])
    result = both(jobs, Cluster.parse("1x2"), "srtf")
    assert result.stops.tolist() == [1, 0, 1, 0, 0] and result.end.tolist() == [43, 21, 35, 53, 8]
    assert stretches(result)[-1] == (4, 5, 8, 1)


def test_a_reprieved_job_keeps_its_own_gpu():
    """The third job needs three cores of four. Both others are lifted, it would take GPU 0, and the first goes on there: so it
    takes GPU 1."""
    jobs = Jobs([0, 0.5, 1], [100, 90, 5], [1, 1, 1], milli=[1000, 1000, 500], cpu=[1000, 3000, 3000])
    result = both(jobs, Cluster.of([NodeGroup(1, 2, cpu=4)]), "srtf")
    assert stretches(result) == [(0, 0, 100, 1), (1, 0.5, 1, 2), (1, 6, 95.5, 2), (2, 1, 6, 2)]


@pytest.mark.parametrize("order", ["srtf", "time-slices"])
def test_free_gpus_after_preemptions(order):
    jobs = Jobs([0, 0, 360], [900, 10, 50], [1, 1, 1], milli=[500, 250, 1000])
    result = both(jobs, Cluster.parse("1x1"), order)
    assert result.stops.tolist() == [1, 0, 0]
    for now, free in ((5.0, 250), (100.0, 500), (365.0, 0), (np.inf, 500)):
        assert free_at(result, now)[0][0, 0] == free


def test_both_engines_preempt_the_same_jobs():
    stops = np.zeros(2, int)  # of whole GPUs, and of shares
    for seed in range(250):
        jobs, cluster, policy = preemption_case(seed, racks=False)
        result = both(jobs, cluster, **policy)
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
        result = both(jobs, Cluster.of([NodeGroup(18, 2, cpu=16)]), order, placement)
        assert order == "las" or result.stops.sum() > 30
