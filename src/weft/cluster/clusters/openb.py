"""Alibaba's GPU cluster of 2023 (openb): ``sn, cpu_milli, memory_mib, gpu, model``, one row a node."""

from __future__ import annotations

from pathlib import Path

from weft.cluster.cluster_file import ClusterFormat, named
from weft.cluster.model import Cluster, NodeGroup
from weft.cluster.trace import read

COLUMNS = ("cpu_milli", "memory_mib", "gpu")


def load(path: Path) -> Cluster:
    """Thousandths of cores, MiB. A node without GPUs has the type ``none``; the memory of GPUs is not given."""
    table = read(path, COLUMNS, ("sn", "model"))
    nodes = []
    for row, (cpu, memory, gpus) in enumerate(zip(*(table.whole(name) for name in COLUMNS), strict=True)):
        if not cpu + memory + gpus >= 0:
            raise table.wrong(row, "gpu", "a number in each of cpu_milli, memory_mib and gpu")
        model = table.words["model"][row] or "none"
        nodes.append(NodeGroup(1, int(gpus), model, cpu=float(cpu) / 1000, memory_gb=float(memory) / 1024))
    return named(path, nodes, table.words["sn"], table.lines.tolist())


CLUSTER = ClusterFormat(
    "openb",
    load,
    lambda path, text: text.lstrip().startswith("sn,cpu_milli"),
    "openb's node list: sn, cpu_milli, memory_mib, gpu, model",
)
