"""A limit on how long a peer may take to be ready: compilers and autotuners can take minutes, or never end."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class TimeLimitExceeded(RuntimeError):
    """A peer that was not ready in time."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitExceeded in the body after ``seconds``, and again each second if the body suppresses it.

    No limit if ``seconds`` is 0, and outside the main thread, which alone receives signals.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise TimeLimitExceeded(f"not ready within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
