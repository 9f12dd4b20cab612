"""Alibaba PAI's ``pai_machine_spec`` (2020): ``machine, gpu_type, cap_cpu, cap_mem, cap_gpu``, with or without these names."""

from __future__ import annotations

import re
from pathlib import Path

from weft.cluster.cluster_file import ClusterFormat, named
from weft.cluster.model import Cluster, NodeGroup
from weft.cluster.trace import read

HEADER = ("machine", "gpu_type", "cap_cpu", "cap_mem", "cap_gpu")
ROW = re.compile(r"\w+,\w+,[\d.]+,[\d.]+,[\d.]+\s")


def load(path: Path) -> Cluster:
    """Cores; memory is taken for GiB. Nodes without GPUs have the type ``CPU``, old GPUs ``MISC``, as the file says."""
    table = read(path, HEADER[2:], HEADER[:2], header=HEADER)
    nodes = []
    for row, gpus in enumerate(table.whole("cap_gpu")):
        for name in HEADER[2:]:
            if not table.numbers[name][row] >= 0:
                raise table.wrong(row, name, "a number of 0 or more")
        cpu, memory = (float(table.numbers[name][row]) for name in ("cap_cpu", "cap_mem"))
        nodes.append(NodeGroup(1, int(gpus), table.words["gpu_type"][row], cpu=cpu, memory_gb=memory))
    return named(path, nodes, table.words["machine"], table.lines.tolist())


def _matches(path: Path, text: str) -> bool:
    return text.lstrip().startswith("machine,gpu_type") or bool(ROW.match(text))


CLUSTER = ClusterFormat("pai", load, _matches, f"Alibaba PAI's machine spec: {', '.join(HEADER)}")
