"""Reads NVML in another process, with a deadline: a driver that hangs or crashes costs one reading, never this program.

The process writes a line of JSON for each reading that it is asked for, and one for each XID error when it happens.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import IO, Any

from weft.hardware.probe import SOURCE_ROOT, signal_name
from weft.hardware.telemetry.nvml import Nvml, Snapshot, Xid

LONGEST_WAIT_S = 60.0  # before the process is started again, after failures
START_S = (
    10.0  # more for the first reading: Python starts, and without persistence mode the driver initialises the GPUs
)


class Reader:
    """Readings of all GPUs. ``read`` always returns; it may be called from any thread.

    Args:
        timeout_s: how long NVML may take for one reading; ten seconds more for the first of a process.
        on_xid: called with each XID error, from a thread of the reader's; without it events are not listened to.
    """

    def __init__(self, timeout_s: float = 5.0, on_xid: Callable[[Xid], None] | None = None) -> None:
        self.timeout_s, self.on_xid = timeout_s, on_xid
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.stuck: subprocess.Popen[str] | None = None  # was killed, and has not ended
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.failures = 0
        self.failed_at = 0.0
        self.problem = ""

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> Snapshot:
        """What the GPUs do now; without an answer a snapshot without GPUs, whose ``problem`` says why."""
        with self.lock:
            limit_s = self.timeout_s + (START_S if self.process is None else 0)
            process = self.process or self._start()
            if process is None:
                return Snapshot(time.time(), problem=self.problem)
            try:
                process.stdin.write("read\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                answer = self.answers.get(timeout=limit_s)
            except queue.Empty:
                return self._failed(f"NVML did not answer within {limit_s:g} s: the driver hangs")
            except OSError:  # it has ended
                answer = None
            if answer is None:
                return self._failed("")
            found = Snapshot.from_dict(answer)
            if found.problem:
                return self._failed(found.problem)
            self.failures = 0
            return found

    def close(self) -> None:
        """Ends the process."""
        with self.lock:
            self._end()

    def _start(self) -> "subprocess.Popen[str] | None":
        if self.failures and time.monotonic() < self.failed_at + min(2.0 ** (self.failures - 1), LONGEST_WAIT_S):
            return None
        if self.stuck is not None and self.stuck.poll() is None:  # one such process is enough
            pid = self.stuck.pid
            self._failed(
                f"process {pid}, which read NVML, cannot be ended: the driver is stuck, the machine needs a reboot"
            )
            return None
        self.stuck = None
        path = os.pathsep.join([str(SOURCE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.answers = queue.Queue()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, *(["--events"] if self.on_xid else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for this program, which then ends the process
            )
        except OSError as error:
            self._failed(f"cannot start the process that reads NVML: {error}")
            return None
        threading.Thread(target=self._listen, args=(self.process.stdout, self.answers), daemon=True).start()
        return self.process

    def _listen(self, lines: IO[str], answers: "queue.Queue[dict[str, Any] | None]") -> None:
        with lines:
            for line in lines:
                try:
                    message = json.loads(line)
                except ValueError:  # what a library prints; or the process ended within a line
                    continue
                if "xid" in message and self.on_xid:
                    self.on_xid(Xid(**message["xid"]))
                elif "snapshot" in message:
                    answers.put(message["snapshot"])
        answers.put(None)

    def _failed(self, problem: str) -> Snapshot:
        status = self._end()
        if not problem:
            said = f"signal {signal_name(-status)}" if status is not None and status < 0 else f"status {status}"
            problem = f"the process that reads NVML ended with {said}"
        self.failures, self.failed_at, self.problem = self.failures + 1, time.monotonic(), problem
        return Snapshot(time.time(), problem=problem)

    def _end(self) -> int | None:
        process, self.process = self.process, None
        if process is None:
            return None
        status = process.poll()
        if status is None:
            process.kill()
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:  # a process that is stuck inside the driver cannot be killed at once
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.stuck = process
            return status


def read_once(timeout_s: float = 10.0, pause_s: float = 0.0) -> Snapshot:
    """One reading; with a pause two, so that what is a difference of two readings is there."""
    with Reader(timeout_s) as reader:
        found = reader.read()
        if pause_s and not found.problem:
            time.sleep(pause_s)
            found = reader.read()
        return found


# ---- in the other process


def serve(events: bool) -> int:
    """Answers each line of standard input with a reading, until the input ends."""
    output, writing = sys.stdout, threading.Lock()

    def write(**message: Any) -> None:
        with writing:
            output.write(json.dumps(message, default=vars) + "\n")
            output.flush()

    def listen(nvml: Nvml) -> None:
        for xid in nvml.xids():
            write(xid=asdict(xid))

    requests: queue.Queue[str] = queue.Queue()

    def take() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # the program has ended; the main thread may hang in the driver

    threading.Thread(target=take, daemon=True).start()
    try:
        nvml = Nvml()
    except ImportError as error:
        write(snapshot=Snapshot(time.time(), problem=str(error)))
        return 1
    except Exception as error:  # NVMLError of a module that may not be there
        write(snapshot=Snapshot(time.time(), problem=f"NVML does not start: {error}"))
        return 1
    started = False
    while requests.get():
        write(snapshot=nvml.snapshot())
        if events and not started:  # after the first reading, which learns which GPU is which
            threading.Thread(target=listen, args=(nvml,), daemon=True).start()
            started = True
    return 0


if __name__ == "__main__":
    sys.exit(serve("--events" in sys.argv))
