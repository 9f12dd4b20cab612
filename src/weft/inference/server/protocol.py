"""The bodies of OpenAI's completions and chat completions, and the sampling parameters that they mean."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from weft.inference.parameters import MOST_LOGPROBS, SamplingParameters
from weft.inference.tokenizer import Tokenizer

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
MOST_CHOICES = 16
MOST_PROMPTS = 64
# Arguments of the API that change the result and that this server does not serve: refused by name unless they say nothing.
# Other arguments that it does not know (user, metadata, store …) change nothing and are left out.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}), "suffix": (None, ""), "echo": (None, False), "best_of": (None, 1), "tools": (None, []),
    "tool_choice": (None, "none"), "functions": (None, []), "function_call": (None, "none"), "audio": (None,),
    "prediction": (None,), "modalities": (None, ["text"]), "web_search_options": (None,), "reasoning_effort": (None,),
    "use_beam_search": (None, False), "guided_regex": (None,), "guided_grammar": (None,), "guided_choice": (None,),
}  # fmt: skip


class BadRequest(ValueError):
    """What a client asked for is not possible; ``argument`` names it."""

    def __init__(self, message: str, argument: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.argument, self.status, self.code = argument, status, code


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = False
    continuous_usage_stats: StrictBool | None = False  # vLLM's: the usage so far in each chunk


class Common(BaseModel):
    """What both kinds of completions take, with vLLM's additions (top_k, min_p, repetition_penalty, …)."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    n: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def counts_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_in_chunks(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Raises BadRequest for what is refused by name."""
        for name, nothing in UNSUPPORTED.items():
            value = (self.model_extra or {}).get(name)
            if value not in nothing:
                raise BadRequest(f"argument '{name}' is not supported by this server; leave it out", name)
        if not 1 <= self.choices <= MOST_CHOICES:
            raise BadRequest(f"argument 'n' is {self.n}; expected 1 … {MOST_CHOICES}", "n")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("argument 'stream_options' without 'stream'; expected both", "stream_options")

    def sampling(self, choice: int, **more: Any) -> SamplingParameters:
        """Of one of the choices; choices have seeds of their own."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if given.get("top_k") == -1:  # vLLM's "all"
            given["top_k"] = 0
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if any(_surrogate(text) for text in stop):
            raise BadRequest("argument 'stop' has a lone surrogate; expected valid Unicode", "stop")
        try:
            return SamplingParameters(
                **given, stop=stop, stop_token_ids=tuple(self.stop_token_ids or ()), ignore_eos=bool(self.ignore_eos),
                seed=None if self.seed is None else self.seed + choice, **more,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise BadRequest(str(error)) from None


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    logprobs: StrictInt | None = None

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of each prompt."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not 1 <= len(given) <= MOST_PROMPTS:
            raise BadRequest(f"argument 'prompt' has {len(given)} prompts; expected 1 … {MOST_PROMPTS}", "prompt")
        try:
            return [tokenizer.encode(p) if isinstance(p, str) else p for p in given]
        except ValueError as error:
            raise BadRequest(f"argument 'prompt': {error}", "prompt") from None

    def parameters(self, choice: int) -> SamplingParameters:
        return self.sampling(
            choice, max_tokens=16 if self.max_tokens is None else self.max_tokens, logprobs=self.logprobs
        )


class Part(BaseModel):
    type: StrictStr
    text: StrictStr | None = None


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: StrictStr
    content: StrictStr | list[Part] | None = None

    def plain(self) -> dict[str, Any]:
        """As a chat template reads it: text alone."""
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text" or part.text is None:
                    raise BadRequest(
                        f"argument 'messages' has a part of type {part.type!r:.40}; expected text", "messages"
                    )
            content = "".join(part.text or "" for part in self.content)
        else:
            content = self.content or ""
        more = {name: value for name, value in (self.model_extra or {}).items() if isinstance(value, str)}
        return {"role": self.role, "content": content, **more}


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True)

    form: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    response_format: ResponseFormat | None = None

    def prompt_tokens(self, tokenizer: Tokenizer) -> list[int]:
        if not self.messages:
            raise BadRequest("argument 'messages' is empty; expected at least one message", "messages")
        try:
            return tokenizer.chat([message.plain() for message in self.messages])
        except BadRequest:
            raise
        except ValueError as error:
            raise BadRequest(f"argument 'messages': {error}", "messages") from None

    def parameters(self, choice: int) -> SamplingParameters:
        schema, form = None, self.response_format
        if form is not None and form.type != "text":
            if form.type == "json_schema" and (form.json_schema is None or form.json_schema.form is None):
                raise BadRequest("argument 'response_format' has no json_schema.schema", "response_format")
            schema = form.json_schema.form if form.type == "json_schema" and form.json_schema else {}
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("argument 'top_logprobs' without 'logprobs'; expected both", "top_logprobs")
        best = self.top_logprobs or 0
        if not 0 <= best <= MOST_LOGPROBS:
            raise BadRequest(f"argument 'top_logprobs' is {best}; expected 0 … {MOST_LOGPROBS}", "top_logprobs")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(choice, max_tokens=most, logprobs=best if self.logprobs else None, json_schema=schema)


def _surrogate(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)
