"""Slurm: ``sinfo -N -o "%N %G %c %m %t"``, the columns in any order, or ``sinfo --json``."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.cluster.cluster_file import ClusterFormat
from weft.cluster.clusters.scontrol import Node, cluster_of, states_of, word
from weft.cluster.files.slurm import hosts, number
from weft.cluster.files.text import TraceError, list_of, text_of
from weft.cluster.model import MOST_NODES, Cluster

COLUMNS = ("NODELIST", "GRES", "CPUS", "MEMORY", "STATE")
ALL_CPUS = "CPUS(A/I/O/T)"  # of %C: allocated, idle, other, total
COMMAND = 'sinfo -N -o "%N %G %c %m %t"'
NAMES = ("NODELIST", "HOSTNAMES")
HEAD = re.compile(r"^[^\n]*\b(?:NODELIST|HOSTNAMES)\b", re.MULTILINE)
AMOUNT = re.compile(r"(\d{1,15})(\+?)")
JSON = re.compile(r'\s*\{\s*"(sinfo|meta|errors|warnings)"')


def load(path: Path) -> Cluster:
    """GPUs, states and what is left out are as of ``scontrol show node``; cores and memory are all that a node has. A row may
    be of several nodes, ``cn[001-080]``; where their cores or memory differ (``64+``), the least counts for each. Columns are
    separated by blanks, or by ``|`` as in ``-o "%N|%G|%c|%m|%t"``.
    """
    text = text_of(path).read()
    nodes = _of_json(path) if text.lstrip().startswith("{") else _of_text(path, text)
    return cluster_of(path, list(nodes))


def _of_text(path: Path, text: str) -> Iterable[Node]:
    lines = text.splitlines()
    head = next((k for k, line in enumerate(lines) if HEAD.match(line)), None)
    if head is None:
        raise TraceError(f"{path}: no column {' or '.join(NAMES)}; expected what {COMMAND} writes, with its header")
    mark = "|" if "|" in lines[head] else None
    columns = [name.strip() for name in lines[head].split(mark)]
    called = {**dict.fromkeys(NAMES, "NODELIST"), ALL_CPUS: "CPUS"}
    where = {called.get(name, name): k for k, name in enumerate(columns)}
    if missing := [name for name in COLUMNS if name not in where]:
        there = ", ".join(columns)
        raise TraceError(f"{path}:{head + 1}: no column {missing[0]} (there are: {there}); expected those of {COMMAND}")
    for k, line in enumerate(lines[head + 1 :], head + 2):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(mark, -1 if mark else len(columns) - 1)]
        if len(cells) != len(columns):
            raise TraceError(f"{path}:{k}: {len(cells)} columns; expected {len(columns)} ({', '.join(columns)})")
        names, gres, *amounts, state = (cells[where[name]] for name in COLUMNS)
        amounts = [amount.rpartition("/")[2] for amount in amounts]
        known = [AMOUNT.fullmatch(amount) for amount in amounts]
        for name, match, amount in zip(COLUMNS[2:4], known, amounts, strict=True):
            if not match:
                raise TraceError(f"{path}:{k}: {name} is '{amount}'; expected a whole number")
        cpus, memory = (float(match[1]) for match in known if match)
        try:
            every = hosts(names, MOST_NODES)
        except ValueError as error:
            raise TraceError(f"{path}:{k}: {error}") from None
        for name in every:
            yield Node(
                f"{path}:{k}", name, tuple(state.split("+")), gres, cpus, memory, any("+" in text for text in amounts)
            )


def _of_json(path: Path) -> Iterable[Node]:
    entries = list_of(path, "sinfo", "sinfo")
    for k, entry in enumerate(entries, 1):
        at = f"{path}: row {k}"
        try:
            if not isinstance(names := entry["nodes"]["nodes"], list):
                raise TypeError(f"{names!r:.60}; expected a list of names")
            states, gres = states_of(entry["node"]["state"]), entry["gres"]
            gres = word((gres.get("total") if isinstance(gres, dict) else gres) or "")
            (cpus, more), (memory, larger) = (_bounds(entry[name], name) for name in ("cpus", "memory"))
            for name in [each for text in names for each in hosts(word(text), MOST_NODES)]:
                yield Node(at, name, states, gres, cpus, memory, cpus != more or memory != larger)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TraceError(
                f"{at}: {type(error).__name__}: {error}; expected nodes, node.state, gres, cpus, memory"
            ) from None


def _bounds(of: dict[str, Any], what: str) -> tuple[float, float]:
    most = number(of["maximum"], what)
    return (most if of.get("minimum") is None else number(of["minimum"], what)), most


CLUSTER = ClusterFormat(
    "sinfo",
    load,
    lambda path, text: (
        bool(HEAD.search(text) and not text.lstrip().startswith("{")) or bool(JSON.match(text) and '"sinfo"' in text)
    ),
    f"Slurm: {COMMAND}, or sinfo --json",
)
