"""A thin adapter over Triton's interpreter: what each load and store touches, and programs in another order.

Importing it needs ``TRITON_INTERPRET=1``, and changes the interpreter of this process: every kernel that is launched inside
``recording`` gets *virtual* addresses for its tensors, far apart from each other. So an address says which tensor it was made
from, and an access is checked before memory is touched: one outside its tensor is left out (a load gives 0) and reported.
Lanes that are masked off and have no ``other`` get NaN (integers their least value), since a GPU gives them anything.

It touches only what Triton 3.6 to 3.9 have in common: four memory methods of the builder, the names of its arithmetic,
and the function and arguments of a launch. What it counts:

- ``bytes_read``, ``bytes_written``: elements that are not masked off, times their size
- ``sectors_read``, ``sectors_written``: different 32-byte sectors of each load and store of a program, which is what global
  memory moves when lanes are assigned in memory order, as Triton's coalescing pass does
- ``flops``: floating-point operations on every lane, masked or not: a fused multiply-add 2, a dot of M×K and K×N 2·M·N·K

The interpreter is not a GPU: its bf16 and TF32 arithmetic, the rounding of fused multiply-adds, and the order of sums
differ. So this certifies addresses and order, and values in fp32 and fp16 within a tolerance.
"""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton

from weft.learn.memory_model import SECTOR_BYTES

if os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("weft.learn.interpreter needs TRITON_INTERPRET=1, set before Triton is imported")

from triton.runtime import interpreter as triton_interpreter

BASE = 1 << 62  # of virtual addresses; real ones are below 2**57
REGION_BITS = 40  # each tensor has so many bits of address space, and begins in its middle
MIDDLE = 1 << (REGION_BITS - 1)
IN_FLIGHT = 8  # programs that take turns in the interleaved order
PROBLEMS = 3  # that a launch reports
OPERATIONS = {
    **dict.fromkeys(("fadd", "fsub", "fmul", "fdiv", "precise_divf", "approx_divf", "exp", "exp2", "log", "log2"), 1),
    **dict.fromkeys(("sin", "cos", "sqrt", "precise_sqrt", "rsqrt", "erf"), 1),
    "fma": 2,
}
COUNTS = (
    "bytes_read",
    "bytes_written",
    "sectors_read",
    "sectors_written",
    "flops",
    "loads",
    "stores",
    "atomics",
    "programs",
)


@dataclass
class Argument:
    """A tensor that a kernel was given: its name, where it lies, and who accessed which element."""

    name: str
    address: int
    virtual: int
    itemsize: int
    elements: int  # from the first to the last that the view reaches
    shape: tuple[int, ...]
    contiguous: bool
    storage: int = 0

    def at(self, offset: int) -> str:
        """An element's place, in words: ``x[1000]``, ``x[3, 5]``, or beyond the end."""
        if self.contiguous and len(self.shape) > 1 and 0 <= offset < self.elements:
            return f"{self.name}[{', '.join(str(int(i)) for i in np.unravel_index(offset, self.shape))}]"
        return f"{self.name}[{offset}]"


@dataclass
class Accesses:
    """Of each element of one storage: the programs that wrote, read and atomically changed it, and when. -1 is none."""

    size: int

    def __post_init__(self) -> None:
        self.writer, self.reader, self.other_reader, self.atomic = (np.full(self.size, -1) for _ in range(4))
        self.written_at = np.zeros(self.size, np.int64)


@dataclass
class Launch:
    """One launch of a kernel: what it accessed, and what was wrong with that."""

    kernel: str
    arguments: list[Argument]
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    problems: list[tuple[str, str]] = field(default_factory=list)
    grid: tuple[int, ...] = (1, 1, 1)
    trace: list[dict[str, Any]] = field(default_factory=list)
    # how far programs are ordered by atomics: the time of each one's last
    synchronised: dict[int, int] = field(default_factory=dict)
    accesses: dict[int, Accesses] = field(default_factory=dict)
    now: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "counts": self.counts,
            "problems": [list(p) for p in self.problems],
            "trace": self.trace,
        }

    def report(self, en: str, zh: str) -> None:
        if len(self.problems) < PROBLEMS:
            self.problems.append((en, zh))

    def program(self, number: int) -> str:
        """A program by its ids: ``2`` in a grid of one dimension, ``(2, 0)`` in one of two."""
        x, y, z = np.unravel_index(number, self.grid)
        if self.grid[2] > 1:
            return f"({x}, {y}, {z})"
        return f"({x}, {y})" if self.grid[1] > 1 else str(x)


