"""Optimizer state: making it, noticing that it was replaced, saving it as PyTorch has it, and loading it.

8-bit moments: a state of the rule named ``exp_avg`` is then ``exp_avg_codes`` (uint8, of the weight's shape) and
``exp_avg_scales`` (fp32, one for each block of neighbours in memory); ``exp_avg`` is always the name of a moment itself, as in
``torch.optim``.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.operators.call import FLOATS
from weft.operators.layout import dense
from weft.operators.optimizer.blockwise import blocks_of, dequantize, quantize
from weft.operators.optimizer.multi_tensor import Codes, same_order
from weft.operators.optimizer.rules import Rule

CODE_OPTIONS = ("state_format", "block_size", "min_8bit_size", "code_rounding")  # of optimizers with 8-bit moments
Pairs = list[tuple[dict[str, Any], Tensor]]  # a loaded state, and its parameter


def local(t: Tensor) -> Tensor:
    """A DTensor's shard on this rank; any other tensor itself."""
    return getattr(t, "_local_tensor", t)


# ---- dictionaries that record changes --------------------------------------------------------------------------------
#
# A step must not look every state up again (that costs more than the launch), and must not use one that a caller has replaced
# (moved to the CPU and back, say). So any change of a dictionary marks the optimizer's table as outdated.


class Changes:
    """Whether anything was changed since the table was made."""

    def __init__(self, changed: bool = False) -> None:
        self.changed = changed


class ParameterState(dict[str, Any]):
    """One parameter's state. Pickled and copied as a plain dictionary."""

    changes = Changes()  # until the optimizer sets its own

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class States(defaultdict[Any, Any]):
    """All parameters' states, by parameter; a missing one is empty, as in PyTorch."""

    def __init__(self, states: Any, changes: Changes):
        super().__init__(dict, states)
        self.changes = changes

    def __missing__(self, key: Any) -> ParameterState:
        state = ParameterState()
        state.changes = self.changes
        self[key] = state  # which records the change
        return state

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return defaultdict(dict, self)

    __copy__ = copy  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def _recording(kind: type, name: str) -> Callable[..., Any]:
    method = getattr(kind, name)

    def changing(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.changes.changed = True
        return method(self, *args, **kwargs)

    return changing


for _kind in (ParameterState, States):
    for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
        setattr(_kind, _name, _recording(_kind.__mro__[1], _name))


def watch(states: Any, changes: Changes) -> States:
    """The same states, whose changes are recorded in ``changes``; the same object where it records them already."""
    if not isinstance(states, States):
        states = States(states, changes)
    states.changes = changes
    for key, state in states.items():
        if type(state) is dict:
            states[key] = state = ParameterState(state)
        if isinstance(state, ParameterState):
            state.changes = changes
    changes.changed = False
    return states


# ---- making it -------------------------------------------------------------------------------------------------------


def complete(state: dict[str, Any], p: Tensor, group: dict[str, Any], rule: Rule, kernel: bool) -> dict[str, Any]:
    """Adds what a state lacks. States of a device, dtype or order other than the kernel can use are replaced.

    Raises:
        ValueError: a state of another shape than the parameter now has.
    """
    for name, value in of_another_shape(state, p):
        raise ValueError(
            f"the state '{name}' has the shape {tuple(value.shape)}, and its parameter {tuple(p.shape)}; expected the same: "
            "clear optimizer.state for parameters that were given another shape"
        )
    begun = any(name in state for name in rule.states(group))  # saved by an optimizer that may not count
    convert(state, p, group, rule)
    wanted = {} if has_codes(p, group) else dict.fromkeys(rule.states(group), state_dtype(p, group))
    if group["rounding"] == "split":
        wanted["lower_bits"] = torch.int16
    if rule.counted(group) or group["rounding"] == "stochastic":
        if "step" not in state:
            device = local(p).device if kernel or group["capturable"] or group["fused"] else "cpu"
            state["step"] = float(begun) if kernel else torch.tensor(float(begun), dtype=torch.float32, device=device)
        elif not kernel and not isinstance(state["step"], Tensor):
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")
    for name, dtype in wanted.items():
        known = state.get(name)
        if known is None:
            state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        elif not kernel:
            if known.dtype != dtype:  # a state that is set anew makes all tables anew
                state[name] = known.to(dtype)
        elif not (
            known.dtype == dtype and local(known).device == local(p).device and same_order(local(p), local(known))
        ):
            state[name] = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format).copy_(known)
    return state


def state_dtype(p: Tensor, group: dict[str, Any]) -> torch.dtype:
    """Of states of the weight's shape."""
    option: torch.dtype | None = group["state_dtype"] if p.dtype in FLOATS else None
    return option or p.dtype


