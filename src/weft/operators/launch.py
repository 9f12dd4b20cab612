"""How weft launches Triton kernels: a plan is a kernel with everything but its tensors decided.

The same plan is *launched* (on a GPU, without Triton's argument binder after the first time), *interpreted* (on the CPU,
``TRITON_INTERPRET=1``), *traced* (inside ``torch.compile`` and friends, through ``wrap_triton``), or *compiled only*
(for an architecture that is not there: ``weft compile-check``).
"""

import collections
import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETING: bool = knobs.runtime.interpret  # read once: kernels were made for one mode when they were imported

_compile_only: "CompileRequest | None" = None

if INTERPRETING:
    from triton.runtime import interpreter

    _rounded_twice = interpreter.InterpreterBuilder.create_fma

    def _fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        """x · y + z, rounded once as a GPU does; the interpreter's own rounds the product as well."""
        if z.data.dtype.name != "float32":
            return _rounded_twice(self, x, y, z)
        wide = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(wide.astype("float32"), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = _fused


@dataclass
class CompileRequest:
    """While one is active, launches compile for ``sm`` and are handed to ``sink`` instead of running."""

    sm: int
    sink: Callable[..., None]


@contextlib.contextmanager
def compiling_for(sm: int, sink: Callable[..., None]) -> Iterator[None]:
    """Within it, every plan compiles its kernel for ``sm_<sm>`` and calls ``sink(name, cubin, shared_bytes, threads,
    language)``, ``triton`` or ``cuda``."""
    global _compile_only
    previous, _compile_only = _compile_only, CompileRequest(sm, sink)
    try:
        yield
    finally:
        _compile_only = previous


def compile_request() -> CompileRequest | None:
    return _compile_only


# ---- early start ---------------------------------------------------------------------------------------------------------
#
# Programmatic dependent launch: a kernel begins while its predecessor ends, reads what no kernel writes, and waits
# (``griddepcontrol.wait``) for the predecessor's end before it reads or writes anything else. A kernel that never waits would
# race with all that came before it, and one that is launched as usual begins when its predecessor has ended.

_of_thread = threading.local()


@contextlib.contextmanager
def early_start() -> Iterator[None]:
    """Within it, on sm_90 and newer, kernels that are made for it start early, in this thread. The caller answers for weights:
    no kernel that may still run writes them."""
    previous, _of_thread.early = early_wanted(), True
    try:
        yield
    finally:
        _of_thread.early = previous


def early_wanted() -> bool:
    return getattr(_of_thread, "early", False)


def starts_early(device: torch.device) -> bool:
    """Whether a plan that is made now is launched for an early start: its kernel then waits."""
    return early_wanted() and not INTERPRETING and target_sm(device) >= 90


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr):
    """Lets the successor begin, and waits for what came before: a kernel of an early start calls it in every program, before it
    reads or writes anything but weights."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@torch.compiler.assume_constant_result  # a compiler would trace through the cache, and warn
def _device_sm(index: int) -> int:
    return _capability(index)


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def target_sm(device: torch.device) -> int:
    """Architecture that a launch on this device is for: the device's, or the one being compiled for."""
    if _compile_only is not None:
        return _compile_only.sm
    return _device_sm(device.index or 0) if device.type == "cuda" and torch.cuda.is_available() else 80


