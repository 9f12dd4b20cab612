"""A node with GPUs that really fail, a channel that loses, repeats and reorders what is said of them, and people: what
the ledger is held to."""

import random

from weft.hardware.health.event import Event
from weft.hardware.health.ledger import WINDOW_S, Ledger
from weft.hardware.health.node import Conflict, Mark, Seen, Unreachable, reconcile

GPUS = [f"0000:{n:02x}:00" for n in (1, 2, 3, 4)]
# kind → what repairs it, and whether it is a condition that readings show
FAULTS = {
    "xid:95": ("reset", False), "xid:119": ("reset", False), "xid:48": ("reset", False), "xid:79": ("reboot", True),
    "nvlink-down": ("heals", True), "row-remap-failure": ("person", True), "sxid-fatal": ("reset", False),
}  # fmt: skip
NOISE = ("xid:45", "xid:43", "xid:31", "xid:63", "xid:94", "pcie-corrected")


class FakeNode:
    """The scheduler's node, which people change too, and which may not answer or change under the hand."""

    def __init__(self, random: random.Random):
        self.random = random
        self.unschedulable = False
        self.mark: tuple[str, bool] | None = None  # identity; whether weft cordoned
        self.human_cordon = False  # a person wants it out of service
        self.flaky = 0.0
        self.released: list[str] = []

    def _hiccup(self):
        if self.random.random() < self.flaky:
            raise self.random.choice([Unreachable("down"), Conflict("changed")])

    def read(self):
        self._hiccup()
        if not self.mark:
            return Seen(None, "uid")
        return Seen(Mark(self.mark[0], not self.mark[1] or self.unschedulable, self.mark[1]), "uid")

    def quarantine(self, quarantine, over):
        self._hiccup()
        if over and over.id == quarantine.id:
            return ""
        cordoned = bool(over and over.raw) or not self.unschedulable
        self.mark, self.unschedulable = (quarantine.id, cordoned), True
        return ""

    def release(self, mark):
        self._hiccup()
        assert self.mark and self.mark[0] == mark.id, "a newer mark was undone"
        self.unschedulable = self.unschedulable and not mark.raw
        self.mark = None
        self.released.append(mark.id)

    def forget(self, mark):
        self._hiccup()
        self.mark = None

    def drain(self, quarantine):
        self._hiccup()
        return True, ""

    def healthy(self):
        self._hiccup()