def of_another_shape(state: dict[str, Any], p: Tensor) -> list[tuple[str, Tensor]]:
    """States that should have the parameter's shape and do not, with their names."""
    return [
        (name, value)
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step" and not name.endswith("_scales") and value.shape != p.shape
    ]


# ---- 8-bit moments ---------------------------------------------------------------------------------------------------


def has_codes(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether this parameter's states are in 8 bits."""
    return "state_format" in group and p.dtype in FLOATS and local(p).numel() >= group["min_8bit_size"]


def codes_of(state: dict[str, Any], p: Tensor, group: dict[str, Any], rule: Rule) -> Codes | None:
    """How a parameter's codes are to be read; None where it has none."""
    if not has_codes(p, group):
        return None
    scales = tuple(state[f"{name}_scales"] for name in rule.states(group))
    return Codes(scales, group["block_size"], group["state_format"], group["code_rounding"] == "stochastic")


def moment(state: dict[str, Any], name: str, group: dict[str, Any], rule: Rule) -> Tensor:
    """The moment that codes represent, fp32."""
    codes, scales = local(state[f"{name}_codes"]), state[f"{name}_scales"]
    check_scales(name, codes, scales, group)
    signed = name not in rule.positive(group)
    return dequantize(codes, scales.to(codes.device), group["block_size"], signed, group["state_format"])


def check_scales(name: str, codes: Tensor, scales: Tensor, group: dict[str, Any]) -> None:
    """Raises ValueError unless there is one scale for each block: the kernel would read and write past the last one."""
    wanted = blocks_of(codes.numel(), group["block_size"])
    if scales.shape != (wanted,):
        blocks = f"{len(scales)} blocks" if scales.ndim == 1 else f"the shape {tuple(scales.shape)}"
        raise ValueError(
            f"'{name}_scales' has {blocks} for {codes.numel()} elements; expected {wanted}, of {group['block_size']} elements "
            "each: block_size is that of the state, from the first step on"
        )


def convert(state: dict[str, Any], p: Tensor, group: dict[str, Any], rule: Rule) -> None:
    """Converts a state's moments to codes, or codes to moments, as the group's options say for this parameter."""
    coded = has_codes(p, group)
    for name in rule.states(group):
        codes = state.get(f"{name}_codes")
        if codes is not None:
            mine, scales = local(codes), state[f"{name}_scales"]
            check_scales(name, mine, scales, group)
            if coded and same_order(local(p), mine) and mine.device == local(p).device and dense(mine):
                usable = scales.to(mine.device, torch.float32).contiguous()
                if usable is not scales:
                    state[f"{name}_scales"] = usable
                continue
            state[name] = moment(state, name, group, rule)
            del state[f"{name}_codes"], state[f"{name}_scales"]
        if coded:
            _to_codes(state, name, p, group, signed=name not in rule.positive(group))


def _to_codes(state: dict[str, Any], name: str, p: Tensor, group: dict[str, Any], signed: bool) -> None:
    """Replaces a moment (0 where there is none) by codes."""
    x = state.pop(name, None)
    codes = torch.zeros_like(p, dtype=torch.uint8, memory_format=torch.preserve_format)
    scales = torch.zeros(blocks_of(local(p).numel(), group["block_size"]), dtype=torch.float32, device=local(p).device)
    wide = torch.zeros_like(local(p), dtype=torch.float32) if x is None else local(x).to(scales.device, torch.float32)
    quantize(wide, local(codes), scales, group["block_size"], signed, group["state_format"])
    state[f"{name}_codes"], state[f"{name}_scales"] = codes, scales


class Formats:
    """In which format each parameter's codes were written: the bytes look the same in either."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}  # by the parameter's id

    def note(self, p: Tensor, group: dict[str, Any]) -> None:
        """From now on the parameter's codes are of the group's format."""
        if "state_format" in group:
            self.known[id(p)] = group["state_format"]

    def check(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Raises ValueError where a state has codes of another format than the group's."""
        written = self.known.get(id(p))
        if written in (None, group.get("state_format")) or not any(name.endswith("_codes") for name in state):
            return
        raise ValueError(
            f"state_format is {group['state_format']!r}, and the state of a parameter of shape {tuple(p.shape)} has codes of "
            f"{written!r}; expected {written!r}: state_format is that of the state, from the first step on"
        )


# ---- saving ----------------------------------------------------------------------------------------------------------


def export(packed: dict[str, Any], parts: Sequence[Any]) -> dict[str, Any]:
    """Plain dictionaries; counts of steps on the CPU where PyTorch has them there, copied together.

    Args:
        parts: of the optimizer, which have the counts.
    """
    on_host: dict[int, Tensor] = {}
    for part in parts:
        for step, entry in zip(part.counts.cpu().clone().unbind(), part.table.entries, strict=True):
            if entry.step is not None:
                on_host[id(entry.step)] = step
    on_device = {i for g in packed["param_groups"] if g.get("capturable") or g.get("fused") for i in g["params"]}
    states = {}
    for i, state in packed["state"].items():
        states[i] = dict(state) if isinstance(state, dict) else state
        if isinstance(state, dict) and isinstance(state.get("step"), Tensor):
            step = state["step"]
            states[i]["step"] = step.clone() if i in on_device else on_host.get(id(step), step)
    return {**packed, "state": states}


def without_code_options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in CODE_OPTIONS}


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], prepare: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """``Optimizer.load_state_dict`` of the state dict that ``prepare`` returns or refuses, before anything is loaded."""
    # as a hook, the last one: a user's own may have renamed what it loads
    last = optimizer.register_load_state_dict_pre_hook(lambda _, given: prepare(given))
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        last.remove()


