"""The command, as a user types it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from where import DEVICE, ROOT, path_with, plain_environment, python

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("typer")

from rich.console import Console  # noqa: E402

from weft import cli, registry  # noqa: E402
from weft.definition import Implementation  # noqa: E402
from weft.records import Store, read_lines  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter


@pytest.fixture
def weft(monkeypatch, capsys, tmp_path):
    """Runs ``weft …`` in this process (PyTorch is imported once): exit status, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *words])
        monkeypatch.setenv("WEFT_RESULTS", str(tmp_path / "results"))
        capsys.readouterr()
        try:
            code = cli.main()
        except SystemExit as exit:
            code = exit.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


# ---- before anything is imported -------------------------------------------------------------------------------------

IMPORTS = """
import sys, time
start = time.perf_counter()
import weft
seconds = time.perf_counter() - start
from weft import ops, records, registry
assert 'softmax' in dir(ops) and 'softmax' in registry.names() and weft.__version__
heavy = {m for m in ('torch', 'triton', 'numpy', 'typer', 'rich', 'bokeh') if m in sys.modules}
print(seconds, *heavy)
"""


def test_importing_weft_is_fast_and_imports_nothing_heavy():
    """Nor does asking which operators there are."""
    seconds, *heavy = python("-c", IMPORTS).stdout.split()
    assert float(seconds) < 0.5 and heavy == []


def test_without_its_dependencies_the_command_says_what_to_install_and_the_doctor_works():
    done = python("-S", "-m", "weft", "list", PYTHONPATH=str(ROOT / "src"))
    assert done.returncode == 2 and done.stdout == ""
    assert re.search(r"needs (rich|typer), which is not installed: run `make setup`, or `pip install", done.stderr)
    assert "doctor" in done.stderr and "Traceback" not in done.stderr
    doctor = python("-S", "-m", "weft", "doctor", "--json", PYTHONPATH=str(ROOT / "src"))
    assert {f["status"] for f in json.loads(doctor.stdout)["findings"]} <= {"pass", "warn", "fail"}
    assert doctor.returncode in (0, 1) and doctor.stderr == ""


def test_help_names_every_verb(weft):
    done = python("-m", "weft", "--help")
    verbs = ("doctor", "ceilings", "list", "verify", "compile-check", "bench", "tune", "report", "tables", "version")
    assert done.returncode == 0 and all(re.search(rf"^. {verb} ", done.stdout, re.M) for verb in verbs)
    for verb in verbs:
        code, out, _ = weft(verb, "--help")
        assert code == 0 and f"weft {verb}" in re.sub(r"\s+", " ", out)


def test_a_process_that_was_told_a_wrong_name_says_so_in_one_line():
    started = time.monotonic()
    done = python("-m", "weft", "bench", "softmx")
    assert done.returncode == 2 and done.stdout == ""
    assert "unknown operator 'softmx'; did you mean 'softmax'?" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert time.monotonic() - started < 20


# ---- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = [
    ("list softmx", "did you mean 'softmax'"),
    ("verify vector_ad", "did you mean 'vector_add'"),
    ("verify vector_add --implementation tritn", "did you mean 'triton'"),
    ("verify vector_add --direction forwards", "did you mean 'forward'"),
    ("verify vector_add --dtype bf61", "did you mean 'bf16'"),
    ("verify vector_add --dtype bf61 --workload N=5", "did you mean 'bf16'"),
    ("verify vector_add --workload N", "should read NAME=VALUE"),
    ("verify vector_add --workload M=5", "unknown axis of 'vector_add' 'M'"),
    ("verify softmax --workload M=5", "lacks N"),
    ("verify softmax --workload M=5,N=7,layout=slised", "did you mean 'sliced'"),
    ("verify softmax --workload M=5,N=7,layuot=sliced", "did you mean 'layout'"),
    ("verify vector_add --dtype int8", "unknown dtype of 'vector_add' 'int8'"),
    ("bench softmax --workload M=5,N=x", "size of axis N is 'x'; expected a whole number"),
    ("bench softmax --workload M=5,N=-7", "size of axis N is -7"),
    ("bench vector_add --workload N=5 --dtype bf61", "did you mean 'bf16'"),
    ("bench vector_add --direction sideways", "unknown direction 'sideways'"),
    ("bench vector_add --implementation torhc", "did you mean 'torch'"),
    ("bench vector_add --set benhc", "did you mean 'bench'"),
    ("bench vector_add --cache tepid", "expected cold or warm"),
    ("bench vector_add --budget soon", "--budget"),
    ("compile-check vector_add --arch sm_91", "did you mean 'sm_90'"),
    ("compile-check vector_add --arch hopper", "expected sm_80"),
    ("compile-check vector_add --implementation tritn", "did you mean 'triton'"),
    ("frobnicate", "No such command 'frobnicate'"),
    ("verify --sed 3", "--seed"),
]


