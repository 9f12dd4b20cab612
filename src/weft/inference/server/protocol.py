"""The bodies of OpenAI's completions and chat completions, and the sampling parameters that they mean."""

import json
import logging
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from weft.inference.parameters import MOST_LOGPROBS, SamplingParameters
from weft.inference.tokenizer import Tokenizer

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
MOST_CHOICES = 16
MOST_PROMPTS = 64
# Arguments of the API that change the result and that this server does not serve: refused by name unless they say nothing.
# Other arguments that it does not know are left out, with a warning unless they are known to change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""), "echo": (None, False), "best_of": (None, 1), "tools": (None, []), "tool_choice": (None, "none"),
    "functions": (None, []), "function_call": (None, "none"), "audio": (None,), "prediction": (None,),
    "modalities": (None, ["text"]), "web_search_options": (None,), "reasoning_effort": (None,),
    # vLLM's
    "use_beam_search": (None, False), "length_penalty": (None, 1), "early_stopping": (None, False), "guided_regex": (None,),
    "guided_grammar": (None,), "guided_choice": (None,), "structural_tag": (None,), "prompt_logprobs": (None,),
    "include_stop_str_in_output": (None, False), "skip_special_tokens": (None, True), "allowed_token_ids": (None,),
    "bad_words": (None, []), "truncate_prompt_tokens": (None,), "chat_template": (None,), "documents": (None, []),
    "prompt_embeds": (None,), "logits_processors": (None, []), "return_token_ids": (None, False), "media_io_kwargs": (None,),
    "mm_processor_kwargs": (None,), "typical_p": (None, 1), "thinking_token_budget": (None,),
}  # fmt: skip
NO_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "return_token_strs", "request_id", "priority",
}  # fmt: skip
MOST_WARNINGS = 100
log = logging.getLogger("weft.serve")
warned: set[str] = set()  # names of unknown arguments


