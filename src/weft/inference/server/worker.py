"""The engine's side of the server: a loop that steps an engine by the calls that come. It runs in a process of its own
(``python -m weft.inference.server.worker``), so that HTTP and text do not take its interpreter's time. Of several ranks rank 0
has the others make the same calls.
"""

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from threading import Thread
from typing import TYPE_CHECKING, Any

from weft.inference.outputs import Output, Stats
from weft.inference.parameters import SamplingParameters

if TYPE_CHECKING:
    from weft.inference.config import ModelConfig
    from weft.inference.engine import Engine
    from weft.inference.grammar import Grammar
    from weft.inference.parallel import Ranks

Call = tuple[Any, ...] | None  # ("add", id, prompt, parameters, grammar), ("abort", id); None ends the loop
KEY = "serve/link"  # of the ranks' store
RANK_ENDED = "a rank of the server ended or failed, so the server ends"  # what clients of several ranks read
STOPPING = "the server is stopping"


@dataclass(frozen=True)
class Facts:
    """What another process must know of an engine. ``bytes``: of the weights that a step reads; ``token_bytes``: of a token's
    keys and values; dtypes by PyTorch's names."""

    length: int
    config: "ModelConfig"
    tokenizer: Any
    device: str
    dtype: str
    cache_dtype: str
    bytes: int
    token_bytes: int

    @classmethod
    def of(cls, engine: "Engine") -> "Facts":
        from weft.inference.model import Pages

        model = engine.model
        stored = engine.config.cache_dtype or model.dtype
        dtype, cache_dtype = (str(each).removeprefix("torch.") for each in (model.dtype, stored))
        each = Pages.bytes_per_token(model.config, stored)
        return cls(
            engine.length, model.config, engine.tokenizer, model.device.type, dtype, cache_dtype, model.bytes, each
        )


@dataclass
class Report:
    """What a step gave. Of ``outputs`` the reason 'refused' says that a request can never run, 'failed' that the engine's
    failure ended it. ``failure``: why the engine runs nothing any more; ``fault``: what the last step that raised said."""

    outputs: list[Output]
    stats: Stats
    failure: str | None = None
    fault: str = ""


