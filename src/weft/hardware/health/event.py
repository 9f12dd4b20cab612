"""One thing that happened to a GPU or its node: a fault, or evidence that a fault is over."""

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

# Evidence, not faults. ``passed``: an active check that began at ``time`` passed. ``absent``: the level fault
# ``details["kind"]`` was seen not to be there.
EVIDENCE = ("reset", "boot", "passed", "absent")


@dataclass(frozen=True)
class Event:
    """Args:
    kind: a fault of the catalogue (``xid:79``, ``row-remap-failure``) or one of :data:`EVIDENCE`.
    gpu: PCI address (``0000:9b:00``); empty for the whole node.
    time: when it happened, in seconds since 1970.
    source: ``kernel-log``, ``nvml``, ``check``, ``drill``, ``person``.
    text: the line or reading it came from.
    details: ``pid``, ``unit``, ``sub_code``, ``status``, ``severity``, ``link``, ``recovery``, ``caused_by``, ``location``.
    id: the same for duplicates of one event, and for no other.
    """

    kind: str
    gpu: str = ""
    time: float = 0.0
    source: str = ""
    text: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


_ADDRESS = re.compile(r"(?:PCI:)?(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?", re.IGNORECASE)


def pci_address(text: str) -> str:
    """``00000000:9B:00.0``, ``PCI:0000:9b:00``, ``9b:00.0``: all ``0000:9b:00``. Empty where it is no PCI address."""
    found = _ADDRESS.fullmatch(text.strip())
    if not found:
        return ""
    domain = int(found[1] or "0", 16)
    return f"{domain:04x}:{found[2]}:{found[3]}".lower()
