"""The daemon of a node: takes events, decides, and makes the scheduler's node so.

Three loops. This one stores events and decides, and waits for nothing else. One carries out decisions, with growing
pauses while the scheduler does not answer. One repairs (where the site has a command for it) and checks what was repaired.
"""

import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.hardware.health import catalogue
from weft.hardware.health.event import Event, pci_address
from weft.hardware.health.ledger import Ledger, StateError
from weft.hardware.health.node import Node, Unreachable, reconcile
from weft.hardware.health.sources import Batch, boot_id, boot_time

ROUND_S = 30.0  # between looks at the scheduler's node without an event
DRAIN_ROUND_S = 5.0  # while a node is emptied
LONGEST_PAUSE_S = 60.0
RETRY_S = 2.0  # before events are stored again after an error
LOOK_S = 2.0  # between looks at what waits for a repair or a check
CHECK_PAUSE_S = 300.0  # before a repair or check is tried again
CHECK_TIMEOUT_S = 1800.0
NOT_VERIFIABLE = 3  # a check's exit status


@dataclass
class Commands:
    """Args:
    check: verifies a GPU (``WEFT_GPU``): 0 passed, 1 a fault, 3 cannot tell.
    repair: resets or reboots (``WEFT_ACTION``, ``WEFT_GPU``, ``WEFT_QUARANTINE``), called once the node is empty; none
    by default.
    """

    check: list[str]
    repair: list[str]


DEFAULT_CHECK = [sys.executable, "-m", "weft", "health", "check", "--level", "medium"]


