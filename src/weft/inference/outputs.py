"""What comes out of an engine. Without PyTorch, so that the server's own process starts fast and small."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities, before temperature and penalties: of a token and of the best ones (token, log-probability)."""

    token: int
    logprob: float
    best: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Output:
    """What a step added to a request. ``finish_reason``: None, 'stop', 'length', 'abort' or 'error' (``error`` says why)."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int = 0


@dataclass
class Stats:
    """Counters since the start, and what there is now. ``cache_usage`` is a share, 0 … 1."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
