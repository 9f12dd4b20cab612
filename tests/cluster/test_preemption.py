"""Orders that preempt: published results, costs, theory, what is saved of a run, shares of GPUs, racks, and both engines."""

import dataclasses
import json

import numpy as np
import pytest
from random_traces import TOPOLOGY
from sample_traces import TRACES, with_traces
from schedules import both

from weft.cluster import Cluster, Jobs, NodeGroup, Simulator, generate, simulate, trace
from weft.cluster.engine import preemption_loop
from weft.cluster.fragmentation import free_at
from weft.cluster.metrics import summary
from weft.cluster.orders import ORDERS

SIZES = {1: 0.5, 2: 0.2, 4: 0.15, 8: 0.1, 16: 0.05}

PREEMPTIVE = [name for name, order in ORDERS.items() if order.preemption]

# Of Tiresias' public simulator (959f9b08f44f), which counts GPUs wherever they are: mean job completion time in seconds and how
# often a job was stopped. 2d-las: with the moment at which a job comes to the next level worked out in GPU seconds throughout.
TIRESIAS = {
    ("srtf", "60"): (192.1167, 4), ("srtf", "muri"): (1_333_917.2624, 2525), ("srtf", "philly"): (47_044.1708, 8480),
    ("srsf", "muri"): (952_245.3782, 2615), ("srsf", "philly"): (40_007.3966, 3579),
    ("las", "60"): (190.6833, 0), ("las", "muri"): (2_585_171.8112, 4178), ("las", "philly"): (47_116.3482, 2158),
    ("2d-las", "60"): (190.6833, 0), ("2d-las", "muri"): (3_172_782.2106, 4065), ("2d-las", "philly"): (49_450.9262, 2165),
}  # fmt: skip
FILES = {
    "60": ("tiresias/60_job*", None, "4x4"),
    "muri": ("muri/muri_trace1_s*", None, "8x8"),
    "philly": ("philly/sia_philly_first20000*", 5000, "40x8"),
}


@with_traces
@pytest.mark.parametrize(("order", "name"), TIRESIAS)
def test_published_results_to_the_last_digit(order, name):
    pattern, limit, nodes = FILES[name]
    jobs = trace.load(next(TRACES.glob(pattern)), "tiresias")
    jobs = jobs.take(np.arange(limit or len(jobs)))
    result = simulate(jobs, Cluster.parse(nodes), order, "counted")
    assert (round(float((result.end - jobs.submit).mean()), 4), result.stops.sum()) == TIRESIAS[order, name]


def test_a_job_with_less_remaining_preempts_one_with_more():
    sim = Simulator("srtf")
    sim.add_node("a", gpus=2)
    sim.add_job("long", gpus=2, duration=10)
    sim.add_job("short", gpus=1, duration=3, submit=4)
    sim.add_job("equal", gpus=2, duration=6, submit=4)  # long has as much left: neither stops the other
    sim.run()
    jobs = sim.jobs
    assert (jobs["short"].start, jobs["short"].end) == (4, 7)
    assert jobs["long"].stretches == [(0, 4, ["a"], [3])] and (jobs["long"].last_start, jobs["long"].end) == (7, 13)
    assert (jobs["equal"].start, jobs["equal"].end, jobs["equal"].stops) == (13, 19, 0)


def test_a_victim_that_still_fits_is_reprieved():
    """The 8-GPU job stops both others; what it leaves free is enough for the smaller one, the less important of the two."""
    result = simulate(Jobs([0, 0, 1], [50, 60, 5], [8, 1, 8]), Cluster.parse("1x9"), "srtf")
    assert result.stops.tolist() == [1, 0, 0] and result.end.tolist() == [55, 60, 6]


@pytest.mark.parametrize(("costs", "lost", "end"), [
    ({}, 0.0, 24.0),
    ({"restart_s": 3.0}, 3.0, 27.0),
    ({"checkpoint_s": 4.0}, 3.0, 27.0),  # stopped after 7 s of work, of which 4 are saved
    ({"restart_s": 3.0, "checkpoint_s": 4.0}, 6.0, 30.0),
])  # fmt: skip
def test_what_a_preemption_costs(costs, lost, end):
    result = simulate(Jobs([0, 7], [20, 4], [1, 1]), Cluster.parse("1x1"), "srtf", **costs)
    assert result.stops.tolist() == [1, 0] and result.lost.tolist() == [lost, 0] and result.end.tolist() == [end, 11]
    assert result.queueing.tolist() == [4, 0] and result.waited.sum(1).tolist() == [4, 0]
    found = summary(result)
    assert (found["preemptions"], found["lost_gpu_s"], found["gpu_s"]) == (1, lost, 24)


