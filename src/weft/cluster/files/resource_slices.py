"""Kubernetes' resource slices (dynamic resource allocation): the accelerators of a node that no resource of it counts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.cluster.files.claims import GPU
from weft.cluster.files.kubernetes import objects, quantity
from weft.cluster.files.text import TraceError


def gpus_of_nodes(path: Path) -> dict[str, tuple[int, str, float]]:
    """Node → how many accelerators its drivers publish, their type, and GiB of each (0 where it is not said).

    A device is an accelerator where its driver's name is one's (``gpu.nvidia.com``). Slices of MIG are of the GPU that they
    name as their parent. Of a pool that is there in several generations, the newest counts.

    Raises:
        TraceError: a slice that is none.
    """
    newest: dict[tuple[str, str, str], int] = {}
    devices: dict[tuple[str, str, str, int], list[Any]] = {}
    for slice in objects(path, "ResourceSlice"):
        try:
            spec = slice["spec"]
            driver, node = str(spec["driver"]), str(spec.get("nodeName") or "")
            if not node or not GPU.fullmatch(driver):
                continue
            pool, generation = str(spec["pool"]["name"]), int(spec["pool"].get("generation") or 0)
            key = (node, driver, pool)
            newest[key] = max(newest.get(key, generation), generation)
            published = [_device(device) for device in spec.get("devices") or []]
            devices.setdefault((*key, generation), []).extend(published)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            name = (slice.get("metadata") or {}).get("name", "") if isinstance(slice.get("metadata"), dict) else ""
            raise TraceError(f"{path}: resource slice '{name}': {type(error).__name__}: {error}") from None
    found: dict[str, tuple[int, str, float]] = {}
    for (node, driver, pool), generation in newest.items():
        cards = {(driver, pool, card): (kind, gib) for card, kind, gib in devices[node, driver, pool, generation]}
        before, kind, gib = found.get(node, (0, driver, 0.0))
        for card_kind, card_gib in cards.values():
            kind, gib = card_kind or kind, max(gib, card_gib)
        found[node] = (before + len(cards), kind, gib)
    return found


def _device(device: Mapping[str, Any]) -> tuple[str, str, float]:
    """The card that a device is or is cut from, its product and its GiB; a slice's memory is not the card's."""
    about = device.get("basic") or device
    said = {
        name.rpartition("/")[2]: next(iter(value.values())) for name, value in (about.get("attributes") or {}).items()
    }
    memory = (about.get("capacity") or {}).get("memory") or {}
    parent = said.get("parentUUID")
    gib = 0.0 if parent else quantity(memory.get("value", 0)) / 2**30
    return str(parent or said.get("uuid") or device["name"]), str(said.get("productName", "")), gib
