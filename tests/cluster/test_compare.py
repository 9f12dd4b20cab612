"""``weft simulate compare``: rankings, what chance does to them, and the processes that run them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mortal
import numpy as np
import pytest
from random_traces import random_jobs
from where import ROOT, plain_environment

from weft.cluster import Cluster, Jobs, compare, metrics, process_pool, simulate

comparing = sys.modules["weft.cluster.comparison"]


def test_compare_ranks_policies(weft, usual):
    code, out, err = weft("compare", *usual, "--policy", "fifo:best", "--policy", "sjf-skip:first:highest", "--json")
    found = json.loads(out)
    assert code == 0 and err == "" and found["metric"] == "jct.mean"
    assert [p["policy"] for p in found["policies"]] == ["sjf-skip:first:highest", "fifo:best"]
    assert [p["rank"] for p in found["policies"]] == [1, 2]
    best = json.loads(weft(*usual, "--order", "sjf-skip", "--placement", "first", "--ties", "highest", "--json")[1])
    assert found["policies"][0]["value"] == best["jct"]["mean"] == found["policies"][0]["summary"]["jct"]["mean"]
    assert [len(p["runs"]) for p in found["policies"]] == [1, 1]  # nothing in them is random
    assert found["policies"][1]["matters"] == {"seeds": None, "ties": None, "same second": None}


def test_priorities_are_compared_where_there_are_any(weft, usual, on_nodes):
    code, out, err = weft("compare", *usual, "--processes", 1)
    assert code == 0 and "priority" not in out and "the order priority, which is fifo then, is left out" in err
    code, out, err = weft("compare", *on_nodes("submit,duration,gpus,priority\n0,1,8,0\n0,2,8,1\n"), "--processes", 1)
    assert code == 0 and "priority:best" in out and "left out" not in err
    assert "priority:best" in weft("compare", *usual, "--policy", "priority:best")[1]


def test_compare_prints_80_columns(weft, on_nodes, tmp_path):
    jobs = random_jobs(300)
    columns = zip(jobs.submit, jobs.duration, jobs.gpus, strict=True)
    text = "submit,duration,gpus\n" + "".join(f"{s},{d},{g}\n" for s, d, g in columns)
    words = ("compare", *on_nodes(text, "3x8"), "--processes", "1", "--seeds", "3")
    code, out, err = weft(
        *words, "--ties", "lowest,highest,random", "--shuffle-same-second", "--pictures", tmp_path / "page.html",
        "--policy", "priority-skip:consolidate:random", "--policy", "fifo:worst",
    )  # fmt: skip
    assert code == 0 and max(map(len, out.splitlines())) <= 80 and "2 policies by jct.mean, 16 runs" in out
    header = next(line for line in out.splitlines() if line.startswith("policy"))
    assert [w for w in ("own", "least", "most", "× best", "seeds", "ties") if w not in header] == []
    assert "unvalidated: order priority-skip; placement worst" in " ".join(out.split())
    assert "drawn" in err and (tmp_path / "page.html").stat().st_size > 10_000
    code, out, _ = weft(*words)  # every order but priority, strict and skip, with four placements
    assert code == 0 and "16 policies" in out


def test_effects_of_seeds_ties_and_same_second_are_separate():
    jobs = Jobs(submit=[0, 0, 0, 1], duration=[1, 10, 100, 5], gpus=[8, 8, 8, 1])
    options = {"shuffle_same_second": True, "ties": ["highest"], "processes": 1}
    (found,) = compare(jobs, Cluster.parse("1x8"), ["fifo:first"], **options)
    assert [run.kind for run in found.runs] == ["own", "ties", *["same second"] * 10]
    assert found.matters("jct.mean", "ties") == 0 and found.matters("jct.mean", "seeds") is None
    least, most = found.band("jct.mean")
    assert most > least
    assert found.matters("jct.mean", "same second") == pytest.approx((most - least) / found.value("jct.mean"))
    assert comparing.same_second(jobs) == 3
    other = comparing.shuffled(jobs, 1)
    assert sorted(other.duration[:3]) == [1, 10, 100] and other.id[3] == 3
    assert any(comparing.shuffled(jobs, seed).duration[0] != 1 for seed in range(9))


def test_what_is_random_runs_with_every_seed():
    jobs = random_jobs(200, 7)
    policies = ["fifo:random", "fifo:best"]
    compared = compare(jobs, Cluster.parse("3x8"), policies, seeds=4, ties=["random"], processes=1)
    by_name = {str(c.policy): c for c in compared}
    random, best = by_name["fifo:random"], by_name["fifo:best"]
    assert sorted(run.seed for run in random.runs) == [0, 1, 2, 3] and len(best.runs) == 5
    assert random.value("jct.mean") == pytest.approx(np.mean([run.found["jct"]["mean"] for run in random.runs]))
    assert best.value("jct.mean") == best.runs[0].found["jct"]["mean"]
    alone = simulate(jobs, Cluster.parse("3x8"), "fifo", "random", seed=3)
    assert random.runs[3].found["jct"] == metrics.summary(alone)["jct"]


def test_processes_give_the_same_as_one():
    jobs, policies = random_jobs(200), ["fifo:best", "sjf:worst", "fifo-skip:random"]

    def run(processes):
        compared = compare(jobs, Cluster.parse("3x8"), policies, seeds=2, processes=processes, keep=True)
        runs = [(str(c.policy), c.runs) for c in compared]
        return [(name, [(r.kind, r.seed, r.found["jct"], r.result.start.tolist()) for r in of]) for name, of in runs]

    assert run(1) == run(2)


@pytest.mark.parametrize(("metric", "most_first"), [("utilisation", True), ("fairness.finish_time.mean", False)])
def test_policies_are_ranked_by_any_metric(metric, most_first):
    policies = ["fifo:worst", "sjf-skip:best"]
    found = compare(random_jobs(200), Cluster.parse("3x8"), policies, metric=metric, processes=1)
    values = [each.value(metric) for each in found]
    assert values == sorted(values, reverse=most_first) and values[0] != values[1]
    measured = found[0].runs[0].found
    for name in metric.split("."):
        measured = measured[name]
    assert measured == values[0]


def test_what_one_policy_cannot_do_costs_the_others_nothing(weft, on_nodes):
    words = ("compare", *on_nodes("submit,duration,gpus,milli\n0,5,1,500\n"), "--processes", "1")
    code, out, _ = weft(*words, "--policy", "fifo:counted", "--policy", "fifo:best")
    flat = " ".join(out.split())
    assert code == 1 and "1 policy by jct.mean" in flat and "FAILED fifo:counted: placement 'counted' has no" in flat
    code, out, _ = weft(*words, "--policy", "fifo:counted", "--json")
    (failed,) = json.loads(out)["policies"]
    assert code == 1 and failed["rank"] is failed["value"] is failed["summary"] is None and failed["failed"]


def test_a_process_that_dies_is_named_with_its_policy(monkeypatch):
    monkeypatch.setattr(comparing, "_measure", mortal.dies_at_worst)
    policies = ["fifo:worst", "fifo:best", "sjf:worst", "sjf:best", "sjf:first"]
    found = compare(random_jobs(50), Cluster.parse("3x8"), policies, processes=2)
    assert {str(c.policy) for c in found[:3]} == {"fifo:best", "sjf:best", "sjf:first"}
    assert all(c.runs for c in found[:3])
    for dead in found[3:]:
        assert dead.policy.placement == "worst" and not dead.runs
        assert dead.failed == ["its process was ended by SIGKILL; out of memory?"]


def test_workers_answer_every_task_once():
    tasks = ["a", "raise", "exit", "b", "exit"]
    found = {number: (value, why) for number, value, why in process_pool.run(mortal.echo, "x", tasks, 2)}
    died = (None, "its process died with status 7")
    assert found == {0: ("xa", ""), 1: (None, "no"), 2: died, 3: ("xb", ""), 4: died}
    assert [number for number, _, _ in process_pool.run(mortal.echo, "x", ["a", "raise"], 1)] == [0, 1]


def test_a_script_that_compares_needs_no_guard(tmp_path):
    """Its processes do not run it anew."""
    (tmp_path / "script.py").write_text(
        "from weft.cluster import Cluster, Jobs, compare\n"
        "open('ran', 'a').write('once')\n"
        "found = compare(Jobs([0], [5], [1]), Cluster.parse('1x8'), ['fifo:best', 'sjf:best'], processes=2)\n"
        "print([(str(each.policy), each.value('jct.mean'), each.failed) for each in found])\n"
    )
    options = {"cwd": tmp_path, "env": plain_environment(), "capture_output": True, "text": True, "timeout": 120}
    said = subprocess.run([sys.executable, "script.py"], **options)
    assert said.stdout == "[('fifo:best', 5.0, []), ('sjf:best', 5.0, [])]\n" and said.stderr == ""
    assert (tmp_path / "ran").read_text() == "once"


def test_processes_end_when_their_parent_is_killed(tmp_path):
    """``kill -9`` of it, while they are at work."""
    text = (
        f"import pathlib, sys; sys.path.insert(0, {str(ROOT / 'tests/cluster')!r})\n"
        "import mortal; from weft.cluster import process_pool\n"
        f"list(process_pool.run(mortal.sleeps, pathlib.Path({str(tmp_path)!r}), [1, 2], 2))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", text], env=plain_environment())
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2

    def runs(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()  # who adopts it may not have looked yet
        return False

    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize(("words", "told"), [
    (["--policy", "fifo"], "expected ORDER:PLACEMENT"),
    (["--policy", "fifo:best:lowest:x"], "expected ORDER:PLACEMENT"),
    (["--policy", "fofi:best"], "did you mean 'fifo'"), (["--policy", "fifo:bets"], "did you mean 'best'"),
    (["--policy", "fifo:best:lowst"], "did you mean 'lowest'"),
    (["--ties", "lowest,higest"], "did you mean 'highest'"), (["--metric", "jct.means"], "did you mean 'jct.mean'"),
    (["--seeds", "0"], "seeds"),
])  # fmt: skip
def test_mistakes_of_a_comparison(weft, usual, words, told):
    code, out, err = weft("compare", *usual, *words)
    assert code == 2 and out == "" and told in err