class BadRequest(ValueError):
    """What a client asked for is not possible; ``argument`` names it, else the message does."""

    def __init__(self, message: str, argument: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        named = re.match(r"argument '(\w+)'", message) if argument is None else None
        self.argument, self.status, self.code = named[1] if named else argument, status, code


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = False
    continuous_usage_stats: StrictBool | None = False  # vLLM's: the usage so far in each chunk


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True)

    form: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


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
    min_tokens: StrictInt | None = None
    logit_bias: dict[StrictStr, Number] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    structured_outputs: dict[str, Any] | None = None
    add_special_tokens: StrictBool | None = None
    n: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def limit(self) -> tuple[str, int | None]:
        """The argument that limits the output, as the client spelt it, and what came in."""
        return "max_tokens", self.max_tokens

    @property
    def counts_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_in_chunks(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Raises BadRequest for what is refused by name; the first time that an unknown argument comes, a warning is logged."""
        for name, nothing in UNSUPPORTED.items():
            value = (self.model_extra or {}).get(name)
            if value not in nothing and not (name == "best_of" and value == self.n):
                raise BadRequest(f"argument '{name}' is not supported by this server; leave it out", name)
        for name in (self.model_extra or {}).keys() - UNSUPPORTED.keys() - NO_EFFECT - warned:
            if len(warned) < MOST_WARNINGS:
                warned.add(name)
                log.warning("unknown argument %.60r of a request is left out", name)
        if not 1 <= self.choices <= MOST_CHOICES:
            raise BadRequest(f"argument 'n' is {self.n}; expected 1 … {MOST_CHOICES}", "n")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("argument 'stream_options' without 'stream'; expected both", "stream_options")

    @property
    def schema_argument(self) -> str:
        """The argument that has the output's schema, if any has."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return "structured_outputs" if self.guided_json is None else "guided_json"

    def output_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the output is to have, by any of the arguments that say so."""
        found: list[dict[str, Any]] = []
        form = self.response_format
        if form is not None and form.type == "json_object":
            found.append({"type": "object"})
        elif form is not None and form.type == "json_schema":
            if form.json_schema is None or form.json_schema.form is None:
                raise BadRequest("argument 'response_format' has no json_schema.schema", "response_format")
            found.append(form.json_schema.form)
        if self.guided_json is not None:
            found.append(_schema("guided_json", self.guided_json))
        more = {name: value for name, value in (self.structured_outputs or {}).items() if value not in (None, False)}
        if unknown := [name for name in more if name not in ("json", "json_object")]:
            raise BadRequest(
                f"argument 'structured_outputs' has {unknown[0]!r:.40}; this server takes 'json' and 'json_object'",
                "structured_outputs",
            )
        for name, value in more.items():
            found.append(_schema("structured_outputs", value) if name == "json" else {"type": "object"})
        if len(found) > 1:
            raise BadRequest(
                "the output's schema is given several times; expected 'response_format' alone", "response_format"
            )
        return found[0] if found else None

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
            "min_tokens",
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if any(_surrogate(text) for text in stop):
            raise BadRequest("argument 'stop' has a lone surrogate; expected valid Unicode", "stop")
        seed = self.seed
        if seed is not None and choice and -(2**63) <= seed < 2**64:
            seed = (seed + choice) % 2**64
        biases: dict[int, float] = {}
        for token, value in (self.logit_bias or {}).items():
            if not token.isdecimal() or not token.isascii() or len(token) > 10:
                raise BadRequest(f"argument 'logit_bias' has {token!r:.40}; expected token ids as keys", "logit_bias")
            if int(token) in biases:
                raise BadRequest(f"argument 'logit_bias' has token {int(token)} twice; expected it once", "logit_bias")
            biases[int(token)] = value
        try:
            return SamplingParameters(
                **given, logit_bias=biases or None, json_schema=self.output_schema(), stop=stop,
                stop_token_ids=tuple(self.stop_token_ids or ()), ignore_eos=bool(self.ignore_eos),
                seed=seed, **more,
            )  # fmt: skip
        except BadRequest:
            raise
        except (TypeError, ValueError) as error:
            raise BadRequest(str(error)) from None


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    logprobs: StrictInt | None = None

    def prompts(self, tokenizer: Tokenizer, most: int) -> list[list[int]]:
        """Token ids of each prompt, for which there is room for so many."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not 1 <= len(given) <= MOST_PROMPTS:
            raise BadRequest(f"argument 'prompt' has {len(given)} prompts; expected 1 … {MOST_PROMPTS}", "prompt")
        longest = max(len(p) if isinstance(p, list) else 0 for p in given)
        if longest >= most:  # not sent to the engine, n times
            raise BadRequest(f"argument 'prompt' has {longest} tokens; expected at most {most - 1}", "prompt")
        try:
            special = self.add_special_tokens is not False
            return [tokenizer.encode(p, special, most) if isinstance(p, str) else p for p in given]
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
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if "tool_calls" in more:
            more["tool_calls"] = _tool_calls(more["tool_calls"])
        return {"role": self.role, "content": content, **more}


class Conversation(BaseModel):
    """Messages, and how they become a prompt."""

    messages: list[Message]
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def prompt_tokens(self, tokenizer: Tokenizer, special: bool, most: int) -> list[int]:
        if not self.messages:
            raise BadRequest("argument 'messages' is empty; expected at least one message", "messages")
        goes_on = bool(self.continue_final_message)
        if goes_on and self.add_generation_prompt:
            message = "argument 'continue_final_message' beside add_generation_prompt; expected one of them"
            raise BadRequest(message, "continue_final_message")
        more = dict(self.chat_template_kwargs or {})
        if more.keys() & {"messages", "continue_final_message"}:
            raise BadRequest("argument 'chat_template_kwargs' has arguments of the request", "chat_template_kwargs")
        if self.add_generation_prompt is not None:
            more["add_generation_prompt"] = self.add_generation_prompt
        try:
            messages = [message.plain() for message in self.messages]
            text = tokenizer.chat_text(messages, continue_final_message=goes_on, **more)
            return tokenizer.encode(text, special, most)
        except BadRequest:
            raise
        except ValueError as error:
            raise BadRequest(f"argument 'messages': {error}", "messages") from None


class ChatRequest(Common, Conversation):
    """POST /v1/chat/completions."""

    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().limit
        return "max_completion_tokens", self.max_completion_tokens

    def parameters(self, choice: int) -> SamplingParameters:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("argument 'top_logprobs' without 'logprobs'; expected both", "top_logprobs")
        best = self.top_logprobs or 0
        if not 0 <= best <= MOST_LOGPROBS:
            raise BadRequest(f"argument 'top_logprobs' is {best}; expected 0 … {MOST_LOGPROBS}", "top_logprobs")
        name, most = self.limit
        if most is not None and most < 1:
            raise BadRequest(f"argument '{name}' is {most}; expected at least 1", name)
        return self.sampling(choice, max_tokens=most, logprobs=best if self.logprobs else None)


class TokenizeRequest(Conversation):
    """POST /tokenize, as vLLM has it: of a prompt or of messages."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[Message] = []
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool | None = None

    def tokens(self, tokenizer: Tokenizer, most: int) -> list[int]:
        if self.messages:
            return self.prompt_tokens(tokenizer, bool(self.add_special_tokens), most)
        if self.prompt is None:
            raise BadRequest("there is neither 'prompt' nor 'messages'; expected one of them", "prompt")
        try:
            return tokenizer.encode(self.prompt, self.add_special_tokens is not False, most)
        except ValueError as error:
            raise BadRequest(f"argument 'prompt': {error}", "prompt") from None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: list[StrictInt]

    def text(self, tokenizer: Tokenizer, vocabulary: int) -> str:
        for token in self.tokens:
            if not 0 <= token < vocabulary:
                raise BadRequest(f"argument 'tokens' has {token}; expected ids 0 … {vocabulary - 1}", "tokens")
        return tokenizer.decode(self.tokens, skip_special=False)


def _schema(argument: str, given: Any) -> dict[str, Any]:
    """A schema that is given as an object, or as its JSON."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadRequest(f"argument '{argument}' is {given!r:.40}; expected a JSON schema, an object", argument)
    return found


def _tool_calls(calls: Any) -> Any:
    """As templates read them: the arguments, which the API has as JSON in a text, are objects."""
    if not isinstance(calls, list):
        raise BadRequest("argument 'messages' has tool_calls that are no list", "messages")
    made = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise BadRequest("argument 'messages' has a tool call without a function", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise BadRequest(
                    "argument 'messages' has a tool call whose arguments are no JSON", "messages"
                ) from None
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def _surrogate(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)
