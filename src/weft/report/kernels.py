"""A family's table of kernels: its dispatch tables (``weft.operators.dispatch``), read with ``ast`` and never
imported."""

import ast
import copy
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.report.markdown import cell, grid

SOURCES = Path(__file__).parents[2]
FIELDS = ("name", "when", "reason", "launch", "unsupported", "sm")  # of a Route, in order
HEAD = ("direction", "kernel", "when", "why")
COMMON = ("ON_CPU", "EMPTY")  # routes of nearly every table, to PyTorch: not shown

Placed = tuple[Path, ast.expr]  # an expression, and the file whose names it uses


def table(folder: Path) -> str:
    """One row for each route of each ``Dispatch(...)`` that a module of a family's folder assigns, in order; without those of
    tensors on a CPU and of empty ones.

    The direction is the name of the table, ``FORWARD`` say, behind the name of its file where that is not ``dispatch.py``,
    or of its folder where that is not the family's.

    Raises:
        ValueError: there is no table, or a route cannot be read: it is no ``Route(...)``, no name of one, and no call
            of a function that only returns some.
    """
    directions: dict[tuple[tuple[str, ...], ...], list[str]] = {}  # equal tables are shown once
    for path in sorted(folder.rglob("*.py"), key=lambda path: (path.name != "dispatch.py", path)):
        for name, file, made in _tables(path):
            of = path.stem if path.name != "dispatch.py" else "" if path.parent == folder else path.parent.name
            name = name.lower().replace("_", " ") if path.name == "dispatch.py" else name.lower()
            name = f"{of}: {name}" if of else name
            routes = tuple(_cells(*route) for item in made.args[1:] for route in _routes(file, item))
            directions.setdefault(routes, []).append(name)
    if not directions:
        raise ValueError(f"no module in {folder} assigns a Dispatch(...)")
    body = [
        [", ".join(names) if at == 0 else "", *route]
        for routes, names in directions.items()
        for at, route in enumerate(routes)
    ]
    return grid(HEAD, body, numbers_from=len(HEAD))


def _tables(path: Path) -> Iterator[tuple[str, Path, ast.Call]]:
    """Name, file and call of each ``Dispatch(...)`` that a module assigns, itself or through a function that returns
    it."""
    for node in _parsed(path).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        many = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        for name, value in zip(target.elts, node.value.elts, strict=True) if many else [(target, node.value)]:  # type: ignore[attr-defined]
            file, made = _resolved(path, value)
            if _is_call(made, "Dispatch") and not isinstance(value, ast.Name):
                yield ast.unparse(name), file, made  # type: ignore[misc]


def _routes(path: Path, item: ast.expr) -> Iterator[tuple[Path, ast.Call]]:
    """The ``Route(...)`` calls that an argument of a table stands for, each with its file."""
    if ast.unparse(item) in COMMON:
        return
    file, value = _resolved(path, item.value if isinstance(item, ast.Starred) else item)
    if isinstance(item, ast.Starred) and isinstance(value, (ast.Tuple, ast.List)):
        for element in value.elts:
            yield from _routes(file, element)
    elif _is_call(value, "Route"):
        yield file, value  # type: ignore[misc]
    else:
        raise ValueError(f"{path}:{item.lineno}: {ast.unparse(item)} should be written as Route(...), or name one")


def _cells(path: Path, route: ast.Call) -> tuple[str, ...]:
    given = dict(zip(FIELDS, route.args, strict=False)) | {k.arg: k.value for k in route.keywords if k.arg}
    when = given["when"]
    condition = ast.unparse(_with_constants(path, when.body if isinstance(when, ast.Lambda) else when))
    parts = [f"sm_{ast.unparse(_resolved(path, given['sm'])[1])} or newer"] if "sm" in given else []
    parts += [f"`{condition}`".replace("|", "\\|")] if condition != "True" else []
    if unsupported := given.get("unsupported"):
        text = ast.unparse(unsupported.body if isinstance(unsupported, ast.Lambda) else unsupported)
        parts.append(f"unless `{text}`".replace("|", "\\|"))
    return cell(_text(path, given["name"])), ", ".join(parts) or "otherwise", cell(_text(path, given["reason"]))


def _text(path: Path, value: ast.expr) -> str:
    """What a constant, a name of one, or an f-string of them says."""
    path, value = _resolved(path, value)
    if isinstance(value, ast.JoinedStr):
        return "".join(
            _text(path, part.value if isinstance(part, ast.FormattedValue) else part) for part in value.values
        )
    return str(value.value) if isinstance(value, ast.Constant) else ast.unparse(value)


def _is_call(value: ast.expr, name: str) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == name


# ---- names -----------------------------------------------------------------------------------------------------------


class _Replace(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.values.get(node.id, node))


def _with_constants(path: Path, value: ast.expr) -> ast.expr:
    """An expression with the numbers and texts that its names stand for."""
    names = {node.id: _resolved(path, node)[1] for node in ast.walk(value) if isinstance(node, ast.Name)}
    constants = {name: found for name, found in names.items() if isinstance(found, ast.Constant)}
    replaced: ast.expr = _Replace(constants).visit(copy.deepcopy(value))
    return replaced


def _resolved(path: Path, value: ast.expr) -> Placed:
    """What a name stands for, or what a call of a function returns, in its module or the module of weft it comes
    from."""
    if isinstance(value, ast.Name) and (found := _definition(path, value.id)):
        file, node = found
        return _resolved(file, node.value) if isinstance(node, ast.Assign) else (path, value)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        found = _definition(path, value.func.id)
        if found and isinstance(found[1], ast.FunctionDef) and (result := _returned(found[1], value)):
            return _resolved(found[0], result)
    return path, value


def _definition(path: Path, name: str) -> tuple[Path, ast.Assign | ast.FunctionDef] | None:
    for node in _parsed(path).body:
        if isinstance(node, ast.Assign) and any(ast.unparse(t) == name for t in node.targets):
            return path, node
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return path, node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft."):
            file = SOURCES.joinpath(*str(node.module).split(".")).with_suffix(".py")
            for alias in node.names if file.is_file() else ():
                if name == (alias.asname or alias.name):
                    return _definition(file, alias.name)
    return None


def _returned(function: ast.FunctionDef, call: ast.Call) -> ast.expr | None:
    """What a function of assignments and one return gives for a call, with arguments and local names replaced."""
    every = function.args
    names = [a.arg for a in (*every.posonlyargs, *every.args)]
    values: dict[str, ast.expr] = dict(zip(names[len(names) - len(every.defaults) :], every.defaults, strict=True))
    values |= dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
    for node in function.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = _Replace(values).visit(copy.deepcopy(node.value))
        elif isinstance(node, ast.Return) and node.value is not None:
            result: ast.expr = _Replace(values).visit(copy.deepcopy(node.value))
            return result
    return None


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
