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
