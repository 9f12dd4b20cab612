"""Set-up: every branch of the choice without a network, and the scripts' dry runs and real runs beside fake tools."""

import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from where import ROOT, printed

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))


import missing_packages  # noqa: E402
import setup as setup_script  # noqa: E402
from torch_choice import CPU_INDEX, SetupError, choose, offered_versions, pinned_version, torch_command  # noqa: E402

SITE = "https://download.pytorch.org/whl/"
MIRROR = "https://mirror.example/whl/cu130"


@pytest.mark.parametrize(("given", "kind", "requirement", "index"), [
    ({}, "cpu", "torch==2.13.0+cpu", CPU_INDEX),
    ({"torch_builds": ("2.13.0+cpu", "2.13.0")}, "cpu", "torch==2.13.0+cpu", None),
    ({"torch_builds": ("2.13.0", "2.14.0+cpu")}, "cpu", "torch==2.13.0+cpu", CPU_INDEX),
    ({"linux": False}, "cpu", "torch==2.13.0", None),
    ({"driver": "580.65.06", "capability": (9, 0)}, "cuda", "torch>=2.10", None),
    ({"driver": "580.65.06", "capability": (7, 0)}, "cuda", "torch>=2.10,<2.15", SITE + "cu126"),
    ({"driver": "575.57.08", "capability": (9, 0)}, "cuda", "torch>=2.10,<2.15", SITE + "cu126"),
    ({"driver": "575.57.08", "capability": (12, 0)}, "cuda", "torch>=2.10,<2.12", SITE + "cu128"),
    ({"driver": "525.60.13"}, "cuda", "torch>=2.10,<2.15", SITE + "cu126"),
    ({"driver": "470.82.01", "reusable_torch": "2.11.0+cu130"}, "reuse", None, None),
    ({"driver": "580.65.06", "torch_index": MIRROR, "reusable_torch": "2.11.0"}, "index", "torch>=2.10", MIRROR),
    ({"torch_index": MIRROR}, "index", "torch==2.13.0", MIRROR),
])  # fmt: skip
def test_choice(given, kind, requirement, index):
    choice = choose(pinned="2.13.0", **given)
    assert (choice.kind, choice.requirement, choice.index) == (kind, requirement, index) and choice.reason
    # Constraints name exact CPU versions: they would pull down a GPU's PyTorch.
    assert choice.constrained == ("driver" not in given)


def test_a_driver_too_old_for_all_says_what_to_do():
    with pytest.raises(SetupError, match=r"470\.82\.01") as error:
        choose(driver="470.82.01", capability=(8, 0), pinned="2.13.0")
    assert "580.65.06" in error.value.fix


def test_torch_commands():
    assert torch_command(choose(driver="580.65.06", reusable_torch="2.11.0", pinned="2.13.0")) is None
    assert torch_command(choose(driver="580.65.06", pinned="2.13.0")) == ["install", "torch>=2.10"]
    command = torch_command(choose(pinned="2.13.0"))
    assert command == ["install", "torch==2.13.0+cpu", "-c", "constraints.txt", "--index-url", CPU_INDEX]


def test_reading_pip_and_constraints():
    text = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0\n  INSTALLED: 2.9.0\n"
    assert offered_versions(text) == ("2.15.0", "2.13.0+cpu", "2.13.0")
    assert offered_versions("ERROR: No matching distribution found for torch") == ()
    assert pinned_version("numpy<2.5\ntorch==2.13.0    # a comment\n", "torch") == "2.13.0"
    assert pinned_version((ROOT / "constraints.txt").read_text(), "torch")
    with pytest.raises(SetupError, match="pins no torch"):
        pinned_version("torchvision==0.28\n", "torch")


PROJECT = {
    "name": "weft", "dependencies": ["typer>=0.12"],
    "optional-dependencies": {
        "gpu": ["torch>=2.10", "triton>=3.6; platform_system == 'Linux'", "cuda-bindings>=12.8"],
        "nvrtc": ["nvidia-cuda-nvrtc>=12.8"], "train": ["scikit-learn>=1.3", "colorama; platform_system == 'Windows'"],
        "test": ["pytest>=8", "weft[train,nvrtc]"],
    },
}  # fmt: skip


