"""Gangs: by which nodes they are cut, and what they lack."""

from __future__ import annotations

import pytest
from schedules import both

from weft.cluster import Cluster, Jobs, NodeGroup, simulate
from weft.cluster.allocations import of as pieces_of

MIXED = [NodeGroup(2, 8, "A", 40, cpu=32), NodeGroup(3, 4, "B", 80, cpu=32), NodeGroup(4, 2, "B", 80, cpu=64)]


@pytest.mark.parametrize(
    ("asked", "pieces"),
    [
        ({"gpus": [8]}, [8]),
        ({"gpus": [8], "types": [1]}, [4, 4]),  # of nodes of 4, since it accepts no other type of so many
        ({"gpus": [10], "types": [1]}, [4, 4, 2]),
        ({"gpus": [6], "gpu_memory": [60.0]}, [4, 2]),
        ({"gpus": [6], "cpu": [96_000]}, [2, 2, 2]),  # 16 cores a GPU
        ({"gpus": [12], "cpu": [96_000]}, [4, 4, 4]),  # 8 cores a GPU: nodes of 8 have 4
        ({"gpus": [12], "memory": [1]}, [8, 4]),
    ],
)
@pytest.mark.parametrize(
    "policy", [("fifo", "best"), ("fifo-conservative", "first"), ("srtf", "topology"), ("fifo", "fgd")]
)
def test_a_gang_is_cut_by_the_largest_node_that_it_accepts(asked, pieces, policy):
    jobs = Jobs([0], [1], type_sets=((), ("B",)), **asked)
    cluster = Cluster.of(MIXED)
    fast = both(jobs, cluster, *policy)
    assert fast.end.tolist() == [1] and sorted(pieces_of(fast).gpus, reverse=True) == pieces


@pytest.mark.parametrize("order", ["fifo", "fifo-conservative"])
def test_cores_and_memory_are_divided_in_whole_numbers(order):
    """9 / 14 of 42 cores as a quotient are a thousandth more than the 27 that a node has."""
    jobs = Jobs([0, 1], [1, 1], [14, 14], cpu=[42_000] * 2, memory=[14 * 1024] * 2, pods=[0, 7])
    cluster = Cluster.of([NodeGroup(2, 9, cpu=27, memory_gb=9)])
    fast = both(jobs, cluster, order)
    assert fast.end.tolist() == [1, 2] and pieces_of(fast).gpus[:2].tolist() == [9, 5]


def test_a_gang_that_cannot_run_reports_what_accepted_nodes_lack():
    """The last job would come in parts of 2 and 1, were it not that both fit a node of 8 together: parts never share one."""
    asked = {"types": [1, 1, 1, 0], "cpu": [0, 0, 300_000, 99_000]}
    jobs = Jobs([0] * 4, [1] * 4, [24, 16, 3, 11], type_sets=((), ("B",)), **asked)
    why = simulate(jobs, Cluster.of(MIXED)).unschedulable
    assert why == {
        0: "it needs 6 free nodes of 4 GPUs that fit it, and the cluster has 3",
        1: "it needs 4 free nodes of 4 GPUs that fit it, and the cluster has 3",
        2: "the closest node, node-2, lacks 300 cores (it has 32)",
        3: "the closest node, node-0, lacks 72 cores (it has 32)",
    }
