"""Measurements, and the store that packages which measure write to and others read from.

``results/<gpu>/<operator>.jsonl`` holds one measurement a line, ``results/<gpu>/runs.jsonl`` what the measurements of a
run share: machine, versions, ceilings, commit, time. While a bench runs it appends complete lines, each flushed to
disk, so an interrupted run leaves valid records; :meth:`Store.compact` then keeps the newest of each point in the short
form.
"""

import contextlib
import json
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

SCHEMA = 1
RUNS = "runs"  # the file of runs
CEILING = "ceiling"  # the operator of a ceiling's measurement
RANDOM = "random time"  # the metric of random points, of which the newest run is kept
SHARED = ("time", "commit", "gpu", "device", "machine", "versions")  # fields that the measurements of a run share


@dataclass
class Measurement:
    """One implementation of one operator, timed on one workload.

    Times are in microseconds. ``share_of_ceiling`` is the time that the compulsory work takes at this machine's
    measured ceiling, divided by the median time. ``ratio_to_best_peer`` is the best peer's time divided by this one's,
    paired within the run: above 1 this one is faster. It is ``None`` for a peer, and where no peer ran.
    """

    operator: str
    implementation: str
    direction: str
    workload: str
    dtype: str
    time_us: float
    ours: bool = False
    metric: str = "time"
    unit: str = "us"
    cache: str = "cold"  # "cold": L2 flushed before each call; "warm": not
    time_p20_us: float | None = None
    time_p80_us: float | None = None
    repetitions: int = 0
    host_us: float | None = None
    limit_us: float | None = None  # what the compulsory work takes at the measured ceiling
    limit_name: str | None = None  # which ceiling: "memory 1:1", "bf16 matrix", …
    share_of_ceiling: float | None = None
    ratio_to_best_peer: float | None = None
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    best_peer: str | None = None
    bytes_moved: int | None = None
    flops: float | None = None
    peak_memory_mib: float | None = None
    error: float | None = None  # largest error against float64, as a share of what is allowed
    device: str = "cuda"
    gpu: str = ""
    machine: dict[str, Any] = field(default_factory=dict)  # clocks, power, throttle reasons, driver
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    run: str = ""  # the id of all that was measured side by side
    time: str = ""
    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Measurement":
        """Reads a record of this or an earlier schema; unknown fields are dropped.

        Raises:
            ValueError: a field is missing or has another type, a time is not above 0, or a later weft wrote the record.
        """
        known = {f.name: f for f in fields(cls)}
        given = {key: value for key, value in data.items() if key in known}
        for name, f in known.items():
            expected = _TYPES[f.type]
            if name in given and (
                not isinstance(given[name], expected) or isinstance(given[name], bool) != (f.type is bool)
            ):
                raise ValueError(
                    f"field '{name}' is {given[name]!r:.40}; expected {getattr(f.type, '__name__', f.type)}"
                )
        if missing := [f.name for f in list(known.values())[:6] if f.name not in given]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        made = cls(**given)
        if made.schema > SCHEMA:
            raise ValueError(f"its schema is {made.schema}; this weft reads up to {SCHEMA}")
        if made.metric == "time" and made.operator != CEILING and not 0 < made.time_us < float("inf"):
            raise ValueError(f"time_us is {made.time_us}; expected microseconds above 0")
        return made


def ceiling(name: str, metric: str, value: float, unit: str, **context: Any) -> Measurement:
    """One of a machine's measured ceilings as a record: ``"memory 1:1", "bandwidth", 4.3e12, "B/s"``."""
    return Measurement.from_dict(
        {
            **context,
            "operator": CEILING,
            "implementation": name,
            "direction": "forward",
            "workload": name,
            "dtype": "",
            "time_us": 0.0,
            "metric": metric,
            "unit": unit,
            "cache": "cold" if context.get("device") == "cuda" else "warm",
            "details": {"value": value, "unit": unit},
        }
    )


_NUMBER: tuple[type, ...] = (int, float)
_TYPES: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: _NUMBER,
    str | None: (str, type(None)),
    int | None: (int, type(None)),
    float | None: (*_NUMBER, type(None)),
    dict[str, Any]: (dict,),
    dict[str, str]: (dict,),
}


