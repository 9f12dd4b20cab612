"""Kubernetes: ``kubectl get nodes -o json``."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from weft.cluster.cluster_file import ClusterFormat, named
from weft.cluster.files import accelerators, kubernetes
from weft.cluster.files.resource_slices import gpus_of_nodes
from weft.cluster.files.text import TraceError
from weft.cluster.model import Cluster, NodeGroup

JSON = re.compile(r'\s*\{\s*"(?!(?:nodes|sinfo|meta|errors|warnings|last_update)")')  # an object, none of Slurm's


def load(path: Path) -> Cluster:
    """What is allocatable, else the capacity; cordoned nodes count as any other. Time slices, slices of MIG and shares of
    memory or cores are parts of whole GPUs, of which as many count as hold them.

    The type is a label (nvidia.com/gpu.product …), else the resource's name, such as ``amd.com/gpu``; ``none`` without one.
    The memory of each GPU is the label nvidia.com/gpu.memory in whole GiB, the nearest. A rack is a label whose name ends in
    ``/rack`` or ``/topology-rack``. A node without such resources has the devices of its resource slices, where the file has
    them. Left out and counted: nodes with parts of GPUs where nothing says of how many GPUs, and
    with accelerators of several kinds.
    """
    nodes, names, dropped = [], [], Counter[str]()
    published = gpus_of_nodes(path)
    for node in kubernetes.objects(path, "Node"):
        about = node.get("metadata")
        name = str(about.get("name", "")) if isinstance(about, dict) else ""
        try:
            nodes.append(_node(node, published.get(name)))
        except accelerators.Unknown as why:
            dropped[str(why)] += 1
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TraceError(f"{path}: node '{name}': {type(error).__name__}: {error}") from None
        else:
            names.append(name)
    return named(path, nodes, names, dropped=dropped)


def _node(node: dict[str, Any], published: tuple[int, str, float] | None) -> NodeGroup:
    labels, status = node["metadata"].get("labels") or {}, node["status"]
    has = status.get("allocatable") or status["capacity"]
    gpus, kind = accelerators.gpus(node)
    gib = accelerators.gpu_mib(node) / 1024
    if published and not gpus:
        gpus, kind, gib = published
    return NodeGroup(
        1,
        gpus,
        kind,
        gpu_memory_gb=round(gib),
        cpu=kubernetes.quantity(has["cpu"]),
        memory_gb=kubernetes.quantity(has["memory"]) / 2**30,
        rack=next((str(text) for label, text in labels.items() if label.endswith(("/rack", "/topology-rack"))), ""),
    )


CLUSTER = ClusterFormat("kubectl", load, lambda path, text: bool(JSON.match(text)), "kubectl get nodes -o json")
