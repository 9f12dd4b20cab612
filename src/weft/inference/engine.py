"""``Engine``: drives model, scheduler, cache and sampler, a step at a time.

One step is launched while the host still reads the results of the one before: a sequence's newest token stays on the device,
from where the next step takes it. Where the host must know a token first (penalties, grammars, speculation), it waits.
"""

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.inference.cache import ROOT, Blocks
from weft.inference.model import Decoder, Pages
from weft.inference.outputs import Output, Stats, TokenLogprobs
from weft.inference.parallel import Ranks
from weft.inference.parameters import SamplingParameters
from weft.inference.runner import Runner
from weft.inference.sampling import Logprobs, Row, Sampled, best, numbers_of, sample
from weft.inference.scheduler import Scheduler, Sequence, Work
from weft.inference.speculation import Speculator
from weft.inference.tokenizer import Tokenizer

BLOCK = 16  # tokens of a cache block
NOT_FINITE = (
    "the model's logits behind {} tokens are not finite numbers, or all 0: weights or activations are too large for {}; "
    "expected finite logits (a wider dtype may give them)"
)
NO_TOKEN = "; or the request's parameters leave no token: min_tokens, stop_token_ids and logit_bias, or the schema"
BESIDE_INVARIANT = "beside batch_invariant: guesses are checked by other kernels; expected one of them"


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Without the autocast and inference modes that a caller may be in: the engine has its own dtypes."""
    with torch.inference_mode(False), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


@dataclass
class Step:
    """A step in flight: what was asked for, how many queries of each decoding sequence, and the results, which are being copied
    to the host."""

    work: list[Work]
    queries: int
    sampled: Sampled
    ready: Any = None  # CUDA event


@dataclass
class EngineConfig:
    """Sizes. Tokens are of all sequences together.

    Args:
        cache_tokens: that the cache has room for.
        most_sequences: that run at once; further ones wait.
        most_tokens: of a step.
        max_length: tokens of the longest sequence, prompt and output; 0 for the model's.
        invariant: a token's bits do not depend on what else is in the batch.
        overlap: launch a step before the last one's results are read.
        graphs: capture decoding as CUDA graphs, on a GPU.
        cache_dtype: of keys and values; the model's if None.
    """

    cache_tokens: int
    most_sequences: int = 256
    most_tokens: int = 8192
    max_length: int = 0
    invariant: bool = False
    overlap: bool = True
    graphs: bool = True
    cache_dtype: torch.dtype | None = None

    @property
    def count(self) -> int:
        """Blocks."""
        return self.cache_tokens // BLOCK

    def runner(self, model: Decoder, ahead: int = 0, ranks: int = 1) -> Runner:
        """A runner with its own cache, whose pages lie as those of any other that is made so."""
        dtype = self.cache_dtype or model.dtype
        pages = Pages.empty(model.config, self.count, BLOCK, dtype, model.device, ranks)
        return Runner(model, pages, self.most_sequences, self.length(model, ahead) + ahead, BLOCK)

    def length(self, model: Decoder, ahead: int = 0) -> int:
        """Tokens of the longest sequence."""
        longest = self.max_length or model.config.max_length
        return min(longest, self.count * BLOCK - ahead)


class Engine:
    """Runs requests on one model. One thread drives it: its methods are not to be called at once.

    Args:
        model: on its device.
        tokenizer: makes the text of outputs; None for token ids alone.
        config: sizes.
        draft: proposes tokens that the model then checks together; None for none.
        exchange: makes ranks agree on tokens (tensor parallelism).
    """

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer | None, config: EngineConfig, *,
        draft: Speculator | None = None, exchange: Ranks | None = None,
    ):  # fmt: skip
        self.model, self.tokenizer, self.config, self.draft, self.exchange = model, tokenizer, config, draft, exchange
        if config.count < 1:
            raise ValueError(f"argument 'cache_tokens' is {config.cache_tokens}; expected at least a block of {BLOCK}")
        if draft is not None and config.invariant:
            raise ValueError(f"argument 'draft' {BESIDE_INVARIANT}")
        self.ahead = 0 if draft is None else draft.most
        self.length = config.length(model, self.ahead)
        self.blocks = Blocks(config.count, BLOCK)
        self.scheduler = Scheduler(self.blocks, config.most_sequences, config.most_tokens, config.invariant)
        self.runner = config.runner(model, self.ahead, 1 if exchange is None else exchange.ranks)
        self.requests: dict[str, Sequence] = {}
        self.in_flight: Step | None = None
        self.outputs: list[Output] = []  # what the next step returns, also where this one raises
        self.counted = Stats()
        if config.graphs and model.device.type == "cuda":
            self.capture(config.most_sequences)

    def capture(self, most: int) -> None:
        """Captures decoding of up to ``most`` sequences as CUDA graphs."""
        self.runner.capture(most)
        if self.draft is not None:
            self.runner.capture(most, 1 + self.draft.most)
            if (small := getattr(self.draft, "runner", None)) is not None:
                small.capture(most, steps=1 + self.draft.most)

    def warm(self) -> None:
        """Compiles and captures what steps with prompts need, so that first requests do not wait; on a CPU, which imports its
        operators with the first step, generates two tokens. On a GPU without graphs nothing."""
        if self.model.device.type == "cpu" and self.length > 4:
            self.add("warm", [0] * 3, SamplingParameters(max_tokens=2, temperature=0, ignore_eos=True), text=False)
            while self.busy():
                self.step()
            self.counted, self.blocks.queries = Stats(), 0
        if self.runner.pool is None or self.model.rows:
            return
        logits = self.runner.warm(self.config.most_tokens)
        for more in ({"temperature": 0}, {}, {"top_p": 0.9}, {"presence_penalty": 1.0, "logprobs": 1}):
            sample(logits, [Row(SamplingParameters(**more), 0.5)] * len(logits))

    # ---- requests ------------------------------------------------------------------------------------------------

    def add(
        self, request_id: str, prompt: list[int], parameters: SamplingParameters, grammar: Any = None, text: bool = True
    ) -> None:
        """Queues a request. ``grammar``: of its JSON schema, where the caller has made it already. Without ``text`` its outputs
        have tokens alone, and stop texts do not end it.

        Raises:
            ValueError: an id that is in use, no prompt, tokens out of range, a prompt that the model or the cache has no room
                for, parameters that cannot be served.
        """
        vocabulary = self.model.config.vocab_size
        if request_id in self.requests:
            raise ValueError(f"request {request_id!r:.80} is there already; expected an id that is not in use")
        if not prompt:
            raise ValueError("argument 'prompt' has no tokens; expected at least one")
        for token in prompt:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise ValueError(f"argument 'prompt' has the token {token!r:.40}; expected ids 0 … {vocabulary - 1}")
        if len(prompt) >= self.length:
            raise ValueError(
                f"argument 'prompt' has {len(prompt)} tokens; expected at most {self.length - 1}, so that one can follow "
                f"(model and cache have room for {self.length})"
            )
        limit = self.length if parameters.max_tokens is None else min(self.length, len(prompt) + parameters.max_tokens)
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(parameters, name) or ():
                if not 0 <= token < vocabulary:
                    raise ValueError(f"argument '{name}' has the token {token}; expected ids 0 … {vocabulary - 1}")
        seed = secrets.randbits(63) if parameters.seed is None else parameters.seed
        root = len(prompt) if self.model.config.rotary.depends_on_length(len(prompt)) else ROOT
        sequence = Sequence(request_id, len(prompt), list(prompt), parameters, limit, seed, root)
        if parameters.repetition_penalty != 1:
            sequence.distinct = frozenset(prompt)
        if text and (parameters.stop or self.tokenizer is not None):
            if self.tokenizer is None:
                raise ValueError("argument 'stop' without a tokenizer; expected stop_token_ids")
            sequence.text = self.tokenizer.stream(parameters.stop)
        if parameters.json_schema is not None:
            from weft.inference.grammar import Grammar

            sequence.grammar = grammar or Grammar.of(self.tokenizer, self.model.config, parameters.json_schema)
        if parameters.min_tokens:
            sequence.ends = {t for t in (*self.model.config.eos, *parameters.stop_token_ids) if t < vocabulary}
        self.requests[request_id] = sequence
        self.scheduler.waiting.append(sequence)
        self.counted.prompt_tokens += len(prompt)

    def abort(self, request_id: str) -> None:
        """Ends a request; the next step says so. One that is not there is left out."""
        if (sequence := self.requests.get(request_id)) is not None:
            self.outputs.append(self._end(sequence, "abort"))

    def busy(self) -> bool:
        return bool(self.requests or self.in_flight or self.outputs)

    @property
    def stats(self) -> Stats:
        s, blocks = self.counted, self.blocks
        s.running, s.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        s.cache_usage, s.preemptions = blocks.used / blocks.count, self.scheduler.preemptions
        s.prefix_queries, s.prefix_hits = blocks.queries, blocks.hits
        return s

    # ---- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Launches a step and returns what came out of the one before (without overlap: of this one)."""
        if torch.is_autocast_enabled(self.model.device.type):
            with without_modes():
                return self.step()
        if not self.config.overlap or self.draft is not None or any(s.history for s in self.scheduler.running):
            self._finish()
        work = self.scheduler.schedule(self.in_flight is not None, self.ahead)
        if work is None:
            self._finish()
            work = self.scheduler.schedule(False, self.ahead)
        launched = self._launch(work) if work else None
        self._finish()
        self.in_flight = launched
        if not (self.config.overlap and self.requests):
            self._finish()
        outputs, self.outputs = self.outputs, []
        return outputs

    def _guess(self, decoding: list[Work], prompts: list[Work]) -> int:
        """Guesses tokens; how many queries of each sequence that decodes are to be asked for."""
        if self.draft is None:
            return 1
        self.draft.follow(prompts)
        for w, guess in zip(decoding, self.draft.guess(decoding) if decoding else (), strict=True):
            s = w.sequence
            w.draft = guess[: s.limit - s.length - 1] if s.grammar is None else []
        return self.runner.queries(len(decoding), 1 + max((len(w.draft) for w in decoding), default=0))

    def _launch(self, work: list[Work]) -> Step:
        """Starts the model and the sampler; nothing waits for the device."""
        decoding = [w for w in work if w.decodes]
        prompts = [w for w in work if not w.decodes]
        work = decoding + prompts
        queries = self._guess(decoding, prompts)
        logits, drawn = self.runner.launch(decoding, prompts, queries)
        wanted = decoding + [w for w in prompts if w.sample]
        plain = all([w.sequence.plain for w in wanted])
        if not wanted:
            sampled = Sampled(torch.empty(0, dtype=torch.int64, device="cpu"))
        elif drawn is not None and plain and self.exchange is None:
            sampled = Sampled(drawn)
        else:
            greedy = plain and all([w.sequence.greedy for w in wanted])
            sampled = Sampled(best(logits)) if greedy else sample(logits, self._rows(wanted, queries))
            if self.exchange is not None:
                self.exchange.agree(sampled.tokens)
            if queries == 1:
                self.runner.keep(wanted, sampled.tokens)
        size = self.blocks.size
        for w in work:
            s = w.sequence
            s.pending += w.sample
            if (s.published + 1) * size <= s.computed:
                self.scheduler.publish(s)
        return self._sent(work, queries, sampled)

    def _rows(self, work: list[Work], queries: int) -> list[Row]:
        """What the sampler must know of each row: ``queries`` of a sequence that decodes, one of a prompt."""
        rows = []
        for w, numbers in zip(work, numbers_of(work, queries).tolist(), strict=True):
            s, p, made = w.sequence, w.sequence.parameters, w.end - w.sequence.prompt
            for i, number in enumerate(numbers[: queries if w.decodes else 1]):
                row = Row(p, number)
                if made + i < p.min_tokens:
                    row.banned = s.ends
                if s.history:
                    row.counts = s.counts + Counter(w.draft[:i]) if i else s.counts
                    row.prompt = s.distinct if p.repetition_penalty != 1 else ()
                    row.allowed = None if s.grammar is None else s.grammar.allowed()
                rows.append(row)
        return rows

    def _sent(self, work: list[Work], queries: int, sampled: Sampled) -> Step:
        if not sampled.tokens.is_cuda:
            return Step(work, queries, sampled)

        def to_host(t: Tensor) -> Tensor:
            return torch.empty(t.shape, dtype=t.dtype, pin_memory=True, device="cpu").copy_(t, non_blocking=True)

        logprobs = None if sampled.logprobs is None else Logprobs._make(map(to_host, sampled.logprobs))
        there = Sampled(to_host(sampled.tokens), logprobs)
        event = torch.cuda.Event()
        event.record()
        return Step(work, queries, there, event)

    def _finish(self) -> None:
        """Waits for the step in flight, if there is one, and gives each sequence its tokens."""
        step, self.in_flight = self.in_flight, None
        if step is None:
            return
        if step.ready is not None:
            step.ready.synchronize()
        tokens, outputs, at = step.sampled.tokens.tolist(), self.outputs, 0
        for w in step.work:
            sequence, first = w.sequence, at
            at += step.queries if w.decodes else w.sample
            if sequence.finished or not w.sample:
                continue
            sequence.pending -= 1
            if not w.draft:
                if sequence.plain and sequence.text is None and tokens[first] >= 0:  # the usual case of large batches
                    outputs.append(self._plain(sequence, tokens[first]))
                else:
                    outputs.append(self._output(sequence, tokens[first : first + 1], step.sampled, first))
                continue
            found, taken = tokens[first:at], 1
            while taken <= len(w.draft) and found[taken - 1] == w.draft[taken - 1]:
                taken += 1
            self.counted.draft_tokens += len(w.draft)
            self.counted.accepted_tokens += taken - 1
            outputs.append(self._output(sequence, found[:taken], step.sampled, first))

    def _output(self, sequence: Sequence, tokens: list[int], sampled: Sampled, row: int) -> Output:
        """Takes new tokens, up to the one that ends the request."""
        if tokens[0] < 0:  # logits that are not finite, or parameters that leave no token
            why = NOT_FINITE.format(len(sequence.tokens), str(self.model.dtype).removeprefix("torch."))
            return self._end(sequence, "error", error=why + NO_TOKEN * sequence.parameters.changes_logits)
        p, text, taken, logprobs, reason, error = sequence.parameters, "", [], [], None, None
        ends = () if p.ignore_eos else self.model.config.eos
        for i, token in enumerate(tokens):
            if token < 0:  # behind guesses that were right: the next step finds it again
                break
            sequence.tokens.append(token)
            taken.append(token)
            if sequence.history:
                sequence.counts[token] += 1
            if p.logprobs is not None and sampled.logprobs is not None:
                logprobs.append(self._logprobs(sampled.logprobs, row + i, token, p.logprobs))
            ended = token in ends or token in p.stop_token_ids
            if sequence.grammar is not None and not ended:
                ended = sequence.grammar.take(token)
                error = sequence.grammar.failure
            if sequence.text is not None and not (token in ends or token in p.stop_token_ids):
                text += sequence.text.add(token)
                ended = ended or sequence.text.stopped
            if error is not None:
                reason = "error"
            elif ended:
                reason = "stop"
            elif len(sequence.tokens) >= sequence.limit:
                reason = "length"
            if reason:
                break
        self.counted.generated_tokens += len(taken)
        sequence.computed += len(taken) - 1  # of guesses that were right
        if reason is None:
            return Output(sequence.id, tuple(taken), text, tuple(logprobs), prompt_tokens=sequence.prompt)
        return self._end(sequence, reason, tuple(taken), text, tuple(logprobs), error)

    def _plain(self, sequence: Sequence, token: int) -> Output:
        """As :meth:`_output`, of one token without text."""
        p, known = sequence.parameters, sequence.tokens
        known.append(token)
        self.counted.generated_tokens += 1
        if (not p.ignore_eos and token in self.model.config.eos) or token in p.stop_token_ids:
            return self._end(sequence, "stop", (token,))
        if len(known) >= sequence.limit:
            return self._end(sequence, "length", (token,))
        return Output(sequence.id, (token,), "", (), None, None, sequence.prompt)

    @staticmethod
    def _logprobs(found: Logprobs, row: int, token: int, count: int) -> TokenLogprobs:
        best = zip(found.best[row, :count].tolist(), found.of_best[row, :count].tolist(), strict=True)
        return TokenLogprobs(token, float(found.of_tokens[row]), tuple(best))

    def _end(
        self, sequence: Sequence, reason: str, tokens: tuple[int, ...] = (), text: str = "",
        logprobs: tuple[TokenLogprobs, ...] = (), error: str | None = None,
    ) -> Output:  # fmt: skip
        """Frees what a sequence has. A step in flight may still write into its blocks, ahead of what comes to use them."""
        if sequence.text is not None:
            text += sequence.text.finish()
        self.scheduler.release(sequence)
        sequence.finished = True
        del self.requests[sequence.id]
        return Output(sequence.id, tokens, text, logprobs, reason, error, prompt_tokens=sequence.prompt)
