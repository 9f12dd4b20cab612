"""Slurm: ``scontrol show node``, also with ``--oneliner`` or ``--json``."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.cluster.cluster_file import ClusterFormat, named
from weft.cluster.files.slurm import gres_of, number
from weft.cluster.files.text import TraceError, list_of, text_of
from weft.cluster.model import Cluster, NodeGroup
from weft.words import count

NODE = re.compile(r"^NodeName=(\S+)", re.MULTILINE)
STATES = {  # how a state begins, in lower case → why its node takes no jobs, the most important first
    "down": "down", "drain": "drained or draining", "drng": "drained or draining", "fail": "failing",
    "no_respond": "not responding", "not_respond": "not responding", "future": "of the future", "futr": "of the future",
    "unk": "in an unknown state", "error": "in an unknown state", "inval": "with an invalid registration",
}  # fmt: skip
STRAY = re.compile(r"^(?!NodeName=)\S", re.MULTILINE)  # a line that begins otherwise, and is not indented
JSON = re.compile(r'\s*\{\s*"(nodes|meta|errors|warnings|last_update)"')
NODES = re.compile(r'"nodes"\s*:')


@dataclass(frozen=True)
class Node:
    """A node as Slurm writes it.

    Args:
        at: where it is in the file, for messages.
        states: such as ``IDLE``, ``DRAIN``; ``idle*``.
        memory: MiB.
        least: cores and memory are at least these, of a row of several nodes.
    """

    at: str
    name: str
    states: tuple[str, ...]
    gres: str
    cpus: float
    memory: float
    least: bool = False


def load(path: Path) -> Cluster:
    """The cores that jobs can have (``CPUEfctv``, else ``CPUTot``), memory without ``MemSpecLimit``; 1 MiB is Slurm's default
    and counts as unknown. GPUs are the gres ``gpu``, and nothing whose name only begins so; those cut by MIG count as many as
    hold the slices, and have no type of their own. Racks and the memory of GPUs are not said. A node of a power-saving or
    maintenance state counts.

    Left out and counted: nodes that are down, drained, draining, failing or do not respond, and with GPUs of several types.
    """
    text = text_of(path).read()
    if text.lstrip().startswith("{"):
        return cluster_of(path, _of_json(path))
    return cluster_of(path, _of_text(path, text))


def _of_text(path: Path, text: str) -> Iterable[Node]:
    starts = list(NODE.finditer(text))
    other = STRAY.search(text, starts[0].start()) if starts else STRAY.search(text)
    if other or not starts:
        line = text.count("\n", 0, other.start() if other else 0) + 1
        raise TraceError(
            f"{path}:{line}: expected 'NodeName=…', or an indented line of such a node, as of 'scontrol show node'"
        )
    line = text.count("\n", 0, starts[0].start()) + 1
    for match, end in zip(starts, [*(later.start() for later in starts[1:]), len(text)], strict=True):
        at, part = f"{path}:{line}", text[match.start() : end]
        line += part.count("\n")

        def field(key: str, part: str = part) -> str | None:
            found = re.search(rf"(?:^|\s){key}=(\S*)", part)  # the first: free text, such as Reason, comes later
            return found[1] if found else None

        state, gres, cpus = field("State"), field("Gres"), field("CPUEfctv") or field("CPUTot")
        amounts = {"CPUTot": cpus, "RealMemory": field("RealMemory"), "MemSpecLimit": field("MemSpecLimit") or "0"}
        if missing := [name for name, value in {"State": state, "Gres": gres, **amounts}.items() if value is None]:
            raise TraceError(f"{at}: node '{match[1]}' has no {missing[0]}; expected what 'scontrol show node' writes")
        for name, value in amounts.items():
            if not re.fullmatch(r"\d{1,15}", str(value)):
                raise TraceError(f"{at}: {name} of node '{match[1]}' is '{value}'; expected a whole number")
        cores, memory, special = (float(str(value)) for value in amounts.values())
        yield Node(at, match[1], tuple(str(state).split("+")), str(gres), cores, memory - special)


def _of_json(path: Path) -> Iterable[Node]:
    entries = list_of(path, "nodes", "scontrol show node")
    for k, entry in enumerate(entries, 1):
        at = f"{path}: node {k}"
        try:
            cpus = number(entry["cpus"] if entry.get("effective_cpus") is None else entry["effective_cpus"], "cpus")
            memory = number(entry["real_memory"], "real_memory") - number(entry.get("specialized_memory", 0), "memory")
            yield Node(at, word(entry["name"]), states_of(entry["state"]), word(entry.get("gres") or ""), cpus, memory)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TraceError(
                f"{at}: {type(error).__name__}: {error}; expected name, state, gres, cpus, real_memory"
            ) from None


def word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60}; expected a word")
    return value


def states_of(value: Any) -> tuple[str, ...]:
    """A list of states, or, of older Slurms, one."""
    return tuple(map(word, value if isinstance(value, list) else [value]))


def cluster_of(path: Path, nodes: Iterable[Node]) -> Cluster:
    """A cluster of nodes; one that is there several times, as in several partitions, counts once."""
    kept: dict[str, NodeGroup] = {}
    seen: dict[str, Node] = {}
    dropped, others, shards = Counter[str](), dict[str, None](), dict[str, tuple[int, int]]()
    for node in nodes:
        first = seen.setdefault(node.name, node)
        if first is not node:
            same = (first.states, first.gres) == (node.states, node.gres)
            if same and (first.least or node.least or (first.cpus, first.memory) == (node.cpus, node.memory)):
                continue
            raise TraceError(
                f"{node.at}: node '{node.name}' is there before, and not the same ({first.at}); expected it once, or alike"
            )
        try:
            gres = gres_of(node.gres)
            others |= dict.fromkeys(gres.others)
            if why := _left_out(node.states) or ("with GPUs of several types" if len(gres.types) > 1 else ""):
                dropped[why] += 1
                continue
            if gres.shards:
                shards[node.name] = (gres.shards, gres.gpus)
            memory_gb = 0 if node.memory <= 1 else node.memory / 1024
            kind = next(iter(gres.types), "none")
            kept[node.name] = NodeGroup(1, gres.gpus, kind, cpu=node.cpus, memory_gb=memory_gb)
        except ValueError as error:
            raise TraceError(f"{node.at}: node '{node.name}': {error}") from None
    warnings = [f"gres that are no GPUs are ignored: {', '.join(others)}"] if others else []
    if shards:
        many, gpus = (sum(each[k] for each in shards.values()) for k in (0, 1))
        warnings.append(
            f"{count(many, 'gres/shard')} of {count(gpus, 'GPU')} on {count(len(shards), 'node')} add none: jobs of a trace "
            "that hold shards are left out of it"
        )
    if least := sum(seen[name].least for name in kept):
        warnings.append(
            f"cores and memory of {count(least, 'node')} are the least of their row; sinfo -N has those of each"
        )
    return named(path, list(kept.values()), list(kept), dropped=dropped, warnings=warnings)


def _left_out(states: tuple[str, ...]) -> str:
    """Why a node with these states takes no jobs, or ""."""
    words = [state.strip().lower() for state in states]
    for begin, why in STATES.items():
        if any(state.startswith(begin) for state in words):
            return why
    return "not responding" if any(state.rstrip("~#!%$@^-+").endswith("*") for state in words) else ""


CLUSTER = ClusterFormat(
    "scontrol",
    load,
    lambda path, text: (
        bool(NODE.match(text.lstrip())) or bool(JSON.match(text) and NODES.search(text) and '"sinfo"' not in text)
    ),
    "Slurm: scontrol show node, also with --oneliner or --json",
)
