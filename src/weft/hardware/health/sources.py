"""Where events come from: the kernel's log, NVML, and a socket for drills and people. Each is a thread that puts batches
into a queue."""

import contextlib
import errno
import json
import os
import queue
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.hardware.health.event import Event, pci_address
from weft.hardware.health.kernel_log import Parser

Say = Callable[[str], None]


@dataclass
class Batch:
    """Events with what is to be remembered together with them; ``answer`` is called after they are stored."""

    events: list[Event] = field(default_factory=list)
    remember: dict[str, str] = field(default_factory=dict)
    answer: Callable[[str], None] | None = None
    request: dict[str, Any] | None = None


Batches = "queue.Queue[Batch]"


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def boot_time() -> float:
    """When the machine started, in seconds since 1970."""
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class KernelLog:
    """/dev/kmsg, or a file that is appended to. Begins where it last stopped, so that a restart neither loses nor
    repeats lines."""

    KEY = "kernel-log"

    def __init__(self, path: str, batches: "queue.Queue[Batch]", position: str | None, say: Say):
        self.path, self.batches, self.say = path, batches, say
        self.position = json.loads(position) if position else {}
        self.parser = Parser()

    def run(self, stop: threading.Event) -> None:
        """Raises OSError where the log cannot be opened."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            with os.fdopen(descriptor, "rb", buffering=0) as device:
                self._records(device.fileno(), stop)
        else:
            os.close(descriptor)
            self._lines(stop)

    def _put(self, events: list[Event], **position: Any) -> None:
        self.position = position  # where a retry goes on
        self.batches.put(Batch(events, {self.KEY: json.dumps(position)}))

    def _records(self, device: int, stop: threading.Event) -> None:
        boot, started = boot_id(), boot_time()
        seen = self.position.get("sequence", -1) if self.position.get("boot") == boot else -1
        while not stop.is_set():
            if not select.select([device], [], [], 1.0)[0]:
                continue
            try:
                record = os.read(device, 8192).decode(errors="replace")
            except OSError as error:
                if error.errno == errno.EPIPE:  # the kernel overwrote lines before they were read
                    self.say("kernel log: lines were overwritten before they could be read; NVML's state is still read")
                    continue
                raise
            head, _, rest = record.partition(";")
            numbers = head.split(",")
            if len(numbers) < 3 or int(numbers[1]) <= seen:
                continue
            seen = int(numbers[1])
            text = rest.split("\n", 1)[0]
            event = self.parser.parse(text, started + int(numbers[2]) / 1e6, f"kmsg-{boot}-{seen}")
            if event:
                self._put([event], boot=boot, sequence=seen)

    def _lines(self, stop: threading.Event) -> None:
        inode, offset = self.position.get("inode"), int(self.position.get("offset", 0))
        if inode is None:  # the first time: what is in it already may be older than the last boot
            about = os.stat(self.path)
            inode, offset = about.st_ino, about.st_size
            self._put([], inode=inode, offset=offset)
        while not stop.is_set():
            with (
                contextlib.suppress(FileNotFoundError),
                open(self.path, "rb") as file,
            ):  # between two files of a rotation
                about = os.fstat(file.fileno())
                if about.st_ino != inode or about.st_size < offset:
                    inode, offset = about.st_ino, 0
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):  # written in part
                        break
                    event = self.parser.parse(line.decode(errors="replace"), id=f"file-{inode}-{offset}")
                    offset += len(line)
                    if event:
                        self._put([event], inode=inode, offset=offset)
            stop.wait(0.5)


# ---- NVML

REPEAT_S = 60.0  # a condition that holds is said again
# Readings in a row before a condition is believed, others at once.
AGAIN = {"nvml-hung": 3, "gpu-missing": 3, "nvlink-down": 3, "thermal-slowdown": 15, "power-brake": 15}


class Conditions:
    """Turns readings of NVML into events: what holds, what ended, which counts rose.

    Args:
        known: GPUs seen before: PCI address → NVLinks that were up.
        open_faults: what the ledger has open: pairs of GPU and kind.
    """

    def __init__(self, known: dict[str, int], open_faults: Callable[[], set[tuple[str, str]]]):
        self.known, self.open_faults = known, open_faults
        self._forget = False
        self._rows: dict[tuple[str, str], int] = {}  # condition → readings in a row
        self._said: dict[tuple[str, str], float] = {}
        self._ecc: dict[str, int] = {}

    def forget(self) -> None:
        """A person returned the node: the GPUs and links that are there now are all there should be."""
        self._forget = True  # by the thread that reads

    def events(self, snapshot: Any) -> list[Event]:
        """Of one ``telemetry.nvml.Snapshot``."""
        found: list[Event] = []
        if self._forget:
            self._forget = False
            self.known.clear()
        now = snapshot.time
        problem = snapshot.problem
        # Without a GPU ever seen here, an NVML that does not start is a machine without GPUs.
        mismatch = "version mismatch" in problem.lower()
        self._state(found, "", "driver-mismatch", bool(self.known) and mismatch, now, problem)
        self._state(found, "", "nvml-hung", bool(self.known) and bool(problem) and not mismatch, now, problem)
        if problem:
            return found
        here = {pci_address(gpu.pci) for gpu in snapshot.gpus if gpu.pci}
        for gpu in snapshot.gpus:
            address = pci_address(gpu.pci)
            if not address:
                continue
            if gpu.problem:
                self._lost(found, address, gpu.problem, now)
                continue
            self._gpu(found, address, gpu, now)
        for address in set(self.known) | here:
            self._state(found, address, "gpu-missing", address not in here, now, f"GPU {address} is not listed")
        return found

    def _lost(self, found: list[Event], address: str, problem: str, now: float) -> None:
        text = problem.lower()
        if "reset" in text:
            self._state(found, address, "recovery-action", True, now, problem, recovery=1)
        else:
            self._state(found, address, "xid:79", True, now, problem, without_code=True)

    def _gpu(self, found: list[Event], address: str, gpu: Any, now: float) -> None:
        from weft.hardware.telemetry.nvml import RECOVERY

        self._rows.pop((address, "xid:79"), None)
        errors = gpu.ecc_uncorrected_volatile
        if errors is not None:
            before = self._ecc.setdefault(address, errors)
            if errors > before:
                text = f"uncorrectable ECC errors: {before} -> {errors}"
                found.append(Event("ecc-uncorrectable", address, now, "nvml", text))
            self._ecc[address] = errors  # lower after the driver was loaded anew
        if gpu.rows_pending is not None:
            self._state(found, address, "row-remap-pending", gpu.rows_pending, now, "a row waits for remapping")
        if gpu.rows_failed is not None:
            self._state(found, address, "row-remap-failure", gpu.rows_failed, now, "a row could not be remapped")
        if gpu.recovery_action in RECOVERY:
            number = RECOVERY.index(gpu.recovery_action)
            text = f"recovery action: {gpu.recovery_action}"
            self._state(found, address, "recovery-action", number > 0, now, text, recovery=number)
        if gpu.throttle_bits is not None:
            reasons = gpu.throttle_reasons
            text = f"clocks: {', '.join(reasons)}"
            self._state(found, address, "thermal-slowdown", "hw_thermal_slowdown" in reasons, now, text)
            self._state(found, address, "power-brake", "hw_power_brake_slowdown" in reasons, now, text)
        if gpu.nvlinks_active is not None:
            most = self.known[address] = max(self.known.get(address, 0), gpu.nvlinks_active)
            text = f"{gpu.nvlinks_active} of {most} NVLinks are up"
            self._state(found, address, "nvlink-down", gpu.nvlinks_active < most, now, text)
        self.known.setdefault(address, 0)

    def _state(
        self, found: list[Event], gpu: str, kind: str, holds: bool, now: float, text: str, **details: Any
    ) -> None:
        key = (gpu, kind)
        if not holds:
            if self._rows.pop(key, 0) or (key in self.open_faults() and now - self._said.get(key, 0.0) >= REPEAT_S):
                self._said[key] = now
                found.append(Event("absent", gpu, now, "nvml", f"{kind}: over", {"kind": kind}))
            return
        self._rows[key] = self._rows.get(key, 0) + 1
        needed = AGAIN.get(kind, 1)
        if self._rows[key] == needed or (self._rows[key] > needed and now - self._said.get(key, 0.0) >= REPEAT_S):
            self._said[key] = now
            found.append(Event(kind, gpu, now, "nvml", text, details))


class NvmlSource:
    """Reads NVML every ``interval_s`` seconds, in another process, and takes its XID events at once."""

    def __init__(self, batches: "queue.Queue[Batch]", conditions: Conditions, interval_s: float = 4.0):
        self.batches, self.conditions, self.interval_s = batches, conditions, interval_s

    def run(self, stop: threading.Event) -> None:
        from weft.hardware.telemetry.reader import Reader

        def take(xid: Any) -> None:
            event = Event(f"xid:{xid.code}", pci_address(xid.pci), xid.time, "nvml", f"NVML event: XID {xid.code}")
            self.batches.put(Batch([event]))

        with Reader(on_xid=take) as reader:
            while not stop.is_set():
                events = self.conditions.events(reader.read())
                self.batches.put(Batch(events, {"gpus": json.dumps(self.conditions.known)}))
                stop.wait(self.interval_s)


# ---- the socket


class Socket:
    """A Unix socket of this user alone: one line of JSON in, one out. Requests: ``inject``, ``evidence``, ``release``,
    ``status``."""

    def __init__(self, path: Path, batches: "queue.Queue[Batch]"):
        self.path, self.batches = path, batches
        path.unlink(missing_ok=True)  # the state's lock says that no other daemon uses it
        self.server = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            self.server.bind(str(path))
        except OSError as error:
            raise OSError(
                f"{path}: {error}; a socket's path has at most 107 characters: choose a shorter --state"
            ) from error
        finally:
            os.umask(before)
        self.server.listen(8)
        self.server.settimeout(1.0)

    def run(self, stop: threading.Event) -> None:
        with self.server:
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    peer, _ = self.server.accept()
                    threading.Thread(target=self._serve, args=(peer,), daemon=True).start()
        self.path.unlink(missing_ok=True)

    def _serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.settimeout(30)
            line = peer.makefile("rb").readline(65536)
            answered = threading.Event()
            answer: list[str] = []

            def reply(text: str) -> None:
                answer.append(text)
                answered.set()

            try:
                request = json.loads(line)
                if not isinstance(request, dict):
                    raise ValueError("expected an object")
            except (ValueError, RecursionError) as error:
                reply(json.dumps({"error": f"not a request: {error}"}))
            else:
                request["by"] = _peer_user(peer)
                self.batches.put(Batch(answer=reply, request=request))
            answered.wait(25)
            peer.sendall(((answer or [json.dumps({"error": "no answer in time"})])[0] + "\n").encode())


def _peer_user(peer: socket.socket) -> str:
    import pwd

    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user = struct.unpack("3i", data)[1]
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def ask(path: Path, request: dict[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
    """Sends a request to the daemon.

    Raises:
        OSError: no daemon listens there.
        ValueError: it refuses; the message says why.
    """
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(timeout_s)
        try:
            peer.connect(str(path))
        except PermissionError as error:
            raise OSError(f"{path} is of another user: run this as the daemon's user (sudo)") from error
        except OSError as error:
            raise OSError(
                f"no weft health daemon listens at {path}: start it with weft health run --state {path.parent}"
            ) from error
        peer.sendall((json.dumps(request) + "\n").encode())
        answer = json.loads(peer.makefile().readline() or '{"error": "the daemon ended"}')
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer
