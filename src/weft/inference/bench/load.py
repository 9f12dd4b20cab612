"""Requests that arrive as a Poisson process or all at once, and when their tokens come.

Prompts are random token ids, so that they share no prefix unless that is asked for. Output lengths are given: generation goes
on behind the model's end tokens.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.inference.parameters import SamplingParameters


@dataclass(frozen=True)
class Load:
    """What is asked for.

    Args:
        requests: how many.
        rate: requests a second, Poisson; ``inf`` for all at once.
        input_tokens, output_tokens: least and most, drawn evenly.
        shared: tokens of a prefix that all prompts have, of ``input_tokens``.
        seed: of lengths, prompts and arrivals.

    Raises:
        ValueError: a value out of range; the message names the option.
    """

    requests: int = 64
    rate: float = math.inf
    input_tokens: tuple[int, int] = (128, 128)
    output_tokens: tuple[int, int] = (64, 64)
    shared: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"--requests is {self.requests}; expected at least 1")
        if not self.rate > 0:
            raise ValueError(f"--rate is {self.rate}; expected requests a second, above 0, or inf")
        if not 0 <= self.shared < self.input_tokens[0]:
            raise ValueError(
                f"--shared is {self.shared}; expected fewer than the {self.input_tokens[0]} tokens of the shortest prompt"
            )

    def asked(self, vocabulary: int) -> list[tuple[list[int], int, float]]:
        """Prompt, tokens to generate, and second of arrival of each request."""
        draw = random.Random(self.seed)
        prefix = [draw.randrange(vocabulary) for _ in range(self.shared)]
        found, now = [], 0.0
        for _ in range(self.requests):
            length = draw.randint(*self.input_tokens)
            prompt = prefix + [draw.randrange(vocabulary) for _ in range(length - self.shared)]
            found.append((prompt, draw.randint(*self.output_tokens), now))
            now += 0.0 if math.isinf(self.rate) else draw.expovariate(self.rate)
        return found


@dataclass
class Timeline:
    """One request: seconds since the run's start at which it was sent and its tokens came (several may come at once)."""

    input_tokens: int
    sent: float = 0.0
    came: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.came)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.came[0][0] - self.sent

    @property
    def whole(self) -> float:
        """Seconds to the last token."""
        return self.came[-1][0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens; tokens that come together share theirs."""
        found: list[float] = []
        for (before, _), (now, count) in zip(self.came, self.came[1:], strict=False):
            found += [(now - before) / count] * count
        return found


class Client(Protocol):
    """Where requests go. ``tokens`` yields, as they come, how many tokens there are by then."""

    vocabulary: int

    def tokens(self, prompt: list[int], count: int) -> AsyncIterator[int]: ...


class InProcess:
    """An engine without HTTP, through the server's driver."""

    def __init__(self, driver: Any):
        self.driver, self.vocabulary = driver, driver.facts.config.vocab_size

    async def tokens(self, prompt: list[int], count: int) -> AsyncIterator[int]:
        parameters, total = SamplingParameters(max_tokens=count, temperature=0, ignore_eos=True), 0
        async with aclosing(self.driver.outputs(prompt, parameters)) as outputs:
            async for output in outputs:
                if output.finish_reason in ("error", "abort"):
                    raise RuntimeError(output.error or output.finish_reason)
                total += len(output.token_ids)
                yield total


class Http:
    """A server of OpenAI's completions, such as ``weft serve`` or vLLM.

    Asks for the usage in each chunk (``continuous_usage_stats``). Of a server that does not know it a chunk counts as a token,
    and tokens that only the usage at the end counts came then.

    Args:
        url: up to ``/v1``.
        key: API key, if the server wants one.
        model: as the server names it; its first one if None.
    """

    vocabulary = 256  # ids that any model has

    def __init__(self, url: str, key: str | None = None, model: str | None = None):
        try:
            import httpx
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError("weft bench-llm URL needs httpx: pip install httpx", name="httpx") from missing
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(
            base_url=url.rstrip("/") + "/", headers=headers, timeout=600, limits=limits, trust_env=False
        )
        self.model = model

    async def find_model(self) -> str:
        """The name of the server's model.

        Raises:
            ConnectionError: no such server there.
        """
        import httpx

        if self.model is None:
            try:
                found = await self.http.get("models", timeout=60)
                if found.status_code == 401:
                    raise ConnectionError(
                        f"{found.url}: status 401; expected its API key, by --api-key or WEFT_API_KEY"
                    )
                if found.status_code != 200:
                    raise ValueError(f"status {found.status_code}")
                self.model = str(found.json()["data"][0]["id"])
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
                raise ConnectionError(
                    f"{self.http.base_url}models: {error or type(error).__name__}; expected the URL of OpenAI's API, as in "
                    "http://127.0.0.1:8000/v1, or with --name one without a list of models"
                ) from None
        return self.model

    async def tokens(self, prompt: list[int], count: int) -> AsyncIterator[int]:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        total = 0
        async with self.http.stream("POST", "completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode("utf-8", "replace")
                key = " (--api-key, or WEFT_API_KEY)" if answer.status_code == 401 else ""
                raise ConnectionError(f"status {answer.status_code}{key}: {text:.300}")
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ConnectionError(str(event["error"])[:300])
                if usage := event.get("usage"):
                    total = usage["completion_tokens"]
                elif event.get("choices"):
                    total += 1
                yield total


async def run(client: Client, load: Load) -> list[Timeline]:
    """Sends the load. A request that fails has its error in its timeline; the others go on."""
    asked = load.asked(client.vocabulary)
    begin = time.perf_counter()

    async def one(prompt: list[int], count: int, arrival: float) -> Timeline:
        line = Timeline(len(prompt))
        await asyncio.sleep(max(0.0, arrival - (time.perf_counter() - begin)))
        line.sent = time.perf_counter() - begin
        try:
            known = 0
            async for total in client.tokens(prompt, count):
                if total > known:
                    line.came.append((time.perf_counter() - begin, total - known))
                    known = total
            if known != count:
                line.error = f"{known} of {count} tokens came"
        except Exception as error:
            line.error = f"{type(error).__name__}: {error}"
        return line

    return list(await asyncio.gather(*[one(*request) for request in asked]))
