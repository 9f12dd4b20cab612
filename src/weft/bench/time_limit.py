"""A limit on how long a peer may take to be ready: compilers and autotuners of others can take minutes, or not end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class TookTooLong(RuntimeError):
    """A peer that was not ready in time."""


@contextlib.contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raises TookTooLong in the body once the seconds are over, again each second should the body suppress it. 0, and outside
    the main thread (which alone meets signals): no limit."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise TookTooLong(f"not ready within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
