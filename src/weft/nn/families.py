"""The families of Hugging Face's models that ``weft.patch`` knows, and the ``forward`` that each of their parts gets instead.

transformers' registry has attention alone for code that is not on its hub, so the other parts get a ``forward`` of their own on
each module, as its ``kernelize`` gives them. Parameters, buffers and classes are left as they are.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.nn.causal_loss import MARK
from weft.nn.projections import GEGLU, GEGLU_TANH, SWIGLU, Gated, gated_projection, hooked, projected, projected_at_once

# B batch, S tokens, H heads of queries, G heads of keys and values, D head dim, R rotated columns

FAMILIES = {  # folder in transformers.models: prefix of its classes
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "gemma": "Gemma", "gemma2": "Gemma2",
    "gemma3": "Gemma3", "phi3": "Phi3",
}  # fmt: skip
PARTS = {  # by a class's last word
    "RMSNorm": "rms_norm", "MLP": "mlp", "Attention": "rotary", "DecoderLayer": "residual", "ForCausalLM": "loss",
}  # fmt: skip
ABOUT_ONE = ("gemma", "gemma2", "gemma3")  # store w for a weight of 1 + w

Forward = Callable[..., Any]


def part_of(module: torch.nn.Module) -> tuple[str, str] | None:
    """The family and the part that a module is; None if it is none. FSDP's classes derive from a model's."""
    for cls in type(module).__mro__:
        where = cls.__module__.split(".")
        if where[:2] == ["transformers", "models"] and len(where) > 2 and where[2] in FAMILIES:
            prefix = FAMILIES[where[2]]
            if cls.__name__.startswith(prefix) and cls.__name__[len(prefix) :] in PARTS:
                return where[2], PARTS[cls.__name__[len(prefix) :]]
    return None


def forward_of(module: torch.nn.Module, family: str, part: str) -> Forward | str:
    """The ``forward`` that replaces the module's; or why there is none."""
    if part == "rms_norm":
        return rms_norm_about_one if family in ABOUT_ONE else rms_norm
    if part == "mlp":
        return _gated(module)
    if part == "rotary":
        return _with_rotary(type(module).forward)
    if part == "residual":
        return _layer(type(module).forward)
    raise ValueError(f"weft.patch: part {part!r}; expected 'rms_norm', 'mlp', 'rotary' or 'residual'")


# ---- normalisation -----------------------------------------------------------------------------------------------------------


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    y: Tensor = ops.rms_norm(hidden_states, *_norm_of(self, hidden_states.dtype))
    return y.to(torch.promote_types(self.weight.dtype, hidden_states.dtype))


def rms_norm_about_one(self: Any, x: Tensor) -> Tensor:
    y: Tensor = ops.rms_norm(x, *_norm_of(self, x.dtype))
    return y


