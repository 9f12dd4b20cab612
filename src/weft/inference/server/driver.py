"""``Driver``: requests come from an event loop, go to an engine in another process or thread, and get their outputs there."""

import asyncio
import contextlib
import itertools
import sys
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from weft.inference.outputs import Output, Stats
from weft.inference.parameters import SamplingParameters
from weft.inference.server.team import EngineProcess
from weft.inference.server.worker import STOPPING, InThread, Report
from weft.inference.tokenizer import TextStream

if TYPE_CHECKING:
    from weft.inference.engine import Engine

SWITCH_S = 2e-4  # how long a thread that has outputs waits for a busy event loop; Python has 5e-3


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
        engine: in another process, or of this one, where it gets a thread.
        most_requests: that are in the engine at once, running or waiting; ``Overloaded`` beyond.
    """

    def __init__(self, engine: "EngineProcess | Engine", most_requests: int = 1024):
        self.engine = engine if isinstance(engine, EngineProcess) else InThread(engine)
        self.facts = self.engine.facts
        self.most_requests = most_requests
        self.failure: str | None = None
        self.fault = ""  # what the last step that raised said
        self.stats = Stats()
        self._live: dict[str, Request] = {}
        self._ids = itertools.count()
        sys.setswitchinterval(SWITCH_S)
        self.engine.start(self)

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

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
        if self.live >= self.most_requests:
            raise Overloaded(f"{self.live} requests are in work or wait; this server takes {self.most_requests}")
        request = Request(f"request-{next(self._ids)}", asyncio.get_running_loop())
        text = None if self.facts.tokenizer is None else self.facts.tokenizer.stream(parameters.stop)
        ends = {*parameters.stop_token_ids, *(() if parameters.ignore_eos else self.facts.config.eos)}
        self._live[request.id] = request
        ended = False
        try:
            self.engine.put(("add", request.id, prompt, parameters, grammar))
            if self.failure:  # since it was looked at
                raise Failed(self.failure)
            while True:
                output = await request.get()
                if isinstance(output, Exception):
                    ended = True
                    raise output
                ended, output.prompt_tokens = output.finish_reason is not None, len(prompt)
                if text is not None:
                    write(output, text, ends)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._live[request.id]
            if not ended:
                self.engine.put(("abort", request.id))

    def stop(self) -> None:
        """Ends the engine after its step; requests that are left end with an error."""
        self.engine.stop(1 if self.failure else 30)
        self.failure = self.failure or STOPPING

    def lose(self, why: str) -> None:
        """Gives the engine up, whose step may never end; requests end with an error. From any thread."""
        self.report(Report([], self.stats, why, self.fault))

    def report(self, report: Report) -> None:
        """Takes what a step gave, in the thread in which that comes."""
        self.stats, self.fault = report.stats, report.fault
        found: list[tuple[Request, Output | Exception]] = []
        for output in report.outputs:
            request = self._live.get(output.request_id)
            if request is None:  # its client has left
                continue
            if output.finish_reason == "refused":
                found.append((request, ValueError(output.error)))
            elif output.finish_reason == "failed":
                found.append((request, Failed(output.error)))
            else:
                found.append((request, output))
        if report.failure and not self.failure:
            self.failure = report.failure
            found += [(request, Failed(report.failure)) for request in list(self._live.values())]
        self._give(found)

    @staticmethod
    def _give(found: list[tuple[Request, Output | Exception]]) -> None:
        """Sends outputs to their event loops: one call of each loop, since a call wakes it."""
        loops = {request.loop for request, _ in found}
        for loop in loops:
            mine = found if len(loops) == 1 else [each for each in found if each[0].loop is loop]
            with contextlib.suppress(RuntimeError):  # the loop has ended, and who waited with it
                loop.call_soon_threadsafe(_put, mine)


def _put(found: list[tuple[Request, Output | Exception]]) -> None:
    for request, what in found:
        request.put(what)


def write(output: Output, text: TextStream, ends: set[int]) -> None:
    """Gives an output the text of its tokens, but for those that end a request. A stop text ends it ahead of the engine."""
    for i, token in enumerate(output.token_ids, 1):
        if token not in ends:
            output.text += text.add(token)
            if text.stopped:
                output.token_ids, output.logprobs = output.token_ids[:i], output.logprobs[:i]
                output.finish_reason = "stop"
                break
    if output.finish_reason is not None:
        output.text += text.finish()
