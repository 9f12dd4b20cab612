"""weft's own cluster file: a YAML list of groups of nodes, under ``nodes``, with the fields of ``NodeGroup``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.cluster.cluster_file import ClusterFormat
from weft.cluster.file import TraceError, text_of
from weft.cluster.model import Cluster, NodeGroup
from weft.definition import UnknownName

# Key → what its value must be.
MOST = 1e12  # cores, GiB or nodes; far above any cluster, and thousandths of it are still whole numbers of 64 bits
WHOLE = ("a whole number of 0 or more", int)
NODES = ("a whole number of 1 or more", int)
NUMBER = ("a number of 0 or more", int | float)
WORD = ("a word", str)
KEYS: dict[str, tuple[str, Any]] = {
    "count": WHOLE, "gpus": WHOLE, "gpu_type": WORD, "gpu_memory_gb": NUMBER, "cpu": NUMBER, "memory_gb": NUMBER,
    "rack": WORD, "rack_nodes": NODES, "nvlink_domain": WORD, "nvlink_domain_nodes": NODES, "name": WORD,
}  # fmt: skip


def load(path: Path) -> Cluster:
    """Every mistake is named with its line.

    Raises:
        TraceError: no YAML, an unknown key (with the nearest one), a value of another kind.
        ImportError: PyYAML is missing.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            f"a YAML cluster file needs PyYAML: pip install 'weft[cluster]' ({error})", name="yaml"
        ) from None

    try:
        root = yaml.compose(text_of(path).read(), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise TraceError(f"{path}:{mark.line + 1 if mark else 1}: no YAML: {error.problem}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise TraceError(f"{path}: no YAML: {error}") from None
    if root is None:
        raise TraceError(f"{path}: it is empty; expected groups of nodes under 'nodes:'")
    top = _mapping(path, root, ("nodes",), "the file")
    if "nodes" not in top:
        raise TraceError(f"{path}:{_line(root)}: 'nodes' is missing")
    if not isinstance(top["nodes"], yaml.SequenceNode):
        raise TraceError(f"{path}:{_line(top['nodes'])}: nodes is no list; expected lines that begin with '-'")
    groups = [_group(path, node) for node in top["nodes"].value]
    try:
        return Cluster.of(groups)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _mapping(path: Path, node: Any, known: Any, what: str) -> dict[str, Any]:
    """Key → node of a YAML mapping with keys that are known, each once."""
    if node.id != "mapping":
        raise TraceError(f"{path}:{_line(node)}: {what} is a {node.id}; expected 'key: value' of {', '.join(known)}")
    found: dict[str, Any] = {}
    for key, value in node.value:
        if key.value not in known:
            raise TraceError(f"{path}:{_line(key)}: {UnknownName('key', str(key.value), known)}")
        if key.value in found:
            raise TraceError(f"{path}:{_line(key)}: {key.value} is there already (line {_line(found[key.value])})")
        found[key.value] = value
    return found


def _group(path: Path, node: Any) -> NodeGroup:
    import yaml

    values: dict[str, Any] = {}
    for key, value in _mapping(path, node, KEYS, "a group of nodes").items():
        expected, kind = KEYS[key]
        try:
            known = yaml.SafeLoader("").construct_object(value, deep=True)
        except yaml.YAMLError as error:  # a tag such as !!python/object
            raise TraceError(f"{path}:{_line(value)}: {key}: {error}") from None
        fits = isinstance(known, kind) and not isinstance(known, bool)
        least = int(KEYS[key] is NODES)
        if not fits or (kind is not str and not least <= known < MOST):
            raise TraceError(f"{path}:{_line(value)}: {key} is {known!r}; expected {expected}")
        values[key] = known
    if "count" not in values:
        raise TraceError(f"{path}:{_line(node)}: count is missing: how many such nodes there are")
    try:
        return NodeGroup(**values)
    except ValueError as error:  # what does not go together
        raise TraceError(f"{path}:{_line(node)}: {error}") from None


CLUSTER = ClusterFormat(
    "yaml",
    load,
    lambda path, text: path.name.removesuffix(".gz").endswith((".yaml", ".yml")),
    "a list of groups of nodes under 'nodes:', with " + ", ".join(KEYS),
)