class _State(threading.local):
    paused = 0  # arithmetic inside a reduction is counted as a whole
    atomic = False  # the load or store is an atomic one


state = _State()
launches: list[Launch] | None = None  # of the recording in progress
options: dict[str, Any] = {}
current: Launch | None = None
program = 0
turns: "Turns | None" = None


@contextmanager
def recording(chosen: dict[str, Any]) -> Iterator[list[Launch]]:
    """Records the launches inside.

    Args:
        chosen: ``order`` is ``""`` (one program after another), ``"shuffled"`` or ``"interleaved"`` (programs take turns at
            each load, store and atomic), ``seed`` draws it; ``trace`` keeps the accesses of so many programs.
    """
    global launches, options
    launches, options = [], chosen
    try:
        yield launches
    finally:
        launches = None


# ---- launches


def _launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of ``GridExecutor.__call__``."""
    global current
    if launches is None:
        return grid_call(self, *args, **kwargs)
    fn = self.fn
    import torch

    tensors: list[tuple[str, Any]] = []
    names = list(fn.__code__.co_varnames)
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(base := getattr(value, "base", value), torch.Tensor):
            tensors.append((name, base))
    current = Launch(fn.__name__, [_argument(i, name, x) for i, (name, x) in enumerate(tensors)])
    launches.append(current)
    self.fn = Programs(fn, current)
    try:
        return grid_call(self, *args, **kwargs)
    finally:
        self.fn, current = fn, None


def _argument(number: int, name: str, x: Any) -> Argument:
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    address = x.data_ptr()
    virtual = BASE + (number << REGION_BITS) + MIDDLE + address % 256  # as aligned as the real one
    storage = x.untyped_storage()
    return Argument(
        name, address, virtual, x.element_size(), span, tuple(x.shape), x.is_contiguous(), storage.data_ptr()
    )


class Programs:
    """In place of a kernel's function: its first call runs every program of the grid, in the order asked for."""

    def __init__(self, fn: Callable[..., None], launch: Launch) -> None:
        import inspect

        self.fn, self.launch = fn, launch
        self.__globals__, self.__name__ = fn.__globals__, launch.kernel
        self.__signature__ = inspect.signature(fn)

    def __call__(self, **arguments: Any) -> None:
        global program, turns
        builder = triton_interpreter.interpreter_builder
        if any(builder.grid_idx):
            return
        launch = self.launch
        launch.grid = tuple(map(int, builder.grid_dim))
        count = int(np.prod(launch.grid))
        launch.counts["programs"] = count
        arguments = {name: _virtual(value, launch) for name, value in arguments.items()}
        order = list(range(count))
        draw = random.Random(options.get("seed", 0))
        if options.get("order"):
            draw.shuffle(order)
        if options.get("order") == "interleaved":
            turns = Turns(self.fn, arguments, order, draw)
            try:
                turns.run()
            finally:
                turns = None
        else:
            for program in order:
                _enter(program)
                self.fn(**arguments)
        _enter(0)


def _enter(number: int) -> None:
    global program
    program = number
    builder = triton_interpreter.interpreter_builder
    builder.grid_idx = tuple(int(i) for i in np.unravel_index(number, builder.grid_dim))


class Turns:
    """Programs in threads, of which one at a time runs, until its next access to memory."""

    def __init__(
        self, fn: Callable[..., None], arguments: dict[str, Any], order: list[int], draw: random.Random
    ) -> None:
        self.fn, self.arguments, self.order, self.draw = fn, arguments, order, draw
        self.gates: dict[int, threading.Semaphore] = {}
        self.back = threading.Semaphore(0)
        self.error: BaseException | None = None

    def run(self) -> None:
        waiting = self.order[::-1]
        while (waiting or self.gates) and self.error is None:
            while waiting and len(self.gates) < IN_FLIGHT:
                number = waiting.pop()
                self.gates[number] = threading.Semaphore(0)
                threading.Thread(target=self._program, args=(number,), daemon=True).start()
            number = self.draw.choice(list(self.gates))
            _enter(number)
            self.gates[number].release()
            self.back.acquire()
        if self.error is not None:
            raise self.error

    def _program(self, number: int) -> None:
        self.gates[number].acquire()
        try:
            self.fn(**self.arguments)
        except BaseException as error:
            self.error = error
        del self.gates[number]
        self.back.release()

    def give_way(self) -> None:
        gate = self.gates[program]
        self.back.release()
        gate.acquire()


