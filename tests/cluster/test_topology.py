"""Racks and NVLink domains: where gangs go, what they wait for, and how near to each other they were."""

import dataclasses
import re

import numpy as np
import pytest
from random_traces import TOPOLOGY as PLACEMENTS
from schedules import both, waits

from weft.cluster import Cluster, Jobs, NodeGroup, Simulator, cluster_file, reference, simulate
from weft.cluster.metrics import locality

FOUR = Cluster.of([NodeGroup(4, rack_nodes=2)])  # in two racks


def jobs_of(*asked, submit=(), duration=(), **more) -> Jobs:
    count = len(asked)
    return Jobs(np.array(submit or [0.0] * count), np.array(duration or [10.0] * count), np.array(asked), **more)


def nodes_of(result, j: int) -> list[int]:
    held = result.stretches
    return held.where[held.slot[j] : held.slot[j + 1]].tolist()


def placed(jobs: Jobs, cluster: Cluster, placement: str, order: str = "fifo-skip") -> list[list[int]]:
    """The nodes of each job, the same from both engines."""
    result = both(jobs, cluster, order, placement)
    return [nodes_of(result, j) for j in range(len(jobs))]


def test_groups_are_cut_into_racks_and_domains():
    named = {"rack": "x", "nvlink_domain": "d"}
    cut = NodeGroup(5, rack_nodes=2), NodeGroup(4, rack_nodes=4, nvlink_domain_nodes=2)
    cluster = Cluster.of([*cut, NodeGroup(2, **named), NodeGroup(1, **named), NodeGroup(1)])
    assert cluster.rack.tolist() == [0, 0, 1, 1, 2, 3, 3, 3, 3, 4, 4, 4, 5]
    assert cluster.racks == (*(f"node-rack-{k}" for k in range(4)), "x", "")
    assert cluster.domain.tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 7, 7, 8]
    usual = Cluster.parse("3x8,2x4")
    assert usual.rack.tolist() == [0] * 5 and usual.domain.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("group", "words"), [
    ({"rack_nodes": 0}, "rack_nodes is 0; expected 1 or more nodes"),
    ({"nvlink_domain_nodes": -1}, "nvlink_domain_nodes is -1; expected 1 or more nodes"),
    ({"rack_nodes": 2, "rack": "x"}, "rack and rack_nodes are both given; expected one of them"),
    ({"nvlink_domain_nodes": 2, "nvlink_domain": "x"}, "nvlink_domain and nvlink_domain_nodes are both given"),
    ({"rack_nodes": 5, "nvlink_domain_nodes": 2}, "expected whole domains in a rack"),
    ({"rack_nodes": 2, "nvlink_domain": "d"}, "'d' is in racks 'node-rack-0' and 'node-rack-1'; expected one"),
])  # fmt: skip
def test_an_invalid_group_is_refused(tmp_path, group, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Cluster.of([NodeGroup(4, **group)])
    pytest.importorskip("yaml")
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n- count: 4\n" + "".join(f"  {key}: {value}\n" for key, value in group.items()))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        cluster_file.load(path)


def test_racks_in_a_cluster_file(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n- {count: 8, gpus: 4, rack_nodes: 4, nvlink_domain_nodes: 2}\n- {count: 1, rack: x}\n")
    cluster = cluster_file.load(path)
    assert cluster.rack.tolist() == [0] * 4 + [1] * 4 + [2] and cluster.domain.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_the_stepping_simulator_knows_racks():
    sim = Simulator("fifo", "topology-required")
    for name, rack in (("a", "r"), ("b", "s"), ("c", "s")):
        sim.add_node(name, gpus=8, rack=rack, nvlink_domain=rack)
    sim.add_job("two", gpus=16)
    with pytest.raises(ValueError, match="its 3 pieces need one rack, and the closest, 's', takes 2 of them"):
        sim.add_job("three", gpus=24)
    assert sim.run().status()["jobs"]["two"]["nodes"] == ["b", "c"]
    with pytest.raises(ValueError, match="node 'd': nvlink_domain 'r' is in another rack"):
        sim.add_node("d", gpus=8, rack="s", nvlink_domain="r")


def test_best_fit_spreads_a_gang_that_one_rack_could_take():
    """A job on node 0 leaves one whole node to rack 0 and two to rack 1."""
    jobs = jobs_of(1, 16)
    assert placed(jobs, FOUR, "best") == [[0], [1, 2]]
    for placement in PLACEMENTS:
        assert placed(jobs, FOUR, placement) == [[0], [2, 3]]


def test_a_gang_takes_the_fullest_rack_that_fits():
    """Racks of 4, 3 and 3 nodes, of which one of the last is taken: 2 nodes fill the last one, and 3 the second."""
    cluster = Cluster.of([NodeGroup(4, rack="a"), NodeGroup(3, rack="b"), NodeGroup(3, rack="c", gpu_type="z")])
    jobs = jobs_of(8, 16, 24, types=np.array([1, 0, 0]), type_sets=((), ("z",)))
    for placement in PLACEMENTS:
        assert placed(jobs, cluster, placement) == [[7], [8, 9], [4, 5, 6]]


def test_a_domain_comes_before_the_fullest_rack():
    """Rack 0 has three free nodes in two domains, rack 1 four in two: two nodes lie in one domain of rack 0."""
    cluster = Cluster.of([NodeGroup(8, rack_nodes=4, nvlink_domain_nodes=2)])
    for placement in PLACEMENTS:
        assert placed(jobs_of(8, 16), cluster, placement) == [[0], [2, 3]]
        assert placed(jobs_of(8, 16, 8), cluster, placement) == [[0], [2, 3], [1]]
        # One node of each domain of rack 0 is taken: two nodes leave it, though it is the fuller one.
        jobs = jobs_of(8, 16, 8, 8, 16, submit=[0.0, 0.0, 0.0, 20.0, 30.0], duration=[99.0, 9.0, 9.0, 99.0, 9.0])
        assert placed(jobs, cluster, placement)[4] == [2, 3]
        jobs = jobs_of(16, 8, 16, 8, submit=[0.0, 0.0, 20.0, 0.0], duration=[9.0, 99.0, 9.0, 9.0])
        assert placed(jobs, cluster, placement)[3] == [0, 1]


def test_a_gang_takes_the_fullest_domain():
    """One rack of two domains of three nodes: a node of the second is taken, the other two of it fit two pieces."""
    kinds = (("d", "gpu"), ("e", "z"))
    cluster = Cluster.of([NodeGroup(3, gpu_type=kind, rack="r", nvlink_domain=domain) for domain, kind in kinds])
    jobs = jobs_of(8, 16, 8, types=np.array([1, 0, 0]), type_sets=((), ("z",)))
    for placement in PLACEMENTS:
        assert placed(jobs, cluster, placement) == [[3], [4, 5], [0]]


def test_a_gang_that_no_rack_takes():
    """Racks of 2, 3 and 4 nodes: six nodes are the largest rack and the tightest that takes the other two."""
    cluster = Cluster.of([NodeGroup(2, rack="a"), NodeGroup(3, rack="b"), NodeGroup(4, rack="c")])
    assert placed(jobs_of(48), cluster, "topology") == [[5, 6, 7, 8, 0, 1]]
    assert placed(jobs_of(44), cluster, "topology") == [[5, 6, 7, 8, 0, 1]]
    never = simulate(jobs_of(48), cluster, "fifo", "topology-required").unschedulable[0]
    assert never == "its 6 pieces need one rack, and the closest, 'c', takes 4 of them"
    assert "its 10 pieces need" not in simulate(jobs_of(80), cluster, "fifo", "topology-required").unschedulable[0]


def test_pods_share_nodes_of_one_domain():
    """Four pods of 4 GPUs fill two nodes of a domain; with cores for one pod a node they take a rack."""
    cluster = Cluster.of([NodeGroup(8, rack_nodes=4, nvlink_domain_nodes=2, cpu=10)])
    jobs = jobs_of(1, 16, pods=np.array([0, 4]))
    for placement in PLACEMENTS:
        assert placed(jobs, cluster, placement) == [[0], [2, 2, 3, 3]]
        cores = dataclasses.replace(jobs, cpu=np.array([1000, 24_000]))
        assert placed(cores, cluster, placement) == [[0], [0, 1, 2, 3]]


def test_small_jobs_leave_nodes_and_racks_to_gangs():
    """Whole nodes of the smaller rack go first, best fit would begin with node 0; a node in use comes before any of them."""
    cluster = Cluster.of([NodeGroup(4, rack="a"), NodeGroup(3, rack="b")])
    for placement in PLACEMENTS:
        assert placed(jobs_of(8, 8, 16), cluster, placement) == [[4], [5], [0, 1]]
        jobs = jobs_of(24, 1, 2, 8, 1, submit=[0.0, 0.0, 5.0, 6.0, 7.0], duration=[4.0, 9.0, 9.0, 9.0, 9.0])
        assert placed(jobs, cluster, placement) == [[4, 5, 6], [0], [0], [4], [0]]
    assert placed(jobs_of(8, 8, 16), cluster, "best") == [[0], [1], [2, 3]]


def test_a_gang_waits_for_a_rack():
    """From 1 s on one node is free, from 2 s on two in two racks, from 5 s on all of rack 1."""
    jobs = jobs_of(8, 8, 8, 16, submit=[0.0, 0.0, 0.0, 1.0], duration=[20.0, 2.0, 5.0, 3.0])
    assert placed(jobs, FOUR, "topology-required", "fifo") == [[0], [1], [2], [2, 3]]
    assert waits(simulate(jobs, FOUR, "fifo", "topology-required"), 3) == {"capacity": 1, "topology": 3}
    assert placed(jobs, FOUR, "topology", "fifo")[3] == [1, 3]
    assert simulate(jobs, FOUR, "fifo", "topology").start[3] == 2


def test_a_gang_of_pods_waits_for_topology_only_where_all_nodes_would_do():
    """Four pods of 4 GPUs: from 0 s on three fit, then four in two racks, then four in one."""
    times = {"submit": [0.0] * 4 + [1.0], "duration": [9.0, 3.0, 5.0, 99.0, 1.0]}
    jobs = jobs_of(5, 5, 5, 5, 16, pods=np.array([0, 0, 0, 0, 4]), **times)
    assert placed(jobs, FOUR, "topology-required", "fifo") == [[0], [1], [2], [3], [0, 0, 1, 1]]
    result = simulate(jobs, FOUR, "fifo", "topology-required")
    # 12 GPUs are free at first; 17 from 3 s on, in pods of 4 only 2; 22 from 5 s on, in pods 4.
    assert waits(result, 4) == {"capacity": 2, "gang": 2, "topology": 4}


def test_under_easy_backfill_the_head_reserves_a_rack():
    """Rack 1 is free at 6 s, any two nodes at 4 s: 3 s on node 3 are in the way of a gang that goes anywhere, not of one that
    goes into a rack."""
    submit, duration = [0.0, 0.0, 0.0, 1.0, 2.0, 2.5], [4.0, 10.0, 6.0, 5.0, 3.0, 20.0]
    jobs = jobs_of(8, 8, 8, 16, 8, 8, submit=submit, duration=duration)
    assert placed(jobs, FOUR, "topology-required", "fifo-easy") == [[0], [1], [2], [2, 3], [3], [0]]
    assert simulate(jobs, FOUR, "fifo-easy", "topology-required").start.tolist() == [0, 0, 0, 6, 2, 4]
    assert placed(jobs, FOUR, "topology", "fifo-easy")[3] == [0, 3]
    assert simulate(jobs, FOUR, "fifo-easy", "topology").start[3:5].tolist() == [4, 6]


def test_conservative_backfill_is_refused():
    cluster, jobs = Cluster.parse("2x8"), jobs_of(1)
    for placement in PLACEMENTS:
        for run in (simulate, reference.simulate):
            with pytest.raises(ValueError, match=f"placement '{placement}' with order 'fifo-conservative'"):
                run(jobs, cluster, "fifo-conservative", placement)


def test_without_racks_topology_is_best_fit():
    """One rack, and each node a domain: whole nodes and remainders of gangs, and small jobs, go where best fit puts them."""
    g = np.random.default_rng(0)
    jobs = Jobs(np.cumsum(g.exponential(1, 400)), g.exponential(40, 400), g.choice([1, 2, 4, 8, 12, 24], 400))
    cluster = Cluster.parse("12x8")
    best = simulate(jobs, cluster, "fifo-skip", "best")
    for placement in PLACEMENTS:
        found = simulate(jobs, cluster, "fifo-skip", placement)
        assert found.start.tolist() == best.start.tolist() and found.waited.tolist() == best.waited.tolist()
        assert found.stretches.where.tolist() == best.stretches.where.tolist()


def test_topology_brings_gangs_nearer():
    g = np.random.default_rng(2)
    jobs = Jobs(np.cumsum(g.exponential(3, 2000)), g.exponential(100, 2000), g.choice([1, 2, 4, 8, 16, 32], 2000))
    cluster = Cluster.of([NodeGroup(64, rack_nodes=8)])
    best, near, one = (locality(simulate(jobs, cluster, "fifo-skip", p)) for p in ("best", *PLACEMENTS))
    assert best["one_rack"] < near["one_rack"] < one["one_rack"] == 1
    assert best["racks_mean"] > near["racks_mean"] > one["racks_mean"] == 1
