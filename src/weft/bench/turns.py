"""Processes that share one device and take turns to time: while one measures, the others are stopped.

Whoever has the turn stops the others' processes (SIGSTOP), waits until the device has finished what they had queued, and lets
them go on afterwards. What libraries time for themselves, to choose among their kernels, takes its turn too: a peer that chose
badly because of its neighbours would be a weak peer.
"""

from __future__ import annotations

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

# whoever chooses a kernel by timing candidates: module, class, method
AUTOTUNERS = (
    ("weft.operators.peers", "Compiled", "seconds"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", "benchmark_all_configs"),
    ("torch._inductor.select_algorithm", "AlgorithmSelectorCache", "benchmark_choices"),
    ("quack.autotuner", "Autotuner", "_bench"),
)
LONGEST_S = 60.0  # of a turn: a stopped process may hold a lock that this one waits for
PROBES, PROBE_BYTES, UNEVEN = 400, 2**26, 1.5
PAUSE_CYCLES = 20_000_000  # about 11 ms, in which 400 copies are queued


class TurnTooLong(RuntimeError):
    """A measurement during which the other processes had to be let go."""


KINDS = ("waiting for memory", "waiting for a turn", "waiting for a quiet device", "checking", "timing")


class Shared:
    """What processes that take turns share; made by the one that starts them.

    Args:
        context: of :mod:`multiprocessing`.
        processes: how many.
        memory: bytes that they may use together.

    Attributes:
        spent: seconds that each process spent in each of KINDS; what is left of its time it compiled, mostly.
    """

    def __init__(self, context: Any, processes: int, memory: float = float("inf")):
        self.turn, self.beginning = context.Lock(), context.Lock()
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


class Turns:
    """One process's share in the turns of several.

    Args:
        shared: with the others.
        index: of this process.
        quiet: waits until the device has nothing to do but this process's work.
        release: waits until the device has done this process's work, and gives memory back that it has cached.
    """

    def __init__(
        self,
        shared: Shared,
        index: int,
        quiet: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ):
        self.shared, self.index, self.quiet, self.release = shared, index, quiet, release
        self.depth = 0
        with shared.turn:  # nobody measures meanwhile, so nobody's turn misses this process
            shared.pids[index] = os.getpid()

    def leave(self) -> None:
        """Takes no more turns."""
        self.shared.pids[self.index] = 0

    @contextlib.contextmanager
    def _spent(self, kind: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.shared.spent[self.index * len(KINDS) + KINDS.index(kind)] += time.monotonic() - start

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._spent("waiting for a turn"):
            self.shared.turn.acquire()
        try:
            yield
        finally:
            self.shared.turn.release()

    @contextlib.contextmanager
    def memory(self, needed: float, for_check: float) -> Iterator[None]:
        """Begins the body once the memory that it may come to use is left by the others, or there are no others.

        Args:
            needed: bytes that it may use.
            for_check: bytes more, within :meth:`checking`.
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
        """The turn of one that checks, which takes more memory than anything else and long on the device: while it lasts nobody
        measures, or the others would stand still until the device is done with it. It stops nobody."""
        self.release()
        with self._turn(), self._spent("checking"):
            self.depth = 1
            try:
                yield
                self.release()
            finally:
                self.depth = 0

    @contextlib.contextmanager
    def timing(self, *, strict: bool = True) -> Iterator[None]:
        """The turn, for as long as the body lasts. A turn within a turn is the same one.

        Raises:
            TurnTooLong: at the end, if ``strict`` and the others had to be let go after LONGEST_S.
        """
        if self.depth:
            yield
            return
        self.release()
        with self._turn():
            self.depth = 1
            late = threading.Timer(LONGEST_S, self._signal, (signal.SIGCONT,))
            late.start()
            try:
                self._signal(signal.SIGSTOP)
                with self._spent("waiting for a quiet device"):
                    self.quiet()
                start = time.monotonic()
                with self._spent("timing"):
                    yield
                if strict and time.monotonic() - start > LONGEST_S:
                    raise TurnTooLong(
                        f"measuring took more than the {LONGEST_S:.0f} s that other processes are stopped"
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

    def for_autotuners(self) -> None:
        """Lets what the libraries of AUTOTUNERS time take its turn."""
        for module, owner, method in AUTOTUNERS:
            with contextlib.suppress(ImportError):
                found = getattr(importlib.import_module(module), owner)
                setattr(found, method, self._in_turn(found.__dict__[method]))

    def _in_turn(self, method: Any) -> Any:
        inner = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method

        @torch.compiler.disable  # called from compiled code, it would be traced, the wait for a quiet device unrolled
        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.timing(strict=False):
                return inner(*args, **kwargs)

        return type(method)(timed) if isinstance(method, (classmethod, staticmethod)) else timed


class Alone:
    """The turns of a process that is alone on its device."""

    def memory(self, needed: float, for_check: float) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def checking(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def timing(self, *, strict: bool = True) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def device_is_quiet(longest_s: float = 20.0) -> None:
    """Returns once copies on the GPU follow each other evenly: other processes' work would be done between them. They are
    queued behind a pause, so that a host which is held up for some milliseconds does not look like such work.

    Raises:
        TurnTooLong: they do not within ``longest_s``.
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
            raise TurnTooLong(f"the GPU works for others: copies took {gaps[0]:.3f} to {gaps[-1]:.3f} ms")
