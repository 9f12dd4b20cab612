"""``config.json`` of a Hugging Face folder, as Transformers 4 and 5 write it, as a :class:`ModelConfig`.

A key that this reader does not know may change what the model computes, so it is an error unless its value is null or false.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.inference.rotary import RotaryConfig
from weft.inference.rotary_config import number, read_rotary


@dataclass(frozen=True)
class Experts:
    """Of a mixture-of-experts model."""

    count: int
    per_token: int
    intermediate_size: int
    normalise: bool
    layers: tuple[int, ...]  # which layers have experts; the others have one feed-forward network
    shared_size: int = 0  # hidden width of the expert that every token goes to (Qwen2-MoE)


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder computes. Sizes are in elements."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: RotaryConfig
    norm_eps: float
    max_length: int  # tokens of the longest sequence
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer, in tokens with the newest one; none if empty
    experts: Experts | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    dtype: str = "float32"
    quantization: dict[str, Any] = field(default_factory=dict)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


FAMILIES: dict[str, dict[str, Any]] = {  # model_type: what its class has where config.json says nothing
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "num_key_value_heads": None},
    "mistral": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "qwen2": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128},
    "qwen2_moe": {
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
}  # fmt: skip
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
KNOWN = {  # keys that are read below, or of another model than a decoder's: they change nothing that is computed here
    *SIZES, "model_type", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "tie_word_embeddings", "attention_bias",
    "mlp_bias", "qkv_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "num_experts",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers", "bos_token_id", "eos_token_id", "torch_dtype", "dtype", "quantization_config",
    "original_max_position_embeddings",
    # of training, saving and generating
    "architectures", "attention_dropout", "auto_map", "cache_implementation", "chunk_size_feed_forward", "id2label",
    "initializer_range", "label2id", "name_or_path", "_name_or_path", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "return_dict", "router_aux_loss_coef",
    "sep_token_id", "task_specific_params", "tokenizer_class", "torchscript", "transformers_version", "unk_token_id",
    "use_cache", "_attn_implementation_autoset", "_attn_implementation", "attn_implementation", "rope_interleaved",
    "is_llama_config", "unsloth_version", "unsloth_fixed", "transformers.js_config",
}  # fmt: skip

TYPES: dict[str, type] = {
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias"), bool),
    **dict.fromkeys(("use_sliding_window", "norm_topk_prob"), bool),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), dict),
    **dict.fromkeys(("mlp_only_layers", "layer_types"), list),
}  # fmt: skip
TYPE_NAMES = {bool: "true or false", dict: "an object", list: "a list"}


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a model folder.

    Raises:
        FileNotFoundError: no ``config.json``.
        ValueError: an unknown architecture or key, a value out of range; the message names the key.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; expected a model folder in Hugging Face's format")
    config = config_of(read_object(path), str(path))
    more = Path(folder) / "generation_config.json"
    return with_end_tokens(config, read_object(more)) if more.is_file() else config


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON. Raises ValueError where it is none, or no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}; expected an object")
    return found


def with_end_tokens(config: ModelConfig, generation: dict[str, Any]) -> ModelConfig:
    """With the end tokens that ``generation_config.json`` adds."""
    from dataclasses import replace

    more = _tokens(generation.get("eos_token_id"), "generation_config.json: eos_token_id")
    return replace(config, eos=tuple(dict.fromkeys((*config.eos, *more))))


def config_of(raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """As :func:`read_config`, of the file's contents."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        named = f"model_type {family!r} (architectures: {raw.get('architectures')})"
        raise ValueError(f"{where}: {named} is not supported; expected one of {', '.join(FAMILIES)}")
    for name, value in raw.items():
        if name not in KNOWN and value not in (None, False):
            raise ValueError(
                f"{where}: unknown key {name!r} with value {value!r:.80}; it may change what the model computes. Remove it if "
                "it does not"
            )
        if name in TYPES and value is not None and not isinstance(value, TYPES[name]):
            raise ValueError(f"{where}: {name} is {value!r:.80}; expected {TYPE_NAMES[TYPES[name]]}")
    given = {name: value for name, value in raw.items() if value is not None or name == "sliding_window"}
    values = {**FAMILIES[family], **given}
    for name in SIZES:
        if name not in values:
            raise ValueError(f"{where}: key {name!r} is missing; expected a size")
    size = {name: _count(values[name], f"{where}: {name}") for name in SIZES}
    heads, hidden = size["num_attention_heads"], size["hidden_size"]
    kv_heads = _count(
        heads if values.get("num_key_value_heads") is None else values["num_key_value_heads"],
        f"{where}: num_key_value_heads",
    )
    if heads % kv_heads:
        raise ValueError(
            f"{where}: num_key_value_heads is {kv_heads}; expected a divisor of num_attention_heads = {heads}"
        )
    if values.get("head_dim") is None and hidden % heads:
        raise ValueError(f"{where}: hidden_size {hidden} over {heads} heads is no integer, and there is no head_dim")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"{where}: hidden_act is {values['hidden_act']!r}; expected 'silu'")
    head_dim = _count(hidden // heads if values.get("head_dim") is None else values["head_dim"], f"{where}: head_dim")
    length = _count(values["max_position_embeddings"], f"{where}: max_position_embeddings")
    rotary = read_rotary(values, head_dim, length, where)
    qwen2 = family in ("qwen2", "qwen2_moe")
    offsets = family in ("llama", "qwen3", "qwen3_moe") and bool(values.get("attention_bias", False))
    eps = number(values["rms_norm_eps"], "rms_norm_eps", where) or 0.0
    if eps >= 1:
        raise ValueError(f"{where}: rms_norm_eps is {eps}; expected a small number")
    return ModelConfig(
        family=family, vocab_size=size["vocab_size"], hidden_size=hidden, intermediate_size=size["intermediate_size"],
        layers=size["num_hidden_layers"], heads=heads, kv_heads=kv_heads, head_dim=head_dim, rotary=rotary,
        norm_eps=eps, max_length=rotary.longest(length),
        qkv_bias=bool(values.get("qkv_bias", True)) if qwen2 else offsets, output_bias=offsets,
        mlp_bias=family == "llama" and bool(values.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"), tied=bool(values.get("tie_word_embeddings", False)),
        windows=_windows(values, family, where), experts=_experts(values, family, where), bos=values.get("bos_token_id"),
        eos=_tokens(values.get("eos_token_id"), f"{where}: eos_token_id"),
        dtype=_dtype(values, where), quantization=values.get("quantization_config") or {},
    )  # fmt: skip


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r:.80}; expected an integer of at least 1")
    return value


def _tokens(value: Any, name: str) -> tuple[int, ...]:
    """One end token, a list of them, or none."""
    tokens = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"{name} is {value!r:.80}; expected a token id, or a list of them")
    return tokens


