"""YAML documents whose every value knows its line, also those inside a ConfigMap's text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.cluster.files.text import TraceError, text_of


@dataclass(frozen=True)
class Located:
    """A document, or a part of one.

    Args:
        value: plain lists, dictionaries and scalars.
        node: PyYAML's node of it.
        first: lines before the text it was read from.
    """

    path: Path
    value: Any
    node: Any
    first: int = 0

    @property
    def line(self) -> int:
        return self.first + int(self.node.start_mark.line) + 1

    def get(self, *keys: str | int) -> "Located | None":
        """The part below these keys; None where there is none."""
        here: Located | None = self
        for key in keys:
            here = here._child(key) if here is not None else None
        return here

    def at(self, *keys: str | int) -> Any:
        """Its value, or None."""
        found = self.get(*keys)
        return found.value if found is not None else None

    def line_of(self, key: str) -> int:
        """The line of a key of a mapping."""
        for name, _ in self.node.value if self.node.id == "mapping" else ():
            if name.value == key:
                return self.first + int(name.start_mark.line) + 1
        return self.line

    def _child(self, key: str | int) -> "Located | None":
        if isinstance(key, int):
            if isinstance(self.value, list) and key < len(self.value):
                return Located(self.path, self.value[key], self.node.value[key], self.first)
            return None
        if not isinstance(self.value, dict) or key not in self.value:
            return None
        for name, node in self.node.value:
            if name.value == str(key):
                return Located(self.path, self.value[key], node, self.first)
        return None

    def __iter__(self) -> Iterator["Located"]:
        """The parts of a list; none of anything else."""
        for k in range(len(self.value) if isinstance(self.value, list) else 0):
            child = self._child(k)
            if child is not None:
                yield child

    def items(self) -> Iterator[tuple[str, "Located"]]:
        """The parts of a mapping; none of anything else."""
        for key in self.value if isinstance(self.value, dict) else ():
            child = self._child(str(key))
            if child is not None:
                yield str(key), child

    def inner(self) -> "list[Located]":
        """The documents in this text, such as a ConfigMap's."""
        if not isinstance(self.value, str):
            return []
        block = self.node.style in ("|", ">")
        return parse(self.path, self.value, self.line if block else self.line - 1)


def parse(path: Path, text: str, first: int = 0) -> list[Located]:
    """The documents of a text; empty ones are left out.

    Raises:
        TraceError: no YAML, with the line.
    """
    import yaml

    loader_class = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        nodes = list(yaml.compose_all(text, Loader=loader_class))
        made = yaml.SafeLoader("")
        return [
            Located(path, _built(made, node), node, first)
            for node in nodes if node is not None
        ]  # fmt: skip
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        at = first + (mark.line + 1 if mark else 1)
        raise TraceError(f"{path}:{at}: no YAML: {getattr(error, 'problem', error)}") from None


def _built(loader: Any, node: Any, depth: int = 0) -> Any:
    if depth > 64:
        raise RecursionError("lists within lists, too many to read")
    if node.id == "mapping":
        return {str(key.value): _built(loader, value, depth + 1) for key, value in node.value}
    if node.id == "sequence":
        return [_built(loader, value, depth + 1) for value in node.value]
    return loader.construct_object(node)


def read(paths: list[Path]) -> list[Located]:
    """The documents of YAML files, and of those in folders and below.

    Raises:
        TraceError: no YAML, with the line.
        FileNotFoundError: no such file.
    """
    files = []
    for path in paths:
        files += (
            sorted(f for f in path.rglob("*") if f.suffix in (".yaml", ".yml") and f.is_file())
            if path.is_dir()
            else [path]
        )
    return [found for file in files for found in parse(file, text_of(file).read())]
