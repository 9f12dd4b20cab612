"""``Driver``: one thread steps the engine; requests come from an event loop and get their outputs there."""

import asyncio
import contextlib
import itertools
import queue
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from weft.inference.engine import Engine, Output, Stats
from weft.inference.parameters import SamplingParameters

RANK_ENDED = "a rank of the server ended or failed, so the server ends"  # what clients of several ranks read
SWITCH_S = 2e-4  # how long the engine waits for a busy event loop when it comes back from the device; Python has 5e-3


class Overloaded(Exception):
    """More requests than the server takes at once."""


class Failed(Exception):
    """The engine can run nothing any more, after a fault of the device say."""


class Request:
    """A request as the event loop sees it: its outputs, or the exception that ended it, in the order in which they came."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop):
        self.id, self.loop = name, loop
        self._came: deque[Output | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, what: Output | Exception) -> None:
        """In the event loop."""
        self._came.append(what)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Output | Exception:
        """The next output; those that came meanwhile are joined to it, so that a busy loop has fewer of them to send."""
        while not self._came:
            self._waiter = self.loop.create_future()
            await self._waiter
        found = self._came.popleft()
        while isinstance(found, Output) and self._came:
            after = self._came[0]
            if not isinstance(after, Output) or after.error is not None:
                break
            found = Output(
                found.request_id, found.token_ids + after.token_ids, found.text + after.text, found.logprobs + after.logprobs,
                after.finish_reason, None, after.prompt_tokens,
            )  # fmt: skip
            self._came.popleft()
        return found


class Driver:
    """Runs an engine for many clients.

    Args:
        engine: driven by this thread alone from now on.
        most_requests: that are in the engine at once, running or waiting; ``Overloaded`` beyond.
        repeat: called before each step with the calls of the engine since the last one, for ranks that make them too;
            ``["add", id, prompt, parameters]`` or ``["abort", id]``, and with None at the end. They cannot follow a step that
            raises: the engine is given up then.
    """

    FAULTS = 3  # steps in a row that raise, after which the engine is given up

    def __init__(
        self, engine: Engine, most_requests: int = 1024,
        repeat: Callable[[list[list[Any]] | None], None] | None = None,
    ):  # fmt: skip
        self.engine, self.most_requests, self.repeat = engine, most_requests, repeat
        self.failure: str | None = None
        self.fault = ""  # what the last step that raised said
        self.stats: Stats = engine.stats
        self._live: dict[str, Request] = {}  # of the thread
        self._calls: list[list[Any]] = []  # to be repeated
        self._count = 0  # of the event loop: what was sent and has not ended
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ids = itertools.count()
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
        self._thread.start()

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return self._count

    async def outputs(
        self, prompt: list[int], parameters: SamplingParameters, grammar: Any = None
    ) -> AsyncGenerator[Output, None]:
        """The outputs of one request. Closing the iterator, or cancelling who waits for it, ends the request.
        ``grammar``: of its JSON schema, where that was made already.

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
        self._commands.put(lambda: self._add(request, prompt, parameters, grammar))
        try:
            while not ended:
                output = await request.get()
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

    def lose(self) -> None:
        """Gives the engine up from outside of the thread, whose step may never end; requests end with an error."""
        self.failure = RANK_ENDED
        self._give([(request, Failed(RANK_ENDED)) for request in list(self._live.values())])

    # ---- in the thread -------------------------------------------------------------------------------------------

    def _add(self, request: Request, prompt: list[int], parameters: SamplingParameters, grammar: Any) -> None:
        if self.failure:
            self._give([(request, Failed(self.failure))])
            return
        try:
            self.engine.add(request.id, prompt, parameters, grammar)
        except ValueError as error:
            self._give([(request, error)])
        except Exception as error:  # whatever it is, it belongs to this request alone
            self._give([(request, Failed(f"{type(error).__name__}: {error}"))])
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
                    self._give([found for output in self.engine.step() if (found := self._addressed(output))])
                    faults = 0
            except Exception as error:  # whatever a step raises ends those in work, and the server goes on
                faults += 1
                self.fault = f"{type(error).__name__}: {error}"
                ranks = self.repeat is not None
                self._fail(RANK_ENDED if ranks else self.fault, ranks or faults >= self.FAULTS)
            self.stats = replace(self.engine.stats)
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

    def _addressed(self, output: Output) -> tuple[Request, Output | Exception] | None:
        """An output with its request; None for one that has gone."""
        request = self._live.get(output.request_id)
        if request is None:
            return None
        if output.finish_reason is not None:
            del self._live[output.request_id]
        return request, output

    @staticmethod
    def _give(found: list[tuple[Request, Output | Exception]]) -> None:
        """Sends outputs to their event loops: one call of each loop, since a call wakes it."""
        loops = {request.loop for request, _ in found}
        for loop in loops:
            mine = found if len(loops) == 1 else [each for each in found if each[0].loop is loop]
            with contextlib.suppress(RuntimeError):  # the loop has ended, and who waited with it
                loop.call_soon_threadsafe(_put, mine)

    def _fail(self, why: str, for_good: bool) -> None:
        live, self._live = self._live, {}
        if for_good:
            self.failure = why
        self._give([(request, Failed(why)) for request in live.values()])
        for name in live:
            try:
                self.engine.abort(name)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"


def _put(found: list[tuple[Request, Output | Exception]]) -> None:
    for request, what in found:
        request.put(what)
