"""Policies in plain Python: that they decide what they say, equal a compiled order that decides the same, and fail by name."""

import re
import sys

import numpy as np
import pytest

from weft.cluster import Cluster, Jobs, Simulator, reference, simulate
from weft.cluster.order import Order, Rounds
from weft.cluster.orders import ORDERS
from weft.cluster.placement import Placement
from weft.cluster.placements import PLACEMENTS
from weft.cluster.reference.rounds import PolicyError, next_round


@pytest.fixture
def policy(monkeypatch):
    """Makes a policy known for one test."""

    def known(decide, every_s=0.0):
        monkeypatch.setitem(ORDERS, "mine", Order("mine", lambda jobs: (), "of a test", rounds=Rounds(decide, every_s)))
        return "mine"

    return known


def random_jobs(seed: int, many: int) -> Jobs:
    g = np.random.default_rng(seed)
    gpus = g.choice([1, 1, 2, 4, 8, 12], many)
    return Jobs(np.sort(g.uniform(0, 60, many)), g.uniform(0, 50, many), gpus)


def test_a_missing_order_file_suggests_the_nearest_name(tmp_path):
    (tmp_path / "mine.py").touch()
    with pytest.raises(FileNotFoundError, match=r"order: there is no file .*min\.py; did you mean 'mine\.py'\?"):
        simulate(random_jobs(0, 3), Cluster.parse("1x8"), str(tmp_path / "min.py"))


@pytest.mark.parametrize("seed", range(20))
def test_least_time_left_first_equals_the_compiled_order(policy, seed):
    jobs, cluster = random_jobs(seed, 40), Cluster.parse("2x8")
    mine = simulate(jobs, cluster, policy(lambda view: sorted(view.jobs, key=view.remaining)), seed=seed)
    srtf = simulate(jobs, cluster, "srtf", seed=seed)
    assert mine.stops.sum() > 0
    for one, other in ((mine.start, srtf.start), (mine.end, srtf.end), (mine.stops, srtf.stops)):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(mine.waited, srtf.waited, atol=1e-9)


def test_time_slices_share_one_gpu():
    """Two jobs of 15 minutes take turns of six, which begin on the clock; each turn costs the other its GPU."""
    result = simulate(Jobs([0, 0], [900, 900], [1, 1]), Cluster.parse("1x1"), "time-slices")
    assert result.end.tolist() == [1620, 1980] and result.stops.tolist() == [2, 2]
    held = result.stretches
    assert list(zip(held.job[held.job == 0], held.begin[held.job == 0], held.end[held.job == 0], strict=True)) == [
        (0, 0, 360), (0, 720, 1080), (0, 1440, 1620),
    ]  # fmt: skip


def test_a_round_comes_at_every_multiple_and_not_between():
    sim = Simulator("time-slices")
    sim.add_node("a", gpus=1)
    sim.add_job("late", gpus=1, duration=10, submit=5)
    sim.run()
    assert (sim.jobs["late"].start, sim.jobs["late"].end) == (360, 370)
    assert [at for at, what, _ in sim.history if what == "round"] == [360]


@pytest.mark.parametrize("every_s", [0.1, 1 / 3, 7.0, 360.0])
def test_rounds_lie_on_a_grid(every_s):
    now = 0.0
    for turn in range(1, 2000):
        now = next_round(now, every_s)
        assert now == turn * every_s
    assert next_round(3.0, 0.0) == float("inf")


def test_a_job_left_out_holds_nothing_until_the_next_round(policy):
    """Only even numbers may run before second 100."""

    def decide(view):
        return [job for job in view.jobs if view.now >= 100 or job.number % 2 == 0]

    result = simulate(Jobs([0, 0, 0, 100], [300, 10, 20, 1], [1, 1, 1, 1]), Cluster.parse("1x8"), policy(decide))
    assert result.start.tolist() == [0, 100, 0, 100] and result.stops.sum() == 0


def test_a_restart_and_a_checkpoint_cost(policy):
    """Stopped at 10 s with 8 s saved; then 3 s of restart and the rest."""

    def newest_first(view):
        return sorted(view.jobs, key=lambda job: -job.number)

    jobs = Jobs([0, 10], [20, 5], [1, 1])
    result = simulate(jobs, Cluster.parse("1x1"), policy(newest_first), restart_s=3, checkpoint_s=4)
    assert result.end.tolist() == [15 + 3 + 12, 15] and result.lost.tolist() == [5, 0]


def raises(view):
    raise ZeroDivisionError("by nought")


