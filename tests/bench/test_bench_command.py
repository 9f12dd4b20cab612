"""``weft bench`` and quick runs: what is printed, saved, resumed and left out, and what an interruption costs."""

import dataclasses
import importlib.util
import io
import json
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from where import DEVICE, plain_environment, printed

from weft import registry
from weft.bench import cases, resume, run, verify
from weft.definition import Implementation, workload
from weft.records import Store
from weft.report import headlines
from weft.report import run as report

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter

KEYS = {
    *("operator", "implementation", "direction", "workload", "dtype", "cache", "time_us", "host_us"),
    *("share_of_ceiling", "ratio_to_best_peer", "gpu", "versions", "commit"),
}


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    words = "bench vector_add --json --save --workload N=1000 --dtype fp32 --budget 0.02"
    said = printed("-m", "weft", *words.split(), WEFT_RESULTS=str(results), WEFT_COMMIT="abc123")
    return json.loads(said)["records"], results


def test_bench_prints_records_with_every_key(benched):
    measured, _ = benched
    assert all(set(m) >= KEYS for m in measured)
    timed = [m for m in measured if m["operator"] == "vector_add"]
    assert {"torch"} <= {m["implementation"] for m in timed}
    for m in timed:
        assert (m["workload"], m["dtype"], m["direction"], m["commit"]) == ("N=1000", "fp32", "forward", "abc123")
        assert m["time_us"] > 0 and m["host_us"] > 0 and m["gpu"] and m["run"]
        assert m["time_p20_us"] <= m["time_us"] <= m["time_p80_us"] and m["repetitions"] >= 5
        assert m["bytes_moved"] == 12000 and m["error"] <= 1 and m["versions"]["torch"] == torch.__version__
        assert m["cache"] == ("cold" if DEVICE == "cuda" else "warm")
        # warm, 12 kB lie in a cache: memory is no limit
        assert m["limit_name"] == ("memory 2:1" if DEVICE == "cuda" else None)
        assert (m["share_of_ceiling"] is None) == (DEVICE == "cpu")
        assert (m["ratio_to_best_peer"] is not None) == m["ours"]
    ceilings = {m["implementation"]: m["details"]["value"] for m in measured if m["operator"] == "ceiling"}
    assert {"memory 1:1", "memory 2:1", "fp32 matrix"} <= set(ceilings) and min(ceilings.values()) > 1e8
    assert len({m["run"] for m in measured}) == 1


def test_what_was_benched_is_saved(benched):
    measured, results = benched
    saved = Store(results).read()
    named = [m.operator + m.implementation for m in saved]
    assert sorted(named) == sorted(m["operator"] + m["implementation"] for m in measured)
    (machine,) = Store(results).machines()
    assert {p.name for p in (results / machine).iterdir()} == {"runs.jsonl", "vector_add.jsonl"}
    assert {m.commit for m in saved} == {"abc123"} and {m.run for m in saved} == {measured[0]["run"]}


@pytest.fixture
def no_ceilings(monkeypatch):
    from weft.hardware import ceilings

    known = ceilings.Ceilings(DEVICE, {(1, 1): 1e10, (2, 1): 1e10}, {"fp32": 1e11})
    monkeypatch.setattr(ceilings, "measure", lambda *a, **k: known)


BENCH = ("bench", "vector_add", "--workload", "N=1000", "--dtype", "fp32", "--budget", "0.001")


def test_bench_prints_a_table_and_saves_nothing_unasked(command, no_ceilings, tmp_path):
    code, out, _ = command(*BENCH)
    assert code == 0 and "vector_add forward" in out and "torch" in out and "N=1000" in out
    assert not (tmp_path / "results").exists()


def test_a_share_of_the_ceiling_is_the_time_that_the_work_takes_there(command, no_ceilings):
    words = "bench matmul --workload M=64,N=64,K=64 --dtype fp32 --json --budget 0.01"
    code, out, _ = command(*words.split())
    timed = [m for m in json.loads(out)["records"] if m["operator"] == "matmul" and m["direction"] == "forward"]
    assert code == 0 and {"torch"} <= {m["implementation"] for m in timed}
    for m in timed:
        assert m["limit_name"] == "fp32 matrix" and m["limit_us"] == pytest.approx(2 * 64**3 / 1e11 * 1e6, rel=1e-4)
        assert m["share_of_ceiling"] == pytest.approx(m["limit_us"] / m["time_us"], rel=1e-2, abs=5.1e-5)  # 4 decimals