class Worker:
    """Steps an engine by the calls that come.

    Args:
        engine: driven by :meth:`run` alone from now on.
        give: called with a report after each step.
        repeat: called before each step with the calls of the engine since the last one, for ranks that make them too, and with
            None at the end. They cannot follow a step that raises: the engine is given up then.
        calls: where they come.
    """

    FAULTS = 3  # steps that raise, without a token in between, after which the engine is given up

    def __init__(
        self, engine: "Engine", give: Callable[[Report], None], repeat: Callable[[list[Any] | None], None] | None = None,
        calls: "queue.SimpleQueue[Call] | None" = None,
    ):  # fmt: skip
        self.engine, self.give, self.repeat = engine, give, repeat
        self.calls: queue.SimpleQueue[Call] = calls or queue.SimpleQueue()
        self.failure: str | None = None
        self.fault = ""
        self._found: list[Output] = []
        self._made: list[Any] = []  # calls, to be repeated
        self._compiling: set[str] = set()  # requests whose grammar is not there yet
        self._compiler = ThreadPoolExecutor(1)
        self._newest: tuple[str, Grammar] | None = None  # by the schema's text: 1 is not true, and order matters

    def run(self) -> None:
        """Until the call None comes."""
        faults = 0
        while True:
            try:
                if not self._take():
                    break
                if self.failure is None and self.engine.busy():
                    if self.repeat is not None:
                        made, self._made = self._made, []
                        self.repeat(made)
                    found = self.engine.step()
                    self._found += found
                    if any(output.token_ids for output in found):
                        faults = 0
            except Exception as error:  # whatever a step raises ends those in work, and the server goes on
                faults += 1
                self.fault = f"{type(error).__name__}: {error}"
                ranks = self.repeat is not None
                self._fail(RANK_ENDED if ranks else self.fault, ranks or faults >= self.FAULTS)
            self._report()
        self._fail(STOPPING, for_good=True)
        self._report()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        if self.repeat is not None:
            self.repeat(None)

    def _take(self) -> bool:
        """Makes the calls that came; waits for one where the engine has nothing to do. False at the end."""
        waits = not self.engine.busy() or self.failure is not None
        while True:
            try:
                call = self.calls.get(block=waits)
            except queue.Empty:
                return True
            if call is None:
                return False
            waits = False
            if call[0] == "add":
                self._add(*call[1:])
            else:
                self._abort(call[1])

    def _add(self, name: str, prompt: list[int], parameters: SamplingParameters, grammar: Any = None) -> None:
        if self.failure:
            self._found.append(Output(name, finish_reason="failed", error=self.failure))
            return
        if grammar is None and parameters.json_schema is not None:  # takes long, so the engine's steps go on
            self._compiling.add(name)
            self._compiler.submit(self._compile, name, prompt, parameters)
            return
        if name in self._compiling:
            self._compiling.remove(name)
        try:
            if isinstance(grammar, Exception):
                raise grammar
            self.engine.add(name, prompt, parameters, grammar, text=False)
        except ValueError as error:
            self._found.append(Output(name, finish_reason="refused", error=str(error)))
        except Exception as error:  # whatever it is, it belongs to this request alone
            self._found.append(Output(name, finish_reason="failed", error=f"{type(error).__name__}: {error}"))
        else:
            if self.repeat is not None:
                self._made.append(["add", name, prompt, vars(parameters)])

    def _abort(self, name: str) -> None:
        self._compiling.discard(name)
        self.engine.abort(name)
        if self.repeat is not None:
            self._made.append(["abort", name])

    def _compile(self, name: str, prompt: list[int], parameters: SamplingParameters) -> None:
        """In a thread of its own: adds the request once more, with its grammar or what is wrong with it."""
        from weft.inference.grammar import Grammar

        schema = parameters.json_schema or {}
        if name not in self._compiling:  # its client has left
            return
        try:
            written = json.dumps(schema)
            if self._newest is None or self._newest[0] != written:
                self._newest = (written, Grammar.of(self.engine.tokenizer, self.engine.model.config, schema))
            made: Any = self._newest[1].copy()
        except Exception as error:
            made = error
        if name in self._compiling:
            self.calls.put(("add", name, prompt, parameters, made))

    def _fail(self, why: str, for_good: bool) -> None:
        if for_good:
            self.failure = why
        for name in [*self.engine.requests, *self._compiling]:
            self._found.append(Output(name, finish_reason="failed", error=why))
            try:
                self.engine.abort(name)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
        self._compiling.clear()

    def _report(self) -> None:
        found, self._found = self._found, []
        self.give(Report(found, replace(self.engine.stats), self.failure, self.fault))


