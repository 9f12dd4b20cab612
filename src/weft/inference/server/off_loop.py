"""Work of one request that may take long, such as a chat template: in a thread of its own, with a time limit, so that the event
loop and other requests go on."""

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

SECONDS = 10.0
AT_ONCE = 4  # threads that do such work


class TooLong(Exception):
    """The work took longer than it may."""


class _Ended(BaseException):
    """Raised in a thread whose result nothing waits for any more. No ``except Exception`` in between catches it."""


class OffLoop:
    """Threads for such work; of one event loop.

    Args:
        seconds: that a piece of work may take once it has begun.
    """

    def __init__(self, seconds: float = SECONDS):
        self.seconds, self._room = seconds, asyncio.Semaphore(AT_ONCE)

    async def __call__(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, or raises.

        Work that takes too long, or whose client has left, is ended at its next instruction of Python. A single call into C
        cannot be ended; it delays nothing but its thread where it leaves the interpreter's lock to others.

        Raises:
            TooLong: after ``seconds``.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def give(set_it: Callable[[Any], None], value: Any) -> None:
            if not result.done():
                set_it(value)

        def run() -> None:
            with contextlib.suppress(_Ended, RuntimeError):  # RuntimeError: the loop has ended, and the server with it
                try:
                    value = work()
                except Exception as error:
                    loop.call_soon_threadsafe(give, result.set_exception, error)
                else:
                    loop.call_soon_threadsafe(give, result.set_result, value)

        async with self._room:
            thread = threading.Thread(target=run, name="weft-request", daemon=True)
            thread.start()
            try:
                return await asyncio.wait_for(result, self.seconds)
            except asyncio.TimeoutError:
                raise TooLong(f"{self.seconds:g} s") from None
            finally:
                if result.cancelled() and thread.is_alive():
                    end(thread)


def end(thread: threading.Thread) -> None:
    """Has a thread raise at its next instruction of Python."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Ended))
