"""Faults and decisions: the catalogue, the kernel's log, incidents, quarantines, and a simulation of thousands of
hostile events."""

import io
import itertools
import json
import os
import sqlite3
import subprocess
import sys

import pytest
from node_world import World

from weft.definition import UnknownName
from weft.hardware.health import catalogue, node
from weft.hardware.health.event import Event, pci_address
from weft.hardware.health.kernel_log import Parser, scan, stamp
from weft.hardware.health.ledger import WINDOW_S, Ledger, StateError

GPU, OTHER = "0000:9b:00", "0000:01:00"


# ---- catalogue


def test_the_catalogue_is_whole():
    """Every code up to the newest published one has an entry or is listed as unused, and every entry says what to do."""
    found = catalogue.faults()
    for code in range(1, 173):
        fault = catalogue.find(f"xid:{code}")
        assert (f"xid:{code}" in found) != (fault.name == "UNKNOWN"), code
        assert fault.name != "UNKNOWN" or "unused" in fault.meaning, code
    for fault in found.values():
        assert fault.action in (*catalogue.ACTIONS, *catalogue.DEPENDS), fault
        assert fault.act({}) in catalogue.ACTIONS and fault.meaning.endswith("."), fault
        assert fault.escalation is None or fault.escalation.action in catalogue.ACTIONS, fault
    with pytest.raises(UnknownName, match="did you mean 'row-remap-failure'"):
        catalogue.find("row-remap-failed")


@pytest.mark.parametrize(("code", "action"), [
    (13, "restart-app"), (31, "restart-app"), (43, "ignore"), (45, "ignore"), (48, "reset"), (54, "inspect"), (62, "reset"),
    (63, "ignore"), (64, "reset"), (74, "reset"), (79, "reboot"), (94, "restart-app"), (95, "reset"), (109, "reset"),
    (119, "reset"), (120, "reset"), (140, "reset"), (151, "reboot"), (999, "ignore"),
])  # fmt: skip
def test_actions_are_those_of_nvidias_table(code, action):
    assert catalogue.find(f"xid:{code}").act({}) == action


