"""Optimizer state: making it, saving it as PyTorch has it, and loading it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from weft.operators.call import FLOATS
from weft.operators.optimizer.call import same_order
from weft.operators.optimizer.rule import Rule
from weft.optim import codes
from weft.optim.codes import local
from weft.optim.part import Part

Pairs = list[tuple[dict[str, Any], Tensor]]


def complete(state: dict[str, Any], p: Tensor, group: dict[str, Any], rule: Rule, engine: bool) -> dict[str, Any]:
    """Adds what a state lacks. States of a device, dtype or order other than the engine can use are replaced.

    Raises:
        ValueError: a state of another shape than the parameter now has.
    """
    for name, value in of_another_shape(state, p):
        raise ValueError(
            f"the state '{name}' has the shape {tuple(value.shape)}, and its parameter {tuple(p.shape)}; expected the same: "
            "clear optimizer.state for parameters that were given another shape"
        )
    seen = any(name in state for name in rule.states(group))  # saved by an optimizer that may not count
    codes.convert(state, p, group, rule)
    wanted = {} if codes.is_coded(p, group) else dict.fromkeys(rule.states(group), state_dtype(p, group))
    if group["rounding"] == "split":
        wanted["lower_bits"] = torch.int16
    if rule.counted(group) or group["rounding"] == "stochastic":
        if "step" not in state:
            on = local(p).device if engine or group["capturable"] or group["fused"] else "cpu"
            state["step"] = 1.0 if engine and seen else 0.0 if engine else torch.tensor(float(seen), device=on)
        elif not engine and not isinstance(state["step"], Tensor):
            state["step"] = torch.tensor(float(state["step"]))
    for name, dtype in wanted.items():
        known = state.get(name)
        if known is None:
            state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        elif not engine:
            if known.dtype != dtype:  # a state that is set anew makes all tables anew
                state[name] = known.to(dtype)
        elif not (
            known.dtype == dtype and local(known).device == local(p).device and same_order(local(p), local(known))
        ):
            state[name] = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format).copy_(known)
    return state


def state_dtype(p: Tensor, group: dict[str, Any]) -> torch.dtype:
    """Of states of the weight's shape."""
    asked: torch.dtype | None = group["state_dtype"] if p.dtype in FLOATS else None
    return asked or p.dtype


def export(packed: dict[str, Any], parts: list[Part]) -> dict[str, Any]:
    """Plain dictionaries; counts of steps on the CPU where PyTorch has them there, fetched together."""
    on_host: dict[int, Tensor] = {}
    for part in parts:
        for step, mine in zip(part.counts.cpu().clone().unbind(), part.table.entries, strict=True):
            if mine.step is not None:
                on_host[id(mine.step)] = step
    stay = {i for g in packed["param_groups"] if g.get("capturable") or g.get("fused") for i in g["params"]}
    states = {}
    for i, state in packed["state"].items():
        states[i] = dict(state) if isinstance(state, dict) else state
        if isinstance(state, dict) and isinstance(state.get("step"), Tensor):
            step = state["step"]
            states[i]["step"] = step.clone() if i in stay else on_host.get(id(step), step)
    return {**packed, "state": states}


def of_another_shape(state: dict[str, Any], p: Tensor) -> list[tuple[str, Tensor]]:
    """States that should have the parameter's shape and do not, with their names."""
    return [
        (name, value)
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step" and not name.endswith("_scales") and value.shape != p.shape
    ]


