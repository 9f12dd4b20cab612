"""``Runner``: a step's work as tensors on the device, and its launch, for decoding as a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.inference.model import Batch, Decoder, Pages, Prompts
from weft.inference.sampling import best, draw, drawing_of, numbers_of
from weft.inference.scheduler import Sequence, Work

GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # sequences for which decoding is captured
UNKNOWN: tuple[Sequence | None, int, int] = (None, 0, 0)
CHECKED = 256  # tokens up to which checking guesses is captured
# steps with prompts that are captured: sequences that decode, tokens of prompts, keys where some are cached
DECODING, TOKENS, KEYS = (0, 8, 32, 64, 128, 256), (64, 128, 256, 384, 512, 768, 1024, 1536, 2048), 8192
SHORT = 16  # tokens of a prompt's part, on average, for which they have room for the most parts


@dataclass
class Graph:
    """Decoding of B sequences as a CUDA graph: its input int64 [B · (2 + 4Q)], the two arrays of ``Runner._numbers`` one behind
    the other, its logits [B · Q, V] and the drawn tokens [B · Q], or of several steps in a row [B, steps]."""

    graph: Any
    given: Tensor
    logits: Tensor
    tokens: Tensor


def parts_of(given: Any, queries: int) -> tuple[Any, Any]:
    """Of a graph's input (an array or a tensor) int64 [B, 2 + Q] and [B · Q, 3]."""
    end = len(given) // (2 + 4 * queries) * (2 + queries)
    return given[:end].reshape(-1, 2 + queries), given[end:].reshape(-1, 3)


class Sizes(NamedTuple):
    """What a step with prompts has, or has room for: sequences that decode, tokens and parts of prompts, and their keys where
    some are cached (else 0)."""

    decoding: int
    tokens: int
    parts: int
    keys: int

    @property
    def fields(self) -> tuple[int, ...]:
        """Numbers of its input: of sequences, of tokens, bounds of queries and of keys, wanted rows, slots of keys."""
        return 3 * self.decoding, 4 * self.tokens, self.parts + 1, self.parts + 1, self.decoding + self.parts, self.keys


@torch.inference_mode()
def captured(launch: Callable[[], tuple[Tensor, ...]], pool: Any, warm: bool = False) -> tuple[Any, tuple[Tensor, ...]]:
    """A CUDA graph of a function, and the tensors that it leaves its results in. ``warm``: such a call ran before."""
    current, stream, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    if not warm:
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            launch()
        current.wait_stream(stream)
    with torch.cuda.graph(graph, pool=pool):
        results = launch()
    return graph, results


