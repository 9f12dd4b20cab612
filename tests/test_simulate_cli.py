"""``weft simulate`` and ``weft simulate compare``, as a user types them; what they save; what they say of bad input."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("numba")
pytest.importorskip("typer")
parquet = pytest.importorskip("pyarrow.parquet")

import mortal  # noqa: E402
from where import ROOT, plain_environment  # noqa: E402

from weft import __main__ as entry  # noqa: E402
from weft import cli  # noqa: E402
from weft.cluster import Cluster, Jobs, compare, metrics, reference, save, simulate, trace, workers  # noqa: E402
from weft.cluster.fairness import fairness, finish_time_ratio  # noqa: E402
from weft.cluster.generate import generate  # noqa: E402
from weft.cluster.model import NodeGroup  # noqa: E402
from weft.cluster.simulate import REASONS  # noqa: E402

comparing = sys.modules["weft.cluster.compare"]
ROWS = "submit,duration,gpus,tenant\n0,10,4,a\n1,20,8,a\n1,5,2,b\n2,5,99,b\n"


@pytest.fixture
def weft(monkeypatch, capsys):
    """Runs ``weft simulate …``: exit status, standard output, standard error on one line."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["weft", "simulate", *map(str, words)])
        capsys.readouterr()
        code = cli.main()
        said = capsys.readouterr()
        return code, said.out, " ".join(said.err.split())

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(ROWS)
    return path


@pytest.fixture
def usual(file):
    return file, "--format", "csv", "--nodes", "1x8"


def random_jobs(count: int, seed: int = 0) -> Jobs:
    g = np.random.default_rng(seed)
    return Jobs(
        submit=np.cumsum(g.integers(0, 3, count)),
        duration=g.choice([1.0, 2.0, 5.0, 40.0], count),
        gpus=g.choice([1, 2, 4, 8], count),
        tenant=g.integers(0, 3, count),
        tenants=("x", "y", "z"),
        types=g.integers(0, 2, count),
        type_sets=((), ("gpu", "other")),
        id=[f"job {i}" for i in range(count)],
    )


# ---- one policy ------------------------------------------------------------------------------------------------------


def test_the_object_has_what_is_promised(weft, usual):
    code, out, err = weft(*usual, "--json")
    found = json.loads(out)
    assert code == 0 and err == ""
    for name in ("jct", "queueing", "slowdown"):
        assert set(found[name]) == {"mean", "p50", "p95", "p99"}
    assert set(found["wait_reasons"]) == set(REASONS) and found["preemptions"] == 0
    assert found["makespan"] == 35 and found["unschedulable"][0]["job"] == 3
    assert {"jobs", "utilisation", "cpu_s", "peak_memory_mib"} <= set(found)
    assert set(found["validated"]) == {"order", "placement"} and "Tiresias" in found["validated"]["order"]
    assert {name: of["jobs"] for name, of in found["by_size"].items()} == {"2–8 GPUs": 3, "more than 8": 0}
    assert list(found["by_tenant"]) == ["a", "b"] and found["by_tenant"]["a"]["gpu_s"] == 200
    assert found["by_tenant"]["b"]["jct"]["mean"] == 34 and found["fairness"]["tenants"] == 2
    assert found["allocation"]["max"] == 1 and found["allocation"]["mean"] == pytest.approx(200 / 240)


def test_the_table_fits_80_columns(weft, usual):
    code, out, _ = weft(*usual, "--placement", "worst", "--order", "priority-skip")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    flat = " ".join(out.split())
    assert "unvalidated: order priority-skip; placement worst" in flat and "Jain's index" in flat
    assert "job 3 can never run" in flat
    assert "unvalidated" not in weft(*usual, "--placement", "consolidate")[1]


def test_types_of_gpu_and_finish_times_are_printed(weft, tmp_path):
    (tmp_path / "t.csv").write_text("submit,duration,gpus,types\n0,100,8,A\n0,100,8,A\n50,50,4,B\n")
    (tmp_path / "c.yaml").write_text("nodes:\n- {count: 1, gpu_type: A}\n- {count: 1, gpus: 4, gpu_type: B}\n")
    code, out, _ = weft(tmp_path / "t.csv", "--format", "csv", "--cluster", tmp_path / "c.yaml")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert "by type of GPU" in out and "GPUs held, of the makespan: A 100.0% of 8, B 25.0% of 4" in out
    # With an equal part 150, 116.7 and 66.7 s; they took 100, 200 and 100.
    assert "66.7% of the jobs took longer than with an equal part" in " ".join(out.split())


