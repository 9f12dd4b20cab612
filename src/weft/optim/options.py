"""Options that every optimizer has, and the checks of their ranges."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from weft.operators.optimizer.multi_tensor import ROUNDINGS
from weft.operators.optimizer.rules import Options

EVERY: dict[str, Any] = {  # options of every optimizer and their defaults; those of PyTorch's first
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "rounding": "nearest",
    "state_dtype": None,
    "seed": 0,
}
OF_STEPS = ("max_norm", "skip_nonfinite", "zero_grads")  # for all groups at once
FLAGS = (
    "maximize", "capturable", "differentiable", "amsgrad", "nesterov", "decoupled_weight_decay", "skip_nonfinite",
    "zero_grads",
)  # fmt: skip
FLAGS_OR_NONE = ("foreach", "fused", "use_muon")


def check_options(options: Options) -> None:
    """Raises ValueError for one of those options, a learning rate or a weight decay that is out of range; RuntimeError, as
    PyTorch does, for options that exclude each other; TypeError as :func:`check_flags`."""
    check_flags(options)
    check_range("learning rate", options["lr"])
    check_range("weight_decay value", options.get("weight_decay", 0.0))
    seed = options["seed"]
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(2**63) <= int(seed) < 2**63:
        raise ValueError(f"Invalid seed: {seed!r:.40}; expected an int of 64 bits")
    if options["rounding"] not in ROUNDINGS:
        raise ValueError(f"Invalid rounding: {options['rounding']!r}; expected {', '.join(ROUNDINGS)}")
    if options["state_dtype"] not in (None, torch.float32):
        raise ValueError(f"Invalid state_dtype: {options['state_dtype']}; expected None or torch.float32")
    if options["fused"] and options["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`")
    if options["fused"] and options["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")


def check_flags(options: Options) -> None:
    """Raises TypeError for a flag that is not a bool: a string like "no" would count as True."""
    for name in (*FLAGS, *FLAGS_OR_NONE):
        or_none = name in FLAGS_OR_NONE
        value = options.get(name, False)
        if not isinstance(value, bool) and not (or_none and value is None):
            raise TypeError(
                f"Invalid {name}: {value!r:.40}; expected True{', False or None' if or_none else ' or False'}"
            )


def each_once(param_group: dict[str, Any]) -> dict[str, Any]:
    """A group with its parameters in a list, in place of one tensor or an iterator. Sets, and what is no group, are left to
    PyTorch, which refuses them.

    Raises:
        ValueError: a parameter that is there twice.
    """
    params = param_group.get("params") if isinstance(param_group, dict) else None
    if isinstance(params, Tensor):
        params = [params]
    if not isinstance(params, Iterable) or isinstance(params, set):
        return param_group
    params = list(params)
    if len({id(p) for p in map(tensor_of, params)}) < len(params):
        raise ValueError("optimizer contains a parameter group with duplicate parameters; expected each once")
    return {**param_group, "params": params}


def tensor_of(param: Any) -> Any:
    """Of a parameter that comes with its name, or without."""
    return param[1] if isinstance(param, tuple) else param


def check_range(name: str, value: Any, below: float = math.inf) -> None:
    """Raises ValueError unless 0 ≤ value < below, NaN included. Of a tensor on a device only the size is checked."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {'lr' if name == 'learning rate' else name} must be 1-element")
        if value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"Invalid {name}: a tensor of {value.dtype}; expected a number")
        if value.device.type != "cpu":
            return
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"Invalid {name}: {value!r:.40}; expected a number")
    if not 0.0 <= value < below and not (value == below == math.inf):
        raise ValueError(f"Invalid {name}: {value}")


def check_betas(betas: Any) -> None:
    """Raises ValueError unless betas are two numbers of 0 or more and below 1."""
    try:
        first, second = (betas[i] for i in range(len(betas)))  # by index, which a set does not have
    except (TypeError, ValueError, KeyError):
        raise ValueError(f"Invalid betas: {betas!r:.40}; expected two numbers") from None
    check_range("beta parameter at index 0", first, 1.0)
    check_range("beta parameter at index 1", second, 1.0)