def missing(installed: dict[str, str], cuda: str | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    monkeypatch.setattr(missing_packages, "installed_version", installed.get)
    return missing_packages.plan(missing_packages.requirements(PROJECT, ["gpu", "test"]), cuda)


def test_pytorch_and_triton_are_never_replaced(monkeypatch):
    plan = missing({"torch": "2.9.1+cu128", "triton": "3.5.1", "pytest": "7.4"}, "12.8", monkeypatch)
    assert plan["keep"] == ["torch==2.9.1+cu128", "triton==3.5.1"]
    assert not any(line.startswith(("torch", "triton")) for line in plan["missing"])
    assert any("torch 2.9.1+cu128 is older" in note for note in plan["notes"])
    assert "pytest>=8" in plan["missing"]  # too old is missing


def test_extras_are_followed_and_markers_heeded(monkeypatch):
    lines = missing({"torch": "2.13.0", "triton": "3.7.1"}, "13.0", monkeypatch)["missing"]
    names = {line.split(">")[0] for line in lines}
    assert names == {"typer", "cuda-bindings", "nvidia-cuda-nvrtc", "scikit-learn", "pytest"}


def test_cuda_12_gets_bindings_of_cuda_12(monkeypatch):
    plan = missing({"torch": "2.14.1+cu126", "triton": "3.8.0"}, "12.6", monkeypatch)
    assert "<13" in next(line for line in plan["missing"] if line.startswith("cuda-bindings"))
    assert not any(line.startswith("nvidia-cuda-nvrtc") for line in plan["missing"])


def test_the_projects_own_requirements_are_understood():
    assert '"missing"' in printed(str(SCRIPTS / "missing_packages.py"), "gpu,test,docs,cluster")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what set-up reads, so that nothing touches the real `.venv`; its path holds a space."""
    copy = tmp_path / "a checkout"
    (copy / "src" / "weft").mkdir(parents=True)
    shutil.copytree(SCRIPTS, copy / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src/weft/hardware", copy / "src/weft/hardware", ignore=without)
    for name in ("pyproject.toml", "constraints.txt", "src/weft/__init__.py"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


NO_GPU = "echo 'No devices were found'; exit 6"


def test_dry_run_prints_the_plan_and_changes_nothing(checkout, tmp_path, tools):
    before = contents(checkout)
    env = {**os.environ, "WEFT_TORCH_INDEX": MIRROR, "PATH": tools(nvidia_smi=NO_GPU)}
    command = [sys.executable, str(checkout / "scripts" / "setup.py"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"--index-url {MIRROR}" in done.stdout and "WEFT_TORCH_INDEX names the index" in done.stdout
    assert "-m venv" in done.stdout and contents(checkout) == before


def test_a_python_that_does_not_run_is_explained(checkout):
    env = {**os.environ, "WEFT_PYTHON": "/nonexistent/python"}
    command = [sys.executable, str(checkout / "scripts" / "setup.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1 and "/nonexistent/python does not run" in done.stderr
    assert "fix: " in done.stderr and "Traceback" not in done.stderr


def test_a_finished_set_up_is_left_alone_and_an_interrupted_one_is_not(checkout, monkeypatch):
    venv = checkout / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    monkeypatch.setattr(setup_script, "ROOT", checkout)
    monkeypatch.setattr(setup_script, "VENV", venv)
    monkeypatch.setattr(setup_script, "UNFINISHED", venv / "setup-unfinished")
    assert not setup_script.up_to_date()
    (venv / "setup-done.json").write_text(f'{{"fingerprint": "{setup_script.fingerprint()}"}}')
    assert setup_script.up_to_date()
    (venv / "setup-unfinished").touch()
    assert not setup_script.up_to_date()
    (venv / "setup-unfinished").unlink()
    monkeypatch.setenv("WEFT_TORCH_INDEX", MIRROR)
    assert not setup_script.up_to_date()
    monkeypatch.delenv("WEFT_TORCH_INDEX")
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert not setup_script.up_to_date()


def remote_setup(checkout: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(checkout / "scripts" / "remote_setup.sh"), *arguments]
    options = {"capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, env={**os.environ, **env}, **options)


def test_remote_dry_run_prints_and_does_nothing(checkout, tmp_path, tools):
    path = tools(ssh=f"touch {tmp_path}/called")
    words = "--dry-run", "--big-disk", "/mnt/big disk", "user@host", "-p", "2222", "-i", "a key"
    done = remote_setup(checkout, *words, PATH=path)
    assert done.returncode == 0, done.stderr
    assert r"ssh -p 2222 -i a\ key user@host" in done.stdout
    assert "remote_setup.sh" in done.stdout and "--local" in done.stdout and not (tmp_path / "called").exists()


def test_local_dry_run_changes_nothing(checkout, tmp_path):
    home = tmp_path / "a home"
    (home / ".triton").mkdir(parents=True)
    before = contents(tmp_path)
    done = remote_setup(checkout, "--dry-run", "--local", "--big-disk", f"{tmp_path}/big disk", HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert "make -C" in done.stdout and "weft doctor" in done.stdout and contents(tmp_path) == before


@pytest.mark.parametrize("arguments", [[], ["--big-disk"], ["--what"], ["--local", "user@host"]])
def test_wrong_usage_is_explained(checkout, arguments):
    done = remote_setup(checkout, *arguments)
    assert done.returncode == 1 and "fix: " in done.stderr


def test_a_server_without_a_driver_is_refused(checkout, tmp_path, tools):
    done = remote_setup(checkout, "--local", HOME=str(tmp_path), PATH=tools(nvidia_smi=NO_GPU))
    assert done.returncode == 1 and "nvidia-driver" in done.stderr


def test_the_whole_way_with_a_fake_ssh(checkout, tmp_path, tools):
    """ssh runs the command here in another home; caches move and are linked, nothing is lost, twice is as once."""
    home, big = tmp_path / "far home", tmp_path / "big disk"
    (home / ".triton").mkdir(parents=True)
    (home / ".triton" / "kernel").write_text("compiled")
    (home / ".cache").mkdir()
    (big / "weft-caches" / "pip").mkdir(parents=True)
    path = tools(  # As the real one: options, then the host, then one command line for the far shell, in the far home.
        ssh=f'while [[ $1 == -* ]]; do shift 2; done; shift; export HOME="{home}"; cd "$HOME" && exec bash -c "$*"',
        nvidia_smi="echo 'NVIDIA H200, 143771 MiB, 580.65.06'",
        make='mkdir -p "$2/.venv/bin"; cd "$2/.venv/bin"; '
        'printf "#!/bin/bash\\necho doctor \\"\\$@\\"; exit 1\\n" > python; chmod +x python',
        cc="exit 0",
    )
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    (checkout / "a file.txt").write_text("new")
    (checkout / ".gitignore").write_text("__pycache__/\n/secret\n")
    (checkout / "secret").write_text("not to be copied")
    arguments = ["--dir", "work/weft copy", "--big-disk", str(big), "user@host", "-p", "22"]

    for attempt in (1, 2):
        done = remote_setup(checkout, *arguments, PATH=path)
        assert done.returncode == 1, done.stderr  # the doctor's own
        assert "doctor -m weft doctor" in done.stdout, done.stderr
        copy = home / "work" / "weft copy"
        assert (copy / "a file.txt").read_text() == ("new" if attempt == 1 else "measured there")
        assert not (copy / "secret").exists() and not (copy / ".git").exists()
        assert (home / ".triton").is_symlink() and (home / ".triton" / "kernel").read_text() == "compiled"
        assert (home / ".cache" / "pip").resolve() == big / "weft-caches" / "pip"
        assert (copy / ".venv").resolve() == big / "weft-caches" / "venv"
        assert (home / "weft-learn" / "README.md").exists()
        assert "weft\\ copy" in (home / "weft-learn" / "env.sh").read_text()
        # A file that is newer over there survives the second run.
        (copy / "a file.txt").write_text("measured there")
        (home / "weft-learn" / "README.md").write_text("my notes")
    assert (home / "weft-learn" / "README.md").read_text() == "my notes"
    assert list((big / "weft-caches").glob("*.from-home-*")) == []


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_are_clean():
    subprocess.run(["shellcheck", *map(str, [*SCRIPTS.glob("*.sh"), ROOT / ".ci" / "run"])], check=True)


def test_type_checkers_read_the_types_of_an_installed_copy():
    package = files("weft")
    assert package.joinpath("py.typed").is_file() and package.joinpath("ops.pyi").is_file()
