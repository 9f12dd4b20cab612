"""Which tokens the next step computes: continuous batching with chunked prefill, and preemption by recomputation."""

from collections import Counter, deque
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from weft.inference.cache import ROOT, Blocks
from weft.inference.parameters import SamplingParameters

CHUNK = 512  # tokens of a prompt at once where results must not depend on the batch


@dataclass(eq=False)
class Sequence:
    """A request. ``tokens`` are those that the host knows; ``pending`` more were sampled on the device by a step in flight."""

    id: str
    prompt: int  # tokens
    tokens: list[int]
    parameters: SamplingParameters
    limit: int  # tokens at which it ends, with the prompt
    seed: int
    root: int = ROOT
    blocks: list[int] = field(default_factory=list)
    slot: int = -1  # row of the device's page tables
    computed: int = 0  # tokens whose keys and values are in the cache, or will be after the step in flight
    published: int = 0  # blocks that others may find
    pending: int = 0
    finished: bool = False
    distinct: frozenset[int] = frozenset()  # tokens of the prompt, where a penalty asks for them
    counts: Counter[int] = field(default_factory=Counter)  # generated tokens, where penalties ask for them
    text: Any = None  # TextStream
    grammar: Any = None
    ends: Collection[int] = ()  # tokens that must not come before ``min_tokens``
    admitted: int = 0  # how often it was started

    def __post_init__(self) -> None:
        p = self.parameters
        self.history = p.needs_history
        self.plain = not (p.changes_logits or p.logprobs is not None)  # its token is drawn of the logits as they are
        self.greedy, self.drawing, self.seed = p.greedy, p.drawing, self.seed % 2**64

    @property
    def length(self) -> int:
        return len(self.tokens) + self.pending


class Work:
    """Tokens ``start`` … ``end`` of a sequence; ``sample`` says that the token behind them is wanted. ``decodes``: it is one
    token with all others in the cache, what ``paged_decode_attention`` is for. ``draft`` are guesses of the tokens behind."""

    __slots__ = ("decodes", "draft", "end", "sample", "sequence", "start")

    def __init__(self, sequence: Sequence, start: int, end: int, sample: bool):
        self.sequence, self.start, self.end, self.sample = sequence, start, end, sample
        self.draft: Items[int] = ()
        self.decodes = end - start == 1 and (sample or start >= sequence.prompt)


class Scheduler:
    """First come, first served; running sequences before waiting ones.

    Args:
        blocks: of the cache.
        most_sequences: that run at once.
        most_tokens: of a step.
        invariant: prompts are cut at multiples of :data:`CHUNK` whatever else there is to do, and what was generated before a
            preemption is computed again token by token, as it was the first time.
    """

    def __init__(self, blocks: Blocks, most_sequences: int, most_tokens: int, invariant: bool = False):
        self.blocks, self.most_tokens, self.invariant = blocks, most_tokens, invariant
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.slots = list(range(most_sequences))[::-1]
        self.preemptions = 0

    def schedule(self, in_flight: bool = False, ahead: int = 0) -> list[Work] | None:
        """The next step's work, which is taken for done: ``computed`` counts it. None if a sequence must be preempted while a
        step is in flight: finish that one and ask again.

        Args:
            ahead: guessed tokens of a decoding sequence that there must be room for.
        """
        budget = self.most_tokens
        work: list[Work] = []
        size = self.blocks.size
        for sequence in list(self.running):  # decode, and prompts that were begun
            done = sequence.computed
            length = len(sequence.tokens) + sequence.pending
            left = length - done
            if left <= 0 or budget <= 0 or sequence.slot < 0 or (sequence.pending and length >= sequence.limit):
                continue
            if left == 1 and done + 1 + ahead <= len(sequence.blocks) * size:  # the usual case of large batches
                work.append(Work(sequence, done, length, True))
                sequence.computed = length
                budget -= 1
                continue
            count = 1 if left == 1 else self._chunk(sequence, left, budget)
            need = sequence.computed + count + (ahead if count == left else 0)
            if need > len(sequence.blocks) * size and not self._grow(sequence, need, in_flight, work):
                if in_flight:
                    for w in work:
                        w.sequence.computed = w.start
                    return None
                continue
            budget -= self._note(work, sequence, count)
        while self.waiting and self.slots and budget > 0:  # prefill
            sequence = self.waiting[0]
            multiple = CHUNK // size if self.invariant else 1
            shared = self.blocks.match(sequence.tokens, sequence.root, multiple)
            need = self.blocks.blocks_for(sequence.length + (ahead + 1 if ahead else 0)) - len(shared)
            found = self.blocks.take(shared, max(need, 0))
            if found is None:
                break
            self.waiting.popleft()
            self.blocks.queries += sequence.length
            self.blocks.hits += len(shared) * size
            sequence.blocks, sequence.published = found, len(shared)
            sequence.computed, sequence.slot = len(shared) * size, self.slots.pop()
            sequence.admitted += 1
            self.running.append(sequence)
            left = sequence.length - sequence.computed
            budget -= self._note(work, sequence, self._chunk(sequence, left, budget))
        return work

    def _chunk(self, sequence: Sequence, left: int, budget: int) -> int:
        if not self.invariant:
            return min(left, budget)
        if sequence.computed >= sequence.prompt:
            return 1
        return min(sequence.prompt - sequence.computed, CHUNK - sequence.computed % CHUNK)

    def _note(self, work: list[Work], sequence: Sequence, count: int) -> int:
        end = sequence.computed + count
        work.append(Work(sequence, sequence.computed, end, end == sequence.length))
        sequence.computed = end
        return count

    def _grow(self, sequence: Sequence, tokens: int, in_flight: bool, work: list[Work]) -> bool:
        """Gives a sequence blocks for so many tokens; preempts the newest sequences, taking theirs, if there are too few."""
        need = self.blocks.blocks_for(tokens) - len(sequence.blocks)
        if need <= 0:
            return True
        while (found := self.blocks.take((), need)) is None:
            if in_flight:
                return False
            newest = self.running[-1]
            self.release(newest)
            self.waiting.appendleft(newest)  # it starts again, ahead of all that wait
            self.preemptions += 1
            work[:] = [w for w in work if w.sequence is not newest]
            if newest is sequence:
                return False
        sequence.blocks += found
        return True

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence out of those that run, or wait; what it had is free."""
        if sequence.slot < 0:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.blocks.give_back(sequence.blocks)
        self.slots.append(sequence.slot)
        sequence.blocks, sequence.slot, sequence.computed, sequence.published = [], -1, 0, 0

    def publish(self, sequence: Sequence) -> None:
        """Lets others find the blocks of known tokens that are computed, after the step that does so was launched."""
        size, blocks = self.blocks.size, sequence.blocks
        while (sequence.published + 1) * size <= min(sequence.computed, len(sequence.tokens)):
            i = sequence.published
            before = blocks[i - 1] if i else None
            self.blocks.publish(blocks[i], before, tuple(sequence.tokens[i * size : (i + 1) * size]), sequence.root)
            sequence.published += 1
