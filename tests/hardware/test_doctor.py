"""The doctor: it must say something useful on every machine, and never die of what it finds there."""

import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from weft.hardware import access, doctor, driver, findings, frameworks, machine, probe
from weft.hardware.driver import Driver, Gpu
from weft.hardware.findings import Finding, as_json, exit_code, guarded, render
from weft.hardware.probe import Answer

SRC = Path(__file__).resolve().parents[2] / "src"
H200 = Gpu("NVIDIA H200", 143771, (9, 0))
NAMES = {
    *("nvidia-driver", "gpus", "cuda-driver-api", "cuda-toolkit", "compute-sanitizer", "nsight-compute"),
    *("pytorch", "triton", "tensorflow", "jax", "paddlepaddle", "cupy", "cuda-bindings", "cuda-core", "nvrtc"),
    *("driver-fits-pytorch", "pytorch-build", "gpu-fits-pytorch", "triton-fits-pytorch"),
    *("operating-system", "python", "disk-home", "disk-here", "memory", "shared-memory", "locked-memory", "compiler"),
    *("container", "container-engine", "nvidia-container-toolkit"),
    *("device-files", "triton-cache", "user-cache", "profiling-counters"),
}


def torch_answer(cuda: str | None = "13.0", gpus: int = 0, **more: object) -> Answer:
    """What the PyTorch probe answers."""
    return Answer({"version": "2.13.0", "gpus": gpus, "cuda": cuda, "hip": None, "architectures": [], **more})


