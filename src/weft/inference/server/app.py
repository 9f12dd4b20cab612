"""The HTTP application: OpenAI's completions, chat completions and models; health and metrics."""

import asyncio
import codecs
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from weft.inference.grammar import Grammar
from weft.inference.outputs import Output, TokenLogprobs
from weft.inference.parameters import SamplingParameters
from weft.inference.server.driver import Driver, Failed, Overloaded
from weft.inference.server.limits import Guard, encoded, problem
from weft.inference.server.metrics import Metrics
from weft.inference.server.off_loop import SECONDS, OffLoop, TooLong
from weft.inference.server.protocol import (
    BadRequest,
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from weft.inference.tokenizer import Tokenizer


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


class Unanswered(Exception):
    """This request ended with an error; the server answers others."""


@dataclass
class Choice:
    """One generation of a request, as it goes on."""

    prompt: list[int]
    parameters: SamplingParameters
    grammar: Grammar | None = None
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: int = 0
    reason: str | None = None
    offset: int = 0  # characters of the tokens whose text_offset was given
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


ADDRESSES = "/v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /health and /metrics"


def make_app(
    driver: Driver, tokenizer: Tokenizer, model: str, *, key: str | None = None, most_bytes: int = 4 << 20,
    seconds: float = SECONDS,
) -> Any:  # fmt: skip
    """The ASGI application.

    Args:
        driver: of the engine; stopped with the application.
        tokenizer: the model's.
        model: its name, as clients ask for it.
        key: API key that clients must send; None for none.
        most_bytes: of a request's body.
        seconds: that a chat template, tokenizer or JSON schema may take with a request.
    """
    off_loop = OffLoop(seconds)
    metrics = Metrics(driver, model)
    begun = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(driver.stop)

    app = FastAPI(title="weft serve", lifespan=lifespan, default_response_class=Json, docs_url=None, redoc_url=None)

    # ---- errors, in OpenAI's form ----------------------------------------------------------------------------------

    @app.exception_handler(BadRequest)
    async def bad_request(_: Request, error: BadRequest) -> Json:
        return Json(problem(str(error), "invalid_request_error", error.code, error.argument), error.status)

    @app.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> Json:
        first = error.errors()[0]
        kind = request.headers.get("content-type", "")
        if first["loc"] == ("body",) and "json" not in kind.lower():  # curl -d sends a form's
            message = f"the header Content-Type is {kind[:80]!r}; expected 'application/json'"
            return Json(problem(message, "invalid_request_error"), 400)
        if first["type"] == "json_invalid" or first["loc"] == ("body",):
            why = first.get("ctx", {}).get("error", first["msg"])
            return Json(problem(f"the body is no JSON object: {why}"[:500], "invalid_request_error"), 400)
        where = ".".join(str(p) for p in first["loc"] if p != "body")
        return Json(
            problem(f"argument '{where}': {first['msg']}"[:500], "invalid_request_error", None, where or None), 400
        )

    @app.exception_handler(Overloaded)
    async def overloaded(_: Request, error: Overloaded) -> Json:
        return Json(problem(str(error), "rate_limit_error", "overloaded"), 429, headers={"retry-after": "1"})

    @app.exception_handler(Failed)
    async def failed(_: Request, error: Failed) -> Json:
        return Json(unfinished(error), 503)

    @app.exception_handler(Unanswered)
    async def unanswered(_: Request, error: Unanswered) -> Json:
        return Json(unfinished(error), 500)

    @app.exception_handler(TooLong)
    async def too_long(_: Request, error: TooLong) -> Json:
        message = f"the chat template, the tokenizer or the JSON schema took longer than {error}; expected less to do"
        return Json(problem(message, "invalid_request_error", "too_long"), 400)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Json:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path[:100]} here; this server generates text, under {ADDRESSES}"
        return Json(problem(message, "invalid_request_error"), error.status_code, headers=error.headers)

    # ---- what is asked for -----------------------------------------------------------------------------------------

    @app.get("/health")
    async def health() -> Response:
        if driver.failure:
            raise Failed(driver.failure)
        return Json({"status": "ok"})

    @app.get("/metrics")
    async def metrics_page() -> Response:
        page, kind = metrics.text()
        return Response(page, media_type=kind)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(name)
        return _model()

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check_model(body.model)
        body.check()
        choices = await off_loop(lambda: _choices(body, body.prompts(tokenizer, driver.facts.length)))
        return await _answer(body, choices, request, Text("cmpl-", "text_completion", model, tokenizer))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        _check_model(body.model)
        body.check()
        choices = await off_loop(
            lambda: _choices(body, [body.prompt_tokens(tokenizer, bool(body.add_special_tokens), driver.facts.length)])
        )
        return await _answer(body, choices, request, Chat("chatcmpl-", "chat.completion", model, tokenizer))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        _check_model(body.model)
        tokens = await off_loop(lambda: body.tokens(tokenizer, driver.facts.length))
        names = [tokenizer.token_text(t) for t in tokens] if body.return_token_strs else None
        length = driver.facts.length
        return Json({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": names})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        _check_model(body.model)
        return Json({"prompt": await off_loop(lambda: body.text(tokenizer, driver.facts.config.vocab_size))})

    def _choices(body: Any, prompts: list[list[int]]) -> list[Choice]:
        """Of each prompt ``n``; those of one schema share what is made of it."""
        if (count := len(prompts) * body.choices) > driver.most_requests:
            name = "prompt" if body.choices == 1 else "n"
            raise BadRequest(
                f"argument '{name}': {len(prompts)} prompts with n = {body.choices} are {count} requests; "
                f"expected at most {driver.most_requests}, this server's limit"
            )
        choices = [Choice(prompt, body.parameters(i)) for prompt in prompts for i in range(body.choices)]
        name, most = body.limit
        longest = max(map(len, prompts))
        if most is not None and most > (room := driver.facts.length - longest) > 0:
            raise BadRequest(
                f"argument '{name}' is {most} behind a prompt of {longest} tokens; expected at most {room}, what model and "
                "cache leave"
            )
        if (schema := choices[0].parameters.json_schema) is not None:
            try:
                made = Grammar.of(tokenizer, driver.facts.config, schema)
            except (ValueError, ModuleNotFoundError) as error:
                why = str(error).replace("argument 'json_schema'", f"argument '{body.schema_argument}'")
                raise BadRequest(why, body.schema_argument) from None
            for choice in choices:
                choice.grammar = made.copy()
        return choices

    def _model() -> dict[str, Any]:
        return {
            "id": model,
            "object": "model",
            "created": begun,
            "owned_by": "weft",
            "max_model_len": driver.facts.length,
        }

    def _check_model(name: str | None) -> None:
        if name not in (None, "", model):
            raise BadRequest(
                f"the model {name!r:.100} is not served here; expected {model!r}", "model", 404, "model_not_found"
            )

    # ---- generation ------------------------------------------------------------------------------------------------

    async def _answer(body: Common, choices: list[Choice], request: Request, form: "Text") -> Response:
        outputs = _merged(choices)
        if body.stream:
            try:
                first = await _unless_gone(anext(outputs), request)  # what cannot run is an error, not a broken stream
            except BaseException:
                await outputs.aclose()
                raise
            if first is None:
                await outputs.aclose()
                return Response(status_code=499)
            return StreamingResponse(_events(body, choices, outputs, first, form), media_type="text/event-stream")

        async def all_of_them() -> bool:
            async for _ in outputs:
                pass
            return True

        async with aclosing(outputs):
            if await _unless_gone(all_of_them(), request) is None:
                return Response(status_code=499)  # the client has gone; its generation has ended
        return Json(form.whole(choices))

    async def _events(
        body: Common, choices: list[Choice], outputs: Any, first: Any, form: "Text"
    ) -> AsyncIterator[bytes]:
        async with aclosing(outputs):
            try:
                for index in range(len(choices)):
                    for event in form.opening(index):
                        yield _event(event)
                item = first
                while item is not None:
                    index, output = item
                    if output.text or output.logprobs or output.finish_reason:
                        yield form.event(index, choices, output, body.counts_in_chunks)
                    item = await anext(outputs, None)
                if body.counts_in_stream:
                    yield _event({**form.head(".chunk"), "choices": [], "usage": usage(choices)})
            except (Failed, Unanswered, ValueError, RuntimeError) as error:
                yield _event(unfinished(error))
            yield b"data: [DONE]\n\n"

    async def _merged(choices: list[Choice]) -> AsyncGenerator[tuple[int, Output], None]:
        """Outputs of all choices as they come, noted in the choices and the metrics."""
        if len(choices) > driver.most_requests - driver.live:
            raise Overloaded(f"{driver.live} requests are in work or wait; this server takes {driver.most_requests}")
        if len(choices) == 1:
            async with aclosing(_noted(choices[0])) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        together: asyncio.Queue[tuple[int, Output | BaseException]] = asyncio.Queue()

        async def one(index: int, choice: Choice) -> None:
            try:
                async with aclosing(_noted(choice)) as outputs:
                    async for output in outputs:
                        together.put_nowait((index, output))
            except Exception as error:
                together.put_nowait((index, error))

        tasks = [asyncio.create_task(one(i, c)) for i, c in enumerate(choices)]
        try:
            while any(c.reason is None for c in choices) or not together.empty():
                index, found = await together.get()
                if isinstance(found, BaseException):
                    raise found
                yield index, found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _noted(choice: Choice) -> AsyncGenerator[Output, None]:
        """Outputs of a choice, noted in it and in the metrics."""
        begin = last = time.perf_counter()
        try:
            async with aclosing(driver.outputs(choice.prompt, choice.parameters, choice.grammar)) as outputs:
                async for output in outputs:
                    now = time.perf_counter()
                    if output.token_ids:
                        (metrics.between if choice.tokens else metrics.first).observe(now - last)
                        last = now
                    choice.text += output.text
                    choice.tokens += len(output.token_ids)
                    choice.logprobs += output.logprobs
                    choice.reason = output.finish_reason
                    if output.finish_reason == "error":
                        raise Unanswered(output.error or "no reason given")
                    yield output
            metrics.whole.observe(time.perf_counter() - begin)
            metrics.prompt.observe(len(choice.prompt))
            metrics.generated.observe(choice.tokens)
            metrics.ended(choice.reason or "stop")
        except (asyncio.CancelledError, GeneratorExit):
            metrics.ended("abort")
            raise
        except ValueError as error:  # it never ran
            raise BadRequest(str(error)) from None
        except BaseException:
            metrics.ended("error")
            raise

    return Guard(app, key, most_bytes)


async def _unless_gone(work: Any, request: Request) -> Any:
    """What ``work`` gives, or None when the client leaves first: who does not stream is never cancelled by Starlette."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def unfinished(error: Exception) -> dict[str, Any]:
    """The error of a generation that did not come to its end."""
    if isinstance(error, Unanswered):
        return problem(str(error), "server_error", "generation_failed")
    return problem(f"the engine failed: {error}", "server_error", "engine_failed")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


def usage(choices: list[Choice]) -> dict[str, int]:
    """Tokens of prompts (each once, whatever n is) and of outputs."""
    prompts = sum(len(p) for p in {id(c.prompt): c.prompt for c in choices}.values())
    made = sum(c.tokens for c in choices)
    return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


MARK = "\ue000a chunk's text\ue000"


class Text:
    """The bodies of /v1/completions."""

    def __init__(self, prefix: str, kind: str, model: str, tokenizer: Tokenizer):
        self.id, self.kind, self.model, self.tokenizer = prefix + uuid.uuid4().hex, kind, model, tokenizer
        self.created = int(time.time())
        self._around: dict[int, list[bytes]] = {}  # a chunk before and behind its text, by choice

    def event(self, index: int, choices: list[Choice], output: Output, counts: bool) -> bytes:
        """A chunk of a stream, as it is sent. Of one that has text alone, as most have, only that is encoded anew."""
        choice = choices[index]
        if output.finish_reason or output.logprobs or not output.text:
            made = encoded(self.chunk(index, choice, output))
        else:
            if index not in self._around:
                self._around[index] = encoded(self.chunk(index, choice, Output("", text=MARK))).split(encoded(MARK))
            before, behind = self._around[index]
            made = before + encoded(output.text) + behind
        if counts:
            made = made[:-1] + b',"usage":' + encoded(usage(choices)) + b"}"
        return b"data: " + made + b"\n\n"

    def head(self, chunk: str = "") -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Events before the first text."""
        return []

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        made = [self.choice(i, c.text, self.logprobs(c, c.logprobs), c.reason) for i, c in enumerate(choices)]
        return {**self.head(), "choices": made, "usage": usage(choices)}

    def chunk(self, index: int, choice: Choice, output: Output) -> dict[str, Any]:
        made = self.choice(index, output.text, self.logprobs(choice, list(output.logprobs)), output.finish_reason)
        return {**self.head(".chunk"), "choices": [made]}

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, choice: Choice, found: list[TokenLogprobs]) -> Any:
        """Of a choice's next tokens."""
        if choice.parameters.logprobs is None:
            return None
        name, offsets = self.tokenizer.token_text, []
        for t in found:
            offsets.append(choice.offset)
            choice.offset += len(choice.decoder.decode(self.tokenizer.shown_bytes(t.token)))
        return {
            "tokens": [name(t.token) for t in found],
            "token_logprobs": [t.logprob for t in found],
            "top_logprobs": [{name(token): value for token, value in t.best} for t in found],
            "text_offset": offsets,
        }


class Chat(Text):
    """The bodies of /v1/chat/completions."""

    def head(self, chunk: str = "") -> dict[str, Any]:
        return {**super().head(), "object": self.kind + chunk}

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{**self.head(".chunk"), "choices": [delta]}]

    def chunk(self, index: int, choice: Choice, output: Output) -> dict[str, Any]:
        made = {
            "index": index, "delta": {"content": output.text} if output.text else {},
            "logprobs": self.logprobs(choice, list(output.logprobs)), "finish_reason": output.finish_reason,
        }  # fmt: skip
        return {**self.head(".chunk"), "choices": [made]}

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, choice: Choice, found: list[TokenLogprobs]) -> Any:
        if choice.parameters.logprobs is None:
            return None

        def entry(token: int, value: float) -> dict[str, Any]:
            return {
                "token": self.tokenizer.token_text(token),
                "logprob": value,
                "bytes": list(self.tokenizer.token_bytes(token)),
            }

        return {"content": [
            {**entry(t.token, t.logprob), "top_logprobs": [entry(*best) for best in t.best]} for t in found
        ]}  # fmt: skip
