"""``SamplingParameters``: how one request is generated."""

import math
from dataclasses import dataclass
from typing import Any

MOST_LOGPROBS = 20
MOST_KEPT = 2**31 - 1  # of top_k as int32
LEAST_TEMPERATURE = 1e-30  # float32 has no much smaller numbers
MOST_STOPS = 32
MOST_BIASES = 1024
MOST_ENDS = 1024


@dataclass(frozen=True)
class SamplingParameters:
    """How the tokens of a request are chosen. The defaults sample from the model's distribution. There is no ``n``, which is of
    ``weft serve``: for several outputs give a prompt several times.

    Args:
        max_tokens: generated at most, and never more than the model's length and the cache leave; None for that.
        temperature: logits are divided by it; 0, or less than 1e-30, takes the most probable token (greedy).
        top_k: only so many of the most probable tokens; 0 or -1 for all.
        top_p: only the most probable tokens whose probabilities sum to it, 0 < top_p <= 1.
        min_p: only tokens of at least this share of the best one's probability, 0 … 1.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive, else multiplied.
        presence_penalty, frequency_penalty: taken from a generated token's logit once, and for each time it was generated.
        seed: the same seed, prompt and parameters give the same random numbers, whatever else is in the batch; None draws one.
        stop: texts that end the generation and are not in the result.
        stop_token_ids: tokens that end it, beside the model's own; at most 1024.
        ignore_eos: go on behind the model's end tokens.
        min_tokens: before so many are generated, neither the model's end tokens nor ``stop_token_ids`` come.
        logit_bias: added to the logits of tokens, -100 … 100 by token id; at most 1024.
        logprobs: how many of the best tokens' log-probabilities to give with each token, 0 … 20; None for none.
        json_schema: the output is JSON of this schema (package ``llguidance``); ``{}`` allows any JSON.

    Raises:
        TypeError, ValueError: a value of another type or out of range; the message names the argument.
    """

    max_tokens: int | None = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    json_schema: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if type(self.top_k) is int and self.top_k == -1:  # as vLLM says "all"
            object.__setattr__(self, "top_k", 0)
        self._integer("max_tokens", 1, None, optional=True)
        self._integer("top_k", 0, None)
        self._integer("min_tokens", 0, self.max_tokens)
        self._integer("logprobs", 0, MOST_LOGPROBS, optional=True)
        self._integer("seed", -(2**63), 2**64 - 1, optional=True)
        self._number("temperature", 0, 100, "0 … 100")
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        self._number("top_p", 0, 1, "0 < top_p <= 1", open_below=True)
        self._number("min_p", 0, 1, "0 … 1")
        self._number("repetition_penalty", 0, 100, "0 < repetition_penalty <= 100", open_below=True)
        self._number("presence_penalty", -2, 2, "-2 … 2")
        self._number("frequency_penalty", -2, 2, "-2 … 2")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) for s in self.stop):
            raise TypeError(f"argument 'stop' is {self.stop!r:.80}; expected a tuple of texts")
        if not all(self.stop):
            raise ValueError(f"argument 'stop' is {self.stop!r:.80}; expected texts that are not empty")
        if len(self.stop) > MOST_STOPS:
            raise ValueError(f"argument 'stop' has {len(self.stop)} texts; expected at most {MOST_STOPS}")
        if not isinstance(self.stop_token_ids, tuple) or not all(type(t) is int for t in self.stop_token_ids):
            raise TypeError(f"argument 'stop_token_ids' is {self.stop_token_ids!r:.80}; expected a tuple of token ids")
        if len(self.stop_token_ids) > MOST_ENDS:
            raise ValueError(
                f"argument 'stop_token_ids' has {len(self.stop_token_ids)} ids; expected at most {MOST_ENDS}"
            )
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"argument 'ignore_eos' is {self.ignore_eos!r:.80}; expected a bool")
        if self.json_schema is not None and not isinstance(self.json_schema, dict):
            raise TypeError(f"argument 'json_schema' is {self.json_schema!r:.80}; expected a dict")
        if self.json_schema is not None and self.min_tokens:
            raise ValueError("argument 'min_tokens' beside json_schema, which says where the output ends; expected one")
        if self.logit_bias is not None:
            self._biases(self.logit_bias)

    @staticmethod
    def _biases(given: Any) -> None:
        if not isinstance(given, dict) or not all(type(token) is int and token >= 0 for token in given):
            raise TypeError(f"argument 'logit_bias' is {given!r:.80}; expected a dict of token ids to numbers")
        if len(given) > MOST_BIASES:
            raise ValueError(f"argument 'logit_bias' has {len(given)} tokens; expected at most {MOST_BIASES}")
        for token, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
                raise ValueError(f"argument 'logit_bias' has {value!r:.40} of token {token}; expected -100 … 100")

    def _integer(self, name: str, least: int, most: int | None, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if type(value) is not int:
            raise TypeError(f"argument '{name}' is {value!r:.80}; expected an int{' or None' if optional else ''}")
        if value < least or (most is not None and value > most):
            span = f"at least {least}" if most is None else f"{least} … {most}"
            raise ValueError(f"argument '{name}' is {value}; expected {span}")

    def _number(self, name: str, least: float, most: float, expected: str, open_below: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"argument '{name}' is {value!r:.80}; expected a number")
        if not math.isfinite(value) or not least <= value <= most or (open_below and value == least):
            raise ValueError(f"argument '{name}' is {value}; expected {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether some tokens are left out by their probabilities."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def drawing(self) -> tuple[float, ...]:
        """What a token is drawn with: temperature, top_p, min_p, top_k."""
        return self.temperature, self.top_p, self.min_p, min(self.top_k, MOST_KEPT)

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on earlier ones by more than the model, so that the host must have them first."""
        return (
            self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
            or self.json_schema is not None
        )  # fmt: skip

    @property
    def changes_logits(self) -> bool:
        return self.needs_history or bool(self.logit_bias) or self.min_tokens > 0