@pytest.mark.parametrize(("command", "words"), MISTAKES, ids=lambda text: text if " " in text else None)
def test_a_mistake_is_told_in_a_line_without_a_traceback(weft, monkeypatch, command, words):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # compile-check takes it away: put back afterwards
    monkeypatch.setattr("weft.hardware.ceilings.measure", lambda *a, **k: pytest.fail("it measured first"))
    code, out, err = weft(*shlex.split(command))
    assert code == 2, (out, err)
    assert words in re.sub(r"\s+", " ", err) and "Traceback" not in err and out == ""
    if not err.startswith("Usage"):  # the command line's own errors come with a usage line
        assert len(err.splitlines()) == 1, err


def test_a_verification_of_nothing_is_no_success(weft):
    """vector_add has no backward."""
    code, out, err = weft("verify", "vector_add", "--direction", "backward", "--json")
    assert json.loads(out)["checked"] == 0 and code == 2 and "nothing was verified" in err


# ---- list, verify ----------------------------------------------------------------------------------------------------


def test_list_names_operators_implementations_directions_and_workloads(weft, monkeypatch):
    code, out, _ = weft("list", "--json")
    listed = {op["name"]: op for op in json.loads(out)["operators"]}
    assert code == 0 and set(listed) == set(registry.names())
    assert listed["softmax"]["directions"] == ["forward", "backward"]
    assert {"triton", "torch"} <= {i["name"] for i in listed["softmax"]["implementations"]}
    assert "M=9,N=33,layout=sliced" in listed["softmax"]["workloads"]["verify"]
    assert all(len(op["mutants"]) >= 4 and op["family"] for op in listed.values())
    monkeypatch.setattr(cli, "out", Console(width=300, highlight=False))  # so that no cell is folded
    code, out, _ = weft("list", "softmax")
    assert code == 0 and "M rows, N columns" in out and "a ladder of 8" in out and "matmul" not in out


