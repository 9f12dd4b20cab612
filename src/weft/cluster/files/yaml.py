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


def entries(path: Path, key: str, of: str) -> list[Any]:
    """The nodes of the list under the file's only key.

    Args:
        of: what the list is of, for messages: ``groups of nodes``.

    Raises:
        TraceError: no YAML, another key, no list.
        ImportError: PyYAML is missing.
    """
    yaml = _library()
    try:
        root = yaml.compose(text_of(path).read(), Loader=yaml.SafeLoader)
    except RecursionError:
        raise TraceError(
            f"{path}: no YAML: lists within lists, too many to read; expected {of} under '{key}:'"
        ) from None
    except yaml.YAMLError as error:
        raise _wrong(path, error) from None
    if root is None:
        raise TraceError(f"{path}: it is empty; expected {of} under '{key}:'")
    top = mapping(path, root, (key,), "the file")
    if key not in top:
        raise TraceError(f"{path}:{line(root)}: '{key}' is missing")
    if not isinstance(top[key], yaml.SequenceNode):
        raise TraceError(f"{path}:{line(top[key])}: {key} is no list; expected lines that begin with '-'")
    found: list[Any] = top[key].value
    return found


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
