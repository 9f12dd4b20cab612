"""Alibaba's nodes with spot GPUs (Duan et al., ASPLOS 2026): ``node_info_df.csv``, a node a row."""

from pathlib import Path

from weft.cluster.cluster_file import ClusterFormat, named
from weft.cluster.files.columns import read
from weft.cluster.model import Cluster, NodeGroup

COLUMNS = ("gpu_model", "gpu_capacity_num", "cpu_num", "node_name")


def load(path: Path) -> Cluster:
    """Cores are vCPUs. Memory is not said."""
    table = read(path, COLUMNS[1:3], (COLUMNS[0], COLUMNS[3]))
    gpus, cpus = (table.whole(name) for name in COLUMNS[1:3])
    for name in COLUMNS[1:3]:
        table.amounts(name)
    nodes = []
    for row, kind in enumerate(table.words["gpu_model"]):
        try:
            nodes.append(NodeGroup(1, int(gpus[row]), kind or "none", cpu=float(cpus[row])))
        except ValueError as error:
            raise table.wrong(row, COLUMNS[1], f"a node ({error})") from None
    return named(path, nodes, table.words["node_name"], table.lines.tolist())


CLUSTER = ClusterFormat(
    "spot",
    load,
    lambda path, text: set(COLUMNS) <= set(text.partition("\n")[0].strip().split(",")),
    f"Alibaba's node_info_df.csv: {', '.join(COLUMNS)}",
)
