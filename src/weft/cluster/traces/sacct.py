"""Slurm: ``sacct --parsable2`` with the fields of :data:`FIELDS`, ``--allusers`` and a start time as you like."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.files import slurm
from weft.cluster.files.columns import Columns, read
from weft.cluster.files.text import TraceError, text_of
from weft.cluster.model import LATEST, Jobs
from weft.cluster.trace import Format, accepted, jobs_of, names, or_zero
from weft.words import count as count_of

FIELDS = (
    "JobID,User,Account,Partition,Submit,Eligible,Start,End,Elapsed,Timelimit,State,AllocTRES,ReqTRES,NNodes,Priority,"
    "Reservation"
)
NEEDED = ("JobID", "Submit", "Start", "End", "Elapsed", "AllocTRES")
OPTIONAL = ("User", "Account", "Timelimit", "ReqTRES", "Eligible", "Reservation")
DATES = ("Submit", "Eligible", "Start", "End")
NEVER = ("", "Unknown", "None")
UNLIMITED = ("UNLIMITED", "Partition_Limit", "INFINITE")
CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")  # [days-][hours:]minutes:seconds
MEMORY = re.compile(r"([\d.]+)([KMGTP]?)")
MIB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


def load(path: Path) -> Jobs:
    """Skips steps (``123.batch``). Times count from the first submission; those without an offset are taken for UTC.

    A job counts as submitted when it became eligible (after the jobs that it depends on, its ``--begin``, a hold), where there
    is a column ``Eligible``. It ran for ``Elapsed``; ``Timelimit`` is its estimate, or where it is empty, what it ran. One
    without a limit could run for ever: it never backfills before a reservation. GPUs, cores and memory are as allocated; slices
    of MIG are sevenths of a GPU. Types are those it requested (``gres/gpu:h100`` of ``ReqTRES``), not those it was given.
    ``NNodes`` are its pods where the GPUs divide among them. The account is the tenant, or without one the user. sacct quotes
    nothing: a quotation mark is a character like any other. Each part of a heterogeneous job, and with ``--duplicates`` each
    run of a job that was requeued (``12``, ``12#2``), is a job.

    Left out and counted: jobs that never started, have not ended, had no GPU, shards of unknown size or slices of several
    sizes; a row that is there again; rows that a ``|`` or a new line in a column of free text has broken.
    """
    if text_of(path).read(100).lstrip().startswith("{"):
        raise TraceError(
            f"{path}: it is JSON; expected what sacct --parsable2 writes. sacct --json: --format sacct-json"
        )
    numbers = ("NNodes", "Priority")
    every = read(
        path, numbers, (*NEEDED, *OPTIONAL), optional=(*OPTIONAL, *numbers), delimiter="|", quoted=False, lenient=True
    )
    table = _rows(every, np.array(["." not in id for id in every.words["JobID"]], bool))
    count = len(table.lines)
    for name in DATES:
        table.words[name] = ["" if word in NEVER else word for word in table.words.get(name, [""] * count)]
    times = {name: table.times(name) for name in DATES}
    times |= {name: _clock(table, name) for name in ("Elapsed", "Timelimit")}
    allocated, requested = (
        [_tres(table, row, text) for row, text in enumerate(table.words.get(name, [""] * count))]
        for name in ("AllocTRES", "ReqTRES")
    )
    return jobs_from(table, times, allocated, requested)


def jobs_from(
    table: Columns, times: dict[str, np.ndarray], allocated: list[dict[str, str]], requested: list[dict[str, str]]
) -> Jobs:
    """The jobs of sacct's fields.

    Args:
        table: ``JobID`` and, where they are known, ``User``, ``Account``, ``Reservation``, ``NNodes`` and ``Priority``.
        times: seconds, the fields :data:`DATES`, ``Elapsed`` and ``Timelimit``; NaN where there is none.
        allocated, requested: resource → how much, as sacct writes it.
    """
    words, count = table.words, len(table.lines)
    gpus, milli = (
        (np.array(column, float) for column in zip(*map(slurm.gpus, allocated), strict=True))
        if allocated
        else np.zeros((2, 0))
    )
    types, type_sets = accepted("|".join(slurm.whole_types(tres)) for tres in requested)
    nodes = table.whole("NNodes") if "NNodes" in table.numbers else np.zeros(count)
    pods = np.where((nodes > 0) & (gpus % np.maximum(nodes, 1) == 0), nodes, 0)
    accounts, users = (words.get(name, [""] * count) for name in ("Account", "User"))
    tenant, tenants = names(account or user for account, user in zip(accounts, users, strict=True))
    submit, eligible, start, end = (times[name] for name in DATES)
    able = np.where(np.isnan(eligible), submit, np.fmax(submit, np.fmin(eligible, start)))
    ids, again = _runs(words["JobID"], submit, start, end)
    leave_out = {
        "a row that is there again": again,
        "never started": np.isnan(start),
        "not ended": np.isnan(end),
        "gres/shard, shares of a GPU of unknown size": np.array([slurm.has_shards(tres) for tres in allocated], bool),
        "MIG slices of several sizes": milli < 0,
        "no GPU: gres/gpu is in no row, and must be in AccountingStorageTRES of slurm.conf": np.full(
            count, not any(name.startswith("gres/gpu") for tres in allocated for name in tres)
        ),
    }
    kept = ~np.any(list(leave_out.values()), 0) & (gpus > 0)
    jobs = jobs_of(
        table, able, times["Elapsed"], gpus, leave_out,
        id=ids, estimate=np.where(np.isnan(times["Timelimit"]), times["Elapsed"], times["Timelimit"]), pods=pods,
        milli=np.maximum(milli, 1), cpu=np.rint([float(tres.get("cpu", 0)) * 1000 for tres in allocated]),
        memory=np.rint([_mib(table, row, tres.get("mem", "0")) for row, tres in enumerate(allocated)]),
        types=types, type_sets=type_sets, tenant=tenant, tenants=tenants,
        priority=or_zero(table.numbers.get("Priority", np.zeros(count))), dated=True,
    )  # fmt: skip
    told: dict[str, Any] = {
        "parts of heterogeneous jobs, each a job of its own": ["+" in id for id in ids],
        "became eligible after the submission (dependency, --begin, hold), and count as submitted then": able > submit,
        "ran in a reservation, of which the simulation has none": list(map(bool, words.get("Reservation", [""] * count))),
        "ran again after a requeue, as a job of its own": [id != job for id, job in zip(ids, words["JobID"], strict=True)],
    }  # fmt: skip
    for what, rows in told.items():
        if many := int((np.array(rows, bool) & kept).sum()):
            jobs.warnings = (*jobs.warnings, f"{count_of(many, 'job')}: {what}")
    return jobs


def _runs(ids: list[str], *times: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Each row's id, ``12#2`` for the second run of job 12; and which rows are there again."""
    seen, runs, found, again = set[tuple[str, ...]](), Counter[str](), [], []
    for id, *at in zip(ids, *(time.tolist() for time in times), strict=True):
        key = (id, *map(str, at))
        again.append(bool(id) and key in seen)
        seen.add(key)
        runs[id] += not again[-1]
        found.append(id if not id or runs[id] < 2 else f"{id}#{runs[id]}")
    return found, np.array(again, bool)


def _rows(table: Columns, keep: np.ndarray) -> Columns:
    return Columns(
        table.path,
        {name: column[keep] for name, column in table.numbers.items()},
        {name: [column[row] for row in np.flatnonzero(keep)] for name, column in table.words.items()},
        table.lines[keep],
        table.names,
        broken=table.broken,
        guessed=table.guessed,
    )


def _tres(table: Columns, row: int, text: str) -> dict[str, str]:
    """``cpu=8,mem=64G,gres/gpu:h100=2`` as a mapping."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    for name, _, amount in pairs:
        if (name in ("cpu", "gres/gpu") or name.startswith("gres/gpu:")) and not amount.isdigit():
            raise TraceError(f"{table.path}:{table.lines[row]}: '{name}={amount}' of '{text}'; expected a whole number")
    return {name: amount for name, _, amount in pairs}


def _clock(table: Columns, column: str) -> np.ndarray:
    """Seconds of ``1-02:03:04``; as many as there can be of UNLIMITED; NaN of other words."""
    found = np.full(len(table.lines), np.nan)
    for row, text in enumerate(table.words.get(column, ())):
        if match := CLOCK.fullmatch(text):
            days, hours, minutes, secs = (int(part or 0) for part in match.groups())
            found[row] = ((days * 24 + hours) * 60 + minutes) * 60 + secs
        elif text in UNLIMITED:
            found[row] = LATEST
        elif text[:1].isdigit():
            raise table.wrong(row, column, "[days-][hours:]minutes:seconds")
    return found


def _mib(table: Columns, row: int, text: str) -> float:
    match = MEMORY.fullmatch(text)
    if not match:
        raise TraceError(f"{table.path}:{table.lines[row]}: mem={text}; expected a size such as 64G")
    return float(match[1]) * MIB[match[2]]


FORMAT = Format("sacct", load, f"Slurm: sacct --parsable2 --format={FIELDS}")
