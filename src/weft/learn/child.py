"""The learner's process: it loads the learner's file and runs the calls that the checker sends.

Inputs come in and results go out as data; what was expected never is in this process. One process that has PyTorch and
Triton imported (the *server*) forks a fresh one for each check, so that a check costs milliseconds and a crash costs
nothing. Run as ``python -m weft.learn.child FD KIND``.
"""

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.learn import wire

MEMORY_BYTES = 8 << 30  # of data, without a GPU: a list that grows for ever ends in a MemoryError, not in swap

IMPORTED = {
    "python": (),
    "torch": ("torch",),
    "training": ("torch", "torch._dynamo"),  # an optimizer imports it
    "triton": ("torch", "weft.learn.interpreter", "weft.learn.outside"),
    "gpu": ("torch", "triton"),
}


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    kind = sys.argv[2]
    with contextlib.suppress(ModuleNotFoundError):
        for name in IMPORTED[kind]:
            importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the checker's to handle
    children: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not data:
            for pid in children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        pid = os.fork()
        if not pid:
            control.close()
            os.setpgid(0, 0)
            try:
                _serve(json.loads(data), *fds)
            finally:
                os._exit(0)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        for fd in fds:
            os.close(fd)
        children.add(pid)
        control.sendall(json.dumps(pid).encode())
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) > 0:
                children.discard(ended)


def _serve(job: dict[str, Any], channel_fd: int, output_fd: int, crash_fd: int) -> None:
    channel = socket.socket(fileno=channel_fd)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    crash = os.fdopen(crash_fd, "w")
    faulthandler.enable(crash)
    faulthandler.register(signal.SIGUSR1, crash)  # the checker asks where the file hangs
    seconds = int(job["time_limit_s"]) * 4 + 60  # also where the checker was killed
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if not job["gpu"]:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    os.chdir(job["folder"])
    if "torch" in sys.modules and not job["gpu"]:  # there it would be timed as well
        _poison_empty_tensors()
    learner = _Process(Path(job["file"]), job["kind"], job["probe"])
    while True:
        try:
            request = wire.receive(channel, learner.held.__getitem__)
        except EOFError:
            return
        wire.send(channel, learner.answer(request), learner.hold)


def _poison_empty_tensors() -> None:
    """``torch.empty`` gives NaN (integers their least value), so that an element that nothing writes shows."""
    import torch

    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    with torch.device("meta"):
        torch.empty(0)  # a device's context remembers which functions make tensors: before they are replaced

    def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            x = make(*args, **kwargs)
            with torch.no_grad():
                if x.dtype.is_floating_point or x.dtype.is_complex:
                    x.fill_(float("nan"))
                elif x.dtype != torch.bool:
                    x.fill_(torch.iinfo(x.dtype).min)
            return x

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        setattr(owner, name, poisoned(getattr(owner, name)))


class Missing(Exception):
    """The learner's file does not have a name that the checker asks for."""


class _Process:
    def __init__(self, file: Path, kind: str, probe: str) -> None:
        self.file, self.kind, self.probe = file, kind, probe
        self.held: list[Any] = []
        self.modules: dict[str, ModuleType] = {}
        self.timing: Any = None
        if "torch" in sys.modules:
            from weft.learn.timed import Runs  # now: before the learner's file, which may change what it finds

            self.timing = Runs()

    def hold(self, value: Any) -> int:
        for number, known in enumerate(self.held):
            if known is value:
                return number
        self.held.append(value)
        return len(self.held) - 1

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The result of a call, what it did to its arguments, and what its kernels did; or its exception."""
        record: Any = contextlib.nullcontext([])
        outside: Any = contextlib.nullcontext()
        if self.kind == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
            from weft.learn.interpreter import recording
            from weft.learn.outside import Computed

            record = recording(request["options"])
            outside = Computed() if request["do"] == "call" else outside
        try:
            with record as launches, outside:
                result = self._do(request)
        except BaseException as error:
            return {"error": described(error, self.file)}
        finally:
            sys.stdout.flush()
        return {
            "result": result,
            "args": request.get("args"),
            "launches": [r.to_dict() for r in launches],
            "computed": getattr(outside, "names", []),
        }

    def _do(self, request: dict[str, Any]) -> Any:
        if request["do"] in ("stage", "change", "go", "idle", "outputs"):
            return self.timing.do(request, self._target(request) if request["do"] == "stage" else None)
        if request["do"] == "load":
            self.modules["exercise"] = _load("exercise", self.file)
            return None
        if request["do"] == "probe":
            if "probe" not in self.modules:
                self.modules["probe"] = _load("probe", Path(self.probe))
            function = getattr(self.modules["probe"], request["name"])
            return function(self.modules["exercise"], *request["args"])
        target = self._target(request)
        return target if request["do"] == "get" else target(*request["args"], **request["kwargs"])

    def _target(self, request: dict[str, Any]) -> Any:
        target: Any = self.modules["exercise"] if request["base"] is None else self.held[request["base"]]
        for name in request["path"]:
            if not hasattr(target, name):
                raise Missing(name)
            target = getattr(target, name)
        return target


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    spec.loader.exec_module(module)
    return module


def described(error: BaseException, file: Path) -> dict[str, Any]:
    """An exception, and the lines of the learner's file that it went through, the innermost last."""
    while type(error).__name__ in ("InterpreterError", "CompilationError") and error.__cause__ is not None:
        error = error.__cause__
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).name == file.name:
            lines.append([frame.lineno, frame.name])
    return {"type": type(error).__name__, "message": str(error)[:2000], "lines": lines}


if __name__ == "__main__":
    main()
