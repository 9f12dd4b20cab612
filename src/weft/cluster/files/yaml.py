"""YAML files: those of one list, read so that every mistake is named with its line, and those of any documents."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.cluster.files.text import TraceError, text_of
from weft.definition import UnknownName


def _library() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"a YAML file needs PyYAML: pip install 'weft[cluster]' ({error})", name="yaml") from None
    return yaml


def _wrong(path: Path, error: Exception) -> TraceError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if hasattr(error, "context_mark"):
        return TraceError(f"{path}:{mark.line + 1 if mark else 1}: no YAML: {getattr(error, 'problem', error)}")
    if isinstance(error, RecursionError):
        return TraceError(f"{path}: no YAML: lists within lists, too many to read")
    return TraceError(f"{path}: no YAML: {error}")  # a character that YAML does not allow, no date, no number


def root(path: Path, expected: str) -> Any:
    """The node of a file of one document; its keys, lists and values are read with :func:`mapping`, :func:`items` and
    :func:`scalar`, each of which names the line of a mistake.

    Args:
        expected: what the file holds, for messages: ``groups of nodes under 'nodes:'``.

    Raises:
        TraceError: no YAML, or nothing in it.
        ImportError: PyYAML is missing.
    """
    yaml = _library()
    try:
        found = yaml.compose(text_of(path).read(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (RecursionError, yaml.YAMLError) as error:
        if isinstance(error, RecursionError) or "nesting depth" in str(error):  # Python's, libyaml's
            raise TraceError(f"{path}: no YAML: lists within lists, too many to read; expected {expected}") from None
        raise _wrong(path, error) from None
    if found is None:
        raise TraceError(f"{path}: it is empty; expected {expected}")
    return found


def entries(path: Path, key: str, of: str) -> list[Any]:
    """The nodes of the list under the file's only key.

    Args:
        of: what the list is of, for messages: ``groups of nodes``.

    Raises:
        TraceError: no YAML, another key, no list.
        ImportError: PyYAML is missing.
    """
    node = root(path, f"{of} under '{key}:'")
    top = mapping(path, node, (key,), "the file")
    if key not in top:
        raise TraceError(f"{path}:{line(node)}: '{key}' is missing")
    return items(path, top[key], key)


def items(path: Path, node: Any, key: str) -> list[Any]:
    """The nodes of a list."""
    if node.id != "sequence":
        raise TraceError(f"{path}:{line(node)}: {key} is no list; expected lines that begin with '-'")
    found: list[Any] = node.value
    return found


def scalar(path: Path, node: Any, key: str, expected: str) -> Any:
    """The value of a scalar: text, a number, a boolean, None.

    Lists and mappings are refused, not built: one may contain itself, or a few lines of aliases expand to gigabytes."""
    yaml = _library()
    if node.id != "scalar":
        raise TraceError(f"{path}:{line(node)}: {key} is a {node.id}; expected {expected}")
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a tag such as !!python/object; no date
        raise TraceError(f"{path}:{line(node)}: {key}: {error}") from None


def documents(path: Path, text: str) -> list[Any]:
    """The values of a file of YAML documents, empty ones left out.

    Raises:
        TraceError: no YAML, or a value that is none of YAML's own kinds.
        ImportError: PyYAML is missing.
    """
    yaml = _library()
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's takes an eighth of the time
        return [found for found in yaml.load_all(text, Loader=loader) if found is not None]
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise _wrong(path, error) from None


def line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def mapping(path: Path, node: Any, known: Iterable[str], what: str) -> dict[str, Any]:
    """Key → node of a YAML mapping with keys that are known, each once."""
    if node.id != "mapping":
        raise TraceError(f"{path}:{line(node)}: {what} is a {node.id}; expected 'key: value' of {', '.join(known)}")
    found: dict[str, Any] = {}
    for key, value in node.value:
        if key.value not in known:
            raise TraceError(f"{path}:{line(key)}: {UnknownName('key', str(key.value), known)}")
        if key.value in found:
            raise TraceError(f"{path}:{line(key)}: {key.value} already exists (line {line(found[key.value])})")
        found[key.value] = value
    return found
