"""A run as files: ``jobs.parquet``, ``events.parquet`` and ``summary.json`` in a folder, all or none."""

from __future__ import annotations

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

from weft.cluster.order import find as find_order
from weft.cluster.simulate import REASONS, Result

JOBS, EVENTS, SUMMARY = FILES = ("jobs.parquet", "events.parquet", "summary.json")  # written in this order
WHAT = ("completion", "arrival", "start")


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
            for name, table in ((JOBS, jobs_table), (EVENTS, events_table)):
                parquet.write_table(pyarrow.table(table(result)), work / name, compression="zstd")
            (work / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            for name in FILES:
                with open(work / name, "rb") as file:
                    os.fsync(file.fileno())
            _refuse_others(folder)  # another run may have ended meanwhile
            for name in FILES:
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
    """A column for each of ``Jobs``, in its units, so that the file is itself a trace (``--format parquet``); then ``start``,
    ``end`` and ``wait`` (seconds; null of a job that did not start), ``wait_REASON`` (seconds), ``nodes`` (a name for each
    piece), ``gpus_on`` where the placement chooses GPUs (a bit for each GPU of that node), and ``unschedulable`` (why)."""
    pyarrow = _pyarrow()
    jobs, ran = result.jobs, ~np.isnan(result.start)
    columns: dict[str, Any] = {"id": [str(name) for name in jobs.id]}
    columns |= {name: getattr(jobs, name) for name in jobs.columns() if name not in ("types", "tenant")}
    columns["types"] = _named(jobs.types, ["|".join(kinds) for kinds in jobs.type_sets])
    columns["tenant"] = _named(jobs.tenant, jobs.tenants)
    for name, values in (("start", result.start), ("end", result.end), ("wait", result.start - jobs.submit)):
        columns[name] = pyarrow.array(values, mask=~ran)
    columns |= {f"wait_{name}": result.waited[:, i] for i, name in enumerate(REASONS)}

    count = np.where(ran, np.diff(result.slot), 0)
    there = np.repeat(ran, np.diff(result.slot))
    offsets = pyarrow.array(np.concatenate(([0], np.cumsum(count))), pyarrow.int32())

    def pieces(values: Any) -> Any:
        return pyarrow.ListArray.from_arrays(offsets, values, mask=pyarrow.array(~ran))

    columns["nodes"] = pieces(_named(result.where[: len(there)][there], result.cluster.names))
    if len(result.on):
        columns["gpus_on"] = pieces(pyarrow.array(result.on[: len(there)][there]))
    never = [result.unschedulable.get(j) for j in range(len(jobs))] if result.unschedulable else [None] * len(jobs)
    columns["unschedulable"] = pyarrow.array(never, pyarrow.string())
    return columns


def events_table(result: Result) -> dict[str, Any]:
    """``time`` (seconds), ``what`` (arrival, start or completion), ``job`` (its id) and ``row`` (its row in jobs.parquet).

    At one moment jobs complete, then jobs arrive, then the queue's jobs start in its order. Jobs of no duration start and
    complete one by one before the others start, so that playing the events back never takes more than there is.
    """
    pyarrow = _pyarrow()
    jobs, ran = result.jobs, np.flatnonzero(~np.isnan(result.start))
    rank = find_order(result.order)[0].rank(jobs).astype(np.int64)
    every, moment = np.arange(len(jobs)), result.end == result.start
    row = np.concatenate((ran, every, ran))
    what = np.repeat(np.arange(3, dtype=np.int8), (len(ran), len(jobs), len(ran)))
    time = np.concatenate((result.end[ran], jobs.submit, result.start[ran]))
    phase = np.concatenate((np.where(moment[ran], 2, 0), np.full(len(jobs), 1), np.where(moment[ran], 2, 3)))
    within = np.concatenate((np.where(moment[ran], 2 * rank[ran] + 1, ran), every, 2 * rank[ran]))
    order = np.lexsort((phase << 40 | within, time))
    if not result.complete:  # what would have completed later did not happen
        last = max(result.start[ran].max(initial=-np.inf), jobs.submit[0] if len(jobs) else -np.inf)
        order = order[time[order] <= last]
    row = row[order]
    names = pyarrow.array([str(name) for name in jobs.id], pyarrow.string())
    return {
        "time": time[order],
        "what": _named(what[order], WHAT),
        "job": names.take(pyarrow.array(row)),
        "row": row.astype(np.int32),
    }


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
            f"{folder} holds another run ({', '.join(there)}); name another folder, or remove these files first"
        )


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[list[Path]]:
    """The folder and those above it are made where they are missing, and on a failure removed again. Yields the new ones."""
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
