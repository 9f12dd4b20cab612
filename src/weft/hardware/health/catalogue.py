"""What is known of each fault: class, meaning, action, and when its repeats ask for more.

The data are in ``catalogue.json``, from NVIDIA's published tables (addresses there). A fault's *kind* is ``xid:79`` or a
name such as ``row-remap-failure``.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.definition import UnknownName

# From harmless to what needs a person. From ``drain`` on, the node takes no new work.
ACTIONS = ("ignore", "restart-app", "drain", "reset", "reboot", "inspect")
MEANING = {
    "ignore": "nothing to do",
    "restart-app": "the application ended or must be restarted; the GPU is well",
    "drain": "take the node out of service, then check it",
    "reset": "take the node out of service, reset the GPU, then check it",
    "reboot": "take the node out of service, reboot it, then check it",
    "inspect": "take the node out of service; a person looks at it and returns it",
}
# What only a line's details or a later event decide.
DEPENDS = {
    "sub-code": "by unit, sub-code and error status: weft health explain 149",
    "recovery-action": "what the driver asks for: none, drain, reset or reboot",
}


def needs_quarantine(action: str) -> bool:
    return ACTIONS.index(action) >= ACTIONS.index("drain")


def worse(a: str, b: str) -> str:
    return max(a, b, key=ACTIONS.index)


@dataclass(frozen=True)
class Escalation:
    """``count`` incidents of one GPU within ``within_s`` seconds ask for ``action``; with ``same_location`` of one TPC
    of it."""

    count: int
    within_s: float
    action: str
    same_location: bool = False


@dataclass(frozen=True)
class Fault:
    """One entry. ``level`` faults are conditions that are seen to end; others happen at a moment. ``published`` is
    whether the action is NVIDIA's (else ours)."""

    kind: str
    name: str
    category: str
    action: str
    meaning: str
    escalation: Escalation | None = None
    level: bool = False
    published: bool = True

    def act(self, details: Mapping[str, Any]) -> str:
        """The action for one event of this kind, one of :data:`ACTIONS`."""
        if self.action == "recovery-action":
            actions = recovery_actions()
            number = int(details.get("recovery", -1))
            return actions[number][1] if 0 <= number < len(actions) else "inspect"
        if self.action == "sub-code":
            return _nvlink5(int(self.kind.removeprefix("xid:")), details)
        return self.action


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("catalogue.json").read_text())


@functools.cache
def faults() -> dict[str, Fault]:
    """All faults by kind."""
    found = {}
    for code, name, category, action, meaning, *more in _data()["xid"]:
        escalation = _escalation(more[0]) if more else None
        kind = f"xid:{code}"
        level = action == "recovery-action"  # the driver also says that nothing is needed any more
        found[kind] = Fault(
            kind, name, category, action.rstrip("*"), meaning, escalation, level, published=not action.endswith("*")
        )
    for name, category, action, meaning, *more in _data()["other"]:
        numbers = next((m for m in more if isinstance(m, list)), None)
        escalation = _escalation(numbers) if numbers else None
        found[name] = Fault(name, name, category, action, meaning, escalation, "level" in more, published=False)
    return found


def _escalation(row: list[Any]) -> Escalation:
    count, hours, action, *same = row
    return Escalation(count, hours * 3600, action, bool(same))


def source() -> str:
    """Where the table is from."""
    return _data()["source"]


def find(kind: str) -> Fault:
    """The entry of a kind; for an XID that is not in the table one that reports it and, if it repeats, asks for a check.

    A code that is unknown is no reason to take a GPU out of service: one harmless new code would empty a cluster.

    Raises:
        UnknownName: neither an XID nor a known name.
    """
    known = faults()
    if kind in known:
        return known[kind]
    if re.fullmatch(r"xid:\d+", kind):
        code = int(kind[4:])
        if any(low <= code <= high for low, high in _data()["unused"]):
            meaning = "NVIDIA's table lists it as unused."
        else:
            meaning = "Not in the table: newer than it, or of another driver. Look at the lines around it."
        return Fault(kind, "UNKNOWN", "unknown", "ignore", meaning, Escalation(5, 86400, "drain"), published=False)
    names = [name for name in known if not name.startswith("xid:")]
    raise UnknownName("fault", kind, ["an XID's number", *names])


def recovery_actions() -> list[list[str]]:
    """NVML's recovery actions by number: what the driver calls each, and our action."""
    return _data()["recovery_actions"]


def nvlink5_units() -> list[dict[str, Any]]:
    """The decision table of XID 144 to 150: see ``about`` beside it in the data."""
    return _data()["nvlink5"]["units"]


def link_down_reason(sub_code: int) -> str:
    """Who took an NVLink 5 down, by the sub-code of XID 149."""
    return _data()["nvlink5"]["link_down"].get(str(sub_code), f"sub-code {sub_code}, not in the table")


def _nvlink5(code: int, details: Mapping[str, Any]) -> str:
    """XID 144 to 150: by unit, sub-code and error status; by the line's own severity where the unit is unknown."""
    unit, status = str(details.get("unit", "")), int(details.get("status", 0))
    for row in nvlink5_units():
        if row["xid"] != code or not unit.startswith(row["unit"]):
            continue
        if row.get("always"):
            return "ignore" if details.get("sub_code") in row.get("sub_codes", ()) else "reset"
        if "values" in row:
            return "reset" if status in row["values"] else "ignore"
        if status & int(row["reset"], 16):
            return "reset"
        return "restart-app" if status & int(row.get("driver", "0"), 16) else "ignore"
    return "reset" if details.get("severity") == "Fatal" else "ignore"
