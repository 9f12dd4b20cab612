"""Cluster files: the nodes of a cluster from a file, its format recognised by its content."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.cluster.files.text import TraceError, text_of
from weft.cluster.model import Cluster, NodeGroup
from weft.cluster.plugins import discover
from weft.definition import UnknownName

NOTHING: Mapping[str, int] = {}


@dataclass(frozen=True)
class ClusterFormat:
    """A format of cluster files. Every module of ``weft.cluster.clusters`` has one, under the name ``CLUSTER``.

    Args:
        name: what users call it.
        load: ``(path) -> Cluster``.
        matches: ``(path, text) -> bool``: whether a file is of this format, by its name and first 4,096 characters (none of a
            folder). A file must not match two formats.
        meaning: one line: where it comes from, its columns and units.
    """

    name: str
    load: Callable[[Path], Cluster]
    matches: Callable[[Path, str], bool]
    meaning: str


def formats() -> dict[str, ClusterFormat]:
    return discover("weft.cluster.clusters", "CLUSTER")


def load(path: str | Path, format: str = "") -> Cluster:
    """The nodes of a cluster file, plain or gzip'd, or of a folder of Kubernetes' YAML files.

    Args:
        format: ``yaml``, ``tiresias`` …; by default the one that the file looks like.

    Raises:
        TraceError: it looks like none of the formats, or its content is wrong.
        UnknownName: no such format.
    """
    path, known = Path(path), formats()
    if format and format not in known:
        raise UnknownName("cluster file format", format, known)
    if not format:
        begin = "" if path.is_dir() else text_of(path).read(4096)
        format = next((name for name, of in known.items() if of.matches(path, begin)), "")
    if not format and path.is_dir():
        raise TraceError(f"{path} is a folder; expected a file, or a folder of nodes in YAML")
    if not format:
        kinds = "\n  ".join(f"{name}: {of.meaning}" for name, of in known.items())
        raise TraceError(f"{path}: it is no cluster file that weft recognises; expected one of\n  {kinds}")
    cluster = known[format].load(path)
    if not len(cluster):
        dropped = "; ".join(f"{count} left out: {why}" for why, count in cluster.dropped.items())
        raise TraceError(f"{path}: it has no nodes" + (f" ({dropped})" if dropped else ""))
    return cluster


def named(
    path: Path,
    nodes: Sequence[NodeGroup],
    names: Sequence[str],
    lines: Sequence[int] = (),
    dropped: Mapping[str, int] = NOTHING,
    warnings: Sequence[str] = (),
) -> Cluster:
    """A cluster of nodes with the names that a file gives them.

    Args:
        nodes: groups of one node.
        lines: the line of each node, for the message.
        dropped: reason → nodes that are left out.
        warnings: what is doubtful, a sentence each.

    Raises:
        TraceError: a name comes twice.
    """
    lines_of: dict[str, int] = {}
    for k, name in enumerate(names):
        if name in lines_of:
            at, first = (f":{lines[k]}", f" (line {lines[lines_of[name]]})") if len(lines) else ("", "")
            raise TraceError(f"{path}{at}: node '{name}' already exists{first}; expected one row a node")
        lines_of[name] = k
    try:
        made = Cluster.of(nodes)
    except ValueError as error:  # more types than the simulator holds
        raise TraceError(f"{path}: {error}") from None
    return dataclasses.replace(made, names=tuple(names), dropped=dict(dropped), warnings=tuple(warnings))