def pairs_of(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> Pairs:
    """The states of a state dict with their parameters; PyTorch refuses another number of parameters."""
    order = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in given["param_groups"] for i in group["params"]]
    return [(given["state"].get(i, {}), p) for i, p in zip(ids, order, strict=False)]


def names_of(rule: Rule, group: dict[str, Any]) -> tuple[str, ...]:
    """Of a rule's states, the number of steps included."""
    return (*rule.states(group), *(("step",) if rule.counted(group) else ()))


def check(pairs: Pairs, names: Iterable[tuple[str, ...]], may_lack: tuple[str, ...] = ()) -> None:
    """Raises ValueError for a state of another shape than its parameter, an incomplete one, or one with a value that is not
    what its name says.

    Args:
        names: of each parameter's state (there may be codes and scales instead).
        may_lack: what may be missing.
    """
    for i, ((state, p), expected) in enumerate(zip(pairs, names, strict=False)):
        where = f"loaded state dict, parameter {i}:"
        for name, tensor in of_another_shape(state, p):
            raise ValueError(
                f"{where} '{name}' has the shape {tuple(tensor.shape)}; expected {tuple(p.shape)}, the parameter's"
            )
        if not state:
            continue  # of a parameter that has had no gradient
        wanted = []
        for name in expected:
            coded = f"{name}_codes" in state or f"{name}_scales" in state
            wanted += [f"{name}_codes", f"{name}_scales"] if coded and name not in state else [name]
        for name in wanted:
            if name not in state and name not in may_lack:
                raise ValueError(f"{where} '{name}' is missing; there are {', '.join(map(repr, state))}")
        for name in (*expected, *wanted, "step", "lower_bits"):
            value = state.get(name)
            if name not in state or (value is None and name in may_lack):
                continue
            if right := unlike(name, value):
                came = repr(value)
                if isinstance(value, Tensor):
                    came = f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
                raise ValueError(f"{where} '{name}' is {came:.80}; expected {right}")


def without_codes(given: dict[str, Any]) -> dict[str, Any]:
    """A state dict for an optimizer without 8-bit moments: its groups without the options of those that have them.

    Raises:
        ValueError: a state that has codes.
    """
    for i, state in given["state"].items():
        if coded := [name for name in state if str(name).endswith("_codes")]:
            raise ValueError(
                f"loaded state dict, parameter {i}: '{coded[0]}' is a moment in 8 bits; expected moments of 32 bits, which "
                "torch_state_dict() of the optimizer that saved it gives"
            )
    return {**given, "param_groups": [without_code_options(group) for group in given["param_groups"]]}


def unlike(name: str, value: Any) -> str:
    """What a state of this name should be ("" where it is)."""
    if name == "step":
        number = not isinstance(value, bool) and isinstance(value, (int, float))
        one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
        return "" if number or one else "a number, or a tensor of one"
    exact = {"lower_bits": torch.int16}.get(name, torch.uint8 if name.endswith("_codes") else None)
    if exact is not None:
        return "" if isinstance(value, Tensor) and value.dtype == exact else f"a tensor of {exact}"
    floats = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return "" if floats else "a tensor of floating-point numbers"


def restore_dtypes(pairs: Pairs, states: Any, groups: list[dict[str, Any]]) -> None:
    """PyTorch casts what it loads to the weight's dtype; states of another dtype are loaded again."""
    options = {id(p): group for group in groups for p in group["params"]}
    for saved, p in pairs:
        for name, value in saved.items():
            if not isinstance(value, Tensor) or name == "step":
                continue
            exact = {"lower_bits": torch.int16, "codes": torch.uint8, "scales": torch.float32}
            kind = name if name == "lower_bits" else name.rpartition("_")[2]
            wanted = exact.get(kind) or state_dtype(p, options[id(p)])
            if wanted != p.dtype:
                states[p][name] = value.to(local(p).device, wanted, copy=True)
