"""What an examination of the machine says: findings, and how they are shown. Standard library alone."""

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

STATUSES = ("pass", "warn", "fail")
SYMBOLS = {"pass": "✓", "warn": "!", "fail": "✗"}
GROUPS = ("GPU", "Frameworks", "Fit", "System", "Container", "Permissions", "Trial")


@dataclass(frozen=True)
class Finding:
    """One line of the examination.

    ``name`` is stable kebab-case (scripts and tests key on it), ``found`` is what is there, and ``fix`` is a
    command or setting; a warning or a failure without one is a bug, so it raises ``ValueError``.
    """

    name: str
    status: str
    found: str
    fix: str
    group: str

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"finding {self.name}: status {self.status!r} is not one of {', '.join(STATUSES)}")
        if self.group not in GROUPS:
            raise ValueError(f"finding {self.name}: group {self.group!r} is not one of {', '.join(GROUPS)}")
        if self.status != "pass" and not self.fix:
            raise ValueError(f"finding {self.name}: a {self.status} needs a fix")


def guarded(name: str, group: str, check: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    """Runs one check; whatever it raises becomes one warning, so that the other checks are still shown."""
    try:
        result = check()
    except Exception as error:  # one odd machine must not end the whole examination
        found = f"this check itself failed: {type(error).__name__}: {one_line(str(error))}"
        return [Finding(name, "warn", found, "file this line as an issue; the other checks stand", group)]
    return result if isinstance(result, list) else [result]


def one_line(text: str, limit: int = 200) -> str:
    """The text on one line, without control characters, cut at ``limit`` characters."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when anything failed, else 0: a warning is no reason to stop a script."""
    return int(any(f.status == "fail" for f in findings))


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """How many findings have each status; a missing status counts 0."""
    listed = list(findings)
    return {status: sum(f.status == status for f in listed) for status in STATUSES}


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """A versioned document of plain JSON types: ``schema``, the worst ``status``, ``counts`` and ``findings``."""
    listed = list(findings)
    number = counts(listed)
    worst = next((s for s in reversed(STATUSES) if number[s]), "pass")
    return {"schema": 1, "status": worst, "counts": number, "findings": [asdict(f) for f in listed]}


def render(findings: Iterable[Finding], width: int = 80) -> str:
    """Plain text, grouped, no line longer than ``width`` unless one word is; status by word and by symbol."""
    listed = list(findings)
    name_width = max((len(f.name) for f in listed), default=0)
    indent = " " * (2 + len("✓ pass  "))
    aligned = indent + " " * (name_width + 2)
    if len(aligned) > width // 2:  # a narrow terminal: what was found goes below the name
        aligned = indent
    lines: list[str] = []
    for group in GROUPS:
        members = [f for f in listed if f.group == group]
        if members:
            lines += ["", group]
        for f in members:
            head = f"  {SYMBOLS[f.status]} {f.status}  {f.name:<{name_width}}  "
            if aligned == indent:
                lines.append(head.rstrip())
                head = indent
            lines += _wrapped(f.found, head, aligned, width)
            if f.status != "pass":
                lines += _wrapped(f.fix, aligned + "fix: ", aligned + "     ", width)
    number = counts(listed)
    summary = ", ".join(f"{number[s]} {s}" for s in STATUSES)
    first = _wrapped(f"weft doctor: {len(listed)} checks: {summary}", "", "  ", width)
    return "\n".join([*first, *lines]) + "\n"


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    # Commands must survive copying: never broken inside a word or at a hyphen.
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    ) or [first.rstrip()]
