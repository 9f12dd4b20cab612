"""The learner's folder: exercises to edit, lessons to read, and the progress."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from weft.learn import machine, progress
from weft.learn.course import Day, Exercise, days, exercises
from weft.learn.language import LANGUAGES

DEFAULT = "weft-course"


@dataclass(frozen=True)
class Workspace:
    """A learner's folder."""

    folder: Path

    def paths(self, exercise: Exercise) -> dict[str, Path]:
        """The learner's files of an exercise, by suffix."""
        return {Path(path).suffix: self.folder / path for path in exercise.paths().values()}

    def file(self, exercise: Exercise) -> Path:
        return self.folder / exercise.paths()[exercise.files[0]]

    def lesson(self, day: Day) -> Path:
        return self.folder / day.name / "lesson.md"

    def write(self, language: str, changed_language: bool = False) -> list[Path]:
        """Writes what is missing, and lessons; leaves what the learner has edited. Returns the exercise files written."""
        made = []
        numbers = machine.numbers(self.folder)
        for day in days():
            lesson = self.lesson(day)
            lesson.parent.mkdir(parents=True, exist_ok=True)
            text = machine.filled(day.lesson(language), numbers, language)
            if not lesson.exists() or lesson.read_text(encoding="utf-8") != text:
                _write(lesson, text)
        for exercise in exercises():
            made += self.restore(exercise, language, changed_language)
        return made

    def restore(self, exercise: Exercise, language: str, changed_language: bool = False) -> list[Path]:
        """Writes an exercise's files that are missing; and those as shipped in another language where that has changed."""
        made = []
        shipped = {path for lang in LANGUAGES for path in exercise.skeleton(lang).items()}
        for name, text in exercise.skeleton(language).items():
            path = self.folder / name
            if path.exists():
                untouched = changed_language and (name, path.read_text(encoding="utf-8", errors="replace")) in shipped
                if not untouched or path.read_text(encoding="utf-8") == text:
                    continue
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, text)
            made.append(path)
        return made

    def reset(self, exercise: Exercise, language: str) -> list[tuple[Path, Path | None]]:
        """Writes an exercise's files as shipped; each with the path that the learner's version was moved to."""
        made: list[tuple[Path, Path | None]] = []
        for name, text in exercise.skeleton(language).items():
            path, aside = self.folder / name, None
            if path.exists() and path.read_bytes() != text.encode():
                names = (path.with_name(f"{path.name}.before-{i}") for i in range(1, 10_000))
                aside = next(p for p in names if not p.exists())
                os.replace(path, aside)
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, text)
            made.append((path, aside))
        return made


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def find(named: str = "") -> Workspace | None:
    """The learner's folder: the one named, or ``WEFT_LEARN``, or the nearest one that holds this folder, or ``./weft-course``.

    Raises:
        ValueError: The folder that was named is none.
    """
    if named := named or os.environ.get("WEFT_LEARN", ""):
        if not _is_one(Path(named)):
            raise ValueError(f"{named} is no course folder; `weft learn init {named}` makes it one")
        return Workspace(Path(named).resolve())
    here = Path.cwd()
    for folder in (here, *here.parents, here / DEFAULT):
        if _is_one(folder):
            return Workspace(folder)
    return None


def _is_one(folder: Path) -> bool:
    return any((folder / f"{progress.FILE}{end}").is_file() for end in ("", ".before"))


def make(folder: Path, language: str) -> Workspace:
    """Makes a folder the learner's, or mends one: files that are there stay.

    Raises:
        ValueError: The folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder that is new or empty")
    folder.mkdir(parents=True, exist_ok=True)
    made = Workspace(folder.resolve())
    with progress.edit(made.folder) as found:
        changed = _is_one(folder) and found.language != language
        found.language = language
        made.write(language, changed)
        if not found.current and exercises():
            found.current = exercises()[0].id
    return made


def exported(workspace: Workspace, found: progress.Progress) -> str:
    """Progress and the learner's own files, as one text that ``imported`` reads on another machine."""
    files = {}
    for exercise in exercises():
        shipped = {path: {exercise.skeleton(lang)[path] for lang in LANGUAGES} for path in exercise.skeleton("en")}
        for name in shipped:
            path = workspace.folder / name
            if path.is_file() and (text := path.read_text(encoding="utf-8", errors="replace")) not in shipped[name]:
                files[name] = text
    return json.dumps({"progress": json.loads(found.to_json()), "files": files}, indent=1, ensure_ascii=False) + "\n"


def imported(workspace: Workspace, text: str) -> tuple[progress.Progress, list[Path]]:
    """Takes over an export: the progress, and the files it has. A file that differs is moved aside, and returned.

    Raises:
        ValueError: The text is no export.
    """
    try:
        table = json.loads(text)
        found = progress.from_json(json.dumps(table["progress"]))
        files = {str(name): str(content) for name, content in table["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no export of `weft learn progress --export`: {error}") from None
    known = {name: e for e in exercises() for name in e.paths().values()}
    aside = []
    for name, content in files.items():
        if name not in known:
            continue
        path = workspace.folder / name
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") != content:
            aside += [kept for _, kept in workspace.reset(known[name], found.language) if kept]
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, content)
    return found, aside
