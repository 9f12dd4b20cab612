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

# B batch, S tokens, H heads of queries, G heads of keys and values, D head dim, R rotated columns

FAMILIES = {  # folder in transformers.models: prefix of its classes
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "gemma": "Gemma", "gemma2": "Gemma2",
    "gemma3": "Gemma3", "phi3": "Phi3",
}  # fmt: skip
PARTS = {"RMSNorm": "rms_norm", "MLP": "mlp", "Attention": "rotary", "ForCausalLM": "loss"}  # by a class's last word
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
    raise ValueError(f"weft.patch: part {part!r}; expected 'rms_norm', 'mlp' or 'rotary'")


# ---- normalisation -----------------------------------------------------------------------------------------------------------


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    weight, dtype = self.weight, hidden_states.dtype
    if weight.dtype not in (dtype, torch.float32):
        weight = weight.float()
    y: Tensor = ops.rms_norm(hidden_states, weight, self.variance_epsilon)
    return y.to(torch.promote_types(self.weight.dtype, dtype))


def rms_norm_about_one(self: Any, x: Tensor) -> Tensor:
    y: Tensor = ops.rms_norm(x, 1.0 + self.weight.float(), self.eps)
    return y


# ---- the gated layers --------------------------------------------------------------------------------------------------------


def swiglu(self: Any, x: Tensor) -> Any:
    return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


def geglu(self: Any, x: Tensor) -> Any:
    return self.down_proj(ops.geglu(self.gate_proj(x), self.up_proj(x)))


def geglu_tanh(self: Any, x: Tensor) -> Any:
    return self.down_proj(ops.geglu(self.gate_proj(x), self.up_proj(x), "tanh"))


def packed_swiglu(self: Any, hidden_states: Tensor) -> Any:
    return self.down_proj(ops.swiglu(*self.gate_up_proj(hidden_states).chunk(2, dim=-1)))


GATED: dict[tuple[str, bool], Forward] = {  # by activation, and whether both projections are one
    ("silu", False): swiglu, ("silu", True): packed_swiglu, ("gelu", False): geglu, ("gelu_pytorch_tanh", False): geglu_tanh,
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


@functools.cache
def _with_rotary(theirs: Forward) -> Forward | str:
    """Their attention's ``forward``, in which ``apply_rotary_pos_emb`` is weft's. The module of their code stays as it is, so
    that other models of the family do."""
    plain: Any = inspect.unwrap(theirs)
    name = "apply_rotary_pos_emb"
    if not isinstance(plain, FunctionType) or name not in plain.__code__.co_names or name not in plain.__globals__:
        return f"its forward does not call {name}"
    made = FunctionType(
        plain.__code__, {**plain.__globals__, name: rotated}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    return made
