"""``weft simulate``, as a user types it: what it prints, at a terminal and elsewhere, and what it says of bad input."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from where import plain_environment, python

from weft import __main__ as entry
from weft.cluster import Cluster, trace
from weft.cluster.orders import ORDERS
from weft.cluster.placements import PLACEMENTS
from weft.cluster.result import REASONS
from weft.cluster.synthetic.generate import generate

parquet = pytest.importorskip("pyarrow.parquet")


def test_the_json_object_has_all_documented_keys(weft, usual):
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
    assert "job 3 can never run" in flat and "unvalidated" not in weft(*usual, "--placement", "consolidate")[1]


def test_types_of_gpu_and_finish_times_are_printed(weft, tmp_path):
    (tmp_path / "t.csv").write_text("submit,duration,gpus,types\n0,100,8,A\n0,100,8,A\n50,50,4,B\n")
    (tmp_path / "c.yaml").write_text("nodes:\n- {count: 1, gpu_type: A}\n- {count: 1, gpus: 4, gpu_type: B}\n")
    code, out, _ = weft(tmp_path / "t.csv", "--format", "csv", "--cluster", tmp_path / "c.yaml")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert "by type of GPU" in out and "GPUs held, of the makespan: A 100.0% of 8, B 25.0% of 4" in out
    # With an equal share 150, 116.7 and 66.7 s; they took 100, 200 and 100.
    assert "66.7% of the jobs took longer than with an equal share" in " ".join(out.split())


def test_how_local_gangs_were_is_printed(weft, tmp_path):
    (tmp_path / "t.csv").write_text("submit,duration,gpus\n0,100,16\n0,100,16\n")
    (tmp_path / "c.yaml").write_text("nodes:\n- {count: 3, rack: a}\n- {count: 1, rack: b}\n")
    usual = tmp_path / "t.csv", "--format", "csv", "--cluster", tmp_path / "c.yaml"
    code, out, _ = weft(*usual, "--placement", "first")
    flat = " ".join(out.split())
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert "2 gangs over several nodes: 50.0% in one rack, 50.0% over several racks" in flat
    assert "gang" not in weft(tmp_path / "t.csv", "--format", "csv", "--nodes", "1x32")[1]


def test_a_preempted_gang_is_not_counted_as_two(weft, on_nodes):
    words = on_nodes("submit,duration,gpus,priority\n0,100,16,0\n10,20,1,1\n", "2x8")
    out = weft(*words, "--order", "priority-preemptive")[1]
    assert "jobs were preempted 1 time;" in out and "2 starts of gangs over several nodes: 100.0% in one rack" in out


def test_no_job_at_all_that_could_run_is_a_failure(weft, on_nodes):
    words = on_nodes("submit,duration,gpus\n0,5,99\n1,5,98\n")
    compared = ("compare", *words, "--policy", "fifo:best", "--processes", "1")
    for each in (words, (*words, "--order", "fifo-conservative"), compared):
        code, out, _ = weft(*each)
        assert code == 1 and "no job could run on this cluster" in out
    code, out, _ = weft(*words, "--json")
    assert code == 1 and json.loads(out)["completed"] == 0


def test_memory_that_does_not_suffice_is_one_line(weft, usual, monkeypatch):
    def too_much(*a, **k):
        raise MemoryError("Unable to allocate 745. GiB")

    monkeypatch.setattr("weft.cluster.simulate", too_much)
    assert weft(*usual) == (1, "", "weft: not enough memory: Unable to allocate 745. GiB")


def test_warnings_about_a_trace_are_printed(weft, on_nodes, tmp_path):
    words = on_nodes("submit,duration,gpus,prioritys\n0,5,1,7\n")
    told = "columns of the trace that are not read: prioritys (did you mean 'priority'?)"
    assert told in weft(*words)[1] and json.loads(weft(*words, "--json")[1])["warnings"] == [told]
    assert told in weft("compare", *words, "--policy", "fifo:best", "--processes", "1")[1]
    like = ("generate", tmp_path / "g.csv", "--jobs", "9", "--like", words[0], "--format", "csv")
    assert told in weft(*like, "--load", "1", "--nodes", "1x8")[2]


LONG = "so-long-a-name-that-nobody-can-read-it-in-a-table-of-eighty-columns"


def test_long_names_are_shortened_where_they_stay_apart(weft, on_nodes, tmp_path):
    names = [f"{LONG}-{k}" for k in "ab"] + [f"begin-{LONG}-{k}-{LONG}" for k in "cd"]
    rows = "".join(f"{k},{10**9 * k},8,{name},{name}\n" for k, name in enumerate(names))
    (tmp_path / LONG).mkdir()
    order = tmp_path / LONG / "mine.py"
    text = "from weft.cluster.order import Order\nORDER = Order('k', lambda jobs: (-jobs.gpus,), 'of a test')"
    order.write_text(text)
    words = on_nodes(f"submit,duration,gpus,tenant,id\n{rows}0,1,99,x,{LONG}\n")
    code, out, _ = weft(*words, "--order", order)
    assert code == 0 and max(map(len, out.splitlines())) <= 80 and str(tmp_path) not in out
    assert out.startswith("mine.py, best (ties: lowest)") and "unvalidated: order mine.py;" in out
    flat = "".join(line.split("  ")[0] for line in out.splitlines())
    assert "so-long-a-name-…ighty-columns-a" in flat and names[2] in flat and names[3] in flat  # alike if shortened
    assert "job 'so-long-a-name-…-eighty-columns' can never run" in flat
    policies = ("--policy", f"{order}-skip:consolidate:random", "--policy", f"{order}:best")
    code, out, _ = weft("compare", *words, *policies, "--processes", "1", "--ties", "highest", "--seeds", "2")
    assert code == 0 and max(map(len, out.splitlines())) <= 80 and str(tmp_path) not in out and "mine.py:best" in out


def test_names_are_printed_as_they_are(weft, on_nodes):
    code, out, _ = weft(*on_nodes("submit,duration,gpus,tenant\n0,5,1,[/b]\n1,5,1,a\x1b[2J\n2,5,1,[bold]\n", "1x1"))
    assert code == 0 and "[/b]" in out and "[bold]" in out and "\x1b" not in out


@pytest.mark.parametrize(("row", "words"), [
    ("1700000000000000000,100,1", "submit of job 0 (row 0) is 1.7e+18; expected seconds, at most 1e+11"),
    ("0,1e300,1", "duration of job 0 (row 0) is 1e+300; expected seconds"),
    ("0,1," + "1" * 200_000, "t.csv:2: field larger than field limit"),
])  # fmt: skip
def test_what_is_no_time_or_no_cell_is_refused(weft, on_nodes, row, words):
    code, _, err = weft(*on_nodes(f"submit,duration,gpus\n{row}\n"))
    assert code == 2 and words in " ".join(err.split())


def test_a_cluster_of_any_size_is_not_built(weft, usual):
    code, _, err = weft(*usual[:-1], "1000000000x8")
    assert code == 2 and "expected at most 1,000,000" in err


def test_help_names_every_plug_in(weft):
    for words in (("--help",), ("compare", "--help")):
        code, out, _ = weft(*words)
        flat = " ".join(out.replace("│", " ").split())
        assert code == 0 and all(name in flat for name in (*trace.formats(), *ORDERS, *PLACEMENTS))
        assert "PLUGINS" not in flat and not any(word in flat for word in ("FORMATS", "ORDERS", "METRICS"))
    assert "jct .mean .p50" in flat and "fairness.finish_time .mean .p99 .above_1" in flat
    assert "--policy" in flat and "weft simulate compare" in weft("--help")[1]


def test_a_cluster_file_and_the_file_s_own_columns(weft, tmp_path):
    (tmp_path / "jobs.csv").write_text("time,duration,gpu_num\n0,10,4\n1,20,8\n")
    (tmp_path / "cluster.yaml").write_text("nodes:\n  - {count: 2, gpus: 8}\n")
    words = (tmp_path / "jobs.csv", "--format", "csv", "--cluster", tmp_path / "cluster.yaml", "--json")
    for columns in (("--columns", "gpus=gpu_num, submit=time"), ("--option", "columns=gpus=gpu_num,submit=time")):
        code, out, _ = weft(*words, *columns)
        assert code == 0 and json.loads(out)["completed"] == 2 and json.loads(out)["nodes"] == 2


def test_a_trace_named_compare_is_read_by_its_path(weft, file, monkeypatch):
    file.rename(file.parent / "compare")
    monkeypatch.chdir(file.parent)
    assert weft("./compare", "--format", "csv", "--nodes", "1x8")[0] == 0


def test_a_number_of_a_format_is_a_number(weft, tmp_path):
    (tmp_path / "c.csv").write_text("job_id,user,num_gpu,submit_time,duration,best_effort\n0,u,1,0,7,0\n")
    words = (tmp_path / "c.csv", "--format", "chronus", "--nodes", "1x8", "--json")
    assert json.loads(weft(*words, "--option", "seconds_per_unit=2")[1])["makespan"] == 14
    code, out, err = weft(*words, "--option", "seconds_per_unit=two")
    assert (code, out) == (2, "") and "is 'two'; expected a number" in err


@pytest.mark.parametrize(("words", "told"), [
    (["--format", "csv"], "the cluster is missing; expected one: --nodes 20x8, or --cluster FILE"),
    (["--format", "csv", "--nodes", "8"], "should read COUNTx"),
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
    (["--nodes", "1x8", "--format", "csv", "--placement", "bets"], "did you mean 'best'"),
    (["--nodes", "1x8", "--format", "csv", "--ties", "lowst"], "did you mean 'lowest'"),
    (["--nodes", "1x8", "--format", "csv", "--where", "tenant"], "expected COLUMN=VALUE"),
    (["--nodes", "1x8", "--format", "csv", "--where", "tenant=c"], "unknown tenant 'c' (there are: a, b)"),
    (["--nodes", "1x8", "--format", "csv", "--pictures", "x.pdf"], "ends in .html, .png or .svg"),
    (["--nodes", "1x8", "--format", "csv", "--limit", "0"], "limit"),
    (["--nodes", "1x8", "--format", "csv", "--seed", "-1"], "seed"),
])  # fmt: skip
@pytest.mark.parametrize("verb", [(), ("compare", "--policy", "fifo:best")])
def test_mistakes_are_reported_before_anything_runs(weft, file, monkeypatch, verb, words, told):
    if verb and {"--order", "--placement", "--seed", "--ties"} & set(words):
        pytest.skip("not an option of compare, or its own")
    monkeypatch.setattr("weft.cluster.simulate", lambda *a, **k: pytest.fail("it simulated"))
    code, out, err = weft(*verb, file, *words)
    assert code == 2 and out == "" and told in err.replace("│ ", "")


def test_the_simulator_needs_no_pytorch(file):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        f"from weft.cluster import *; from weft.cluster import trace\n"
        f"print(simulate(trace.load({str(file)!r}, 'csv'), Cluster.parse('2x8')).end.tolist())"
    )
    done = python("-c", code)
    assert done.returncode == 0 and done.stdout.strip() == "[10.0, 21.0, 6.0, nan]", done.stderr


def test_pictures_are_drawn(weft, usual, tmp_path):
    code, _, err = weft(*usual, "--pictures", tmp_path / "new" / "page.html")
    assert code == 0 and "drawn" in err and "<html" in (tmp_path / "new" / "page.html").read_text()
    assert weft(*usual, "--pictures", tmp_path / "trace.csv" / "page.html")[0] == 1


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
        out = process.communicate(timeout=90)[0].decode()
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


@pytest.mark.share(4)
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


def test_an_interrupt_while_modules_are_imported_is_reported(monkeypatch, capsys):
    """Ctrl-C in the first moments."""

    def interrupted(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.__import__", interrupted)
    code = entry.main()
    monkeypatch.undo()
    assert code == 130 and capsys.readouterr() == ("", "weft: interrupted\n")


@pytest.mark.share(4)
def test_an_interrupted_comparison_keeps_what_is_there(long):
    words = ("simulate", "compare", long, "--format", "csv", "--nodes", "3000x8", "--processes", "2")
    code, out, shown = at_a_terminal((*words, "--policy", "fifo:first", "--policy", "fifo:fgd"), "simulating")
    assert code == 130 and "Traceback" not in shown and "interrupted" in shown, shown
    assert "FAILED fifo:fgd: interrupted" in out and "1 policy by jct.mean" in out


def test_json_and_pipes_show_no_bar(weft, usual):
    assert weft(*usual, "--json")[2] == weft(*usual)[2] == weft("compare", *usual, "--policy", "fifo:best")[2] == ""


def test_what_is_left_out_and_the_warm_up_are_said_everywhere(weft, on_nodes, tmp_path):
    words = on_nodes(
        "submit,duration,gpus,tenant\n0,9,8,a\n7200,9,8,a\n7200,7209,8,b\n9000,9,1,b\n999999,9,8,b\n", "1x8"
    )
    words = (*words, "--from", "1h", "--until", "1d", "--warm-up", "10min")
    page, told = tmp_path / "p.html", "warm-up: 2 jobs of the first 10 min ran and count in no time, wait or share"
    code, out, _ = weft(*words, "--pictures", page)
    flat = " ".join(out.split())
    assert code == 0 and max(map(len, out.splitlines())) <= 80 and told in flat
    assert "1 row was left out: submitted before 1h" in flat and "1 row was left out: submitted from 1d on" in flat
    assert re.search(r"queueing delay +90.3 min +90.3 min", out)  # 14418 − 9000 s
    assert "left out: 1 row, submitted before 1h" in page.read_text() and "its 2 jobs count in no" in page.read_text()
    found = json.loads(weft(*words, "--json")[1])
    assert found["warm_up"] == {"seconds": 600, "jobs": 2} and sum(found["dropped"].values()) == 2
    assert told in " ".join(weft("compare", *words, "--policy", "fifo:best", "--processes", "1")[1].split())
    assert "span of time '1 week'; expected one such as 2d" in weft(*words[:-1], "1 week")[2]
    assert json.loads(weft("check", *words[:-2], "--json")[1])["jobs"] == 3