class InThread:
    """An engine in a thread of this process: for measurements and tests."""

    def __init__(self, engine: "Engine"):
        self.engine, self.facts = engine, Facts.of(engine)

    def start(self, driver: Any) -> None:
        """Gives the driver reports from now on."""
        self._worker = Worker(self.engine, driver.report)
        self._thread = Thread(target=self._worker.run, name="weft-engine", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        self._worker.calls.put(call)

    def stop(self, seconds: float) -> None:
        """Ends the thread after its step."""
        self.put(None)
        self._thread.join(timeout=seconds)


# ---- a process ---------------------------------------------------------------------------------------------------------


def packed(report: Report) -> tuple[Any, ...]:
    """A report as it is sent: most outputs are a token and nothing else, and flat lists are fast to write and read."""
    names: list[str | None] = []  # None for the next one of ``others``
    tokens, others = [], []
    for o in report.outputs:
        if o.finish_reason is None and not o.logprobs and len(o.token_ids) == 1:
            names.append(o.request_id)
            tokens.append(o.token_ids[0])
        else:
            names.append(None)
            tokens.append(0)
            others.append(o)
    return names, tokens, others, report.stats, report.failure, report.fault


def unpacked(sent: tuple[Any, ...]) -> Report:
    names, tokens, others, stats, failure, fault = sent
    rest = iter(others)
    found = [next(rest) if name is None else Output(name, (token,)) for name, token in zip(names, tokens, strict=True)]
    return Report(found, stats, failure, fault)


def work(arguments: dict[str, Any], link: Connection | None) -> None:
    """Loads a model and makes the calls that come until the last one: the server's by ``link``, on other ranks rank 0's. An
    error that keeps the model from being loaded is sent.

    Args:
        arguments: of :class:`weft.LLM`.
    """
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    loads = True

    def receive(link: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):  # the server has ended
            while (call := link.recv()) is not None:
                calls.put(call)
        if loads:
            os._exit(1)
        calls.put(None)

    if link is not None:
        Thread(target=receive, args=(link,), name="weft-calls", daemon=True).start()
    try:
        from weft.inference.llm import LLM

        llm = LLM(**arguments)
        llm.engine.warm()
        ranks = llm.engine.exchange
        followers = None if ranks is None or ranks.rank else Followers(ranks)
    except Exception as error:
        if link is None:
            raise
        if hasattr(error, "add_note"):
            error.add_note(traceback.format_exc())
        link.send(error)
        sys.exit(1)
    if link is None:
        if ranks is None:
            raise ValueError("argument 'link' is None in a process alone; expected one to the server")
        follow(llm.engine, ranks)
        return
    sends = link
    loads = False
    with contextlib.suppress(BrokenPipeError):
        sends.send(Facts.of(llm.engine))
        repeat = None if followers is None else followers.repeat
        Worker(llm.engine, lambda report: sends.send(packed(report)), repeat, calls).run()


class Followers:
    """Rank 0's links to the others, which make its calls."""

    def __init__(self, ranks: "Ranks"):
        key, host = secrets.token_bytes(32), os.environ.get("MASTER_ADDR", "127.0.0.1")
        with Listener((host, 0), backlog=ranks.ranks, authkey=key) as listener:
            address: Any = listener.address
            ranks.store.set(KEY, json.dumps([address[0], address[1], key.hex()]))
            self.links = [listener.accept() for _ in range(1, ranks.ranks)]
        for link in self.links:  # small messages do not wait for the receipt of earlier ones
            with socket.socket(fileno=os.dup(link.fileno())) as same:
                same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def repeat(self, calls: list[Any] | None) -> None:
        """Has the other ranks make the same calls of their engines, and then a step; None ends them."""
        message = json.dumps(calls).encode()
        for link in self.links:
            with contextlib.suppress(OSError) if calls is None else contextlib.nullcontext():
                link.send_bytes(message)


def follow(engine: "Engine", ranks: "Ranks") -> None:
    """Makes the calls that rank 0 sends until it sends its last one.

    Raises:
        ConnectionError: rank 0 ended without one.
    """
    _leave_signals()
    ranks.store.wait([KEY])
    host, port, key = json.loads(ranks.store.get(KEY))
    with Client((host, port), authkey=bytes.fromhex(key)) as link:
        while True:
            try:
                calls = json.loads(link.recv_bytes())
            except EOFError:
                raise ConnectionError("rank 0 of the server has ended") from None
            if calls is None:
                return
            for call, name, *more in calls:
                if call == "add":
                    prompt, parameters = more
                    if biases := parameters["logit_bias"]:  # whose keys JSON made texts
                        parameters["logit_bias"] = {int(token): value for token, value in biases.items()}
                    engine.add(name, prompt, SamplingParameters(**parameters), text=False)
                else:
                    engine.abort(name)
            engine.step()


def _leave_signals() -> None:
    """The server says when its other processes end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """``worker LINK ARGUMENTS``: the number of an open connection, -1 for none, and JSON."""
    from weft.comm.worker import end_with_parent

    _leave_signals()
    end_with_parent(signal.SIGKILL)
    number = int(sys.argv[1])
    work(json.loads(sys.argv[2]), None if number < 0 else Connection(number))


if __name__ == "__main__":  # under its own name, by which the other process knows what it is sent
    from weft.inference.server import worker

    worker.main()
