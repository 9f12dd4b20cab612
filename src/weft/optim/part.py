"""The parameters of one device that the engine takes, and what a step asks of each: its gradient's address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.operators.call import FLOATS, dense
from weft.operators.launch import INTERPRETING
from weft.operators.optimizer import fastest
from weft.operators.optimizer.call import same_order
from weft.operators.optimizer.entry import Entry
from weft.operators.optimizer.rule import Rule
from weft.optim import addresses, codes
from weft.optim.addresses import MISSING, ODD, Addresses
from weft.optim.batches import ADDRESS, Batches
from weft.optim.codes import local


def takes(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether the engine updates this parameter."""
    mine = local(p)
    return (
        (mine.is_cuda or INTERPRETING)
        and mine.layout == torch.strided
        and mine.dtype in FLOATS
        and not group["differentiable"]
        and dense(mine)
    )


class Part:
    """The parameters of one device and their table.

    Args:
        rows: (group, parameter) of each.
        states: of all parameters, complete.
        control: what this device's launches share.
    """

    def __init__(
        self, rule: Rule, rows: list[tuple[int, Tensor]], groups: list[dict[str, Any]], states: Any, control: Tensor
    ):
        self.params = [p for _, p in rows]
        self.device = control.device
        self.locals = [local(p) for p in self.params]
        self.distributed = any(a is not b for a, b in zip(self.params, self.locals, strict=True))
        self.sharded = any(not place.is_replicate() for p in self.params for place in getattr(p, "placements", ()))
        # of autograd's counters, a DTensor and its shard have one each
        self.written = self.params + self.locals if self.distributed else self.params
        self.outdated, self.new = False, True
        self.copied: list[tuple[Tensor, Tensor]] = []  # gradients of another order than their weight, and in its order
        self.counts = gather([states[p].get("step") for p in self.params], self.device)
        entries = []
        for row, (index, p) in enumerate(rows):
            group, state = groups[index], states[p]
            if "step" in state:
                state["step"] = self.counts[row]
            coded = codes.entry(state, p, group, rule)
            suffix = "" if coded is None else "_codes"
            kept = [local(state[name + suffix]) for name in rule.states(group)]
            if group["rounding"] == "split":
                kept.append(local(state["lower_bits"]))
            gradient = self.locals[row].dtype if p.grad is None else local(p.grad).dtype
            step, how = state.get("step"), group["rounding"]
            weight = self.locals[row]
            entries.append(Entry(weight, tuple(kept), step, group, index, how, gradient, group["seed"], coded))
        self.table = fastest.table(rule, entries, len(groups), control)
        self.weights = list(map(ADDRESS, self.locals))
        # else a gradient may have another dtype than its weight, or lie in a tensor within the one that Python has
        plain = not self.distributed and all(getattr(p, "grad_dtype", p.dtype) == p.dtype for p in self.params)
        self.asked: Addresses | Batches
        if plain and addresses.takes(self.params):
            self.asked = Addresses(self.params, self.weights, self.table.addresses)
        else:
            self.asked = Batches(self.params, self.weights, self.table.addresses, plain and self.table.contiguous)

    def collect(self, some: Sequence[Tensor] | None = None) -> np.ndarray | None:
        """Writes the gradients' addresses into the table. Returns which rows have one, or None when all have. Sets
        ``outdated`` where a weight lies elsewhere now or a gradient has another dtype.

        Args:
            some: parameters, of this part or not; rows of others are returned as if they had no gradient.
        """
        self.copied = []
        if self.asked.read() and some is None:
            return None
        active: np.ndarray = self.asked.kinds != MISSING
        if some is not None:
            wanted = {id(p) for p in some}
            active &= [id(p) in wanted for p in self.params]
        odd = np.flatnonzero(active & (self.asked.kinds == ODD)).tolist()
        if any(ADDRESS(local(self.params[row])) != self.weights[row] for row in odd):
            self.outdated = True
            return None
        self._one_by_one(odd, [self.params[row].grad for row in odd], active)
        self._keep_for_graph()
        return None if active.all() else active

    def _one_by_one(self, rows: Sequence[int], grads: Sequence[Tensor | None], active: np.ndarray) -> None:
        """Writes the addresses of these rows' gradients, of whatever kind they are, and which of them have none."""
        for row, g in zip(rows, grads, strict=True):
            p = self.params[row]
            if g is None:
                active[row], self.table.addresses[row] = False, 0
                continue
            if g.layout != torch.strided:
                raise RuntimeError(
                    f"weft's optimizers do not support sparse gradients; parameter {row} has one of {g.layout}. "
                    "torch.optim.SparseAdam and torch.optim.SGD take them"
                )
            if getattr(p, "placements", None) != getattr(g, "placements", None):
                raise RuntimeError(
                    f"parameter {row} is placed as {getattr(p, 'placements', None)} and its gradient as "
                    f"{getattr(g, 'placements', None)}; expected the same"
                )
            mine, weight = local(g), self.locals[row]
            if mine.numel() and not mine.data_ptr():
                raise RuntimeError(
                    f"the gradient of parameter {row} is a {type(g).__name__} without memory of its own; expected a tensor"
                )
            if mine.dtype != self.table.entries[row].gradient:
                self.outdated = True
            elif not same_order(weight, mine):
                self.copied.append((mine, torch.empty_like(weight, dtype=mine.dtype).copy_(mine)))
                mine = self.copied[-1][1]
            self.table.addresses[row] = mine.data_ptr()

    def _keep_for_graph(self) -> None:
        if self.copied and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.table.captured += [copy for _, copy in self.copied]

    def announce(self, active: np.ndarray | None, zeroed: bool) -> None:
        """Tells autograd what the launch writes of its own accord: whoever saved it for a gradient must hear of it."""
        written = self.written
        if active is not None:
            rows = np.flatnonzero(active).tolist()
            written = [each[row] for each in (self.params, self.locals)[: 1 + self.distributed] for row in rows]
        if zeroed:
            written = written + [p.grad for p in self.params if p.grad is not None]
        torch.autograd.graph.increment_version(written)

    def zero_copied(self) -> None:
        for gradient, _ in self.copied:
            gradient.zero_()


def gather(steps: Sequence[Any], device: torch.device) -> Tensor:
    """Counts of steps, of which some may be on the CPU or missing, in one fp32 tensor."""
    if all(not isinstance(s, Tensor) or s.device.type == "cpu" for s in steps):
        return torch.tensor([float(s or 0) for s in steps], dtype=torch.float32).to(device)
    zero = torch.zeros((), device=device)
    return torch.stack([s.to(device, torch.float32).reshape(()) if isinstance(s, Tensor) else zero for s in steps])
