"""Reading traces: what a format is, and how a table becomes jobs."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft import words
from weft.cluster.files.columns import LARGEST, Columns, seconds
from weft.cluster.files.text import TraceError
from weft.cluster.model import Jobs
from weft.cluster.plugins import discover
from weft.definition import UnknownName

SINCE_1970 = 1e8  # seconds; later submissions count from 1970


@dataclass(frozen=True)
class Format:
    """A trace format. Every module of ``weft.cluster.traces`` has one, under the name ``FORMAT``.

    Args:
        name: what users call it.
        load: ``(path, **options) -> Jobs``.
        meaning: one line: where it comes from, its columns and units.
        options: keywords that ``load`` takes beside the path.
    """

    name: str
    load: Callable[..., Jobs]
    meaning: str
    options: tuple[str, ...] = ()


def formats() -> dict[str, Format]:
    return discover("weft.cluster.traces", "FORMAT")


def load(
    path: str | Path,
    format: str,
    where: Mapping[str, str] | None = None,
    limit: int | None = None,
    since: str = "",
    until: str = "",
    **options: Any,
) -> Jobs:
    """The jobs of a trace file, plain or gzip'd.

    Args:
        format: ``tiresias``, ``helios`` …
        where: keep only jobs of one tenant: ``{"vc": "vcvGl"}`` (also ``tenant``, ``user``, ``queue``).
        limit: keep only this many jobs, the first submitted.
        since, until: leave out, and count, jobs that are submitted before, and from then on: a time after the trace's first
            submission, such as ``2d``, ``36h``, ``90min`` or ``7200``, or a date of a trace with dates.
        options: what the format takes beside the path, such as ``columns={"gpus": "gpu_num"}`` of ``csv``.

    Raises:
        TraceError: the file's content is wrong, two jobs have the same id, or there is none; no row is guessed at.
        UnknownName: no such format, or it has no such option.
        ValueError: ``since`` or ``until`` is no time; a date, and the trace has none.
    """
    known = formats()
    if format not in known:
        raise UnknownName("trace format", format, known)
    for option in options:
        if option not in known[format].options:
            raise UnknownName(f"option of trace format '{format}'", option, known[format].options)
    jobs = known[format].load(Path(path), **options)
    named_once(path, jobs.id)
    begin, end = (moment(text, jobs) if text else inf for text, inf in ((since, -np.inf), (until, np.inf)))
    if begin >= end:
        raise ValueError(f"jobs from '{since}' until '{until}'; expected an end after the beginning")
    for name, value in (where or {}).items():
        if name not in ("vc", "tenant", "user", "queue"):
            raise UnknownName("column to choose jobs by", name, ("vc", "tenant", "user", "queue"))
        if value not in jobs.tenants:
            raise UnknownName(name, value, jobs.tenants)
        jobs = jobs.take(jobs.tenant == jobs.tenants.index(value))
    outside = {f"submitted before {since}": jobs.submit < begin, f"submitted from {until} on": jobs.submit >= end}
    jobs.dropped |= {why: int(rows.sum()) for why, rows in outside.items() if rows.any()}
    jobs = jobs.take((jobs.submit >= begin) & (jobs.submit < end))
    if limit is not None:
        jobs = jobs.take(np.arange(min(limit, len(jobs))))
    if not len(jobs):
        raise TraceError(f"{path}: no jobs are left to simulate ({_dropped(jobs)})")
    return jobs


def _dropped(jobs: Jobs) -> str:
    return ", ".join(f"{count} dropped: {why}" for why, count in jobs.dropped.items()) or "the file has none"


def named_once(path: str | Path, ids: Sequence[Any], lines: Sequence[int] | NDArray[np.int64] = ()) -> None:
    """Checks that no two jobs have the same id.

    Args:
        lines: of each, for the message.

    Raises:
        TraceError: two have.
    """
    if isinstance(ids, range) or len(set(ids)) == len(ids):
        return
    first: dict[Any, int] = {}
    for k, name in enumerate(ids):
        if first.setdefault(name, k) != k:
            at, other = (f":{lines[k]}", f" (line {lines[first[name]]})") if len(lines) else ("", "")
            raise TraceError(f"{path}{at}: id '{name}' already exists{other}; expected another for each job")


def names(column: Iterable[str]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Words as indices into the distinct ones, in order of first appearance."""
    known: dict[str, int] = {}
    index = np.array([known.setdefault(word, len(known)) for word in column], np.int64)
    return index, tuple(known) or ("",)


def accepted(column: Iterable[str]) -> tuple[NDArray[np.int64], tuple[tuple[str, ...], ...]]:
    """Accelerator types that jobs accept, alternatives separated by ``|``, as the ``types`` and ``type_sets`` of
    ``Jobs``."""
    known: dict[tuple[str, ...], int] = {(): 0}
    index = np.array(
        [known.setdefault(tuple(filter(None, (t.strip() for t in text.split("|")))), len(known)) for text in column],
        np.int64,
    )
    return index, tuple(known)