def test_how_local_gangs_were_is_printed(weft, tmp_path):
    (tmp_path / "t.csv").write_text("submit,duration,gpus\n0,100,16\n0,100,16\n")
    (tmp_path / "c.yaml").write_text("nodes:\n- {count: 3, rack: a}\n- {count: 1, rack: b}\n")
    usual = tmp_path / "t.csv", "--format", "csv", "--cluster", tmp_path / "c.yaml"
    code, out, _ = weft(*usual, "--placement", "first")
    flat = " ".join(out.split())
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert "2 gangs over several nodes: 50.0% in one rack, 50.0% over several racks" in flat
    assert "gang" not in weft(tmp_path / "t.csv", "--format", "csv", "--nodes", "1x32")[1]


def test_what_is_missing_is_named(weft, file):
    code, out, err = weft(file.parent / "trase.csv", "--format", "csv", "--nodes", "1x8")
    assert (code, out) == (2, "") and f"there is no file {file.parent / 'trase.csv'}; did you mean 'trace.csv'?" in err


def test_no_job_at_all_that_could_run_is_a_failure(weft, tmp_path):
    (tmp_path / "t.csv").write_text("submit,duration,gpus\n0,5,99\n1,5,98\n")
    words = (tmp_path / "t.csv", "--format", "csv", "--nodes", "1x8")
    code, out, _ = weft(*words)
    assert code == 1 and "no job could run on this cluster" in out
    code, out, _ = weft(*words, "--json")
    assert code == 1 and json.loads(out)["completed"] == 0
    code, out, _ = weft(*words, "--order", "fifo-conservative")
    assert code == 1 and "no job could run on this cluster" in out
    code, out, _ = weft("compare", *words, "--policy", "fifo:best", "--processes", "1")
    assert code == 1 and "no job could run on this cluster" in out


def test_memory_that_does_not_suffice_is_one_line(weft, usual, monkeypatch):
    def too_much(*a, **k):
        raise MemoryError("Unable to allocate 745. GiB")

    monkeypatch.setattr("weft.cluster.simulate", too_much)
    assert weft(*usual) == (1, "", "weft: not enough memory: Unable to allocate 745. GiB")


def test_what_is_odd_about_a_trace_is_told(weft, tmp_path):
    (tmp_path / "t.csv").write_text("submit,duration,gpus,prioritys\n0,5,1,7\n")
    words = (tmp_path / "t.csv", "--format", "csv", "--nodes", "1x8")
    told = "columns of the trace that are not read: prioritys (did you mean 'priority'?)"
    assert told in weft(*words)[1] and json.loads(weft(*words, "--json")[1])["warnings"] == [told]
    assert told in weft("compare", *words, "--policy", "fifo:best", "--processes", "1")[1]
    like = ("generate", tmp_path / "g.csv", "--jobs", "9", "--like", words[0], "--format", "csv")
    assert told in weft(*like, "--load", "1", "--nodes", "1x8")[2]


LONG = "so-long-a-name-that-nobody-can-read-it-in-a-table-of-eighty-columns"


def test_long_names_are_shortened_where_they_stay_apart(weft, tmp_path):
    names = [f"{LONG}-{k}" for k in "ab"] + [f"begin-{LONG}-{k}-{LONG}" for k in "cd"]
    rows = "".join(f"{k},{10**9 * k},8,{name},{name}\n" for k, name in enumerate(names))
    (tmp_path / "t.csv").write_text(f"submit,duration,gpus,tenant,id\n{rows}0,1,99,x,{LONG}\n")
    (tmp_path / LONG).mkdir()
    order = tmp_path / LONG / "mine.py"
    order.write_text(
        "from weft.cluster.order import Order\nORDER = Order('k', lambda jobs: (-jobs.gpus,), 'of a test')"
    )
    words = (tmp_path / "t.csv", "--format", "csv", "--nodes", "1x8")
    code, out, _ = weft(*words, "--order", order)
    assert code == 0 and max(map(len, out.splitlines())) <= 80 and str(tmp_path) not in out
    assert out.startswith("mine.py, best (ties: lowest)") and "unvalidated: order mine.py;" in out
    flat = "".join(line.split("  ")[0] for line in out.splitlines())
    assert "so-long-a-name-…ighty-columns-a" in flat and names[2] in flat and names[3] in flat  # alike if shortened
    assert "job 'so-long-a-name-…-eighty-columns' can never run" in flat
    policies = ("--policy", f"{order}-skip:consolidate:random", "--policy", f"{order}:best")
    code, out, _ = weft("compare", *words, *policies, "--processes", "1", "--ties", "highest", "--seeds", "2")
    assert code == 0 and max(map(len, out.splitlines())) <= 80 and str(tmp_path) not in out and "mine.py:best" in out


