"""From logits to tokens, on the device, a row for each token.

A row's random number is a function of its request's seed and of the token's index in the output, so what a request gets does
not depend on what else is in the batch, on preemption or on speculation.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft import ops
from weft.inference.parameters import SamplingParameters
from weft.inference.scheduler import Work

# R rows, V vocabulary
LEAST_PENALTY = 1e-30  # of repetition: float32 has no much smaller numbers


@dataclass
class Row:
    """One token that is wanted: the request's parameters, its random number 0 … 1, and where they matter the tokens before."""

    parameters: SamplingParameters
    uniform: float
    prompt: Collection[int] = ()  # distinct tokens of the prompt, for the repetition penalty
    counts: Any = None  # how often each token was generated
    banned: Collection[int] = ()  # tokens that must not come
    allowed: np.ndarray | None = None  # bool [V], by a grammar


class Logprobs(NamedTuple):
    """Log-probabilities of the tokens [R]; the best tokens [R, n] and theirs."""

    of_tokens: Tensor
    best: Tensor
    of_best: Tensor


@dataclass
class Sampled:
    """tokens int64 [R], -1 where the logits are not finite or no token is allowed; ``logprobs`` where a row asks for them."""

    tokens: Tensor
    logprobs: Logprobs | None = None


def numbers_of(work: list[Work], queries: int = 1) -> np.ndarray:
    """Random numbers of each sequence's next ``queries`` tokens, [B, Q]."""
    seeds = np.array([[w.sequence.seed] for w in work], dtype=np.uint64)
    made = np.array([[w.end - w.sequence.prompt] for w in work])
    return uniforms(seeds, made + np.arange(queries))


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Numbers 0 <= u < 1 of 53 bits: SplitMix64 (Steele et al. 2014) of seeds, uint64, and the indices of tokens."""
    z = seeds * np.uint64(0x9E3779B97F4A7C15) + (indices + 1).astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    for _ in range(2):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)) * 2.0**-53


def best(logits: Tensor) -> Tensor:
    """The token of each row's largest logit, int64 [R]; -1 where that is NaN or infinite, or where all logits are 0, which is
    what a norm makes of sums that overflow.

    The flag travels with the token, so the device is not asked for it.
    """
    if logits.is_cuda:
        zero = torch.zeros(len(logits), device=logits.device)
        found: Tensor = ops.draw_tokens(logits, zero, zero)
        return found
    tokens = logits.argmax(-1)
    largest = logits.gather(1, tokens[:, None])[:, 0]
    right, zero = largest.isfinite(), largest == 0
    if zero.any():
        right &= ~zero | logits.any(1)
    return torch.where(right, tokens, -1)


@torch.inference_mode()
def sample(logits: Tensor, rows: list[Row]) -> Sampled:
    """The tokens of logits [R, V]."""
    most = max((row.parameters.logprobs for row in rows if row.parameters.logprobs is not None), default=None)
    if most is None and all(row.parameters.greedy and not row.parameters.changes_logits for row in rows):
        return Sampled(best(logits))
    simple = not any(row.parameters.filters or row.parameters.changes_logits for row in rows)
    if logits.is_cuda and most is None and simple:
        return Sampled(_by_kernel(logits, rows))
    raw = logits = logits.float()
    first = best(raw)
    if any(row.parameters.changes_logits for row in rows):
        logits = _changed(logits, rows)
        first = torch.where(logits.amax(-1) == -torch.inf, -1, first)  # every token is banned
    if logits.is_cuda:  # in every batch by the same kernel
        tokens, others = _by_kernel(logits, rows), [row.parameters.filters for row in rows]
    else:
        tokens, others = logits.argmax(-1), [not row.parameters.greedy for row in rows]
    if any(others):
        tokens = torch.where(_tensor(others, logits, torch.bool), _drawn(logits, rows), tokens)
    tokens = torch.where(first < 0, first, tokens)
    if most is None:
        return Sampled(tokens)
    log = raw.log_softmax(-1)
    values, index = log.topk(min(max(most, 1), log.shape[1]), -1)
    return Sampled(tokens, Logprobs(log.gather(1, tokens.clamp(min=0)[:, None])[:, 0], index, values))


def _tensor(values: Any, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    t = torch.tensor(values, dtype=dtype, device="cpu")
    return t.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else t


def _columns(entries: list[tuple[Any, ...]], like: Tensor) -> list[Tensor]:
    """Of (row, token, numbers …) a tensor of each."""
    kinds = (torch.int64, torch.int64, torch.float32, torch.float32)
    return [_tensor(values, like, kind) for values, kind in zip(zip(*entries, strict=True), kinds, strict=False)]


def _changed(logits: Tensor, rows: list[Row]) -> Tensor:
    """Penalties of tokens that were there already, biases, tokens that must not come, and grammars."""
    logits = logits.clone()
    seen: list[tuple[int, int, float, float]] = []  # row, token, its logit's penalty, what is taken from the logit
    added: list[tuple[int, int, float]] = []  # row, token, what is added to its logit
    for i, row in enumerate(rows):
        p, counts = row.parameters, row.counts or {}
        factor = max(p.repetition_penalty, LEAST_PENALTY)
        for token in {*counts, *row.prompt}:
            n = counts.get(token, 0)
            seen.append((i, token, factor, p.presence_penalty * (n > 0) + p.frequency_penalty * n))
        added += [(i, token, value) for token, value in (p.logit_bias or {}).items()]
        added += [(i, token, -torch.inf) for token in row.banned]
    if seen:
        at, tokens, factors, offsets = _columns(seen, logits)
        old = logits[at, tokens]
        penalised = torch.where(old > 0, old / factors, old * factors).clamp(max=torch.finfo(old.dtype).max)
        logits[at, tokens] = penalised - offsets
    if added:
        at, tokens, values = _columns(added, logits)
        logits.index_put_((at, tokens), values, accumulate=True)
    for i, row in enumerate(rows):
        if row.allowed is not None:
            logits[i].masked_fill_(_tensor(~row.allowed, logits, torch.bool), -torch.inf)
    return logits


def _by_kernel(logits: Tensor, rows: list[Row]) -> Tensor:
    """Tokens by temperature alone."""
    of_rows = _tensor([(row.parameters.temperature, row.uniform) for row in rows], logits)
    tokens: Tensor = ops.draw_tokens(logits, of_rows[:, 0], of_rows[:, 1])
    return tokens


def _drawn(logits: Tensor, rows: list[Row]) -> Tensor:
    """A token of each row's distribution: the first at which the running sum passes the row's random number."""
    p, vocabulary = [row.parameters for row in rows], logits.shape[1]
    temperature, top = _tensor([x.temperature or 1.0 for x in p], logits)[:, None], logits.amax(-1, keepdim=True)
    # a quotient that overflows has no softmax; other rows are divided as they are
    logits = (logits - torch.where((top / temperature).isfinite(), 0.0, top)) / temperature
    if any(x.top_k for x in p):
        k = [min(x.top_k or vocabulary, vocabulary) for x in p]
        most = max(n for n in k if n < vocabulary) if any(n < vocabulary for n in k) else vocabulary
        if most < vocabulary:
            best = logits.topk(most, -1).values
            least = best.gather(1, (_tensor(k, logits, torch.int64).clamp(max=most) - 1)[:, None])
            limited = _tensor([n < vocabulary for n in k], logits, torch.bool)[:, None]
            logits = logits.masked_fill(limited & (logits < least), -torch.inf)
    weights = logits.softmax(-1)
    if any(x.min_p for x in p):
        floor = _tensor([x.min_p for x in p], logits)[:, None] * weights.amax(-1, keepdim=True)
        weights = weights.masked_fill(weights < floor, 0.0)
    if any(x.top_p < 1 for x in p):
        ordered, index = weights.sort(dim=-1, descending=True, stable=True)
        total = ordered.sum(-1, keepdim=True)
        before = ordered.cumsum(-1) - ordered
        enough = _tensor([x.top_p if x.top_p < 1 else 2.0 for x in p], logits)[:, None] * total
        beyond = before >= enough
        beyond[:, 0] = False  # enough may round to 0
        out = torch.zeros_like(weights, dtype=torch.bool).scatter(1, index, beyond)
        weights = weights.masked_fill(out, 0.0)
    running = weights.double().cumsum(-1) if not logits.is_cuda else weights.cumsum(-1)
    u = _tensor([row.uniform for row in rows], logits, running.dtype)[:, None] * running[:, -1:]
    found = torch.searchsorted(running, u, right=True)[:, 0].clamp(max=vocabulary - 1)
    # rounding may take u to the whole sum: then the last token that has a share
    last = vocabulary - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(found, last)
