"""Slurm: ``sacct --parsable2`` with the fields of :data:`FIELDS`, ``--allusers`` and a start time as you like."""

import re
from pathlib import Path

import numpy as np

from weft.cluster.files.columns import Columns, read
from weft.cluster.files.text import TraceError
from weft.cluster.model import LATEST, Jobs
from weft.cluster.trace import Format, accepted, jobs_of, names, or_zero, since_first

FIELDS = "JobID,User,Account,Partition,Submit,Start,End,Elapsed,Timelimit,State,AllocTRES,ReqTRES,NNodes,Priority"
NEEDED = ("JobID", "Submit", "Start", "End", "Elapsed", "AllocTRES")
OPTIONAL = ("User", "Account", "Timelimit", "ReqTRES")
NEVER = ("", "Unknown", "None")
UNLIMITED = ("UNLIMITED", "Partition_Limit", "INFINITE")
MIG = re.compile(r"(?:.*[_:])?(\d+)g\.\d+gb(?:\+me)?")  # of a slice's type: its sevenths of a GPU
CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")  # [days-][hours:]minutes:seconds
MEMORY = re.compile(r"([\d.]+)([KMGTP]?)")
MIB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


def load(path: Path) -> Jobs:
    """Steps (``123.batch``) are passed over. Times count from the first submission; those without an offset are taken for UTC.

    A job ran for ``Elapsed``; ``Timelimit`` is its estimate, or where it is empty, what it ran. One without a limit could run
    for ever: it never backfills before a reservation. GPUs, cores and memory are as allocated; slices of MIG are sevenths of a
    GPU. Types are those it requested (``gres/gpu:h100`` of ``ReqTRES``), not those it was given. ``NNodes`` are its pods where
    the GPUs divide among them. The account is the tenant, or without one the user. sacct quotes nothing: a quotation mark is a
    character like any other.

    Left out and counted: jobs that never started, have not ended, had no GPU, shards of unknown size or slices of several
    sizes; rows that a ``|`` or a new line in a column of free text has broken.
    """
    numbers = ("NNodes", "Priority")
    every = read(
        path, numbers, (*NEEDED, *OPTIONAL), optional=(*OPTIONAL, *numbers), delimiter="|", quoted=False, lenient=True
    )
    table = _rows(every, np.array(["." not in id for id in every.words["JobID"]], bool))
    words, count = table.words, len(table.lines)
    for name in ("Submit", "Start", "End"):
        words[name] = ["" if word in NEVER else word for word in words[name]]
    requested = words.get("ReqTRES", [""] * count)
    given = [_tres(table, row, text) for row, text in enumerate(words["AllocTRES"])]
    gpus, milli = (
        (np.array(column, float) for column in zip(*map(_gpus, given), strict=True)) if given else np.zeros((2, 0))
    )
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
            "gres/shard, shares of a GPU of unknown size": np.array([_shards(tres) for tres in given], bool),
            "MIG slices of several sizes": milli < 0,
        },
        id=words["JobID"], estimate=np.where(np.isnan(limit), elapsed, limit), pods=pods,
        milli=np.maximum(milli, 1), cpu=np.rint([float(tres.get("cpu", 0)) * 1000 for tres in given]),
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


def _typed(tres: dict[str, str]) -> dict[str, int]:
    return {name.removeprefix("gres/gpu:"): int(n) for name, n in tres.items() if name.startswith("gres/gpu:")}


def _gpus(tres: dict[str, str]) -> tuple[int, float]:
    """How many, and thousandths of each: -1000 where slices are of several sizes, or stand beside whole ones. ``gres/gpu`` has
    all; where the site does not record it, those of each type."""
    typed = _typed(tres)
    slices = {name: match for name in typed if (match := MIG.fullmatch(name))}
    sizes = {int(match[1]) for match in slices.values()}
    count = int(tres["gres/gpu"]) if "gres/gpu" in tres else sum(typed.values())
    if not sizes:
        return count, 1000
    several = len(sizes) > 1 or len(slices) < len(typed)
    many, sevenths = sum(typed[name] for name in slices), min(sizes.pop(), 7)
    if not several and many * sevenths <= 7:  # they may lie on one GPU
        many, sevenths = 1, many * sevenths
    return many, -1000 if several else 1000 * sevenths // 7


def _shards(tres: dict[str, str]) -> bool:
    return any(name.split(":")[0] == "gres/shard" and amount != "0" for name, amount in tres.items())


def _type(tres: dict[str, str]) -> str:
    """The types that are asked for; slices are of any."""
    return "|".join(name for name in _typed(tres) if not MIG.fullmatch(name))


def _clock(table: Columns, column: str) -> np.ndarray:
    """Seconds of ``1-02:03:04``; as many as there can be of UNLIMITED; NaN of other words."""
    found = np.full(len(table.lines), np.nan)
    for row, text in enumerate(table.words[column]):
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
