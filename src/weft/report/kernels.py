"""A family's table of kernels: its dispatch tables (``weft.operators.dispatch``), read with ``ast`` and never imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from weft.report.markdown import cell, grid

SOURCES = Path(__file__).parents[2]
FIELDS = ("name", "when", "reason", "launch", "unsupported", "sm")  # of a Route, in order
HEAD = ("direction", "kernel", "when", "why")


def table(folder: Path) -> str:
    """One row for each route of each ``Dispatch(...)`` that a module of a family's folder assigns, in order.

    The direction is the name of the table, ``FORWARD`` say, behind the file's name where that is not ``dispatch.py``.

    Raises:
        ValueError: there is no table, or a route is not written as ``Route(...)``, or as the name of one.
    """
    body = [row for path in sorted(folder.rglob("*.py"), key=_order) for row in _rows(path)]
    if not body:
        raise ValueError(f"no module in {folder} assigns a Dispatch(...)")
    return grid(HEAD, body, numbers_from=len(HEAD))


def _order(path: Path) -> tuple[bool, str]:
    return path.name != "dispatch.py", str(path)


def _rows(path: Path) -> Iterator[list[str]]:
    for node in _parsed(path).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or (made := _call(node.value, "Dispatch")) is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        direction = ast.unparse(target).lower().replace("_", " ")
        if path.name != "dispatch.py":
            direction = f"{path.stem}: {direction}"
        for at, route in enumerate(_routes(path, made.args[1:])):
            yield [direction if at == 0 else "", *_cells(*route)]


def _routes(path: Path, written: list[ast.expr]) -> Iterator[tuple[Path, ast.Call]]:
    """The ``Route(...)`` calls of a table, each with the file that it is written in."""
    for item in written:
        file, value = _resolved(path, item.value if isinstance(item, ast.Starred) else item)
        if isinstance(item, ast.Starred) and isinstance(value, (ast.Tuple, ast.List)):
            yield from _routes(file, value.elts)
        elif route := _call(value, "Route"):
            yield file, route
        else:
            raise ValueError(f"{path}:{item.lineno}: {ast.unparse(item)} should be written as Route(...), or name one")


def _cells(path: Path, route: ast.Call) -> list[str]:
    given = dict(zip(FIELDS, route.args, strict=False)) | {k.arg: k.value for k in route.keywords if k.arg}
    when = given["when"]
    condition = ast.unparse(_Constants(path).visit(when.body if isinstance(when, ast.Lambda) else when))
    parts = [f"sm_{ast.unparse(_resolved(path, given['sm'])[1])} or newer"] if "sm" in given else []
    parts += [f"`{condition}`".replace("|", "\\|")] if condition != "True" else []
    parts += [f"unless `{ast.unparse(given['unsupported'])}`"] if "unsupported" in given else []
    name, reason = (_text(path, given[field]) for field in ("name", "reason"))
    return [cell(name), ", ".join(parts) or "otherwise", cell(reason)]


def _text(path: Path, value: ast.expr) -> str:
    value = _resolved(path, value)[1]
    return str(value.value) if isinstance(value, ast.Constant) else ast.unparse(value)


class _Constants(ast.NodeTransformer):
    """Replaces a module's names of numbers and texts by what they stand for."""

    def __init__(self, path: Path):
        self.path = path

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = _resolved(self.path, node)[1]
        return value if isinstance(value, ast.Constant) else node


def _call(value: ast.expr | None, name: str) -> ast.Call | None:
    """The expression where it calls that name."""
    return value if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == name else None


def _resolved(path: Path, value: ast.expr) -> tuple[Path, ast.expr]:
    """What a name stands for, where its module, or the module of weft that it is imported from, assigns it."""
    while isinstance(value, ast.Name):
        for node in _parsed(path).body:
            if isinstance(node, ast.Assign) and any(ast.unparse(t) == value.id for t in node.targets):
                value = node.value
                break
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft."):
                imported = {alias.asname or alias.name: alias.name for alias in node.names}
                file = SOURCES.joinpath(*str(node.module).split(".")).with_suffix(".py")
                if value.id in imported and file.is_file():
                    path, value = file, ast.Name(imported[value.id])
                    break
        else:
            break
    return path, value


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