def test_resume_leaves_out_what_is_there(command, no_ceilings):
    assert len(json.loads(command(*BENCH, "--save", "--json")[1])["records"]) > 3  # three ceilings and more
    again = json.loads(command(*BENCH, "--save", "--resume", "--json")[1])["records"]
    assert {m["operator"] for m in again} == {"ceiling"}
    other = json.loads(command(*BENCH[:3], "N=1001", *BENCH[4:], "--save", "--resume", "--json")[1])["records"]
    assert {m["workload"] for m in other if m["operator"] == "vector_add"} == {"N=1001"}


def test_resume_measures_what_an_implementation_is_new_to(monkeypatch):
    """Points on record are left out, but for an implementation of ours without a record, unless it cannot run here."""
    op = registry.get("vector_add")
    w, other = (op.parse(text, "fp32") for text in ("N=1000", "N=1001"))
    monkeypatch.setenv("WEFT_COMMIT", "today")
    rows = [("N=1000", "triton", "today"), ("N=1000", "torch", "today"), ("N=1001", "triton", "earlier")]
    common = {"operator": "vector_add", "direction": "forward", "dtype": "fp32", "cache": "cold"}
    records = [SimpleNamespace(workload=w, implementation=i, commit=c, **common) for w, i, c in rows]
    bench = SimpleNamespace(context=lambda: {"gpu": "x"}, timer=SimpleNamespace(cache="cold"), present=lambda *of: here)
    chosen = {"vector_add": [op.find("triton"), op.find("torch")]}

    def left() -> list[str]:
        return [str(w) for _, w, _ in resume.left([(op, w, "forward"), (op, other, "forward")], chosen, bench, store)]

    store, here = SimpleNamespace(read=lambda gpu: records), True
    assert left() == ["N=1001"]
    chosen["vector_add"].append(Implementation("vector_add", "new", op.find("triton").function, "cuda", ">=sm_80"))
    assert left() == ["N=1000", "N=1001"]
    here = False
    assert left() == ["N=1001"]


def test_a_wrong_result_in_a_bench_is_said(command, no_ceilings, broken, monkeypatch):
    made = Implementation("vector_add", "peer", broken.implementations["broken"].function, "peer")
    monkeypatch.setitem(broken.implementations, "broken", made)
    code, out, err = command(*BENCH, "--json")
    wrong = [m for m in json.loads(out)["records"] if m["implementation"] == "peer"]
    assert code == 0 and "peer at N=1000 fp32 forward is wrong" in re.sub(r"\s+", " ", err)
    assert [m["details"]["wrong"][:4] for m in wrong] == ["1 of"]  # and recorded


