"""Preemption with racks: which jobs are preempted for a gang, and where it goes."""

from __future__ import annotations

import dataclasses

import numpy as np
from random_traces import TOPOLOGY, preemption_case
from schedules import both, check_locality

from weft.cluster import Cluster, Jobs, NodeGroup, simulate


def preempted_for(gang: int, durations, cluster: Cluster, placement: str) -> tuple[list[int], list[int]]:
    """Whole nodes run jobs of these durations (0: none), the k-th on node k; at 1 s a gang of so many GPUs comes
    that all of them may be stopped for. Where the jobs were that are, and the gang's nodes."""
    held = [n for n, seconds in enumerate(durations) if seconds]
    kinds = tuple(f"k{n}" for n in range(len(durations)))
    cluster = dataclasses.replace(cluster, gpu_type=np.arange(len(kinds)), types=kinds)
    jobs = Jobs(
        [0.0] * len(held) + [1.0], [durations[n] for n in held] + [2.0], [8] * len(held) + [gang],
        types=[n + 1 for n in held] + [0], type_sets=((), *((kind,) for kind in kinds)),
    )  # fmt: skip
    fast = both(jobs, cluster, "srtf", placement)
    assert fast.start[-1] == 1
    where = fast.stretches.where[fast.stretches.slot[-2] : fast.stretches.slot[-1]]
    return [held[j] for j in np.flatnonzero(fast.stops)], sorted(where.tolist())


def test_a_gang_preempts_in_the_rack_with_the_least_important_victims():
    """Racks of two nodes. The two longest jobs, on nodes 1 and 2, lie in different racks: `topology` stops them, since a rack
    would cost a more important one; in a required rack the shortest of those that go is the longest in rack 0."""
    cluster = Cluster.of([NodeGroup(6, rack_nodes=2)])
    durations = [50, 90, 80, 40, 30, 60]
    assert preempted_for(16, durations, cluster, "best") == ([1, 2], [1, 2])
    assert preempted_for(16, durations, cluster, "topology") == ([1, 2], [1, 2])
    assert preempted_for(16, durations, cluster, "topology-required") == ([0, 1], [0, 1])


def test_a_rack_that_costs_no_more_important_job_is_taken():
    """The longest job and one of 80 s, in two racks, would do: so does a rack with two of 80 s, and the one with both."""
    cluster = Cluster.of([NodeGroup(6, rack_nodes=2)])
    for durations, nodes in (([40, 30, 80, 80, 90, 20], [2, 3]), ([40, 30, 80, 60, 90, 80], [4, 5])):
        assert preempted_for(16, durations, cluster, "topology") == (nodes, nodes)
    domains = Cluster.of([NodeGroup(6, rack_nodes=6, nvlink_domain_nodes=2)])
    assert preempted_for(16, [80, 30, 80, 80, 90, 20], domains, "topology") == ([2, 3], [2, 3])


def test_free_nodes_come_before_a_rack():
    """One node is free in each rack: the preference stops nobody; what is required does."""
    cluster = Cluster.of([NodeGroup(4, rack_nodes=2)])
    assert preempted_for(16, [0, 70, 60, 0], cluster, "topology") == ([], [0, 3])
    assert preempted_for(16, [0, 70, 60, 0], cluster, "topology-required") == ([1], [0, 1])


def test_a_gang_is_preempted_whole_and_returns_to_a_rack():
    """The gang in rack 0 makes way for a shorter job on one of its nodes, and goes on when a whole rack is free again."""
    cluster = Cluster.of([NodeGroup(4, rack_nodes=2)])
    jobs = Jobs([0.0, 0.0, 0.0, 5.0], [100.0, 40.0, 20.0, 10.0], [16, 8, 8, 8])
    result = both(jobs, cluster, "srtf", "topology-required", restart_s=3)
    held = result.stretches
    of_gang = [(held.begin[k], held.end[k], sorted(held.where[held.slot[k] : held.slot[k + 1]].tolist()))
               for k in np.flatnonzero(held.job == 0)]  # fmt: skip
    assert of_gang == [(0, 5, [2, 3]), (15, 113, [2, 3])]


def test_both_engines_preempt_the_same_jobs():
    stops = 0
    for seed in range(150):
        jobs, cluster, policy = preemption_case(seed, racks=True)
        fast = both(jobs, cluster, **policy)
        check_locality(fast)
        held = fast.stretches
        racks = [set(cluster.rack[held.where[held.slot[k] : held.slot[k + 1]]].tolist()) for k in range(len(held))]
        assert policy["placement"] == "topology" or max(len(each) for each in racks) <= 1
        stops += fast.stops.sum()
    assert stops > 300


def test_without_racks_preemption_is_that_of_best_fit():
    """One rack, and each node a domain: the same jobs are stopped, on the same nodes."""
    g = np.random.default_rng(0)
    jobs = Jobs(np.cumsum(g.exponential(1, 400)), g.exponential(80, 400), g.choice([1, 2, 4, 8, 12, 24], 400))
    for order in ("srtf", "las"):
        best, *others = (simulate(jobs, Cluster.parse("12x8"), order, each) for each in ("best", *TOPOLOGY))
        for found in others:
            assert found.stops.tolist() == best.stops.tolist() and found.end.tolist() == best.end.tolist()
            assert found.stretches.where.tolist() == best.stretches.where.tolist()
        assert best.stops.sum() > 0 or order == "las"
