"""Records: appended and read whatever happens to the file, and compacted without losing a number."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from where import plain_environment

from weft import records
from weft.records import Measurement, Store


def measurement(**changed) -> Measurement:
    given = {"operator": "softmax", "implementation": "triton", "direction": "forward", "workload": "M=1,N=2"}
    return Measurement(**{**given, "dtype": "fp32", "time_us": 1.5, "gpu": "NVIDIA H200", **changed})


def test_what_is_appended_is_read(tmp_path):
    store = Store(tmp_path)
    first, second = measurement(details={"a": 1}), measurement(time_us=2.0, versions={"torch": "2.13.0"})
    path = store.append(first.gpu, first.operator, first)
    store.append(second.gpu, second.operator, second)
    store.append("CPU (2 cores)", "softmax", measurement(gpu="CPU (2 cores)"))
    assert path == tmp_path / "nvidia-h200" / "softmax.jsonl" and store.read("NVIDIA H200") == [first, second]
    assert len(store.read(name="softmax")) == 3 and store.read(name="matmul") == []
    assert store.machines() == ["cpu-2-cores", "nvidia-h200"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_store_that_is_not_there_is_empty(tmp_path):
    assert Store(tmp_path / "none").read() == [] and Store(tmp_path / "none").machines() == []


@pytest.mark.parametrize("cut", [0, 1, 2, 30])
def test_a_cut_line_is_passed_over_and_mended_by_the_next_append(tmp_path, cut):
    """Where only its newline is cut, nothing is lost."""
    store = Store(tmp_path)
    path = store.append("gpu", "softmax", measurement(time_us=1.0))
    store.append("gpu", "softmax", measurement(time_us=2.0))
    path.write_bytes(path.read_bytes()[: -1 - cut])  # a crash in the middle of the last line
    kept = [1.0] if cut else [1.0, 2.0]
    assert [m.time_us for m in store.read()] == kept
    store.append("gpu", "softmax", measurement(time_us=3.0))
    assert [m.time_us for m in store.read()] == [*kept, 3.0] and path.read_bytes().endswith(b"}\n")


def test_records_of_another_schema_are_read(tmp_path):
    """With fields that this one does not know; but what a later weft calls another schema may mean something else."""
    store = Store(tmp_path)
    store.append("gpu", "softmax", {**dataclasses.asdict(measurement()), "from_the_future": 1, "schema": 0})
    store.append("gpu", "softmax", {**dataclasses.asdict(measurement()), "schema": 99})
    store.append("gpu", "softmax", {"operator": "softmax", "note": "no measurement"})
    assert [(m.operator, m.schema) for m in store.read()] == [("softmax", 0)]


@pytest.mark.parametrize(("field", "value"), [
    *(("time_us", v) for v in (-5, 0, None, "1")), ("workload", ["a"]), ("machine", None), ("time", 5), ("ours", 1),
])  # fmt: skip
def test_what_is_no_measurement_is_passed_over(tmp_path, field, value):
    store = Store(tmp_path)
    store.append("gpu", "softmax", measurement())
    store.append("gpu", "softmax", {**dataclasses.asdict(measurement(time_us=9.0)), field: value})
    store.append("gpu", "softmax", {"implementation": "x"})
    assert [m.time_us for m in store.read()] == [1.5]


def test_what_is_no_file_or_no_record_stops_no_reader(tmp_path):
    store = Store(tmp_path)
    path = store.append("gpu", "softmax", measurement())
    (path.parent / "folder.jsonl").mkdir()
    os.mkfifo(path.parent / "fifo.jsonl")
    (path.parent / "loop.jsonl").symlink_to("loop.jsonl")
    with open(path, "a") as file:
        file.write("[" * 200_000 + "\n" + "9" * 5000 + "\n" + '{"a":' * 100_000 + "\n")
    assert len(store.read()) == 1


def test_a_store_that_cannot_be_written_says_so_before_anything_is_measured(tmp_path):
    (tmp_path / "results").write_text("a file")
    with pytest.raises(OSError, match=r"records cannot be saved in .*set WEFT_RESULTS to another folder"):
        Store(tmp_path / "results").probe("gpu")


def test_a_number_that_json_does_not_know_is_refused(tmp_path):
    with pytest.raises(ValueError):
        Store(tmp_path).append("gpu", "softmax", measurement(time_us=math.nan))
    assert Store(tmp_path).read() == []


APPENDER = """
import sys
from weft.records import Measurement, Store
store = Store(sys.argv[1])
n = 0
while True:
    store.append("gpu", "softmax", Measurement("softmax", "triton", "forward", f"N={n}", "fp32", 1.0,
                                                   details={"x": "y" * 20000}))
    n += 1
    print(n, flush=True)
