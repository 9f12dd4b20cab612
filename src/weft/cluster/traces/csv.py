"""Plain CSV: a column for each that ``Jobs`` has, by its own name; ``submit``, ``duration`` and ``gpus`` are needed."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.files.columns import Columns, nearest, read
from weft.cluster.files.text import TraceError
from weft.cluster.model import DEFAULTS, FLOATS, Jobs
from weft.cluster.trace import Format, accepted, jobs_of, names
from weft.definition import UnknownName

NEEDED = ("submit", "duration", "gpus")
WORDS = ("id", "tenant", "types")
OPTIONAL = (*(name for name in (*DEFAULTS, "estimate", "workers") if name not in WORDS), *WORDS)
DATED = ("submit", "start", "end")  # seconds, or dates
MOST_LISTED = 30  # columns that are not read
ALTERNATIVES = {"duration": ("start", "end")}
WORKERS = ("num_workers", "worker_num", "inst_num", "num_inst", "num_instances", "instances", "replicas")
NUMBERS = (*NEEDED, *(name for name in OPTIONAL if name not in WORDS))
# Column → its unit, and between which bounds the largest request of a trace would lie.
UNITS = {
    "milli": ("thousandths of each GPU", 10, 1000),
    "gpu_memory": ("GB of each GPU", 1, 2000),
    "cpu": ("thousandths of a core", 500, 1e9),
    "memory": ("MiB", 1024, 2**30),
}


def load(path: Path, columns: Mapping[str, str] | None = None) -> Jobs:
    """``tenant`` and ``id`` are words, ``types`` the accelerator types that the job accepts, separated by ``|``.

    ``submit`` is seconds, or dates that become seconds since the first. In place of ``duration`` may be ``start`` and ``end``,
    likewise. Units as in ``Jobs``: seconds, thousandths of GPUs and cores, GB of GPU memory, MiB of memory. Where the largest
    request is such that another unit must be meant, and where a column is not read, ``jobs.warnings`` says so. An empty cell of
    a column that may be missing gets the default, as the whole column does where it is missing. A job without a GPU is left
    out unless it requests cores. Where there are ``workers`` (or a name of :data:`WORKERS`) and no ``pods``, a job has so many
    pods, and GPUs, cores and memory are of each.

    Args:
        columns: weft's name → the file's: ``{"gpus": "gpu_num"}``.

    Raises:
        UnknownName: ``columns`` names one that weft does not have.
    """
    called = known(columns)
    table = read(path, NUMBERS, WORDS, optional=OPTIONAL, called=called, dated=DATED, alternatives=ALTERNATIVES,
                 synonyms=synonyms(called))  # fmt: skip
    return jobs_from(table, doubts(table, called))


def doubts(table: Columns, called: Mapping[str, str]) -> list[str]:
    """What is to be said of a table's columns: those that are not read, and one that was taken for workers unasked."""
    if {"pods", "workers"} <= set(table.numbers) and "workers" not in called:
        del table.numbers["workers"]
    name = table.called.get("workers", "workers")
    taken = (
        f"{name} is taken for a job's workers, each a pod with the GPUs, cores and memory of the row; where these are of the "
        f"whole job: --columns pods={name}"
    )
    return [*unread(table), *([taken] if "workers" in table.numbers and "workers" not in called else [])]


def synonyms(called: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """The names of columns that weft recognises though they are not its own."""
    return {} if "pods" in called else {"workers": WORKERS}


def known(columns: Mapping[str, str] | None) -> Mapping[str, str]:
    for name in columns or {}:
        if name not in (*NUMBERS, *DATED, *WORDS):
            raise UnknownName("column", name, (*NUMBERS, *DATED[1:], *WORDS))
    return columns or {}


def unread(table: Columns) -> list[str]:
    """A sentence on the columns that are not read, each with weft's name that it may be meant for."""
    read = {table.called.get(name, name) for name in (*table.numbers, *table.words)}
    open = {*NUMBERS, *WORDS} - {*table.numbers, *table.words}
    named = []
    for name in dict.fromkeys(table.names):
        if name not in read:
            near = nearest(name, open)
            named.append(f"{name} (did you mean '{near}'?)" if near not in ("", name) else name or "one without a name")
    more = [f"and {len(named) - MOST_LISTED:,} more"] if len(named) > MOST_LISTED else []
    return [f"columns of the trace that are not read: {', '.join(named[:MOST_LISTED] + more)}"] if named else []


def doubtful(jobs: Jobs) -> list[str]:
    """A sentence on each column whose largest value is none in its unit."""
    found = []
    for name, (unit, least, most) in UNITS.items():
        largest = getattr(jobs, name).max(initial=0)
        if largest and not least <= largest <= most:
            found.append(f"{name}: the largest request of a job is {largest:,} {unit}; is the column in another unit?")
    return found


def jobs_from(table: Columns, warnings: Iterable[str] = ()) -> Jobs:
    """The jobs of a table under weft's own names."""
    more: dict[str, Any] = {}
    if "workers" in table.numbers:
        _hire(table)
    if "duration" not in table.numbers:
        for name in ALTERNATIVES["duration"]:
            if len(bad := np.flatnonzero(np.isinf(table.numbers[name]))):
                raise table.wrong(int(bad[0]), name, "seconds or a date")
        start, end = (table.numbers.pop(name) for name in ALTERNATIVES["duration"])
        if ("start" in table.dates) != ("end" in table.dates):
            raise TraceError(f"{table.path}: one of start and end is dates, the other seconds; expected both alike")
        table.numbers["duration"] = end - start
    for name, column in table.numbers.items():
        if name in NEEDED:
            continue
        if name not in FLOATS:
            table.whole(name, unit=UNITS.get(name, ("",))[0])
        more[name] = np.where(
            np.isnan(column), table.numbers["duration"] if name == "estimate" else DEFAULTS[name], column
        )
    if "id" in table.words:
        more["id"] = table.words["id"]
    if "tenant" in table.words:
        more["tenant"], more["tenants"] = names(table.words["tenant"])
    if "types" in table.words:
        more["types"], more["type_sets"] = accepted(table.words["types"])
    submit, duration, gpus = (table.numbers[name] for name in NEEDED)
    if "cpu" in more:
        more["cpu_only"] = more["cpu"] > 0
    jobs = jobs_of(table, submit, duration, gpus, dated="submit" in table.dates, **more)
    jobs.warnings = (*jobs.warnings, *warnings, *doubtful(jobs))
    return jobs


def _hire(table: Columns) -> None:
    """Makes ``pods`` of ``workers``, and multiplies what each has."""
    if "pods" in table.numbers:
        raise TraceError(
            f"{table.path}: there are both pods and {table.called.get('workers', 'workers')}; expected one of them"
        )
    workers = table.whole("workers", least=1)
    table.numbers["pods"] = np.where(np.isnan(workers), 1, workers)
    del table.numbers["workers"]
    for name in ("gpus", "cpu", "memory"):
        if name in table.numbers:
            table.whole(name, unit=UNITS.get(name, ("",))[0])
            table.numbers[name] = table.numbers[name] * table.numbers["pods"]


FORMAT = Format("csv", load, "columns submit, duration, gpus and any other of weft's own names", options=("columns",))
