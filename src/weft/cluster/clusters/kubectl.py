"""Kubernetes: ``kubectl get nodes -o json``."""

import math
import re
from pathlib import Path
from typing import Any

from weft.cluster.cluster_file import ClusterFormat, named
from weft.cluster.files import kubernetes
from weft.cluster.files.text import TraceError
from weft.cluster.model import Cluster, NodeGroup

JSON = re.compile(r'\s*\{\s*"(?!(?:nodes|sinfo|meta|errors|warnings|last_update)")')  # an object, none of Slurm's
MEMORY = "nvidia.com/gpu.memory"  # a label, MiB


def load(path: Path) -> Cluster:
    """What is allocatable, else the capacity; cordoned nodes count as any other. Time slices and slices of MIG are parts of
    whole GPUs, of which as many count as hold them.

    The type is the label nvidia.com/gpu.product, else the resource's name, such as ``amd.com/gpu``; ``none`` without one. The
    memory of each GPU is the label nvidia.com/gpu.memory in whole GiB, the nearest. A rack is a label whose name ends in
    ``/rack`` or ``/topology-rack``.
    """
    nodes, names = [], []
    for node in kubernetes.objects(path, "Node"):
        about = node.get("metadata")
        name = str(about.get("name", "")) if isinstance(about, dict) else ""
        try:
            nodes.append(_node(node))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TraceError(f"{path}: node '{name}': {type(error).__name__}: {error}") from None
        names.append(name)
    return named(path, nodes, names)


def _node(node: dict[str, Any]) -> NodeGroup:
    labels, status = node["metadata"].get("labels", {}), node["status"]
    has = status.get("allocatable") or status["capacity"]
    kind = next((resource for resource in has if kubernetes.ACCELERATOR.fullmatch(resource)), "none")
    parts = kubernetes.parts(has, labels)
    if 0 in parts:
        raise ValueError(f"time slices without the label {kubernetes.REPLICAS}; expected how many a GPU has")
    return NodeGroup(
        1,
        max(
            [
                math.ceil(sum(size * count for size, count in parts.items())),
                *(math.ceil(count / (1 // size)) for size, count in parts.items()),
            ]
        ),
        labels.get(kubernetes.PRODUCT, kind).removesuffix("-SHARED"),
        gpu_memory_gb=round(float(labels.get(MEMORY, 0)) / 1024),
        cpu=kubernetes.quantity(has["cpu"]),
        memory_gb=kubernetes.quantity(has["memory"]) / 2**30,
        rack=next((text for label, text in labels.items() if label.endswith(("/rack", "/topology-rack"))), ""),
    )


CLUSTER = ClusterFormat("kubectl", load, lambda path, text: bool(JSON.match(text)), "kubectl get nodes -o json")
