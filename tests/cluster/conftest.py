"""The simulator's tests need NumPy, Numba and Hypothesis: without one of them none is collected, and the head of the run
says so."""

from __future__ import annotations

from importlib.util import find_spec

MISSING = [name for name in ("numpy", "numba", "hypothesis") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> list[str]:
    return [f"tests/cluster is left out: {', '.join(MISSING)} missing"] if MISSING else []
