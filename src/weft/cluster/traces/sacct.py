"""Slurm: ``sacct --parsable2`` with the fields of :data:`FIELDS`, ``--allusers`` and a start time as you like."""

import re
from pathlib import Path

import numpy as np

from weft.cluster.files.columns import Columns, read
from weft.cluster.files.text import TraceError
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, accepted, jobs_of, names, or_zero, since_first

FIELDS = "JobID,User,Account,Partition,Submit,Start,End,Elapsed,Timelimit,State,AllocTRES,ReqTRES,NNodes,Priority"
NEEDED = ("JobID", "Submit", "Start", "End", "Elapsed", "AllocTRES")
OPTIONAL = ("User", "Account", "Timelimit", "ReqTRES")
NEVER = ("", "Unknown", "None")
CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")  # [days-][hours:]minutes:seconds
MEMORY = re.compile(r"([\d.]+)([KMGTP]?)")
MIB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


def load(path: Path) -> Jobs:
    """Steps (``123.batch``) are passed over. Times count from the first submission; those without an offset are taken for UTC.

    A job ran for ``Elapsed``; ``Timelimit`` is its estimate, or where it has none, what it ran. GPUs, cores and memory are as
    allocated. Types are those it requested (``gres/gpu:h100`` of ``ReqTRES``), not those it was given. ``NNodes`` are its
    pods where the GPUs divide among them. The account is the tenant, or without one the user. Left out and counted: jobs that
    never started, have not ended, or had no GPU.
    """
    numbers = ("NNodes", "Priority")
    every = read(path, numbers, (*NEEDED, *OPTIONAL), optional=(*OPTIONAL, *numbers), delimiter="|")
    table = _rows(every, np.array(["." not in id for id in every.words["JobID"]], bool))
    words, count = table.words, len(table.lines)
    for name in ("Submit", "Start", "End"):
        words[name] = ["" if word in NEVER else word for word in words[name]]
    requested = words.get("ReqTRES", [""] * count)
    given = [_tres(table, row, text) for row, text in enumerate(words["AllocTRES"])]
    gpus = np.array([_gpus(tres) for tres in given], float)
    elapsed = _clock(table, "Elapsed")
    limit = _clock(table, "Timelimit") if "Timelimit" in words else np.full(count, np.nan)
    types, type_sets = accepted(_type(_tres(table, row, text)) for row, text in enumerate(requested))
    nodes = table.whole("NNodes") if "NNodes" in table.numbers else np.zeros(count)
    pods = np.where((nodes > 0) & (gpus % np.maximum(nodes, 1) == 0), nodes, 0)
    accounts, users = (words.get(name, [""] * count) for name in ("Account", "User"))
    tenant, tenants = names(account or user for account, user in zip(accounts, users, strict=True))
    return jobs_of(
        table, since_first(table.times("Submit")), elapsed, gpus,
        {
            "never started": np.isnan(table.times("Start")),
            "not ended": np.isnan(table.times("End")),
        },
        id=words["JobID"], estimate=np.where(np.isnan(limit), elapsed, limit), pods=pods,
        cpu=np.rint([float(tres.get("cpu", 0)) * 1000 for tres in given]),
        memory=np.rint([_mib(table, row, tres.get("mem", "0")) for row, tres in enumerate(given)]),
        types=types, type_sets=type_sets, tenant=tenant, tenants=tenants,
        priority=or_zero(table.numbers.get("Priority", np.zeros(count))),
    )  # fmt: skip


def _rows(table: Columns, keep: np.ndarray) -> Columns:
    return Columns(
        table.path,
        {name: column[keep] for name, column in table.numbers.items()},
        {name: [column[row] for row in np.flatnonzero(keep)] for name, column in table.words.items()},
        table.lines[keep],
        table.names,
    )


def _tres(table: Columns, row: int, text: str) -> dict[str, str]:
    """``cpu=8,mem=64G,gres/gpu:h100=2`` as a mapping."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    for name, _, amount in pairs:
        if (name == "cpu" or name.startswith("gres/gpu")) and not amount.isdigit():
            raise TraceError(f"{table.path}:{table.lines[row]}: '{name}={amount}' of '{text}'; expected a whole number")
    return {name: amount for name, _, amount in pairs}


def _gpus(tres: dict[str, str]) -> int:
    """``gres/gpu`` has all; where the site does not record it, those of each type."""
    if "gres/gpu" in tres:
        return int(tres["gres/gpu"])
    return sum(int(amount) for name, amount in tres.items() if name.startswith("gres/gpu:"))


def _type(tres: dict[str, str]) -> str:
    return "|".join(name.removeprefix("gres/gpu:") for name in tres if name.startswith("gres/gpu:"))


def _clock(table: Columns, column: str) -> np.ndarray:
    """Seconds of ``1-02:03:04``; NaN of words such as UNLIMITED."""
    found = np.full(len(table.lines), np.nan)
    for row, text in enumerate(table.words[column]):
        if match := CLOCK.fullmatch(text):
            days, hours, minutes, secs = (int(part or 0) for part in match.groups())
            found[row] = ((days * 24 + hours) * 60 + minutes) * 60 + secs
        elif text[:1].isdigit():
            raise table.wrong(row, column, "[days-][hours:]minutes:seconds")
    return found


def _mib(table: Columns, row: int, text: str) -> float:
    match = MEMORY.fullmatch(text)
    if not match:
        raise TraceError(f"{table.path}:{table.lines[row]}: mem={text}; expected a size such as 64G")
    return float(match[1]) * MIB[match[2]]


FORMAT = Format("sacct", load, f"Slurm: sacct --parsable2 --format={FIELDS}")
