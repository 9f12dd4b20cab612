"""Other engines on the same prompts, offline: each in a process of its own, whose memory goes with it."""

import math
import time
from typing import Any

from weft.inference.bench.load import Load

PEERS = ("transformers", "vllm")
BATCH = 64  # prompts of a call of generate


def measure(peer: str, model: str, load: Load, device: str, dtype: str, compiled: bool) -> dict[str, Any]:
    """Seconds and output tokens a second of a peer that gets all prompts at once.

    Raises:
        ModuleNotFoundError: it is not installed.
        ValueError: what it cannot compare.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    run = {"transformers": _transformers, "vllm": _vllm}[peer]
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        seconds, how = process.submit(run, model, load, device, dtype, compiled).result()
    made = sum(count for _, count, _ in load.asked(2))
    return {"peer": peer, "how": how, "seconds": seconds, "output_tokens_per_s": made / seconds}


def check(peer: str, model: str, load: Load) -> None:
    """Raises what :func:`measure` would, as far as it is known before anything runs."""
    from importlib.util import find_spec

    from weft.definition import UnknownName
    from weft.inference.gguf import find

    if peer not in PEERS:
        raise UnknownName("peer", peer, PEERS)
    if find_spec(peer) is None:
        raise ModuleNotFoundError(f"--peer {peer} needs {peer}: pip install {peer}", name=peer)
    if not math.isinf(load.rate):
        raise ValueError(f"--peer {peer} gets all prompts at once; expected --rate inf among the rates")
    if peer == "vllm" and find(model) is not None:
        raise ValueError(f"--peer vllm with the GGUF file {model!r}; expected a folder in Hugging Face's format")
    one = all(least == most for least, most in (load.input_tokens, load.output_tokens))
    if peer == "transformers" and not one:
        raise ValueError(
            "--peer transformers would pad requests of several lengths; expected one --input and one --output"
        )


def _transformers(model: str, load: Load, device: str, dtype: str, compiled: bool) -> tuple[float, str]:
    """Hugging Face's generate, in batches, with a static cache."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from weft.inference.gguf import find

    logging.disable_progress_bar()
    loaded: Any
    if (file := find(model)) is None:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    loaded = loaded.to(device).eval()
    asked = torch.tensor([prompt for prompt, *_ in load.asked(loaded.config.vocab_size)], device=device)
    count = load.output_tokens[0]
    options: dict[str, Any] = {
        "max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "cache_implementation": "static",
        "disable_compile": not compiled, "pad_token_id": 0,
    }  # fmt: skip

    def whole() -> float:
        begin = time.perf_counter()
        for part in asked.split(BATCH):
            made = loaded.generate(part, attention_mask=torch.ones_like(part), **options)
            if made.shape[1] != part.shape[1] + count:
                raise RuntimeError(f"generate made {made.shape[1] - part.shape[1]} tokens; expected {count}")
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    if compiled or device == "cuda":
        whole()  # compiles each shape
    how = f"static cache, batches of {min(BATCH, load.requests)}" + (", compiled" if compiled else "")
    return whole(), how


def _vllm(model: str, load: Load, device: str, dtype: str, compiled: bool) -> tuple[float, str]:
    """vLLM's offline engine."""
    import vllm

    llm = vllm.LLM(model, dtype=dtype, enable_prefix_caching=load.shared > 0)
    asked = load.asked(llm.llm_engine.model_config.get_vocab_size())
    each = [vllm.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for _, count, _ in asked]
    prompts: Any = [{"prompt_token_ids": prompt} for prompt, *_ in asked]
    llm.generate(prompts[:1], each[:1], use_tqdm=False)
    begin = time.perf_counter()
    llm.generate(prompts, each, use_tqdm=False)
    return time.perf_counter() - begin, f"vLLM {vllm.__version__}"