class World:
    def __init__(self, seed: int, ledger: Ledger | None = None):
        self.random = random.Random(seed)
        self.time = 1_000_000.0
        self.ledger = ledger or Ledger(now=lambda: self.time)
        self.ledger.now = lambda: self.time
        self.node = FakeNode(self.random)
        self.truth: dict[str, tuple[str, float] | None] = dict.fromkeys(GPUS)
        self.channel: list[tuple[float, Event]] = []
        self.reported: set[tuple[str, str, float]] = set()  # faults of which at least one event arrived
        self.accepted: dict[tuple[str, str], float] = {}  # by a person: up to which event
        self.accepted_ids: set[int] = set()  # incidents, whose repeats are accepted too
        self.loss = 0.15
        self.delivered = 0
        self.quarantines: set[str] = set()

    # ---- what is said

    def say(self, event: Event, copies: int = 1):
        for _ in range(copies):
            if self.random.random() < self.loss:
                continue
            delay = self.random.choice([0.0, 0.0, 1.0, 30.0, self.random.uniform(0, 4000)])
            self.channel += [(self.time + delay, event)] * self.random.choice([1, 1, 1, 2, 3])

    def deliver(self, everything: bool = False):
        due = [item for item in self.channel if everything or item[0] <= self.time]
        self.channel = [item for item in self.channel if not everything and item[0] > self.time]
        self.random.shuffle(due)
        while due:
            batch = [due.pop()[1] for _ in range(min(len(due), self.random.randint(1, 5)))]
            self.ledger.take(batch)
            self.delivered += len(batch)
            for event in batch:
                fault = self.truth.get(event.gpu)
                if fault and fault[0] == event.kind and event.time >= fault[1]:
                    self.reported.add((event.gpu, *fault))
            self.carry_out()

    def carry_out(self):
        try:
            reconcile(self.node, self.ledger)
        except Unreachable:
            return
        if not self.node.mark:
            self.no_faulty_card_is_in_service()
        self.people_are_respected()

    # ---- what happens

    def fault(self):
        late = [e.gpu for _, e in self.channel if e.kind in ("passed", "reset") and not self.truth[e.gpu]]
        gpu = self.random.choice(late or GPUS)  # where evidence of an older repair is still to arrive
        kind = self.random.choice(list(FAULTS))
        if self.truth[gpu]:
            return
        self.truth[gpu] = (kind, self.time)
        for _ in range(self.random.randint(1, 4)):
            self.say(Event(kind, gpu, self.time, "kernel-log"))
            self.time += 1

    def noise(self):
        gpu, kind = self.random.choice(GPUS), self.random.choice(NOISE)
        details = {"pid": self.random.randint(1, 5)}
        self.say(Event(kind, gpu, self.time, "kernel-log", details=details), self.random.choice([1, 1, 1, 20]))

    def heal(self):
        for gpu, fault in self.truth.items():
            if fault and FAULTS[fault[0]][0] == "heals":
                self.truth[gpu] = None

    def reading(self):
        """What NVML shows at intervals: faults that are a condition, and that the driver wants a reset."""
        for gpu, fault in self.truth.items():
            if fault and FAULTS[fault[0]][1]:
                self.say(Event(fault[0], gpu, self.time, "nvml"))
            elif fault:
                self.say(Event("recovery-action", gpu, self.time, "nvml", details={"recovery": 1}))
            for kind in ("nvlink-down", "recovery-action"):
                if not fault or (kind != fault[0] and (kind != "recovery-action" or FAULTS[fault[0]][1])):
                    self.say(Event("absent", gpu, self.time, "nvml", details={"kind": kind}))

    def operator(self):
        """Does what the quarantine waits for, in truth; that it was done may be lost on the way."""
        active = self.ledger.active()
        if not active or not active.applied:
            return
        open_ones = [i for i in active.incidents if i.state == "open"]
        if not open_ones:
            return
        i = self.random.choice(open_ones)
        needs = self.ledger.needs(i)
        fault = self.truth.get(i.gpu)
        if needs == "reset":
            if fault and FAULTS[fault[0]][0] == "reset":
                self.truth[i.gpu] = None
            self.time += 1
            self.say(Event("reset", i.gpu, self.time, "repair"))
        elif needs == "reboot":
            for gpu, fault in self.truth.items():
                if fault and FAULTS[fault[0]][0] in ("reset", "reboot"):
                    self.truth[gpu] = None
            self.time += 1
            self.say(Event("boot", "", self.time, "daemon"))
        elif needs == "check":
            self.time += 1
            self.say(Event("check-failed" if fault else "passed", i.gpu, self.time, "check"))
        elif needs == "person":
            for incident in open_ones:
                self.truth[incident.gpu] = None  # replaced
                self.accepted[incident.gpu, incident.kind] = self.time
            self.ledger.release("replaced")
            self.time += 1

    def person(self):
        node = self.node
        if not node.unschedulable and not node.mark:
            node.unschedulable = node.human_cordon = True
        elif node.human_cordon and self.random.random() < 0.6:
            node.human_cordon = False
            if not (node.mark and node.mark[1]):
                node.unschedulable = False
        elif node.mark and node.mark[1] and node.unschedulable and self.random.random() < 0.3:  # returns it by hand
            node.unschedulable = False
            quarantine = self.ledger.quarantine(node.mark[0])
            for i in quarantine.incidents:
                if i.state == "open" and i.shown:
                    self.accepted[i.gpu, i.kind] = i.last
                    self.accepted_ids.add(i.id)

    # ---- what must hold

    def no_faulty_card_is_in_service(self):
        for gpu, fault in self.truth.items():
            if fault and (gpu, *fault) in self.reported and not self.is_accepted(gpu, *fault):
                raise AssertionError(f"{gpu} has had {fault[0]} since {fault[1]} and is in service at {self.time}")

    def is_accepted(self, gpu: str, kind: str, since: float) -> bool:
        """A person returned the node while it had this fault."""
        kinds = (kind, "recovery-action")
        if any(self.accepted.get((gpu, k), 0.0) >= since for k in kinds):
            return True
        return any(
            i.id in self.accepted_ids and i.gpu == gpu and i.kind in kinds and since <= i.last
            for i in self.ledger.incidents()
        )

    def people_are_respected(self):
        if self.node.human_cordon:
            assert self.node.unschedulable, "a person's cordon was undone"
        active = self.ledger.active()
        for i in active.incidents if active else ():
            if i.state == "open" and i.quarantine == active.id:
                accepted = self.accepted.get((i.gpu, i.kind), 0.0)
                assert i.last > accepted, f"{i.words()} up to {i.last} was accepted by a person up to {accepted}"

    def run(self, events: int):
        acts = [self.fault, self.fault, self.noise, self.heal, self.reading, self.operator, self.operator, self.person]
        while self.delivered < events:
            self.time += self.random.choice([1.0, 20.0, 120.0, 2 * WINDOW_S])
            self.node.flaky = self.random.choice([0.0, 0.0, 0.1, 0.5])
            self.random.choice(acts)()
            self.deliver()
            active = self.ledger.active()
            self.quarantines |= {active.id} if active else set()

    def settle(self):
        """No new fault; what was under way arrives, readings go on, operators finish."""
        self.node.flaky = self.loss = 0.0
        self.deliver(everything=True)
        for _ in range(3):
            self.time += 60.0
            self.reading()
            self.deliver(everything=True)
        for gpu, fault in self.truth.items():  # an accepted fault that goes on says nothing new within the window
            if fault and not self.is_accepted(gpu, *fault):
                # By the mark's taint, where a person took off a cordon of their own.
                assert self.node.mark, f"{gpu} has {fault[0]}, and the node is in service"
        for _ in range(300):
            self.heal()
            self.time += 60.0
            self.reading()
            self.deliver(everything=True)
            self.operator()
            self.deliver(everything=True)
            self.carry_out()
        assert self.ledger.active() is None, f"a healthy node is quarantined: {self.ledger.active()}"
        assert self.node.mark is None
        assert self.node.unschedulable == self.node.human_cordon, "weft left a cordon behind, or took one off"