def test_names_are_printed_as_they_are(weft, tmp_path):
    (tmp_path / "t.csv").write_text("submit,duration,gpus,tenant\n0,5,1,[/b]\n1,5,1,a\x1b[2J\n2,5,1,[bold]\n", "utf-8")
    code, out, _ = weft(tmp_path / "t.csv", "--format", "csv", "--nodes", "1x1")
    assert code == 0 and "[/b]" in out and "[bold]" in out and "\x1b" not in out


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("1700000000000000000,100,1", "submit of job 0 (row 0) is 1.7e+18; expected seconds, at most 1e+11"),
        ("0,1e300,1", "duration of job 0 (row 0) is 1e+300; expected seconds"),
        ("0,1," + "1" * 200_000, "line 2: field larger than field limit"),
    ],
)
def test_what_is_no_time_or_no_cell_is_refused(weft, tmp_path, row, words):
    (tmp_path / "t.csv").write_text(f"submit,duration,gpus\n{row}\n")
    code, _, err = weft(tmp_path / "t.csv", "--format", "csv", "--nodes", "1x1")
    assert code == 2 and words in " ".join(err.split())


def test_a_cluster_of_any_size_is_not_built(weft, usual):
    code, _, err = weft(*usual[:-1], "1000000000x8")
    assert code == 2 and "expected at most 1,000,000" in err


def test_help_names_every_plug_in(weft):
    from weft.cluster.orders import ORDERS
    from weft.cluster.placements import PLACEMENTS

    for words in (("--help",), ("compare", "--help")):
        code, out, _ = weft(*words)
        flat = " ".join(out.replace("│", " ").split())
        assert code == 0 and all(name in flat for name in (*trace.formats(), *ORDERS, *PLACEMENTS))
        assert "PLUGINS" not in flat and not any(word in flat for word in ("FORMATS", "ORDERS", "METRICS"))
    assert "--policy" in flat and "weft simulate compare" in weft("--help")[1]


def test_a_cluster_file_and_the_file_s_own_columns(weft, tmp_path):
    (tmp_path / "jobs.csv").write_text("time,duration,gpu_num\n0,10,4\n1,20,8\n")
    (tmp_path / "cluster.yaml").write_text("nodes:\n  - {count: 2, gpus: 8}\n")
    words = (tmp_path / "jobs.csv", "--format", "csv", "--cluster", tmp_path / "cluster.yaml", "--json")
    for columns in (("--columns", "gpus=gpu_num, submit=time"), ("--option", "columns=gpus=gpu_num,submit=time")):
        code, out, _ = weft(*words, *columns)
        assert code == 0 and json.loads(out)["completed"] == 2 and json.loads(out)["nodes"] == 2


def test_a_trace_named_compare_is_read_by_its_path(weft, tmp_path, monkeypatch):
    (tmp_path / "compare").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    assert weft("./compare", "--format", "csv", "--nodes", "1x8")[0] == 0


