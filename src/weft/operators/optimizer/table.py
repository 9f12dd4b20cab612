"""The table of pointers, the chunk map, and the launches that they are made for.

What never changes from step to step (addresses of weights and states, sizes, kinds) is uploaded once. Gradients' addresses and
the groups' numbers share one small buffer, which is uploaded when they differ from the last ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from weft.operators.configs import Config, Configurations, grid_of
from weft.operators.launch import INTERPRETING, Plan, compile_request, multiprocessors, target_sm
from weft.operators.numbered import NumberedPlan
from weft.operators.optimizer import kernels
from weft.operators.optimizer.dynamic_map import codebook
from weft.operators.optimizer.entry import FORMATS, ROUNDINGS, TYPES, Entry, check_apart
from weft.operators.optimizer.rule import Rule

ROW = kernels.ROW.value
# Of the gradients' norm: 64 or 128 bytes of a gradient a thread, and at most 64 registers, so that 4 programs share a
# multiprocessor; more than are there at once would be a second wave, which takes nearly as long as the first.
NORM_BLOCK, NORM_BLOCKS, NORM_WARPS, NORM_PROGRAMS = 2048, 4, 8, 4
CAPTURES = 4  # graphs that can be captured between two eager steps


def heuristic(sm: int, dtype: torch.dtype) -> Config:
    """8 elements a thread: 16 or 32 bytes of each tensor, and 64 registers, so that four programs share a multiprocessor."""
    return {"BLOCK": 2048, "num_warps": 8}


def candidates(sm: int, dtype: torch.dtype) -> Any:
    every = grid_of({"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16)})
    return [c for c in every if 4 <= c["BLOCK"] // (32 * c["num_warps"]) <= 32]


def coded_heuristic(sm: int, dtype: torch.dtype, codes: str) -> Config:
    """16 elements a thread, in 128 registers: what a thread does once (barriers, addresses, powers of the betas) is a quarter
    of the instructions with 8. Random numbers want more registers: 8."""
    return {"BLOCK": 2048 if codes == "stochastic" or sm < 89 else 4096, "num_warps": 8}  # below 89 e4m3 takes more


def coded_candidates(sm: int, dtype: torch.dtype, codes: str) -> Any:
    return candidates(sm, dtype)


configurations = Configurations(__file__, "update", heuristic, candidates)
coded_configurations = Configurations(__file__, "update_8bit", coded_heuristic, coded_candidates)


def chunks_of(size: Any, block: int) -> Any:
    """Programs that tensors of these sizes take: one of an empty tensor too, which counts its step."""
    return np.maximum(-(-size // block), 1)


class Table:
    """Parameters of one device, and the launches that update them.

    Args:
        groups: how many groups there are; every row's number is below.
        control: what launches share (``kernels``), where another table has it already.
    """

    def __init__(self, rule: Rule, entries: Sequence[Entry], groups: int = 1, control: Tensor | None = None):
        self.rule, self.entries = rule, entries
        self.device = entries[0].param.device
        check_apart([e.param for e in entries])
        self.made = torch.device("cpu") if self.device.type == "meta" else self.device  # where the table itself lies
        wide = max(e.param.element_size() for e in entries)
        key = torch.float32 if wide == 4 else torch.bfloat16
        codes = [e.codes for e in entries if e.codes]
        if codes:
            random = any(c.stochastic for c in codes)
            config = coded_configurations(self.device, key, "stochastic" if random else "interval")
        else:
            config = configurations(self.device, key)
        self.warps = config["num_warps"]
        self.block = max([config["BLOCK"], *(c.block for c in codes)])
        self.values = 2 + len(rule.numbers(entries[0].options))
        n = len(entries)
        fresh = n + -(-groups * self.values // 2)
        self.fresh = torch.zeros(fresh, dtype=torch.int64, device=self.made)
        self.views = self._views(self.fresh)
        self.next = np.zeros(fresh, np.int64)
        self.last = self.next.copy()  # what was uploaded
        self.equal = np.zeros(fresh, bool)  # of them both, in place of a new array at every step
        self.frozen = False  # whether a graph reads it from ``fresh``, which must then stay as it is
        self.addresses = self.next[:n]
        self.numbers = self.next[n:].view(np.float32)[: groups * self.values].reshape(groups, self.values)
        self.rates: list[Any] = [None] * groups  # learning rates that are tensors on the device
        self.kinds: dict[int, int] = {}
        self.words = np.zeros((n, ROW), np.int64)
        for row, entry in enumerate(entries):
            self.words[row] = self._row(row, entry)
        self.table = torch.from_numpy(self.words).to(self.made, copy=True)
        self.arrivals = torch.zeros(n + 1, dtype=torch.int32, device=self.made)  # the last one is the norm's
        self.control = torch.zeros(kernels.CONTROLS, device=self.made) if control is None else control
        self.codebook = codebook(self.made) if codes else self.control
        self.contiguous = all(e.param.is_contiguous() for e in entries)
        self.parts = NORM_PROGRAMS * multiprocessors(self.device)
        self.partial: Tensor | None = None
        self.maps: dict[tuple[int, bytes], Tensor] = {}
        self.plans: dict[Any, Any] = {}
        self.pinned = [self._pin() for _ in range(CAPTURES)]
        self.captured: list[Tensor] = []  # what captured graphs read from, as long as the table lives

    def _row(self, row: int, e: Entry) -> list[int]:
        rule = self.rule
        names = rule.states(e.options)
        states = [TYPES[s.dtype] for s in e.states]
        if e.codes is not None:
            positive = rule.positive(e.options)
            states[: len(names)] = [FORMATS[e.codes.format][name in positive] for name in names]
            if len(names) > kernels.SCALED_STATES:
                raise ValueError(
                    f"a rule keeps {len(names)} states in 8 bits; expected at most {kernels.SCALED_STATES}"
                )
        stochastic = e.codes is not None and e.codes.stochastic
        counted = rule.counted(e.options) or e.rounding == "stochastic" or stochastic
        if len(states) > kernels.SLOTS:
            raise ValueError(f"a rule keeps {len(states)} states of a weight; expected at most {kernels.SLOTS}")
        kept, variant = len(names), int(rule.variant(e.options))
        types = TYPES[e.param.dtype], TYPES[e.gradient]
        digits = (*types, kept, variant, ROUNDINGS.index(e.rounding), int(counted), *states)
        kind = sum(digit << 4 * place for place, digit in enumerate(digits))
        if e.codes is not None:
            kind += (e.codes.block.bit_length() - 8 + 8 * stochastic) * kernels.CODES.value
        words = [0] * ROW
        words[kernels.PARAM.value] = e.param.data_ptr()
        for s, state in enumerate(e.states):
            words[kernels.STATES.value + s] = state.data_ptr()
        for s, scales in enumerate(e.codes.scales if e.codes else ()):
            words[kernels.SCALES.value + s] = scales.data_ptr()
        if e.step is not None:
            words[kernels.STEP.value] = e.step.data_ptr()
        words[kernels.SIZE.value] = e.param.numel()
        words[kernels.CHUNKS.value] = chunks_of(e.param.numel(), self.block)
        words[kernels.KIND_OF.value] = self.kinds.setdefault(kind, len(self.kinds))
        words[kernels.GROUP.value] = e.group
        words[kernels.SEED.value] = e.seed
        return words

    def set_group(self, group: int, options: dict[str, Any], sign: float) -> None:
        """Writes a group's numbers, to be uploaded by the next launch if they differ from the last."""
        lr = options["lr"]
        tensor = isinstance(lr, Tensor) and lr.device == self.made and lr.dtype == torch.float32
        self.numbers[group] = (0.0 if tensor else float(lr), sign, *self.rule.numbers(options))
        self.set_rate(group, lr if tensor else None)

    def set_rate(self, group: int, lr: Tensor | None) -> None:
        """Where the group's learning rate is read from: a tensor of the caller's, or (None) the numbers."""
        if self.rates[group] is lr:
            return
        rows = self.words[:, kernels.GROUP.value] == group
        self.words[rows, kernels.RATE.value] = 0 if lr is None else lr.data_ptr()
        if self.captured:  # graphs read this table and the rate that it points to, and are to go on doing so
            self.captured += [t for t in (self.table, self.rates[group]) if t is not None]
        self.table = torch.from_numpy(self.words).to(self.made, copy=True)
        self.rates[group] = lr

    # ---- upload ------------------------------------------------------------------------------------------------------

    def _pin(self) -> Tensor:
        return torch.empty(len(self.next), dtype=torch.int64, pin_memory=self.made.type == "cuda")

    def _capturing(self) -> bool:
        return self.made.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _views(self, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients' addresses and the groups' numbers, in the buffer that has both."""
        n = len(self.entries)
        return fresh[:n], fresh[n:].view(torch.float32)

    def _upload(self) -> tuple[Tensor, Tensor]:
        """Gradients' addresses and numbers on the device, as the next launch is to see them."""
        uploaded = bool(np.equal(self.next, self.last, out=self.equal).all())
        if self._capturing():
            return self._captured(uploaded)
        if not uploaded:
            if self.frozen:
                self.fresh, self.frozen = torch.empty_like(self.fresh), False
                self.views = self._views(self.fresh)
            host = self._pin()  # its memory is given out again once the copy is done
            host.numpy()[:] = self.next
            self.fresh.copy_(host, non_blocking=True)
            self.last[:] = self.next
        while len(self.pinned) < CAPTURES:
            self.pinned.append(self._pin())
        return self.views

    def _captured(self, uploaded: bool) -> tuple[Tensor, Tensor]:
        """As :meth:`_upload`, in memory that nobody writes again: what is on the device already (gradients in place since the
        step before), so that a replay copies nothing; or a buffer of the graph's own, which it uploads at every replay."""
        if uploaded:
            if not self.frozen:
                self.captured.append(self.fresh)
            self.frozen = True
            return self.views
        if not self.pinned:
            raise RuntimeError(
                f"more than {CAPTURES} CUDA graphs captured without a step outside of one between them; expected at most "
                f"{CAPTURES}: call step() once before the next capture"
            )
        host = self.pinned.pop()
        host.numpy()[:] = self.next
        fresh = torch.empty_like(self.fresh).copy_(host, non_blocking=True)
        self.captured += [host, fresh]
        return self._views(fresh)

    # ---- launch ------------------------------------------------------------------------------------------------------

    def chunk_map(self, active: np.ndarray | None, block: int) -> Tensor:
        """The chunks of ``block`` elements of the rows that have a gradient (of all rows when None), int64: row | chunk of
        that row << 32."""
        key = block, b"" if active is None else active.tobytes()
        if key not in self.maps:
            chunks = chunks_of(self.words[:, kernels.SIZE.value], block)
            rows = np.arange(len(chunks)) if active is None else np.flatnonzero(active)
            count = chunks[rows]
            first = np.cumsum(count) - count
            within = np.arange(int(count.sum())) - np.repeat(first, count)
            self.maps[key] = torch.from_numpy(np.repeat(rows, count) | within << 32).to(self.made)
        return self.maps[key]

    def launch(
        self,
        active: np.ndarray | None = None,
        *,
        scale: Tensor | None = None,
        found: Tensor | None = None,
        max_norm: float | None = None,
        guarded: bool = False,
        measured: bool = False,
        zeroed: bool = False,
    ) -> None:
        """One step, with ``addresses`` and ``numbers`` as they have been set: one launch, or two with a norm.

        Args:
            active: bool, one for each row: whether it has a gradient.
            scale: of the loss, one fp32 on the device: gradients are divided by it.
            found: one fp32 on the device: where it is not 0, the step is skipped and counted.
            max_norm: gradients are scaled down to this 2-norm of all of them.
            guarded: a step with a gradient that is not finite is skipped and counted.
            measured: the factor that clips and ``found`` are there already: no norm is taken here.
            zeroed: gradients are set to 0.
        """
        with self._device():
            self._launch(active, scale, found, max_norm, guarded, measured, zeroed)

    def _device(self) -> Any:
        """Makes the table's device the current one, whose stream launches and uploads go to."""
        if self.made.type != "cuda" or self.made.index == torch.cuda.current_device():
            return contextlib.nullcontext()
        return torch.cuda.device(self.made)

    def _launch(
        self,
        active: np.ndarray | None,
        scale: Tensor | None,
        found: Tensor | None,
        max_norm: float | None,
        guarded: bool,
        measured: bool,
        zeroed: bool,
    ) -> None:
        chunks = self.chunk_map(active, self.block)
        if not len(chunks):
            return
        grads, numbers = self._upload()
        if (max_norm is not None or guarded) and not measured:
            found = self._measure(grads, active, scale, found, max_norm, guarded)
        self._update(grads, numbers, chunks, scale, found, max_norm is not None, zeroed)

    def _measure(
        self,
        grads: Tensor,
        active: np.ndarray | None,
        scale: Tensor | None,
        found: Tensor | None,
        max_norm: float | None,
        guarded: bool,
    ) -> Tensor | None:
        """Launches the gradients' norm, which leaves the factor that clips. Returns the flag that skips the step."""
        places, control = self.chunk_map(active, NORM_BLOCKS * NORM_BLOCK), self.control
        norm: Any = self._norm_plan(len(places), scale is not None, found is not None)
        given = control if scale is None else scale, control if found is None else found
        tensors = grads, self.table, places, self.partial, self.arrivals[-1:], control, *given
        norm(*tensors, len(places), norm.grid[0], torch.inf if max_norm is None else max_norm)
        return control[kernels.FOUND.value :] if guarded else found

    def _update(
        self,
        grads: Tensor,
        numbers: Tensor,
        chunks: Tensor,
        scale: Tensor | None = None,
        found: Tensor | None = None,
        clipped: bool = False,
        zeroed: bool = False,
    ) -> None:
        """Triton's launch for some chunks."""
        plan, control = self._plan(len(chunks), scale is not None, clipped, found is not None, zeroed), self.control
        given = control if scale is None else scale, control if found is None else found
        plan(grads, self.table, chunks, numbers, self.arrivals, control, *given, self.codebook)

    def _plan(self, chunks: int, scaled: bool, clipped: bool, guarded: bool, zeroed: bool) -> Callable[..., None]:
        key = (chunks, scaled, clipped, guarded, zeroed)
        if key not in self.plans or compile_request() is not None:
            constants = {
                "RULE": self.rule.update,
                "KINDS": tuple(self.kinds),
                "NUMBERS": self.values,
                "BLOCK": self.block,
                "SCALED": scaled,
                "CLIPPED": clipped,
                "GUARDED": guarded,
                "ZEROED": zeroed,
                "HARDWARE": not INTERPRETING and target_sm(self.device) >= 89,
            }
            self.plans[key] = Plan(kernels.update, (chunks,), (), constants, self.warps)
        return self.plans[key]

    def _norm_plan(self, chunks: int, scaled: bool, guarded: bool) -> NumberedPlan:
        key = ("norm", chunks, scaled, guarded)
        if self.partial is None:
            self.partial = torch.zeros(2 * triton.next_power_of_2(self.parts), dtype=torch.float32, device=self.made)
        if key not in self.plans or compile_request() is not None:
            constants = {
                "KINDS": tuple(self.kinds),
                "BLOCK": NORM_BLOCK,
                "BLOCKS": NORM_BLOCKS,
                "PARTS": triton.next_power_of_2(self.parts),
                "SCALED": scaled,
                "GUARDED": guarded,
            }
            self.plans[key] = NumberedPlan(kernels.gradient_norm, (min(chunks, self.parts),), (), constants, NORM_WARPS)
        return self.plans[key]
