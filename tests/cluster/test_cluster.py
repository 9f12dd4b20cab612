"""The cluster simulator: a small example, the compiled engine against the reference simulator, by which nodes gangs are cut,
and what jobs lack that can never run."""

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest
from random_traces import random_case
from schedules import both, check_equal, waited_for, waits

from weft.cluster import Cluster, Jobs, NodeGroup, Simulator, reference, simulate
from weft.cluster.allocations import of as pieces_of
from weft.cluster.engine import node as engine
from weft.cluster.engine import tables
from weft.cluster.engine.classes import classify
from weft.cluster.metrics import summary
from weft.cluster.placements import PLACEMENTS
from weft.cluster.synthetic.generate import generate


def scene(placement: str) -> Simulator:
    """Three nodes (4 × 24 GB, 2 × 48 GB, 8 × 16 GB) and four jobs."""
    sim = Simulator(placement=placement)
    for name, gpus, memory in (("a", 4, 24), ("b", 2, 48), ("c", 8, 16)):
        sim.add_node(name, gpus=gpus, gpu_memory_gb=memory)
    for name, gpus, memory, duration in (("j0", 2, 16, 5), ("j1", 1, 24, 3), ("j2", 4, 12, 8), ("j3", 2, 32, 4)):
        sim.add_job(name, gpus=gpus, memory_per_gpu_gb=memory, duration=duration)
    return sim


@pytest.mark.parametrize(("placement", "nodes", "last", "starts"), [
    ("first", "aacb", 8.0, [0, 0, 0, 0]),
    ("best", "bacb", 9.0, [0, 0, 0, 5]),  # j0 takes the only node that j3 fits
    ("worst", "cacb", 8.0, [0, 0, 0, 0]),
    ("consolidate", "bacb", 9.0, [0, 0, 0, 5]),
])  # fmt: skip
def test_the_scene(placement, nodes, last, starts):
    sim = scene(placement).run()
    jobs = sim.status()["jobs"].values()
    assert "".join(job["nodes"][0] for job in jobs) == nodes
    assert [job["start"] for job in jobs] == starts and sim.now == last
    assert all(job["state"] == "completed" for job in jobs)
    assert all(occupant is None for node in sim.status()["nodes"].values() for occupant in node)


def test_a_step_goes_to_the_next_event():
    sim = scene("best")
    assert [what for _, what, _ in sim.step()] == ["pending"] * 4 + ["running"] * 3
    assert sim.status()["nodes"] == {"a": ["j1", *[None] * 3], "b": ["j0", "j0"], "c": [*["j2"] * 4, *[None] * 4]}
    assert sim.status()["jobs"]["j3"] == {"state": "pending", "start": None, "end": None, "nodes": [], "waited": {}}
    assert sim.step() == [(3.0, "completed", "j1")]
    assert sim.step() == [(5.0, "completed", "j0"), (5.0, "running", "j3")]
    sim.add_job("late", gpus=1, duration=1)
    assert sim.step() == [(5.0, "pending", "late"), (5.0, "running", "late")]
    sim.run()
    assert sim.step() == [] and len(sim.history) == 15


@pytest.mark.parametrize(("call", "words"), [
    (lambda s: s.add_node("a", 1), "node 'a' already exists"),
    (lambda s: s.add_job("j0", 1), "job 'j0' already exists"),
    (lambda s: s.add_job("x", 4, 64), "job 'x' can never run: the closest node, a, lacks 64 GB a GPU (it has 24)"),
    (lambda s: s.add_job("x", 4, 32), "it needs 2 free nodes of 2 GPUs that fit it, and the cluster has 1"),
    (lambda s: s.add_job("x", 1, duration=-1), "duration of job 'x' (row 0) is -1.0"),
    (lambda s: s.run().add_job("x", 1, submit=2), "submitted at 2 s, and it is 9 s already"),
    (lambda s: Simulator(placement="bset"), "unknown placement 'bset'; did you mean 'best'?"),
    (lambda s: Simulator(placement="./mine.py"), "placement: there is no file"),
    (lambda s: Simulator(order="ffio-skip"), "unknown order 'ffio-skip'; did you mean 'fifo-skip'?"),
    (lambda s: Simulator(ties="lowst"), "unknown rule for ties 'lowst'; did you mean 'lowest'?"),
])  # fmt: skip
def test_the_simulator_says_what_is_wrong(call, words):
    sim = scene("best")
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)):
        call(sim)
    assert set(sim.jobs) == {"j0", "j1", "j2", "j3"}


