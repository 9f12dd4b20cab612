"""The parameters of one device that the engine takes, and what a step asks of each: its gradient's address."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.operators.call import FLOATS, dense
from weft.operators.launch import INTERPRETING
from weft.operators.optimizer.call import same_order
from weft.operators.optimizer.rule import Rule
from weft.operators.optimizer.table import Entry, Table
from weft.optim import codes
from weft.optim.codes import local

ADDRESS, CONTIGUOUS = Tensor.data_ptr, Tensor.is_contiguous
# Parameters that are asked at once: they and their gradients stay in the cache, no garbage collection starts, and no list takes
# more than 512 bytes, which Python has at hand. Beyond 1 KiB malloc first tidies up what the last gradients have left (0.1 ms).
BATCH = 64


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
        self.table = Table(rule, entries, len(groups), control)
        self.weights = list(map(ADDRESS, self.locals))
        self.batches = [
            (start, self.params[start:end], self.weights[start:end], self.table.addresses[start:end])
            for start, end in ((start, start + BATCH) for start in range(0, len(self.params), BATCH))
        ]
        loose = any(getattr(p, "grad_dtype", p.dtype) != p.dtype for p in self.params)
        # whether a contiguous gradient with memory is all that has to be asked for
        self.plain = self.table.contiguous and not self.distributed and not loose

    def valid(self) -> bool:
        """Whether all weights lie where they lay."""
        mine = map(local, self.params) if self.distributed else self.params
        return all(map(eq, map(ADDRESS, mine), self.weights))

    def collect(self) -> np.ndarray | None:
        """Writes the gradients' addresses into the table. Returns which rows have one, or None when all have. Sets
        ``outdated`` where a weight lies elsewhere now or a gradient has another dtype.

        One pass: a pass for each question takes every parameter into the cache anew."""
        self.copied = []
        active = None
        for start, params, weights, found in self.batches:
            mine = map(local, params) if self.distributed else params
            if list(map(ADDRESS, mine)) != weights:
                self.outdated = True
                return None
            grads: list[Any] = [p.grad for p in params]
            if self.plain:
                try:
                    found[:] = list(map(ADDRESS, grads))
                    if all(map(CONTIGUOUS, grads)):
                        continue
                except (TypeError, RuntimeError):  # one is None, or has no memory (sparse)
                    pass
            if active is None:
                active = np.ones(len(self.params), bool)
            self._one_by_one(start, grads, active)
        self._keep_for_graph()
        return None if active is None or active.all() else active

    def collect_some(self, params: Sequence[Tensor]) -> np.ndarray:
        """As :meth:`collect`, of some parameters; of the others none is active."""
        wanted = {id(p) for p in params}
        self.copied = []
        active = np.ones(len(self.params), bool)
        self._one_by_one(0, [p.grad if id(p) in wanted else None for p in self.params], active)
        self._keep_for_graph()
        return active

    def _one_by_one(self, start: int, grads: Sequence[Tensor | None], active: np.ndarray) -> None:
        """Writes the addresses of the gradients from a row on, of whatever kind they are, and which rows have none."""
        for row, g in enumerate(grads, start):
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
            if mine.dtype != self.table.entries[row].gradient:
                self.outdated = True
            elif not same_order(weight, mine):
                self.copied.append((mine, torch.empty_like(weight, dtype=mine.dtype).copy_(mine)))
                mine = self.copied[-1][1]
            self.table.addresses[row] = mine.data_ptr()

    def _keep_for_graph(self) -> None:
        if self.copied and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.table.captured += [copy for _, copy in self.copied]

    def zero_copied(self) -> None:
        for gradient, _ in self.copied:
            gradient.zero_()


def gather(steps: Sequence[Any], device: torch.device) -> Tensor:
    """Counts of steps, of which some may be on the CPU or missing, in one fp32 tensor."""
    if all(not isinstance(s, Tensor) or s.device.type == "cpu" for s in steps):
        return torch.tensor([float(s or 0) for s in steps], dtype=torch.float32).to(device)
    zero = torch.zeros((), device=device)
    return torch.stack([s.to(device, torch.float32).reshape(()) if isinstance(s, Tensor) else zero for s in steps])
