"""Tasks on several processes. One that dies costs its own task only."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

Answer = tuple[int, Any, str]  # number of the task, what came back, or why nothing did


def run(
    function: Callable[[Any, Any], Any], shared: Any, tasks: Sequence[Any], processes: int
) -> Generator[Answer, None, None]:
    """Answers as they come: of ``function(shared, task)`` for every task, on spawned processes that get ``shared``
    once.

    With one process everything runs in this one. What a task raises, and what its process dies of, is the answer's
    reason. When the caller closes the generator, or on Ctrl-C, the processes end.
    """
    if processes <= 1 or len(tasks) <= 1:
        for number, task in enumerate(tasks):
            yield (number, *_answer(function, shared, task))
        return
    work = ForkingPickler.dumps((function, shared))
    waiting = list(range(len(tasks)))[::-1]
    slots = [_Slot() for _ in range(min(processes, len(tasks)))]
    at: dict[Any, tuple[_Slot, int]] = {}  # the task of each process

    def assign(slot: _Slot) -> None:
        at[slot.pipe] = slot, waiting.pop()
        slot.send(tasks[at[slot.pipe][1]])

    try:
        for slot in slots:
            slot.start()
        for slot in slots:
            slot.send(work)
            assign(slot)
        while at:
            for pipe in wait(list(at)):
                slot, number = at.pop(pipe)
                try:
                    answer = slot.pipe.recv()
                except (EOFError, OSError):
                    answer = None, slot.cause_of_death()
                    slot.pipe.close()
                    if waiting:
                        slot.start()
                        slot.send(work)
                if waiting:
                    assign(slot)
                yield (number, *answer)
    finally:
        for slot in slots:
            slot.end()


class _Slot:
    """A process, which is restarted when it has died."""

    def __init__(self) -> None:
        self.pipe: Any = None
        self.process: Any = None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with _without_main(), _ignoring_sigint():
            process.start()
        self.process = process
        theirs.close()  # so that the pipe ends when the process does

    def send(self, value: Any) -> None:
        with contextlib.suppress(OSError):  # it died: the next receive says so
            if isinstance(value, memoryview):
                self.pipe.send_bytes(value)
            else:
                self.pipe.send(value)

    def cause_of_death(self) -> str:
        self.process.join(timeout=10)
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"its process died with status {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"its process was ended by {name}{'; out of memory?' if name == 'SIGKILL' else ''}"

    def end(self) -> None:
        if self.process is not None:
            self.pipe.close()
            self.process.terminate()
            self.process.join(timeout=10)


@contextlib.contextmanager
def _ignoring_sigint() -> Iterator[None]:
    """Processes that start now ignore Ctrl-C, which this process handles."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Processes that start now do not run the script again, which may have no ``if __name__ == "__main__":``. They need
    nothing of it: their functions are in modules."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_with(parent: Any) -> None:
    """Ends this process when its parent is no more; also one that was killed, which could not say so."""
    parent.join()
    os._exit(1)


def _serve(pipe: Connection) -> None:
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    try:
        function, shared = pipe.recv()
        while True:
            pipe.send(_answer(function, shared, pipe.recv()))
    except (EOFError, OSError):  # the parent has ended
        return


def _answer(function: Callable[[Any, Any], Any], shared: Any, task: Any) -> tuple[Any, str]:
    try:
        return function(shared, task), ""
    except Exception as error:
        return None, str(error) or type(error).__name__
