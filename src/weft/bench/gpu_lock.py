"""A lock on the GPU for processes that measure on it: while one times, the others are stopped.

The lock holder sends SIGSTOP to the other workers, waits for an idle GPU, measures, and then sends them SIGCONT. Autotuners of
libraries take the lock as well: a peer that chose a slow kernel because of its neighbours would be a weak peer.
"""

import contextlib
import functools
import importlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

# methods that choose a kernel by timing candidates: module, class, method
AUTOTUNERS = (
    ("weft.operators.peers", "Compiled", "seconds"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", "benchmark_all_configs"),
    ("torch._inductor.select_algorithm", "AlgorithmSelectorCache", "benchmark_choices"),
    ("quack.autotuner", "Autotuner", "_bench"),
)
LONGEST_S = 60.0  # the others are stopped at most this long: a stopped process may hold a lock that this one needs
PROBES, PROBE_BYTES, UNEVEN = 400, 2**26, 1.5
PAUSE_CYCLES = 20_000_000  # about 11 ms, in which 400 copies are queued


class LockHeldTooLong(RuntimeError):
    """The other processes had to be continued before the measurement ended."""


KINDS = ("waiting for memory", "waiting for the lock", "waiting for an idle GPU", "checking", "timing")


class SharedState:
    """What the processes share; made by the one that starts them.

    Args:
        context: of :mod:`multiprocessing`.
        processes: how many.
        memory: bytes that they may use together.

    Attributes:
        spent: seconds that each process spent in each of KINDS; most of the rest is compilation.
    """

    def __init__(self, context: Any, processes: int, memory: float = float("inf")):
        self.lock, self.beginning = context.Lock(), context.Lock()
        self.pids = context.Array("q", processes, lock=False)  # 0: not started, or done
        self.reserved = context.Array("d", processes, lock=False)  # bytes that each may come to use
        self.memory = memory
        self.spent = context.Array("d", processes * len(KINDS), lock=False)

    def summary(self, seconds: float) -> str:
        """Where the processes' time went, of a run that took so many seconds."""
        all_of_them = max(seconds * len(self.pids), 1e-9)
        shares = [sum(self.spent[kind :: len(KINDS)]) / all_of_them for kind in range(len(KINDS))]
        parts = [f"{share:.0%} {kind}" for kind, share in zip(KINDS, shares, strict=True)]
        rest = max(0.0, 1 - sum(shares))
        return (
            f"{len(self.pids)} processes spent {seconds:.0f} s: {', '.join(parts)}, {rest:.0%} compiling and the rest"
        )


class GpuLock:
    """The lock as one process uses it.

    Args:
        shared: the state shared by all processes.
        index: this process.
        wait_for_idle: returns once the GPU does no other process's work.
        release: waits for this process's work on the GPU and frees the memory that it has cached.
    """

    def __init__(
        self,
        shared: SharedState,
        index: int,
        wait_for_idle: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ):
        self.shared, self.index, self.wait_for_idle, self.release = shared, index, wait_for_idle, release
        self.depth = 0
        with shared.lock:  # no process measures now, so no lock holder misses this process
            shared.pids[index] = os.getpid()

    def leave(self) -> None:
        """This process is not stopped any more."""
        self.shared.pids[self.index] = 0

    @contextlib.contextmanager
    def _spent(self, kind: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.shared.spent[self.index * len(KINDS) + KINDS.index(kind)] += time.monotonic() - start

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._spent("waiting for the lock"):
            self.shared.lock.acquire()
        try:
            yield
        finally:
            self.shared.lock.release()

    @contextlib.contextmanager
    def memory(self, needed: float, for_check: float) -> Iterator[None]:
        """Runs the body once the other processes leave the memory that it needs, or there are none.

        Args:
            needed: bytes that the body may use.
            for_check: additional bytes within :meth:`checking`.
        """
        with self._spent("waiting for memory"), self.shared.beginning:
            while 0 < sum(self.shared.reserved) > self.shared.memory - needed - for_check:
                time.sleep(0.05)
            self.shared.reserved[self.index] = max(needed, 1.0)
        try:
            yield
        finally:
            self.shared.reserved[self.index] = 0.0

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Holds the lock for a check, which takes more memory and device time than anything else; the other processes go on
        running. Without the lock a process that measures would wait for the check with all others stopped."""
        self.release()
        with self._locked(), self._spent("checking"):
            self.depth = 1
            try:
                yield
                self.release()
            finally:
                self.depth = 0

    @contextlib.contextmanager
    def timing(self, *, strict: bool = True) -> Iterator[None]:
        """Holds the lock with the other processes stopped. Reentrant.

        Raises:
            LockHeldTooLong: at the end, if ``strict`` and the others were continued after LONGEST_S.
        """
        if self.depth:
            yield
            return
        self.release()
        with self._locked():
            self.depth = 1
            late = threading.Timer(LONGEST_S, self._signal, (signal.SIGCONT,))
            late.start()
            try:
                self._signal(signal.SIGSTOP)
                with self._spent("waiting for an idle GPU"):
                    self.wait_for_idle()
                start = time.monotonic()
                with self._spent("timing"):
                    yield
                if strict and time.monotonic() - start > LONGEST_S:
                    raise LockHeldTooLong(
                        f"measuring took more than the {LONGEST_S:.0f} s for which other processes are stopped"
                    )
            finally:
                late.cancel()
                self._signal(signal.SIGCONT)
                self.depth = 0

    def _signal(self, number: int) -> None:
        for pid in self.shared.pids:
            if pid and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def wrap_autotuners(self) -> None:
        """Makes the methods of AUTOTUNERS hold the lock."""
        for module, owner, method in AUTOTUNERS:
            with contextlib.suppress(ImportError):
                found = getattr(importlib.import_module(module), owner)
                setattr(found, method, self._with_lock(found.__dict__[method]))

    def _with_lock(self, method: Any) -> Any:
        inner = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method

        @torch.compiler.disable  # called from compiled code it would be traced, and the wait for an idle GPU unrolled
        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.timing(strict=False):
                return inner(*args, **kwargs)

        return type(method)(timed) if isinstance(method, (classmethod, staticmethod)) else timed


class NoLock:
    """The lock of a process that is alone on its device."""

    def memory(self, needed: float, for_check: float) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def checking(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def timing(self, *, strict: bool = True) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def wait_for_idle_gpu(longest_s: float = 20.0) -> None:
    """Returns once copies on the GPU follow each other evenly: other processes' work would run between them. They are queued
    behind a pause, so that a delay of some milliseconds on the host does not look like such work.

    Raises:
        LockHeldTooLong: they do not within ``longest_s``.
    """
    source = torch.empty(PROBE_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(PROBES)]
    for event in events:
        event.record()  # the driver makes it now
    end = time.monotonic() + longest_s
    while True:
        torch.cuda._sleep(PAUSE_CYCLES)
        for event in events:
            event.record()
            target.copy_(source)
        torch.cuda.synchronize()
        gaps = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events[8:]))
        if gaps[-1] < UNEVEN * gaps[len(gaps) // 2]:
            return
        if time.monotonic() > end:
            raise LockHeldTooLong(f"the GPU is busy with other work: copies took {gaps[0]:.3f} to {gaps[-1]:.3f} ms")
