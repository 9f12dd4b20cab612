"""The command, as a user types it: what it imports, its mistakes, and verbs that measure nothing."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from where import DEVICE, ROOT, plain_environment, python

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("typer")

from rich.console import Console  # noqa: E402

from weft import cli, registry  # noqa: E402
from weft.__main__ import interrupt  # noqa: E402
from weft.bench import terminal  # noqa: E402
from weft.definition import Mutant  # noqa: E402
from weft.hardware.ceilings import Ceilings  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter


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


def test_an_interruption_waits_for_the_end_of_an_import(tmp_path, monkeypatch):
    """One that catches all errors goes on half made, such as PyTorch's without NumPy."""
    (tmp_path / "half_made.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.3)\n    whole = True\n"
        "except BaseException:\n    whole = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            import half_made  # noqa: F401

            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sys.modules.pop("half_made").whole


def test_an_interruption_ends_an_import_that_takes_too_long(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("weft.__main__.LONGEST_IMPORT_S", 0.3)
    before, begin = signal.signal(signal.SIGINT, interrupt), time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            import endless  # noqa: F401
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 15


def test_help_names_every_verb(command):
    done = python("-m", "weft", "--help")
    verbs = ("doctor", "ceilings", "list", "verify", "compile-check", "bench", "tune", "report", "tables", "version")
    assert done.returncode == 0 and all(re.search(rf"^. {verb} ", done.stdout, re.M) for verb in verbs)
    for verb in verbs:
        code, out, _ = command(verb, "--help")
        assert code == 0 and f"weft {verb}" in re.sub(r"\s+", " ", out)


def test_on_a_narrow_terminal_help_has_whole_names_and_defaults():
    names = {"generate": ["--repetition-penalty"], "train gpt": ["--no-deterministic", "--checkpoint-activations"]}
    defaults = {"train gpt": "(default: 16)", "comm": "one a GPU, else 2"}
    for verb in names | defaults:
        said = python("-m", "weft", *verb.split(), "-h", COLUMNS="80").stdout
        assert max(map(len, said.splitlines())) <= 80
        said = " ".join(said.split())
        assert all(name in said for name in names.get(verb, [])) and defaults.get(verb, "") in said and "\\" not in said


def test_the_first_word_of_verbs_alone_lists_them(command):
    for asked, status in (("health -h", 0), ("health", 2)):
        code, said, _ = command(*asked.split())
        assert code == status and "weft health explain: " in said


MISTAKES = [
    ("list softmx", "did you mean 'softmax'"), ("verify vector_ad", "did you mean 'vector_add'"),
    ("verify vector_add --implementation tritn", "did you mean 'triton'"),
    ("verify vector_add --direction forwards", "did you mean 'forward'"),
    ("verify vector_add --dtype bf61 --workload N=5", "did you mean 'bf16'"),
    ("verify vector_add --workload M=5", "unknown axis of 'vector_add' 'M'"),
    ("verify softmax --workload M=5", "lacks N"), ("verify softmax --workload ''", "expected a point of the axes"),
    ("bench softmax --workload M=5,N=7 --set benhc", "did you mean 'bench'"),
    ("verify softmax --workload M=5,N=7,layout=slised", "did you mean 'sliced'"),
    ("verify vector_add --dtype int8", "unknown dtype of 'vector_add' 'int8'"),
    ("bench softmax --workload M=5,N=x", "size of axis N is 'x'; expected a whole number"),
    ("bench vector_add --direction sideways", "unknown direction 'sideways'"),
    ("bench vector_add --implementation torhc", "did you mean 'torch'"),
    ("bench vector_add --cache tepid", "expected cold or warm"), ("bench vector_add --budget soon", "--budget"),
    ("compile-check vector_add --arch sm_91", "did you mean 'sm_90'"),
    ("compile-check vector_add --arch hopper", "expected sm_80"),
    ("compile-check vector_add --implementation tritn", "did you mean 'triton'"),
    ("compile-check vector_add --processes 0", "--processes"), ("tune vector_add --processes -3", "--processes"),
    ("frobnicate", "No such command 'frobnicate'"), ("verify --sed 3", "--seed"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=lambda text: text if " " in text else None)
def test_a_mistake_is_told_in_a_line_without_a_traceback(command, monkeypatch, line, words):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # compile-check takes it away: put back afterwards
    monkeypatch.setattr("weft.hardware.ceilings.measure", lambda *a, **k: pytest.fail("it measured first"))
    code, out, err = command(*shlex.split(line))
    assert code == 2, (out, err)
    assert words in re.sub(r"\s+", " ", err) and "Traceback" not in err and out == ""
    if not err.startswith("Usage"):  # the command line's own errors come with a usage line
        assert len(err.splitlines()) == 1, err


@pytest.mark.parametrize("verb", ["bench", "verify"])
def test_what_no_memory_holds_is_told_in_a_line(command, monkeypatch, verb):
    monkeypatch.setattr("weft.hardware.ceilings.measure", lambda device, **options: Ceilings(device))
    code, out, err = command(verb, "softmax", "--workload", "M=99999999,N=99999999", "--dtype", "fp32")
    assert code == 1 and out == "" and "Traceback" not in err
    assert re.search(r"weft: not enough memory: \S+ \w+ asked for at once$", err.strip())


def test_a_page_that_cannot_be_written_is_told_before_anything_is_done(command, monkeypatch, tmp_path):
    monkeypatch.setattr("weft.hardware.doctor.examine", lambda *a: pytest.fail("it began"))
    (tmp_path / "file").write_text("in the way")
    code, out, err = command("report", "--output", tmp_path / "file" / "page")
    assert code == 1 and out == "" and "Traceback" not in err
    assert "the page cannot be written in" in err and "--output" in err


def test_a_verification_of_nothing_is_no_success(command):
    """vector_add has no backward."""
    code, out, err = command("verify", "vector_add", "--direction", "backward", "--json")
    assert json.loads(out)["checked"] == 0 and code == 2 and "nothing was verified" in err


def test_list_names_operators_implementations_directions_and_workloads(command, monkeypatch):
    code, out, _ = command("list", "--json")
    listed = {op["name"]: op for op in json.loads(out)["operators"]}
    assert code == 0 and set(listed) == set(registry.names())
    assert listed["softmax"]["directions"] == ["forward", "backward"]
    assert {"triton", "torch"} <= {i["name"] for i in listed["softmax"]["implementations"]}
    assert "M=9,N=33,layout=sliced" in listed["softmax"]["workloads"]["verify"]
    assert all(len(op["mutants"]) >= 4 and op["family"] for op in listed.values())
    monkeypatch.setattr(cli, "out", Console(width=300, highlight=False))  # so that no cell is folded
    code, out, _ = command("list", "softmax")
    assert code == 0 and "M rows, N columns" in out and "a ladder of 8" in out and "matmul" not in out
    monkeypatch.setattr(cli, "out", Console(width=80, highlight=False))
    _, out, _ = command("list", "linear_cross_entropy", "linear_cross_entropy_with_gradient")
    assert {"linear_cross_entropy", "linear_cross_entropy_with_gradient"} <= set(out.split()), "names are typed again"


@pytest.mark.parametrize(("printed", "row", "counts"), [
    (
        terminal.print_verification, {"status": "unverifiable", "dtype": "bf16", "error": None},
        "checked failed declined unverifiable not_reached mutants mutants_survived mutants_not_reached",
    ),
    (
        terminal.print_compiled,
        {"arch": "sm_100", "registers": 255, "shared_bytes": 232448, "shared_limit": 232448, "spills": 1352, "ok": True},
        "compiled failed seconds with_spills",
    ),
])  # fmt: skip
def test_names_are_whole_in_80_columns(printed, row, counts):
    names = {"operator": "linear_cross_entropy", "implementation": "cuda-unfused", "direction": "backward"}
    rows = [{**names, **row}, {**names, **row, "operator": "linear_quantized"}]
    console = Console(width=80, highlight=False)
    with console.capture() as shown:
        printed(console, {"device": "cpu", "results": rows, **dict.fromkeys(counts.split(), 0)})
    words = {"linear_cross_entropy", "linear_quantized", "cuda-unfused", row.get("arch", "implementation")}
    assert words <= set(shown.get().split())


def test_verify_prints_one_object_alone_and_exits_zero(command):
    code, out, err = command("verify", "vector_add", "--json")
    found = json.loads(out)
    assert code == 0, err
    for key in ("checked", "failed", "unverifiable", "mutants", "mutants_survived"):
        assert type(found[key]) is int
    assert found["checked"] > 20 and found["failed"] == found["mutants_survived"] == 0
    assert found["mutants"] >= 4 and found["not_reached"] == 0
    counted = {s: sum(r["status"] == s for r in found["results"]) for s in ("pass", "fail", "unverifiable")}
    assert found["checked"] == counted["pass"] + counted["fail"] and found["unverifiable"] == counted["unverifiable"]
    assert (found["unverifiable"] > 0) == (DEVICE == "cpu")  # bf16
    assert {r["dtype"] for r in found["results"] if r["status"] == "pass"} >= {"fp32", "fp16"}


def test_a_failing_verify_exits_one_and_says_how_to_reproduce_it(command, broken):
    code, out, _ = command("verify", "vector_add", "--dtype", "fp32", "--no-mutants")
    assert code == 1 and "FAIL vector_add broken forward N=1023 fp32:" in out and "PyTorch has" in out
    lines = (line.strip() for line in out.splitlines())
    again = next(line for line in lines if line.startswith("weft verify") and "N=1023" in line)
    code, out, _ = command(*shlex.split(again)[1:], "--json")
    (result,) = [r for r in json.loads(out)["results"] if r["status"] != "unverifiable"]
    assert code == 1 and result["status"] == "fail" and (result["workload"], result["dtype"]) == ("N=1023", "fp32")
    assert result["reproduce"] == again


def test_a_surviving_mutant_exits_one(command, broken, monkeypatch):
    monkeypatch.setattr(broken, "mutants", [*broken.mutants, Mutant("not wrong", broken.reference)])
    code, out, _ = command("verify", "vector_add", "--implementation", "triton", "--json")
    assert json.loads(out)["mutants"] == 0  # one implementation by name: the mutants are another question
    monkeypatch.delitem(broken.implementations, "broken")
    code, out, _ = command("verify", "vector_add", "--json")
    found = json.loads(out)
    assert code == 1 and found["mutants_survived"] == 1
    assert [r["implementation"] for r in found["results"] if r["status"] == "fail"] == ["mutant: not wrong"]


def test_what_a_budget_leaves_out_is_not_passed(command):
    _, out, _ = command("verify", "vector_add", "--budget", "0.000001", "--no-mutants", "--json")
    found = json.loads(out)
    assert found["not_reached"] > 20 and found["checked"] == 0
    assert all(r["status"] == "unverifiable" for r in found["results"])
    _, out, _ = command("verify", "softmax", "vector_add", "--budget", "0.000001", "--json")
    assert json.loads(out)["mutants"] == 0 and json.loads(out)["mutants_not_reached"] > 4


def test_one_workload_in_one_dtype(command):
    code, out, _ = command("verify", "softmax", "--workload", "M=3,N=2**5,layout=sliced", "--dtype", "fp16", "--json")
    found = json.loads(out)
    checked = [r for r in found["results"] if r["status"] == "pass"]
    assert code == 0 and found["failed"] == 0 and found["mutants"] == 0
    assert {(r["workload"], r["dtype"]) for r in checked} == {("M=3,N=32,layout=sliced", "fp16")}
    assert {r["direction"] for r in checked} == {"forward", "backward"}


def test_a_failing_doctor_exits_one(command, monkeypatch):
    monkeypatch.setattr("weft.hardware.doctor.main", lambda words: 1)
    assert command("doctor", "--json")[0] == 1


def test_ctrl_c_is_a_line_and_a_status(command, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.cli.out.print", lambda *_: stop())
    assert command("version") == (130, "", "weft: interrupted\n")


def test_version(command):
    import weft as package

    assert command("version") == (0, package.__version__ + "\n", "")


def test_a_terminal_without_the_signs_loses_no_result_and_nothing_is_written_there(tmp_path):
    words = ["verify", "vector_add", "--workload", "N=4", "--dtype", "fp32"]
    env = plain_environment(PYTHONIOENCODING="ascii")
    command = [sys.executable, "-m", "weft", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "2 checked" in done.stdout, done.stderr
    assert os.listdir(tmp_path) == []