def test_a_higher_priority_preempts_a_lower_one_and_not_its_equal():
    jobs = Jobs([0, 1, 2], [10, 10, 10], [1, 1, 1], priority=[0, 0, 1])
    result = simulate(jobs, Cluster.parse("1x1"), "priority-preemptive")
    assert result.start.tolist() == [0, 20, 2] and result.end.tolist() == [20, 30, 12]


def test_service_lowers_a_job_and_later_ones_pass_it():
    jobs = Jobs([0, 100], [10_000, 4000], [1, 1])
    result = simulate(jobs, Cluster.parse("1x1"), "las")
    # The first runs to the first level, 3250 s; the second does the same, and waits behind the first from then on until that
    # one comes to the second level, 7200 s.
    held = result.stretches
    assert list(zip(held.job.tolist(), held.begin.tolist(), held.end.tolist(), strict=True)) == [
        (0, 0, 3250), (0, 6500, 10_450), (0, 11_200, 14_000), (1, 3250, 6500), (1, 10_450, 11_200),
    ]  # fmt: skip
    wide = simulate(dataclasses.replace(jobs, gpus=[4, 4]), Cluster.parse("1x4"), "2d-las").stretches
    assert wide.end[0] == 3250 / 4 and wide.end[1] == 3250 / 2 + (7200 - 3250) / 4


def test_the_shortest_remaining_time_first_waits_as_long_as_theory_says():
    """M/M/1 under SRTF at 80 % load; Schrage and Miller (1966): with rho(x) the load of jobs up to size x, the mean time in
    system of size x is λ (E[min(X, x)²]) / (2 (1 − rho(x))²) + ∫₀ˣ dt / (1 − rho(t))."""
    load, n = 0.8, 300_000
    g = np.random.default_rng(0)
    jobs = Jobs(np.cumsum(g.exponential(1 / load, n)), g.exponential(1.0, n), np.ones(n, int))
    x = np.linspace(0, 40, 400_001)
    step = x[1]
    below = load * (1 - (1 + x) * np.exp(-x))
    second = 2 * (1 - np.exp(-x) * (1 + x))  # E[min(X, x)²] of the exponential
    residence = np.concatenate(([0], np.cumsum((1 / (1 - below))[:-1] * step)))
    want = float((np.exp(-x) * (load * second / (2 * (1 - below) ** 2) + residence)).sum() * step)
    found = summary(simulate(jobs, Cluster.parse("1x1"), "srtf", "counted"))
    assert found["jct"]["mean"] == pytest.approx(want, rel=0.02)


def test_two_preemptive_priorities_wait_as_long_as_theory_says():
    """M/M/1 with preemptive priorities at 40 % load each: 1 / (1 − 0.4), and 1 / ((1 − 0.4) (1 − 0.8))."""
    g, n = np.random.default_rng(1), 400_000
    submit, duration = np.cumsum(g.exponential(1 / 0.8, n)), g.exponential(1.0, n)
    jobs = Jobs(submit, duration, np.ones(n, int), priority=g.integers(0, 2, n))
    jct = simulate(jobs, Cluster.parse("1x1"), "priority-preemptive", "counted").end - jobs.submit
    assert jct[jobs.priority == 1].mean() == pytest.approx(1 / 0.6, rel=0.02)
    assert jct[jobs.priority == 0].mean() == pytest.approx(1 / (0.6 * 0.2), rel=0.05)


def test_the_arrays_of_stretches_grow_while_it_runs(monkeypatch):
    jobs = generate(300, Cluster.parse("2x8"), load=1.5, seed=3, sizes=SIZES)
    whole = simulate(jobs, Cluster.parse("2x8"), "srtf", restart_s=5)
    create = preemption_loop.Loop.__init__

    def tight(self, *given):
        create(self, *given)
        self.queue = self.queue._replace(stretches=self.queue.stretches[:1], held=self.queue.held[:1])

    monkeypatch.setattr(preemption_loop.Loop, "__init__", tight)
    again = simulate(jobs, Cluster.parse("2x8"), "srtf", restart_s=5)
    assert whole.stops.sum() > 50
    for column in ("job", "begin", "end", "slot", "where"):
        assert getattr(whole.stretches, column).tolist() == getattr(again.stretches, column).tolist()


