"""What ``kubectl get … -o json`` writes: objects of a kind, quantities, accelerators among the resources."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.cluster.files.text import TraceError, json_of

PRODUCT = "nvidia.com/gpu.product"  # the label that NVIDIA's feature discovery gives a node, and a pod selects
ACCELERATOR = re.compile(r"[^/]+/(gpu|npu|tpu|fpga|mlu|gcu|dcu|gaudi|neuron|ascend\w*)", re.IGNORECASE)
SLICE = re.compile(r"nvidia\.com/(mig-.*|gpu\.shared)")
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


def accelerators(resources: Mapping[str, Any]) -> int:
    """Whole GPUs, NPUs and the like of a list of resources."""
    return round(sum(quantity(n) for name, n in resources.items() if ACCELERATOR.fullmatch(name)))


def slices(resources: Mapping[str, Any]) -> bool:
    """Whether parts of GPUs are among the resources (MIG, time slices)."""
    return any(SLICE.fullmatch(name) and quantity(n) for name, n in resources.items())
