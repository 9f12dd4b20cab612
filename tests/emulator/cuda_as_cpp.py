"""CUDA C++ with inline PTX as C++ for ``ptx_on_cpu.hpp``: every ``asm`` statement becomes a call that emulates its text."""

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from where import ROOT

OPERATORS = ROOT / "src/weft/operators"
STATIC = 8192  # bytes, of gpu_on_cpu.hpp


def whole(source: Path, *shared: str) -> str:
    """The text of a kernel file; headers beside it or in ``hopper/``, and those of ``operators/`` that are named in ``shared``,
    stand where they are first included."""
    seen: set[str] = set()

    def of(path: Path) -> str:
        def included(found: re.Match[str]) -> str:
            folders = [path.parent, OPERATORS / "hopper", *([OPERATORS] if found[1] in shared else [])]
            headers = [folder / found[1] for folder in folders if (folder / found[1]).is_file()]
            new = found[1] not in seen
            seen.add(found[1])
            return found[0] if not headers else of(headers[0]) if new else ""

        return re.sub(r'^#include "(\w+\.cuh)"$', included, path.read_text().replace("#pragma once\n", ""), flags=re.M)

    return of(source)


def compiler() -> str:
    """The C++ compiler; a test that needs one is skipped where there is none."""
    return shutil.which("g++") or pytest.skip("no C++ compiler (g++) to run the kernels with")


def preprocessed(text: str) -> str:
    """The text with prelude.cuh in it and its own macros expanded."""
    command = [compiler(), "-E", "-P", "-w", "-std=c++17", f"-I{OPERATORS}", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _until(text: str, start: int, ends: str) -> int:
    """Where, from ``start`` on, one of ``ends`` stands outside of strings, parentheses and braces."""
    depth = 0
    while True:
        c = text[start]
        if c == '"':
            start = text.index('"', start + 1)  # the strings of PTX have no escaped quotes
        elif depth == 0 and c in ends:
            return start
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        start += 1


def _split(text: str, separator: str) -> list[str]:
    parts, start, text = [], 0, text + separator
    while start < len(text):
        end = _until(text, start, separator)
        parts.append(text[start:end].strip())
        start = end + 1
    return [part for part in parts if part]


def _sections(text: str) -> list[str]:
    """The text of an asm statement, its outputs and its inputs."""
    text, parts = text + ":", []
    start = 0
    while start < len(text):
        end = _until(text, start, ":")
        parts.append(text[start:end].strip())
        start = end + 1
    return [*parts, "", ""][:3]


def _static_behind_dynamic(text: str) -> str:
    """Arrays ``__shared__ T a[2], b[3];`` of a kernel become references into the end of the shared memory of a launch, which
    has to be larger by ``STATIC`` bytes."""
    taken = "0"

    def behind(found: re.Match[str]) -> str:
        nonlocal taken
        made = []
        for name, extents in re.findall(r"(\w+)((?:\[[^\]]*\])+)", found[2]):
            made.append(f"auto &{name} = static_memory<{found[1]}{extents}>({taken});")
            taken += f" + static_bytes<{found[1]}{extents}>"
        return " ".join(made)

    made, array = [], re.compile(r"(?<!extern )__shared__ (?:alignas\(16\) )?(\w+) ((?:\w+(?:\[[^\]]*\])+(?:, )?)+);")
    for kernel in re.split(r"(?=\b__global__\b)", text):
        taken = "0"
        made.append(array.sub(behind, kernel))
    return "".join(made)


@functools.cache  # a kernel with a mistake in it has most statements of the right one
def _as_call(statement: str) -> str:
    """A call that emulates an asm statement, of which this is the text in parentheses."""
    words, outputs, inputs = _sections(statement)
    if words == '""':
        return "(void)0"  # it only holds the compiler back
    operands = [
        f"ptx_{way}({operand.split('(', 1)[0].strip()}, ({operand.split('(', 1)[1]})"
        for way, section in (("out", outputs), ("in", inputs))
        for operand in _split(section, ",")
    ]
    return f"[&] {{ static const Program program({words}); program.run({{{', '.join(operands)}}}); }}()"


def as_cpp(text: str) -> str:
    """A preprocessed kernel file without its ``asm``; ``extern __shared__`` memory is asked for, and so is static one."""
    made, start = [], 0
    for found in re.finditer(r"\basm\s*(?:volatile)?\s*\(", text):
        made.append(text[start : found.start()])
        start = _until(text, found.end(), ")") + 1
        made.append(_as_call(text[found.end() : start - 1]))
    text = "".join([*made, text[start:]])
    text = re.sub(r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];",
                  r"unsigned char *const \1 = static_cast<unsigned char *>(dynamic_memory());", text)  # fmt: skip
    text = _static_behind_dynamic(text)
    assert "__shared__" not in text, "static shared memory would be one for all blocks"
    return text
