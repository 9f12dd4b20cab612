"""From logits to tokens, on the device, a row for each token.

A row's random number is a function of its request's seed and of the token's index in the output: it does not depend on what
else is in the batch, on preemption or on speculation.
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
        zero = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
        found: Tensor = ops.draw_tokens(logits, zero, zero)
        return found
    tokens = logits.argmax(-1)
    largest = logits.gather(1, tokens[:, None])[:, 0]
    right, zero = largest.isfinite(), largest == 0
    if zero.any():
        right &= ~zero | logits.any(1)
    return torch.where(right, tokens, -1)


def draw(logits: Tensor, numbers: Tensor, filtered: bool) -> Tensor:
    """A token of each row of logits [R, V], int64 [R], as ``ops.draw_tokens`` has it.

    Args:
        numbers: float32 [R, 6] of :func:`drawing_of`.
        filtered: whether some rows have top_k, top_p or min_p.
    """
    found: Tensor
    if not filtered:
        found = ops.draw_tokens(logits, numbers[:, 0], numbers[:, 1])
    else:
        top_k = numbers.view(torch.int32)[:, 4]
        found = ops.draw_tokens(logits, numbers[:, 0], numbers[:, 1], top_k, numbers[:, 2], numbers[:, 3])
    return found


def drawing_of(parameters: list[tuple[float, ...]], uniform: np.ndarray) -> np.ndarray:
    """float32 [B · Q, 6]: temperature, random number, top_p, min_p, the bits of top_k, 0.

    Args:
        parameters: ``SamplingParameters.drawing`` of B requests.
        uniform: random numbers [B, Q], of Q tokens of each.
    """
    of = np.array(parameters)[:, None]
    numbers = np.zeros((*uniform.shape, 6), dtype=np.float32)
    numbers[..., 0], numbers[..., 1], numbers[..., 2:4] = of[..., 0], uniform, of[..., 1:3]
    numbers.view(np.int32)[..., 4] = of[..., 3]
    return numbers.reshape(-1, 6)


@torch.inference_mode()
def sample(logits: Tensor, rows: list[Row]) -> Sampled:
    """The tokens of logits [R, V]."""
    most = max((row.parameters.logprobs for row in rows if row.parameters.logprobs is not None), default=None)
    changes = any(row.parameters.changes_logits for row in rows)
    if most is None and not changes:
        return Sampled(best(logits) if all(row.parameters.greedy for row in rows) else _drawn(logits, rows))
    raw = logits = logits.float()
    first = best(raw)
    if changes:
        logits = _changed(logits, rows)
        first = torch.where(logits.amax(-1) == -torch.inf, -1, first)  # every token is banned
    tokens = torch.where(first < 0, first, _drawn(logits, rows))
    if most is None:
        return Sampled(tokens)
    log = raw.log_softmax(-1)
    values, index = log.topk(min(max(most, 1), log.shape[1]), -1)
    return Sampled(tokens, Logprobs(log.gather(1, tokens.clamp(min=0)[:, None])[:, 0], index, values))


def _drawn(logits: Tensor, rows: list[Row]) -> Tensor:
    numbers = drawing_of([row.parameters.drawing for row in rows], np.array([[row.uniform] for row in rows]))
    t = torch.from_numpy(numbers)
    sent = t.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else t
    return draw(logits, sent, any(row.parameters.filters for row in rows))


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
