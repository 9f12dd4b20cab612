"""What ``kubectl get … -o json`` writes: objects of a kind, quantities, accelerators among the resources."""

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from weft.cluster.files.text import TraceError, json_of

PRODUCT = "nvidia.com/gpu.product"  # the label that NVIDIA's feature discovery gives a node, and a pod selects
ACCELERATOR = re.compile(r"[^/]+/(gpu|npu|tpu|fpga|mlu|gcu|dcu|gaudi|neuron|ascend\w*)", re.IGNORECASE)
SHARED = re.compile(r"nvidia\.com/gpu\.shared")  # a time slice, where the device plugin renames them
MIG = re.compile(r"nvidia\.com/mig-(\d+)g\..*")  # a slice of so many sevenths of a GPU
SINGLE = re.compile(r".*-MIG-(\d+)g\..*")  # the product of a node whose GPUs are all cut into such slices
REPLICAS = "nvidia.com/gpu.replicas"  # a label: time slices or MPS clients of each GPU
QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)(m|k|[KMGTPE]i?)?")
UNITS = {"": 1.0, "m": 1e-3, "k": 1e3} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGTPE", 1)
    for suffix, base in (("i", 1024.0), ("", 1000.0))
}


def objects(path: Path, kind: str) -> list[dict[str, Any]]:
    """The objects of a kind in a file that holds one object or a list.

    Raises:
        TraceError: it is no JSON, or not Kubernetes'.
    """
    found = json_of(path)
    whole = str(found.get("kind", "")) if isinstance(found, dict) else ""
    items = found.get("items") if whole.endswith("List") else [found] if whole else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise TraceError(f"{path}: no Kubernetes objects; expected what 'kubectl get … -o json' writes")
    return [item for item in items if item.get("kind", whole.removesuffix("List")) == kind]


def quantity(text: Any) -> float:
    """``500m`` → 0.5, ``64Gi`` → 68719476736.

    Raises:
        ValueError: it is no quantity.
    """
    match = QUANTITY.fullmatch(str(text))
    if not match:
        raise ValueError(f"'{text}' is no quantity, such as 500m or 64Gi")
    return float(match[1]) * UNITS[match[2] or ""]


def parts(resources: Mapping[str, Any], labels: Mapping[str, Any]) -> dict[Fraction, int]:
    """How many parts of GPUs the resources have, by their size: 1 for whole GPUs. 0 is a time slice of unknown size.

    Args:
        labels: of the node, which say what ``nvidia.com/gpu`` counts there: GPUs, time slices of them, or slices of MIG.
    """
    of_node = Fraction(1, max(int(labels.get(REPLICAS) or 1), 1))
    if match := SINGLE.fullmatch(str(labels.get(PRODUCT, ""))):
        of_node *= Fraction(min(int(match[1]), 7), 7)
    found: dict[Fraction, int] = {}
    for name, n in resources.items():
        if match := MIG.fullmatch(name):
            size = Fraction(min(int(match[1]), 7), 7)
        elif SHARED.fullmatch(name):
            size = of_node if of_node < 1 else Fraction(0)
        elif ACCELERATOR.fullmatch(name):
            size = of_node
        else:
            continue
        if count := round(quantity(n)):
            found[size] = found.get(size, 0) + count
    return found
