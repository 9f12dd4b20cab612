"""Guesses of the next tokens, which the model then checks in one step: the output is what it would be without them.

A guess is checked by sampling at every position, with that position's own random number, and comparing: whatever the
temperature, each token is drawn from the model's distribution (Leviathan et al. 2023, arXiv 2211.17192, for guesses without
randomness).
"""

from typing import Protocol
from weakref import WeakKeyDictionary

from weft.inference.runner import Runner
from weft.inference.scheduler import Sequence, Work


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
        # how many of a sequence's tokens were looked at, and where each of their n-grams ended the last time
        self.seen: WeakKeyDictionary[Sequence, tuple[int, dict[tuple[int, ...], int]]] = WeakKeyDictionary()

    def guess(self, work: list[Work]) -> list[list[int]]:
        return [self._after(w.sequence) for w in work]

    def _after(self, sequence: Sequence) -> list[int]:
        tokens = sequence.tokens
        known, ends = self.seen.get(sequence, (1, {}))
        for end in range(known, len(tokens)):  # n-grams that something follows
            for n in range(1, min(self.longest, end) + 1):
                ends[tuple(tokens[end - n : end])] = end
        self.seen[sequence] = len(tokens), ends
        for n in range(min(self.longest, len(tokens) - 1), 0, -1):
            if (at := ends.get(tuple(tokens[-n:]))) is not None:
                found = tokens[at : at + self.most]
                while len(found) < self.most:  # it repeats itself
                    found.append(found[at - len(tokens)])
                return found
        return []

    def follow(self, prompts: list[Work]) -> None:
        pass


class DraftModel:
    """The greedy tokens of a smaller model of the same vocabulary, whose pages lie as the large one's do."""

    def __init__(self, runner: Runner, most: int = 4):
        self.runner, self.most = runner, most

    def guess(self, work: list[Work]) -> list[list[int]]:
        guesses: list[list[int]] = self.runner.greedy(work, self.most + 1)[:, :-1].tolist()
        return guesses  # the last one was read too, so that its keys are there if it is right

    def follow(self, prompts: list[Work]) -> None:
        if prompts:
            self.runner.mixed([], prompts)
