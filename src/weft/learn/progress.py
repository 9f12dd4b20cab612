"""What a learner has done: one JSON file in the learner's folder, replaced whole, with the state before beside it."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from weft.learn.language import LANGUAGES, Text

FILE = ".weft-learn.json"
VERSION = 1
STATES = ("open", "passed", "skipped", "tested-out")


@dataclass
class Entry:
    """One exercise's state.

    Attributes:
        state: One of STATES.
        attempts: Checks so far, the one that passed included.
        hints: Hints seen.
        asked: How often the solution was asked for before a pass; the second time it is shown.
        notes: What the passing check counted or measured, in both languages.
    """

    state: str = "open"
    attempts: int = 0
    hints: int = 0
    asked: int = 0
    passed_at: str = ""
    notes: list[list[str]] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        return self.state != "open"


@dataclass
class Progress:
    """Every exercise's state, the exercise at hand, and the language."""

    language: str = "en"
    current: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)

    def of(self, exercise_id: str) -> Entry:
        return self.entries.setdefault(exercise_id, Entry())

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> Progress:
    """Progress as ``to_json`` wrote it.

    Raises:
        ValueError: It is not that; the message says what came in.
    """
    try:
        table = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(table, dict) or not isinstance(table.get("entries"), dict):
        raise ValueError("not a progress file: it has no entries")
    if table.get("version") != VERSION:
        raise ValueError(f"a progress file of version {table.get('version')!r}; this weft reads version {VERSION}")
    known = Entry.__dataclass_fields__
    entries = {}
    for name, row in table["entries"].items():
        if not isinstance(row, dict) or row.get("state") not in STATES:
            raise ValueError(f"the entry of {name} has no state of {', '.join(STATES)}")
        kept = {key: value for key, value in row.items() if key in known}
        if any(type(value) is not type(getattr(Entry(), key)) for key, value in kept.items()):
            raise ValueError(f"the entry of {name} has a value of another type than it should")
        entries[name] = Entry(**kept)
    language = table.get("language")
    return Progress(language if language in LANGUAGES else "en", str(table.get("current", "")), entries)


@contextmanager
def edit(folder: Path, say: Any = lambda text: None) -> Iterator[Progress]:
    """The progress, to be changed; saved at the end, unless an exception ends the block.

    A second runner waits. What anything else writes into the file meanwhile is overwritten: a check holds the lock while the
    learner's code runs.
    """
    with _locked(folder):
        found = load(folder, say)
        yield found
        save(folder, found)


def load(folder: Path, say: Any = lambda text: None) -> Progress:
    """The saved progress. A damaged file is moved aside, and the state before it is taken.

    Args:
        say: Receives a Text that tells so.
    """
    path, before = folder / FILE, folder / f"{FILE}.before"
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not before.is_file():
            return Progress()
        why = "it is gone"
    except (ValueError, UnicodeDecodeError) as error:
        why = str(error)
    if path.exists():
        aside = next(p for i in range(1, 10_000) if not (p := folder / f"{FILE}.damaged-{i}").exists())
        os.replace(path, aside)
        kept, kept_zh = f"; the damaged file is kept as {aside.name}", f"；损坏的文件保留为 {aside.name}"
    else:
        kept = kept_zh = ""
    try:
        found = from_json(before.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        say(
            Text(
                f"the progress file could not be read ({why}){kept}. Nothing older is there: progress begins anew, your "
                "exercise files are untouched, and `weft learn check NAME` records what passes",
                f"无法读取进度文件（{why}）{kept_zh}。没有更早的备份：进度从头开始，练习文件未动，"
                "`weft learn check 名称` 会重新记录已通过的练习",
            )
        )
        found = Progress()
        save(folder, found)
        return found
    save(folder, found)  # so that it is told once
    say(
        Text(
            f"the progress file could not be read ({why}){kept}; the state before the last command is taken",
            f"无法读取进度文件（{why}）{kept_zh}；已恢复到上一条命令之前的状态",
        )
    )
    return found


def save(folder: Path, progress: Progress) -> None:
    """Writes the file whole: a crash leaves the one or the other."""
    path = folder / FILE
    fresh = folder / f"{FILE}.new"
    with fresh.open("w", encoding="utf-8") as out:
        out.write(progress.to_json())
        out.flush()
        os.fsync(out.fileno())
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(path, folder / f"{FILE}.before")  # not moved: another runner may read it just now
    os.replace(fresh, path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows, where two runners are rare
        yield
        return
    with (folder / f"{FILE}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