def test_a_number_of_a_format_is_a_number(weft, tmp_path):
    (tmp_path / "c.csv").write_text("job_id,user,num_gpu,submit_time,duration,best_effort\n0,u,1,0,7,0\n")
    words = (tmp_path / "c.csv", "--format", "chronus", "--nodes", "1x8", "--json")
    assert json.loads(weft(*words, "--option", "seconds_per_unit=2")[1])["makespan"] == 14
    code, out, err = weft(*words, "--option", "seconds_per_unit=two")
    assert (code, out) == (2, "") and "is 'two'; expected a number" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--format", "csv"], "the cluster is missing; expected one: --nodes 20x8, or --cluster FILE"),
        (["--format", "csv", "--nodes", "1x8", "--cluster", "x"], "both --nodes and --cluster are given"),
        (["--format", "csv", "--cluster", "x", "--gpu-memory", "8"], "--gpu-memory goes with --nodes"),
        (["--format", "csv", "--cluster", "nowhere.yaml"], "nowhere.yaml"),
        (["--nodes", "1x8"], "--format is missing; expected one of acme"),
        (["--nodes", "1x8", "--format", "cvs"], "did you mean 'csv'"),
        (["--nodes", "1x8", "--format", "csv", "--option", "x=1"], "unknown option of trace format 'csv' 'x'"),
        (["--nodes", "1x8", "--format", "csv", "--option", "columns"], "expected NAME=VALUE"),
        (["--nodes", "1x8", "--format", "csv", "--columns", "gpus"], "expected NAME=FILE'S"),
        (["--nodes", "1x8", "--format", "csv", "--columns", "gpus=a,gpus=b"], "names 'gpus' twice"),
        (["--nodes", "1x8", "--format", "csv", "--columns", "gqus=a"], "did you mean 'gpus'"),
        (["--nodes", "1x8", "--format", "tiresias", "--columns", "gpus=a"], "unknown option of trace format 'tiresias'"),
        (["--nodes", "1x8", "--format", "csv", "--columns", "gpus=a", "--option", "columns=b=c"], "is given twice"),
        (["--nodes", "1x8", "--format", "csv", "--order", "fofi"], "did you mean 'fifo'"),
        (["--nodes", "1x8", "--format", "csv", "--ties", "lowst"], "did you mean 'lowest'"),
        (["--nodes", "1x8", "--format", "csv", "--where", "tenant"], "expected COLUMN=VALUE"),
        (["--nodes", "1x8", "--format", "csv", "--pictures", "x.pdf"], "ends in .html, .png or .svg"),
        (["--nodes", "1x8", "--format", "csv", "--limit", "0"], "limit"),
        (["--nodes", "1x8", "--format", "csv", "--seed", "-1"], "seed"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", [(), ("compare", "--policy", "fifo:best")])
def test_mistakes_are_told_before_anything_runs(weft, file, monkeypatch, verb, words, told):
    if verb and {"--order", "--seed", "--ties"} & set(words):
        pytest.skip("not an option of compare, or its own")
    monkeypatch.setattr("weft.cluster.simulate", lambda *a, **k: pytest.fail("it simulated"))
    code, out, err = weft(*verb, file, *words)
    assert code == 2 and out == "" and told in err.replace("│ ", "")


def test_pictures_are_drawn(weft, usual, tmp_path):
    code, _, err = weft(*usual, "--pictures", tmp_path / "new" / "page.html")
    assert code == 0 and "drawn" in err and "<html" in (tmp_path / "new" / "page.html").read_text()
    assert weft(*usual, "--pictures", tmp_path / "trace.csv" / "page.html")[0] == 1


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_no_slowdown_is_below_one():
    jobs = Jobs(submit=[0, 0, 0], duration=[1, 4, 100], gpus=[8, 8, 8])
    times = metrics.times(simulate(jobs, Cluster.parse("1x8")))
    assert times["jct"].tolist() == [1, 5, 105]
    assert times["slowdown"].tolist() == [1, 1, 1.05]  # 0.1 and 0.5 without the bound


def test_jain_s_index_is_one_over_n_where_one_bears_everything():
    jobs = Jobs(submit=[0] * 4, duration=[10] * 4, gpus=[1] * 4, tenant=[0, 1, 2, 3], tenants=tuple("abcd"))
    result = simulate(jobs, Cluster.parse("1x8"))
    found = fairness(result, metrics.times(result)["slowdown"])
    assert (found["jain"], found["tenants"]) == (1.0, 4)
    assert fairness(result, np.array([1e9, 1, 1, 1]))["jain"] == pytest.approx(0.25)
    assert fairness(simulate(jobs.take([0]), Cluster.parse("1x8")), np.ones(1))["jain"] is None


def test_finish_time_ratio_of_three_jobs_by_hand():
    jobs = Jobs(submit=[0, 0, 50], duration=[100, 100, 50], gpus=[8, 8, 4])
    result = simulate(jobs, Cluster.parse("1x8"), "fifo-skip")  # 0 to 100, 100 to 200, 200 to 250
    asked = np.array([50 * 16 + 50 * 20, 50 * 16 + 50 * 20 + 100 * 12, 50 * 20 + 100 * 12 + 50 * 4])  # GPU seconds
    contention = asked / [100, 200, 200] / 8
    assert finish_time_ratio(result) == pytest.approx(
        np.array([100, 200, 200]) / (np.array([100, 100, 50]) * contention)
    )
    found = metrics.summary(result)["fairness"]["finish_time"]
    assert found["above_1"] == pytest.approx(2 / 3) and found["max"] == pytest.approx(200 / (50 * 1.5))
    alone = simulate(jobs.take([2]), Cluster.parse("1x8"))
    assert finish_time_ratio(alone).tolist() == [1.0]
    assert np.isnan(finish_time_ratio(simulate(Jobs([0], [1], [9]), Cluster.parse("1x8")))).all()


def test_by_type_adds_up_to_what_was_held():
    cluster = Cluster.of([NodeGroup(2, 8, "A"), NodeGroup(1, 4, "B")])
    found = metrics.summary(simulate(random_jobs(300, 5), cluster, "fifo-skip", "worst"))
    assert list(found["by_type"]) == ["A", "B"] and [of["gpus"] for of in found["by_type"].values()] == [16, 4]
    assert sum(of["gpu_s"] for of in found["by_type"].values()) == pytest.approx(found["gpu_s"])
    one = Jobs([0, 0], [10, 20], [8, 4], types=[1, 2], type_sets=((), ("A",), ("B",)))
    found = metrics.summary(simulate(one, cluster))["by_type"]
    assert (found["A"]["jobs"], found["B"]["jobs"], found["A"]["jct"]["mean"], found["B"]["jct"]["mean"]) == (
        1,
        1,
        10,
        20,
    )
    assert (found["A"]["allocation"], found["B"]["allocation"]) == (80 / (16 * 20), 1.0)
    assert metrics.summary(simulate(one.take([0]), Cluster.parse("1x8")))["by_type"] == {}


def test_groups_add_up_to_the_whole():
    result = simulate(random_jobs(500), Cluster.parse("3x8"), "fifo-skip")
    found = metrics.summary(result)
    for groups in (found["by_size"], found["by_tenant"]):
        assert sum(of["jobs"] for of in groups.values()) == 500
        for name in ("jct", "queueing", "slowdown"):
            mean = sum(of["jobs"] * of[name]["mean"] for of in groups.values()) / 500
            assert mean == pytest.approx(found[name]["mean"])
    used = [of["gpu_s"] for of in found["by_tenant"].values()]
    assert used == sorted(used, reverse=True)
    assert sum(used) == pytest.approx(found["utilisation"] * found["makespan"] * 24)


def test_at_most_twenty_tenants_are_told():
    jobs = Jobs(submit=np.zeros(50), duration=np.arange(50) + 1.0, gpus=np.ones(50, int), tenant=np.arange(50),
                tenants=tuple(map(str, range(50))))  # fmt: skip
    found = metrics.summary(simulate(jobs, Cluster.parse("1x8")))
    assert list(found["by_tenant"]) == [str(t) for t in range(49, 29, -1)] and found["fairness"]["tenants"] == 50


def test_allocation_is_that_of_a_loop_over_time():
    result = simulate(random_jobs(300, 3), Cluster.parse("2x8"))
    until = int(result.start.max())
    held = [
        int(result.jobs.gpus[(result.start <= t) & (result.end > t)].sum())
        for t in range(int(result.jobs.submit[0]), until)
    ]
    found = metrics.summary(result)["allocation"]
    assert found["mean"] == pytest.approx(np.mean(held) / 16) and found["max"] == max(held) / 16
    assert found["p50"] == sorted(held)[(len(held) - 1) // 2] / 16


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_a_saved_run_is_all_there(weft, tmp_path):
    jobs = random_jobs(400, 1)
    (tmp_path / "t.csv").write_text(
        "id,submit,duration,gpus,tenant,types\n"
        + "".join(
            f"{jobs.id[j]},{jobs.submit[j]},{jobs.duration[j]},{jobs.gpus[j]},{jobs.tenants[jobs.tenant[j]]},"
            f"{'|'.join(jobs.type_sets[jobs.types[j]])}\n"
            for j in range(400)
        )
        + "big,1000,5,99,x,\n"
    )
    words = (tmp_path / "t.csv", "--format", "csv", "--nodes", "2x8", "--order", "sjf-skip", "--json")
    code, out, err = weft(*words, "--save", tmp_path / "a" / "run")
    folder = tmp_path / "a" / "run"
    assert code == 0 and "saved in" in err and json.loads((folder / "summary.json").read_text()) == json.loads(out)
    assert {path.name for path in folder.iterdir()} == {*save.FILES} - {save.STRETCHES}
    table = parquet.read_table(folder / "jobs.parquet").to_pylist()
    result = simulate(trace.load(tmp_path / "t.csv", "csv"), Cluster.parse("2x8"), "sjf-skip")
    for j, row in enumerate(table[:400]):
        assert (row["start"], row["end"], row["id"]) == (result.start[j], result.end[j], jobs.id[j])
        assert row["wait"] == pytest.approx(sum(row[f"wait_{reason}"] for reason in REASONS))
        assert row["nodes"] == [
            f"node-{n}" for n in result.stretches.where[result.stretches.slot[j] : result.stretches.slot[j + 1]]
        ]
    assert table[400]["start"] is table[400]["nodes"] is None and "can" not in table[400]["id"]
    assert "it needs" in table[400]["unschedulable"] and table[0]["unschedulable"] is None
    # it is a trace itself, and gives the same run
    again = weft(folder / "jobs.parquet", "--format", "parquet", *words[3:], "--save", tmp_path / "again")
    assert again[0] == 0
    other = parquet.read_table(tmp_path / "again" / "jobs.parquet")
    assert other.to_pylist() == table


@pytest.mark.parametrize("order", ["fifo", "sjf-skip"])
def test_events_are_those_of_the_plain_engine_in_its_order(order):
    jobs = random_jobs(120, 2)
    events = save.events_table(simulate(jobs, Cluster.parse("2x8"), order))
    plain = reference.simulate(jobs, Cluster.parse("2x8"), order, "best").history
    states = {"completed": "completion", "pending": "arrival", "running": "start"}
    what, names = events["what"].to_pylist(), events["job"].to_pylist()
    assert list(zip(events["time"], what, names, strict=True)) == [(t, states[s], job) for t, s, job in plain]
    assert [jobs.id[row] for row in events["row"]] == names


def test_events_of_moments_never_take_more_than_there_is():
    g = np.random.default_rng(5)
    jobs = Jobs(g.integers(0, 20, 200).astype(float), g.choice([0.0, 0.0, 1.0, 3.0], 200), g.choice([2, 4, 8], 200))
    result = simulate(jobs, Cluster.parse("2x8"), "sjf-skip")
    events = save.events_table(result)
    free, running, last = [8, 8], set(), -1.0
    for time_s, what, j in zip(events["time"], events["what"].to_pylist(), events["row"].tolist(), strict=True):
        assert time_s >= last
        last = time_s
        if what != "arrival":
            free[result.stretches.where[result.stretches.slot[j]]] += result.jobs.gpus[j] * (
                1 if what == "completion" else -1
            )
            assert min(free) >= 0 and (j in running) == (what == "completion")
            running ^= {j}
    assert free == [8, 8] and not running


def test_shares_have_their_gpus_saved():
    jobs = Jobs([0, 0, 0], [5, 5, 5], [1, 1, 2], milli=[500, 400, 1000])
    columns = save.jobs_table(simulate(jobs, Cluster.parse("1x4"), placement="fgd"))
    on = columns["gpus_on"].to_pylist()
    assert on[0] == on[1] and [bin(of[0]).count("1") for of in on] == [1, 1, 2]


def test_another_run_is_not_overwritten(weft, usual, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert weft(*usual, "--save", tmp_path / "run")[0] == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    code, out, err = weft(*usual, "--save", tmp_path / "run")
    assert (code, out) == (2, "") and "holds another run" in err and "name another folder, or remove these" in err
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before and len(before) == 4


def test_a_folder_that_cannot_be_written_is_told_first(weft, usual, file, monkeypatch):
    monkeypatch.setattr("weft.cluster.simulate", lambda *a, **k: pytest.fail("it simulated"))
    for folder in (file, file / "below", "/proc/nowhere/run"):
        code, out, err = weft(*usual, "--save", folder)
        assert (code, out) == (1, "") and "a run cannot be saved in" in err and "Traceback" not in err


def test_a_mistake_leaves_no_folder(weft, file, tmp_path):
    code = weft(file, "--format", "tiresias", "--nodes", "1x8", "--save", tmp_path / "a" / "b")[0]
    assert code == 2 and not (tmp_path / "a").exists()


def test_a_full_disk_costs_the_files_and_not_the_result(weft, tmp_path):
    (tmp_path / "t.csv").write_text("submit,duration,gpus\n" + "".join(f"{i},{i * 7 % 97},1\n" for i in range(20_000)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ours = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # no file grows beyond that
    try:
        words = (tmp_path / "t.csv", "--format", "csv", "--nodes", "4x8")
        code, out, err = weft(*words, "--save", tmp_path / "new" / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ours)
    assert code == 1 and "job completion time" in out and "the run was not saved in" in err and "Traceback" not in err
    assert not (tmp_path / "new").exists()


def test_a_crash_between_two_files_leaves_none(monkeypatch, tmp_path):
    result, replace, calls = simulate(random_jobs(5), Cluster.parse("1x8")), os.replace, []

    def second_fails(*a):
        calls.append(a)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        replace(*a)

    monkeypatch.setattr(os, "replace", second_fails)
    (tmp_path / "mine").write_text("")
    with pytest.raises(OSError, match=r"was not saved in .*: No space left"):
        save.write(tmp_path, result, metrics.summary(result))
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_without_pyarrow_the_install_line_comes_first(weft, usual, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("weft.cluster.simulate", lambda *a, **k: pytest.fail("it simulated"))
    code, _, err = weft(*usual, "--save", tmp_path / "run")
    assert code == 2 and "pip install 'weft[parquet]'" in err and not (tmp_path / "run").exists()


# ---- comparing -------------------------------------------------------------------------------------------------------


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


def test_priorities_are_compared_where_there_are_any(weft, usual, tmp_path):
    code, out, err = weft("compare", *usual, "--processes", 1)
    assert code == 0 and "priority" not in out and "the order priority, which is fifo then, is left out" in err
    (tmp_path / "p.csv").write_text("submit,duration,gpus,priority\n0,1,8,0\n0,2,8,1\n")
    code, out, err = weft("compare", tmp_path / "p.csv", *usual[1:], "--processes", 1)
    assert code == 0 and "priority:best" in out and "left out" not in err
    assert "priority:best" in weft("compare", *usual, "--policy", "priority:best")[1]


def test_compare_prints_80_columns(weft, tmp_path):
    jobs = random_jobs(300)
    columns = zip(jobs.submit, jobs.duration, jobs.gpus, strict=True)
    (tmp_path / "t.csv").write_text("submit,duration,gpus\n" + "".join(f"{s},{d},{g}\n" for s, d, g in columns))
    words = ("compare", tmp_path / "t.csv", "--format", "csv", "--nodes", "3x8", "--processes", "1", "--seeds", "3")
    code, out, err = weft(
        *words, "--ties", "lowest,highest,random", "--shuffle-same-second", "--pictures", tmp_path / "page.html",
        "--policy", "priority-skip:consolidate:random", "--policy", "fifo:worst",
    )  # fmt: skip
    assert code == 0 and max(map(len, out.splitlines())) <= 80 and "2 policies by jct.mean (s), 16 runs" in out
    header = next(line for line in out.splitlines() if line.startswith("policy"))
    assert [w for w in ("own", "least", "most", "× best", "seeds", "ties") if w not in header] == []
    assert "unvalidated: order priority-skip; placement worst" in " ".join(out.split())
    assert "drawn" in err and (tmp_path / "page.html").stat().st_size > 10_000
    code, out, _ = weft(*words)  # every order but priority, strict and skip, with four placements
    assert code == 0 and "16 policies" in out


def test_what_matters_is_told_apart():
    jobs = Jobs(submit=[0, 0, 0, 1], duration=[1, 10, 100, 5], gpus=[8, 8, 8, 1])
    (found,) = compare(
        jobs, Cluster.parse("1x8"), ["fifo:first"], shuffle_same_second=True, ties=["highest"], processes=1
    )
    assert [run.kind for run in found.runs] == ["own", "ties", *["same second"] * 10]
    assert found.matters("jct.mean", "ties") == 0 and found.matters("jct.mean", "seeds") is None
    least, most = found.band("jct.mean")
    assert (
        found.matters("jct.mean", "same second") == pytest.approx((most - least) / found.value("jct.mean"))
        and most > least
    )
    assert comparing.same_second(jobs) == 3
    other = comparing.shuffled(jobs, 1)
    assert sorted(other.duration[:3]) == [1, 10, 100] and other.id[3] == 3
    assert any(comparing.shuffled(jobs, seed).duration[0] != 1 for seed in range(9))


def test_what_is_random_runs_with_every_seed():
    jobs = random_jobs(200, 7)
    policies = ["fifo:random", "fifo:best"]
    by_name = {
        str(c.policy): c for c in compare(jobs, Cluster.parse("3x8"), policies, seeds=4, ties=["random"], processes=1)
    }
    random, best = by_name["fifo:random"], by_name["fifo:best"]
    assert sorted(run.seed for run in random.runs) == [0, 1, 2, 3] and len(best.runs) == 5
    assert random.value("jct.mean") == pytest.approx(np.mean([run.found["jct"]["mean"] for run in random.runs]))
    assert best.value("jct.mean") == best.runs[0].found["jct"]["mean"]
    alone = simulate(jobs, Cluster.parse("3x8"), "fifo", "random", seed=3)
    assert random.runs[3].found["jct"] == metrics.summary(alone)["jct"]


def test_processes_give_the_same_as_one():
    jobs, policies = random_jobs(200), ["fifo:best", "sjf:worst", "fifo-skip:random"]

    def run(processes):
        return [
            (
                str(c.policy),
                [(r.kind, r.seed, r.found["jct"]) for r in c.runs],
                [r.result.start.tolist() for r in c.runs],
            )
            for c in compare(jobs, Cluster.parse("3x8"), policies, seeds=2, processes=processes, keep=True)
        ]

    assert run(1) == run(2)


def test_more_is_better_where_it_is():
    found = compare(
        random_jobs(200), Cluster.parse("3x8"), ["fifo:best", "fifo-skip:best"], metric="utilisation", processes=1
    )
    values = [each.value("utilisation") for each in found]
    assert values == sorted(values, reverse=True)


def test_policies_are_ranked_by_finish_times():
    found = compare(
        random_jobs(200),
        Cluster.parse("3x8"),
        ["fifo:worst", "sjf-skip:best"],
        metric="fairness.finish_time.mean",
        processes=1,
    )
    values = [each.value("fairness.finish_time.mean") for each in found]
    assert values == sorted(values) and values[0] < values[1]
    assert found[0].runs[0].found["fairness"]["finish_time"]["mean"] == values[0]


def test_what_one_policy_cannot_do_costs_the_others_nothing(weft, tmp_path):
    (tmp_path / "t.csv").write_text("submit,duration,gpus,milli\n0,5,1,500\n")
    words = ("compare", tmp_path / "t.csv", "--format", "csv", "--nodes", "1x8", "--processes", "1")
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
    assert {str(c.policy) for c in found[:3]} == {"fifo:best", "sjf:best", "sjf:first"} and all(
        c.runs for c in found[:3]
    )
    for dead in found[3:]:
        assert dead.policy.placement == "worst" and not dead.runs
        assert dead.failed == ["its process was ended by SIGKILL; out of memory?"]


def test_workers_answer_every_task_once():
    tasks = ["a", "raise", "exit", "b", "exit"]
    found = {number: (value, why) for number, value, why in workers.run(mortal.echo, "x", tasks, 2)}
    died = (None, "its process died with status 7")
    assert found == {0: ("xa", ""), 1: (None, "no"), 2: died, 3: ("xb", ""), 4: died}
    assert [number for number, _, _ in workers.run(mortal.echo, "x", ["a", "raise"], 1)] == [0, 1]


def test_a_script_that_compares_needs_no_guard(tmp_path):
    """Its processes do not run it anew."""
    (tmp_path / "script.py").write_text(
        "from weft.cluster import Cluster, Jobs, compare\n"
        "open('ran', 'a').write('once')\n"
        "found = compare(Jobs([0], [5], [1]), Cluster.parse('1x8'), ['fifo:best', 'sjf:best'], processes=2)\n"
        "print([(str(each.policy), each.value('jct.mean'), each.failed) for each in found])\n"
    )
    said = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.stdout == "[('fifo:best', 5.0, []), ('sjf:best', 5.0, [])]\n" and said.stderr == ""
    assert (tmp_path / "ran").read_text() == "once"


def test_processes_end_when_their_parent_is_killed(tmp_path):
    """``kill -9`` of it, while they are at work."""
    text = (
        f"import pathlib, sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import mortal; from weft.cluster import workers\n"
        f"list(workers.run(mortal.sleeps, pathlib.Path({str(tmp_path)!r}), [1, 2], 2))\n"
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--policy", "fifo"], "expected ORDER:PLACEMENT"),
        (["--policy", "fifo:best:lowest:x"], "expected ORDER:PLACEMENT"),
        (["--policy", "fofi:best"], "did you mean 'fifo'"),
        (["--policy", "fifo:bets"], "did you mean 'best'"),
        (["--policy", "fifo:best:lowst"], "did you mean 'lowest'"),
        (["--ties", "lowest,higest"], "did you mean 'highest'"),
        (["--metric", "jct.means"], "did you mean 'jct.mean'"),
        (["--seeds", "0"], "seeds"),
    ],
)
def test_mistakes_of_a_comparison(weft, usual, words, told):
    code, out, err = weft("compare", *usual, *words)
    assert code == 2 and out == "" and told in err


# ---- a terminal, and Ctrl-C ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Shares of GPUs on many nodes: minutes of simulation, and about a second to read."""
    path = tmp_path_factory.mktemp("long") / "long.csv"
    jobs = generate(150_000, Cluster.parse("3000x8"), load=0.95, sizes={1: 1}, seed=1)
    milli = 20 * np.random.default_rng(0).integers(1, 50, len(jobs))
    rows = zip(jobs.submit.tolist(), jobs.duration.tolist(), milli.tolist(), strict=True)
    path.write_text("submit,duration,gpus,milli\n" + "".join(f"{s},{d},1,{m}\n" for s, d, m in rows))
    return path


def at_a_terminal(words, until: str, timeout: float = 90):
    """weft with standard error on a terminal; Ctrl-C when that shows ``until``. Status, output, what the terminal showed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *map(str, words)],
        stdout=subprocess.PIPE, stderr=theirs, env=plain_environment(TERM="xterm"), start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown, sent, deadline = b"", False, time.monotonic() + timeout
    with contextlib.suppress(OSError):  # Linux's way to say that nobody holds the other end
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536)
            if not sent and until.encode() in shown:
                time.sleep(0.5)
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
                sent = True
    try:
        out = process.communicate(timeout=30)[0].decode()
    finally:
        os.close(ours)
        process.kill()
    assert sent, shown.decode()
    return process.returncode, out, shown.decode()


INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from weft.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""


def test_an_interrupted_simulation_keeps_what_is_there(long, tmp_path):
    words = ("simulate", long, "--format", "csv", "--nodes", "3000x8", "--placement", "fgd", "--save", tmp_path / "run")
    code, out, shown = at_a_terminal(words, "simulating")
    assert code == 130 and "Traceback" not in shown and "interrupted" in shown, shown
    assert "interrupted: these are the jobs that had started by then" in out
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    table = parquet.read_table(tmp_path / "run" / "jobs.parquet", columns=["start"])
    assert not found["complete"] and 0 < found["completed"] < found["jobs"] == table.num_rows == 150_000
    assert table.num_rows - table["start"].null_count == found["completed"]
    events = parquet.read_table(tmp_path / "run" / "events.parquet")["what"].to_pylist()
    assert events.count("start") == found["completed"] > events.count("completion")


def test_an_interrupt_while_modules_are_imported_is_told(monkeypatch, capsys):
    """Ctrl-C in the first moments."""

    def interrupted(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.__import__", interrupted)
    code = entry.main()
    monkeypatch.undo()
    assert code == 130 and capsys.readouterr() == ("", "weft: interrupted\n")


def test_an_interrupted_comparison_keeps_what_is_there(long):
    words = ("simulate", "compare", long, "--format", "csv", "--nodes", "3000x8", "--processes", "2")
    code, out, shown = at_a_terminal((*words, "--policy", "fifo:first", "--policy", "fifo:fgd"), "simulating")
    assert code == 130 and "Traceback" not in shown and "interrupted" in shown, shown
    assert "FAILED fifo:fgd: interrupted" in out and "1 policy by jct.mean" in out


def test_json_and_pipes_show_no_bar(weft, usual):
    assert weft(*usual, "--json")[2] == weft(*usual)[2] == weft("compare", *usual, "--policy", "fifo:best")[2] == ""
