"""What CUDA C++ kernels become on Hopper: their machine code as nvdisasm writes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.bench import instructions
from weft.operators.cuda import compile_cubin


def sass(source: Path, expression: str) -> str:
    """The machine code of a kernel on sm_90, which spills no registers."""
    pytest.importorskip("cuda.bindings")
    text = instructions._disassemble(compile_cubin(source, expression, 90)[0])
    assert not re.search(r"\b(STL|LDL)\b", text), "registers are spilled"
    return text


def parts(text: str) -> list[str]:
    """What stands between labels."""
    return re.split(r"^\.L_x_\d+:", text, flags=re.M)


def names(part: str) -> list[str]:
    """Its instructions with their modifiers, such as "LDG.E.128"."""
    return re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P[T\d] )?([A-Z0-9_.]+)", part)


def rounds(text: str) -> list[list[str]]:
    """The instructions of the shortest way round each loop, so that what is rarely executed is left out."""
    marks = re.findall(r"^(\.L_x_\d+):|/\*[0-9a-f]{4,5}\*/\s+((?:@!?U?P[T\d] )?[A-Z0-9_.]+[^;]*);", text, flags=re.M)
    lines: list[str] = []
    labels: dict[str, int] = {}
    for label, line in marks:
        if label:
            labels[label] = len(lines)
        else:
            lines.append(line)
    targets = [re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line) for line in lines]
    after: list[list[int]] = []
    for i, (line, target) in enumerate(zip(lines, targets, strict=True)):
        leaves = re.match(r"(BRA `|EXIT|RET)", line)
        after.append(([] if leaves else [i + 1]) + ([labels[target[1]]] if target else []))
    found = []
    for end, target in enumerate(targets):
        if not target or labels[target[1]] > end:
            continue
        begin = labels[target[1]]
        came, ways = {begin: begin}, [begin]
        for at in ways:
            for to in after[at]:
                if to < len(lines) and to not in came:
                    came[to] = at
                    ways.append(to)
        way, at = [], end
        while at != begin and at in came:
            way.append(lines[at])
            at = came[at]
        found.append([*way, lines[begin]][::-1])
    return [[re.sub(r"^@!?U?P[T\d] ", "", line).split()[0] for line in way] for way in found]
