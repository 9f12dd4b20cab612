"""What ``weft simulate --save`` keeps, and what is left where it cannot."""

import json
import os
import resource
import signal
import sys

import numpy as np
import pytest
from random_traces import random_jobs

from weft.cluster import Cluster, Jobs, metrics, reference, save, simulate, trace
from weft.cluster.result import REASONS

parquet = pytest.importorskip("pyarrow.parquet")


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
        held = result.stretches
        assert row["nodes"] == [f"node-{n}" for n in held.where[held.slot[j] : held.slot[j + 1]]]
    assert table[400]["start"] is table[400]["nodes"] is None and "can" not in table[400]["id"]
    assert "it needs" in table[400]["unschedulable"] and table[0]["unschedulable"] is None
    # it is a trace itself, and gives the same run
    assert weft(folder / "jobs.parquet", "--format", "parquet", *words[3:], "--save", tmp_path / "again")[0] == 0
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


@pytest.mark.parametrize("order", ["sjf-skip", "srtf"])
def test_events_play_back_without_taking_more_than_there_is(order):
    g = np.random.default_rng(5)
    submit, duration = g.integers(0, 60, 200).astype(float), g.choice([0.0, 0.0, 1.0, 3.0, 9.0], 200)
    jobs = Jobs(submit, duration, g.choice([2, 4, 8, 16], 200))
    result = simulate(jobs, Cluster.parse("3x8"), order)
    events, held = save.events_table(result), result.stretches
    free, at, running, last = np.full(3, 8), dict.fromkeys(range(len(jobs)), 0), set(), -1.0
    what = events["what"].to_pylist()
    for time_s, word, j in zip(events["time"], what, events["row"].tolist(), strict=True):
        stretch = np.flatnonzero(held.job == j)[at[j]]
        where = held.where[held.slot[stretch] : held.slot[stretch + 1]]
        each = np.minimum(8, jobs.gpus[j] - 8 * np.arange(len(where)))
        if word == "start":
            np.subtract.at(free, where, each)
            running.add(j)
        elif word != "arrival":
            np.add.at(free, where, each)
            running.remove(j)
            at[j] += word == "stop"
        assert (free >= 0).all() and time_s >= last
        last = time_s
    assert not running and (free == 8).all()
    assert what.count("stop") == result.stops.sum() and (result.stops.sum() > 10) == (order == "srtf")


def test_shares_have_their_gpus_saved():
    jobs = Jobs([0, 0, 0], [5, 5, 5], [1, 1, 2], milli=[500, 400, 1000])
    on = save.jobs_table(simulate(jobs, Cluster.parse("1x4"), placement="fgd"))["gpus_on"].to_pylist()
    assert on[0] == on[1] and [bin(of[0]).count("1") for of in on] == [1, 1, 2]


def test_another_run_is_not_overwritten(weft, usual, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert weft(*usual, "--save", tmp_path / "run")[0] == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    code, out, err = weft(*usual, "--save", tmp_path / "run")
    assert (code, out) == (2, "") and "already has another run" in err and "name another folder, or remove these" in err
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before and len(before) == 4


def test_a_folder_that_cannot_be_written_is_reported_first(weft, usual, file, monkeypatch):
    monkeypatch.setattr("weft.cluster.simulate", lambda *a, **k: pytest.fail("it simulated"))
    for folder in (file, file / "below", "/proc/nowhere/run"):
        code, out, err = weft(*usual, "--save", folder)
        assert (code, out) == (1, "") and "a run cannot be saved in" in err and "Traceback" not in err


def test_a_mistake_leaves_no_folder(weft, file, tmp_path):
    code = weft(file, "--format", "tiresias", "--nodes", "1x8", "--save", tmp_path / "a" / "b")[0]
    assert code == 2 and not (tmp_path / "a").exists()


def test_a_full_disk_costs_the_files_and_not_the_result(weft, on_nodes, tmp_path):
    words = on_nodes("submit,duration,gpus\n" + "".join(f"{i},{i * 7 % 97},1\n" for i in range(20_000)), "4x8")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ours = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # no file grows beyond that
    try:
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