def test_what_a_notebook_prints_is_one_line():
    jobs = Jobs([0, 7.2, 90_000], [5, 5, 5], [1, 16, 99], tenant=[0, 1, 1], tenants=("a", "b"))
    cluster = Cluster.of([NodeGroup(2, 8, "A", rack="r"), NodeGroup(1, 4, "B")])
    assert repr(jobs) == "<Jobs: 3 jobs, submitted from 0 to 90,000 s, of 1 to 99 GPUs, 2 tenants>"
    assert repr(jobs.take(np.array([0]))) == "<Jobs: 1 job, submitted from 0 to 0 s, of 1 to 1 GPU, 2 tenants>"
    assert repr(jobs.take(np.zeros(3, bool))) == "<Jobs: 0 jobs>"
    assert repr(jobs.read_only()).startswith("<ReadOnlyJobs: 3")
    assert repr(cluster) == "<Cluster: 3 nodes in 2 racks, 20 GPUs of 2 types>"
    assert repr(simulate(jobs, cluster)) == "<Result: fifo, best (ties: lowest), 2 of 3 jobs ran on 3 nodes, 20 GPUs>"


@pytest.mark.parametrize("text", ["", "20", "x8", "20x", "0x8", "2x8,", "-1x8", "2x8;2x4"])
def test_wrong_nodes_are_refused(text):
    with pytest.raises(ValueError, match="nodes '"):
        Cluster.parse(text)


@pytest.mark.parametrize("policy", [("fifo", "best"), ("fifo", "counted"), ("time-slices", "best")])
def test_a_cluster_without_nodes_is_refused(policy):
    with pytest.raises(ValueError, match="the cluster has no nodes; expected at least one"):
        simulate(Jobs([0], [1], [1]), Cluster.of([]), *policy)


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: NodeGroup(1.5), TypeError, "count is 1.5; expected a whole number"),
    (lambda: NodeGroup(1, 2.5), TypeError, "gpus is 2.5; expected a whole number"),
    (lambda: NodeGroup(1, gpu_memory_gb=float("nan")), ValueError, "gpu_memory_gb is nan; expected 0 or more"),
    (lambda: NodeGroup(1, cpu=1e30), ValueError, "expected at most 1,000,000,000"),
    (lambda: NodeGroup(1, cpu=1e-9), ValueError, "expected 0, or 0.001 or more"),
    (lambda: Jobs([0.0], [1.0], [1.5]), ValueError, "gpus of row 0 is 1.5; expected a whole number"),
    (lambda: Jobs([0.0], [1.0], [float("nan")]), ValueError, "gpus of row 0 is nan"),
    (lambda: Jobs([0.0, 1.0], [1.0, 1.0], [1, 1], id=["a"]), ValueError, "'id' has 1 rows and 'submit' has 2"),
    (lambda: Jobs([0.0], [1.0], [1], tenant=[3]), ValueError, "tenant of job 0 .* is 3; expected an index below 1"),
    (lambda: Jobs([[0.0]], [[1.0]], [[1]]), ValueError, "'submit' has 2 dimensions; expected one"),
])  # fmt: skip
def test_nodes_and_jobs_from_python_are_checked(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    "seeds",
    [range(180, 240), *(pytest.param(range(k, k + 300), marks=pytest.mark.long) for k in range(240, 3240, 300))],
)
def test_both_engines_give_the_same_schedule(seeds):
    """Of jobs that wait for a quota or a rack, that are stopped, and gangs that lie in several racks."""
    found = Counter()
    for seed in seeds:
        jobs, cluster, policy = random_case(seed)
        result = both(jobs, cluster, **policy)
        shares = jobs.milli < 1000
        found["stops of shares"] += result.stops[shares].sum()
        found["other stops"] += result.stops[~shares].sum()
        found["waits for a quota"] += (waited_for(result, "quota") > 0).sum()
        found["waits for a rack"] += (waited_for(result, "topology") > 0).sum()
        found["gangs"] += summary(result)["locality"]["gangs"]
    assert len(found) == 5 and min(found.values()) > len(seeds) / 40, found


