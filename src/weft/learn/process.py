"""The checker's side of the learner's process: a server that forks, and objects that stand for the learner's."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weft.learn import wire


class Failed(Exception):
    """The learner's code raised, hung, ended its process or changed an argument.

    ``error`` says where: see ``child.described``.
    """

    def __init__(self, reason: str, error: dict[str, Any]) -> None:
        super().__init__(reason)
        self.reason, self.error = reason, error


class Server:
    """A process that has imported what a kind of exercise needs, and forks a fresh process for each check."""

    def __init__(self, kind: str) -> None:
        self.kind, self.gpu = kind, kind == "gpu"
        self.control, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"}
        environment.pop("TRITON_INTERPRET", None)
        if kind == "triton":
            environment["TRITON_INTERPRET"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "weft.learn.child", str(theirs.fileno()), kind],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def start(self, file: Path, time_limit_s: float, probe: Path | None = None) -> "Process":
        return Process(self, file, time_limit_s, probe)

    def close(self) -> None:
        self.control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Process:
    """One learner's file, loaded in a process of its own.

    Args:
        time_limit_s: Of all calls together. A loop that never ends is stopped, and said where.
    """

    def __init__(self, server: Server, file: Path, time_limit_s: float, probe: Path | None) -> None:
        self.file = file.resolve()
        self.options: dict[str, Any] = {}  # how kernels are interpreted: the order of programs
        self.launches: list[dict[str, Any]] = []  # of the last call
        self.all_launches: list[dict[str, Any]] = []
        self.computed: list[str] = []  # operators of PyTorch that calls ran outside of Triton kernels
        self.time_limit_s = time_limit_s
        self.left_s = time_limit_s
        self.channel, theirs = socket.socketpair()
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.crash = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        job = {
            "file": str(self.file),
            "folder": str(self.file.parent),
            "kind": server.kind,
            "probe": str(probe or ""),
            "time_limit_s": time_limit_s,
            "gpu": server.gpu,
        }
        fds = [theirs.fileno(), self.output.fileno(), self.crash.fileno()]
        socket.send_fds(server.control, [json.dumps(job).encode()], fds)
        theirs.close()
        answer = server.control.recv(64)
        if not answer:
            raise OSError("the process that runs exercises did not start; run `weft doctor`")
        self.pid = json.loads(answer)

    def request(self, writes: bool = False, **request: Any) -> Any:
        """What a request returns in the learner's process.

        Args:
            writes: Whether a call may change its arguments; the changes come back.

        Raises:
            Failed: The learner's code raised, took too long, ended the process, or changed an argument.
        """
        began = time.monotonic()
        try:
            self.channel.settimeout(max(self.left_s, 0.01))
            wire.send(self.channel, {"options": self.options, **request})
            answer = wire.receive(self.channel)
        except TimeoutError:
            raise Failed("time", {"type": "", "message": "", "lines": self._where_it_hangs()}) from None
        except (EOFError, ConnectionError):
            raise Failed("crash", self._how_it_ended()) from None
        finally:
            self.left_s -= time.monotonic() - began
        if "error" in answer:
            raise Failed("raised", answer["error"])
        self.launches = answer["launches"]
        self.all_launches += self.launches
        self.computed += answer["computed"]
        if request["do"] == "call":
            for number, (sent, come) in enumerate(zip(request["args"], answer["args"], strict=True)):
                if writes:
                    _copy(come, sent)
                elif not wire.same(sent, come):
                    name = ".".join(request["path"])
                    raise Failed("changed", {"type": "", "message": f"{name}, {number}", "lines": []})
        return self._standing_for(answer["result"])

    def _standing_for(self, value: Any) -> Any:
        if isinstance(value, wire.Held):
            return Remote(self, value.number, (), value.type_name)
        if type(value) in (list, tuple):
            return type(value)(map(self._standing_for, value))
        return value

    def printed(self) -> str:
        """What the learner's code printed."""
        self.output.seek(0)
        return self.output.read(20_000)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.channel.close()
        self.output.close()
        self.crash.close()

    def _where_it_hangs(self) -> list[list[Any]]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if lines := self._traced():
                return lines
        return []

    def _how_it_ended(self) -> dict[str, Any]:
        time.sleep(0.05)
        self.crash.seek(0)
        fault = re.search(r"Fatal Python error: (.+)", self.crash.read())
        return {"type": "", "message": fault[1] if fault else "", "lines": self._traced()}

    def _traced(self) -> list[list[Any]]:
        """The lines of the learner's file in what faulthandler wrote, the innermost last."""
        self.crash.seek(0)
        found = re.findall(r'File "(.*)", line (\d+) in (\S+)', self.crash.read())
        return [[int(line), name] for path, line, name in reversed(found) if Path(path).name == self.file.name]


class Remote:
    """A function or object in the learner's process: call it, take an attribute of it, pass it on."""

    __slots__ = ("_base", "_path", "_process", "_type", "_writes")

    def __init__(self, process: Process, base: int | None, path: tuple[str, ...], type_name: str = "") -> None:
        self._process, self._base, self._path, self._type = process, base, path, type_name
        self._writes = False

    def __getattr__(self, name: str) -> "Remote":
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(self._process, self._base, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sent = [_sent(a) for a in args]
        return self._process.request(
            self._writes, do="call", base=self._base, path=list(self._path), args=sent, kwargs=kwargs
        )

    def __repr__(self) -> str:
        return f"<{'.'.join(self._path) or self._type or 'the file'} in the learner's process>"


def _sent(value: Any) -> Any:
    if isinstance(value, Remote) and not value._path and value._base is not None:
        return wire.Held(value._base, value._type)
    return value


def value(remote: Any) -> Any:
    """The value of an attribute; raises Failed where the file does not have it."""
    if not isinstance(remote, Remote):
        return remote
    return remote._process.request(do="get", base=remote._base, path=list(remote._path))


def _copy(come: Any, sent: Any) -> None:
    """Writes what the call left in an argument into the checker's, as if the call had been made here."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch and isinstance(sent, torch.Tensor):
        with torch.no_grad():
            if 0 not in sent.stride() or sent.numel() == 0:
                sent.copy_(come)
    elif numpy and isinstance(sent, numpy.ndarray):
        if sent.flags.writeable:
            sent[...] = come
    elif isinstance(sent, list):
        if len(sent) == len(come) and any(_holds_array(s) for s in sent):
            for s, c in zip(sent, come, strict=True):
                _copy(c, s)
        else:
            sent[:] = come
    elif isinstance(sent, dict):
        for key in sent:
            _copy(come.get(key), sent[key])


def _holds_array(value: Any) -> bool:
    return hasattr(value, "dtype")
