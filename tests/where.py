"""Where tests run: on the GPU where PyTorch sees one, else on the CPU with kernels in Triton's interpreter.

Imported first of all by ``conftest.py``: the interpreter must be switched on before any kernel is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # workers side by side: more threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from weft.hardware.query import has_gpu  # has_gpu() imports PyTorch, which counts threads then

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if has_gpu() and not os.environ.get("TRITON_INTERPRET") else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

DTYPES = ("fp32", "fp16", "bf16") if DEVICE == "cuda" else ("fp32", "fp16")  # the interpreter computes bf16 wrongly


def on_hopper() -> bool:
    """Whether tests run on a GPU of sm_90."""
    if DEVICE != "cuda":
        return False
    import torch

    return torch.cuda.get_device_capability() == (9, 0)


def plain_environment(**variables: str) -> dict[str, str]:
    """The environment of a user who has switched nothing on, with weft on the path."""
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "WEFT_RESULTS", "WEFT_COMMIT")}
    path = path_with(ROOT / "src", ROOT / "tests", ROOT / "tests/emulator")
    return {**kept, "PYTHONPATH": path, "COLUMNS": "100", **variables}


def path_with(*folders: Path) -> str:
    """A PYTHONPATH with these folders first; packages may lie on it where nothing can be installed."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH", "")]))


def python(*arguments: str, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python with :func:`plain_environment`; the process that compiles must not be one that interprets."""
    how = {"capture_output": True, "text": True, "timeout": timeout, "cwd": ROOT}
    return subprocess.run([sys.executable, *arguments], env=plain_environment(**variables), **how)


def printed(*arguments: str, **more) -> str:
    """What a fresh Python (:func:`python`), which must end well, has printed."""
    done = python(*arguments, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout
