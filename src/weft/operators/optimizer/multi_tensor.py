"""One launch for a list of tensors: the table of pointers, the chunk map, and the launches that read them.

What never changes from step to step (addresses of weights and states, sizes, kinds) is uploaded once. Gradients' addresses and
the groups' numbers share one small buffer, which is uploaded when they differ from the last ones.
"""

import contextlib
import ctypes
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from weft.operators.configs import Config, Configurations, tiles
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import INTERPRETING, Plan, compile_request, multiprocessors, target_sm
from weft.operators.optimizer import kernels
from weft.operators.optimizer.dynamic_map import codebook, lookup_tables
from weft.operators.optimizer.rules import Rule, is_decoupled

# by their number in the kernels
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int16: 3, torch.uint8: 4}
ROUNDINGS = ("nearest", "stochastic", "split")
FORMATS = {  # of 8-bit states: the types of one with a sign and of one without
    "dynamic": (kernels.SIGNED.value, kernels.UNSIGNED.value),
    "fp8": (kernels.E4M3.value, kernels.E4M3_ROOT.value),
}


@dataclass(frozen=True)
class Codes:
    """8-bit states of a parameter."""

    scales: tuple[Tensor, ...]  # of each of the rule's states, fp32: the largest magnitudes of blocks of neighbours
    block: int = 256  # elements of a block, 128 … 2048, a power of two
    format: str = "dynamic"  # or fp8
    stochastic: bool = False  # codes are rounded up or down at random


@dataclass(frozen=True)
class Entry:
    """A parameter, as a row of the table."""

    param: Tensor  # float32, float16 or bfloat16, dense in memory
    # the rule's, of the same strides (uint8 with codes), then the int16 half of a split weight
    states: tuple[Tensor, ...]
    step: Tensor | None  # one fp32, the number of steps done, where the rule or the rounding needs it
    options: dict[str, Any]  # of its group
    group: int = 0  # number of the group: its row of the numbers
    rounding: str = "nearest"  # or stochastic, split
    gradient: torch.dtype = torch.float32  # the gradient's dtype
    seed: int = 0
    codes: Codes | None = None  # the format of 8-bit states


class StepOptions(NamedTuple):
    """What a step does besides updating."""

    scale: Tensor | None = None  # of the loss, one fp32 on the device: gradients are divided by it
    found: Tensor | None = None  # one fp32 on the device: where it is not 0, the step is skipped and counted
    max_norm: float | None = None  # gradients are scaled down to this 2-norm of all of them
    guarded: bool = False  # a step with a gradient that is not finite is skipped and counted
    measured: bool = False  # the clipping factor and ``found`` have been computed: no norm is taken here
    zeroed: bool = False  # gradients are set to 0

    def given(self, other: Tensor) -> tuple[Tensor, Tensor]:
        """``scale`` and ``found``, or the other tensor for one that there is not."""
        return other if self.scale is None else self.scale, other if self.found is None else self.found


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether elements of the same index have the same offset in both (the stride of a dimension of one does not matter)."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return all(s == t for s, t, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n != 1)