def load(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], prepare: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """``Optimizer.load_state_dict`` of what ``prepare`` makes of the state dict or refuses, before anything is loaded."""

    def hook(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        return prepare(given)

    last = optimizer.register_load_state_dict_pre_hook(hook)  # a user's own may have renamed what it loads
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        last.remove()


def pairs_of(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> Pairs:
    """The states of a state dict, each with the parameter that it is for; other numbers of parameters PyTorch refuses."""
    order = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in given["param_groups"] for i in group["params"]]
    return [(given["state"].get(i, {}), p) for i, p in zip(ids, order, strict=False)]


def names_of(rule: Rule, group: dict[str, Any]) -> tuple[str, ...]:
    """Of what a rule keeps, the number of steps included."""
    return (*rule.states(group), *(("step",) if rule.counted(group) else ()))


def check(pairs: Pairs, kept: Iterable[tuple[str, ...]], may_lack: tuple[str, ...] = ()) -> None:
    """Raises ValueError for a state of another shape than its parameter, that is there in part, or of which something is not
    what it is called.

    Args:
        kept: names of what belongs to each parameter's state (as codes and scales they may be there, too).
        may_lack: what may be missing.
    """
    for i, ((state, p), names) in enumerate(zip(pairs, kept, strict=False)):
        told = f"loaded state dict, parameter {i}:"
        for name, unlike_its in of_another_shape(state, p):
            raise ValueError(
                f"{told} '{name}' has the shape {tuple(unlike_its.shape)}; expected {tuple(p.shape)}, the parameter's"
            )
        if not state:
            continue  # of a parameter that has had no gradient
        wanted = []
        for name in names:
            coded = f"{name}_codes" in state or f"{name}_scales" in state
            wanted += [f"{name}_codes", f"{name}_scales"] if coded and name not in state else [name]
        for name in wanted:
            if name not in state and name not in may_lack:
                raise ValueError(f"{told} '{name}' is missing; there are {', '.join(map(repr, state))}")
        for name in (*names, *wanted, "step", "lower_bits"):
            value = state.get(name)
            if name not in state or (value is None and name in may_lack):
                continue
            if expected := unlike(name, value):
                came = (
                    f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
                    if isinstance(value, Tensor)
                    else repr(value)
                )
                raise ValueError(f"{told} '{name}' is {came:.80}; expected {expected}")


def without_codes(given: dict[str, Any]) -> dict[str, Any]:
    """A state dict for an optimizer that keeps no moments in 8 bits: its groups without the options of those that do.

    Raises:
        ValueError: a state that has codes.
    """
    for i, state in given["state"].items():
        if coded := [name for name in state if str(name).endswith("_codes")]:
            raise ValueError(
                f"loaded state dict, parameter {i}: '{coded[0]}' is a moment in 8 bits; expected moments of 32 bits, which "
                "torch_state_dict() of the optimizer that saved it gives"
            )
    return {**given, "param_groups": [codes.without_options(group) for group in given["param_groups"]]}


def unlike(name: str, value: Any) -> str:
    """What a state of this name should be (an empty string where it is)."""
    if name == "step":
        number = not isinstance(value, bool) and isinstance(value, (int, float))
        one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
        return "" if number or one else "a number, or a tensor of one"
    exact = {"lower_bits": torch.int16}.get(name, torch.uint8 if name.endswith("_codes") else None)
    if exact is not None:
        return "" if isinstance(value, Tensor) and value.dtype == exact else f"a tensor of {exact}"
    floats = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return "" if floats else "a tensor of floating-point numbers"


def kept_dtype(name: str, p: Tensor, group: dict[str, Any]) -> torch.dtype:
    if name == "lower_bits":
        return torch.int16
    if name.endswith("_codes"):
        return torch.uint8
    return torch.float32 if name.endswith("_scales") else state_dtype(p, group)


def keep_dtypes(pairs: Pairs, states: Any, groups: list[dict[str, Any]]) -> None:
    """PyTorch casts what it loads to the weight's dtype; states that are kept in another are loaded again."""
    options = {id(p): group for group in groups for p in group["params"]}
    for saved, p in pairs:
        for name, value in saved.items():
            if not isinstance(value, Tensor) or name == "step":
                continue
            wanted = kept_dtype(name, p, options[id(p)])
            if wanted != p.dtype:
                states[p][name] = value.to(local(p).device, wanted, copy=True)
