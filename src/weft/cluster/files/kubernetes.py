"""What ``kubectl get … -o json`` or ``-o yaml`` writes: objects of a kind, quantities."""

import re
from pathlib import Path
from typing import Any

from weft.cluster.files.columns import LARGEST
from weft.cluster.files.text import TraceError, json_of, text_of
from weft.cluster.files.yaml import documents

YAML = re.compile(r"^(?:apiVersion|kind):", re.MULTILINE)  # how an object in YAML begins
QUANTITY = re.compile(r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)(?:([eE][+-]?[0-9]+)|([KMGTPE]i)|([numkMGTPE]))?")
DECIMAL = {prefix: f"e{power}" for prefix, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)}
BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", 1)}


def objects(path: Path, kind: str) -> list[dict[str, Any]]:
    """The objects of a kind in a file that holds one object, a list or YAML documents; in a folder, of its YAML files.

    Raises:
        TraceError: it is neither JSON nor YAML, or not Kubernetes'.
        ImportError: PyYAML is missing.
    """
    files = yaml_files(path) if path.is_dir() else [path]
    return [item for file in files for whole in _documents(file) for item in _of_kind(file, whole, kind)]


def yaml_files(folder: Path) -> list[Path]:
    """The YAML files in a folder and below it, by name."""
    return sorted(file for file in folder.rglob("*") if file.suffix in (".yaml", ".yml"))


def _documents(path: Path) -> list[Any]:
    text = text_of(path).read()
    if text.lstrip().startswith("{") or not YAML.search(text):
        return [json_of(path)]
    return documents(path, text)


def _of_kind(path: Path, found: Any, kind: str) -> list[dict[str, Any]]:
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
    match = (
        QUANTITY.fullmatch(str(text)) if isinstance(text, str | int | float) and not isinstance(text, bool) else None
    )
    if not match:
        text = text if isinstance(text, str | int | float) else type(text).__name__
        raise ValueError(f"'{text}' is no quantity, such as 500m or 64Gi")
    number, exponent, binary, decimal = match.groups("")
    value = float(number + (exponent or DECIMAL.get(decimal, ""))) * BINARY.get(binary, 1.0)
    if not value < LARGEST:
        raise ValueError(f"'{text!s:.40}' is more than any cluster has")
    return value
