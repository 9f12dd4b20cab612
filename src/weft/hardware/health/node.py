"""Makes a scheduler's node as the ledger has decided: the same steps for Kubernetes, Slurm and a dry run.

Each reads the node, compares and changes it once; the node's own mark (an annotation, a reason) says which quarantine it
has. So a step may be interrupted, repeated or come late: a mark of a newer quarantine is never undone, and what a person
changed is left.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from weft.hardware.health.ledger import Ledger, Quarantine

ATTEMPTS = 5  # at a node that changes between reading and writing


class Unreachable(OSError):
    """The scheduler does not answer or refuses; try again later."""


class Conflict(Exception):
    """The node was changed since it was read; read it again."""


@dataclass(frozen=True)
class Mark:
    """What weft left on a node. ``intact``: the node is as weft left it, so no person undid it."""

    id: str
    intact: bool
    raw: Any = None


@dataclass(frozen=True)
class Seen:
    """A node as it was read. ``uid`` changes when the node is registered anew."""

    mark: Mark | None
    uid: str = ""


class Node(Protocol):
    """Every method raises :class:`Unreachable`, those that write also :class:`Conflict`."""

    def read(self) -> Seen: ...

    def quarantine(self, quarantine: Quarantine, over: Mark | None) -> str:
        """Takes the node out of service, or hands over an older mark. Returns why it cannot, or an empty text."""
        ...

    def release(self, mark: Mark) -> None:
        """Undoes what weft did itself."""
        ...

    def forget(self, mark: Mark) -> None:
        """A person took over: removes weft's mark alone."""
        ...

    def drain(self, quarantine: Quarantine) -> tuple[bool, str]:
        """Goes on to empty the node: whether it is empty, and what it waits for."""
        ...

    def healthy(self) -> None:
        """No quarantine holds: says so, where the scheduler shows health."""
        ...


def reconcile(node: Node, ledger: Ledger) -> list[str]:
    """One round; returns what was done, in words.

    Raises:
        Unreachable: nothing is lost; call again later.
    """
    for _ in range(ATTEMPTS):
        try:
            return _round(node, ledger)
        except Conflict:
            continue
    raise Unreachable(f"the node changed {ATTEMPTS} times between reading and writing")


def _round(node: Node, ledger: Ledger) -> list[str]:
    said: list[str] = []
    seen = node.read()
    mark = seen.mark
    active = ledger.active()
    if mark and not mark.intact:
        known = ledger.quarantine(mark.id)
        if known and known.ended is None:
            said += ledger.override(mark.id, "a person returned the node")
        node.forget(mark)
        mark, active = None, ledger.active()
    elif mark is None and active and active.applied and ledger.remembered("node") == seen.uid:
        said += ledger.override(active.id, "a person removed the mark")
        active = ledger.active()
    if mark and not active:
        if ledger.quarantine(mark.id) is None:
            ledger.adopt(mark.id)
            said.append(f"quarantine {mark.id} is adopted: the node has its mark, the state does not know it")
            active = ledger.active()
        else:
            node.release(mark)
            said.append(f"quarantine {mark.id}: the node is back in service")
    if not active:
        node.healthy()
        return said
    if mark and mark.id != active.id and active.applied and ledger.quarantine(mark.id) is None:
        raise Unreachable(
            f"the node has the mark of quarantine {mark.id} in place of {active.id}: another weft health with another state "
            "runs for it; stop one of them"
        )
    why_not = node.quarantine(active, mark)
    if why_not:
        ledger.progress(active, applied=False, drained=False, waiting=why_not)
        return said
    if mark is None or mark.id != active.id:
        said.append(f"out of service: {active.reason()}")
    ledger.take([], {"node": seen.uid})
    # At once, before the node is emptied: from here on a person who returns the node has seen these incidents.
    ledger.progress(active, applied=True, drained=active.drained, waiting=active.waiting)
    drained, waiting = node.drain(active)
    ledger.progress(active, applied=True, drained=drained, waiting=waiting)
    if drained and not active.drained:
        said.append(f"quarantine {active.id}: the node is empty")
    return said


class DryRun:
    """Says what would be done to a node and does nothing."""

    def __init__(self, say: Callable[[str], None]):
        self.say, self._mark = say, ""
        self._uid = uuid.uuid4().hex  # the mark ends with the process, which is no person's doing

    def read(self) -> Seen:
        return Seen(Mark(self._mark, True) if self._mark else None, self._uid)

    def quarantine(self, quarantine: Quarantine, over: Mark | None) -> str:
        if self._mark != quarantine.id:
            self.say(f"would take the node out of service: {quarantine.reason()}")
        self._mark = quarantine.id
        return ""

    def release(self, mark: Mark) -> None:
        self.say(f"would return the node to service: {mark.id}")
        self._mark = ""

    def forget(self, mark: Mark) -> None:
        self._mark = ""

    def drain(self, quarantine: Quarantine) -> tuple[bool, str]:
        return True, ""

    def healthy(self) -> None:
        pass