"""


def test_a_kill_in_the_middle_of_appending_leaves_valid_lines(tmp_path):
    store, lost = Store(tmp_path), 0
    for round_number in range(3):
        before = len(store.read())
        command = [sys.executable, "-c", APPENDER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=plain_environment()) as process:
            for _ in range(10):
                process.stdout.readline()
            time.sleep(0.003 * round_number)
            process.send_signal(signal.SIGKILL)
            reported = 10 + sum(1 for _ in process.stdout)
        kept = store.read()[before:]
        assert [m.workload for m in kept] == [f"N={n}" for n in range(len(kept))]
        assert len(kept) >= reported  # what append returned from is on disk
        lost += len(kept) < reported
    path = store.path("gpu", "softmax")
    store.append("gpu", "softmax", measurement())
    assert path.read_bytes().endswith(b"}\n") and store.read()[-1] == measurement() and not lost


def benched(run="r1", gpu="NVIDIA H200", **changed):
    """A measurement as a bench makes it; its clocks and time are of the moment."""
    about = {"driver": "580", "power_w": f"{changed.get('time_us', 1.5)}"}
    context = {"machine": about, "versions": {"torch": "2.13.0"}, "commit": run * 2, "time": f"2026-11-2{run[-1]}"}
    return measurement(run=run, gpu=gpu, **{**context, **changed})


def test_compact_keeps_the_newest_of_each_point_and_writes_what_a_run_shares_once(tmp_path):
    store, gpu = Store(tmp_path), "NVIDIA H200"
    rates = [records.ceiling("memory 1:1", "bandwidth", 4.0e12, "B/s", run=r, gpu=gpu, time=r) for r in ("r1", "r3")]
    old, new = benched(time_us=1.0), benched("r2", time_us=2.0, ours=True, host_us=1.234567, details={"mode": "x"})
    other = benched(workload="M=3,N=4", error=0.123456789, bytes_moved=1234567890123)
    for m in (*rates, old, other, new, benched("r2", workload="M=9,N=9", commit="another")):
        store.append(gpu, m.operator, m)
    store.append(gpu, "softmax", {"note": "no measurement"})
    store.compact(gpu)
    path, runs = store.path(gpu, "softmax"), store.path(gpu, "runs")
    assert sorted(p.name for p in path.parent.iterdir()) == ["runs.jsonl", "softmax.jsonl"]
    assert [line.get("machine") for line in records.read_lines(path)] == [None] * 4
    assert [(line["run"], line["machine"].get("driver")) for line in records.read_lines(runs)] == [
        ("r1", None), ("r2", "580"), ("r3", None),
    ]  # fmt: skip
    found = store.read(gpu, "softmax")
    assert [(m.workload, m.time_us, m.error, m.host_us) for m in found] == [
        ("M=1,N=2", 2.0, None, 1.2346), ("M=3,N=4", 1.5, 0.12346, None), ("M=9,N=9", 1.5, None, None),
    ]  # fmt: skip
    assert found[0] == dataclasses.replace(new, machine={"driver": "580"}, host_us=1.2346)
    assert [m.commit for m in found] == ["r2r2", "r1r1", "another"] and found[1].bytes_moved == 1234567890123
    assert [(m.run, m.details["value"]) for m in store.read(gpu, "ceiling")] == [("r1", 4.0e12), ("r3", 4.0e12)]
    assert {"note": "no measurement"} in store.lines(gpu, "softmax")
    before = path.read_bytes() + runs.read_bytes()
    store.compact(gpu)
    assert path.read_bytes() + runs.read_bytes() == before


def test_what_is_appended_after_compacting_is_newer(tmp_path):
    store = Store(tmp_path)
    for time_us in (1.0, 2.0):
        store.append("gpu", "softmax", benched(gpu="gpu", time_us=time_us))
        store.compact("gpu")
    store.append("gpu", "softmax", benched("r2", gpu="gpu", time_us=3.0))
    assert [m.time_us for m in records.latest(store.read())] == [3.0] and len(store.read()) == 2


def test_records_are_renamed_and_dropped_by_writing_them_anew(tmp_path):
    store, gpu = Store(tmp_path), "NVIDIA H200"
    for m in (benched(), benched(implementation="cuda"), benched(operator="add")):
        store.append(gpu, m.operator, m)
    store.write(gpu, [dataclasses.replace(m, operator="linear") for m in store.read(gpu) if m.implementation != "cuda"])
    assert [(m.operator, m.implementation) for m in store.read()] == [("linear", "triton")] * 2
    assert sorted(p.name for p in (tmp_path / "nvidia-h200").iterdir()) == ["linear.jsonl", "runs.jsonl"]


@pytest.mark.parametrize("failing", range(4))
def test_a_disk_that_fails_while_compacting_loses_no_measurement(tmp_path, monkeypatch, failing):
    store = Store(tmp_path)
    for run in ("r1", "r2"):
        for n in range(2):
            m = benched(run, gpu="gpu", operator=f"op{n}", workload=f"N={run}")
            store.append("gpu", m.operator, m)
    calls, whole = iter(range(9)), records.write_whole

    def failing_write(path, text):
        if next(calls) == failing:
            raise OSError(28, "No space left on device", str(path))
        whole(path, text)

    def points():
        return sorted((m.operator, m.workload, m.commit, m.versions["torch"]) for m in store.read())

    before = points()
    monkeypatch.setattr(records, "write_whole", failing_write)
    saver = records.Saver(store)
    saver(benched("r2", gpu="gpu", operator="op0", workload="N=r2"))
    saver.finish()
    assert bool(saver.failure) == (failing < 3) and sorted(set(points())) == before


def test_latest_keeps_the_newest_of_each_point():
    old, new, other = measurement(time_us=1.0), measurement(time_us=2.0), measurement(dtype="bf16")
    assert records.latest([old, other, new]) == [new, other]


@pytest.mark.parametrize(("text", "folder"), [
    ("NVIDIA H200", "nvidia-h200"), ("  A/B (2 cores) ", "a-b-2-cores"), ("", "unknown"), ("../x", "..-x"),
])  # fmt: skip
def test_slug_is_one_safe_folder_name(text, folder):
    assert records.slug(text) == folder and "/" not in records.slug(text)


def test_the_commit_is_what_the_variable_says(monkeypatch):
    monkeypatch.setenv("WEFT_COMMIT", "abc123")
    assert records.commit() == "abc123"
