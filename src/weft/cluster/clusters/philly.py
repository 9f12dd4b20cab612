"""Philly's machine list, ``cluster_machine_list`` (Jeon et al. 2019): a machine a row."""

import re
from pathlib import Path

from weft.cluster.cluster_file import ClusterFormat, named
from weft.cluster.files.columns import read
from weft.cluster.model import Cluster, NodeGroup

MACHINE, GPUS, MEMORY = "machineId", "number of GPUs", "single GPU mem"
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:GB|GiB)?", re.IGNORECASE)


def load(path: Path) -> Cluster:
    """The memory of each GPU, ``24GB``, is taken for GiB; a type of GPU is not said."""
    table = read(path, (GPUS,), (MACHINE, MEMORY))
    gpus, nodes = table.whole(GPUS), []
    for row, text in enumerate(table.words[MEMORY]):
        if gpus[row] != gpus[row]:
            raise table.wrong(row, GPUS, "a whole number")
        if not (match := SIZE.fullmatch(text)):
            raise table.wrong(row, MEMORY, "a size such as 24GB")
        nodes.append(NodeGroup(1, int(gpus[row]), gpu_memory_gb=float(match[1])))
    return named(path, nodes, table.words[MACHINE], table.lines.tolist())


CLUSTER = ClusterFormat(
    "philly",
    load,
    lambda path, text: text.lstrip().startswith(MACHINE),
    f"Philly's machine list: {MACHINE}, {GPUS}, {MEMORY}",
)
