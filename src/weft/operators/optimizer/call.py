"""What the functional operators share: checks of their lists, the tables that they keep, and the choice they report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import FLOATS, Choice, check_tensor, dense, on_gpu, traced
from weft.operators.launch import Plans, compile_request
from weft.operators.optimizer import fastest
from weft.operators.optimizer.entry import Codes, Entry
from weft.operators.optimizer.rule import Rule
from weft.operators.optimizer.table import Table

Lists = dict[str, Sequence[Tensor]]  # name of an argument → its tensors


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether elements of the same index lie at the same place in both (the stride of a dimension of one does not matter)."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return all(s == t for s, t, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n != 1)


def check_lists(operator: str, lists: Lists, steps: Sequence[Tensor] | None = None) -> None:
    """Raises TypeError or ValueError unless all lists are as long as the first, and their tensors of its shapes and device."""
    (first, params), *others = lists.items()
    counted = [("steps", steps)] if steps is not None else []
    for name, tensors in (*lists.items(), *counted):
        if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
            raise TypeError(f"{operator}: argument '{name}' is a {type(tensors).__name__}; expected a list of tensors")
        if len(tensors) != len(params):
            raise ValueError(
                f"{operator}: argument '{name}' has {len(tensors)} tensors and '{first}' has {len(params)}; "
                "expected the same number"
            )
    for i, p in enumerate(params):
        check_tensor(operator, f"{first}[{i}]", p, (*FLOATS, torch.float64))
        for name, tensors in (*others, *counted):
            t = tensors[i]
            count = (torch.float32,) if p.dtype in FLOATS else (torch.float32, torch.float64)  # kernels know no other
            check_tensor(operator, f"{name}[{i}]", t, count if name == "steps" else (*FLOATS, torch.float64))
            if t.device != params[0].device or p.device != params[0].device:
                raise ValueError(
                    f"{operator}: argument '{name}[{i}]' is on {t.device} and '{first}[0]' is on {params[0].device}; "
                    "expected one device"
                )
            wanted = torch.Size() if name == "steps" else p.shape
            if t.shape != wanted:
                raise ValueError(
                    f"{operator}: argument '{name}[{i}]' has shape {tuple(t.shape)}; expected {tuple(wanted)}"
                )


def check_number(operator: str, name: str, value: Any, below: float = math.inf) -> None:
    """Raises ValueError unless the number (a tensor's is not looked at: that would wait for the device) is in [0, below)."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{operator}: argument '{name}' has {value.numel()} elements; expected one")
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{operator}: argument '{name}' is {value!r:.40}; expected a number of 0 or more{limit}")


def check_betas(operator: str, betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{operator}: argument 'betas' is {betas!r:.40}; expected two numbers")
    check_number(operator, "betas[0]", betas[0], 1)
    check_number(operator, "betas[1]", betas[1], 1)


def check_flags(operator: str, **flags: Any) -> None:
    """Raises TypeError for a switch that is not a bool: a string like "no" would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{operator}: argument '{name}' is {value!r:.40}; expected True or False")


def obstacle(lists: Lists) -> str:
    """Why the engine does not take these tensors (an empty string when it does)."""
    (_, params), *others = lists.items()
    for i, p in enumerate(params):
        if p.dtype not in FLOATS or any(tensors[i].dtype not in (*FLOATS, torch.uint8) for _, tensors in others):
            return "float64, which the engine's registers do not hold"
        if not dense(p) or not all(same_order(p, tensors[i]) for _, tensors in others):
            return "tensors with gaps, or a state or gradient whose strides are not the weight's"
    return ""


def choose(
    lists: Lists,
    rule: Rule | None = None,
    steps: Sequence[Tensor] | None = None,
    options: dict[str, Any] | None = None,
    codes: Sequence[Codes] | None = None,
) -> Choice:
    """The choice; ``rule`` and what follows where there may be kernels in CUDA C++."""
    params = next(iter(lists.values()))
    if not params:
        return Choice("torch", "an empty list: nothing to launch")
    if not on_gpu(params[0]):
        return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
    if traced(*params):
        return Choice("torch", "traced: PyTorch's own operators, which a compiler fuses with their neighbours")
    if reason := obstacle(lists):
        return Choice("torch", reason)
    many = sum(p.numel() for p in params) >= fastest.FROM  # entries of few would cost as much as their step
    if rule and many and fastest.kind_of(rule, entries_of(lists, steps, options or {}, codes)) is not Table:
        return Choice("cuda", "many dense tensors of one order, on Hopper: fewer instructions an element", tables)
    return Choice("triton", "dense tensors of one order: one launch for all of them", tables)


def entries_of(
    lists: Lists, steps: Sequence[Tensor] | None, options: dict[str, Any], codes: Sequence[Codes] | None
) -> list[Entry]:
    params, grads, *states = lists.values()
    counts: Sequence[Tensor | None] = steps if steps is not None else [None] * len(params)
    coded: Sequence[Codes | None] = codes if codes is not None else [None] * len(params)
    seed = options.get("seed") or 0
    return [
        Entry(p, tuple(kept), count, options, gradient=g.dtype, seed=seed, codes=code)
        for p, g, count, code, *kept in zip(params, grads, counts, coded, *states, strict=True)
    ]


def build(
    rule: Rule,
    lists: Lists,
    steps: Sequence[Tensor] | None,
    options: dict[str, Any],
    codes: Sequence[Codes] | None = None,
    kind: Callable[[Rule, list[Entry]], Table] = fastest.table,
) -> Table:
    if reason := obstacle(lists):
        raise Declined(reason)
    return kind(rule, entries_of(lists, steps, options, codes))


tables = Plans(build)


def launch(
    rule: Rule,
    lists: Lists,
    steps: Sequence[Tensor] | None,
    options: dict[str, Any],
    maximize: bool,
    codes: Sequence[Codes] | None = None,
    kind: Callable[[Rule, list[Entry]], Table] = fastest.table,
) -> None:
    """One step in one launch; the table, made by ``kind``, is kept for the next call with the same memory."""
    params, grads, *states = lists.values()
    if not params:
        return
    counts = [] if steps is None else [steps]
    kept = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for tensors in (params, *states, *counts) for t in tensors]
    given = [(g.dtype, g.stride()) for g in grads]
    scales = [(*(s.data_ptr() for s in c.scales), c.block, c.format, c.stochastic) for c in codes or ()]
    key = (
        kind,
        rule,
        rule.variant(options),
        params[0].device,
        options.get("seed"),
        tuple(kept),
        tuple(given),
        tuple(scales),
    )
    table = None if compile_request() is not None else tables.known.get(key)
    if table is None:
        table = build(rule, lists, steps, options, codes, kind)
        if len(tables.known) >= 64:
            tables.known = {k: t for k, t in tables.known.items() if t.captured}  # which graphs read
        tables.known[key] = table
    table.addresses[:] = [g.data_ptr() for g in grads]
    table.set_group(0, options, -1.0 if maximize else 1.0)
    scaled = [s for c in codes or () for s in c.scales]
    # whoever saved them for a gradient must hear of it
    torch.autograd.graph.increment_version([*params, *(t for those in (*states, *counts) for t in those), *scaled])
    table.launch()