@pytest.mark.parametrize("order", PREEMPTIVE)
def test_until_a_time_it_is_the_same_run(order):
    jobs, cluster = generate(120, Cluster.parse("2x8"), load=1.5, seed=4, sizes=SIZES), Cluster.parse("2x8")
    jobs.priority[:] = np.arange(120) % 3
    whole, half = (simulate(jobs, cluster, order, until=until) for until in (np.inf, float(jobs.submit[60])))
    now = jobs.submit[60]
    ended = whole.end <= now
    assert ended.any() and half.end[ended].tolist() == whole.end[ended].tolist()
    assert half.ran.sum() < 120 and np.isnan(half.end[half.start != half.start]).all()
    first = whole.stretches.end <= now
    mine = half.stretches
    before = zip(whole.stretches.job[first], whole.stretches.end[first], strict=True)
    assert set(before) <= set(zip(mine.job, mine.end, strict=True))
    assert half.waited[half.stops > 0].min(initial=0) >= 0


def test_a_saved_run_has_its_stretches(weft, on_nodes, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    words = on_nodes("id,submit,duration,gpus\na,0,20,8\nb,5,5,4\n")
    code, out, _ = weft(*words, "--order", "srtf", "--restart-cost", 2, "--json", "--save", tmp_path / "run")
    assert code == 0
    found = json.loads(out)
    assert (found["preemptions"], found["lost_gpu_s"], found["restart_s"]) == (1, 16, 2)
    stretches = parquet.read_table(tmp_path / "run" / "stretches.parquet").to_pylist()
    assert [(s["job"], s["begin"], s["end"], s["stopped"]) for s in stretches] == [
        ("a", 0, 5, True), ("a", 10, 27, False), ("b", 5, 10, False),
    ]  # fmt: skip
    jobs = parquet.read_table(tmp_path / "run" / "jobs.parquet").to_pylist()
    assert [(j["stops"], j["lost"], j["wait"]) for j in jobs] == [(1, 2, 5), (0, 0, 0)]


def test_the_page_of_a_run_with_preemptions():
    pytest.importorskip("bokeh")
    from weft.cluster import allocations, pictures
    from weft.cluster.pictures import series

    jobs, cluster = generate(200, Cluster.parse("2x8"), load=1.5, seed=6, sizes=SIZES), Cluster.parse("2x8")
    result = simulate(jobs, cluster, "las", restart_s=10)
    held = allocations.of(result)
    work = (held.gpus * (held.end - held.start)).sum()
    assert work == pytest.approx((jobs.gpus * (jobs.duration + result.lost)).sum())
    waiting = series.waiting(result)
    assert waiting.value.min() == 0 == waiting.value[-1]
    assert (waiting.value[:-1] * np.diff(waiting.time)).sum() == pytest.approx(result.queueing.sum())
    assert "Jobs by node and GPU" in pictures.page([result])


@pytest.mark.parametrize(("order", "options", "words"), [
    ("srtf-skip", {}, "srtf preempts, and any job that fits may start; expected 'srtf'"),
    ("fifo", {"restart_s": 3}, "restart_s is 3, and order 'fifo' does not preempt; expected one of"),
    ("srtf", {"checkpoint_s": -1}, "checkpoint_s is -1; expected seconds, 0 or more"),
])  # fmt: skip
def test_incompatible_options_are_refused(order, options, words):
    with pytest.raises(ValueError, match=words):
        simulate(Jobs([0], [1], [1]), Cluster.parse("1x1"), order, **options)


def stretches(result) -> list[tuple[int, float, float, int]]:
    """Of jobs of one piece: the job, when, and on which GPUs."""
    held = result.stretches
    on = held.on[held.slot[:-1]]
    return list(zip(*(column.tolist() for column in (held.job, held.begin, held.end, on)), strict=True))


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
    result = both(Jobs([0, 0, 360], [900, 10, 50], [1, 1, 1], milli=[500, 250, 1000]), Cluster.parse("1x1"), order)
    assert result.stops.tolist() == [1, 0, 0]
    for now, free in ((5.0, 250), (100.0, 500), (365.0, 0), (np.inf, 500)):
        assert free_at(result, now)[0][0, 0] == free


FOUR, SIX = (Cluster.of([NodeGroup(nodes, rack_nodes=2)]) for nodes in (4, 6))  # in racks of two


def preempted_for(durations, cluster: Cluster, placement: str) -> tuple[list[int], list[int]]:
    """Whole nodes run jobs of these durations (0: none), the k-th on node k; at 1 s a gang of 16 GPUs comes
    that all of them may be stopped for. Where the jobs were that are, and the gang's nodes."""
    held = [n for n, seconds in enumerate(durations) if seconds]
    kinds = tuple(f"k{n}" for n in range(len(durations)))
    cluster = dataclasses.replace(cluster, gpu_type=np.arange(len(kinds)), types=kinds)
    jobs = Jobs(
        [0.0] * len(held) + [1.0], [durations[n] for n in held] + [2.0], [8] * len(held) + [16],
        types=[n + 1 for n in held] + [0], type_sets=((), *((kind,) for kind in kinds)),
    )  # fmt: skip
    fast = both(jobs, cluster, "srtf", placement)
    assert fast.start[-1] == 1
    where = fast.stretches.where[fast.stretches.slot[-2] : fast.stretches.slot[-1]]
    return [held[j] for j in np.flatnonzero(fast.stops)], sorted(where.tolist())


def test_a_gang_preempts_in_the_rack_with_the_least_important_victims():
    """Racks of two nodes. The two longest jobs, on nodes 1 and 2, lie in different racks: `topology` stops them, since a rack
    would cost a more important one; in a required rack the shortest of those that go is the longest in rack 0."""
    durations = [50, 90, 80, 40, 30, 60]
    assert preempted_for(durations, SIX, "best") == ([1, 2], [1, 2])
    assert preempted_for(durations, SIX, "topology") == ([1, 2], [1, 2])
    assert preempted_for(durations, SIX, "topology-required") == ([0, 1], [0, 1])


def test_a_rack_that_costs_no_more_important_job_is_taken():
    """The longest job and one of 80 s, in two racks, would do: so does a rack with two of 80 s, and the one with both."""
    for durations, nodes in (([40, 30, 80, 80, 90, 20], [2, 3]), ([40, 30, 80, 60, 90, 80], [4, 5])):
        assert preempted_for(durations, SIX, "topology") == (nodes, nodes)
    domains = Cluster.of([NodeGroup(6, rack_nodes=6, nvlink_domain_nodes=2)])
    assert preempted_for([80, 30, 80, 80, 90, 20], domains, "topology") == ([2, 3], [2, 3])


def test_free_nodes_come_before_a_rack():
    """One node is free in each rack: a preference stops no job; what is required does."""
    assert preempted_for([0, 70, 60, 0], FOUR, "topology") == ([], [0, 3])
    assert preempted_for([0, 70, 60, 0], FOUR, "topology-required") == ([1], [0, 1])


def test_a_gang_is_preempted_whole_and_returns_to_a_rack():
    """The gang in rack 0 makes way for a shorter job on one of its nodes, and goes on when a whole rack is free again."""
    jobs = Jobs([0.0, 0.0, 0.0, 5.0], [100.0, 40.0, 20.0, 10.0], [16, 8, 8, 8])
    held = both(jobs, FOUR, "srtf", "topology-required", restart_s=3).stretches
    of_gang = [(held.begin[k], held.end[k], sorted(held.where[held.slot[k] : held.slot[k + 1]].tolist()))
               for k in np.flatnonzero(held.job == 0)]  # fmt: skip
    assert of_gang == [(0, 5, [2, 3]), (15, 113, [2, 3])]


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


@pytest.mark.parametrize("order", PREEMPTIVE)
def test_both_engines_agree_on_larger_runs(order):
    cluster = Cluster.parse("20x8")
    jobs = generate(200, cluster, load=1.6, seed=8, sizes={1: 4, 4: 2, 8: 1, 24: 1})
    jobs.priority[:] = np.arange(200) % 4
    assert preemption_loop.VOID not in both(jobs, cluster, order, restart_s=7).stretches.job


LARGER = [("srtf", "fgd"), ("las", "gpu-packing"), ("priority-preemptive", "best")]


@pytest.mark.parametrize(("order", "placement"), LARGER)
def test_both_engines_agree_on_larger_runs_with_shares(order, placement):
    g = np.random.default_rng(2)
    jobs = Jobs(
        np.cumsum(g.exponential(1.0, 200)), g.exponential(60, 200).round(), g.choice([1, 1, 1, 2, 4], 200),
        milli=g.choice([1000, 500, 250], 200), cpu=g.choice([1000, 4000], 200), priority=np.arange(200) % 4,
    )  # fmt: skip
    result = both(jobs, Cluster.of([NodeGroup(18, 2, cpu=16)]), order, placement)
    assert order == "las" or result.stops.sum() > 20


@with_traces
def test_a_published_result_on_nodes():
    """Helios' loop for SRTF on vcvGl, without its cost of stopping and the second more that it takes for each job."""
    jobs = trace.load(TRACES / "helios" / "helios_venus_2vc_sept_helios_form.csv.gz", "helios")
    jobs = jobs.take(jobs.tenant == jobs.tenants.index("vcvGl"))
    result = simulate(jobs, Cluster.parse("20x8"), "srtf", "consolidate")
    assert (result.end - jobs.submit).mean() == pytest.approx(4722.9208, abs=1e-4)
    assert result.queueing.mean() == pytest.approx(117.0303, abs=1e-4)
