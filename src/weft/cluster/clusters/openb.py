"""Alibaba's GPU cluster of 2023 (openb): ``sn, cpu_milli, memory_mib, gpu, model``, one row a node."""

from pathlib import Path

from weft.cluster.cluster_file import ClusterFormat, named
from weft.cluster.files.columns import read
from weft.cluster.model import Cluster, NodeGroup

COLUMNS = ("cpu_milli", "memory_mib", "gpu")


def load(path: Path) -> Cluster:
    """Thousandths of cores, MiB. A node without GPUs has the type ``none``; the memory of GPUs is not given."""
    table = read(path, COLUMNS, ("sn", "model"))
    for name in COLUMNS:
        table.whole(name)
    columns = (*(table.amounts(name).tolist() for name in COLUMNS), table.words["model"])
    nodes = [
        NodeGroup(1, int(gpus), model or "none", cpu=cpu / 1000, memory_gb=memory / 1024)
        for cpu, memory, gpus, model in zip(*columns, strict=True)
    ]
    return named(path, nodes, table.words["sn"], table.lines.tolist())


CLUSTER = ClusterFormat(
    "openb",
    load,
    lambda path, text: text.lstrip().startswith("sn,cpu_milli"),
    "openb's node list: sn, cpu_milli, memory_mib, gpu, model",
)
