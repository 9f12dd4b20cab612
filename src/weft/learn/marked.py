"""The one marked source of an exercise, from which the skeleton and the solution are made, in one language.

Every mark is a line of its own, in a comment (``#`` or ``//``) or bare inside a docstring:

- ``[en`` … ``en]`` and ``[zh`` … ``zh]``: text in one language
- ``TODO(en): …``, ``TODO(zh): …``: the same for a comment; it ends where the comment ends or at the other language's TODO
- ``[solution`` … ``solution]``: lines of the solution alone
- ``[skeleton`` … ``skeleton]``: lines of the skeleton alone, each behind ``#:`` (``//:``)
- ``I AM NOT DONE``: in the skeleton alone; the learner removes it
"""

import re

MARKER = "I AM NOT DONE"
BLOCKS = ("en", "zh", "solution", "skeleton")
_OPEN = re.compile(r"\s*(?:#|//)?\s*\[(en|zh|solution|skeleton)\s*$")
_CLOSE = re.compile(r"\s*(?:#|//)?\s*(en|zh|solution|skeleton)\]\s*$")
_TODO = re.compile(r"(\s*(?:#|//)\s*TODO)\((en|zh)\):(.*)$")
_COMMENT = re.compile(r"\s*(?:#|//)")
_HIDDEN = re.compile(r"(\s*)(?:#|//): ?(.*)$")
_MARKER = re.compile(rf"\s*(?:#|//)\s*{MARKER}\s*$")


def skeleton(source: str, language: str) -> str:
    """What the learner starts from."""
    return _written(source, language, "skeleton")


def solution(source: str, language: str) -> str:
    """The solution, without the marker."""
    return _written(source, language, "solution")


def _written(source: str, language: str, version: str) -> str:
    kept = {language, version}
    lines: list[str] = []
    block = todo = ""
    for number, line in enumerate(source.splitlines(), 1):
        if opened := _OPEN.match(line):
            if block:
                raise ValueError(f"line {number}: [{opened[1]} begins inside [{block}")
            block, todo = opened[1], ""
        elif closed := _CLOSE.match(line):
            if closed[1] != block:
                raise ValueError(f"line {number}: {closed[1]}] ends what did not begin")
            block = ""
        elif block and block not in kept:
            continue
        elif block == "skeleton":
            hidden = _HIDDEN.match(line)
            if line.strip() and not hidden:
                raise ValueError(f"line {number}: a line of the skeleton must stand behind '#: '")
            lines.append((hidden[1] + hidden[2]).rstrip() if hidden else "")
        elif begun := _TODO.match(line):
            todo = begun[2]
            if todo in kept:
                lines.append(f"{begun[1]}:{begun[3]}")
        elif _MARKER.match(line):
            todo = ""
            if version == "skeleton":
                lines.append(line)
        else:
            if not _COMMENT.match(line):
                todo = ""
            if not todo or todo in kept:
                lines.append(line)
    if block:
        raise ValueError(f"[{block} has no end")
    # what was left out leaves no more than two empty lines, and none at the head
    text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n")
    return re.sub(r'^("""|\'\'\')\n+', r"\1\n", text) + "\n"
