"""What the learner's file must be before it runs: Python, without the marker, and made of what the exercise is about.

A pass needs the tests and the removed marker. Comments are found by Python's own tokenizer, so a marker in a string does
not count, and a task that is commented out is told from one that is done.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from typing import Any

from weft.learn.language import Text
from weft.learn.marked import MARKER

IMPORTS = {
    *("__future__", "collections", "dataclasses", "enum", "functools", "itertools", "math", "operator", "random"),
    *("statistics", "time", "typing", "numpy", "torch", "triton"),
}
# Ways out of the exercise: to files, to the process, to names built at run time.
NAMES = {"open", "exec", "eval", "compile", "globals", "locals", "vars", "getattr", "setattr", "delattr", "input"}
NAMES |= {"__import__", "breakpoint", "__builtins__", "__loader__", "__spec__"}
ATTRIBUTES = {"os", "sys", "gc", "inspect", "ctypes", "importlib", "builtins", "subprocess", "interpreter", "_C"}
DUNDERS = {"__init__", "__call__", "__name__", "__len__", "__iter__", "__getitem__", "__doc__"}


def has_marker(source: str) -> bool:
    """Whether the learner has not yet removed ``# I AM NOT DONE``."""
    return any(text.strip() == MARKER for _, text in comments(source))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment; of a file that is not Python, as far as it can be read."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("#")
    except (tokenize.TokenError, SyntaxError):
        return


def commented_out(source: str) -> list[int]:
    """The first lines of runs of comments that are code: a definition, an assignment, a call."""
    runs: list[list[tuple[int, str]]] = []
    for line, text in comments(source):
        if runs and runs[-1][-1][0] == line - 1:
            runs[-1].append((line, text))
        else:
            runs.append([(line, text)])
    found = []
    for run in runs:
        text = "\n".join(t.removeprefix(" ") for _, t in run)
        try:
            body = ast.parse(text).body
        except SyntaxError:
            continue
        code = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AugAssign, ast.Return, ast.For, ast.While, ast.Import)
        if any(isinstance(s, code) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)) for s in body):
            found.append(run[0][0])
    return found


def syntax_error(source: str) -> tuple[int, Text] | None:
    """Line and message of the first syntax error."""
    try:
        ast.parse(source)
    except SyntaxError as error:
        shown = (error.text or "").rstrip()
        arrow = f"\n    {shown}\n    {' ' * max((error.offset or 1) - 1, 0)}^" if shown else ""
        return error.lineno or 0, Text(
            f"line {error.lineno}: Python cannot parse this: {error.msg}{arrow}",
            f"第 {error.lineno} 行：Python 无法解析：{error.msg}{arrow}",
        )
    except ValueError as error:  # null bytes
        return 0, Text(f"Python cannot parse this file: {error}", f"Python 无法解析此文件：{error}")
    return None


def not_allowed(source: str, allow: tuple[str, ...] = (), forbid: tuple[str, ...] = ()) -> tuple[int, Text] | None:
    """The first use of something that the exercise is not about, with its line."""
    tree = ast.parse(source)
    modules: set[str] = set()
    node: Any
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                root = (of or alias.name).split(".")[0]
                parts = {*of.split("."), *alias.name.split(".")}
                if root not in IMPORTS | set(allow) or (parts & ATTRIBUTES) - set(allow):
                    name = f"{of}.{alias.name}".strip(".")
                    return node.lineno, Text(
                        f"line {node.lineno}: `import {name}` is not needed for this exercise and not allowed in it",
                        f"第 {node.lineno} 行：本练习不需要、也不允许 `import {name}`",
                    )
                if {of.split(".")[-1], alias.name} & set(forbid):
                    return node.lineno, _is_the_exercise(node.lineno, alias.name)
                modules.add((alias.asname or alias.name).split(".")[0])
    own = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if not name or name in allow:
            continue
        if name in forbid and not (isinstance(node, ast.Name) and name in own):
            return node.lineno, _is_the_exercise(node.lineno, name)
        dunder = name.startswith("__") and name.endswith("__") and name not in DUNDERS
        if (name in ATTRIBUTES or dunder) if isinstance(node, ast.Attribute) else name in NAMES:
            return node.lineno, Text(
                f"line {node.lineno}: `{name}` is not allowed in an exercise",
                f"第 {node.lineno} 行：练习中不允许使用 `{name}`",
            )
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            owner: Any = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in modules:
                return node.lineno, Text(
                    f"line {node.lineno}: this replaces `{ast.unparse(node)}`; an exercise changes no library",
                    f"第 {node.lineno} 行：这里替换了 `{ast.unparse(node)}`；练习不得修改任何库",
                )
    return None


def _is_the_exercise(line: int, name: str) -> Text:
    return Text(
        f"line {line}: `{name}` is the library's own answer; write it yourself here",
        f"第 {line} 行：`{name}` 是库自带的答案；请在这里自己实现",
    )
