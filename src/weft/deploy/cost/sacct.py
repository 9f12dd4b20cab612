"""Jobs of Slurm: ``sacct --allusers --parsable2 --duplicates --format=FIELDS``.

Slurm says what was allocated, not what was used. What a job was good for is taken from its state: a job that did not complete
did nothing that lasted, unless it wrote checkpoints, which Slurm does not know.
"""

import csv
import io
import re
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

from weft.cluster.files.text import TraceError, text_of
from weft.cluster.specification import Pool, Specification
from weft.deploy.cost.usage import Period, Usage
from weft.words import count

FIELDS = "JobID,JobName,User,Account,Partition,State,Start,End,AllocTRES"
NEEDED = ("JobID", "User", "Account", "State", "Start", "End", "AllocTRES")
REASONS = {
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "TIMEOUT": "time limit",
    "DEADLINE": "time limit",
    "NODE_FAIL": "node failure",
    "BOOT_FAIL": "node failure",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted",
    "REQUEUED": "requeued",
}
RUNNING = ("RUNNING", "SUSPENDED", "COMPLETING", "RESIZING", "REQUEUE_HOLD")


def load(
    path: Path,
    made: Specification | None = None,
    begin: float | None = None,
    end: float | None = None,
    price: float = 0.0,
) -> Period:
    """The jobs that held GPUs between ``begin`` and ``end`` (seconds since 1970; by default from the first start to the last
    end), each clipped to that time.

    Args:
        made: the cluster file: prices, and of how many GPUs shares are; partitions are its pools.
        price: money for a GPU hour, where the cluster file has none.

    Raises:
        TraceError: not what sacct writes; with the line.
    """
    rows = csv.reader(io.StringIO(text_of(path).read()), delimiter="|", quoting=csv.QUOTE_NONE)
    head = next(rows, [])
    missing = [name for name in NEEDED if name not in head]
    if missing:
        raise TraceError(
            f"{path}:1: columns {', '.join(missing)} are missing; expected sacct --allusers --parsable2"
            f" --duplicates --format={FIELDS}"
        )
    at = {name: k for k, name in enumerate(head)}
    dropped, found = Counter[str](), []
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            raise TraceError(
                f"{path}:{number}: {count(len(row), 'column')}; expected {len(head)}, as in the first line"
            )
        if "." in row[at["JobID"]]:  # a step
            continue
        cell = {name: row[k] for name, k in at.items()}
        started, ended = _moment(path, number, cell["Start"]), _moment(path, number, cell["End"])
        if started is None:
            dropped["never started"] += 1
            continue
        pool = _pool(made, cell.get("Partition", ""))
        gpus = gpus_of(cell["AllocTRES"], pool)
        if not gpus:
            dropped["without GPUs, or shares of unknown size"] += 1
            continue
        found.append((cell, started, ended, gpus, pool))
    times = [moment for _, started, ended, _, _ in found for moment in (started, ended) if moment is not None]
    first, last = (min(times), max(times)) if times else (0.0, 0.0)
    begin, end = first if begin is None else begin, last if end is None else end
    usages = []
    for cell, started, ended, gpus, pool in found:
        hours = gpus * max(0.0, min(end if ended is None else ended, end) - max(started, begin)) / 3600
        if not hours:
            dropped["outside of the time"] += 1
            continue
        state = cell["State"].split(" ")[0].rstrip("+")
        still = ended is None or state in RUNNING
        in_vain = state != "COMPLETED" and not still
        usages.append(
            Usage(
                team=cell["Account"] or "(none)",
                user=cell["User"] or "(none)",
                job=cell["JobID"],
                pool=pool.name if pool else cell.get("Partition", ""),
                gpu_hours=hours,
                bad_hours={REASONS.get(state, state.lower() or "unknown"): hours} if in_vain else {},
                open_hours=hours if still else 0.0,
                price=pool.price if pool and pool.price else price,
            )
        )
    notes = [f"{count(many, 'job')} left out: {why}" for why, many in sorted(dropped.items())]
    if any(usage.bad_hours for usage in usages):
        notes.append(
            "a job that did not complete counts as badput whole; what its checkpoints saved is not known to Slurm"
        )
    return of_capacity(usages, begin, end, made, f"sacct: {path.name}", notes)


def of_capacity(
    usages: list[Usage], begin: float, end: float, made: Specification | None, source: str, notes: list[str]
) -> Period:
    """With the cluster file's GPUs, as if all had been there all the time."""
    hours = (end - begin) / 3600
    if made is None:
        return Period(usages, begin, end, source=source, notes=notes)
    capacity = sum(pool.gpus for pool in made.pools) * hours
    cost = sum(pool.gpus * pool.price for pool in made.pools) * hours
    return Period(usages, begin, end, capacity, cost, made.currency, source, notes)


def _pool(made: Specification | None, partition: str) -> Pool | None:
    return next((pool for pool in made.pools if pool.name == partition), None) if made else None


def gpus_of(tres: str, pool: Pool | None) -> float:
    """Whole GPUs of an AllocTRES; slices, shards and percents of MPS as the pool has them."""
    amounts = {}
    for name, amount in re.findall(r"(gres/[^=,]+)=(\d+)", tres):
        amounts[name] = int(amount)
    replicas = pool.sharing.replicas if pool else 0
    if "gres/shard" in amounts:
        return amounts["gres/shard"] / replicas if replicas else 0.0
    if "gres/mps" in amounts:
        return amounts["gres/mps"] / 100
    whole = amounts.get("gres/gpu", sum(many for name, many in amounts.items() if name.startswith("gres/gpu:")))
    return whole / replicas if replicas and pool and pool.sharing.mode == "mig" else float(whole)


def _moment(path: Path, line: int, text: str) -> float | None:
    if text in ("", "Unknown", "None", "N/A"):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise TraceError(
            f"{path}:{line}: '{text}' is no time; expected one such as 2026-11-01T12:00:00, or Unknown"
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