def check_writable(folder: Path, problem: str) -> None:
    """Makes a folder and raises OSError, with a message that begins with ``problem``, where 4 KiB cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b" " * 4096)
    except OSError as error:
        raise OSError(f"{problem}: {error.strerror}") from None


class Store:
    """A folder of records, one folder in it for each machine.

    Args:
        root: the folder; without it the environment variable ``WEFT_RESULTS``, else ``results``.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None):
        self.root = Path(root or os.environ.get("WEFT_RESULTS") or "results")

    def path(self, gpu: str, name: str) -> Path:
        return self.root / slug(gpu) / f"{name}.jsonl"

    def append(self, gpu: str, name: str, line: Measurement | dict[str, Any]) -> Path:
        """Appends one line and flushes it to disk. A line that a crash cut short is closed first."""
        path = self.path(gpu, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = line.to_json() if isinstance(line, Measurement) else json.dumps(line, allow_nan=False)
        with _locked(path.parent), open(path, "a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    text = "\n" + text
            file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return path

    def probe(self, gpu: str) -> None:
        """Raises OSError, before anything is measured, where this machine's records cannot be written."""
        folder = self.path(gpu, RUNS).parent
        check_writable(folder, f"records cannot be saved in {folder} (set WEFT_RESULTS to another folder)")

    def read(self, gpu: str | None = None, name: str | None = None) -> list[Measurement]:
        """All measurements, oldest first; of one machine or one operator when given. Skips invalid lines."""
        found: list[Measurement] = []
        for folder in sorted(self.root.glob(slug(gpu) if gpu else "*")):
            runs = _runs(folder)
            if name in (None, CEILING):
                found += (m for run in runs.values() for m in _ceilings(run))
            for path in sorted(folder.glob(f"{name or '*'}.jsonl")):
                found += filter(None, (_joined(path, line, runs) for line in read_lines(path)))
        return found

    def compact(self, gpu: str) -> None:
        """Keeps the newest measurement of each point of a machine, and the ceilings of their runs."""
        with _locked(self.path(gpu, RUNS).parent):
            measured = self.read(gpu)
            newest = latest(measured)
            random = max(((m.time, m.run) for m in newest if m.metric == RANDOM), default=("", ""))
            newest = [m for m in newest if m.metric != RANDOM or m.run == random[1]]
            runs = {m.run for m in newest}
            ceilings = [m for m in measured if m.operator == CEILING and m.run in runs]
            self.write(gpu, [*ceilings, *(m for m in newest if m.operator != CEILING)])

    def write(self, gpu: str, measurements: Iterable[Measurement]) -> None:
        """Replaces a machine's measurements by these, in the short form. Lines of other kinds stay.

        A line holds what is particular: fields that have their default or their run's value are left out, and floats
        have five significant digits. Of ``machine`` and ``time`` the run has what its measurements share and the
        earliest.
        """
        folder = self.path(gpu, RUNS).parent
        files: dict[str, list[Measurement]] = {}
        by_run: dict[str, list[Measurement]] = {}
        for m in measurements:
            by_run.setdefault(m.run, []).append(m)
            if m.operator != CEILING or not m.run:
                files.setdefault(m.operator, []).append(m)
        made = {run: _run(run, those) for run, those in by_run.items() if run}
        before = _runs(folder)
        _write_lines(folder / f"{RUNS}.jsonl", [*(before | made).values()])  # a crash from here on loses no run
        for path in sorted({*folder.glob("*.jsonl"), *(folder / f"{name}.jsonl" for name in files)}):
            if path.stem != RUNS:
                others = [line for line in read_lines(path) if _joined(path, line, before) is None]
                _write_lines(path, [*others, *(_short(m, made.get(m.run, {})) for m in files.get(path.stem, []))])
        _write_lines(folder / f"{RUNS}.jsonl", sorted(made.values(), key=lambda run: str(run["time"])))

    def lines(self, gpu: str | None = None, name: str | None = None) -> Iterator[dict[str, Any]]:
        """The JSON objects of one file, or of several, as they were written."""
        for path in sorted(self.root.glob(f"{slug(gpu) if gpu else '*'}/{name or '*'}.jsonl")):
            yield from read_lines(path)

    def machines(self) -> list[str]:
        return sorted(p.name for p in self.root.iterdir() if p.is_dir()) if self.root.is_dir() else []


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a machine's folder, so that no process appends while another one compacts."""
    try:
        import fcntl
    except ImportError:  # Windows, where nothing is measured
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a network file system that cannot lock a folder
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _runs(folder: Path) -> dict[str, dict[str, Any]]:
    return {str(line["run"]): line for line in read_lines(folder / f"{RUNS}.jsonl") if line.get("run")}


def _joined(path: Path, line: dict[str, Any], runs: dict[str, dict[str, Any]]) -> Measurement | None:
    """The measurement that a line of a file holds, with what its run's line says; None where it holds none."""
    try:
        return Measurement.from_dict({"operator": path.stem, **runs.get(str(line.get("run")), {}), **line})
    except ValueError:
        return None


def _ceilings(run: dict[str, Any]) -> Iterator[Measurement]:
    context = {name: run[name] for name in ("run", *SHARED) if name in run}
    for name, (metric, value, unit) in run.get("ceilings", {}).items():
        yield ceiling(name, metric, value, unit, **context)


def _run(run: str, those: list[Measurement]) -> dict[str, Any]:
    """A run's line."""
    first = min(those, key=lambda m: m.time)
    line = {"run": run, **{name: getattr(first, name) for name in SHARED}}
    line["machine"] = {k: v for k, v in first.machine.items() if all(m.machine.get(k) == v for m in those)}
    if rates := {
        m.implementation: [m.metric, _rounded(m.details["value"]), m.unit] for m in those if m.operator == CEILING
    }:
        line["ceilings"] = rates
    return line


def _short(m: Measurement, run: dict[str, Any]) -> dict[str, Any]:
    """A measurement's line, without what its run's line or the file's name says."""
    implied = {f.name: {} if f.default is MISSING else f.default for f in fields(m)}
    implied |= {name: run[name] for name in SHARED if name in run}
    line = {name: value for name, value in asdict(m).items() if value != implied[name]}
    for name in ("operator", "machine", "time") if run else ("operator",):
        line.pop(name, None)
    return {name: _rounded(value) for name, value in line.items()}


def _rounded(value: Any) -> Any:
    """Five significant digits: what a measurement is worth."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
    if not lines:
        path.unlink(missing_ok=True)
    elif not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
        write_whole(path, text)


class Saver:
    """Saves measurements as they come. The first error (a full disk, say) is stored in ``failure``; the bench
    continues."""

    def __init__(self, store: Store | None = None):
        self.store = store or Store()
        self.failure = ""
        self._machines: set[str] = set()

    def __call__(self, m: Measurement) -> None:
        if not self.failure:
            try:
                self._machines.add(m.gpu)
                self.store.append(m.gpu, m.operator, m)
            except OSError as error:
                self._failed(self.store.path(m.gpu, m.operator), error)

    def finish(self) -> None:
        """Compacts the records of each machine that was measured."""
        for gpu in self._machines if not self.failure else ():
            try:
                self.store.compact(gpu)
            except OSError as error:
                self._failed(self.store.path(gpu, RUNS), error)

    def _failed(self, path: Path, error: OSError) -> None:
        self.failure = f"{path}: {error.strerror} (set WEFT_RESULTS to another folder)"


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line. Skips invalid lines, and paths that are no regular file."""
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            return
        with open(path, encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(line, dict):
                    yield line


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file at once: a full disk or a crash leaves the old one as it was."""
    path = Path(path)
    data = text.encode("utf-8", errors="replace")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # name the file, not the temporary one
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, stat.S_IMODE(os.stat(path).st_mode) if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def latest(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The newest measurement of each point (operator … cache, machine), in order of first appearance."""
    newest: dict[tuple[str, ...], Measurement] = {}
    for m in measurements:
        key = (m.gpu, m.operator, m.implementation, m.direction, m.workload, m.dtype, m.cache, m.metric)
        newest[key] = m
    return list(newest.values())


def slug(text: str) -> str:
    """``NVIDIA H200`` → ``nvidia-h200``: a folder's name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") or "unknown"


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit() -> str:
    """The commit being measured: ``WEFT_COMMIT`` where there is no ``.git``, with ``+`` when files differ from it."""
    if named := os.environ.get("WEFT_COMMIT"):
        return named
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10).stdout

    try:
        head = git("rev-parse", "--short=12", "HEAD").strip()
        return head + ("+" if head and git("status", "--porcelain", "--", str(here)).strip() else "")
    except (OSError, subprocess.SubprocessError):
        return ""
