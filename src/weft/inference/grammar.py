"""Output of a JSON schema, by the package ``llguidance``: which tokens may come next."""

from typing import Any

import numpy as np

from weft.inference.config import ModelConfig
from weft.inference.tokenizer import Tokenizer

WHITESPACE: Any = {"whitespace_pattern": r"( |\n[ \t]{0,32})?"}  # any more, and a model may write it without end
INSTALL = "output of a JSON schema needs the package llguidance, 1.7 or newer: pip install 'weft[json]'"


class Grammar:
    """The state of one output.

    Args:
        backend: an ``llguidance.LLMatcher``.
        vocabulary: tokens of the model.
        end: the token that the backend takes for the end of an output, where the model itself has none: the output ends then as
            soon as it may.
    """

    def __init__(self, backend: Any, vocabulary: int, end: int | None = None):
        self.backend, self.vocabulary, self.end = backend, vocabulary, end
        self.words = np.zeros((1, -(-vocabulary // 32)), dtype=np.int32)
        self.failure: str | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, config: ModelConfig, schema: dict[str, Any]) -> "Grammar":
        """At its beginning.

        Raises:
            ModuleNotFoundError: no llguidance, or an older one.
            ValueError: no tokenizer, a schema that is none, that no output satisfies, or that it cannot follow.
        """
        try:
            import llguidance
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(INSTALL, name=missing.name) from missing
        if tokenizer is None:
            raise ValueError("argument 'json_schema' without a tokenizer; expected one, for its tokens' texts")
        if tokenizer.grammar is None:
            ends = [token for token in config.eos if token < tokenizer.size]
            size = max(config.vocab_size, tokenizer.size)
            try:
                tokenizer.grammar = llguidance.LLTokenizer(
                    tokenizer.backend.to_str(), n_vocab=size, eos_token=ends or None
                )
            except TypeError as older:  # it takes one end token alone
                raise ModuleNotFoundError(INSTALL, name="llguidance") from older
        if "x-guidance" in schema:
            raise ValueError(
                "argument 'json_schema' has 'x-guidance', which is for llguidance; expected JSON Schema alone"
            )
        try:
            made = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=WHITESPACE)
            backend = llguidance.LLMatcher(tokenizer.grammar, made)
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"argument 'json_schema': {error}") from None
        if backend.is_error():
            raise ValueError(f"argument 'json_schema': {_short(backend)}")
        end = tokenizer.grammar.eos_token
        found = cls(backend, config.vocab_size, None if end in config.eos else end)
        found.allowed()
        if backend.is_stopped():
            raise ValueError("argument 'json_schema' allows no output; expected a schema that some JSON satisfies")
        return found

    def copy(self) -> "Grammar":
        """The same state, for another output of the same schema."""
        return Grammar(self.backend.deep_copy(), self.vocabulary, self.end)

    def allowed(self) -> np.ndarray:
        """bool [vocabulary]: the tokens that may come next."""
        import llguidance.numpy

        llguidance.numpy.fill_next_token_bitmask(self.backend, self.words, 0)
        found = np.unpackbits(self.words.view(np.uint8), bitorder="little")[: self.vocabulary].astype(bool)
        if self.end is not None:
            found[self.end] = False
        return found

    def take(self, token: int) -> bool:
        """Moves on by a token; whether the output has ended. ``failure`` says why, where it is not complete."""
        followed, stopped = self.backend.consume_token(token), self.backend.is_stopped()
        if not followed or self.backend.is_error():
            self.failure = f"the output follows its JSON schema no longer: {_short(self.backend)}"
        elif stopped and not self.backend.is_accepting():
            self.failure = "the output cannot be completed: no token follows that its JSON schema allows"
        return bool(stopped or self.failure or (self.end is not None and self.backend.is_accepting()))


def _short(backend: Any) -> str:
    """A backend's error without its state."""
    return str(backend.get_error()).split("\n<state>")[0][:500]