def run_doctor(*arguments: str, packages: Path | None = None, **env: str):
    """The doctor in a process without site-packages, as on a machine where nothing is installed but the packages given."""
    places = os.pathsep.join([str(SRC), *([str(packages)] if packages else [])])
    environment = {**os.environ, "PYTHONPATH": places, **env}
    command = [sys.executable, "-S", "-m", "weft.hardware.doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.fixture
def fake_torch(write):
    """Makes a package of that name; a folder for PYTHONPATH."""
    return lambda code: write("packages/torch/__init__.py", code).parents[1]


def by_name(text: str) -> dict[str, dict[str, str]]:
    return {f["name"]: f for f in json.loads(text)["findings"]}


def test_runs_where_nothing_is_installed():
    started = time.monotonic()
    done = run_doctor("--json")
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert document["schema"] == 1 and set(document["counts"]) == {"pass", "warn", "fail"}
    assert sum(document["counts"].values()) == len(document["findings"])
    assert {f["name"] for f in document["findings"]} >= NAMES
    assert len({f["name"] for f in document["findings"]}) == len(document["findings"])
    for f in document["findings"]:
        assert set(f) == {"name", "status", "found", "fix", "group"}
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", f["name"])
        assert f["status"] == "pass" or f["fix"]
        assert f["found"]
    assert done.returncode == int(document["status"] == "fail") and time.monotonic() - started < 15


def test_imports_the_standard_library_alone():
    code = (
        f"import sys; sys.path.insert(0, {str(SRC)!r}); before = set(sys.modules); import weft.hardware.doctor\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - {'weft'}\n"
        "foreign = {m for m in new if m not in sys.stdlib_module_names and not m.startswith('_')}\n"
        "sys.exit(repr(foreign) if foreign else 0)"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=30)


def test_plain_text_fits_80_columns():
    done = run_doctor(COLUMNS="80")
    assert done.stderr == "" and "weft doctor:" in done.stdout
    for line in done.stdout.splitlines():
        assert len(line) <= 80 or " " not in line.strip(), line
    statuses = re.findall(r"^  (\S) (pass|warn|fail)  ", done.stdout, re.MULTILINE)
    assert len(statuses) == len(NAMES) and all(findings.SYMBOLS[word] == symbol for symbol, word in statuses)


def test_a_terminal_without_unicode_gets_ascii():
    done = run_doctor(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.stderr == "" and done.stdout.isascii() and " + pass  " in done.stdout


@pytest.mark.parametrize(("code", "said"), [
    ("raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ("import sys; print('noise'); sys.exit(3)", "exit status 3"), ("__version__ = '2.13.0'", "has no attribute"),
])  # fmt: skip
def test_a_broken_torch_costs_one_line(fake_torch, code, said):
    done = run_doctor("--json", packages=fake_torch(code))
    found = by_name(done.stdout)
    assert found["pytorch"]["status"] == "warn" and said in found["pytorch"]["found"]
    assert found["pytorch"]["fix"] and "Traceback" not in done.stdout + done.stderr and set(found) >= NAMES


def test_a_torch_that_hangs_is_left_after_its_time(fake_torch):
    # It also leaves a child behind that would keep the pipe open.
    code = "import subprocess, time\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(60)"
    started = time.monotonic()
    done = run_doctor("--json", packages=fake_torch(code), WEFT_DOCTOR_TIMEOUT_S="1")
    assert time.monotonic() - started < 8 and "no answer within 1 s" in by_name(done.stdout)["pytorch"]["found"]
    assert "Traceback" not in done.stderr


FAKE_TORCH = """
import types
__version__ = "2.13.0+cu130"
version = types.SimpleNamespace(cuda="13.0", hip=None)
def init(): raise RuntimeError("The NVIDIA driver on your system is too old")
cuda = types.SimpleNamespace(is_available=lambda: False, device_count=lambda: 0, init=init)
"""


def test_an_old_driver_is_told_which_pytorch_it_loads(fake_torch, tools):
    path = tools(nvidia_smi="echo '535.104.05, NVIDIA A100-SXM4-80GB, 81920, 8.0'")
    done = run_doctor("--json", packages=fake_torch(FAKE_TORCH), PATH=path)
    found = by_name(done.stdout)
    assert found["nvidia-driver"] == {**found["nvidia-driver"], "status": "pass", "found": "535.104.05"}
    assert "A100" in found["gpus"]["found"] and "80 GiB, sm_80" in found["gpus"]["found"]
    mismatch = found["driver-fits-pytorch"]
    assert mismatch["status"] == "fail" and "580.65.06" in mismatch["found"]
    assert "https://download.pytorch.org/whl/cu126" in mismatch["fix"] and done.returncode == 1


def test_an_nvidia_smi_that_fails_is_a_finding(tools):
    path = tools(nvidia_smi="echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = by_name(run_doctor("--json", PATH=path).stdout)
    assert found["nvidia-driver"]["status"] == "fail" and "reboot" in found["nvidia-driver"]["fix"]


@pytest.mark.share(2)
def test_full_level_runs_work():
    pytest.importorskip("torch", reason="the trial needs PyTorch")
    pytest.importorskip("triton", reason="the trial's kernel needs Triton")
    for part in doctor.trial_findings(Driver(None), 100.0):
        assert part.status == "pass", part
        assert part.group == "Trial"


def test_examine_rejects_an_unknown_level():
    with pytest.raises(ValueError, match="quick, full"):
        doctor.examine("thorough")


def index_of_build(version, capability):
    """Of the PyTorch that a driver loads, under download.pytorch.org (None: PyPI)."""
    index = driver.fitting_build(version, capability)[0]
    return index and index.removeprefix("https://download.pytorch.org/whl/")


HOPPER, BLACKWELLS = (9, 0), (12, 0)
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 20 07:14:22 UTC 2025\nGCC version: 12"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)"
ODD_GPUS = "580.65.06, NVIDIA GB10, [N/A], 12.1\n580.65.06, NVIDIA H200, 143771\nNo devices were found\n"
ANSWERS = [
    (driver.loads, ("580.65.06", "13.0"), True),
    (driver.loads, ("580.65.05", "13.0"), False),
    (driver.loads, ("575.57.08", "12.9"), True),
    (driver.loads, ("525.60.13", "12.8"), True),
    (driver.loads, ("525.60.12", "12.1"), False),
    (driver.loads, ("450.80.02", "11.8"), True),
    (driver.loads, ("590.10", "14.0"), True),  # unknown: the newest row that is known
    (index_of_build, ("580.65.06", HOPPER), None),
    (index_of_build, ("580.65.06", (7, 0)), "cu126"),  # CUDA 13 dropped Volta
    (index_of_build, ("570.86.10", BLACKWELLS), "cu128"),  # cu126 has no Blackwell
    (index_of_build, ("570.86.10", HOPPER), "cu126"),
    (index_of_build, ("535.104.05", None), "cu126"),
    (driver.fitting_build, ("470.82.01", (8, 0)), None),  # of CUDA 11
    (driver.module_version, (MODULE,), "580.65.06"),
    (driver.module_version, (OPEN_MODULE,), "580.65.06"),
    (driver.parse_gpus, (ODD_GPUS,), ("580.65.06", (Gpu("NVIDIA GB10", 0, (12, 1)), Gpu("NVIDIA H200", 143771, None)))),
    (frameworks.runs_on, (["sm_80", "sm_90"], HOPPER), True),
    (frameworks.runs_on, (["sm_80"], (8, 9)), True),  # same major, later minor
    (frameworks.runs_on, (["sm_86"], (8, 0)), False),
    (frameworks.runs_on, (["sm_80", "sm_90"], BLACKWELLS), False),
    (frameworks.runs_on, (["sm_80", "compute_120"], (12, 1)), True),  # PTX
    (frameworks.runs_on, (["sm_90a", "sm_100", "sm_120"], BLACKWELLS), True),
    (frameworks.pinned_triton, (["filelock", 'triton==3.7.1; platform_system == "Linux"'],), "3.7.1"),
    (frameworks.pinned_triton, (["triton (==3.6.0) ; platform_machine == 'x86_64'"],), "3.6.0"),
    (frameworks.pinned_triton, (["pytorch-triton==3.6.0+git1234"],), "3.6.0+git1234"),
    (frameworks.pinned_triton, (["numpy", "triton-windows>=3"],), None),
    (access.restricted, ("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n",), True),
    (access.restricted, ("RmProfilingAdminOnly: 0\n",), False),
    (access.may_administer, ("CapEff:\t000001ffffffffff\n",), True),
    (access.may_administer, ("CapEff:\t00000000a80425fb\n",), False),  # root in a default Docker container
]


@pytest.mark.parametrize(("question", "given", "answer"), ANSWERS)
def test_what_is_read_and_decided(question, given, answer):
    assert question(*given) == answer


DRIVER = Driver("580.65.06", (H200,))
BLACKWELL = Driver("570.86.10", (Gpu("RTX 5090", 32607, (12, 0)),))
UNUSED = Driver("580.65.06", problem="no nvidia-smi", module_only=True)  # a container that was started without its GPU
HOPPERS = {"architectures": ["sm_80", "sm_90"]}


@pytest.mark.parametrize(("check", "driver", "torch", "status", "words"), [
    # NVIDIA's forward-compatibility package lets an older data-centre driver load a newer CUDA.
    (frameworks.driver_fits, Driver("550.54.15", (H200,)), torch_answer("13.0", 1), "pass", ""),
    (frameworks.driver_fits, DRIVER, torch_answer(reason="error 802: not yet initialized"), "fail", "error 802"),
    (frameworks.build_fits, DRIVER, torch_answer(None), "warn", "torch>=2.10"),
    (frameworks.build_fits, Driver(None), torch_answer(None), "pass", ""),
    (frameworks.build_fits, UNUSED, torch_answer(None), "pass", ""),
    (frameworks.architecture_fits, BLACKWELL, torch_answer("12.6", 1, **HOPPERS), "fail", "sm_120"),
    (frameworks.architecture_fits, BLACKWELL, torch_answer("12.6", 1, **HOPPERS), "fail", "cu128"),
])  # fmt: skip
def test_pytorch_beside_a_driver(check, driver, torch, status, words):
    finding = check(driver, torch)
    assert finding.status == status and words in f"{finding.found} {finding.fix}"


def test_another_triton_than_pytorch_pins(monkeypatch):
    monkeypatch.setattr(frameworks.importlib.metadata, "version", {"torch": "2.13.0", "triton": "3.6.0"}.__getitem__)
    monkeypatch.setattr(frameworks.importlib.metadata, "requires", lambda name: ["triton==3.7.1"])
    finding = frameworks.triton_fits()
    assert finding.status == "warn" and "triton==3.7.1" in finding.fix


def test_little_disk(monkeypatch):
    for free, status in [(1e9, "fail"), (10e9, "warn"), (50e9, "pass")]:
        usage = types.SimpleNamespace(free=free)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _, usage=usage: usage)
        assert machine.disk("disk-here", Path.cwd()).status == status


def test_a_cgroup_limit_counts(monkeypatch):
    monkeypatch.setattr(machine, "memory_limit", lambda: 2**30)
    finding = machine.memory()
    assert finding.status == "fail" and "1.0 GiB" in finding.found


def test_unwritable_cache(tmp_path):
    (tmp_path / "file").write_text("")
    finding = access.writable("triton-cache", tmp_path / "file" / ".triton", "TRITON_CACHE_DIR")
    assert finding.status == "fail" and "TRITON_CACHE_DIR" in finding.fix
    assert access.writable("triton-cache", tmp_path / "new" / ".triton", "TRITON_CACHE_DIR").status == "pass"
    assert not (tmp_path / "new").exists()


def test_a_check_that_raises_is_one_warning():
    (finding,) = guarded("memory", "System", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert (finding.name, finding.status) == ("memory", "warn") and "ZeroDivisionError" in finding.found


def test_a_warning_needs_a_fix_and_the_exit_code_says_what_failed():
    with pytest.raises(ValueError, match="needs a fix"):
        Finding("memory", "warn", "little", "", "System")
    good = Finding("python", "pass", "3.12", "", "System")
    poor = Finding("memory", "warn", "4 GiB", "buy more", "System")
    bad = Finding("disk-here", "fail", "1 GB", "rm -r old", "System")
    assert [exit_code([good, poor]), exit_code([good, bad])] == [0, 1]
    assert as_json([good, poor, bad])["status"] == "fail" and as_json([])["status"] == "pass"
    json.dumps(as_json([bad]))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_render_keeps_commands_whole(width):
    command = "--index-url https://download.pytorch.org/whl/cu126"
    text = render([Finding("driver-fits-pytorch", "fail", "word " * 40, command, "Fit")], width)
    assert "https://download.pytorch.org/whl/cu126" in text and "--index-url" in text
    assert all(len(line) <= width or len(line.split()) == 1 for line in text.splitlines())


def test_a_process_that_says_nothing_has_a_problem():
    assert probe.ask(["/nonexistent/python"], 1.0).problem
    assert probe.ask([sys.executable, "-S", "-c", "pass"], 10.0).problem == "no answer, exit status 0"
    assert probe.ask_code("print('noise'); answer(version='1'); print('more')", 10.0) == Answer({"version": "1"})
