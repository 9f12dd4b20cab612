"""The cluster simulator's part of a report: its records, and a small comparison of policies.

The comparison runs in a process of its own beside the verification (and, on a GPU machine, the measurements): the first one
on a machine compiles the engine for a minute.
"""

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from weft.records import Store
from weft.report import simulator

NEEDED = ("numpy", "numba")
INSTALL = "pip install 'weft[cluster]'"


@contextlib.contextmanager
def beside(
    store: Store | None = None, command: str = "weft.cluster.demonstration", longest_s: float = 90.0
) -> Iterator[Callable[[], Any]]:
    """Simulates while the body runs. Yields a function that waits for the end and returns ``Contents.scheduling``: a
    dictionary with ``records`` (lines of the store) and one of ``comparison`` (of
    :func:`weft.cluster.demonstration.demonstrate`), ``lacking`` (what to install) or ``failed`` (why there is none).

    Args:
        store: of the records; ``results`` by default.
        command: the module that prints the comparison.
        longest_s: seconds that the function waits.
    """
    records = list((store or Store()).lines(name=simulator.FILE))
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        yield lambda: {"records": records, "lacking": f"{' and '.join(missing)}: {INSTALL}"}
        return
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([sys.executable, "-m", command], stdin=subprocess.DEVNULL, stdout=out, stderr=err)

        def found() -> dict[str, Any]:
            try:
                status = process.wait(longest_s)
            except subprocess.TimeoutExpired:
                return {"records": records, "failed": "it took longer than a report waits"}
            out.seek(0)
            err.seek(0)
            with contextlib.suppress(ValueError):
                if status == 0:
                    return {"records": records, "comparison": json.load(out)}
            last = (err.read().strip().splitlines() or [f"its process ended with status {status}"])[-1]
            return {"records": records, "failed": last}

        try:
            yield found
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