def test_verify_prints_one_object_alone_and_exits_zero():
    done = python("-m", "weft", "verify", "vector_add", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    for key in ("checked", "failed", "unverifiable", "mutants", "mutants_survived"):
        assert type(found[key]) is int
    assert found["checked"] > 20 and found["failed"] == found["mutants_survived"] == 0
    assert found["mutants"] >= 4 and found["not_reached"] == 0
    counted = {s: sum(r["status"] == s for r in found["results"]) for s in ("pass", "fail", "unverifiable")}
    assert found["checked"] == counted["pass"] + counted["fail"] and found["unverifiable"] == counted["unverifiable"]
    assert (found["unverifiable"] > 0) == (DEVICE == "cpu")  # bf16
    assert {r["dtype"] for r in found["results"] if r["status"] == "pass"} >= {"fp32", "fp16"}


@pytest.fixture
def broken(monkeypatch):
    """vector_add with an implementation that leaves out the last element."""

    def wrong(x, y):
        out = x + y
        out[..., -1:] = 0
        return out

    op = registry.get("vector_add")
    made = Implementation("vector_add", "broken", wrong, "triton")
    monkeypatch.setitem(op.implementations, "broken", made)
    return op


def test_a_failing_verify_exits_one_and_says_how_to_reproduce_it(weft, broken):
    code, out, _ = weft("verify", "vector_add", "--dtype", "fp32", "--no-mutants")
    assert code == 1
    assert "FAIL vector_add broken forward N=1023 fp32:" in out and "PyTorch has" in out
    command = next(
        line.strip() for line in out.splitlines() if line.strip().startswith("weft verify") and "N=1023" in line
    )
    code, out, _ = weft(*shlex.split(command)[1:], "--json")
    (result,) = [r for r in json.loads(out)["results"] if r["status"] != "unverifiable"]
    assert code == 1 and result["status"] == "fail" and (result["workload"], result["dtype"]) == ("N=1023", "fp32")
    assert result["reproduce"] == command


def test_a_surviving_mutant_exits_one(weft, broken, monkeypatch):
    from weft.definition import Mutant

    monkeypatch.setattr(broken, "mutants", [*broken.mutants, Mutant("not wrong", broken.reference)])
    code, out, _ = weft("verify", "vector_add", "--implementation", "triton", "--json")
    assert json.loads(out)["mutants"] == 0  # one implementation by name: the mutants are another question
    monkeypatch.delitem(broken.implementations, "broken")
    code, out, _ = weft("verify", "vector_add", "--json")
    found = json.loads(out)
    assert code == 1 and found["mutants_survived"] == 1
    assert [r["implementation"] for r in found["results"] if r["status"] == "fail"] == ["mutant: not wrong"]


def test_what_a_budget_leaves_out_is_not_passed(weft):
    _, out, _ = weft("verify", "vector_add", "--budget", "0.000001", "--no-mutants", "--json")
    found = json.loads(out)
    assert found["not_reached"] > 20 and found["checked"] == 0
    assert all(r["status"] == "unverifiable" for r in found["results"])


def test_one_workload_in_one_dtype(weft):
    code, out, _ = weft("verify", "softmax", "--workload", "M=3,N=2**5,layout=sliced", "--dtype", "fp16", "--json")
    found = json.loads(out)
    checked = [r for r in found["results"] if r["status"] == "pass"]
    assert code == 0 and found["failed"] == 0 and found["mutants"] == 0
    assert {(r["workload"], r["dtype"]) for r in checked} == {("M=3,N=32,layout=sliced", "fp16")}
    assert {r["direction"] for r in checked} == {"forward", "backward"}


# ---- bench -----------------------------------------------------------------------------------------------------------

KEYS = {
    *("operator", "implementation", "direction", "workload", "dtype", "cache", "time_us", "host_us"),
    *("share_of_ceiling", "ratio_to_best_peer", "gpu", "versions", "commit"),
}


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    words = "bench vector_add --json --save --workload N=1000 --dtype fp32 --budget 0.02"
    done = python("-m", "weft", *words.split(), WEFT_RESULTS=str(results), WEFT_COMMIT="abc123")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["records"], results


def test_bench_prints_records_with_every_key(benched):
    measured, _ = benched
    assert all(set(m) >= KEYS for m in measured)
    timed = [m for m in measured if m["operator"] == "vector_add"]
    assert {"torch"} <= {m["implementation"] for m in timed}
    for m in timed:
        assert (m["workload"], m["dtype"], m["direction"], m["commit"]) == ("N=1000", "fp32", "forward", "abc123")
        assert m["time_us"] > 0 and m["host_us"] > 0 and m["gpu"] and m["source"]
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
    assert sorted(m.operator + m.implementation for m in saved) == sorted(
        m["operator"] + m["implementation"] for m in measured
    )
    (machine,) = Store(results).machines()
    assert {p.name for p in (results / machine).iterdir()} == {"ceiling.jsonl", "vector_add.jsonl"}


@pytest.fixture
def no_ceilings(monkeypatch):
    from weft.hardware import ceilings

    known = ceilings.Ceilings(DEVICE, {(1, 1): 1e10, (2, 1): 1e10}, {"fp32": 1e11})
    monkeypatch.setattr(ceilings, "measure", lambda *a, **k: known)


BENCH = ("bench", "vector_add", "--workload", "N=1000", "--dtype", "fp32", "--budget", "0.001")


def test_bench_prints_a_table_and_saves_nothing_unasked(weft, no_ceilings, tmp_path):
    code, out, _ = weft(*BENCH)
    assert code == 0 and "vector_add forward" in out and "torch" in out and "N=1000" in out
    assert not (tmp_path / "results").exists()


def test_a_share_of_the_ceiling_is_the_time_that_the_work_takes_there(weft, no_ceilings):
    code, out, _ = weft(
        "bench", "matmul", "--workload", "M=64,N=64,K=64", "--dtype", "fp32", "--json", "--budget", "0.01"
    )
    timed = [m for m in json.loads(out)["records"] if m["operator"] == "matmul" and m["direction"] == "forward"]
    assert code == 0 and {"torch"} <= {m["implementation"] for m in timed}
    for m in timed:
        assert m["limit_name"] == "fp32 matrix" and m["limit_us"] == pytest.approx(2 * 64**3 / 1e11 * 1e6, rel=1e-4)
        assert m["share_of_ceiling"] == pytest.approx(m["limit_us"] / m["time_us"], rel=1e-2, abs=5.1e-5)  # 4 decimals


def test_resume_leaves_out_what_is_there(weft, no_ceilings):
    assert len(json.loads(weft(*BENCH, "--save", "--json")[1])["records"]) > 3  # three ceilings and more
    again = json.loads(weft(*BENCH, "--save", "--resume", "--json")[1])["records"]
    assert {m["operator"] for m in again} == {"ceiling"}
    other = json.loads(weft(*BENCH[:3], "N=1001", *BENCH[4:], "--save", "--resume", "--json")[1])["records"]
    assert {m["workload"] for m in other if m["operator"] == "vector_add"} == {"N=1001"}


def test_a_wrong_result_in_a_bench_is_said(weft, no_ceilings, broken, monkeypatch):
    made = Implementation("vector_add", "peer", broken.implementations["broken"].function, "peer")
    monkeypatch.setitem(broken.implementations, "broken", made)
    code, out, err = weft(*BENCH, "--json")
    wrong = [m for m in json.loads(out)["records"] if m["implementation"] == "peer"]
    assert code == 0 and "peer at N=1000 fp32 forward is wrong" in re.sub(r"\s+", " ", err)
    assert [m["details"]["wrong"][:4] for m in wrong] == ["1 of"]  # and recorded


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whatever started the tests
from weft.__main__ import main
sys.exit(main())
"""


def test_an_interrupted_bench_leaves_valid_records(tmp_path):
    what = ["softmax", "rms_norm", "vector_add", "--implementation", "torch", "--dtype", "fp32", "--budget", "1000"]
    words = ["bench", *what, "--json", "--save"]
    environment = plain_environment(WEFT_RESULTS=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/softmax.jsonl")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert "Traceback" not in err and process.returncode in (0, 130), err
    assert "interrupted" in err
    lines = [line for path in tmp_path.glob("*/*.jsonl") for line in path.read_text().splitlines()]
    assert lines and all(json.loads(line)["implementation"] for line in lines)
    printed = json.loads(out)["records"]  # what was measured is printed too
    assert len(printed) == len(lines) and {m["operator"] for m in printed} >= {"ceiling", "softmax"}


def test_an_interruption_before_anything_was_measured_is_no_traceback(weft, monkeypatch):
    def interrupted(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.hardware.ceilings.measure", interrupted)
    code, out, err = weft(*BENCH, "--json")
    assert code == 130 and "interrupted" in err and out == ""


# ---- doctor, version, a new operator ---------------------------------------------------------------------------------


def test_the_doctor_answers_in_json():
    done = python("-m", "weft", "doctor", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == (1 if document["counts"]["fail"] else 0)
    assert all({"name", "status", "found", "fix"} <= set(f) for f in document["findings"])


def test_a_failing_doctor_exits_one(weft, monkeypatch):
    monkeypatch.setattr("weft.hardware.doctor.main", lambda words: 1)
    assert weft("doctor", "--json")[0] == 1


def test_version(weft):
    import weft as package

    assert weft("version") == (0, package.__version__ + "\n", "")


NEW = '''
"""``double(x)``: an operator that was dropped into a folder."""
from weft.definition import Cost, Operator, workload
from weft.operators import mutants
from weft.operators.random_inputs import random_tensor

def reference(x):
    return x * 2

double = Operator(
    name="double",
    axes={"N": "elements"},
    inputs=lambda w, g, device: {"x": random_tensor(g, (w["N"],), w.dtype, device)},
    reference=reference,
    cost=lambda w, d: Cost(w["N"] * w.bytes_per_element, w["N"] * w.bytes_per_element, vector_flops=w["N"]),
    workloads={"verify": [workload(N=5), workload(N=100)], "bench": [workload(N=1000)], "quick": [workload(N=100)]},
    mutants=mutants.usual(reference),
)
double.implementation("triton")(lambda x: x + x)
double.implementation("torch")(reference)
double.function(lambda x: reference(x))
'''


def test_an_operator_is_added_by_adding_a_file(tmp_path):
    """No other file is edited: it is listed, verified and callable."""
    shutil.copytree(ROOT / "src" / "weft", tmp_path / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "weft" / "operators" / "toys").mkdir()
    (tmp_path / "weft" / "operators" / "toys" / "double.py").write_text(NEW)
    done = python("-m", "weft", "verify", "double", "--json", PYTHONPATH=path_with(tmp_path))
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["failed"] == found["mutants_survived"] == 0 and found["mutants"] == 4
    assert {r["implementation"] for r in found["results"]} == {"triton", "weft.ops"}
    code = "from weft import ops; import torch; print(ops.double(torch.ones(2)).tolist(), 'double' in dir(ops))"
    assert python("-c", code, PYTHONPATH=path_with(tmp_path)).stdout == "[2.0, 2.0] True\n"


def test_nothing_is_written_where_the_command_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "weft", "list"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=plain_environment(),
        timeout=60,
    )
    assert done.returncode == 0 and os.listdir(tmp_path) == []


def test_a_line_of_records_is_an_object(benched):
    _, results = benched
    assert all(line["schema"] == 1 for path in results.glob("*/*.jsonl") for line in read_lines(path))


# ---- quick runs ------------------------------------------------------------------------------------------------------


def test_a_quick_run_takes_operators_in_turn_until_its_time_is_up(monkeypatch):
    from weft.bench import run
    from weft.hardware.ceilings import Ceilings

    monkeypatch.setattr(run, "QUICK_S", 0)
    monkeypatch.setattr("weft.hardware.ceilings.measure", lambda device, **options: Ceilings(device))
    note = Console(record=True, width=200, file=io.StringIO())
    run.run_bench(["vector_add", "matmul"], "cpu", note, which="quick", quick=True)
    assert re.search(r"0 s are over: (\d+) of \1 points left out", note.export_text())
    points = [(operator, size, "forward") for operator in registry.select(["vector_add", "matmul"]) for size in (1, 2)]
    assert [(op.name, size) for op, size, _ in run._in_turn(points)] == [
        (op.name, size) for size in (1, 2) for op in registry.select(["vector_add", "matmul"])
    ]


def test_a_report_says_what_it_lacks_before_it_measures(monkeypatch, tmp_path):
    import importlib.util

    from weft.bench import run

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "sklearn" else found(name, *a))
    note = Console(record=True, file=io.StringIO())
    with pytest.raises(ModuleNotFoundError, match=r"needs sklearn: pip install 'weft\[gpu,train\]'"):
        run.run_report("cpu", note, tmp_path)
    assert note.export_text() == ""


def test_an_operator_without_sizes_for_a_cpu_is_no_mistake(monkeypatch):
    """The set ``cpu`` is optional, and no user types it."""
    from weft.bench import run

    relu, other = (dataclasses.replace(registry.get("vector_add"), workloads=w) for w in ({"bench": []}, {"cpu": []}))
    assert list(run._cpu_points([relu, other], "bench", [], [])) == []
    with pytest.raises(ValueError, match="nothing to measure"):
        monkeypatch.setattr(run.registry, "select", lambda names: [relu])
        run.run_bench(["vector_add"], "cpu", Console(file=io.StringIO()))


def test_what_cannot_be_saved_is_said_before_it_is_measured(weft, monkeypatch, tmp_path):
    (tmp_path / "results").write_text("a file")
    monkeypatch.setattr("weft.hardware.ceilings.measure", lambda *a, **k: pytest.fail("it measured first"))
    code, _, err = weft("bench", "vector_add", "--save")
    assert code == 1 and "records cannot be saved in" in err and "Traceback" not in err


def test_a_disk_that_fills_up_costs_no_measurement(weft, monkeypatch, tmp_path):
    from weft.hardware.ceilings import Ceilings
    from weft.records import Store

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weft.hardware.ceilings.measure", lambda device, **options: Ceilings(device))
    monkeypatch.setattr(Store, "append", full)
    code, out, err = weft("bench", "vector_add", "--workload", "N=1000", "--dtype", "fp32", "--save")
    assert code == 1 and "No space left" in err and "N=1000" in out


def test_a_terminal_without_the_signs_loses_no_result():
    done = subprocess.run(
        [sys.executable, "-m", "weft", "verify", "vector_add", "--workload", "N=4", "--dtype", "fp32"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "2 checked" in done.stdout, done.stderr
