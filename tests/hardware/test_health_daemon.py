"""Sources and the daemon: a fake NVML, a log that is rotated, the socket, kills, drills, a full disk."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from followed import follows

from weft.hardware.health import daemon as module
from weft.hardware.health import sources
from weft.hardware.health.daemon import Commands, Daemon
from weft.hardware.health.event import Event
from weft.hardware.health.ledger import Ledger, StateError
from weft.hardware.health.node import DryRun
from weft.hardware.health.sources import Conditions, KernelLog, Socket, ask

GPU = "0000:9b:00"
LINE = "NVRM: Xid (PCI:0000:9b:00): {}, pid=1, name=x, text\n"


def eventually(condition, seconds=30.0, why=lambda: "not in time"):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, why()
        time.sleep(0.02)


# ---- the log


@contextlib.contextmanager
def following(path, position=None):
    batches, stop = queue.Queue(), threading.Event()
    log = KernelLog(str(path), batches, position, lambda text: None)
    thread = threading.Thread(target=log.run, args=(stop,))
    thread.start()
    try:
        yield batches
    finally:
        stop.set()
        thread.join()


def next_events(batches, count):
    found, position = [], None
    while len(found) < count:
        batch = batches.get(timeout=5)
        found += batch.events
        position = batch.remember[KernelLog.KEY]
    return found, position


def test_a_log_that_is_rotated_and_cut_and_read_on_after_a_restart(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text(LINE.format(79))  # before the first start: not read
    with following(path) as batches:
        batches.get(timeout=5)
        with path.open("a") as file:
            file.write(LINE.format(48) + LINE.format(95)[:30])  # the second in part
            file.flush()
            (first,), _ = next_events(batches, 1)
            file.write(LINE.format(95)[30:])
        (second,), position = next_events(batches, 1)
        assert (first.kind, second.kind) == ("xid:48", "xid:95")
    with path.open("a") as file:
        file.write(LINE.format(46))  # while none reads
    with following(path, position) as batches:
        (third,), _ = next_events(batches, 1)
        path.rename(tmp_path / "kern.log.1")
        time.sleep(0.7)
        path.write_text(LINE.format(62))
        (fourth,), _ = next_events(batches, 1)
        assert (third.kind, fourth.kind) == ("xid:46", "xid:62")
    assert len({e.id for e in (first, second, third, fourth)}) == 4


def test_dev_kmsg_is_read_where_it_may_be():
    """The real device: records have numbers and times after the boot; none is a fault on a machine without a GPU."""
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("/dev/kmsg may not be read here")
    batches, stop = queue.Queue(), threading.Event()
    log = KernelLog("/dev/kmsg", batches, None, lambda text: None)
    seen = []
    log.parser.parse = lambda text, at, id: seen.append((at, id))
    thread = threading.Thread(target=log.run, args=(stop,))
    thread.start()
    time.sleep(0.5)
    stop.set()
    thread.join()
    if not seen:
        pytest.skip("the kernel's log is empty here")
    assert all(sources.boot_time() - 5 < at < time.time() + 5 for at, _ in seen)
    assert len({id for _, id in seen}) == len(seen)


# ---- NVML


@pytest.fixture
def nvml(fake_nvml):
    from weft.hardware.telemetry.reader import Reader

    with Reader(timeout_s=20.0) as reader:
        yield fake_nvml, reader


def kinds(conditions, reader, readings=1):
    found = []
    for _ in range(readings):
        found += [
            (e.details.get("kind", e.kind) + ("-" if e.kind == "absent" else ""), e.gpu)
            for e in conditions.events(reader.read())
        ]
    return found


@pytest.mark.parametrize(("values", "kind", "readings"), [
    ({"rows_failed": 1}, "row-remap-failure", 1), ({"rows_pending": 1}, "row-remap-pending", 1),
    ({"recovery_action": 2}, "recovery-action", 1), ({"throttle": 0x48}, "thermal-slowdown", 15),
    ({"throttle": 0x88}, "power-brake", 15),
])  # fmt: skip
def test_conditions_of_a_reading(nvml, values, kind, readings):
    fake, reader = nvml
    conditions = Conditions({}, set)
    assert kinds(conditions, reader) == []
    fake.set(0, **values)
    (found,) = kinds(conditions, reader, readings)
    first = sorted(conditions.known)[0]
    assert found == (kind, first)
    assert kinds(conditions, reader, 2) == []  # said once, until a minute is over
    fake.set(0, **dict.fromkeys(values, 0))
    assert kinds(conditions, reader) == [(f"{kind}-", first)]


def test_a_gpu_that_is_lost_and_one_that_is_missing(nvml):
    fake, reader = nvml
    conditions = Conditions({}, set)
    kinds(conditions, reader)
    here = sorted(conditions.known)
    fake.vanish(1)
    assert kinds(conditions, reader) == [("xid:79", here[1])]
    fake.heal()
    fake.gpus(1)
    assert kinds(conditions, reader, 3) == [("gpu-missing", here[1])]
    fake.gpus(2)
    assert kinds(conditions, reader) == [("gpu-missing-", here[1])]
    fake.gpus(1)
    assert kinds(conditions, reader, 3) == [("gpu-missing", here[1])]
    conditions.forget()  # a person says that it was taken out
    assert kinds(conditions, reader, 5) == []
    # After a restart of the daemon, the state still knows both.
    fake.gpus(1)
    assert kinds(Conditions(dict.fromkeys(here, 0), set), reader, 3) == [("gpu-missing", here[1])]


def test_an_nvml_that_hangs_and_a_machine_without_gpus(nvml, monkeypatch):
    fake, reader = nvml
    conditions = Conditions({GPU: 0}, set)
    fake.hang("nvmlDeviceGetTemperature")
    reader.timeout_s = 1.0
    assert kinds(conditions, reader, 4) == [("nvml-hung", "")]
    assert kinds(Conditions({}, set), reader, 4) == []  # where no GPU was ever seen


def test_counts_that_rise_are_events_and_counts_that_start_anew_are_not():
    from weft.hardware.telemetry.nvml import Gpu, Snapshot

    conditions = Conditions({}, set)

    def reading(ecc, links=None):
        gpu = Gpu(pci="00000000:9B:00.0", ecc_uncorrected_volatile=ecc, nvlinks_active=links)
        return [e.kind for e in conditions.events(Snapshot(time.time(), gpus=[gpu]))]

    assert [reading(5), reading(5), reading(7), reading(0), reading(1)] == [
        [], [], ["ecc-uncorrectable"], [], ["ecc-uncorrectable"]
    ]  # fmt: skip
    assert [reading(1, 18), *(reading(1, 17) for _ in range(3))] == [[], [], [], ["nvlink-down"]]
    assert conditions.known == {GPU: 18}


# ---- the daemon as a process


@contextlib.contextmanager
def running(folder, log, *options, environment=()):
    command = [
        sys.executable, "-m", "weft", "health", "run", "--state", str(folder), "--kernel-log", str(log), "--check", "true",
        *options,
    ]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **dict(environment)}
    with (folder.parent / "said").open("a") as said:
        process = subprocess.Popen(command, env=variables, stderr=said)
    try:
        eventually(lambda: answers(folder) or process.poll() is not None, 30, (folder.parent / "said").read_text)
        yield process
    finally:
        process.terminate()
        process.wait(20)


def answers(folder):
    with contextlib.suppress(OSError):  # a killed daemon leaves its socket behind
        return state(folder)


def state(folder):
    return ask(folder / "health.sock", {"do": "status"})


def test_a_daemon_that_is_killed_and_started_again(tmp_path, fake_nvml):
    """One quarantine from the first fault on, whatever is killed; events of the log, of NVML and of a drill all arrive,
    each once."""
    folder, log = tmp_path / "state", tmp_path / "kmsg"
    log.touch()
    with running(folder, log) as process:
        eventually(lambda: follows(folder))
        with log.open("a") as file:
            file.write(LINE.format(95))
        eventually(lambda: (state(folder)["quarantine"] or {}).get("applied"))
        identity = state(folder)["quarantine"]["id"]
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    with log.open("a") as file:
        file.write(LINE.format(48))
    with running(folder, log):
        eventually(lambda: len(state(folder)["quarantine"]["incidents"]) == 2)
        assert state(folder)["quarantine"]["id"] == identity

        def by_nvml():  # an event reaches those alone who listen already
            fake_nvml.xid(1, 62)
            time.sleep(0.3)
            return len(state(folder)["quarantine"]["incidents"]) == 3

        eventually(by_nvml)
        done = ask(folder / "health.sock", {"do": "inject", "kind": "xid:79", "gpu": GPU})
        found = {i["kind"]: i for i in done["quarantine"]["incidents"]}
        assert (
            found["xid:79"]["what"].startswith("drill: ") and found["xid:48"]["count"] == found["xid:95"]["count"] == 1
        )
        said = ask(folder / "health.sock", {"do": "release", "why": "drill over"})
        assert said["quarantine"] is None
    assert not (folder / "health.sock").exists()


def test_commands_of_a_drill(command, tmp_path):
    batches_of = Daemon(Ledger(), DryRun(lambda text: None), Commands(["true"], []), lambda text: None)
    folder = tmp_path
    control = Socket(folder / "health.sock", batches_of.batches)
    threads = [threading.Thread(target=batches_of.run), threading.Thread(target=control.run, args=(batches_of.stop,))]
    for thread in threads:
        thread.start()
    try:
        assert oct(os.stat(folder / "health.sock").st_mode & 0o777) == "0o600"
        code, out, _ = command("health", "inject", "79", "--gpu", GPU, "--state", folder)
        assert code == 0 and "drill: XID 79 on GPU 0000:9b:00 (reboot)" in out
        code, out, _ = command("health", "status", "--state", folder, "--json")
        assert json.loads(out)["quarantine"]["incidents"][0]["needs"] == "reboot"
        code, out, _ = command("health", "release", "drill over", "--state", folder)
        assert code == 0 and "No quarantine" in out
        for words, says in (
            (["inject", "no-such-fault"], "unknown fault"),
            (["inject", "79", "--gpu", "zz"], "expected an index or a PCI address"),
            (["inject", "79", "--gpu", "3"], "there is no GPU 3"), (["evidence", "luck"], "evidence is reset or passed"),
        ):  # fmt: skip
            code, _, err = command("health", *words, "--state", folder)
            assert code == 2 and says in " ".join(err.split()), words
        for request in (
            b"not json\n",
            b"[]\n",
            b'{"do": "nothing"}\n',
            b'{"do": "inject"}\n',
            b'{"do": "inject", "kind": "xid:1", "gpu": "x"}\n',
            b"[" * 50000 + b"\n",
            b'{"do": "inject", "kind": "xid:31", "details": {"pid": 99999999999999999999}}\n',
        ):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(folder / "health.sock"))
                peer.sendall(request)
                assert "error" in json.loads(peer.makefile().readline())
    finally:
        batches_of.stop.set()
        batches_of.changed.set()
        for thread in threads:
            thread.join(20)
    code, _, err = command("health", "status", "--state", folder)
    assert code == 1 and "no weft health daemon listens" in " ".join(err.split())


def test_events_wait_while_the_disk_is_full(monkeypatch):
    ledger, said = Ledger(), []
    daemon = Daemon(ledger, DryRun(said.append), Commands(["true"], []), said.append)
    take, full = ledger.take, threading.Event()
    full.set()

    def taking(events, remember=None):
        if full.is_set() and events:
            raise StateError("s.db: the disk is full: free some room")
        return take(events, remember)

    monkeypatch.setattr(ledger, "take", taking)
    monkeypatch.setattr(module, "RETRY_S", 0.1)
    thread = threading.Thread(target=daemon.run)
    thread.start()
    try:
        daemon.batches.put(sources.Batch([Event("xid:48", GPU, time.time())]))
        daemon.batches.put(sources.Batch([Event("xid:79", GPU, time.time())]))
        eventually(lambda: any("the disk is full" in line and "events wait" in line for line in said))
        refused = []
        daemon.batches.put(sources.Batch(answer=refused.append, request={"do": "status", "by": "x"}))
        daemon.batches.put(sources.Batch([Event("xid:45", GPU, time.time())] * 3000))
        eventually(lambda: refused and "the disk is full" in refused[0])
        full.clear()
        eventually(lambda: ledger.active() and len(ledger.active().incidents) == 2)
        eventually(lambda: any("can be written again" in line for line in said))
        assert len([line for line in said if "is full" in line]) == 1
    finally:
        daemon.stop.set()
        daemon.changed.set()
        thread.join(20)


def test_a_failed_check_keeps_the_node_out_and_asks_for_a_person(monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.1)
    ledger, said = Ledger(), []
    daemon = Daemon(ledger, DryRun(said.append), Commands(["sh", "-c", "exit 1"], ["true"]), said.append)
    thread = threading.Thread(target=daemon.run)
    thread.start()
    try:
        daemon.batches.put(sources.Batch([Event("pcie-uncorrected", GPU, time.time() - 5)]))
        eventually(
            lambda: (
                ledger.active() and {i.kind for i in ledger.active().incidents} == {"pcie-uncorrected", "check-failed"}
            )
        )
        assert ledger.needs(ledger.active().incidents[1]) == "person"
    finally:
        daemon.stop.set()
        daemon.changed.set()
        thread.join(20)


def test_a_boot_is_evidence_once(monkeypatch):
    ledger = Ledger()
    daemon = Daemon(ledger, DryRun(lambda text: None), Commands(["true"], []), lambda text: None)
    for boot, at in (("a", 50.0), ("a", 50.0), ("b", 500.0)):
        monkeypatch.setattr(module, "boot_id", lambda boot=boot: boot)
        monkeypatch.setattr(module, "boot_time", lambda at=at: at)
        daemon.start()
        if not ledger.incidents():
            ledger.take([Event("xid:79", GPU, 100.0)])
            assert ledger.needs(ledger.incidents()[0]) == "reboot"
    assert ledger.needs(ledger.incidents()[0]) == "check"


@pytest.mark.parametrize(("words", "says", "status"), [
    (["--kernel-log", "/nonexistent"], "there is no /nonexistent", 2), (["--on", "nomad"], "kubernetes, slurm or none", 2),
    (["--state", "/proc/none"], "choose another folder", 1),
    (["--kernel-log", "none", "--check", "a 'b"], "--check: \"a 'b\": No closing quotation", 2),
])  # fmt: skip
def test_wrong_words_of_run(command, tmp_path, words, says, status):
    words = words if "--state" in words else [*words, "--state", tmp_path]
    code, _, err = command("health", "run", *words)
    assert code == status and says in " ".join(err.split())
