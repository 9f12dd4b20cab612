"""``Driver``: one thread steps the engine; requests come from an event loop and get their outputs there."""

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from weft.inference.engine import Engine, Output, Stats
from weft.inference.parameters import SamplingParameters


class Overloaded(Exception):
    """More requests than the server takes at once."""


class Failed(Exception):
    """The engine can run nothing any more, after a fault of the device say."""


@dataclass
class Request:
    """A request as the event loop sees it. ``outputs`` gets its outputs, or the exception that refused it."""

    id: str
    loop: asyncio.AbstractEventLoop
    outputs: "asyncio.Queue[Output | Exception]" = field(default_factory=asyncio.Queue)

    def give(self, what: Output | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and who waited with it
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, what)


class Driver:
    """Runs an engine for many clients.

    Args:
        engine: driven by this thread alone from now on.
        most_requests: that are in the engine at once, running or waiting; ``Overloaded`` beyond.
        observe: called in the thread with the stats after each step.
        repeat: called before each step with the calls of the engine since the last one, for ranks that make them too;
            ``["add", id, prompt, parameters]`` or ``["abort", id]``, and with None at the end. They cannot follow a step that
            raises: the engine is given up then.
    """

    FAULTS = 3  # steps in a row that raise, after which the engine is given up

    def __init__(
        self, engine: Engine, most_requests: int = 1024, observe: Callable[[Stats], None] | None = None,
        repeat: Callable[[list[list[Any]] | None], None] | None = None,
    ):  # fmt: skip
        self.engine, self.most_requests, self.observe, self.repeat = engine, most_requests, observe, repeat
        self.failure: str | None = None
        self.stats: Stats = engine.stats
        self._live: dict[str, Request] = {}  # of the thread
        self._calls: list[list[Any]] = []  # to be repeated
        self._count = 0  # of the event loop: what was sent and has not ended
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
        self._thread.start()

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return self._count

    async def outputs(self, prompt: list[int], parameters: SamplingParameters) -> AsyncGenerator[Output, None]:
        """The outputs of one request. Closing the iterator, or cancelling who waits for it, ends the request.

        Raises:
            Overloaded, Failed: at the first step.
            ValueError: what can never run.
        """
        if self.failure:
            raise Failed(self.failure)
        if self._count >= self.most_requests:
            raise Overloaded(f"{self._count} requests are in work or wait; this server takes {self.most_requests}")
        request = Request(f"request-{next(self._ids)}", asyncio.get_running_loop())
        self._count += 1
        ended = False
        self._commands.put(lambda: self._add(request, prompt, parameters))
        try:
            while not ended:
                output = await request.outputs.get()
                if isinstance(output, Exception):
                    ended = True
                    raise output
                ended = output.finish_reason is not None
                yield output
        finally:
            self._count -= 1
            if not ended:
                self._commands.put(lambda: self._abort(request.id))

    def stop(self) -> None:
        """Ends the thread after its step; requests that are left end with an error."""
        self._commands.put(None)
        self._thread.join(timeout=1 if self.failure else 30)

    def lose(self, why: str) -> None:
        """Gives the engine up from outside of the thread, whose step may never end; requests end with an error."""
        self.failure = why
        for request in list(self._live.values()):
            request.give(Failed(why))

    # ---- in the thread -------------------------------------------------------------------------------------------

    def _add(self, request: Request, prompt: list[int], parameters: SamplingParameters) -> None:
        if self.failure:
            request.give(Failed(self.failure))
            return
        try:
            self.engine.add(request.id, prompt, parameters)
        except ValueError as error:
            request.give(error)
        except Exception as error:  # whatever it is, it belongs to this request alone
            request.give(Failed(f"{type(error).__name__}: {error}"))
        else:
            self._live[request.id] = request
            if self.repeat is not None:
                self._calls.append(["add", request.id, prompt, vars(parameters)])

    def _abort(self, name: str) -> None:
        self._live.pop(name, None)
        self.engine.abort(name)
        if self.repeat is not None:
            self._calls.append(["abort", name])

    def _run(self) -> None:
        faults = 0
        while True:
            try:
                if not self._take():
                    break
                if self.failure is None and self.engine.busy():
                    if self.repeat is not None:
                        calls, self._calls = self._calls, []
                        self.repeat(calls)
                    for output in self.engine.step():
                        self._give(output)
                    faults = 0
            except Exception as error:  # whatever a step raises ends those in work, and the server goes on
                faults += 1
                for_good = faults >= self.FAULTS or self.repeat is not None
                self._fail(f"{type(error).__name__}: {error}", for_good)
            self.stats = replace(self.engine.stats)
            if self.observe is not None:
                self.observe(self.stats)
        self._fail("the server is stopping", for_good=True)
        if self.repeat is not None:
            self.repeat(None)

    def _take(self) -> bool:
        """Runs what the event loop sent; waits for something where the engine has nothing to do. False at the end."""
        waits = not self.engine.busy() or self.failure is not None
        while True:
            try:
                command = self._commands.get(block=waits)
            except queue.Empty:
                return True
            if command is None:
                return False
            waits = False
            command()

    def _give(self, output: Output) -> None:
        request = self._live.get(output.request_id)
        if request is None:
            return
        if output.finish_reason is not None:
            del self._live[output.request_id]
        request.give(output)

    def _fail(self, why: str, for_good: bool) -> None:
        live, self._live = self._live, {}
        if for_good:
            self.failure = why
        for name, request in live.items():
            request.give(Failed(why))
            try:
                self.engine.abort(name)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
