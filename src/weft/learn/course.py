"""The course as it lies in the package: days, exercises and their files."""

import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.definition import UnknownName
from weft.learn import marked
from weft.learn.language import Text

FOLDER = Path(__file__).parent.parent / "course"
KINDS = ("python", "triton", "cuda", "predict", "command")
REQUIREMENTS = ("nothing", "torch", "training", "gpu", "nvcc")


@dataclass(frozen=True)
class Wrong:
    """A wrong solution or a cheat, the stage that must reject it, and the reason."""

    name: str
    stage: str
    why: str
    source: str


@dataclass(frozen=True)
class Exercise:
    """One exercise: a marked source, its check, hints and the reason for the solution."""

    name: str
    day: str
    number: int
    kind: str
    title: Text
    folder: Path
    files: tuple[str, ...] = ("exercise.py",)
    time_limit_s: float = 10.0
    requires: str = "nothing"
    allow: tuple[str, ...] = ()  # modules and names that the file may use beside the usual ones (rules.py)
    forbid: tuple[str, ...] = ()  # names that the learner's file may not use: the library's own solution
    torch: bool = False  # whether a Triton exercise may compute in PyTorch too, outside of its kernels
    limit: dict[str, str] = field(default_factory=dict)  # bytes and FLOPs, as expressions of the shapes

    @property
    def id(self) -> str:
        """What the learner types, and what the progress file has: ``day1/strides``."""
        return f"{self.day.split('_')[0]}/{self.name}"

    def paths(self) -> dict[str, str]:
        """Where the learner's copies lie, below the learner's folder, by the file's name in the package."""
        return {name: f"{self.day}/{self.number:02}_{self.name}{Path(name).suffix}" for name in self.files}

    def source(self, name: str = "") -> str:
        return (self.folder / (name or self.files[0])).read_text(encoding="utf-8")

    def skeleton(self, language: str) -> dict[str, str]:
        """By path below the learner's folder."""
        return {path: marked.skeleton(self.source(name), language) for name, path in self.paths().items()}

    def solution(self, language: str) -> dict[str, str]:
        return {path: marked.solution(self.source(name), language) for name, path in self.paths().items()}

    def hints(self, language: str) -> list[str]:
        text = (self.folder / f"hints.{language}.md").read_text(encoding="utf-8")
        return [part.strip() for part in text.split("\n---\n")]

    def why(self, language: str) -> str:
        return (self.folder / f"why.{language}.md").read_text(encoding="utf-8").strip()

    def wrong(self) -> list["Wrong"]:
        """Wrong solutions, which the check must reject: the English solution with some of its text replaced.

        Raises:
            ValueError: A text to be replaced does not occur exactly once, or an entry has other keys.
        """
        where = self.folder / "wrong.toml"
        if not where.is_file():
            return []
        right = next(iter(self.solution("en").values()))
        made = []
        for stage, entries in _toml(where).items():
            for name, entry in entries.items():
                if not isinstance(entry, dict) or entry.keys() != {"why", "edits"}:
                    raise ValueError(f"{where}: expected a table [{stage}.{name}] with why and edits")
                source = right
                for old, new in entry["edits"]:
                    if (count := source.count(old)) != 1:
                        raise ValueError(f"{where}: {stage}.{name}: {old!r} occurs {count} times; expected once")
                    source = source.replace(old, new)
                made.append(Wrong(name, stage, entry["why"], source))
        return made


@dataclass(frozen=True)
class Day:
    """A day: a lesson and exercises."""

    name: str  # the folder's
    title: Text
    outcome: Text  # what the learner can then do, measurably
    written: Text  # what the learner writes down at the end
    exercises: tuple[Exercise, ...]

    @property
    def id(self) -> str:
        return self.name.split("_")[0]

    def deciding(self) -> tuple[Exercise, ...]:
        """The exercises that pass the day for the experienced: its last two."""
        return self.exercises[-2:]

    def lesson(self, language: str) -> str:
        return (FOLDER / self.name / f"lesson.{language}.md").read_text(encoding="utf-8")


@functools.cache
def days() -> tuple[Day, ...]:
    """All days, in order."""
    return tuple(_read(folder) for folder in sorted(FOLDER.glob("day*")) if (folder / "day.toml").is_file())


def exercises() -> list[Exercise]:
    return [e for day in days() for e in day.exercises]


def find(name: str) -> Exercise:
    """An exercise by ``day1/strides``, ``strides`` or the path of the learner's file.

    Raises:
        UnknownName: There is none, or several of that name; the message lists what there is.
    """
    path = Path(name)
    stem = path.stem.split("_", 1)[1] if path.suffix and path.stem[:2].isdigit() else name
    found = [e for e in exercises() if stem in (e.id, e.name)]
    if len(found) > 1:
        found = [e for e in found if e.day in path.parts] or found
    if len(found) == 1:
        return found[0]
    raise UnknownName("exercise", name, [e.id for e in found or exercises()])


def find_day(name: str) -> Day:
    """A day by ``1``, ``day1`` or ``day1_machine``.

    Raises:
        UnknownName: There is none.
    """
    for day in days():
        if name in (day.name, day.id, day.id.removeprefix("day")):
            return day
    raise UnknownName("day", name, [d.id for d in days()])


def _read(folder: Path) -> Day:
    table = _toml(folder / "day.toml")
    where = folder / "day.toml"
    made = []
    for number, entry in enumerate(table.get("exercise", []), 1):
        entry = dict(entry)
        name = entry.pop("name")
        kind = entry.get("kind")
        if kind not in KINDS:
            raise ValueError(f"{where}: {name} has the kind {kind!r}; a kind is one of {', '.join(KINDS)}")
        if entry.get("requires", "nothing") not in REQUIREMENTS:
            raise ValueError(f"{where}: {name} requires {entry['requires']!r}; it may be {', '.join(REQUIREMENTS)}")
        for key in ("files", "allow", "forbid"):
            if key in entry:
                entry[key] = tuple(entry[key])
        title = Text(**entry.pop("title"))
        try:
            made.append(Exercise(name, folder.name, number, title=title, folder=folder / name, **entry))
        except TypeError as error:
            raise ValueError(f"{where}: {name}: {error}") from None
    return Day(folder.name, Text(**table["title"]), Text(**table["outcome"]), Text(**table["written"]), tuple(made))


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise ModuleNotFoundError("Python 3.10 needs tomli for the course: pip install 'weft[learn]'") from None
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