@pytest.mark.parametrize(("decide", "message"), [
    (raises, "policy 'mine' at 2 s raised ZeroDivisionError: by nought"),
    (lambda view: sys.exit(0), "policy 'mine' at 2 s raised SystemExit: 0"),
    (lambda view: [], "policy 'mine' at 2 s starts none of the waiting jobs .1 job.* job 'j0' waits since 2 s"),
    (lambda view: ["j0"], "policy 'mine' at 2 s chose 'j0'; expected jobs of view.jobs"),
    (lambda view: [*view.jobs, *view.jobs], "policy 'mine' at 2 s chose job 'j0' twice; expected each once"),
    (lambda view: 5, "policy 'mine' at 2 s raised TypeError"),
])  # fmt: skip
def test_a_policy_that_fails_is_named_with_job_and_time(policy, decide, message):
    jobs = Jobs([2], [3], [1], id=["j0"])
    with pytest.raises(PolicyError, match=message):
        simulate(jobs, Cluster.parse("1x1"), policy(decide))


def assign(thing, name):
    setattr(thing, name, 1)


@pytest.mark.parametrize(("change", "message"), [
    (lambda view: assign(view, "now"), "FrozenInstanceError: cannot assign to field 'now'"),
    (lambda view: assign(view.jobs[0], "remaining"), "AttributeError: job 'j0': 'remaining' is read-only"),
    (lambda view: delattr(view.jobs[0], "remaining"), "AttributeError: job 'j0': 'remaining' is read-only"),
    (lambda view: view.jobs[0].waited.update(quota=1), "AttributeError: 'mappingproxy'"),
    (lambda view: view.jobs[0].placed.clear(), "AttributeError: 'tuple'"),
    (lambda view: view.jobs[0].stretches.clear(), "AttributeError: 'tuple'"),
    (lambda view: view.jobs[0].row.duration.fill(0), "ValueError: assignment destination is read-only"),
    (lambda view: assign(view.jobs[0].row, "gpus"), "AttributeError: jobs: 'gpus' is read-only"),
    (lambda view: assign(view.nodes[0], "gpus"), "AttributeError: node 'node-0': 'gpus' is read-only"),
    (lambda view: view.nodes[0].milli.clear(), "AttributeError: 'tuple'"),
    (lambda view: view.nodes[0].pieces.clear(), "AttributeError: 'tuple'"),
    (lambda view: view.nodes[0].clear(), "AttributeError: node 'node-0': 'pieces' is read-only"),
    (lambda view: view.nodes[0].take(None, "j0", [0]), "AttributeError: node 'node-0': 'pieces' is read-only"),
    (lambda view: view.nodes[0].give_back(None, "j0", [0]), "AttributeError: node 'node-0': 'pieces' is read-only"),
    (lambda view: view.nodes[0].change(None, [0], 1), "AttributeError: node 'node-0': 'pieces' is read-only"),
    (lambda view: assign(view.simulator, "now"), "AttributeError: the simulator: 'now' is read-only"),
    (lambda view: view.simulator.place(view.jobs[0]), "AttributeError: the simulator shows a policy no 'place'"),
    (lambda view: view.simulator.history.clear(), "AttributeError: 'tuple'"),
    (lambda view: view.simulator.quotas.clear(), "AttributeError: 'mappingproxy'"),
    (lambda v: assign(v.simulator.jobs["j0"], "remaining"), "AttributeError: job 'j0': 'remaining' is read-only"),
    (lambda view: assign(view.simulator.nodes[0], "gpus"), "AttributeError: node 'node-0': 'gpus' is read-only"),
])  # fmt: skip
def test_a_policy_that_writes_is_named(policy, change, message):
    jobs = Jobs([2], [3], [1], id=["j0"])
    with pytest.raises(PolicyError, match=re.escape(f"policy 'mine' at 2 s raised {message}")):
        simulate(jobs, Cluster.parse("1x1"), policy(change))
    assert jobs.duration.tolist() == [3] and jobs.gpus.tolist() == [1]


def test_what_a_policy_sees_is_what_there_is(policy):
    seen = []

    def decide(view):
        (node,) = view.nodes
        held = [job.id for job in view.jobs if job.placed]
        seen.append((view.now, held, node.free_gpus, [name for name, *_ in node.pieces]))
        assert all(job.placed[0][0] == node for job in view.jobs if job.placed)
        assert view.simulator.now == view.now and set(view.simulator.jobs) == {"a", "b"}
        return view.jobs

    simulate(Jobs([0, 2], [9, 9], [1, 4], id=["a", "b"]), Cluster.parse("1x8"), policy(decide))
    assert seen == [(0, [], 8, []), (2, ["a"], 7, ["a"]), (9, ["b"], 4, ["b"]), (11, [], 8, [])]


KEYS = """
from weft.cluster.order import Order
ORDER = Order("k", {}, "of a test")
"""