def test_where_a_check_runs_out_of_memory_times_are_kept_unchecked(command, no_ceilings, monkeypatch):
    def too_much(*of):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cases.Baseline, "of", too_much)
    code, out, err = command(*BENCH, "--json")
    timed = [m for m in json.loads(out)["records"] if m["operator"] == "vector_add"]
    assert code == 0 and "too little memory for a float64 check" in re.sub(r"\s+", " ", err)
    assert timed and all(m["time_us"] > 0 and m["error"] is None for m in timed)


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whatever started the tests
from weft.__main__ import main
from weft.hardware import ceilings
ceilings.measure = lambda device, **options: ceilings.Ceilings(device, {(1, 1): 1e10})
sys.exit(main())
"""


@pytest.mark.share(4)
def test_an_interrupted_bench_leaves_valid_records(tmp_path):
    what = ["softmax", "rms_norm", "--workload", "M=2048,N=4096", "--implementation", "torch", "--dtype", "fp32"]
    words = ["bench", *what, "--budget", "1000", "--json", "--save"]
    environment = plain_environment(WEFT_RESULTS=str(tmp_path))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, *words], env=environment, **pipes) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/softmax.jsonl")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert "Traceback" not in err and process.returncode in (0, 130), err
    assert "interrupted" in err
    lines = [line for path in tmp_path.glob("*/*.jsonl") for line in path.read_text().splitlines()]
    assert lines and all(json.loads(line)["run"] for line in lines)
    printed = json.loads(out)["records"]  # what was measured is printed too
    assert len(printed) == len(Store(tmp_path).read()) and {m["operator"] for m in printed} >= {"ceiling", "softmax"}


@pytest.mark.long
def test_processes_that_are_spawned_measure(tmp_path):
    """Other tests of several processes fork them (quick_processes)."""
    words = ["bench", "softmax", "--workload", "M=40,N=24", "--direction", "forward", "--implementation", "torch"]
    words += ["--dtype", "fp32", "--dtype", "fp16", "--budget", "0.01", "--jobs", "2", "--json"]
    rows = json.loads(printed("-c", INTERRUPTED, *words))["records"]
    assert sorted(r["dtype"] for r in rows if r["operator"] == "softmax") == ["fp16", "fp32"]


def test_an_interruption_before_anything_was_measured_is_no_traceback(command, monkeypatch):
    def interrupted(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.hardware.ceilings.measure", interrupted)
    code, out, err = command(*BENCH, "--json")
    assert code == 130 and "interrupted" in err and out == ""


def test_measuring_ends_when_its_time_is_over():
    class Bench:
        def compare(self, op, w, direction, implementations):
            return [(op, w, direction)]

        def free(self):
            pass

    note = Console(record=True, width=200, file=io.StringIO())
    op = registry.get("vector_add")
    points = [(op, w, "forward") for w in op.cases("verify", ["fp32"])]
    found = list(run.measure_points(Bench(), points, {"vector_add": []}, note, limit_s=0.0))
    assert found == [[points[0]]] and f"{len(points) - 1} of {len(points)} points left out" in note.export_text()
    assert len(list(run.measure_points(Bench(), points, {"vector_add": []}, note))) == len(points)


def test_headlines_are_points_of_operators():
    on_gpu = headlines.points("cuda")
    assert len(on_gpu) == len(headlines.GPU) and all(direction in op.directions for op, _, direction in on_gpu)
    assert len({registry.family(op.name) for op, _, _ in on_gpu[:10]}) >= 6
    assert {op.name for op, _, _ in headlines.points("cpu")} <= set(headlines.CPU)


def test_verification_in_processes_is_that_of_one(quick_processes):
    operators = registry.select(["strided_access", "vector_add"])
    seen = []
    one = verify.verify(operators, "cpu", budget_s=300)
    several = verify.verify_in_processes(operators, "cpu", 2, budget_s=300, on_result=seen.append)
    for counted in verify.COUNTS:
        assert one[counted] == several[counted]
    key = ("operator", "implementation", "direction", "workload", "dtype", "status")
    same = [sorted([str(r[k]) for k in key] for r in found["results"]) for found in (one, several)]
    assert same[0] == same[1] and len(seen) == len(several["results"])


def test_a_report_says_what_it_lacks_before_it_measures(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "sklearn" else found(name, *a))
    note = Console(record=True, file=io.StringIO())
    with pytest.raises(ModuleNotFoundError, match=r"needs sklearn: pip install 'weft\[gpu,train\]'"):
        report.run("cpu", note, tmp_path)
    assert note.export_text() == ""


@pytest.mark.parametrize(("workloads", "asked", "words"), [
    ({"bench": []}, {}, r"on a CPU: vector_add has no sizes for one; give a point, as --workload N=64"),
    ({"model": [workload("bf16", N=8)]}, {"which": "model"}, "the set 'model' of vector_add is in bf16, not in fp32"),
    ({"cpu": [workload("fp32", N=8)]}, {"dtypes": ["bf16"]}, "the set 'cpu' of vector_add is in fp32, not in bf16"),
    ({"bench": []}, {"directions": ["backward"]}, "vector_add has the direction forward only"),
])  # fmt: skip
def test_what_a_cpu_cannot_be_asked_for_is_named(monkeypatch, workloads, asked, words):
    op = dataclasses.replace(registry.get("vector_add"), workloads=workloads)
    monkeypatch.setattr(run.registry, "select", lambda names: [op])
    with pytest.raises(ValueError, match=words):
        run.run_bench(["vector_add"], "cpu", Console(file=io.StringIO()), **asked)


def test_an_operator_without_sizes_for_a_cpu_is_no_mistake():
    """The set ``cpu`` is optional, and no user types it."""
    op = registry.get("vector_add")
    without = [dataclasses.replace(op, workloads=w) for w in ({"bench": []}, {"cpu": []})]
    assert list(run.cpu_points(without, "bench", [], [])) == []


def test_what_cannot_be_saved_is_said_before_it_is_measured(command, monkeypatch, tmp_path):
    (tmp_path / "results").write_text("a file")
    monkeypatch.setattr("weft.hardware.ceilings.measure", lambda *a, **k: pytest.fail("it measured first"))
    code, _, err = command("bench", "vector_add", "--save")
    assert code == 1 and "records cannot be saved in" in err and "Traceback" not in err


def test_a_disk_that_fills_up_costs_no_measurement(command, monkeypatch, tmp_path):
    from weft.hardware.ceilings import Ceilings

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weft.hardware.ceilings.measure", lambda device, **options: Ceilings(device))
    monkeypatch.setattr(Store, "append", full)
    code, out, err = command("bench", "vector_add", "--workload", "N=1000", "--dtype", "fp32", "--save")
    assert code == 1 and "No space left" in err and "N=1000" in out
