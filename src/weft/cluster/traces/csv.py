"""Plain CSV: a column for each that ``Jobs`` has, by its own name; ``submit``, ``duration`` and ``gpus`` are needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.model import FLOATS, USUAL, Jobs
from weft.cluster.trace import Columns, Format, accepted, jobs_of, names, read
from weft.definition import UnknownName

NEEDED = ("submit", "duration", "gpus")
WORDS = ("id", "tenant", "types")
OPTIONAL = (*(name for name in (*USUAL, "estimate") if name not in WORDS), *WORDS)
NUMBERS = (*NEEDED, *(name for name in OPTIONAL if name not in WORDS))


def load(path: Path, columns: Mapping[str, str] | None = None) -> Jobs:
    """``tenant`` and ``id`` are words, ``types`` the accelerator types that the job accepts, separated by ``|``.

    Units as in ``Jobs``: seconds, thousandths, GB of GPU memory, MiB of memory. An empty cell of a column that may be missing
    gets what is usual, as the whole column does where it is missing. A job without a GPU is left out unless it asks cores.

    Args:
        columns: weft's name → the file's: ``{"gpus": "gpu_num"}``.

    Raises:
        UnknownName: ``columns`` names one that weft does not have.
    """
    return jobs_from(read(path, NUMBERS, WORDS, optional=OPTIONAL, called=known(columns)))


def known(columns: Mapping[str, str] | None) -> Mapping[str, str]:
    for name in columns or {}:
        if name not in (*NUMBERS, *WORDS):
            raise UnknownName("column", name, (*NUMBERS, *WORDS))
    return columns or {}


def jobs_from(table: Columns) -> Jobs:
    """The jobs of a table under weft's own names."""
    more: dict[str, Any] = {}
    for name, column in table.numbers.items():
        if name in NEEDED:
            continue
        if name not in FLOATS:
            table.whole(name)
        more[name] = np.where(
            np.isnan(column), table.numbers["duration"] if name == "estimate" else USUAL[name], column
        )
    if "id" in table.words:
        more["id"] = table.words["id"]
    if "tenant" in table.words:
        more["tenant"], more["tenants"] = names(table.words["tenant"])
    if "types" in table.words:
        more["types"], more["type_sets"] = accepted(table.words["types"])
    if "cpu" in more:
        more["cpu_only"] = more["cpu"] > 0
    return jobs_of(table, *(table.numbers[name] for name in NEEDED), **more)


FORMAT = Format("csv", load, "columns submit, duration, gpus and any other of weft's own names", options=("columns",))