class Daemon:
    def __init__(self, ledger: Ledger, node: Node, commands: Commands, say: Callable[[str], None]):
        self.ledger, self.node, self.commands, self.say = ledger, node, commands, say
        self.batches: queue.Queue[Batch] = queue.Queue()
        self.stop = threading.Event()
        self.changed = threading.Event()  # the scheduler's node or the decision
        self.changed.set()  # look at once
        self.released: Callable[[], None] = lambda: None  # called when a person returned the node
        self.trouble = ""  # why the scheduler could not be reached last
        self._full = ""  # why the state could not be written last
        self._tried: dict[tuple[str, str, str], float] = {}
        self._running: subprocess.Popen[bytes] | None = None

    # ---- events

    def start(self) -> None:
        """Notes a boot since the last run."""
        boot = boot_id()
        if boot and self.ledger.remembered("boot") != boot:
            first = self.ledger.remembered("boot") is None
            events = [] if first else [Event("boot", "", boot_time(), "daemon", f"boot {boot}", id=f"boot-{boot}")]
            self._tell(self.ledger.take(events, {"boot": boot}))

    def run(self) -> None:
        """Until :attr:`stop`. Sources and this object's other loops run in threads of their own."""
        self.start()
        for loop in (self._carry_out, self._repair_and_check):
            threading.Thread(target=self._guarded, args=(loop,), daemon=True).start()
        waiting: list[Batch] = []
        while not self.stop.is_set():
            try:
                waiting.append(self.batches.get(timeout=1.0))
                for _ in range(1000):
                    waiting.append(self.batches.get_nowait())
            except queue.Empty:
                pass
            if waiting and not self._take(waiting):
                self.stop.wait(RETRY_S)  # they stay in ``waiting``: nothing is lost
                continue
            waiting.clear()
        if self._running:
            self._running.kill()

    def _take(self, batches: list[Batch]) -> bool:
        events = [event for batch in batches for event in batch.events]
        remember = {key: value for batch in batches for key, value in batch.remember.items()}
        try:
            said = self.ledger.take(events, remember)
        except StateError as error:
            if str(error) != self._full:
                self.say(f"ERROR {error}; {len(events)} events wait")
            self._full = str(error)
            for batch in batches:
                if batch.answer is not None:
                    batch.answer(json.dumps({"error": str(error)}))
                    batch.answer = batch.request = None
            return False
        if self._full:
            self.say(f"the state can be written again; {len(events)} events are stored")
            self._full = ""
        for batch in batches:
            batch.events, batch.remember = [], {}
        self._tell(said)
        for batch in batches:
            if batch.request is not None and batch.answer is not None:
                batch.answer(json.dumps(self._answer(batch.request)))
                batch.request = None
        if events or said:
            self.changed.set()
        return True

    def _tell(self, said: list[str]) -> None:
        for line in said:
            self.say(line)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """To a request by the socket."""
        try:
            what, by = request.get("do"), request["by"]
            gpu = str(request.get("gpu", ""))
            if gpu and not pci_address(gpu):
                raise ValueError(f"gpu: {gpu!r} is no PCI address such as 0000:9b:00")
            if what == "inject":
                kind = str(request["kind"])
                catalogue.find(kind)
                details = {**request.get("details", {}), "drill": True}
                event = Event(kind, pci_address(gpu), time.time(), "drill", f"injected by {by}", details)
                said = self.ledger.take([event])
            elif what == "evidence":
                kind = str(request["kind"])
                if kind not in ("reset", "passed"):
                    raise ValueError(f"evidence is reset or passed, not {kind!r}")
                said = self.ledger.take([Event(kind, pci_address(gpu), time.time(), "person", f"said by {by}")])
            elif what == "release":
                said = self.ledger.release(f"by {by}: {request.get('why', '')}")
                self.released()
            elif what == "status":
                return status(self.ledger, self.trouble)
            else:
                raise ValueError(f"{what!r} is none of inject, evidence, release, status")
        except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:
            return {"error": str(error) if not isinstance(error, KeyError) else f"{error} is missing"}
        self._tell(said)
        self.changed.set()
        return {"said": said, **status(self.ledger, self.trouble)}

    # ---- the scheduler's node

    def _guarded(self, loop: Callable[[], None]) -> None:
        """A loop ends only with the daemon: what it did not foresee is said, and it goes on."""
        while not self.stop.is_set():
            try:
                loop()
            except Exception as error:
                self.say(f"ERROR {type(error).__name__}: {error}")
                self.stop.wait(5.0)

    def _carry_out(self) -> None:
        pause = 0.0
        while not self.stop.is_set():
            active = self.ledger.active()
            usual = DRAIN_ROUND_S if active and not (active.applied and active.drained) else ROUND_S
            self.changed.wait(usual)
            self.changed.clear()
            if pause:
                self.stop.wait(pause * random.uniform(0.5, 1.0))
            if self.stop.is_set():
                return
            try:
                self._tell(reconcile(self.node, self.ledger))
            except (Unreachable, StateError) as error:
                pause = min(max(1.0, pause * 2), LONGEST_PAUSE_S)
                if str(error) != self.trouble:
                    self.say(f"ERROR {error}; tried again, at the latest every {LONGEST_PAUSE_S:g} s")
                self.trouble = str(error)
                self.changed.set()
            else:
                if self.trouble:
                    self.say("the scheduler answers again")
                pause, self.trouble = 0.0, ""

    # ---- repairs and checks

    def _repair_and_check(self) -> None:
        while not self.stop.is_set():
            self.stop.wait(LOOK_S)
            active = self.ledger.active()
            if active and active.applied and active.drained and not self.stop.is_set():
                for incident in active.incidents:
                    if incident.state == "open" and self._serve(active.id, incident):
                        break  # what was done may have ended others too

    def _serve(self, identity: str, incident: Any) -> bool:
        """Repairs or checks what an incident waits for; whether there was anything to do."""
        needs = self.ledger.needs(incident)
        key = (needs, incident.gpu, identity)
        if time.monotonic() - self._tried.get(key, -CHECK_PAUSE_S) < CHECK_PAUSE_S:
            return False
        if needs == "check":
            began = time.time()
            code = self._command(self.commands.check, identity, incident, CHECK_TIMEOUT_S)
            self._tried[key] = time.monotonic()
            said = {0: "passed", 1: "found a fault", NOT_VERIFIABLE: "cannot tell here"}.get(code, f"ended with {code}")
            self.say(f"quarantine {identity}: the check of {incident.gpu or 'the node'} {said}")
            if code == 0:
                self.batches.put(Batch([Event("passed", incident.gpu, began, "check")]))
            elif code == 1:
                self.batches.put(Batch([Event("check-failed", incident.gpu, began, "check")]))
        elif needs in ("reset", "reboot") and self.commands.repair:
            self._tried[key] = time.monotonic()
            code = self._command(self.commands.repair, identity, incident, CHECK_TIMEOUT_S)
            self.say(f"quarantine {identity}: {needs} of {incident.gpu or 'the node'} ended with {code}")
            if code == 0 and needs == "reset":
                self.batches.put(Batch([Event("reset", incident.gpu, time.time(), "repair")]))
        else:
            return False
        return True

    def _command(self, command: list[str], identity: str, incident: Any, timeout_s: float) -> int:
        variables = {"WEFT_QUARANTINE": identity, "WEFT_ACTION": incident.action, "WEFT_GPU": incident.gpu}
        try:
            self._running = subprocess.Popen(
                command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
            return self._running.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._running.kill()  # type: ignore[union-attr]
            return 1
        except OSError as error:
            self.say(f"ERROR {command[0]}: {error.strerror}")
            return 127
        finally:
            self._running = None


def status(ledger: Ledger, trouble: str = "") -> dict[str, Any]:
    """The quarantine that holds, what each of its incidents waits for, and the newest incidents."""
    active = ledger.active()
    return {
        "quarantine": active
        and {
            "id": active.id, "opened": active.opened, "reason": active.reason(), "applied": active.applied,
            "drained": active.drained, "waiting": active.waiting,
            "incidents": [
                {"what": i.words(), "gpu": i.gpu, "kind": i.kind, "action": i.action, "count": i.count,
                 "needs": ledger.needs(i)}
                for i in active.incidents if i.state == "open"
            ],
        },
        "scheduler": trouble or "answers",
        "incidents": [
            {"gpu": i.gpu, "kind": i.kind, "action": i.action, "count": i.count, "first": i.first, "last": i.last,
             "state": i.state, "how": i.how}
            for i in ledger.incidents()[-20:]
        ],
    }  # fmt: skip
