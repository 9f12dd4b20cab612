"""Output of a JSON schema, by the package ``llguidance``: which tokens may come next."""

from typing import Any

import numpy as np

from weft.inference.config import ModelConfig
from weft.inference.tokenizer import Tokenizer

INSTALL = "output of a JSON schema needs the package llguidance: pip install 'weft[json]'"


class Grammar:
    """The state of one output. ``backend`` is an ``llguidance.LLMatcher``."""

    def __init__(self, backend: Any, vocabulary: int):
        self.backend = backend
        self.words = np.zeros((1, -(-vocabulary // 32)), dtype=np.int32)
        self.vocabulary = vocabulary

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, config: ModelConfig, schema: dict[str, Any]) -> "Grammar":
        """At its beginning.

        Raises:
            ModuleNotFoundError: no llguidance.
            ValueError: no tokenizer, a schema that is none or that it cannot follow.
        """
        try:
            import llguidance
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(INSTALL, name=missing.name) from missing
        if tokenizer is None:
            raise ValueError("argument 'json_schema' without a tokenizer; expected one, for its tokens' texts")
        if tokenizer.grammar is None:
            end = config.eos[0] if config.eos else None
            tokenizer.grammar = llguidance.LLTokenizer(
                tokenizer.backend.to_str(), n_vocab=max(config.vocab_size, tokenizer.size), eos_token=end
            )
        try:
            backend = llguidance.LLMatcher(tokenizer.grammar, llguidance.LLMatcher.grammar_from_json_schema(schema))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"argument 'json_schema': {error}") from None
        if backend.is_error():
            raise ValueError(f"argument 'json_schema': {backend.get_error()}")
        return cls(backend, config.vocab_size)

    def allowed(self) -> np.ndarray:
        """bool [vocabulary]: the tokens that may come next."""
        import llguidance.numpy

        llguidance.numpy.fill_next_token_bitmask(self.backend, self.words, 0)
        bits = np.unpackbits(self.words.view(np.uint8), bitorder="little")[: self.vocabulary]
        return bits.astype(bool)

    def take(self, token: int) -> bool:
        """Moves on by a token; whether the output is complete."""
        self.backend.consume_token(token)
        return bool(self.backend.is_stopped())
