"""Random ties: the generator's first state from a seed, the same for both engines."""

from __future__ import annotations

import numpy as np

from weft.definition import UnknownName

RULES = ("lowest", "highest", "random")


def check(rule: str) -> str:
    if rule not in RULES:
        raise UnknownName("rule for ties", rule, RULES)
    return rule


def first_state(seed: int) -> int:
    return int(np.random.default_rng(seed).integers(1, 2**62))


def draw(state: int, n: int) -> tuple[int, int]:
    """The next state and a whole number under n (xorshift64*, Vigna 2016)."""
    x, mask = state, 2**64 - 1
    x ^= x >> 12
    x = (x ^ (x << 25)) & mask
    x ^= x >> 27
    return x, ((x * 2685821657736338717 & mask) >> 33) % n