class Runner:
    """Holds on the device the page table and the newest token of each running sequence, by its slot; one more slot belongs to
    no sequence and has no pages.

    Args:
        slots: sequences that run at once.
        length: tokens of the longest sequence.
        block: tokens of a page.
    """

    def __init__(self, model: Decoder, pages: Pages, slots: int, length: int, block: int):
        self.model, self.pages, self.block, self.slots = model, pages, block, slots
        self.width = -(-length // block)
        self.device = model.device
        self.table = np.full((slots + 1, self.width), -1, dtype=np.int32)
        self.tables = torch.full((slots + 1, self.width), -1, dtype=torch.int32, device=self.device)
        self.last = torch.zeros(slots + 1, dtype=torch.int64, device=self.device)
        self.known: dict[int, tuple[Sequence, int, int]] = {}  # of each slot: whose pages it has, and how many
        self.graphs: dict[tuple[int, int], dict[int, Graph]] = {}  # of (queries, steps), by sequences
        self.mixed_graphs: dict[Sizes, Any] = {}  # input, graph, results, angles; None: such a step ran once
        self.pool: Any = None
        model.prepare(self.width * block)
        self.angles = model.angles  # what its graphs read, also when another runner asks for more

    # ---- launches ------------------------------------------------------------------------------------------------

    def launch(self, decoding: list[Work], prompts: list[Work], queries: int) -> tuple[Tensor, Tensor | None]:
        """Logits [rows, V] of a step: of the sequences that decode, ``queries`` each, and of the prompts that want a token.
        Where a graph gave them also what it drew, see :meth:`decode`."""
        if not decoding or (prompts and queries == 1):
            return self.mixed(decoding, prompts), None
        logits, drawn = self.decode(decoding, queries)
        return (torch.cat((logits, self.mixed([], prompts))), None) if prompts else (logits, drawn)

    def decode(self, work: list[Work], queries: int = 1) -> tuple[Tensor, Tensor | None]:
        """Logits [B · queries, V] of sequences with one new token, and guesses of the next ones behind it. Of a graph also the
        tokens that their temperatures and random numbers give, [B · queries]; with one query they are stored as the newest."""
        self._update(work)
        numbers, drawing = self._numbers(work, queries)
        if (graph := self._graph(len(work), queries)) is not None:
            self._replay(graph, numbers, drawing)
            return graph.logits[: len(work) * queries], graph.tokens[: len(work) * queries]
        width = self.width if self.device.type == "cuda" else -(-int(numbers[:, 1].max()) // self.block)
        return self.model(self._decoding(self._send(numbers), width), self.pages), None

    def greedy(self, work: list[Work], steps: int) -> Tensor:
        """The next ``steps`` most probable tokens of sequences with one new token, [B, steps]; the keys and values of all but
        the last are in the cache then."""
        if (graph := self._graph(len(work), 1, steps)) is not None:
            self._update(work)
            self._replay(graph, *self._numbers(work, greedy=True))
            return graph.tokens[: len(work)]
        found = []
        for i in range(steps):
            step = [Work(w.sequence, w.start + i, w.end + i, True) for w in work]
            found.append(best(self.decode(step)[0]))
            self.keep(step, found[-1])
        return torch.stack(found, 1)

    def queries(self, count: int, wanted: int) -> int:
        """How many queries of each of so many sequences are to be asked for, at least ``wanted``: what there is a graph for."""
        if wanted == 1:
            return 1
        return next((q for q, _ in sorted(self.graphs) if q >= wanted and self._graph(count, q)), wanted)

    def _numbers(self, work: list[Work], queries: int = 1, greedy: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """int64 [B, 2 + Q]: slot, length, Q tokens, -1 for one that the host does not know; and what the tokens behind them are
        drawn with, float32 [B · Q, 6] of ``drawing_of``, zeros for the most probable ones (of all if ``greedy``)."""
        numbers = np.zeros((len(work), 2 + queries), dtype=np.int64)
        numbers[:, 0] = [w.sequence.slot for w in work]
        numbers[:, 1] = [w.start for w in work]
        numbers[:, 1] += queries
        numbers[:, 2] = [t[w.start] if w.start < len(t := w.sequence.tokens) else -1 for w in work]
        if queries > 1:
            for i, w in enumerate(work):
                numbers[i, 3 : 3 + len(w.draft)] = w.draft
        if greedy or all([w.sequence.greedy for w in work]):
            return numbers, np.zeros((len(work) * queries, 6), dtype=np.float32)
        return numbers, drawing_of([w.sequence.drawing for w in work], numbers_of(work, queries))

    def mixed(self, decoding: list[Work], prompts: list[Work]) -> Tensor:
        """Logits [rows, V]: of the sequences that decode, then of the last token of each part of a prompt that wants one. On a
        GPU the second step of the same rounded sizes is captured, and later ones are replays."""
        self._update([*decoding, *prompts])
        keys = sum([w.end for w in prompts]) if any([w.start for w in prompts]) else 0
        sizes = Sizes(len(decoding), sum([w.end - w.start for w in prompts]), len(prompts), keys)
        room = self._room(sizes)
        numbers, wanted, parts = self._mixed_numbers(decoding, prompts, room or sizes)
        sent = self._send(numbers)
        if room is not None and room in self.mixed_graphs:
            given, graph, results, _ = self._captured(sent, room)
            given.copy_(sent)
            graph.replay()
            return self.model.logits(*(t[:wanted] for t in results))
        batch = self._mixed(sent, room or sizes, wanted)
        if room is not None:
            self.mixed_graphs[room] = None
        elif batch.prompts is not None and (self.device.type == "cpu" or self.model.rows):
            batch.prompts.parts = parts
        if self.device.type == "cpu" and decoding:
            batch.tables = batch.tables[:, : -(-max(w.end for w in decoding) // self.block)]
        return self.model(batch, self.pages)

    def _captured(self, sent: Tensor, room: Sizes) -> Any:
        """The graph of a step that has room, which was launched before."""
        if self.mixed_graphs[room] is None:
            made = captured(lambda: self.model.hidden(self._mixed(sent, room), self.pages), self.pool, warm=True)
            self.mixed_graphs[room] = sent, *made, self.model.angles
        return self.mixed_graphs[room]

    def warm(self, most: int) -> Tensor:
        """Launches steps of all sizes with up to ``most`` tokens of prompts and of no sequence, and captures them, so that no
        request waits for what is compiled or loaded. Logits of one."""
        rooms = [
            Sizes(d, t, t // SHORT, keys) for t in reversed(TOKENS) for d in reversed(DECODING) for keys in (KEYS, 0)
        ]
        longer = [Sizes(1, n, n // SHORT, keys) for n in (most, most - 1) for keys in (0, KEYS)]  # odd: compiled anew
        for sizes in (*rooms, *longer):
            sent = self._send(self._mixed_numbers([], [], sizes)[0])
            logits = self.model(self._mixed(sent, sizes, 2 + sizes.tokens % 2), self.pages)
            if sizes in rooms:
                self.mixed_graphs[sizes] = None
                self._captured(sent, sizes)
        self.model(self._mixed(sent, sizes, 1), self.pages)
        return logits

    def _room(self, sizes: Sizes) -> Sizes | None:
        """The least that is captured and has room for a step; None where it runs as it is."""
        decoding = next((n for n in DECODING if n >= sizes.decoding), None)
        tokens = next((n for n in TOKENS if n >= max(sizes.tokens, sizes.parts * SHORT)), None)
        if self.pool is None or self.model.rows or decoding is None or tokens is None or sizes.keys > KEYS:
            return None
        return Sizes(decoding, tokens, tokens // SHORT, KEYS if sizes.keys else 0)

    def _mixed_numbers(self, decoding: list[Work], prompts: list[Work], room: Sizes) -> tuple[np.ndarray, int, Any]:
        """The input of a step, int64, how many rows are wanted, and :class:`Prompts`' parts. What is left is of no sequence."""
        numbers, wanted, parts, at, key = np.zeros(sum(room.fields), dtype=np.int64), [*range(len(decoding))], [], 0, 0
        sequences, every, cu_q, cu_k, rows, slots = np.split(numbers, np.cumsum(room.fields)[:-1])
        sequences, (tokens, positions, lengths, pages) = sequences.reshape(-1, 3), every.reshape(4, -1)
        sequences[:, 0], pages[:] = self.slots, -1
        sequences[: len(decoding)] = self._numbers(decoding, greedy=True)[0]
        for i, w in enumerate(prompts):
            s, table, own = w.sequence, self.table[w.sequence.slot], slice(at, at + w.end - w.start)
            tokens[own], positions[own] = s.tokens[w.start : w.end], np.arange(w.start, w.end)
            lengths[own], pages[own] = np.maximum(positions[own] + 1, s.prompt), table[positions[own] // self.block]
            if room.keys:
                keys = np.arange(w.end)
                slots[key : key + w.end] = table[keys // self.block].astype(np.int64) * self.block + keys % self.block
            parts.append((own, slice(key, key + w.end) if w.start else None))
            at, key = own.stop, key + w.end
            cu_q[i + 1 :], cu_k[i + 1 :] = at, key
            if w.sample:
                wanted.append(room.decoding + at - 1)
        rows[: len(wanted)] = wanted
        return numbers, len(wanted), parts

    def keep(self, work: list[Work], tokens: Tensor) -> None:
        """Stores the newest token of each sequence where the next step finds it."""
        at = self._send(np.array([w.sequence.slot for w in work], dtype=np.int64))
        self.last.index_copy_(0, at, tokens.clamp(min=0))  # -1: the request ends, but its next step may be in flight

    # ---- tensors -------------------------------------------------------------------------------------------------

    def _send(self, numbers: np.ndarray) -> Tensor:
        t = torch.from_numpy(numbers)
        return t.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else t

    def _decoding(self, sent: Tensor, width: int) -> Batch:
        """Of int64 [B, 2 + Q]: slots, lengths, tokens; a token that the host does not know is -1."""
        slots, tokens = sent[:, 0], sent[:, 2:]
        tokens = torch.where(tokens < 0, self.last[slots][:, None], tokens)
        return Batch(tokens.reshape(-1), sent[:, 1].int().contiguous(), self.tables[slots, :width], tokens.shape[1])

    def _mixed(self, sent: Tensor, room: Sizes, wanted: int | None = None) -> Batch:
        """Of a step's input on the device, and the first ``wanted`` rows (all if None)."""
        sequences, every, cu_q, cu_k, rows, slots = sent.split(room.fields)
        tokens, positions, lengths, pages = every.view(4, -1)
        batch = self._decoding(sequences.view(-1, 3), self.width)
        batch.tokens, batch.rows = torch.cat([batch.tokens, tokens]), rows[:wanted]
        cos, sin = self.model.config.rotary.angles(positions, lengths)
        batch.prompts = Prompts(cos, sin, pages.int()[:, None], (positions % self.block + 1).int(), cu_q.int(), cu_k.int(),
                                slots if room.keys else None)  # fmt: skip
        return batch

    def _update(self, work: list[Work]) -> None:
        """Sends the pages that sequences got since the last step."""
        at: list[int] = []
        pages: list[int] = []
        for w in work:
            s = w.sequence
            owner, admitted, count = self.known.get(s.slot, UNKNOWN)
            if owner is not s or admitted != s.admitted:
                count = 0
            if count < len(s.blocks):
                new = s.blocks[count:]
                self.table[s.slot, count : len(s.blocks)] = new
                at += range(s.slot * self.width + count, s.slot * self.width + len(s.blocks))
                pages += new
                self.known[s.slot] = (s, s.admitted, len(s.blocks))
        if at:
            sent = self._send(np.array([at, pages], dtype=np.int64))
            self.tables.view(-1).index_copy_(0, sent[0], sent[1].int())

    # ---- graphs --------------------------------------------------------------------------------------------------

    def _graph(self, count: int, queries: int, steps: int = 1) -> Graph | None:
        """The smallest that has room for so many sequences."""
        return next((g for size, g in self.graphs.get((queries, steps), {}).items() if size >= count), None)

    def _replay(self, graph: Graph, numbers: np.ndarray, drawing: np.ndarray) -> None:
        count, queries = len(numbers), numbers.shape[1] - 2
        padded = np.zeros(graph.given.shape, dtype=np.int64)
        first, second = parts_of(padded, queries)
        first[:, 0] = self.slots
        first[:count], second.view(np.float32)[: count * queries] = numbers, drawing
        graph.given.copy_(self._send(padded), non_blocking=True)
        graph.graph.replay()

    def capture(self, most: int, queries: int = 1, steps: int = 1) -> None:
        """Captures decoding for up to ``most`` sequences, the largest number first, so that all share its memory. Of several
        ``steps`` each takes the most probable token of the one before."""
        if queries > 1:
            most = min(most, max(CHECKED // queries, 1))
        sizes = sorted({*(size for size in GRAPHS if size < most), most})
        made: dict[int, Graph] = {}
        for size in reversed(sizes):
            given = torch.zeros(size * (2 + 4 * queries), dtype=torch.int64, device=self.device)
            parts_of(given, queries)[0][:, 0] = self.slots

            def launch(given: Tensor = given) -> tuple[Tensor, Tensor]:
                numbers, drawing = parts_of(given, queries)
                found, batch = [], self._decoding(numbers, self.width)
                there = batch.lengths > 0
                for _ in range(steps):
                    logits = self.model(batch, self.pages)
                    found.append(draw(logits, drawing.view(torch.float32), filtered=steps == 1))
                    if queries == 1:
                        newest = found[-1].clamp(min=0)
                        self.last.index_copy_(0, numbers[:, 0], newest)
                        batch = Batch(newest, batch.lengths + there, batch.tables)
                return logits, found[0] if steps == 1 else torch.stack(found, 1)

            graph, (logits, tokens) = captured(launch, self.pool)
            self.pool = graph.pool()
            made[size] = Graph(graph, given, logits, tokens)
        self.graphs[queries, steps] = {size: made[size] for size in sizes}
