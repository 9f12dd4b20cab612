"""Guesses of the next tokens, which the model then checks in one step: the output is what it would be without them.

A guess is checked by sampling at every position, with that position's own random number, and comparing: whatever the
temperature, each token is drawn from the model's distribution (Leviathan et al. 2023, arXiv 2211.17192, for guesses without
randomness).
"""

from typing import Any, Protocol

import torch

from weft.inference.runner import Runner
from weft.inference.scheduler import Work

LOOKED_AT = 4096  # tokens at the end of a sequence in which an n-gram is looked for


class Speculator(Protocol):
    """``most`` is how many tokens it guesses at once."""

    most: int

    def guess(self, work: list[Work]) -> list[list[int]]:
        """Guesses for sequences that are about to decode, of which the host knows all tokens."""
        ...

    def follow(self, prompts: list[Work]) -> None:
        """Sees the parts of prompts that a step computes."""
        ...


class NGram:
    """What followed the last time that the newest tokens were there (prompt lookup; Saxena 2023)."""

    def __init__(self, most: int = 4, longest: int = 3):
        self.most, self.longest = most, longest

    def guess(self, work: list[Work]) -> list[list[int]]:
        return [self._after(w.sequence.tokens[-LOOKED_AT:]) for w in work]

    def _after(self, tokens: list[int]) -> list[int]:
        for n in range(min(self.longest, len(tokens) - 1), 0, -1):
            newest = tokens[-n:]
            for at in range(len(tokens) - n - 1, -1, -1):
                if tokens[at] == newest[0] and tokens[at : at + n] == newest:
                    return tokens[at + n : at + n + self.most]
        return []

    def follow(self, prompts: list[Work]) -> None:
        pass


class DraftModel:
    """The greedy tokens of a smaller model of the same vocabulary, whose pages lie as the large one's do."""

    def __init__(self, runner: Runner, most: int = 4):
        self.runner, self.most = runner, most

    def guess(self, work: list[Work]) -> list[list[int]]:
        found: list[Any] = []
        for i in range(self.most + 1):  # the last guess is read too, so that its keys are there if it is right
            step = [Work(w.sequence, w.start + i, w.end + i, True) for w in work]
            best = self.runner.decode(step).argmax(-1)
            self.runner.keep(step, best)
            found.append(best)
        return torch.stack(found[:-1], 1).tolist()

    def follow(self, prompts: list[Work]) -> None:
        if prompts:
            self.runner.mixed([], prompts)
