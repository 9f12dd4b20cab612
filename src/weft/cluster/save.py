"""A run as files: ``jobs.parquet``, ``events.parquet`` and ``summary.json`` in a folder, all or none."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.files.trace_writer import about
from weft.cluster.model import Jobs
from weft.cluster.policy import find_order
from weft.cluster.result import REASONS, Result

JOBS, EVENTS, STRETCHES, SUMMARY = FILES = (
    "jobs.parquet",
    "events.parquet",
    "stretches.parquet",  # of an order that preempts
    "summary.json",
)  # written in this order
WHAT = ("completion", "arrival", "stop", "start")


def check(folder: str | Path) -> None:
    """Raises what :func:`write` would, before anything is simulated; nothing is left behind.

    Raises:
        ValueError: another run's files are there.
        OSError: the folder cannot be written.
        ImportError: no PyArrow.
    """
    _pyarrow()
    folder = Path(folder)
    with _made(folder) as new:
        _refuse_others(folder)
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b" " * 4096)
        except OSError as error:
            raise OSError(f"a run cannot be saved in {folder}: {error.strerror}") from None
        _remove(new)


def write(folder: str | Path, result: Result, summary: dict[str, Any]) -> Path:
    """Saves a run. The files are written under another name and renamed when all are whole.

    Args:
        summary: of :func:`weft.cluster.metrics.summary`.

    Raises:
        ValueError: another run's files are there.
        OSError: a full disk, a folder that cannot be written; none of the files is left then.
        ImportError: no PyArrow.
    """
    pyarrow = _pyarrow()
    from pyarrow import parquet

    folder = Path(folder)
    with _made(folder):
        _refuse_others(folder)
        work, placed = Path(tempfile.mkdtemp(dir=folder, prefix=".weft-")), []
        try:
            tables = {JOBS: jobs_table, EVENTS: events_table}
            if find_order(result.order)[0].preemptive:
                tables[STRETCHES] = stretches_table
            for name, table in tables.items():
                made = pyarrow.table(table(result), metadata=about(result.jobs))
                parquet.write_table(made, work / name, compression="zstd")
            (work / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            there = [name for name in FILES if (work / name).exists()]
            for name in there:
                with open(work / name, "rb") as file:
                    os.fsync(file.fileno())
            _refuse_others(folder)  # another run may have ended meanwhile
            for name in there:
                os.replace(work / name, folder / name)
                placed.append(folder / name)
        except BaseException as error:
            for path in placed:
                path.unlink()
            if isinstance(error, OSError):
                raise OSError(f"the run was not saved in {folder}: {error.strerror or error}") from None
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


# ---- tables ----------------------------------------------------------------------------------------------------------


def jobs_table(result: Result) -> dict[str, Any]:
    """A column for each of ``Jobs``, in its units, so that the file is itself a trace (``--format parquet``); then
    ``start``, ``end`` and ``wait`` (seconds; null of a job that did not run), ``wait_REASON`` (seconds), ``stops`` and
    ``lost`` (how often it was stopped, and seconds lost by it), ``nodes`` (a name for each piece of its last stretch),
    ``gpus_on`` where the placement chooses GPUs (a bit for each GPU of that node), and ``unschedulable`` (why)."""
    pyarrow = _pyarrow()
    jobs, ran, held = result.jobs, result.ran, result.stretches
    columns: dict[str, Any] = {"id": _ids(jobs)}
    columns |= {name: getattr(jobs, name) for name in jobs.columns() if name not in ("types", "tenant")}
    columns["types"] = _named(jobs.types, ["|".join(kinds) for kinds in jobs.type_sets])
    columns["tenant"] = _named(jobs.tenant, jobs.tenants)
    for name, values in (("start", result.start), ("end", result.end), ("wait", result.queueing)):
        columns[name] = pyarrow.array(values, mask=~ran)
    columns |= {f"wait_{name}": result.waited[:, i] for i, name in enumerate(REASONS)}
    columns |= {"stops": result.stops, "lost": result.lost}

    last = np.append(held.job[1:] != held.job[:-1], np.ones(min(len(held), 1), bool)) & ran[held.job]
    count = np.zeros(len(jobs), np.int64)
    count[held.job[last]] = np.diff(held.slot)[last]
    there = np.repeat(last, np.diff(held.slot))
    columns["nodes"] = _lists(_named(held.where[there], result.cluster.names), count, ~ran)
    if len(held.on):
        columns["gpus_on"] = _lists(pyarrow.array(held.on[there]), count, ~ran)
    never = [result.unschedulable.get(j) for j in range(len(jobs))] if result.unschedulable else [None] * len(jobs)
    columns["unschedulable"] = pyarrow.array(never, pyarrow.string())
    return columns


def stretches_table(result: Result) -> dict[str, Any]:
    """When jobs held which nodes: ``job`` (its id) and ``row`` (its row in jobs.parquet), ``begin`` and ``end``
    (seconds), ``nodes`` (a name for each piece), and whether it was ``stopped`` then."""
    pyarrow = _pyarrow()
    held = result.stretches
    return {
        "job": pyarrow.array(_ids(result.jobs), pyarrow.string()).take(pyarrow.array(held.job)),
        "row": held.job.astype(np.int32),
        "begin": held.begin,
        "end": held.end,
        "nodes": _lists(_named(held.where, result.cluster.names), np.diff(held.slot)),
        "stopped": result.stopped,
    }


def events_table(result: Result) -> dict[str, Any]:
    """``time`` (seconds), ``what`` (arrival, start, stop, completion), ``job`` (its id) and ``row`` (its row in
    jobs.parquet).

    At one time jobs complete, then jobs arrive, then jobs are preempted, then the queue's jobs start in its order. A job
    that starts and ends at one time does so before the others start, so that replaying the events never takes
    more than there is.
    """
    pyarrow = _pyarrow()
    jobs, held = result.jobs, result.stretches
    rank = find_order(result.order)[0].rank(jobs).astype(np.int64)
    rows, every = np.flatnonzero(~np.isnan(held.begin)), np.arange(len(jobs))
    job, begin, end = held.job[rows], held.begin[rows], held.end[rows]
    last, moment = np.where(result.stopped[rows], 2, 0), begin == end
    row = np.concatenate((job, every, job))
    what = np.concatenate((last, np.full(len(jobs), 1), np.full(len(rows), 3))).astype(np.int8)
    time = np.concatenate((end, jobs.submit, begin))
    phase = np.concatenate((np.where(moment, 3, last), np.full(len(jobs), 1), np.where(moment, 3, 4)))
    within = np.concatenate((np.where(moment, 2 * rank[job] + 1, job), every, 2 * rank[job]))
    order = np.lexsort((phase << 40 | within, time))
    if not result.complete:  # what would have completed later did not happen
        latest = max(begin.max(initial=-np.inf), jobs.submit[0] if len(jobs) else -np.inf)
        order = order[time[order] <= latest]
    row = row[order]
    return {
        "time": time[order],
        "what": _named(what[order], WHAT),
        "job": pyarrow.array(_ids(jobs), pyarrow.string()).take(pyarrow.array(row)),
        "row": row.astype(np.int32),
    }


def _ids(jobs: Jobs) -> list[str]:
    return [str(name) for name in jobs.id]


def _lists(values: Any, count: NDArray[np.int64], absent: NDArray[np.bool_] | None = None) -> Any:
    """Values cut into lists of ``count`` each; null where absent."""
    pyarrow = _pyarrow()
    offsets = pyarrow.array(np.concatenate(([0], np.cumsum(count))), pyarrow.int32())
    return pyarrow.ListArray.from_arrays(offsets, values, mask=None if absent is None else pyarrow.array(absent))


def _named(index: NDArray[Any], names: Any) -> Any:
    pyarrow = _pyarrow()
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(index.astype(np.int32)), pyarrow.array(names, pyarrow.string())
    )


# ---- the folder ------------------------------------------------------------------------------------------------------


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f"saving needs PyArrow: pip install 'weft[parquet]' ({error})", name="pyarrow") from None
    return pyarrow


def _refuse_others(folder: Path) -> None:
    if there := [name for name in FILES if (folder / name).exists()]:
        raise ValueError(
            f"{folder} already has another run ({', '.join(there)}); name another folder, or remove these files first"
        )


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[list[Path]]:
    """The folder and those above it are made where they are missing, and on a failure removed again. Yields the new
    ones."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"a run cannot be saved in {folder}: {error.strerror}") from None
        yield new
    except BaseException:
        _remove(new)
        raise


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # someone else put something there
            folder.rmdir()
