"""For authors: solutions pass, skeletons fail, wrong solutions are rejected at their stage, pages are in both languages."""

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.learn import marked
from weft.learn.course import FOLDER, Day, Exercise, Wrong
from weft.learn.judge import Servers, Verdict, judge
from weft.learn.language import LANGUAGES


def check_sources(exercise: Exercise, sources: dict[str, str], servers: Servers, seed: int | None = None) -> Verdict:
    """The verdict on sources by suffix, written to a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="weft-learn-") as folder:
        files = {}
        for suffix, source in sources.items():
            files[suffix] = Path(folder) / f"{exercise.number:02}_{exercise.name}{suffix}"
            files[suffix].write_text(source, encoding="utf-8")
        return judge(exercise, files, servers.of(exercise), seed)


def by_suffix(files: dict[str, str]) -> dict[str, str]:
    return {Path(path).suffix: text for path, text in files.items()}


def problems(exercise: Exercise, servers: Servers) -> Iterator[str]:
    """What is wrong with an exercise's files; nothing when all is well."""
    yield from missing(exercise)
    for language in LANGUAGES:
        for kind, text in (("skeleton", exercise.skeleton(language)), ("solution", exercise.solution(language))):
            for path, content in text.items():
                if path.endswith(".py"):
                    try:
                        compile(content, path, "exec")
                    except SyntaxError as error:
                        if kind == "solution":
                            yield f"the {kind} ({language}) is not Python: line {error.lineno}: {error.msg}"
    verdict = check_sources(exercise, by_suffix(exercise.solution("en")), servers)
    if not verdict.passed:
        yield f"the solution fails at {verdict.failed or 'the marker'}: {verdict.why.en}"
    skeleton = by_suffix(exercise.skeleton("en"))
    if not any(marked.MARKER in text for text in skeleton.values()):
        yield "the skeleton has no marker '# I AM NOT DONE'"
    verdict = check_sources(exercise, skeleton, servers)
    if verdict.failed is None:
        yield "the skeleton passes all tests as shipped"
    for wrong in exercise.wrong():
        yield from rejected(exercise, wrong, servers)


def missing(exercise: Exercise) -> Iterator[str]:
    """Files that an exercise must have, and pages that are not the same in both languages."""
    for name in (
        *exercise.files,
        "check.py",
        "wrong.toml",
        *(f"{n}.{language}.md" for n in ("hints", "why") for language in LANGUAGES),
    ):
        if not (exercise.folder / name).is_file():
            yield f"{name} is missing"
            return
    for language in LANGUAGES:
        if (n := len(exercise.hints(language))) != 3:
            yield f"hints.{language}.md has {n} hints, separated by ---; there must be three"
    for name in ("hints", "why"):
        yield from differing(exercise.folder, name)
    wrong = exercise.wrong()
    if len(wrong) < 4 or len({w.source for w in wrong}) < len(wrong):
        yield f"wrong.toml has {len(wrong)} wrong solutions; there must be four that differ in kind"


def rejected(exercise: Exercise, wrong: Wrong, servers: Servers) -> Iterator[str]:
    """Whether a wrong solution is rejected at its stage."""
    sources = {Path(exercise.files[0]).suffix: wrong.source}
    verdict = check_sources(exercise, sources, servers)
    if verdict.failed != wrong.stage:
        yield f"wrong.toml, {wrong.name}: {verdict.failed or 'accepted'}, not {wrong.stage}: {verdict.why.en}"


def differing(folder: Path, name: str) -> Iterator[str]:
    """How an English page and its Chinese one differ in headings' levels or code blocks."""
    pages = [(folder / f"{name}.{language}.md") for language in LANGUAGES]
    for page in pages:
        if not page.is_file():
            yield f"{page.name} is missing"
            return
    en, zh = (page.read_text(encoding="utf-8") for page in pages)
    for what, of in (("headings", _headings), ("code blocks", _code)):
        if of(en) != of(zh):
            yield f"{name}.en.md and {name}.zh.md differ in {what}: {of(en)} and {of(zh)}"


def _headings(page: str) -> list[int]:
    return [len(h) for h in re.findall(r"^(#+) ", _without_code(page), re.M)]


def _code(page: str) -> list[str]:
    """Code blocks without their comments, which are translated; pictures (```text) count, their words are translated too."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.M | re.S)
    return ["text" if of in ("", "text") else re.sub(r"\s*(#|//).*", "", body).strip() for of, body in blocks]


def _without_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)


def check_day(day: Day, servers: Servers, say: Callable[[str, list[str], float], None]) -> int:
    """Checks a day, tells each exercise's problems as they are found, and returns how many there are."""
    import time

    found = list(differing(FOLDER / day.name, "lesson"))
    say("lesson", found, 0.0)
    count = len(found)
    for exercise in day.exercises:
        began = time.monotonic()
        found = list(problems(exercise, servers))
        say(exercise.name, found, time.monotonic() - began)
        count += len(found)
    return count
