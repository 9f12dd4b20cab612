"""No array of the simulator's engine is read or written outside of it, or before anything was written there."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")
pytest.importorskip("numba")
pytest.importorskip("hypothesis")

from where import ROOT, python


def test_every_index_of_the_engine_lies_within_its_array():
    done = python(str(ROOT / "tests/cluster/checked_engine.py"), NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr[-4000:]
