"""The adapter over Triton's interpreter, under the Triton of .venv and those that continuous integration keeps beside it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHERS = sorted(ROOT.glob(".cache/triton-3*"))  # the oldest and the newest: .ci/run


@pytest.mark.parametrize("triton", ["", *map(str, OTHERS)], ids=lambda path: Path(path).name or "installed")
def test_bounds_races_and_counts(triton):
    path = os.pathsep.join(filter(None, [triton, str(ROOT / "src")]))
    script = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all right with Triton" in done.stdout
    if triton:
        assert done.stdout.split()[-1] in triton
