"""Records: appended and read whatever happens to the file, and the hash of the source that they were made from."""

from __future__ import annotations

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
from weft.source import source_hash


def measurement(**changed) -> Measurement:
    given = {"operator": "softmax", "implementation": "triton", "direction": "forward", "workload": "M=1,N=2"}
    return Measurement(**{**given, "dtype": "fp32", "time_us": 1.5, "gpu": "NVIDIA H200", **changed})


def test_what_is_appended_is_read(tmp_path):
    store = Store(tmp_path)
    first, second = measurement(details={"a": 1}), measurement(time_us=2.0, versions={"torch": "2.13.0"})
    path = store.append(first.gpu, first.operator, first)
    store.append(second.gpu, second.operator, second)
    store.append("CPU (2 cores)", "softmax", measurement(gpu="CPU (2 cores)"))
    assert path == tmp_path / "nvidia-h200" / "softmax.jsonl"
    assert store.read("NVIDIA H200") == [first, second]
    assert len(store.read(name="softmax")) == 3 and store.read(name="matmul") == []
    assert store.machines() == ["cpu-2-cores", "nvidia-h200"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_store_that_is_not_there_is_empty(tmp_path):
    assert Store(tmp_path / "none").read() == [] and Store(tmp_path / "none").machines() == []


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_cut_line_is_passed_over_and_mended_by_the_next_append(tmp_path, cut):
    store = Store(tmp_path)
    path = store.append("gpu", "softmax", measurement(time_us=1.0))
    store.append("gpu", "softmax", measurement(time_us=2.0))
    whole = path.read_bytes()
    path.write_bytes(whole[: -1 - cut])  # a crash in the middle of the last line
    assert [m.time_us for m in store.read()] == [1.0]
    store.append("gpu", "softmax", measurement(time_us=3.0))
    assert [m.time_us for m in store.read()] == [1.0, 3.0]
    assert path.read_bytes().endswith(b"}\n")


def test_only_the_newline_cut_loses_nothing(tmp_path):
    store = Store(tmp_path)
    path = store.append("gpu", "softmax", measurement(time_us=1.0))
    path.write_bytes(path.read_bytes()[:-1])
    store.append("gpu", "softmax", measurement(time_us=2.0))
    assert [m.time_us for m in store.read()] == [1.0, 2.0]


def test_records_of_another_schema_are_read(tmp_path):
    """With fields that this one does not know; but what a later weft calls another schema may mean something else."""
    store = Store(tmp_path)
    store.append("gpu", "softmax", {**dataclasses.asdict(measurement()), "from_the_future": 1, "schema": 0})
    store.append("gpu", "softmax", {**dataclasses.asdict(measurement()), "schema": 99})
    store.append("gpu", "softmax", {"operator": "softmax", "note": "no measurement"})
    assert [(m.operator, m.schema) for m in store.read()] == [("softmax", 0)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("time_us", v) for v in (-5, 0, None, "1")] + [("workload", ["a"]), ("machine", None), ("time", 5), ("ours", 1)],
)
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
    with pytest.raises(OSError, match=r"records cannot be saved in .*WEFT_RESULTS names another place"):
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
        with subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=plain_environment()
        ) as process:
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
    assert path.read_bytes().endswith(b"}\n") and store.read()[-1] == measurement()
    assert not lost


def test_latest_keeps_the_newest_of_each_point():
    old, new, other = measurement(time_us=1.0), measurement(time_us=2.0), measurement(dtype="bf16")
    assert records.latest([old, other, new]) == [new, other]


@pytest.mark.parametrize(
    ("text", "folder"),
    [("NVIDIA H200", "nvidia-h200"), ("  A/B (2 cores) ", "a-b-2-cores"), ("", "unknown"), ("../x", "..-x")],
)
def test_slug_is_one_safe_folder_name(text, folder):
    assert records.slug(text) == folder and "/" not in records.slug(text)


KERNELS = """from weft.operators.launch import Plan
c = Configurations(__file__, "x")
d = Configurations(__file__, f"{name}_z")
"""

TOY = """
from weft.operators.call import Choice
from weft.operators.toys import cluster
from weft.operators.toys.call import run
from weft.operators.toys.kernels import (
    plans,
)
"""


def test_source_hash_follows_what_a_measurement_depends_on(tmp_path, write):
    """The operator's module, what it imports, the CUDA it names, its configurations and the timer; nothing else."""
    toys = tmp_path / "operators" / "toys"
    text = {
        tmp_path / "timing.py": "a",
        tmp_path / "operators" / "launch.py": "a",
        tmp_path / "operators" / "rows.cuh": "a",
        toys / "kernels.py": KERNELS,
        toys / "cluster.py": 'SOURCE = "cluster.cu"\n',
        toys / "cluster.cu": '#include "rows.cuh"\n#include "stages.cuh"\n',
        toys / "stages.cuh": '#include "beside.cuh"\n',
        toys / "beside.cuh": "a",
        tmp_path / "operators" / "beside.cuh": "a",
        toys / "toy.py": TOY,
        toys / "configs" / "sm_90.json": '{"x,1": {"BLOCK": 1}, "y,1": {"BLOCK": 1}, "of_z,1": {"BLOCK": 1}}',
        toys / "README.md": "a",
        toys / "other.py": "a",
        toys / "call.py": "a",
        tmp_path / "operators" / "call.py": "a",
    }
    for path, content in text.items():
        write(path, content)

    def hash_with(path, change):
        path.write_text(change)
        changed = source_hash(toys / "toy.py", tmp_path)
        path.write_text(text[path])
        return changed

    before = source_hash(toys / "toy.py", tmp_path)
    follows = [p for p in text if hash_with(p, text[p] + " ") != before]
    configs = toys / "configs" / "sm_90.json"
    assert {p.name for p in follows} == {
        "timing.py", "launch.py", "rows.cuh", "kernels.py", "cluster.py", "cluster.cu", "toy.py",
        "stages.cuh", "beside.cuh", "call.py",
    }  # fmt: skip
    assert tmp_path / "operators" / "call.py" not in follows, (
        "the family's own is meant, not the checks of all operators"
    )
    assert tmp_path / "operators" / "beside.cuh" not in follows, "the header beside the file that includes it is meant"
    assert hash_with(configs, text[configs].replace('"y,1": {"BLOCK": 1}', '"y,1": {"BLOCK": 2}')) == before
    for key in ("x,1", "of_z,1"):
        assert (
            hash_with(configs, text[configs].replace(f'"{key}": {{"BLOCK": 1}}', f'"{key}": {{"BLOCK": 2}}')) != before
        )


def test_the_commit_is_what_the_variable_says(monkeypatch):
    monkeypatch.setenv("WEFT_COMMIT", "abc123")
    assert records.commit() == "abc123"