@functools.cache
def _device_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device (an H100's number where there is none to ask)."""
    if device.type == "cuda" and torch.cuda.is_available():
        return _device_sms(device.index or 0)
    return 4 if INTERPRETING else 132


@dataclass
class Plan:
    """A kernel, its grid, scalars and compile-time constants. Call it with the tensors, which come first in the kernel's
    signature, and then with numbers that differ from call to call, such as a seed; then come ``scalars``, then ``constants``.
    The kernel annotates such numbers' types and lists them as ``do_not_specialize``.

    A plan is made for given shapes, strides, dtypes, pointer alignment and device: what it specialised on at the first
    call must hold at every call, so keep plans in a :class:`Plans` under a key that says all of these.
    """

    kernel: Any
    grid: tuple[int, ...]
    scalars: tuple[int | float, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    early: bool = False  # launched for an early start, which the kernel is made for
    _launch: Callable[..., None] | None = field(default=None, repr=False)

    def __call__(self, *arguments: Any) -> None:
        if self._launch is not None:
            self._launch(*arguments)
        else:
            self._first(*arguments)

    def _first(self, *arguments: Any) -> None:
        tensors = tuple(a for a in arguments if isinstance(a, torch.Tensor))
        if 0 in self.grid or (tensors[0].is_meta and _compile_only is None):
            return
        options = {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}
        if not INTERPRETING:
            learn_divisors(self.kernel)
        if _compile_only is not None:
            self._compile(arguments, options)
        elif INTERPRETING:
            self.kernel[self.grid](*arguments, *self.scalars, **self.constants)
        elif any(t.__class__ not in PLAIN for t in tensors):
            torch.library.wrap_triton(self.kernel)[self.grid](*arguments, *self.scalars, **options)
        else:
            early = {"launch_pdl": True} if self.early else {}
            compiled = self.kernel[self.grid](*arguments, *self.scalars, **options, **early)
            constants = (self.constants[name] for name in self.kernel.arg_names if name in self.constants)
            self._launch = _direct(compiled, self.grid, (*self.scalars, *constants))

    def _compile(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        request = _compile_only
        assert request is not None  # the caller looked
        types = (a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)
        with _stub_driver(request.sm):
            compiled = self.kernel.warmup(*types, *self.scalars, grid=self.grid, **options)
        threads = self.num_warps * 32
        request.sink(compiled.metadata.name, compiled.asm["cubin"], compiled.metadata.shared, threads, "triton")


class DescriptorPlan(Plan):
    """A plan whose kernel makes tensor descriptors itself, in memory that Triton asks the host for at each launch."""

    def __call__(self, *arguments: Any) -> None:
        if not INTERPRETING and _compile_only is None:
            triton.set_allocator(_memory)  # of this thread: autograd has others
        super().__call__(*arguments)


def _memory(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")  # PyTorch's allocator gives multiples of 512 bytes


# ---- what Triton knows of a kernel's integers ---------------------------------------------------------------------------
#
# Triton compiles a kernel anew where 16 divides an integer, and learns nothing of one that only 8 divides: rows of 4,104 bf16,
# which 16-byte vectors divide, are then read two bytes at a time. So a kernel's binder here finds 8, 4 and 2 too.

DIVISORS = {"8": 8, "4": 4, "2": 2}  # by what a specialisation then has in place of Triton's "D"
COUNTED = {"M", "PARTS"}  # rows and parts, which are in no address of neighbours: not compiled for each divisor


def learn_divisors(kernel: Any) -> None:
    """From now on the kernel is specialised also on 8, 4 and 2 that divide its integers. In Triton 3.6 to 3.9 a kernel has, for
    each device, caches, target, back end and binder."""
    if isinstance(kernel.device_caches.default_factory, functools.partial):
        return
    kernel.device_caches = collections.defaultdict(functools.partial(_caches, kernel))


def _caches(kernel: Any) -> tuple[Any, ...]:
    *caches, target, backend, binder = kernel.create_binder()
    learned = copy.copy(backend)
    learned.__class__ = _learned(backend.__class__)
    return *caches, target, learned, functools.partial(_bind, binder)


@functools.cache
def _learned(backend: Any) -> Any:
    def parse_attr(description: str) -> Any:
        divisor = DIVISORS.get(description)
        return backend.parse_attr(description) if divisor is None else [["tt.divisibility", divisor]]

    return type(backend.__name__, (backend,), {"parse_attr": staticmethod(parse_attr)})


def _bind(binder: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    bound, specialised, options = binder(*arguments, **named)
    for at, (name, value) in enumerate(bound.items()):
        kind, known = specialised[at]
        if known == "" and type(value) is int and name not in COUNTED and value % 2 == 0:
            specialised[at] = kind, str(min(value & -value, 8))
    return bound, specialised, options


PLAIN = {torch.Tensor, torch.nn.Parameter}  # classes whose data_ptr is real memory; fake and wrapped tensors are others


def _direct(compiled: Any, grid: tuple[int, ...], rest: tuple[Any, ...]) -> Callable[..., None]:
    """A launch of a compiled kernel without Triton's binder, which costs more than the launch itself. The runner's
    arguments are the same in Triton 3.6 to 3.9: grid, stream, function, metadata, launch metadata, hooks, arguments."""
    x, y, z = (*grid, 1, 1)[:3]
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    device = torch.cuda.current_device()
    stream_of = torch._C._cuda_getCurrentRawStream
    runtime = knobs.runtime

    def launch(*arguments: Any) -> None:
        hook = runtime.launch_enter_hook  # a profiler's: it wants metadata that only the full path makes
        stream = stream_of(device)
        metadata = None if hook is None else compiled.launch_metadata(grid, stream, *arguments, *rest)
        run(x, y, z, stream, function, packed, metadata, hook, runtime.launch_exit_hook, *arguments, *rest)

    return launch


class Plans:
    """Plans under keys of all that they depend on: shapes, strides, dtypes, alignment and device of the tensors, and the
    options. Programs meet few shapes; one that meets endlessly many starts over instead of growing."""

    LIMIT = 4096
    all: ClassVar["list[Plans]"] = []

    def __init__(self, build: Callable[..., Any]):
        self.build = build
        self.known: dict[Any, Any] = {}
        Plans.all.append(self)

    def of(self, tensors: tuple[torch.Tensor, ...], *options: Any) -> Any:
        """The plan for these tensors (or None where ``build`` said so); built when there is none, and built afresh while
        tracing (where shapes may be symbolic), interpreting or compiling."""
        for t in tensors:
            if t.__class__ not in PLAIN or not t.is_cuda or t.is_neg():
                _check_signs(tensors)
                return self.build(*tensors, *options)
        try:
            key = _key(tensors, options)
            plan = self.known.get(key, self)
        except (
            TypeError,
            RuntimeError,
        ):  # an option that is no key, a tensor without memory: building says what is wrong
            return self.build(*tensors, *options)
        if plan is self:
            plan = self.build(*tensors, *options)
            if len(self.known) >= self.LIMIT:
                self.known.clear()
            self.known[key] = plan
        return plan


def _check_signs(tensors: tuple[torch.Tensor, ...]) -> None:
    for t in tensors:
        if t.is_neg():
            raise NotImplementedError(
                f"a tensor of shape {tuple(t.shape)} is negated by PyTorch when it is read (Tensor.is_neg), and kernels read "
                "memory as it is; give resolve_neg() of it"
            )


def _key(tensors: tuple[torch.Tensor, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    key: list[Any] = [tensors[0].get_device(), early_wanted(), options]
    key += map(type, options)  # 1, 1.0 and True are equal, but not alike
    for t in tensors:
        key += (t.shape, t.stride(), t.dtype, t.data_ptr() & 15)
    return tuple(key)


@contextlib.contextmanager
def _stub_driver(sm: int) -> Iterator[None]:
    """A Triton driver for an architecture that is not there; enough for ``warmup``."""
    from triton.backends.compiler import GPUTarget

    stub = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", sm, 32),
        get_current_device=lambda: -sm,  # kernels are cached by device: one "device" for each architecture
        get_current_stream=lambda device: 0,
        get_device_capability=lambda device: divmod(sm, 10),
    )
    previous = triton.runtime.driver._active  # None before the first launch: Triton then finds the driver itself
    triton.runtime.driver.set_active(stub)
    try:
        yield
    finally:
        triton.runtime.driver.set_active(previous)