def or_zero(column: NDArray[np.float64]) -> NDArray[np.float64]:
    """0 where nothing is known."""
    return np.where(np.isnan(column), 0.0, column)


def earliest(submit: NDArray[np.float64]) -> float:
    """The first submission of a trace with dates; NaN of none."""
    known = submit[~np.isnan(submit)]
    return float(known.min()) if len(known) else np.nan


def moment(text: str, jobs: Jobs) -> float:
    """The second of a trace that a time after its first submission (:func:`weft.words.seconds`) or a date says."""
    first = float(jobs.submit.min()) if len(jobs) else 0.0
    with contextlib.suppress(ValueError):
        return first + words.seconds(text)
    try:
        date = seconds(text)
    except ValueError:
        date = np.nan
    epoch = 0.0 if first > SINCE_1970 else jobs.epoch
    if np.isnan(date + epoch):
        why = "; the trace has no dates" if date == date else ""
        expected = "expected a time after the first submission, such as 2d, 36h, 90min or 7200"
        raise ValueError(f"time '{text}'{why}; {expected}" + ("" if why else ", or a date such as 2017-10-09T07:00"))
    return date - epoch


def jobs_of(
    table: Columns,
    submit: Any,
    duration: Any,
    gpus: Any,
    leave_out: Any = None,
    cpu_only: Any = False,
    dated: Any = False,
    **more: Any,
) -> Jobs:
    """Jobs of a table's columns. Rows without a time, or with no GPU unless they are ``cpu_only`` (all, or a mask), are
    dropped and counted by reason. A job with an empty id gets its number, counted from 0, as all do where none has
    one.

    Args:
        dated: the submissions are seconds since 1970; those of the jobs count from the first.
        leave_out: a mapping of reason → rows (a mask) to drop before all others; the first reason that applies counts.

    Raises:
        TraceError: a time or a number of GPUs below 0 or infinite, a job that is none, or an id that already exists,
        with the
            line or the job's name.
    """
    submit, duration, gpus = (np.array(column, np.float64) for column in (submit, duration, gpus))
    epoch = earliest(submit) if dated else np.nan
    submit = submit - epoch if dated and not np.isnan(epoch) else submit
    out = np.zeros(len(submit), bool)
    dropped = Counter[str]()
    for why, rows in (leave_out or {}).items():
        dropped[why] = int((rows & ~out).sum())
        out |= rows
    for column in (submit, duration, gpus):
        column[out] = 0.0
    for name, column in (("the submission", submit), ("the duration", duration), ("the number of GPUs", gpus)):
        if len(bad := np.flatnonzero(column < 0)):
            raise TraceError(f"{table.path}:{table.lines[bad[0]]}: {name} is {column[bad[0]]:g}; expected 0 or more")
    if len(bad := np.flatnonzero((gpus != np.floor(gpus)) & ~np.isnan(gpus) | (gpus >= LARGEST))):
        raise TraceError(f"{table.path}:{table.lines[bad[0]]}: {gpus[bad[0]]:g} GPUs; expected a whole number")
    untimed = np.isnan(submit) | np.isnan(duration)
    none = (np.isnan(gpus) | (gpus == 0) & ~np.asarray(cpu_only, bool)) & ~out
    keep = ~(untimed | none | out)
    dropped.update({"no submission or duration": int(untimed.sum()), "no GPU": int((none & ~untimed).sum())})
    picked: dict[str, Any] = {
        name: [column[i] or str(k) for k, i in enumerate(np.flatnonzero(keep))]
        if name == "id"
        else np.asarray(column)[keep]
        for name, column in more.items()
        if name not in ("tenants", "type_sets")
    }
    named_once(table.path, picked.get("id", ()), table.lines[keep])
    for name, column in picked.items():
        if name != "id" and len(bad := np.flatnonzero(~(np.abs(column) < LARGEST))):
            line = table.lines[np.flatnonzero(keep)[bad[0]]]
            raise TraceError(f"{table.path}:{line}: {name} is {column[bad[0]]}; expected a finite number")
    picked |= {name: more[name] for name in ("tenants", "type_sets") if name in more}
    try:
        jobs = Jobs(submit[keep], duration[keep], gpus[keep].astype(np.int64), **picked)
    except ValueError as error:  # it names the job
        raise TraceError(f"{table.path}: {error}") from None
    if table.broken:
        where = f"line {table.broken[0]:,}" + (f" and {len(table.broken) - 1:,} more" if len(table.broken) > 1 else "")
        dropped[f"not as many cells as the header ({where}); leave out columns of free text"] = len(table.broken)
    jobs.dropped = {why: count for why, count in dropped.items() if count}
    jobs.generated, jobs.epoch = table.generated, epoch
    if table.guessed:
        jobs.warnings = (f"the file is not in UTF-8; it was read as {table.guessed}",)
    return jobs
