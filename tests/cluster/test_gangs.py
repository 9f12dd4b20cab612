"""Gangs: by which nodes they are cut; jobs that can never run: what they lack."""

import numpy as np
import pytest
from schedules import both

from weft.cluster import Cluster, Jobs, NodeGroup, simulate
from weft.cluster.allocations import of as pieces_of

MIXED = [NodeGroup(2, 8, "A", 40, cpu=32), NodeGroup(3, 4, "B", 80, cpu=32), NodeGroup(4, 2, "B", 80, cpu=64)]


POLICIES = [("fifo", "best"), ("fifo-conservative", "first"), ("srtf", "topology"), ("fifo", "fgd")]


@pytest.mark.parametrize(("asked", "pieces"), [
    ({"gpus": [8]}, [8]),
    ({"gpus": [8], "types": [1]}, [4, 4]),  # of nodes of 4, since it accepts no other type of so many
    ({"gpus": [10], "types": [1]}, [4, 4, 2]),
    ({"gpus": [6], "gpu_memory": [60.0]}, [4, 2]),
    ({"gpus": [6], "cpu": [96_000]}, [2, 2, 2]),  # 16 cores a GPU
    ({"gpus": [12], "cpu": [96_000]}, [4, 4, 4]),  # 8 cores a GPU: nodes of 8 have 4
    ({"gpus": [12], "memory": [1]}, [8, 4]),
])  # fmt: skip
@pytest.mark.parametrize("policy", POLICIES)
def test_a_gang_is_cut_by_the_largest_node_that_it_accepts(asked, pieces, policy):
    fast = both(Jobs([0], [1], type_sets=((), ("B",)), **asked), Cluster.of(MIXED), *policy)
    assert fast.end.tolist() == [1] and sorted(pieces_of(fast).gpus, reverse=True) == pieces


@pytest.mark.parametrize("order", ["fifo", "fifo-conservative"])
def test_cores_and_memory_are_divided_in_whole_numbers(order):
    """9 / 14 of 42 cores as a quotient are a thousandth more than the 27 that a node has."""
    jobs = Jobs([0, 1], [1, 1], [14, 14], cpu=[42_000] * 2, memory=[14 * 1024] * 2, pods=[0, 7])
    fast = both(jobs, Cluster.of([NodeGroup(2, 9, cpu=27, memory_gb=9)]), order)
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


def test_a_job_that_can_never_run_is_reported_and_the_others_run():
    jobs = Jobs(submit=[0, 0, 0], duration=[1, 1, 1], gpus=[8, 1, 40], gpu_memory=[0, 100, 0])
    result = simulate(jobs, Cluster.parse("4x8", gpu_memory_gb=80))
    assert result.unschedulable[1] == "the closest node, node-0, lacks 100 GB a GPU (it has 80)"
    assert result.unschedulable[2] == "it needs 5 free nodes of 8 GPUs that fit it, and the cluster has 4"
    assert len(result.unschedulable) == 2 and result.start[0] == 0 and np.isnan(result.start[1:]).all()


def test_missing_cores_of_pods_without_gpus_are_reported():
    why = simulate(Jobs([0], [1], [0], pods=[4], cpu=[64_000]), Cluster.of([NodeGroup(1, cpu=32)])).unschedulable[0]
    assert why == "it comes in 4 pods of 0 GPUs, and all of them do not fit at once even when nothing else runs"


def test_of_nodes_that_lack_as_much_one_of_the_right_type_is_nearer():
    cluster = Cluster.of([NodeGroup(1, 8, "H100", 80), NodeGroup(1, 8, "A100", 40)])
    jobs = Jobs(submit=[0], duration=[1], gpus=[1], gpu_memory=[70], types=[1], type_sets=((), ("A100",)))
    assert simulate(jobs, cluster).unschedulable == {0: "the closest node, node-1, lacks 70 GB a GPU (it has 40)"}
