"""Orders that preempt: published results, costs, theory, and what is saved of a run."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from sample_traces import TRACES, with_traces

from weft.cluster import Cluster, Jobs, Simulator, generate, reference, simulate, trace
from weft.cluster.engine import preemption_loop
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
    jobs = Jobs([0, 0, 1], [50, 60, 5], [8, 1, 8])
    result = simulate(jobs, Cluster.parse("1x9"), "srtf")
    assert result.stops.tolist() == [1, 0, 0] and result.end.tolist() == [55, 60, 6]


@pytest.mark.parametrize(
    ("costs", "lost", "end"),
    [
        ({}, 0.0, 24.0),
        ({"restart_s": 3.0}, 3.0, 27.0),
        ({"checkpoint_s": 4.0}, 3.0, 27.0),  # stopped after 7 s of work, of which 4 are saved
        ({"restart_s": 3.0, "checkpoint_s": 4.0}, 6.0, 30.0),
    ],
)
def test_what_a_preemption_costs(costs, lost, end):
    jobs = Jobs([0, 7], [20, 4], [1, 1])
    result = simulate(jobs, Cluster.parse("1x1"), "srtf", **costs)
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
    jobs = Jobs(
        np.cumsum(g.exponential(1 / 0.8, n)), g.exponential(1.0, n), np.ones(n, int), priority=g.integers(0, 2, n)
    )
    result = simulate(jobs, Cluster.parse("1x1"), "priority-preemptive", "counted")
    jct = result.end - jobs.submit
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
    assert set(zip(whole.stretches.job[first], whole.stretches.end[first], strict=True)) <= set(
        zip(mine.job, mine.end, strict=True)
    )
    assert half.waited[half.stops > 0].min(initial=0) >= 0


def test_events_play_back_without_taking_more_than_there_is():
    save = pytest.importorskip("weft.cluster.save")
    pytest.importorskip("pyarrow")
    jobs, cluster = generate(400, Cluster.parse("3x8"), load=1.4, seed=5, sizes=SIZES), Cluster.parse("3x8")
    result = simulate(jobs, cluster, "srtf", restart_s=30, checkpoint_s=100)
    events, held = save.events_table(result), result.stretches
    free, at, running = cluster.gpus.copy(), dict.fromkeys(range(len(jobs)), 0), set()
    for what, j in zip(events["what"].to_pylist(), events["row"].tolist(), strict=True):
        stretch = np.flatnonzero(held.job == j)[at[j]]
        where = held.where[held.slot[stretch] : held.slot[stretch + 1]]
        each = np.minimum(8, jobs.gpus[j] - 8 * np.arange(len(where)))
        if what == "start":
            np.subtract.at(free, where, each)
            running.add(j)
        elif what != "arrival":
            np.add.at(free, where, each)
            running.remove(j)
            at[j] += 1
        assert (free >= 0).all()
    assert not running and (free == 8).all() and events["what"].to_pylist().count("stop") == result.stops.sum() > 20


def test_a_saved_run_has_its_stretches(weft, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = "id,submit,duration,gpus\na,0,20,8\nb,5,5,4\n"
    (tmp_path / "t.csv").write_text(rows)
    words = "--format csv --nodes 1x8 --order srtf --restart-cost 2 --json --save"
    code, out, _ = weft(tmp_path / "t.csv", *words.split(), tmp_path / "run")
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
    area = (waiting.value[:-1] * np.diff(waiting.time)).sum()
    assert area == pytest.approx(result.queueing.sum())
    assert "Jobs by node and GPU" in pictures.page([result])


@pytest.mark.parametrize(
    ("order", "options", "words"),
    [
        ("srtf-skip", {}, "srtf preempts, and any job that fits may start; expected 'srtf'"),
        ("fifo", {"restart_s": 3}, "restart_s is 3, and order 'fifo' does not preempt; expected one of"),
        ("srtf", {"checkpoint_s": -1}, "checkpoint_s is -1; expected seconds, 0 or more"),
    ],
)
def test_incompatible_options_are_refused(order, options, words):
    with pytest.raises(ValueError, match=words):
        simulate(Jobs([0], [1], [1]), Cluster.parse("1x1"), order, **options)


def test_both_engines_agree_on_larger_runs():
    jobs, cluster = (
        generate(250, Cluster.parse("20x8"), load=1.6, seed=8, sizes={1: 4, 4: 2, 8: 1, 24: 1}),
        Cluster.parse("20x8"),
    )
    jobs.priority[:] = np.arange(250) % 4
    for order in PREEMPTIVE:
        fast = simulate(jobs, cluster, order, restart_s=7)
        plain = reference.simulate(jobs, cluster, order, "best", restart_s=7)
        assert fast.end.tolist() == [plain.jobs[j].end for j in range(250)]
        assert fast.stops.tolist() == [plain.jobs[j].stops for j in range(250)]
    assert preemption_loop.VOID not in fast.stretches.job


@with_traces
def test_a_published_result_on_nodes():
    """Helios' loop for SRTF on vcvGl, without its cost of stopping and the second more that it takes for each job."""
    jobs = trace.load(TRACES / "helios" / "helios_venus_2vc_sept_helios_form.csv.gz", "helios")
    jobs = jobs.take(jobs.tenant == jobs.tenants.index("vcvGl"))
    result = simulate(jobs, Cluster.parse("20x8"), "srtf", "consolidate")
    assert (result.end - jobs.submit).mean() == pytest.approx(4722.9208, abs=1e-4)
    assert result.queueing.mean() == pytest.approx(117.0303, abs=1e-4)
