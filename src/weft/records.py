"""Measurements and the append-only store that every room writes to and reads from.

One measurement is one JSON line in ``results/<gpu>/<file>.jsonl``. Lines are only ever appended, each
with one write that is flushed to disk, so an interrupted run leaves valid records behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

SCHEMA = 1
SAME_CODE = "same_code"  # the file of sources that compile to the same machine code: see bench/machine_code.py


@dataclass
class Measurement:
    """One implementation of one operator, timed on one workload.

    Times are microseconds. ``share_of_ceiling`` is the time that the compulsory work takes at this machine's
    measured ceiling, divided by the median time. ``ratio_to_best_peer`` is the best peer's time divided by this
    one's, paired within the run: above 1 is ahead; ``None`` where no peer ran or for a peer itself.
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
    source: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    run: str = ""  # one id for all that was measured side by side
    time: str = ""
    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Measurement:
        """Reads a record of this or an earlier schema; unknown fields are dropped.

        Raises:
            ValueError: it is not one: a field is missing or of another type, a time is not above 0, or a later weft wrote it.
        """
        known = {f.name: f for f in fields(cls)}
        given = {key: value for key, value in data.items() if key in known}
        for name, f in known.items():
            expected = _TYPES[str(f.type)]
            if name in given and (
                not isinstance(given[name], expected) or isinstance(given[name], bool) != (f.type == "bool")
            ):
                raise ValueError(f"field '{name}' is {given[name]!r:.40}; expected {f.type}")
        if missing := [f.name for f in list(known.values())[:6] if f.name not in given]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        made = cls(**given)
        if made.schema > SCHEMA:
            raise ValueError(f"its schema is {made.schema}; this weft reads up to {SCHEMA}")
        if made.metric == "time" and made.operator != "ceiling" and not 0 < made.time_us < float("inf"):
            raise ValueError(f"time_us is {made.time_us}; expected microseconds above 0")
        return made


_NUMBER: tuple[type, ...] = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": _NUMBER,
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
    "float | None": (*_NUMBER, type(None)),
    "dict[str, Any]": (dict,),
    "dict[str, str]": (dict,),
}


def check_writable(folder: Path, told: str) -> None:
    """Raises OSError, in words that begin with ``told``, where 4 KiB cannot be written in a folder, which is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b" " * 4096)
    except OSError as error:
        raise OSError(f"{told}: {error.strerror}") from None


class Store:
    """An append-only folder of JSON lines.

    Args:
        root: the folder, ``results`` by default or what the variable ``WEFT_RESULTS`` says.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None):
        self.root = Path(root or os.environ.get("WEFT_RESULTS") or "results")

    def path(self, gpu: str, name: str) -> Path:
        return self.root / slug(gpu) / f"{name}.jsonl"

    def append(self, gpu: str, name: str, line: Measurement | dict[str, Any]) -> Path:
        """Appends one line and flushes it to disk. A line cut short by an earlier crash is closed first."""
        path = self.path(gpu, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = line.to_json() if isinstance(line, Measurement) else json.dumps(line, allow_nan=False)
        with open(path, "a+b") as file:
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
        """Raises OSError where records of this machine could not be written, before anything is measured."""
        folder = self.path(gpu, "x").parent
        check_writable(folder, f"records cannot be saved in {folder} (WEFT_RESULTS names another place)")

    def read(self, gpu: str | None = None, name: str | None = None, *, as_measured: bool = False) -> list[Measurement]:
        """All measurements, oldest first; of one machine or one operator when named. Lines that are none are passed over.

        A record's ``source`` is the latest that is known to compile to the same machine code, unless ``as_measured``.
        """
        found, same = [], {} if as_measured else self._same_code(gpu)
        for line in self.lines(gpu, name):
            with contextlib.suppress(ValueError):
                found.append(m := Measurement.from_dict(line))
                point = (slug(m.gpu), m.operator, m.workload, m.dtype, m.direction)
                while m.metric == "time" and (
                    later := same.get((*point, m.source))
                ):  # a source may have changed several times
                    m.source = later
        return found

    def _same_code(self, gpu: str | None) -> dict[tuple[str, ...], str]:
        """(machine, operator, workload, dtype, direction, source) → a later source of the same machine code there. What was
        said last holds, and a source that came back (a change undone) has none."""
        same: dict[tuple[str, ...], str] = {}
        for path in self.root.glob(f"{slug(gpu) if gpu else '*'}/{SAME_CODE}.jsonl"):
            for line in read_lines(path):
                source, later = str(line.get("source", "")), str(line.get("same_as", ""))
                for point in line.get("points", ()):
                    key = (path.parent.name, str(line.get("operator", "")), *map(str, point))
                    same.pop((*key, later), None)
                    if later not in ("", source):
                        same[(*key, source)] = later
        return same

    def lines(self, gpu: str | None = None, name: str | None = None) -> Iterator[dict[str, Any]]:
        for path in sorted(self.root.glob(f"{slug(gpu) if gpu else '*'}/{name or '*'}.jsonl")):
            yield from read_lines(path)

    def machines(self) -> list[str]:
        return sorted(p.name for p in self.root.iterdir() if p.is_dir()) if self.root.is_dir() else []


class Saver:
    """Saves measurements as they come. What cannot be saved (a full disk) is kept in mind in ``failure``, and costs no
    measurement."""

    def __init__(self, store: Store | None = None):
        self.store = store or Store()
        self.failure = ""

    def __call__(self, m: Measurement) -> None:
        if not self.failure:
            try:
                self.store.append(m.gpu, m.operator, m)
            except OSError as error:
                self.failure = (
                    f"{self.store.path(m.gpu, m.operator)}: {error.strerror} (WEFT_RESULTS names another place)"
                )


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; what a crash cut short is passed over, and so is what is no file."""
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
        raise OSError(error.errno, error.strerror, str(path)) from error  # the file that is wanted, not a temporary one
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
    """For each point measured (operator … cache, machine) the newest measurement, in order of first appearance."""
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
