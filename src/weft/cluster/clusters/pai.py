"""Alibaba PAI's ``pai_machine_spec`` (2020): ``machine, gpu_type, cap_cpu, cap_mem, cap_gpu``, with or without these names."""

import re
from pathlib import Path

from weft.cluster.cluster_file import ClusterFormat, named
from weft.cluster.files.columns import read
from weft.cluster.model import Cluster, NodeGroup

HEADER = ("machine", "gpu_type", "cap_cpu", "cap_mem", "cap_gpu")
ROW = re.compile(r"\w+,\w+,[\d.]+,[\d.]+,[\d.]+\s")


def load(path: Path) -> Cluster:
    """Cores; memory is taken for GiB. Nodes without GPUs have the type ``CPU``, old GPUs ``MISC``, as the file says."""
    table = read(path, HEADER[2:], HEADER[:2], header=HEADER)
    table.whole("cap_gpu")
    columns = (table.words["gpu_type"], *(table.amounts(name).tolist() for name in HEADER[2:]))
    nodes = [
        NodeGroup(1, int(gpus), kind, cpu=cpu, memory_gb=memory)
        for kind, cpu, memory, gpus in zip(*columns, strict=True)
    ]
    return named(path, nodes, table.words["machine"], table.lines.tolist())


def _matches(path: Path, text: str) -> bool:
    return text.lstrip().startswith("machine,gpu_type") or bool(ROW.match(text))


CLUSTER = ClusterFormat("pai", load, _matches, f"Alibaba PAI's machine spec: {', '.join(HEADER)}")
