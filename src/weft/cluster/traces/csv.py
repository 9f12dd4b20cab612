"""Plain CSV: a column for each that ``Jobs`` has, by its own name; ``submit``, ``duration`` and ``gpus`` are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.cluster.model import FLOATS, USUAL, Jobs
from weft.cluster.trace import Format, jobs_of, names, read

OPTIONAL = tuple(name for name in (*USUAL, "estimate") if name not in ("types", "tenant"))


def load(path: Path) -> Jobs:
    """``tenant`` and ``id`` are words. Units as in ``Jobs``: seconds, thousandths, GB of GPU memory, MiB of memory."""
    needed = ("submit", "duration", "gpus")
    table = read(path, (*needed, *OPTIONAL), ("id", "tenant"), optional=(*OPTIONAL, "id", "tenant"))
    more: dict[str, Any] = {name: table.numbers[name] for name in OPTIONAL if name in table.numbers}
    for name, column in more.items():
        if name not in FLOATS:
            for row in range(len(column)):
                if column[row] % 1:
                    raise table.wrong(row, name, "a whole number")
    if "id" in table.words:
        more["id"] = table.words["id"]
    if "tenant" in table.words:
        more["tenant"], more["tenants"] = names(table.words["tenant"])
    return jobs_of(table, *(table.numbers[name] for name in needed), **more)


FORMAT = Format("csv", load, "columns submit, duration, gpus and any other of weft's own names")