# Lines as drivers wrote them, from public issue reports.
NVIDIA = "nvidia 0000:9b:00.0: "
XID = "NVRM: Xid (PCI:0000:9b:00): "
NETIR = "(0x{:08x} 0x{:08x} 0x00000000 0x00000000)"
LINES = [
    ("NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "xid:79", GPU, "reboot"),
    ("NVRM: Xid (0000:9B:00): 14, Channel 00000001", "xid:14", GPU, "ignore"),
    ("NVRM: GPU 0000:9b:00.0: GPU has fallen off the bus.", "xid:79", GPU, "reboot"),
    ("NVRM: GPU at PCI:0000:9b:00: GPU-0b1c has fallen off the bus", "xid:79", GPU, "reboot"),
    (XID + "149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 " + NETIR.format(0x4505C6, 0), "xid:149", GPU, "reset"),
    (XID + "149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 " + NETIR.format(0x026001C6, 0), "xid:149", GPU, "ignore"),
    (XID + "149, NETIR Fatal XC0 i0 Link -1 " + NETIR.format(0xFE406, 0), "xid:149", GPU, "reset"),
    (XID + "149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 " + NETIR.format(0x86226, 1), "xid:149", GPU, "ignore"),
    (XID + "149, NETIR_MFDE_EVENT Fatal XC0 i0 Link 03 " + NETIR.format(0x246, 3), "xid:149", GPU, "ignore"),
    (XID + "149, NETIR_MFDE_EVENT Fatal XC0 i0 Link 03 " + NETIR.format(0x246, 5), "xid:149", GPU, "reset"),
    (XID + "144, SAW_MVB Nonfatal XC0 i0 Link 0 " + NETIR.format(1, 8), "xid:144", GPU, "ignore"),
    (XID + "144, SAW_MVB Fatal XC0 i0 Link 0 " + NETIR.format(1, 2), "xid:144", GPU, "reset"),
    (XID + "145, pid=876767, name=ray::WorkerDict, RLW_RXPIPE Nonfatal XC0 i0 Link 13 "
     + NETIR.format(0x409A0C2, 8), "xid:145", GPU, "ignore"),
    (XID + "145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 " + NETIR.format(0x40988E2, 8), "xid:145", GPU, "restart-app"),
    (XID + "145, NEW_UNIT Fatal XC1 i0 Link 12 " + NETIR.format(0x40988E2, 8), "xid:145", GPU, "reset"),
    (XID + "150, MSE_WATCHDOG Fatal XC0 i0 Link -1 (0x0", "xid:150", GPU, "reset"),  # cut
    (XID + "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "xid:154", GPU, "reset"),
    (XID + "154, GPU recovery action changed from 0x1 (x) to 0x2 (Node Reboot Required)", "xid:154", GPU, "reboot"),
    (XID + "154, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", "xid:154", GPU, "drain"),
    (XID + "154, GPU recovery action changed from 0x0 (None) to 0x63 (Newer)", "xid:154", GPU, "inspect"),
    ("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error", "sxid", "", "ignore"),
    ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", "sxid-fatal", "", "reset"),
    (NVIDIA + "PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Transmitter ID)", "pcie-corrected", GPU, "ignore"),
    (NVIDIA + "PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer", "pcie-fatal", GPU, "reboot"),
    ("nvidia 0000:9b:00.0: AER: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=x", "pcie-uncorrected", GPU, "drain"),
    ("NVRM: GPU 0000:9b:00.0: RmInitAdapter failed! (0x62:0x40:1860)", "driver-init-failed", GPU, "reboot"),
    ("NVRM: API mismatch: the client has the version 580.1, but this kernel module has 570.2", "driver-mismatch", "", "reboot"),
    ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", "host-memory", "", "inspect"),
]  # fmt: skip


@pytest.mark.parametrize("before", [
    "", "[171167.620236] ", "[Sun Feb 23 16:24:18 2025] ", "2026-05-04T12:33:44.123456+0200 n1 kernel: ",
    "Mar 29 15:38:59 n1 kernel: [ 3.1] ",
])  # fmt: skip
def test_lines_of_the_kernels_log(before):
    for line, kind, gpu, action in LINES:
        event = Parser().parse(before + line)
        assert event and (event.kind, event.gpu) == (kind, gpu), line
        assert catalogue.find(kind).act(event.details) == action, line


def test_details_of_a_line():
    line = LINES[12][0]
    details = Parser().parse(line).details
    assert details["pid"] == 876767 and details["process"] == "ray::WorkerDict" and details["unit"] == "RLW_RXPIPE"
    assert details["intrinfo"] == 0x409A0C2 and details["sub_code"] == (0x409A0C2 >> 20) & 63 and details["link"] == 13
    line = "NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149"
    assert Parser().parse(line).details["caused_by"] == 149
    line = "NVRM: Xid (PCI:0000:01:00): 13, pid=5, name=a, Graphics SM Warp Exception on (GPC 3, TPC 1, SM 1): Out Of Range"
    assert Parser().parse(line).details["location"] == "GPC 3, TPC 1"
    assert (
        "pid" not in Parser().parse(f"NVRM: Xid (PCI:0000:01:00): 13, pid={'9' * 30}, name=a").details
    )  # SQLite: 64 bits


@pytest.mark.parametrize("line", [
    "", "NVRM: Xid error: xyz, invalid data", "NVRM: Xid (invalid): some error", "NVRM: Xid (PCI:0000:9b:00): none, x",
    f"NVRM: Xid (PCI:0000:9b:00): {'9' * 30}, x",
    "pcieport 0000:00:01.0: AER: Corrected error received: 0000:00:01.0",
    "nvme 0000:9b:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal)",
    "\x00\xff" * 5000, "2026-05-04T12:33:44Z n1 mallory: NVRM: Xid (PCI:0000:9b:00): 79, x",
    "May  4 12:33:44 n1 mallory: kernel: NVRM: Xid (PCI:0000:9b:00): 79, x", "oops NVRM: Xid (PCI:0000:9b:00): 79, x",
    "usb 1-1: new device", "NVRM: fallen off the bus and is not responding to commands.",
])  # fmt: skip
def test_lines_that_are_no_fault_of_a_gpu(line):
    assert Parser().parse(line) is None


def test_a_fall_off_the_bus_that_is_spread_over_lines():
    lines = [
        "NVRM: The NVIDIA GPU 0000:9b:00.0", "NVRM: (PCI ID: 10de:2901) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]  # fmt: skip
    assert [(e.kind, e.gpu) for e in scan(lines)] == [("xid:79", GPU)]
    assert list(scan([*lines[:2], *["something else"] * 5, lines[2]])) == []


def test_records_of_kmsg_carry_number_and_time():
    (event,) = scan(["4,1234,5000000,-;NVRM: Xid (PCI:0000:9b:00): 48, x", " SUBSYSTEM=pci"])
    assert (event.id, event.time, event.kind) == ("kmsg-1234", 5.0, "xid:48")


@pytest.mark.parametrize(("text", "seconds"), [
    ("2026-05-04T12:00:00Z x", 1777896000.0), ("2026-05-04T14:00:00.5+02:00 x", 1777896000.5),
    ("2026-05-04 14:00:00,5+0200 x", 1777896000.5), ("[ 12.5] x", 12.5), ("nothing", 0.0), ("Feb 31 10:00:00 n1 x", 0.0),
])  # fmt: skip
def test_times_of_lines(text, seconds):
    assert stamp(text) == seconds


@pytest.mark.parametrize("text", ["00000000:9B:00.0", "PCI:0000:9b:00", "9b:00.0", "0000:9b:00"])
def test_one_gpu_has_one_address(text):
    assert pci_address(text) == GPU


# ---- incidents


def fault(kind="xid:95", at=100.0, gpu=GPU, **details):
    return Event(kind, gpu, at, "test", details=details)


def evidence(name, at, gpu=GPU, **details):
    return Event(name, gpu, at, "test", details=details)


@pytest.fixture
def ledger():
    return Ledger(now=lambda: 10_000.0)


def test_one_incidents_repeats_are_counted_once(ledger):
    """A flood of XID 45 after a job's cleanup is one incident, no fault, and hides no other code."""
    flood = [fault("xid:45", 100 + n / 100) for n in range(11_760)]
    ledger.take([*flood[:5000], fault("xid:62", 140.0), *flood[5000:]])
    found = {i.kind: i for i in ledger.incidents()}
    assert len(ledger.incidents()) == 2
    assert (found["xid:45"].count, found["xid:45"].state) == (11_760, "noted")
    assert (found["xid:62"].count, found["xid:62"].state) == (1, "open")
    assert {i.gpu for i in ledger.incidents()} == {GPU}
    assert ledger.active().reason().endswith("XID 62 on GPU 0000:9b:00 (reset)")


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_order_of_events_does_not_matter(order):
    """A fault, the reset, a check that passed, a second fault after it: out of service in every order; each of them twice."""
    events = [fault(at=100.0), evidence("reset", 200.0), evidence("passed", 300.0), fault(at=1000.0)]
    ledger = Ledger()
    for index in order:
        ledger.take([events[index], events[index]])
    assert ledger.active() is not None
    ledger.take([evidence("passed", 1100.0), evidence("boot", 1050.0, "")])
    assert ledger.active() is None


@pytest.mark.parametrize(("kind", "said", "over"), [
    ("xid:95", [("passed", 300.0)], False),  # a check alone: the reset is missing
    ("xid:95", [("reset", 200.0)], False),
    ("xid:95", [("reset", 200.0), ("passed", 150.0)], False),  # the check began before the reset
    ("xid:95", [("reset", 50.0), ("passed", 300.0)], False),  # the reset was before the fault
    ("xid:95", [("reset", 200.0), ("passed", 300.0)], True),
    ("xid:95", [("boot", 200.0), ("passed", 300.0)], True),
    ("xid:79", [("reset", 200.0), ("passed", 300.0)], False),  # asks for a reboot
    ("xid:79", [("boot", 200.0), ("passed", 300.0)], True),
    ("nvlink-down", [("passed", 300.0)], False), ("nvlink-down", [("absent", 200.0), ("passed", 300.0)], True),
    ("pcie-uncorrected", [("passed", 300.0)], True),
    ("row-remap-failure", [("boot", 200.0), ("passed", 300.0)], False),  # a person looks at it
])  # fmt: skip
def test_what_ends_a_quarantine(ledger, kind, said, over):
    ledger.take([fault(kind)])
    assert ledger.active() is not None
    ledger.take([evidence(name, at, kind=kind) for name, at in said])
    assert (ledger.active() is None) == over


def test_evidence_of_another_gpu_ends_nothing_and_two_faults_at_once_are_both_there(ledger):
    ledger.take([fault(gpu=GPU), fault(gpu=OTHER, kind="xid:79")])
    first = ledger.active()
    assert len(first.incidents) == 2 and "and 1 more" in first.reason()
    ledger.take([evidence("reset", 200.0), evidence("passed", 300.0)])
    assert ledger.active().id == first.id
    assert [i.gpu for i in ledger.active().incidents if i.state == "open"] == [OTHER]


def test_a_fault_that_comes_back_asks_for_more():
    ledger = Ledger()
    actions = []
    for n in range(4):
        at = 10_000.0 * (n + 1)
        ledger.take([fault(at=at)])
        actions.append(ledger.active().incidents[-1].action)
        ledger.take([evidence("boot", at + 10, ""), evidence("passed", at + 20)])
    assert actions == ["reset", "reboot", "inspect", "inspect"]


def test_repeats_of_one_application_error_ask_for_nothing_but_many_incidents_do(ledger):
    where = {"location": "GPC 3, TPC 1"}
    for n in range(4):
        ledger.take([fault("xid:13", 1000.0 * n + k, pid=n, **where) for k in range(50)])
        ledger.take([fault("xid:13", 1000.0 * n, pid=100 + n)])  # elsewhere on the chip
    assert ledger.active() is None
    ledger.take([fault("xid:13", 5000.0, pid=9, **where)])
    assert ledger.active().incidents[0].action == "drain"


def test_a_clock_that_was_ahead(ledger):
    """A check that passed an hour in the future, by a clock that was set right since, excuses no fault of now."""
    ledger.take([evidence("boot", 13_500.0, ""), evidence("passed", 13_600.0)])
    ledger.take([fault(at=9_990.0)])
    assert ledger.active() is not None
    ledger.take([evidence("boot", 9_995.0, ""), evidence("passed", 9_999.0)])
    assert ledger.active() is None


def test_the_driver_takes_back_what_it_asked_for(ledger):
    line = "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x{} (x) to 0x{} (y)"
    parser = Parser()
    ledger.take([parser.parse(line.format(0, 1), 100.0)])
    assert ledger.active().incidents[0].action == "reset"
    ledger.take([parser.parse(line.format(1, 0), 200.0), evidence("passed", 300.0)])
    assert ledger.active() is None


def test_a_persons_word(ledger):
    """A node that a person returned stays so while its faults repeat; what the person could not see quarantines anew."""
    ledger.take([fault()])
    seen = ledger.active()
    ledger.progress(seen, applied=True, drained=True, waiting="")
    ledger.take([fault("xid:79", 150.0, OTHER)])  # after the scheduler was written
    ledger.override(seen.id, "a person returned the node")
    fresh = ledger.active()
    assert fresh.id != seen.id and [i.kind for i in fresh.incidents] == ["xid:79"]
    assert ledger.quarantine(seen.id).how == "overridden"
    ledger.progress(fresh, applied=True, drained=True, waiting="")
    ledger.override(fresh.id, "again")
    ledger.take([fault(at=100.0 + WINDOW_S - 1), fault(at=20.0)])  # a repeat; one that comes late
    assert ledger.active() is None
    ledger.take([fault(at=100.0 + 3 * WINDOW_S)])
    assert ledger.active() is not None
    ledger.release("card replaced")
    ledger.take([fault(at=9_999.0)])  # before the release
    assert ledger.active() is None
    ledger.take([fault(at=10_001.0)])  # it was not repaired after all
    assert ledger.active() is not None


# ---- the file


def test_the_state_survives_a_kill(tmp_path):
    """A process that is killed between events loses and repeats nothing, and the quarantine is the same."""
    code = (
        "import os, sys; from weft.hardware.health.ledger import Ledger; from weft.hardware.health.event import Event\n"
        "l = Ledger(sys.argv[1]); l.take([Event('xid:95', '0000:9b:00', 100.0, id='a')], {'position': '7'})\n"
        "print(l.active().id, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "s.db"], capture_output=True, text=True)
    assert done.returncode == -9
    ledger = Ledger(tmp_path / "s.db")
    assert ledger.active().id == done.stdout.strip() and ledger.remembered("position") == "7"
    ledger.take([Event("xid:95", GPU, 100.0, id="a")])  # read once more
    assert ledger.incidents()[0].count == 1


def test_two_daemons_on_one_state(tmp_path):
    first, second = Ledger(tmp_path / "s.db"), Ledger(tmp_path / "s.db")
    first.lock()
    with pytest.raises(StateError, match=rf"process {os.getpid()}\) runs on .*one daemon a node"):
        second.lock()
    first.close()
    second.lock()
    second.close()


def test_a_full_disk(tmp_path):
    """Says so; nothing is half stored, and the same events can be taken once there is room."""
    ledger = Ledger(tmp_path / "s.db")
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count={pages}")
    events = [fault("xid:45", n) for n in range(5000)] + [fault()]
    with pytest.raises(StateError, match="the disk is full: free some room"):
        ledger.take(events)
    assert ledger.incidents() == []
    ledger._db.execute("PRAGMA max_page_count=1000000")
    ledger.take(events)
    assert ledger.active() is not None


@pytest.mark.parametrize(("content", "says"), [(b"no database at all" * 100, "move it away"), (None, "of version 99")])
def test_a_state_that_cannot_be_read(tmp_path, content, says):
    path = tmp_path / "s.db"
    if content:
        path.write_bytes(content)
    else:
        Ledger(path).close()
        with sqlite3.connect(path) as db:
            db.execute("UPDATE meta SET value='99' WHERE key='schema'")
        db.close()
    with pytest.raises(StateError, match=says):
        Ledger(path)
    with pytest.raises(StateError, match="choose another folder"):
        Ledger(tmp_path / "s.db" / "below" / "s.db")


# ---- thousands of events


@pytest.mark.share(2)
@pytest.mark.parametrize("seed", range(5))
def test_hostile_events(seed):
    """10,000 events and more that are injected, lost, repeated and reordered, with people and a scheduler that does not
    answer: no faulty card is returned, no person's decision undone, and at the end no healthy node is out of service."""
    world = World(seed)
    world.run(2500)
    world.settle()
    assert world.delivered > 2500 and len(world.quarantines) > 20


def test_hostile_events_of_a_state_on_disk_that_is_opened_again_and_again(tmp_path):
    world = World(11, Ledger(tmp_path / "s.db"))
    for n in range(1, 9):
        world.run(25 * n)
        world.ledger.close()
        world.ledger = Ledger(tmp_path / "s.db", now=lambda: world.time)
    assert len(world.quarantines) > 1


def evidence_counts_from_its_arrival(monkeypatch):
    fact = Ledger._fact
    monkeypatch.setattr(Ledger, "_fact", lambda self, gpu, name, at: fact(self, gpu, name, self.now()))


def a_check_is_enough(monkeypatch):
    monkeypatch.setattr(Ledger, "_repair", lambda self, i: i.last)
    monkeypatch.setattr(Ledger, "_cleared", lambda self, i: self._newest(i.gpu, "passed") or None)


def a_person_accepts_what_was_not_shown(monkeypatch):
    monkeypatch.setattr(
        Ledger, "override", lambda self, identity, why: self._accept("state='open'", [], why, "accepted", identity)
    )


def a_returned_node_is_taken_again(monkeypatch):
    monkeypatch.setattr(Ledger, "override", lambda self, identity, why: [])


def every_cordon_is_taken_off(monkeypatch):
    import node_world

    release = node_world.FakeNode.release

    def careless(self, mark):
        release(self, mark)
        self.unschedulable = False

    monkeypatch.setattr(node_world.FakeNode, "release", careless)


def no_repeat_of_what_was_accepted(monkeypatch):
    import weft.hardware.health.ledger as module

    monkeypatch.setattr(module, "EVIDENCE", (*module.EVIDENCE, "xid:79"))  # lost for good


@pytest.mark.parametrize("mutant", [
    evidence_counts_from_its_arrival, a_check_is_enough, a_person_accepts_what_was_not_shown, a_returned_node_is_taken_again,
    every_cordon_is_taken_off, no_repeat_of_what_was_accepted,
])  # fmt: skip
def test_the_simulation_finds_wrong_decisions(monkeypatch, mutant):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in (7, 13, 15, *range(6)):
            world = World(seed)
            world.run(1500)
            world.settle()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_more_hostile_events(seed):
    world = World(seed)
    world.run(5000)
    world.settle()


def test_a_node_that_changes_all_the_time(ledger):
    class Changing:
        def read(self):
            raise node.Conflict("changed")

    with pytest.raises(node.Unreachable, match="changed 5 times"):
        node.reconcile(Changing(), ledger)


# ---- commands


def test_scan(command, tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(line + "\n" for line, *_ in LINES[:3]) + "[1.0] usb 1-1: x\n")
    code, out, _ = command("health", "scan", log, "--json")
    found = json.loads(out)
    assert code == 1 and found["quarantine"]
    assert [(i["kind"], i["count"]) for i in found["incidents"]] == [("xid:79", 2), ("xid:14", 1)]
    log.write_text(LINES[1][0] + "\n")
    code, out, _ = command("health", "scan", log)
    assert code == 0 and "XID 14" in out and "Take the node" not in out
    assert command("health", "scan", tmp_path / "none")[0] == 2


def test_scan_of_a_pipe_with_binary_bytes(command, monkeypatch):
    text = b"\xff\x00\n" + LINES[0][0].encode() + b" \xfe\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    code, out, _ = command("health", "scan", "-")
    assert code == 1 and "XID 79" in out


@pytest.mark.parametrize(("what", "says"), [
    ("79", "reboot: take the node"), ("row-remap-failure", "inspect"), ("154", "0x2 Node Reboot Required: reboot"),
    ("149", "NETIR_LINK: reset, but for sub-codes 38, 40"), ("13", "5 incidents of one GPU within 24 h: drain"),
    (LINES[4][0], "the signal of the link"), ("999", "Not in the table"), ("145", "the driver decides at 0xc"),
])  # fmt: skip
def test_explain(command, what, says):
    code, out, _ = command("health", "explain", what)
    assert code == 0 and says in out


def test_codes(command):
    code, out, _ = command("health", "codes", "--json")
    found = json.loads(out)
    assert code == 0 and "docs.nvidia.com" in found["source"] and len(found["faults"]) > 110
    assert command("health", "explain", "79.5.1")[0] == 2