def _norm_of(module: Any, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The weight, as kernels multiply with it, and epsilon."""
    if hasattr(module, "eps"):  # Gemma's
        return 1.0 + module.weight.float(), module.eps
    weight = module.weight
    return weight if weight.dtype in (dtype, torch.float32) else weight.float(), module.variance_epsilon


# ---- a layer: what is added to the residual stream ---------------------------------------------------------------------------

# the modules that a layer calls, in order: what comes behind attention, the second norm, what comes behind the MLP
LAYERS = {
    ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"): (None, "post_attention_layernorm", None),
    ("input_layernorm", "self_attn", "resid_attn_dropout", "post_attention_layernorm", "mlp", "resid_mlp_dropout"): (
        "resid_attn_dropout", "post_attention_layernorm", "resid_mlp_dropout",
    ),
    ("input_layernorm", "self_attn", "post_attention_layernorm", "pre_feedforward_layernorm", "mlp",
     "post_feedforward_layernorm"): (
        "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip


def summed(norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """``norm(h)`` and h = residual + x, in one pass where the norm is a patched one without hooks."""
    ours = getattr(norm, MARK, None) == "rms_norm"
    if not ours or hooked(norm):
        h = x if residual is None else residual + x
        return norm(h), h
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y, h = ops.add_rms_norm(x, residual, *_norm_of(norm, dtype))
    return (y if hasattr(norm, "eps") else y.to(torch.promote_types(norm.weight.dtype, dtype))), h


@functools.cache
def _layer(theirs: Forward) -> Forward | str:
    """A decoder layer in which a norm adds what comes before it."""
    plain: Any = inspect.unwrap(theirs)
    if plain.__code__.co_names not in LAYERS:
        return f"its forward calls {', '.join(plain.__code__.co_names)}, which is no known layer"
    after_attention, second_norm, after_mlp = LAYERS[plain.__code__.co_names]
    names = [*inspect.signature(plain).parameters][2:]

    def forward(self: Any, hidden_states: Tensor, *more: Any, **named: Any) -> Tensor:
        named |= zip(names, more, strict=False)
        y, h = summed(self.input_layernorm, hidden_states, None)
        attended, _ = self.self_attn(hidden_states=y, **named)
        attended = attended if after_attention is None else getattr(self, after_attention)(attended)
        y, h = summed(getattr(self, second_norm), attended, h)
        y = self.mlp(y)
        return h + (y if after_mlp is None else getattr(self, after_mlp)(y))

    return forward


# ---- the gated layers --------------------------------------------------------------------------------------------------------


def _gated_layer(gated: Gated) -> Forward:
    def forward(self: Any, x: Tensor) -> Any:
        return gated_projection(projected(x, self.gate_proj, self.up_proj), self.down_proj, gated)

    return forward


def packed_swiglu(self: Any, hidden_states: Tensor) -> Any:
    return gated_projection(self.gate_up_proj(hidden_states).chunk(2, dim=-1), self.down_proj, SWIGLU)


GATED: dict[tuple[str, bool], Forward] = {  # by activation, and whether both projections are one
    ("silu", False): _gated_layer(SWIGLU), ("silu", True): packed_swiglu, ("gelu", False): _gated_layer(GEGLU),
    ("gelu_pytorch_tanh", False): _gated_layer(GEGLU_TANH),
}  # fmt: skip


def _gated(module: Any) -> Forward | str:
    packed = hasattr(module, "gate_up_proj")
    activation = getattr(module.config, "hidden_activation", None) or module.config.hidden_act
    found = GATED.get((activation, packed))
    return found or f"no gated kernel for the activation {activation!r}"


# ---- rotary embedding --------------------------------------------------------------------------------------------------------


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """transformers' ``apply_rotary_pos_emb`` as its attention calls it: q [B, H, S, D], k [B, G, S, D], tables [B, S, R], whose
    second half repeats the first."""
    half = cos.shape[-1] // 2
    q, k = ops.rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), cos[..., :half], sin[..., :half])
    return q.transpose(1, 2), k.transpose(1, 2)


class Projected:
    """An attention layer in training, whose projections are made already."""

    def __init__(self, module: Any, **made: Any):
        vars(self).update(made, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


def _made(y: Tensor, x: Tensor) -> Tensor:
    return y


@functools.cache
def _with_rotary(theirs: Forward) -> Forward | str:
    """Their attention's ``forward``, in which ``apply_rotary_pos_emb`` is weft's, and q, k and v are projected together. The
    module of their code stays as it is, so that other models of the family do."""
    plain: Any = inspect.unwrap(theirs)
    name = "apply_rotary_pos_emb"
    if not isinstance(plain, FunctionType) or name not in plain.__code__.co_names or name not in plain.__globals__:
        return f"its forward does not call {name}"
    # without __name__: torch.compile would look the function up in the module of that name
    places = {**{key: value for key, value in plain.__globals__.items() if key != "__name__"}, name: rotated}
    made = FunctionType(plain.__code__, places, plain.__name__, plain.__defaults__, plain.__closure__)
    made.__kwdefaults__ = plain.__kwdefaults__
    parameters, names = inspect.signature(plain).parameters, ("q_proj", "k_proj", "v_proj")
    if not {*names} <= {*plain.__code__.co_names}:
        return made

    def forward(self: Any, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        if "past_key_values" in named and "cache" in parameters:  # its name until transformers 5.40
            named["cache"] = named.pop("past_key_values")
        layers = [getattr(self, name) for name in names]
        if projected_at_once(hidden_states, *layers):
            made_already = projected(hidden_states, *layers)
            self = Projected(self, **{n: functools.partial(_made, y) for n, y in zip(names, made_already, strict=True)})
        return made(self, hidden_states, *more, **named)

    return forward