@pytest.mark.parametrize("placement", ["best", "random", "fgd"])
def test_pods_of_several_shares_fill_a_node(placement):
    """Three pods of half of two GPUs on three GPUs: the tightest GPUs for each would leave two halves of one to the last."""
    fast = both(Jobs([0], [1], [6], pods=[3], milli=[500]), Cluster.parse("1x3"), "fifo-skip", placement)
    assert fast.start.tolist() == [0] and sorted(fast.stretches.on.tolist()) == [0b011, 0b101, 0b110]


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("placement", "ties"), [("best", "lowest"), ("worst", "highest"), ("random", "random"), ("best", "random")]
)
def test_many_nodes_and_jobs_still_agree(placement, ties):
    """Trees of several levels, and a log that wraps around."""
    g = np.random.default_rng(1)
    submit, duration = np.cumsum(g.exponential(0.45, 500)), g.exponential(60, 500).round()
    jobs = Jobs(submit, duration, g.choice([1, 2, 4, 8, 24], 500, p=[0.5, 0.2, 0.15, 0.1, 0.05]))
    cluster = Cluster.parse("50x8")
    more = {"ties": ties, "seed": 5}
    fast = simulate(jobs, cluster, "fifo-skip", placement, **more)
    check_equal(fast, reference.simulate(jobs, cluster, "fifo-skip", placement, **more))
    assert 2 * len(fast.stretches.where) > 1024 and (fast.queueing > 0).sum() > 40


def test_placements_that_look_at_free_gpus_alone_share_one_index():
    jobs = Jobs(submit=[0, 0], duration=[1, 1], gpus=[1, 2], cpu=[0, 1000])
    cluster = Cluster.of([NodeGroup(3, 4, "A"), NodeGroup(2, 2, "B")])
    _, classes, pieces, members = classify(jobs, cluster)
    shared = set()
    for name, each in PLACEMENTS.items():
        state = tables.state(jobs, cluster, pieces, classes, members, each, "lowest", 0, each.detailed)
        if state.meta[engine.BUCKETS]:
            shared.add(name)
    assert shared == {"best", "consolidate", "counted", "first", "random", "worst"}


@pytest.mark.share(3)
@pytest.mark.parametrize("order", ["fifo-skip", "fifo-easy", "fifo-conservative"])
@pytest.mark.parametrize("placement", ["best", "first", "worst"])
@pytest.mark.parametrize("ties", ["lowest", pytest.param("highest", marks=pytest.mark.long)])
def test_full_nodes_with_many_kinds_of_requests_still_agree(order, placement, ties):
    """The searches come to blocks where the node with cores is not the one with memory, and have to leave them again."""
    cluster = Cluster.of([NodeGroup(20, 8, kind, cpu=32, memory_gb=64) for kind in ("A", "B")])
    made = generate(120, cluster, load=4.0, sizes={1: 0.6, 2: 0.2, 4: 0.1, 8: 0.05, 24: 0.05}, sigma=0.5)
    g = np.random.default_rng(1)
    jobs = dataclasses.replace(
        made, cpu=np.minimum(made.gpus * g.choice([0, 1000, 4000, 12_000], len(made)), 32_000),
        memory=np.minimum(made.gpus * g.choice([0, 2048, 8192, 24_576], len(made)), 65_536),
        types=g.choice([0, 1, 2], len(made)), type_sets=((), ("A",), ("B",)),
    )  # fmt: skip
    assert (both(jobs, cluster, order, placement, ties=ties).queueing > 0).sum() > 10


@pytest.mark.parametrize(("job", "running", "reason"), [
    ({"gpus": 4}, [8, 8, 8], "capacity"), ({"gpus": 4, "types": 1}, [0, 0, 8], "type"),
    ({"gpus": 4, "gpu_memory": 40}, [0, 8, 0], "memory"), ({"gpus": 16}, [1, 1, 0], "gang"),
    ({"gpus": 4, "cpu": 8000}, [2, 2, 2], "host"), ({"gpus": 8}, [1, 1, 1], "fragmentation"),
])  # fmt: skip
def test_what_a_job_waits_for(job, running, reason):
    """Three nodes of 8 GPUs and 8 cores; the second alone has large GPUs, the third alone is of type B."""
    nodes = [NodeGroup(1, 8, "A", 16, cpu=8), NodeGroup(1, 8, "A", 80, cpu=8), NodeGroup(1, 8, "B", 16, cpu=8)]
    used = [n for n in range(3) if running[n]]

    def column(name, by_node, usual=0):
        return [by_node[n] for n in used] + [job.get(name, usual)]

    jobs = Jobs(
        column("submit", [0] * 3, 1), column("duration", [10] * 3, 1), column("gpus", running),
        types=column("types", [2, 2, 1]), gpu_memory=column("gpu_memory", [0, 80, 0]), cpu=column("cpu", [1000] * 3),
        type_sets=((), ("B",), ("A",)),
    )  # fmt: skip
    assert waits(simulate(jobs, Cluster.of(nodes), "fifo", "first"), -1) == {reason: 9}


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
