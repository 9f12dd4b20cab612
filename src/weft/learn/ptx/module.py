"""A module of PTX, as NVRTC writes it with ``-lineinfo``."""

import re
from dataclasses import dataclass, field

import numpy as np

from weft.learn.ptx.values import CONST, LOCAL, SHARED, TYPES


@dataclass
class Instruction:
    op: str  # its name without modifiers
    mods: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str  # "", "%p1" or "!%p1"
    line: int


@dataclass
class Entry:
    """One kernel: parameters as (name, type), code, labels, bytes of shared and local variables by name."""

    name: str
    params: list[tuple[str, str]]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)  # addresses
    shared_bytes: int = 0
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    dynamic: str = ""  # the variable of `extern __shared__`


@dataclass
class Module:
    entries: dict[str, Entry]
    constants: dict[str, tuple[int, bytes]]  # address, content


_DECLARED = (".shared", ".local", ".const", ".global", ".extern", ".visible")
_VARIABLE = re.compile(
    r"\.(shared|local|const|global)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?"
    r"(?:\s*=\s*\{?([^}]*)\}?)?"
)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\S*\s+(?:\.\w+\s+)*(?:\d+\s+)?)?([\w$]+)")
_ENTRY = re.compile(r"(?:\.visible\s+)?(?:\.weak\s+)?\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{")
_STATEMENT = re.compile(r"[^;{}\n]*\{[^}\n]*\}[^;\n]*;|[\w$]+:|[^;\n]+;?|\n")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+(?:\|[^,\s]+)?")


def parse(text: str) -> Module:
    """Its kernels, variables and constants."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"\bcall\b[^;]*;", lambda call: " ".join(call[0].split()), text)  # written over several lines
    module = Module({}, {})
    before, *pieces = _ENTRY.split(text)
    common = Entry("", [])  # variables outside of kernels
    _statements(before, common, module)
    for name, params, body in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        entry = Entry(name, [(n, kind) for kind, n in _PARAMETER.findall(params)])
        entry.shared, entry.shared_bytes, entry.dynamic = dict(common.shared), common.shared_bytes, common.dynamic
        module.entries[name] = entry
        _statements(body, entry, module)
    return module


def _statements(body: str, entry: Entry, module: Module) -> None:
    line = 0
    for found in _STATEMENT.findall(body):
        statement = found.strip().rstrip(";").strip()
        if not statement or statement in "{}":
            continue
        if location := re.match(r"\.loc\s+\d+\s+(\d+)", statement):
            line = int(location[1]) or line  # 0: of no line
        elif statement.startswith("."):
            if statement.startswith(_DECLARED) and (variable := _VARIABLE.search(statement)):
                _declare(variable, entry, module)
        elif label := re.fullmatch(r"([\w$]+):", statement):
            entry.labels[label[1]] = len(entry.code)
        elif code := re.match(r"(?:@(!?%\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.S):
            op, *mods = code[2].split(".")
            operands = tuple(o.strip() for o in _OPERAND.findall(code[3]))
            entry.code.append(Instruction(op, tuple(m for m in mods if m), operands, code[1] or "", line))


def _declare(variable: re.Match[str], entry: Entry, module: Module) -> None:
    space, align, kind, name, length, content = variable.groups()
    width = np.dtype(TYPES[kind]).itemsize
    size = width * (1 if length is None else int(length or 0))
    if space == "shared" and length == "":
        entry.dynamic = name
    elif space == "shared":
        entry.shared_bytes = -(-entry.shared_bytes // int(align or 4)) * int(align or 4)
        entry.shared[name] = SHARED + entry.shared_bytes
        entry.shared_bytes += size
    elif space == "local":
        entry.local[name] = LOCAL + entry.local_bytes
        entry.local_bytes += -(-size // 16) * 16
    else:
        begin = max((a + len(data) for a, data in module.constants.values()), default=CONST)
        values = [int(v, 0) for v in (content or "").split(",") if v.strip()]
        data = b"".join(v.to_bytes(width, "little", signed=v < 0) for v in values)
        module.constants[name] = (-(-begin // 64) * 64, data.ljust(size, b"\0"))