def check_memory(e: Entry) -> None:
    """Raises ValueError where a kernel would read or write beyond a tensor that is used by its address alone."""
    n = e.param.numel()
    wanted = [("a state", state, n, state.dtype) for state in e.states]
    if e.codes is not None:
        wanted += [("scales", scales, -(-n // e.codes.block), torch.float32) for scales in e.codes.scales]
    if e.step is not None:
        wanted.append(("the count of steps", e.step, 1, torch.float32))
    for what, t, elements, dtype in wanted:
        if t.numel() != elements or t.dtype != dtype or t.device != e.param.device:
            raise ValueError(
                f"{what} of a parameter with {n} elements on {e.param.device} has {t.numel()} elements of {t.dtype} on "
                f"{t.device}; expected {elements} of {dtype}"
            )


def check_no_overlap(params: Sequence[Tensor]) -> None:
    """Raises ValueError where two dense tensors of one device share memory: programs would update it in any order."""
    if params[0].device.type == "meta":
        return
    begin = np.array([p.data_ptr() for p in params])
    size = np.array([p.numel() * p.element_size() for p in params])
    order = np.argsort(begin, kind="stable")
    order = order[size[order] > 0]
    ends = np.maximum.accumulate((begin + size)[order])
    for at in np.flatnonzero(begin[order][1:] < ends[:-1])[:1]:
        a, b = sorted((int(order[at]), int(order[at + 1])))
        raise ValueError(
            f"parameters {a} and {b} of those on {params[0].device}, of shapes {tuple(params[a].shape)} and "
            f"{tuple(params[b].shape)}, share memory; expected tensors that do not overlap (a tied weight is one parameter)"
        )


ROW = kernels.ROW.value
# The gradients' norm: 64 or 128 bytes of a gradient a thread, and at most 64 registers, so that 4 programs share a
# multiprocessor; more programs than are resident would be a second wave, which takes nearly as long as the first.
NORM_BLOCK, NORM_BLOCKS, NORM_WARPS, NORM_PROGRAMS = 2048, 4, 8, 4
CAPTURES = 4  # graphs that can be captured between two eager steps


def heuristic_8bit(sm: int, dtype: torch.dtype, codes: str) -> Config:
    """16 elements a thread, in 128 registers: what a thread does once (barriers, addresses, powers of the betas) is a quarter
    of the instructions with 8. Random numbers need more registers: 8."""
    return {"BLOCK": 2048 if codes == "stochastic" or sm < 89 else 4096, "num_warps": 8}  # below 89 e4m3 takes more


candidates = tiles({"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16)}, 4, 32, of=("BLOCK",))
# 8 elements a thread: 16 or 32 bytes of each tensor, and 64 registers, so that four programs share a multiprocessor
configurations = Configurations(__file__, "update", {"BLOCK": 2048, "num_warps": 8}, candidates)
configurations_8bit = Configurations(__file__, "update_8bit", heuristic_8bit, candidates)


def chunks_of(size: Any, block: int) -> Any:
    """Programs for tensors of these sizes: one for an empty tensor too, which counts its step."""
    return np.maximum(-(-size // block), 1)


# ---- Triton's kernel -------------------------------------------------------------------------------------------------


class Table:
    """Parameters of one device in so many groups, and the launches that update them. ``control``: what launches share
    (``kernels``), where another table has it already."""

    def __init__(self, rule: Rule, entries: Sequence[Entry], groups: int = 1, control: Tensor | None = None):
        self.rule, self.entries = rule, entries
        self.device = entries[0].param.device
        check_no_overlap([e.param for e in entries])
        self.made = torch.device("cpu") if self.device.type == "meta" else self.device  # where the table itself is
        wide = max(e.param.element_size() for e in entries)
        key = torch.float32 if wide == 4 else torch.bfloat16
        codes = [e.codes for e in entries if e.codes]
        rounded = "stochastic" if any(c.stochastic for c in codes) else "interval"
        config = configurations_8bit(self.device, key, rounded) if codes else configurations(self.device, key)
        self.warps = config["num_warps"]
        self.block = max([config["BLOCK"], *(c.block for c in codes)])
        self.values = 2 + len(rule.numbers(entries[0].options))
        n = len(entries)
        fresh = n + -(-groups * self.values // 2)
        self.fresh = torch.zeros(fresh, dtype=torch.int64, device=self.made)
        self.views = self._views(self.fresh)
        self.next = np.zeros(fresh, np.int64)
        self.last = self.next.copy()  # what was uploaded
        self.equal = np.zeros(fresh, bool)  # the comparison of both, in place of a new array at every step
        self.frozen = False  # whether a graph reads ``fresh``, which may then not be written again
        self.addresses = self.next[:n]
        self.numbers = self.next[n:].view(np.float32)[: groups * self.values].reshape(groups, self.values)
        self.rates: list[Any] = [None] * groups  # learning rates that are tensors on the device
        self.kinds: dict[int, int] = {}
        self.words = np.zeros((n, ROW), np.int64)
        for row, entry in enumerate(entries):
            self.words[row] = self._row(entry)
        self.table = torch.from_numpy(self.words).to(self.made, copy=True)
        self.arrivals = torch.zeros(n + 1, dtype=torch.int32, device=self.made)  # the last one is the norm's
        self.control = (
            torch.zeros(kernels.CONTROLS, dtype=torch.float32, device=self.made) if control is None else control
        )
        self.codebook = codebook(self.made) if codes else self.control
        self.contiguous = all(e.param.is_contiguous() for e in entries)
        self.parts = NORM_PROGRAMS * multiprocessors(self.device)
        self.partial: Tensor | None = None
        self.maps: dict[tuple[int, bytes], Tensor] = {}
        self.plans: dict[Any, Any] = {}
        self.pinned = [self._pin() for _ in range(CAPTURES)]
        self.forms: list[tuple[Any, ...]] = []  # those of the tensors that it was made for, where it is cached
        self.captured: list[Tensor] = []  # what captured graphs read, kept alive as long as the table

    def not_alone(self) -> str:
        """Why another kernel updates some of the weights ("" when none does)."""
        return ""

    def _row(self, e: Entry) -> list[int]:
        check_memory(e)
        rule = self.rule
        names = rule.states(e.options)
        states = [TYPES[s.dtype] for s in e.states]
        if e.codes is not None:
            positive = rule.positive(e.options)
            states[: len(names)] = [FORMATS[e.codes.format][name in positive] for name in names]
            if len(names) > kernels.SCALED_STATES:
                raise ValueError(f"a rule has {len(names)} states in 8 bits; expected at most {kernels.SCALED_STATES}")
        stochastic = e.codes is not None and e.codes.stochastic
        counted = rule.counted(e.options) or e.rounding == "stochastic" or stochastic
        if len(states) > kernels.SLOTS:
            raise ValueError(f"a rule has {len(states)} states of a weight; expected at most {kernels.SLOTS}")
        types = TYPES[e.param.dtype], TYPES[e.gradient]
        variant = int(rule.variant(e.options))
        digits = (*types, len(names), variant, ROUNDINGS.index(e.rounding), int(counted), *states)
        kind = sum(digit << 4 * i for i, digit in enumerate(digits))
        if e.codes is not None:
            kind += (e.codes.block.bit_length() - 8 + 8 * stochastic) * kernels.CODES.value
        words = [0] * ROW
        words[kernels.PARAM.value] = e.param.data_ptr()
        for first, tensors in ((kernels.STATES, e.states), (kernels.SCALES, e.codes.scales if e.codes else ())):
            words[first.value : first.value + len(tensors)] = [t.data_ptr() for t in tensors]
        words[kernels.STEP.value] = 0 if e.step is None else e.step.data_ptr()
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
        self._set_rate(group, lr if tensor else None)

    def _set_rate(self, group: int, lr: Tensor | None) -> None:
        """Where the group's learning rate is read from: a tensor of the caller's, or (None) the numbers."""
        if self.rates[group] is lr:
            return
        rows = self.words[:, kernels.GROUP.value] == group
        self.words[rows, kernels.RATE.value] = 0 if lr is None else lr.data_ptr()
        if self.captured:  # graphs go on reading this table and the rate that it points to
            self.captured += [t for t in (self.table, self.rates[group]) if t is not None]
        self.table = torch.from_numpy(self.words).to(self.made, copy=True)
        self.rates[group] = lr

    def _pin(self) -> Tensor:
        return torch.empty(len(self.next), dtype=torch.int64, device="cpu", pin_memory=self.made.type == "cuda")

    def _capturing(self) -> bool:
        return self.made.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _views(self, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients' addresses and the groups' numbers, in the buffer that has both."""
        n = len(self.entries)
        return fresh[:n], fresh[n:].view(torch.float32)

    def _upload(self) -> tuple[Tensor, Tensor]:
        """Gradients' addresses and numbers on the device, for the next launch."""
        uploaded = bool(np.equal(self.next, self.last, out=self.equal).all())
        if self._capturing():
            return self._captured(uploaded)
        if not uploaded:
            if self.frozen:
                self.fresh, self.frozen = torch.empty_like(self.fresh), False
                self.views = self._views(self.fresh)
            host = self._pin()  # its memory is reused once the copy is done
            host.numpy()[:] = self.next
            self.fresh.copy_(host, non_blocking=True)
            self.last[:] = self.next
        while len(self.pinned) < CAPTURES:
            self.pinned.append(self._pin())
        return self.views

    def _captured(self, uploaded: bool) -> tuple[Tensor, Tensor]:
        """As :meth:`_upload`, in memory that is never written again: what is on the device already (gradients in place since
        the step before), so that a replay copies nothing; or a buffer of the graph's own, uploaded at every replay."""
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

    def launch(self, active: np.ndarray | None = None, **options: Any) -> None:
        """One step, with ``addresses`` and ``numbers`` as they have been set: one launch, or two with a norm. ``active``:
        bool, one for each row: whether it has a gradient. ``options``: see :class:`StepOptions`."""
        if active is not None and not active.any():
            return
        o = StepOptions(**options)
        with self._device():
            grads, numbers = self._upload()
            if (o.max_norm is not None or o.guarded) and not o.measured:
                o = o._replace(found=self._measure(grads, active, o))
            self._update(grads, numbers, active, o)

    def _device(self) -> Any:
        """Makes the table's device the current one, whose stream launches and uploads go to."""
        if self.made.type != "cuda" or self.made.index == torch.cuda.current_device():
            return contextlib.nullcontext()
        return torch.cuda.device(self.made)

    def _measure(self, grads: Tensor, active: np.ndarray | None, o: StepOptions) -> Tensor | None:
        """Launches the gradients' norm, which writes the clipping factor. Returns the flag that skips the step."""
        chunks, control = self.chunk_map(active, NORM_BLOCKS * NORM_BLOCK), self.control
        norm: Any = self._norm_plan(len(chunks), o.scale is not None, o.found is not None)
        tensors = grads, self.table, chunks, self.partial, self.arrivals[-1:], control, *o.given(control)
        norm(*tensors, len(chunks), norm.grid[0], torch.inf if o.max_norm is None else o.max_norm)
        return control[kernels.FOUND.value :] if o.guarded else o.found

    def _update(self, grads: Tensor, numbers: Tensor, active: np.ndarray | None, o: StepOptions) -> None:
        """The launch that updates the active rows."""
        chunks, control = self.chunk_map(active, self.block), self.control
        plan = self._plan(len(chunks), o.scale is not None, o.max_norm is not None, o.found is not None, o.zeroed)
        plan(grads, self.table, chunks, numbers, self.arrivals, control, *o.given(control), self.codebook)

    def _plan(self, chunks: int, scaled: bool, clipped: bool, guarded: bool, zeroed: bool) -> Callable[..., None]:
        key = (chunks, scaled, clipped, guarded, zeroed)
        if key not in self.plans or compile_request() is not None:
            flags = {"SCALED": scaled, "CLIPPED": clipped, "GUARDED": guarded, "ZEROED": zeroed}
            constants = {**flags, "RULE": self.rule.update, "KINDS": tuple(self.kinds)}
            constants |= {"NUMBERS": self.values, "BLOCK": self.block}
            constants["HARDWARE"] = not INTERPRETING and target_sm(self.device) >= 89
            self.plans[key] = Plan(kernels.update, (chunks,), (), constants, self.warps)
        return self.plans[key]

    def _norm_plan(self, chunks: int, scaled: bool, guarded: bool) -> Plan:
        key = ("norm", chunks, scaled, guarded)
        if self.partial is None:
            self.partial = torch.zeros(2 * triton.next_power_of_2(self.parts), dtype=torch.float32, device=self.made)
        if key not in self.plans or compile_request() is not None:
            constants = {"KINDS": tuple(self.kinds), "BLOCK": NORM_BLOCK, "BLOCKS": NORM_BLOCKS}
            constants |= {"PARTS": triton.next_power_of_2(self.parts), "SCALED": scaled, "GUARDED": guarded}
            self.plans[key] = Plan(kernels.gradient_norm, (min(chunks, self.parts),), (), constants, NORM_WARPS)
        return self.plans[key]


# ---- kernels in CUDA C++ ---------------------------------------------------------------------------------------------

ABSENT = torch.empty(0, device="cpu")  # whose address is null


class CudaTable(Table):
    """A table whose weights of one form, that of most elements, are updated by a kernel in CUDA C++. Triton's kernel updates
    the others in a launch of its own, and all of them in a step that zeroes gradients."""

    lookup: tuple[Tensor, ...] = ()  # what the kernel reads after ``arrivals``

    def __init__(self, rule: Rule, entries: Sequence[Entry], groups: int = 1, control: Tensor | None = None):
        super().__init__(rule, entries, groups, control)
        self.taken = self.taken_of(entries)
        self.like = entries[int(self.taken.argmax())]  # what the kernel is compiled for

    def not_alone(self) -> str:
        if self.taken.all():
            return ""
        reasons = (self.unsupported(e) for e in self.entries)
        return next(filter(None, reasons), "weights of several dtypes; the kernel is compiled for one")

    @classmethod
    def taken_of(cls, entries: Sequence[Entry]) -> np.ndarray:
        """Which weights the kernel updates: bool, one for each."""
        forms = [None if cls.unsupported(e) else cls.form(e) for e in entries]
        sizes: Counter[Hashable] = Counter()
        for form, e in zip(forms, entries, strict=True):
            if form is not None:
                sizes[form] += e.param.numel()
        most = max(sizes, key=lambda form: sizes[form], default=None)
        return np.array([form is not None and form == most for form in forms])

    @staticmethod
    @abstractmethod
    def unsupported(entry: Entry) -> str:
        """Why the kernel cannot update this weight ("" when it can)."""

    @staticmethod
    @abstractmethod
    def form(entry: Entry) -> Hashable:
        """What the kernel is compiled for, of a weight that it updates."""

    @abstractmethod
    def kernel(self, chunks: int, factors: bool = False) -> CudaPlan:
        """The launch for so many chunks; ``factors``: of the kernel that scales, clips and skips."""

    def _update(self, grads: Tensor, numbers: Tensor, active: np.ndarray | None, o: StepOptions) -> None:
        given = [t for t in (o.scale, o.found) if t is not None]
        if o.zeroed or any(t.dtype != torch.float32 for t in given):
            super()._update(grads, numbers, active, o)
            return
        ours, others = (rows if active is None else rows & active for rows in (self.taken, ~self.taken))
        if ours.any():
            chunks = self.chunk_map(None if ours.all() else ours, self.block)
            factors = bool(given) or o.max_norm is not None
            # a skipped step is counted by one launch alone: Triton's, where there is one
            more = self._factors(o, counting=not others.any()) if factors else ()
            key = "cuda", len(chunks), factors
            if key not in self.plans:
                self.plans[key] = self.kernel(len(chunks), factors)
            self.plans[key](grads, self.table, chunks, numbers, self.arrivals, *self.lookup, *more)
        if others.any():
            super()._update(grads, numbers, None if others.all() else others, o)

    def _factors(self, o: StepOptions, counting: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``struct Factors`` of table.cuh."""
        clip = ABSENT if o.max_norm is None else self.control[kernels.FACTOR.value :]
        return clip, *o.given(ABSENT), self.control[kernels.SKIPPED.value :] if counting else ABSENT


ADAM_SOURCE = Path(__file__).with_name("adam.cu")
# threads of a block; blocks of a multiprocessor, of which one reads while the other begins a tensor
ADAM_THREADS, ADAM_BLOCKS = 512, 2
ADAM_STAGES = 3  # passes that a thread has shared memory for
ADAM_STEP_BYTES = 64  # what the threads of a block share of two tensors


class AdamTable(CudaTable):
    """Adam and AdamW; weight, gradient and moments of one dtype."""

    @staticmethod
    def unsupported(entry: Entry) -> str:
        if {entry.gradient, *(s.dtype for s in entry.states)} != {entry.param.dtype}:
            return "weights, gradients and moments of several dtypes; the kernel is compiled for one"
        if entry.rounding != "nearest":
            return f"weights rounded by '{entry.rounding}'"
        return "AMSGrad" if entry.options["amsgrad"] else ""

    @staticmethod
    def form(entry: Entry) -> Hashable:
        return entry.param.dtype

    def kernel(self, chunks: int, factors: bool = False) -> CudaPlan:
        kernel = f"adam{'_scaled' * factors}<{CTYPES[self.like.param.dtype]}, {ADAM_THREADS}, {ADAM_STAGES}>"
        grid = (min(ADAM_BLOCKS * multiprocessors(self.device), chunks), 1)
        scalars = (ctypes.c_int64(chunks), ctypes.c_int64(self.block))
        shared_bytes = ADAM_STAGES * ADAM_THREADS * 64 + ADAM_STEP_BYTES
        return CudaPlan(ADAM_SOURCE, kernel, grid, ADAM_THREADS, scalars, shared_bytes=shared_bytes)


ADAMW_8BIT_SOURCE = Path(__file__).with_name("adamw_8bit.cu")
LOOKUP_BYTES = 2 * 2**16  # shared memory of the dynamic map's look-up tables, a block of threads
ADAMW_8BIT_THREADS = 512  # two teams of warps; 128 registers hold what the next pass reads too


class AdamW8bitTable(CudaTable):
    """AdamW whose moments are both in 8 bits; blocks of one size and format."""

    def __init__(self, rule: Rule, entries: Sequence[Entry], groups: int = 1, control: Tensor | None = None):
        super().__init__(rule, entries, groups, control)
        self.lookup = (lookup_tables(self.made),)

    @staticmethod
    def unsupported(entry: Entry) -> str:
        if entry.codes is None:
            return "moments that are not in 8 bits"
        if not is_decoupled(entry.options):
            return "Adam's weight decay, which is added to the gradient"
        if entry.gradient != entry.param.dtype:
            return "weights and gradients of several dtypes; the kernel is compiled for one"
        if entry.rounding != "nearest":
            return f"weights rounded by '{entry.rounding}'"
        if entry.options["amsgrad"]:
            return "AMSGrad"
        return "codes that are rounded stochastically" if entry.codes.stochastic else ""

    @staticmethod
    def form(entry: Entry) -> Hashable:
        assert entry.codes is not None  # of a weight that is supported
        return entry.param.dtype, entry.codes.block, entry.codes.format

    def kernel(self, chunks: int, factors: bool = False) -> CudaPlan:
        codes = self.like.codes
        assert codes is not None  # of a weight that is supported
        dynamic = codes.format == "dynamic"
        form = CTYPES[self.like.param.dtype], "DYNAMIC" if dynamic else "E4M3", codes.block, ADAMW_8BIT_THREADS
        kernel = f"adamw_8bit{'_scaled' * factors}<{', '.join(map(str, form))}>"
        grid = (min(multiprocessors(self.device), chunks), 1)
        scalars = (ctypes.c_int64(chunks), ctypes.c_int64(self.block))
        shared_bytes = dynamic * LOOKUP_BYTES + ADAMW_8BIT_THREADS // 32 * 16 + 16
        return CudaPlan(ADAMW_8BIT_SOURCE, kernel, grid, ADAMW_8BIT_THREADS, scalars, shared_bytes=shared_bytes)