def _virtual(value: Any, launch: Launch) -> Any:
    """An argument with virtual addresses for real ones: a pointer, a descriptor, or a tuple of them."""
    if isinstance(value, tuple):
        made = [_virtual(v, launch) for v in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    handle = getattr(value, "handle", None)
    base: Any = getattr(handle, "base", handle)
    data = getattr(base, "data", None)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint64 or not hasattr(base.dtype, "element_ty"):
        return value
    for argument in launch.arguments:
        if int(data.reshape(-1)[0]) == argument.address:
            base.data = np.full_like(data, argument.virtual)
            break
    return value


# ---- memory


def _real(ptrs: Any, mask: Any, kind: str) -> tuple[Any, Any]:
    """Real addresses for virtual ones, and the mask without what lies outside its tensor."""
    if turns is not None:
        turns.give_way()
    launch = current
    addresses = ptrs.data
    active = np.broadcast_to(np.asarray(getattr(mask, "data", mask), dtype=bool), addresses.shape)
    if launch is None:
        return ptrs, mask
    handle = type(ptrs)
    flat = addresses.reshape(-1).astype(np.int64)
    lanes = np.flatnonzero(active.reshape(-1))
    real = flat.copy()
    allowed = active.reshape(-1).copy()
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    regions = (flat[lanes] - BASE) >> REGION_BITS
    for region in np.unique(regions):
        here = lanes[regions == region]
        if not 0 <= region < len(launch.arguments):
            who = launch.program(program)
            launch.report(
                f"a {kind} at an address that belongs to none of the kernel's tensors (program {who}, {_line('en')})",
                f"{kind} 的地址不属于核函数的任何张量（实例 {who}，{_line('zh')}）",
            )
            allowed[here] = False
            continue
        argument = launch.arguments[int(region)]
        offsets = flat[here] - argument.virtual
        outside = (offsets < 0) | (offsets + size > argument.elements * argument.itemsize)
        if outside.any():
            _out_of_bounds(
                launch, argument, offsets[outside] // argument.itemsize, here[outside], addresses.shape, kind
            )
            allowed[here[outside]] = False
            here, offsets = here[~outside], offsets[~outside]
        real[here] = offsets + argument.address
        _raced(launch, argument, (real[here] - argument.storage) // size, kind)
    touched = real[allowed]
    _count(launch, touched, size, kind)
    if options.get("trace") and program < options["trace"]:
        launch.trace.append(_traced(launch, flat, allowed, kind, addresses.shape))
    shape = addresses.shape
    return (
        handle(real.astype(np.uint64).reshape(shape), ptrs.dtype),
        handle(allowed.reshape(shape), triton.language.int1),
    )


def _out_of_bounds(launch: Launch, argument: Argument, offsets: Any, lanes: Any, shape: Any, kind: str) -> None:
    lane = int(lanes[0])
    place = ", ".join(str(int(i)) for i in np.unravel_index(lane, shape)) if shape else "0"
    size = f"{argument.elements:,}"
    who = launch.program(program)
    more = f", and {len(lanes) - 1:,} more lanes" if len(lanes) > 1 else ""
    more_zh = f"，另有 {len(lanes) - 1:,} 个位置" if len(lanes) > 1 else ""
    action = {"load": "reads", "store": "writes"}.get(kind, "changes")
    action_zh = {"load": "读取", "store": "写入"}.get(kind, "原子修改")
    launch.report(
        f"out of bounds: {launch.kernel} {action} {argument.at(int(offsets[0]))}, but {argument.name} has {size} elements "
        f"(program {who}, position [{place}] of the block{more}; {_line('en')})",
        f"越界：{launch.kernel} {action_zh} {argument.at(int(offsets[0]))}，但 {argument.name} 只有 {size} 个元素"
        f"（实例 {who}，块内位置 [{place}]{more_zh}；{_line('zh')}）",
    )


def _raced(launch: Launch, argument: Argument, elements: Any, kind: str) -> None:
    """Finds accesses to an element by two programs, one of which writes, that no atomic orders.

    Two programs are ordered where one's atomic comes after the write and before the other's atomic (acquire and release).
    """
    if not len(elements):
        return
    last = int(elements.max()) + 1
    seen = launch.accesses.get(argument.storage)
    if seen is None or seen.size < last:
        grown = Accesses(max(last, argument.elements))
        if seen is not None:
            for name in ("writer", "reader", "other_reader", "atomic", "written_at"):
                getattr(grown, name)[: seen.size] = getattr(seen, name)
        seen = launch.accesses[argument.storage] = grown
    launch.now += 1

    def others(who: Any) -> Any:
        return (who[elements] != -1) & (who[elements] != program)

    against = []
    if kind == "load":
        against = [("writes", "写入", seen.writer), ("atomically changes", "原子修改", seen.atomic)]
    elif kind == "store":
        against = [
            ("writes", "写入", seen.writer),
            ("reads", "读取", seen.reader),
            ("reads", "读取", seen.other_reader),
            ("atomically changes", "原子修改", seen.atomic),
        ]
    else:
        against = [("writes", "写入", seen.writer)]
    acquired = launch.synchronised.get(program, 0)
    for verb, verb_zh, who in against:
        conflict = others(who)
        if conflict.any():
            for at in elements[conflict]:
                other = int(who[at])
                released = launch.synchronised.get(other, 0)
                if seen.written_at[at] < released < acquired:
                    continue
                _report_race(launch, argument, int(at), other, verb, verb_zh, kind)
                break
    if kind == "load":
        fresh = seen.reader[elements] == -1
        seen.other_reader[elements[~fresh & others(seen.reader)]] = program
        seen.reader[elements[fresh]] = program
    elif kind == "store":
        seen.writer[elements] = program
        seen.written_at[elements] = launch.now
    else:
        seen.atomic[elements] = program
        seen.written_at[elements] = launch.now
        launch.synchronised[program] = launch.now


def _report_race(launch: Launch, argument: Argument, at: int, other: int, verb: str, verb_zh: str, kind: str) -> None:
    start = (argument.address - argument.storage) // argument.itemsize
    place = argument.at(at - start)
    mine = {"load": "reads", "store": "writes"}.get(kind, "atomically changes")
    mine_zh = {"load": "读取", "store": "写入"}.get(kind, "原子修改")
    launch.report(
        f"race: program {launch.program(program)} {mine} {place} and program {launch.program(other)} {verb} it, in no given "
        f"order ({launch.kernel}, {_line('en')})",
        f"竞争：实例 {launch.program(program)} {mine_zh} {place}，实例 {launch.program(other)} 也{verb_zh}它，先后不定"
        f"（{launch.kernel}，{_line('zh')}）",
    )


def _count(launch: Launch, touched: Any, size: int, kind: str) -> None:
    counts = launch.counts
    first = touched // SECTOR_BYTES
    sectors = len(np.unique(first)) if len(touched) else 0
    if kind in ("load", "atomic"):
        counts["bytes_read"] += len(touched) * size
        counts["sectors_read"] += sectors
    if kind in ("store", "atomic"):
        counts["bytes_written"] += len(touched) * size
        counts["sectors_written"] += sectors
    counts[f"{kind}s"] += 1


def _traced(launch: Launch, flat: Any, allowed: Any, kind: str, shape: Any) -> dict[str, Any]:
    """One access, for pictures: which elements of which tensor a program touched."""
    argument = launch.arguments[int((flat[allowed][0] - BASE) >> REGION_BITS)] if allowed.any() else None
    elements = (flat[allowed] - argument.virtual) // argument.itemsize if argument else np.empty(0, np.int64)
    return {
        "program": program,
        "kind": kind,
        "tensor": argument.name if argument else "",
        "shape": list(argument.shape) if argument else [],
        "elements": [int(e) for e in elements[:4096]],
        "block": [int(n) for n in shape],
        "masked": int(allowed.size - allowed.sum()),
        "line": _number() or 0,
    }


def _number() -> int | None:
    """The line of the kernel that is being run."""
    frame: Any = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if "/triton/" not in name and "/numpy/" not in name and not name.startswith("<") and name != __file__:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _line(language: str) -> str:
    number = _number()
    if number is None:
        return "unknown line" if language == "en" else "行号未知"
    return f"line {number}" if language == "en" else f"第 {number} 行"


def _masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
    kind = "atomic" if state.atomic else "load"
    if current is not None and other is None:
        other = _undefined(ptrs, np.broadcast_to(np.asarray(mask.data, dtype=bool), ptrs.data.shape))
    return builder_load(self, *_real(ptrs, mask, kind), other, *rest, **named)


def _undefined(ptrs: Any, active: Any) -> Any:
    """What a masked load without ``other`` gives lanes that are masked off: here NaN or the least integer."""
    dtype = ptrs.get_element_ty()
    values = np.zeros(active.shape, triton_interpreter._get_np_dtype(dtype))
    if dtype == triton.language.bfloat16:
        values[~active] = 0x7FC0  # its bits
    elif values.dtype.kind == "f":
        values[~active] = np.nan
    elif values.dtype.kind in "iu":
        values[~active] = np.iinfo(values.dtype).min
    return type(ptrs)(values, dtype)


def _masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
    kind = "atomic" if state.atomic else "store"
    real, allowed = _real(ptrs, mask, kind)
    if current is not None and kind == "store":
        _lanes_disagree(current, real.data, value.data, np.asarray(allowed.data))
    return builder_store(self, real, value, allowed, *rest, **named)


def _lanes_disagree(launch: Launch, addresses: Any, values: Any, allowed: Any) -> None:
    """Two positions of one store that write different values to one element: which one stays is not defined."""
    at = addresses[allowed]
    if at.size < 2:
        return
    order = np.argsort(at, axis=None, kind="stable")
    at, written = at.reshape(-1)[order], np.broadcast_to(values, addresses.shape)[allowed].reshape(-1)[order]
    same = (at[1:] == at[:-1]) & (written[1:] != written[:-1])
    if same.any():
        address = int(at[1:][same][0])
        for argument in launch.arguments:
            if 0 <= address - argument.address < argument.elements * argument.itemsize:
                place = argument.at((address - argument.address) // argument.itemsize)
                launch.report(
                    f"race: two positions of one store write different values to {place} "
                    f"(program {launch.program(program)}, {_line('en')})",
                    f"竞争：同一次存储的两个位置向 {place} 写入不同的值（实例 {launch.program(program)}，{_line('zh')}）",
                )
                return


def _atomic_rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
    real, allowed = _real(ptr, mask, "atomic")
    return builder_rmw(self, operation, real, val, allowed, *rest)


def _atomic_cas(self: Any, ptr: Any, *rest: Any) -> Any:
    every = type(ptr)(np.ones(ptr.data.shape, bool), triton.language.int1)
    real, allowed = _real(ptr, every, "atomic")
    if not np.asarray(allowed.data).all():
        raise IndexError("atomic_cas out of bounds")
    return builder_cas(self, real, *rest)


def _as_atomic(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        state.atomic = True
        try:
            return method(self, *args, **kwargs)
        finally:
            state.atomic = False

    return wrapped


# ---- arithmetic


def _counted(method: Callable[..., Any], each: int) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if current is not None and not state.paused and result.data.dtype.kind == "f":
            current.counts["flops"] += each * result.data.size
        return result

    return wrapped


def _dot(self: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
    result = builder_dot(self, a, b, *rest, **named)
    if current is not None:
        current.counts["flops"] += 2 * result.data.size * a.data.shape[-1]
    return result


def _reduce(self: Any, values: Any) -> Any:
    state.paused += 1
    try:
        result = reduce_apply(self, values)
    finally:
        state.paused -= 1
    one = values[0] if isinstance(values, tuple) else values
    if current is not None and isinstance(result, type(one)) and one.handle.data.dtype.kind == "f":
        current.counts["flops"] += one.handle.data.size - result.handle.data.size
    return result


def _patch_tensor(tensor: Any, scope: Any, *rest: Any) -> None:
    """Triton 3.6 turns a tensor into an index in a way that NumPy 2.4 refuses: ``range(0, n, BLOCK)`` with an argument n."""
    patch_tensor(tensor, scope, *rest)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


# ---- installed in the interpreter

try:
    Builder = triton_interpreter.InterpreterBuilder
    grid_call = triton_interpreter.GridExecutor.__call__
    builder_load, builder_store = Builder.create_masked_load, Builder.create_masked_store
    builder_rmw, builder_cas = Builder.create_atomic_rmw, Builder.create_atomic_cas
    patch_tensor = triton_interpreter._patch_lang_tensor
    builder_dot, reduce_apply = Builder.create_dot, triton_interpreter.ReduceOps.apply
except AttributeError as error:
    raise ImportError(
        f"Triton {triton.__version__} has another interpreter than weft learn knows ({error}); it is tested with 3.6 to 3.9: "
        "pip install 'triton>=3.6,<3.10', or a newer weft"
    ) from None

triton_interpreter.GridExecutor.__call__ = _launch
triton_interpreter._patch_lang_tensor = _patch_tensor
Builder.create_masked_load, Builder.create_masked_store = _masked_load, _masked_store
Builder.create_atomic_rmw, Builder.create_atomic_cas = _atomic_rmw, _atomic_cas
Builder.create_dot, triton_interpreter.ReduceOps.apply = _dot, _reduce
for _name, _each in OPERATIONS.items():
    if _method := getattr(Builder, f"create_{_name}", None):
        setattr(Builder, f"create_{_name}", _counted(_method, _each))
for _name in ("create_atomic_load", "create_atomic_store"):
    if _method := getattr(Builder, _name, None):
        setattr(Builder, _name, _as_atomic(_method))
