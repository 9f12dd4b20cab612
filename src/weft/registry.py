"""Finds operators by their file names.

A module anywhere below ``operators/<family>/`` that assigns ``X = Operator(`` in a file ``X.py`` or ``X/__init__.py`` is
the operator X. Names are known without importing anything; an operator's module (and PyTorch with it) is imported when
it is first asked for.
"""

import functools
import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from weft.definition import Implementation, Operator, UnknownName

FOLDER = Path(__file__).parent / "operators"
LADDERS = Path(__file__).parent / "course" / "ladders"


@functools.cache
def modules() -> dict[str, str]:
    """Operator name → module, by reading file names and the line that assigns the operator."""
    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*/**/*.py")):
        name = path.parent.name if path.name == "__init__.py" else path.stem
        if re.search(rf"^{re.escape(name)}(: *Operator)? = Operator\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            if name in found:
                raise ImportError(f"operator '{name}' is defined twice: in {found[name]} and in {path}")
            module = path.relative_to(FOLDER).with_suffix("")
            found[name] = ".".join(["weft.operators", *(p for p in module.parts if p != "__init__")])
    return found


def names() -> list[str]:
    return list(modules())


def family(name: str) -> str:
    """The folder that an operator is in: ``softmax``, ``normalization`` …"""
    return modules()[name].split(".")[2]


def get(name: str) -> Operator:
    """The operator of that name.

    Raises:
        UnknownName: with the names that exist and the nearest spelling.
        ModuleNotFoundError: without PyTorch and Triton, with the install line.
    """
    if name not in modules():
        raise UnknownName("operator", name, names())
    try:
        module = importlib.import_module(modules()[name])
        if (LADDERS / f"{name}.py").is_file():  # registers the operator's teaching versions
            importlib.import_module(f"weft.course.ladders.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("torch", "triton", "numpy"):
            raise ModuleNotFoundError(
                f"weft's operators need {error.name}, which is not installed: pip install 'weft[gpu]'", name=error.name
            ) from error
        raise
    operator: Operator = getattr(module, name)
    return operator


def select(wanted: Iterable[str] = ()) -> list[Operator]:
    """The named operators, those of a named family (its folder) that is no operator too, or all of them. Unknown names raise
    before anything is imported."""
    families: dict[str, list[str]] = {}
    for name in names():
        families.setdefault(family(name), []).append(name)
    chosen: list[str] = []
    for name in wanted:
        if name not in modules() and name not in families:
            raise UnknownName("operator", name, sorted({*names(), *families}))
        chosen += [name] if name in modules() else families[name]
    return [get(name) for name in dict.fromkeys(chosen) or names()]


def implementations(operator: Operator, wanted: Iterable[str] = (), *, ladder: bool = False) -> list[Implementation]:
    """An operator's implementations: the named ones, or all but the ladder's (the ladder's too with ``ladder``)."""
    if wanted := list(wanted):
        return [operator.find(name) for name in wanted]
    return [i for i in operator.implementations.values() if ladder or i.rung is None]
