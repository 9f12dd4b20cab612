"""Perplexity: how well a model predicts a text, to compare what quantised weights or a quantised cache cost."""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.inference.model import Batch, Decoder, Pages

QUERIES = 64  # tokens of a window that are computed at a time, as many as quantised products take without dequantising
PAGE = 64


@dataclass(frozen=True)
class Perplexity:
    """``tokens`` that were predicted, and their mean negative log-likelihood in nats."""

    tokens: int
    nats: float

    @property
    def value(self) -> float:
        return math.exp(self.nats) if self.nats < 700 else math.inf


@torch.inference_mode()
def perplexity(
    model: Decoder, tokens: Items[int], *, window: int = 512, cache_dtype: torch.dtype | None = None, at_once: int = 8
) -> Perplexity:
    """Of ``tokens`` in windows that begin afresh; the first token of a window is not predicted.

    Every token's keys and values go through the cache, so that its dtype counts as it does in decoding.

    Args:
        window: tokens.
        at_once: windows.

    Raises:
        ValueError: fewer than two tokens, a window out of range, logits that are not finite.
    """
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} tokens; expected at least 2")
    window = min(window, len(tokens))
    if not 2 <= window <= model.config.max_length:
        raise ValueError(f"a window of {window} tokens; expected 2 … {model.config.max_length}, the model's length")
    whole = len(tokens) // window
    text = torch.tensor(tokens[: whole * window], dtype=torch.int64, device=model.device).view(whole, window)
    each = -(-window // PAGE)
    model.prepare(each * PAGE)
    pages = Pages.empty(model.config, at_once * each, PAGE, cache_dtype or model.dtype, model.device)
    tables = torch.arange(at_once * each, dtype=torch.int32, device=model.device).view(at_once, each)
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for windows in text.split(at_once):
        for start in range(0, window, QUERIES):
            part = windows[:, start : start + QUERIES]
            lengths = torch.full((len(part),), start + part.shape[1], dtype=torch.int32, device=model.device)
            used = tables[: len(part), : -(-(start + part.shape[1]) // PAGE)]
            logits = model(Batch(part.flatten(), lengths, used, part.shape[1]), pages)
            wanted = windows[:, start + 1 : start + 1 + part.shape[1]]
            logits = logits.view(*part.shape, -1)[:, : wanted.shape[1]].float()
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum").double()
    count = whole * (window - 1)
    if not math.isfinite(nats := float(total) / count):
        raise ValueError(
            f"the model's logits are not finite: its weights or activations are too large for {model.dtype}"
        )
    return Perplexity(count, nats)


def own_text() -> str:
    """English prose that every installation has: the course's lessons."""
    import weft

    lessons = sorted((Path(weft.__file__).parent / "course").glob("day*/**/*.en.md"))
    return "\n\n".join(path.read_text(encoding="utf-8") for path in lessons)