@pytest.mark.parametrize("order", ["keys.py", "keys.py-skip"])
@pytest.mark.parametrize(("keys", "message"), [
    ("lambda jobs: jobs.duration.fill(0)", "of job 'a', submitted at 0 s: ValueError: assignment destination"),
    ("lambda jobs: setattr(jobs, 'gpus', 1)", "of job 'a', submitted at 0 s: AttributeError: jobs: 'gpus' is"),
    ("lambda jobs: ([1 // (g - 2) for g in jobs.gpus.tolist()],)", "of job 'b', submitted at 5 s: ZeroDivisionE"),
    ("lambda jobs: (jobs.gpus.mean(),)", "of job 'a', submitted at 0 s: TypeError: a column of float64 ()"),
    ("lambda jobs: (jobs.gpus[:1],)", ": TypeError: a column of int64 (1,); expected 2 numbers"),
    ("lambda jobs: (list(jobs.id),)", "of job 'a', submitted at 0 s: TypeError: a column of <U1 (1,)"),
    ("lambda jobs: (jobs.gpus * float('nan'),)", "of job 'a', submitted at 0 s: ValueError: the key of job 'a'"),
])  # fmt: skip
def test_keys_that_write_or_fail_are_named_with_job_and_time(tmp_path, order, keys, message):
    (tmp_path / "keys.py").write_text(KEYS.format(keys))
    jobs = Jobs([0, 5], [3, 3], [1, 2], id=["a", "b"])
    with pytest.raises(ValueError, match=re.escape("order 'k': keys") + ".*" + re.escape(message)):
        simulate(jobs, Cluster.parse("1x8"), str(tmp_path / order))
    assert jobs.duration.tolist() == [3, 3] and jobs.gpus.tolist() == [1, 2]


@pytest.mark.parametrize("order", ["fifo", "fifo-conservative", "srtf", "time-slices"])
def test_a_placement_that_raises_is_named_with_job_node_and_time(monkeypatch, order):
    placement = Placement("mine", lambda piece, node: 1 / (node.free_gpus - 4), "of a test")
    monkeypatch.setitem(PLACEMENTS, "mine", placement)
    jobs = Jobs([0, 2], [999, 9], [4, 2], id=["a", "b"])
    message = "placement 'mine' at 2 s raised ZeroDivisionError: .*; of job 'b' .2 GPUs. on node 'node-0'"
    with pytest.raises(ValueError, match=message):
        reference.simulate(jobs, Cluster.parse("1x8"), order, "mine")


@pytest.mark.parametrize("every_s", [-5, 1e-12, float("nan"), float("inf"), "60"])
def test_rounds_of_no_length_are_refused(every_s):
    with pytest.raises(ValueError, match=r"rounds every .* s; expected 0, or seconds from 0.001 on"):
        Rounds(lambda view: view.jobs, every_s)


def test_what_a_policy_prints_is_not_the_result(policy, capsys):
    def decide(view):
        sys.stdout.write(f"at {view.now}\n")
        return view.jobs

    simulate(Jobs([0], [1], [1]), Cluster.parse("1x1"), policy(decide))
    out, err = capsys.readouterr()
    assert out == "" and err == "at 0.0\nat 1.0\n"


def test_ctrl_c_keeps_what_there_is(policy):
    def decide(view):
        if view.now >= 10:
            raise KeyboardInterrupt
        return view.jobs

    result = simulate(Jobs([0, 0, 10], [5, 50, 5], [1, 1, 1]), Cluster.parse("1x8"), policy(decide))
    assert not result.complete and result.end[:2].tolist() == [5, 50] and np.isnan(result.start[2])


MINE = """
from weft.cluster.order import Order, Rounds
ORDER = Order("mine", lambda jobs: (), "big ones first", rounds=Rounds(lambda view: sorted(
    view.jobs, key=lambda job: -job.row.gpus[0])))
"""


def test_an_order_may_lie_in_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    result = simulate(Jobs([0, 1], [9, 4], [1, 8]), Cluster.parse("1x8"), str(tmp_path / "mine.py"))
    assert result.end.tolist() == [13, 5]
    text = "from weft.cluster.order import Order\nORDER = Order('k', lambda jobs: (-jobs.gpus,), 'big ones first')"
    (tmp_path / "keys.py").write_text(text)
    result = simulate(Jobs([0, 0], [9, 4], [1, 8]), Cluster.parse("1x8"), str(tmp_path / "keys.py-skip"))
    assert result.start.tolist() == [4, 0]


@pytest.mark.parametrize(("text", "message"), [
    ("1 / 0", "ZeroDivisionError: division by zero"), ("", "ORDER is None; expected a weft.cluster.order.Order"),
    ("ORDER = 5", "ORDER is 5; expected a weft.cluster.order.Order"),
])  # fmt: skip
def test_a_file_without_an_order_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        simulate(Jobs([0], [1], [1]), Cluster.parse("1x8"), str(path))
