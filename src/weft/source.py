"""Which code a measurement depends on, found by reading it: a table made from records of other code is marked stale."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
# Modules of operators/ itself that are no part of a launch: checks, inputs, mutants, peers, the look-up of configurations.
NOT_TIMED = frozenset({"call.py", "configs.py", "mutants.py", "peers.py", "random_inputs.py"})

IMPORT = re.compile(r"^from (weft\.operators[\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)
CUDA_FILE = re.compile(r'"(\w+\.cuh?)"')
CONFIGURATIONS = re.compile(r'Configurations\(\s*__file__,\s*f?"([\w{}]+)"')  # "rows", or f"{name}_rows" for any name


def source_hash(module: str | os.PathLike[str], root: Path = HERE) -> str:
    """Hash of the code that a measurement of an operator depends on.

    That is its module, the modules of ``operators/`` that this imports, the CUDA C++ files that these name, the measured
    configurations that they look up, and ``timing.py``; not prose, not what merely lies in the same folder.

    Args:
        module: the file that defines the operator.
        root: the package's folder.
    """
    digest = hashlib.sha256()
    files = sorted(code_of(Path(module).resolve(), root), key=lambda p: (p.name, str(p)))
    for path in [*files, root / "timing.py"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for path in files:
        for name in CONFIGURATIONS.findall(path.read_text(encoding="utf-8")):
            for entry in _configurations(path.parent / "configs", name):
                digest.update(entry.encode())
    return digest.hexdigest()[:12]


def code_of(start: Path, root: Path = HERE) -> set[Path]:
    """A file and what it is made of: modules of ``operators/`` that are imported, and CUDA C++ files that are named or
    included, which lie beside the file that names them or in ``operators/``."""
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        untimed = path.name in NOT_TIMED and path.parent == root / "operators"
        if path in found or untimed or not path.is_file():
            continue
        found.add(path)
        text = path.read_text(encoding="utf-8")
        for name in CUDA_FILE.findall(text):
            waiting += [p for p in (path.parent / name, root / "operators" / name) if p.is_file()][:1]
        if path.suffix == ".py":
            waiting += _imported(text, root)
    return found


def _imported(text: str, root: Path) -> Iterator[Path]:
    """The files of every ``from weft.operators… import …``: the module's own, and those of names that are modules."""
    for module, inside, plain in IMPORT.findall(text):
        base = root.joinpath(*module.split(".")[1:])
        yield base.with_suffix(".py")
        yield base / "__init__.py"
        for name in re.findall(r"\w+", inside or plain):
            yield base / f"{name}.py"


def _configurations(folder: Path, name: str) -> Iterator[str]:
    named = re.compile(re.sub(r"{\w+}", r"\\w+", name))
    for path in sorted(folder.glob("*.json")):
        for key, config in sorted(json.loads(path.read_text(encoding="utf-8")).items()):
            if named.fullmatch(key.split(",")[0]):
                yield f"{path.name} {key} {json.dumps(config, sort_keys=True)}\n"
