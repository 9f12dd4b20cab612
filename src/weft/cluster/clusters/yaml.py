"""weft's own cluster file: a YAML list of groups of nodes, under ``nodes``, with the fields of ``NodeGroup``."""

from pathlib import Path
from typing import Any

from weft.cluster.cluster_file import ClusterFormat
from weft.cluster.files.kubernetes import YAML
from weft.cluster.files.text import TraceError
from weft.cluster.files.yaml import entries, line, mapping
from weft.cluster.model import Cluster, NodeGroup

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
    groups = [_group(path, node) for node in entries(path, "nodes", "groups of nodes")]
    try:
        return Cluster.of(groups)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None


def _group(path: Path, node: Any) -> NodeGroup:
    import yaml

    values: dict[str, Any] = {}
    for key, value in mapping(path, node, KEYS, "a group of nodes").items():
        expected, kind = KEYS[key]
        if (
            value.id != "scalar"
        ):  # lists are not built: one may contain itself, or a few lines of aliases expand to gigabytes
            raise TraceError(f"{path}:{line(value)}: {key} is a {value.id}; expected {expected}")
        try:
            known = yaml.SafeLoader("").construct_object(value)
        except yaml.YAMLError as error:  # a tag such as !!python/object
            raise TraceError(f"{path}:{line(value)}: {key}: {error}") from None
        fits = isinstance(known, kind) and not isinstance(known, bool)
        least = int(KEYS[key] is NODES)
        if not fits or (kind is not str and not least <= known < MOST):
            raise TraceError(f"{path}:{line(value)}: {key} is {known!r}; expected {expected}")
        values[key] = known
    if "count" not in values:
        raise TraceError(f"{path}:{line(node)}: count is missing: how many such nodes there are")
    try:
        return NodeGroup(**values)
    except ValueError as error:  # what does not go together
        raise TraceError(f"{path}:{line(node)}: {error}") from None


CLUSTER = ClusterFormat(
    "yaml",
    load,
    lambda path, text: path.name.removesuffix(".gz").endswith((".yaml", ".yml")) and not YAML.search(text),
    "a list of groups of nodes under 'nodes:', with " + ", ".join(KEYS),
)
