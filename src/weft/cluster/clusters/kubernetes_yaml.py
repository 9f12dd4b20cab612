"""Kubernetes: nodes in YAML, as of FGD's simulator (Weng et al., USENIX ATC 2023) or ``kubectl get nodes -o yaml``."""

from pathlib import Path

from weft.cluster.cluster_file import ClusterFormat
from weft.cluster.clusters import kubectl
from weft.cluster.files.kubernetes import YAML, yaml_files
from weft.cluster.model import Cluster


def load(path: Path) -> Cluster:
    """As ``kubectl``; a folder is all its YAML files. FGD's nodes have ``alibabacloud.com/gpu-count`` GPUs of the type
    ``alibabacloud.com/gpu-card-model``."""
    return kubectl.load(path)


def _matches(path: Path, text: str) -> bool:
    if path.is_dir():
        return bool(yaml_files(path))
    return bool(YAML.search(text)) and not text.lstrip().startswith("{")


CLUSTER = ClusterFormat(
    "kubernetes-yaml",
    load,
    _matches,
    "nodes of Kubernetes in YAML, a file or a folder: FGD's, kubectl get nodes -o yaml",
)
