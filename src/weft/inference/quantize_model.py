"""``weft quantize``: a model with its linear layers as codes, written as a folder, and what that costs in perplexity."""

import json
import re
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.inference.checkpoint import Folder
from weft.inference.config import ModelConfig, read_config
from weft.inference.gguf import F32, GgufFile, find, hugging_face_names
from weft.inference.model import Decoder
from weft.inference.perplexity import own_text, perplexity
from weft.inference.quantized import Quantise, Scheme, quantised
from weft.inference.quantized_folder import packed, settings_of, write_folder
from weft.inference.sources import open_model

LINEAR = re.compile(r"(model\.layers\.\d+\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj)\.weight")
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Quality:
    """Of a model whose ``weights`` and ``cache`` have these formats: ``bytes`` that a step with codes
    reads of the weights, ``bits`` of a linear layer's weight with its scales, and perplexity over ``tokens``."""

    weights: str
    cache: str
    bytes: int
    bits: float
    tokens: int
    perplexity: float


def measure(
    model: str | Path, schemes: Items[Scheme | None], *, text: str | None = None, tokens: int = 4096, window: int = 512,
    caches: Items[torch.dtype | None] = (None,), device: str | torch.device | None = None, dtype: torch.dtype | None = None,
) -> list[Quality]:  # fmt: skip
    """The perplexity of a model under each scheme (None: its weights as they are stored) and cache dtype.

    Args:
        text: that is predicted; the course's lessons if None.
        tokens: of it, from its beginning.
        window: tokens that are predicted from one another.

    Raises:
        ValueError: a text of fewer than two tokens.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = []
    for scheme in schemes:
        config, source, tokenizer = open_model(model)
        kind = dtype or (getattr(torch, config.dtype) if device.type == "cuda" else torch.float32)
        decoder = Decoder(config, source, device, kind, quantise=None if scheme is None else Quantise(scheme))
        ids = tokenizer.encode(own_text() if text is None else text)[:tokens]
        for cache in caches:
            p = perplexity(decoder, ids, window=window, cache_dtype=cache)
            stored = str(cache or kind).removeprefix("torch.")
            weights = "as stored" if scheme is None else str(scheme)
            found.append(Quality(weights, stored, _bytes(decoder), _bits(decoder), p.tokens, p.value))
    return found


def _bytes(decoder: Decoder) -> int:
    layers: list[Any] = [*decoder.linears(), decoder.head]
    return decoder.bytes + sum(t.weight.nbytes - t.bytes for t in layers)


def _bits(decoder: Decoder) -> float:
    layers: list[Any] = list(decoder.linears())
    sizes = [
        t.weight.words.shape[0] * t.weight.columns if hasattr(t.weight, "words") else t.weight.numel() for t in layers
    ]
    return 8 * sum(t.weight.nbytes for t in layers) / max(sum(sizes), 1)


def write(model: str | Path, out: str | Path, scheme: Scheme, device: str | torch.device | None = None) -> int:
    """Writes a folder whose linear layers are codes, in compressed-tensors' format; embedding, norms and head stay as they
    are, or are bfloat16 if the model is a GGUF file whose embedding is not float32.

    Returns:
        Bytes of its weights.

    Raises:
        FileExistsError: ``out`` is not empty.
        ValueError: a model that is quantised already, a mixture of experts, columns that groups do not divide.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config, raw, tensors, files = _parts(model)
    if config.quantization:
        raise ValueError(
            f"{model} is quantised already, by {config.quantization.get('quant_method')!r}; expected float weights"
        )
    if config.experts is not None:
        raise ValueError(f"{model} is a mixture of experts; expected a dense model")
    columns = (config.hidden_size, config.intermediate_size, config.heads * config.head_dim)
    group = min(scheme.group_of(k) for k in columns)
    one = replace(scheme, group=group)

    def made() -> Iterator[tuple[str, Tensor]]:
        for name, t in tensors:
            layer = LINEAR.fullmatch(name)
            if layer is None:
                yield name, t
            else:
                yield from packed(quantised(t.to(device), one), layer[1]).items()

    return write_folder(out, {**raw, "quantization_config": settings_of(one, group)}, made(), files)


def _parts(
    model: str | Path,
) -> tuple[ModelConfig, dict[str, Any], Iterator[tuple[str, Tensor]], dict[str, str | bytes]]:
    """Configuration, ``config.json``, tensors by Hugging Face's names, other files."""
    if (path := find(model)) is not None:
        file = GgufFile(path)
        tokenizer = file.tokenizer()
        settings = {
            **tokenizer.special,
            "chat_template": tokenizer.template,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        family = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[file.raw["model_type"]]
        dtype = torch.float32 if file.stored["token_embd.weight"].kind == F32 else torch.bfloat16
        name = str(dtype).removeprefix("torch.")
        raw = {"architectures": [f"{family}ForCausalLM"], **file.raw, "torch_dtype": name}

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for ours, theirs in hugging_face_names(file.stored).items():
                t = file.load(theirs)
                yield ours, t if LINEAR.fullmatch(ours) else t.to(dtype)

        return file.config(), raw, tensors(), {
            "tokenizer.json": tokenizer.backend.to_str(), "tokenizer_config.json": json.dumps(settings, indent=2),
        }  # fmt: skip
    folder = Path(model)
    config, source = read_config(folder), Folder(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names_ = {name if name.startswith(("model.", "lm_head.")) else f"model.{name}": name for name in source.names()}
    templates = [str(path.relative_to(folder)) for path in (folder / "additional_chat_templates").glob("*.jinja")]
    copied = [name for name in (*COPIED, *templates) if (folder / name).is_file()]
    files: dict[str, str | bytes] = {name: (folder / name).read_bytes() for name in copied}
    return config, raw, ((ours, source.load(theirs)) for ours, theirs in names_.items()), files
