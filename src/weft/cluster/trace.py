"""Reading traces: what a format is, how a file is read, and the errors that name file, line and column."""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.file import TraceError, text_of
from weft.cluster.model import Jobs
from weft.cluster.plugins import discover
from weft.definition import UnknownName

LARGEST = 2.0**62  # no count, time or size is; it fits the whole numbers of Jobs


@dataclass(frozen=True)
class Format:
    """A trace format. Every module of ``weft.cluster.traces`` has one, under the name ``FORMAT``.

    Args:
        name: what users call it.
        load: ``(path, **options) -> Jobs``.
        meaning: one line: whose it is, its columns and units.
        options: keywords that ``load`` takes beside the path.
    """

    name: str
    load: Callable[..., Jobs]
    meaning: str
    options: tuple[str, ...] = ()


def formats() -> dict[str, Format]:
    from weft.cluster import traces

    return discover(traces.__name__, traces.__path__, "FORMAT")


def load(
    path: str | Path, format: str, where: Mapping[str, str] | None = None, limit: int | None = None, **options: Any
) -> Jobs:
    """The jobs of a trace file, plain or gzip'd.

    Args:
        format: ``tiresias``, ``helios`` …
        where: keep only jobs of one tenant: ``{"vc": "vcvGl"}`` (also ``tenant``, ``user``, ``queue``).
        limit: keep only so many jobs, the first submitted.
        options: what the format takes beside the path, such as ``columns={"gpus": "gpu_num"}`` of ``csv``.

    Raises:
        TraceError: what stands in the file is wrong; no row is guessed at.
        UnknownName: no such format, or it has no such option.
    """
    known = formats()
    if format not in known:
        raise UnknownName("trace format", format, known)
    for option in options:
        if option not in known[format].options:
            raise UnknownName(f"option of trace format '{format}'", option, known[format].options)
    jobs = known[format].load(Path(path), **options)
    for name, value in (where or {}).items():
        if name not in ("vc", "tenant", "user", "queue"):
            raise UnknownName("column to choose jobs by", name, ("vc", "tenant", "user", "queue"))
        if value not in jobs.tenants:
            raise UnknownName(name, value, jobs.tenants)
        jobs = jobs.take(jobs.tenant == jobs.tenants.index(value))
    if limit is not None:
        jobs = jobs.take(np.arange(min(limit, len(jobs))))
    if not len(jobs):
        raise TraceError(f"{path}: no jobs are left to simulate ({_dropped(jobs)})")
    return jobs


def _dropped(jobs: Jobs) -> str:
    return ", ".join(f"{count} dropped: {why}" for why, count in jobs.dropped.items()) or "the file has none"


@dataclass
class Columns:
    """Wanted columns of a delimited file.

    Args:
        path: for messages.
        numbers: column → values.
        words: column → values.
        lines: the line that each row begins at.
    """

    path: Path
    numbers: dict[str, NDArray[np.float64]]
    words: dict[str, list[str]]
    lines: NDArray[np.int64]
    names: Sequence[str] = field(default_factory=tuple)

    def wrong(self, row: int, column: str, expected: str) -> TraceError:
        value = self.numbers[column][row] if column in self.numbers else f"'{self.words[column][row]}'"
        return TraceError(f"{self.path}:{self.lines[row]}: {column} is {value}; expected {expected}")

    def times(self, column: str) -> NDArray[np.float64]:
        """A column of words as seconds, each given as seconds or as a date (see :func:`seconds`); NaN where it is empty."""
        found = np.empty(len(self.lines))
        for row, text in enumerate(self.words[column]):
            try:
                found[row] = float(text) if text.replace(".", "", 1).isdigit() else seconds(text)
            except ValueError:
                raise self.wrong(row, column, "seconds or a date") from None
        return found

    def amounts(self, column: str) -> NDArray[np.float64]:
        """A column of numbers that must all be there, 0 or more.

        Raises:
            TraceError: the first that is not.
        """
        values = self.numbers[column]
        if len(
            bad := np.flatnonzero(~((values >= 0) & (values < LARGEST / 1024)))
        ):  # GiB, cores: they become MiB and thousandths
            raise self.wrong(int(bad[0]), column, "a number of 0 or more")
        return values

    def whole(self, column: str, least: int = 0) -> NDArray[np.float64]:
        """A column of numbers, checked to be whole and no less than that where there is a value.

        Raises:
            TraceError: the first that is not.
        """
        values = self.numbers[column]
        if len(
            bad := np.flatnonzero(
                (values != np.floor(values)) & ~np.isnan(values) | (values < least) | (values >= LARGEST)
            )
        ):
            raise self.wrong(int(bad[0]), column, f"a whole number of {least} or more")
        return values


