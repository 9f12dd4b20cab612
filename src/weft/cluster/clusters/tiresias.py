"""Tiresias' and Muri's ``cluster_spec.csv``: switches of nodes that are alike."""

from pathlib import Path

from weft.cluster.cluster_file import ClusterFormat
from weft.cluster.files.columns import read
from weft.cluster.model import Cluster, NodeGroup

COLUMNS = ("num_switch", "num_node_p_switch", "num_gpu_p_node", "num_cpu_p_node", "mem_p_node")


def load(path: Path) -> Cluster:
    """A switch is a rack. Memory is taken for GiB."""
    table = read(path, COLUMNS)
    for name in COLUMNS[:3]:
        table.whole(name)
    groups: list[NodeGroup] = []
    for switches, nodes, gpus, cpu, memory_gb in zip(*(table.amounts(name).tolist() for name in COLUMNS), strict=True):
        for _ in range(int(switches)):
            rack = f"switch-{len(groups)}"
            groups.append(NodeGroup(int(nodes), int(gpus), cpu=cpu, memory_gb=memory_gb, rack=rack))
    return Cluster.of(groups)


CLUSTER = ClusterFormat(
    "tiresias", load, lambda path, text: text.lstrip().startswith(COLUMNS[0]), f"Tiresias' CSV: {', '.join(COLUMNS)}"
)