def _dtype(values: dict[str, Any], where: str) -> str:
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"{where}: dtype is {name!r}; expected float32, float16 or bfloat16")
    return name


def _windows(values: dict[str, Any], family: str, where: str) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    window, layers = values.get("sliding_window"), values["num_hidden_layers"]
    if family == "llama" or window is None or (family != "mistral" and not values.get("use_sliding_window", False)):
        return ()
    window = _count(window, f"{where}: sliding_window")
    types = values.get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
            raise ValueError(f"{where}: layer_types is {types!r:.80}; expected {layers} of {known}")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family in ("mistral", "qwen3_moe"):
        return (window,) * layers
    most = number(values.get("max_window_layers", 28), "max_window_layers", where) or 0
    if family == "qwen2_moe":
        return tuple(window if i % 2 == 0 and i < most else None for i in range(layers))
    return tuple(window if i >= most else None for i in range(layers))


def _experts(values: dict[str, Any], family: str, where: str) -> Experts | None:
    if not family.endswith("_moe"):
        return None
    count = _count(values.get("num_local_experts", values["num_experts"]), f"{where}: num_experts")
    each = _count(values["num_experts_per_tok"], f"{where}: num_experts_per_tok")
    if each > count:
        raise ValueError(f"{where}: num_experts_per_tok is {each}; expected at most num_experts = {count}")
    dense, step = values.get("mlp_only_layers") or [], values.get("decoder_sparse_step", 1)
    step = _count(step, f"{where}: decoder_sparse_step")
    layers = tuple(i for i in range(values["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
    return Experts(
        count, each, _count(values["moe_intermediate_size"], f"{where}: moe_intermediate_size"),
        bool(values.get("norm_topk_prob", False)), layers,
        _count(values["shared_expert_intermediate_size"], f"{where}: shared_expert_intermediate_size")
        if family == "qwen2_moe" else 0,
    )  # fmt: skip
