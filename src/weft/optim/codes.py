"""Moments as codes of 8 bits in an optimizer's state: making them, and going over from and to moments of 32 bits.

A state of the rule named ``exp_avg`` is kept as ``exp_avg_codes`` (uint8, of the weight's shape) and ``exp_avg_scales`` (fp32,
one for each block of neighbours in memory); what has the name ``exp_avg`` is always a moment itself, as ``torch.optim`` has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.operators.call import FLOATS, dense
from weft.operators.optimizer.blockwise import blocks_of, dequantize, quantize
from weft.operators.optimizer.call import same_order
from weft.operators.optimizer.entry import Codes
from weft.operators.optimizer.rule import Rule

OPTIONS = ("state_format", "block_size", "min_8bit_size", "code_rounding")  # of groups, of optimizers that have codes


def without_options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in OPTIONS}


def local(t: Tensor) -> Tensor:
    """A DTensor's shard on this rank; any other tensor itself."""
    return getattr(t, "_local_tensor", t)


def is_coded(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether this parameter's states are kept in 8 bits."""
    return "state_format" in group and p.dtype in FLOATS and local(p).numel() >= group["min_8bit_size"]


def moment(state: dict[str, Any], name: str, group: dict[str, Any], rule: Rule) -> Tensor:
    """What codes stand for, fp32."""
    codes, scales = local(state[f"{name}_codes"]), state[f"{name}_scales"]
    check_scales(name, codes, scales, group)
    return dequantize(
        codes, scales.to(codes.device), group["block_size"], _signed(name, group, rule), group["state_format"]
    )


def check_scales(name: str, codes: Tensor, scales: Tensor, group: dict[str, Any]) -> None:
    """Raises ValueError unless there is one scale for each block: the kernel would read and write past the last one."""
    wanted = blocks_of(codes.numel(), group["block_size"])
    if scales.shape != (wanted,):
        blocks = f"{len(scales)} blocks" if scales.ndim == 1 else f"the shape {tuple(scales.shape)}"
        raise ValueError(
            f"'{name}_scales' has {blocks} for {codes.numel()} elements; expected {wanted}, of {group['block_size']} elements "
            "each: block_size is that of the state, from the first step on"
        )


def keep(state: dict[str, Any], name: str, x: Tensor | None, p: Tensor, group: dict[str, Any], rule: Rule) -> None:
    """Puts a moment (0 when None) into a state as codes."""
    codes = torch.zeros_like(p, dtype=torch.uint8, memory_format=torch.preserve_format)
    scales = torch.zeros(blocks_of(local(p).numel(), group["block_size"]), device=local(p).device)
    wide = torch.zeros_like(local(p), dtype=torch.float32) if x is None else x.to(scales.device, torch.float32)
    quantize(wide, local(codes), scales, group["block_size"], _signed(name, group, rule), group["state_format"])
    state[f"{name}_codes"], state[f"{name}_scales"] = codes, scales


def convert(state: dict[str, Any], p: Tensor, group: dict[str, Any], rule: Rule) -> None:
    """Makes a state's moments codes, or codes moments, as the group wants them of this parameter."""
    coded = is_coded(p, group)
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
            x = state.pop(name, None)
            keep(state, name, None if x is None else local(x), p, group, rule)


def entry(state: dict[str, Any], p: Tensor, group: dict[str, Any], rule: Rule) -> Codes | None:
    """What the engine wants to know of a parameter's codes; None where it has none."""
    if not is_coded(p, group):
        return None
    scales = tuple(state[f"{name}_scales"] for name in rule.states(group))
    return Codes(scales, group["block_size"], group["state_format"], group["code_rounding"] == "stochastic")


class Formats:
    """In which format each parameter's codes were written: bytes of the one say nothing in the other, and look the same."""

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


def _signed(name: str, group: dict[str, Any], rule: Rule) -> bool:
    return name not in rule.positive(group)