def read(
    path: Path,
    numbers: Sequence[str] = (),
    words: Sequence[str] = (),
    *,
    optional: Sequence[str] = (),
    header: Sequence[str] | None = None,
    called: Mapping[str, str] | None = None,
    delimiter: str = ",",
    comment: str = "#",
) -> Columns:
    """Reads the wanted columns of a delimited text file; empty cells of numbers are NaN.

    Args:
        optional: of the wanted columns, those that may be missing.
        header: the columns' names where the file has no line of them, or may have none.
        called: wanted column → what it is called in the file, where that is something else.

    Raises:
        TraceError: a missing column, a row of another length, a cell that is no number.
    """
    rows = _rows(text_of(path), delimiter, comment)
    names = list(header) if header else [name.strip() for name in next(rows, (0, []))[1]]
    places = [(name, names.index(there)) for name, there in present(path, names, (*numbers, *words), optional, called)]
    values: dict[str, Any] = {name: array("d") if name in numbers else [] for name, _ in places}
    lines = array("q")
    for line, row in rows:
        if header and not lines and [cell.strip() for cell in row] == names:
            continue
        if len(row) != len(names):
            raise TraceError(f"{path}:{line}: {len(row)} columns; expected {len(names)} ({', '.join(names)})")
        lines.append(line)
        for name, place in places:
            cell = row[place].strip()
            if name in words:
                values[name].append(cell)
                continue
            try:
                values[name].append(float(cell) if cell else math.nan)
            except ValueError:
                raise TraceError(f"{path}:{line}: {name} is '{cell}'; expected a number") from None
    return Columns(
        path,
        {name: np.frombuffer(values[name]) if len(lines) else np.zeros(0) for name in numbers if name in values},
        {name: values[name] for name in words if name in values},
        np.frombuffer(lines, np.int64) if len(lines) else np.zeros(0, np.int64),
        names,
    )


def present(
    path: Path,
    names: Sequence[str],
    wanted: Sequence[str],
    optional: Sequence[str] = (),
    called: Mapping[str, str] | None = None,
) -> list[tuple[str, str]]:
    """Each wanted column that the file has, and its name there.

    Raises:
        TraceError: one is missing that is not optional, or that ``called`` names.
    """
    called = called or {}
    if missing := [
        name for name in wanted if called.get(name, name) not in names and (name in called or name not in optional)
    ]:
        sought = ", ".join(f"{called[name]} (for {name})" if name in called else name for name in missing)
        raise TraceError(f"{path}: column {sought} is missing (there are: {', '.join(names) or 'none'})")
    return [(name, called.get(name, name)) for name in wanted if called.get(name, name) in names]


def _rows(text: io.TextIOBase, delimiter: str, comment: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(text, delimiter=delimiter)
    for row in reader:
        if row and any(cell.strip() for cell in row) and not row[0].startswith(comment):
            yield reader.line_num, row


def seconds(text: str) -> float:
    """Seconds since 1970 of ``2017-10-09 07:01:55`` (with or without an offset; UTC without one), or NaN of an empty cell."""
    if not text or text in ("None", "NULL", "nan"):
        return math.nan
    at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()


def names(column: Iterable[str]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Words as indices into the distinct ones, in order of first appearance."""
    known: dict[str, int] = {}
    index = np.array([known.setdefault(word, len(known)) for word in column], np.int64)
    return index, tuple(known) or ("",)


def accepted(column: Iterable[str]) -> tuple[NDArray[np.int64], tuple[tuple[str, ...], ...]]:
    """Accelerator types that jobs accept, alternatives separated by ``|``, as the ``types`` and ``type_sets`` of ``Jobs``."""
    known: dict[tuple[str, ...], int] = {(): 0}
    index = np.array(
        [known.setdefault(tuple(filter(None, (t.strip() for t in text.split("|")))), len(known)) for text in column],
        np.int64,
    )
    return index, tuple(known)


def or_zero(column: NDArray[np.float64]) -> NDArray[np.float64]:
    """0 where nothing is known."""
    return np.where(np.isnan(column), 0.0, column)


def since_first(submit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds since the first submission, for traces that have dates."""
    known = submit[~np.isnan(submit)]
    return submit - known.min() if len(known) else submit


def jobs_of(
    table: Columns,
    submit: Any,
    duration: Any,
    gpus: Any,
    leave_out: Any = None,
    cpu_only: Any = False,
    **more: Any,
) -> Jobs:
    """Jobs of a table's columns. Rows without a time, or with no GPU unless ``cpu_only``, are dropped and counted by reason.

    Args:
        leave_out: a mapping of reason → rows (a mask) to drop before all others; the first reason that applies counts.

    Raises:
        TraceError: a time or a number of GPUs below 0 or infinite, or a job that is none, with its line or the job's name.
    """
    submit, duration, gpus = (np.array(column, np.float64) for column in (submit, duration, gpus))
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
    none = (np.isnan(gpus) | (not cpu_only) & (gpus == 0)) & ~out
    keep = ~(untimed | none | out)
    dropped.update({"no submission or duration": int(untimed.sum()), "no GPU": int((none & ~untimed).sum())})
    picked: dict[str, Any] = {
        name: [column[i] for i in np.flatnonzero(keep)] if name == "id" else np.asarray(column)[keep]
        for name, column in more.items()
        if name not in ("tenants", "type_sets")
    }
    for name, column in picked.items():
        if name != "id" and len(bad := np.flatnonzero(~(np.abs(column) < LARGEST))):
            line = table.lines[np.flatnonzero(keep)[bad[0]]]
            raise TraceError(f"{table.path}:{line}: {name} is {column[bad[0]]}; expected a finite number")
    picked |= {name: more[name] for name in ("tenants", "type_sets") if name in more}
    try:
        jobs = Jobs(submit[keep], duration[keep], gpus[keep].astype(np.int64), **picked)
    except ValueError as error:  # it names the job
        raise TraceError(f"{table.path}: {error}") from None
    jobs.dropped = {why: count for why, count in dropped.items() if count}
    return jobs
