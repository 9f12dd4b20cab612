"""What an operator is: its axes, inputs, reference, cost, tolerance, workloads, implementations and mutants.

Everything that concerns an operator is said once, in its definition; verifier, timer, roofline, report and docs take it from
there (``docs/architecture.md``).
"""

import dataclasses
import difflib
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "int32": 4, "int64": 8}
OURS = ("triton", "gluon", "cuda", "weft")  # back ends of weft's own implementations; all others are peers

PUBLIC = "weft.ops"  # the public function, as an implementation: what the dispatch table chooses

MOST_LISTED = 24  # known names that an error lists; of more, only the closest ones if any is close


class UnknownName(ValueError):
    """Unknown name; lists the valid names and the closest match."""

    def __init__(self, kind: str, name: str, known: Iterable[str]):
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        listed = ", ".join(known) or "none"
        if close and len(known) > MOST_LISTED:
            listed = (
                ", ".join(sorted(difflib.get_close_matches(name, known, n=6, cutoff=0.0))) + f" … {len(known):,} in all"
            )
        super().__init__(f"unknown {kind} '{name}'{hint} (there are: {listed})")


class Declined(NotImplementedError):
    """Raised by an implementation that does not support an input; the message is the reason."""


def torch_dtype(name: str) -> Any:
    """``"bf16"`` → ``torch.bfloat16``."""
    import torch

    return {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "int8": torch.int8,
        "int32": torch.int32,
        "int64": torch.int64,
    }[name]


@dataclass(frozen=True)
class Workload:
    """A point at which an operator is verified or timed: sizes of its axes, a dtype, and options.

    ``Workload({"M": 4096, "N": 5000}, "bf16", {"layout": "sliced"})`` is written ``M=4096,N=5000,layout=sliced``.
    """

    axes: Mapping[str, int]
    dtype: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, axis: str) -> int:
        return self.axes[axis]

    def option(self, name: str, default: Any = None) -> Any:
        return self.options.get(name, default)

    @property
    def bytes_per_element(self) -> int:
        return BYTES[self.dtype]

    def at(self, dtype: str) -> "Workload":
        return dataclasses.replace(self, dtype=dtype)

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in (*self.axes.items(), *self.options.items()))


def workload(dtype: str = "", /, **sizes_and_options: Any) -> Workload:
    """``workload(M=3, N=5, layout="sliced")``: upper-case names are axes, the others options."""
    axes = {k: v for k, v in sizes_and_options.items() if k.isupper()}
    return Workload(axes, dtype, {k: v for k, v in sizes_and_options.items() if not k.isupper()})


def workloads(axes: str, *sizes: tuple[int, ...], dtype: str = "", **options: Any) -> list[Workload]:
    """``workloads("MN", (3, 5), (2, 256), layout="sliced")``: one for each tuple of the axes' sizes."""
    return [Workload(dict(zip(axes, of, strict=True)), dtype, options) for of in sizes]


@dataclass(frozen=True)
class Cost:
    """Compulsory work: every input byte read once, every output byte written once, and the arithmetic."""

    reads: int = 0  # bytes of device memory, as ``writes``
    writes: int = 0
    # multiply-adds counted twice, by the dtype of the matrix unit (``{"bf16": 2*M*N*K}``)
    matrix_flops: Mapping[str, float] = field(default_factory=dict)
    vector_flops: float = 0  # ordinary floating-point operations
    special_ops: float = 0  # exponentials, logarithms, divisions, square roots

    @property
    def bytes_moved(self) -> int:
        return self.reads + self.writes

    @property
    def flops(self) -> float:
        return sum(self.matrix_flops.values()) + self.vector_flops + self.special_ops


@dataclass(frozen=True)
class Tolerance:
    """How large an error may be. Errors are taken against float64, element by element, relative to
    ``max(|reference|, scale)``.

    The root mean square may be ``multiple`` times PyTorch's own in the same dtype; the maximum ``multiple`` times PyTorch's
    maximum, or times four of its root mean squares where its maximum happens to be smaller than such a spread makes likely.

    Args:
        multiple: of the error that PyTorch itself makes.
        ulps: floor of the maximum, in units of last place (machine epsilon) of the output's dtype: half the number of
            roundings. The root mean square's floor is half of it (of n elements 1 + 1/√n times as much).
        eps: the epsilon that ``ulps`` counts, of a workload, where it is larger than the result's: of operands or parts of the
            result (logits of 16 bits) that are rounded to fewer bits.
        terms: how many terms of a workload are summed one after the other in fp32. Such a sum of n random terms errs by
            0.2·√n ulp in the root mean square, so 1.4·√n fp32 epsilons (7 standard deviations: results may
            have 2²⁸ elements) are added to the floor.
        scale: ``"element"`` (purely relative; only for results without cancellation), ``"row"`` or ``"tensor"`` (not
            less than the reference's root mean square along its last dimension, or over all of it: for sums whose terms
            cancel), or a function ``(arguments, gradients) -> list of tensors``, one for each result, that gives the
            magnitude of the terms (for results that cancel altogether). It gets float64 values.
        exact: the result must be PyTorch's, bit for bit.
        neighbours: for integers that encode rounded numbers, the share of elements (at least one) that may differ from
            PyTorch's by 1: where a number lies between two codes.
        ranks: ``(workload, result) -> integers`` that are compared instead of codes that are not in the order of the numbers
            they encode (the bits of fp8, of which two are zeros).
    """

    multiple: float = 2.0
    ulps: float = 1.0
    eps: Callable[[Workload], float] | None = None
    terms: Callable[[Workload], int] | None = None
    scale: str | Callable[..., Any] = "row"
    exact: bool = False
    neighbours: float = 0.0
    ranks: Callable[[Workload, Any], Any] | None = None


@dataclass(frozen=True)
class Mutant:
    """An implementation wrong on purpose. ``function`` takes the operator's arguments (for ``backward`` the output gradients
    first) and returns a wrong result of the right form."""

    name: str
    function: Callable[..., Any]
    direction: str = "forward"


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator."""

    operator: str
    name: str
    function: Callable[..., Any]  # takes the operator's arguments by name, returns a tensor or a tuple of tensors
    backend: str  # ``triton``, ``gluon`` or ``cuda`` (ours); anything else is a peer
    arch: str = ""  # of our kernels: the least architecture declared, ``">=sm_80"``, or the only one, ``"==sm_90"``
    devices: tuple[str, ...] = ("cuda", "cpu")  # where it runs; Triton kernels on a CPU in the interpreter
    dtypes: tuple[str, ...] = ()  # supported ones; all of the operator's when empty
    directions: tuple[str, ...] = ()  # likewise
    requires: str = ""  # distribution that must be installed
    rung: int | None = None  # position in the ladder of teaching versions; None: meant for use
    idea: str = ""  # what this step of the ladder changes, in one line

    @property
    def ours(self) -> bool:
        return self.backend in OURS

    @property
    def architectures(self) -> list[int]:
        """The architectures that weft compiles this implementation for."""
        if not self.ours:
            return []
        return [sm for sm in ARCHITECTURES if self.declares(sm)]

    def declares(self, sm: int) -> bool:
        wanted = int(self.arch[len(">=sm_") :] or 0)
        return sm == wanted if self.arch.startswith("==") else sm >= wanted

    def absent(self, device: str, sm: int | None = None) -> str:
        """Why it cannot run here (an empty string when it can)."""
        if self.requires and not _installed(self.requires):
            return f"{self.requires} is not installed (pip install '{self.requires}')"
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if device == "cuda" and sm is not None and not self.declares(sm):
            return f"needs {self.arch}, this GPU is sm_{sm}"
        return ""


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# Shared memory that one block may have, bytes (CUDA C++ Programming Guide, technical specifications per architecture).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
ARCHITECTURES = tuple(SHARED_LIMIT)


@dataclass
class Operator:
    """The definition of an operator.

    Args:
        inputs: ``(workload, generator, device) -> dict of arguments``; random, never zeros or all equal. Arguments may
            be tensors, lists, dicts and dataclasses of tensors, callables and plain values.
        workloads: ``verify`` (odd, tiny, strided, non-finite …), ``bench``, ``quick`` (a few points for the report),
            ``tune``, ``model`` (shapes of real models), ``transfers`` (timed on CPU and GPU, with the copies between them).
        options: of workloads, and the values that each may have: ``{"layout": ("NN", "NT"), "rows": range(1, 1000)}``.
        predicted: ``(workload, direction) -> share of the ceiling`` that a model of the machine predicts, where there is
            one; records keep it as the detail ``predicted_share``.
        workspace: ``workload -> bytes`` that a forward call may allocate besides its result. Without it, a call that
            allocates more than its result made a hidden copy.
    """

    name: str
    axes: Mapping[str, str]  # symbol → meaning (``{"M": "rows", "N": "columns"}``)
    inputs: Callable[[Workload, Any, str], dict[str, Any]]
    reference: Callable[..., Any]  # in PyTorch: in float64 for the verifier; what the public function runs on a CPU
    cost: Callable[[Workload, str], Cost]  # of a workload and a direction
    workloads: Mapping[str, Sequence[Workload]]
    tolerance: Tolerance | Mapping[str, Tolerance] = Tolerance()  # for all directions, or for each
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")  # that workloads without a dtype are run in
    directions: tuple[str, ...] = ()  # when empty forward, and backward if anything is ``differentiable``
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()  # names of the arguments that have gradients
    mutates: tuple[str, ...] = ()  # names of arguments that a call changes in place; compared like outputs
    mutants: Sequence[Mutant] = ()  # implementations wrong on purpose, at least four
    predicted: Callable[[Workload, str], float] | None = None
    workspace: Callable[[Workload], int] = lambda w: 0
    implementations: dict[str, Implementation] = field(default_factory=dict)
    public: Callable[..., Any] | None = None  # the function users call, set by :meth:`function`
    chooser: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.directions = self.directions or (("forward", "backward") if self.differentiable else ("forward",))
        for direction in self.directions:
            if direction not in ("forward", "backward"):
                raise UnknownName("direction", direction, ("forward", "backward"))

    def implementation(
        self, name: str, *, backend: str = "", **declared: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers the decorated function as an implementation; the back end is its name unless given. CUDA C++ runs on CUDA
        devices alone, unless declared otherwise."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            if name in self.implementations:
                raise ValueError(f"operator '{self.name}' already has an implementation '{name}'")
            devices = {"devices": ("cuda",)} if (backend or name) == "cuda" else {}
            made = Implementation(self.name, name, function, backend or name, **{**devices, **declared})
            self.implementations[name] = made
            return function

        return register

    def rung(self, number: int, name: str, *, idea: str, **declared: Any) -> Callable[..., Any]:
        """Registers a teaching version: one step of the operator's ladder."""
        return self.implementation(f"ladder-{number}-{name}", rung=number, idea=idea, **declared)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Marks the public function (``weft.ops.<name>``)."""
        function.__name__ = function.__qualname__ = self.name  # what Python's own errors call it
        function.__module__ = "weft.ops"  # and where pickle finds it
        self.public = function
        return function

    def choice(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Marks the function that says which implementation the public function uses for some arguments, and why. An operator
        with a gradient of its own takes ``direction="backward"`` too."""
        self.chooser = function
        return function

    def tolerance_of(self, direction: str) -> Tolerance:
        return self.tolerance if isinstance(self.tolerance, Tolerance) else self.tolerance[direction]

    def find(self, name: str) -> Implementation:
        if name == PUBLIC and self.public is not None:
            return Implementation(self.name, name, self.public, "weft")
        if name not in self.implementations:
            raise UnknownName(f"implementation of '{self.name}'", name, self.implementations)
        return self.implementations[name]

    def cases(self, which: str, dtypes: Iterable[str] | None = None) -> Iterator[Workload]:
        """The workloads of a set, those without a dtype once for each dtype."""
        if which not in self.workloads:
            raise UnknownName(f"workload set of '{self.name}'", which, self.workloads)
        wanted = tuple(dtypes or ())
        for dtype in wanted:
            if dtype not in self.dtypes:
                raise UnknownName(f"dtype of '{self.name}'", dtype, self.dtypes)
        for item in self.workloads[which]:
            for dtype in (item.dtype,) if item.dtype else self.dtypes:
                if not wanted or dtype in wanted:
                    yield item.at(dtype)

    def parse(self, text: str, dtype: str | None = None) -> Workload:
        """``M=4096,N=5000,layout=sliced`` → a workload. Sizes may be written 4k or 2**20.

        Raises:
            ValueError: an unknown, missing or repeated axis, option or dtype, a size that is not a whole number, a value that
                an option does not have.
        """
        if dtype is not None and dtype not in self.dtypes:
            raise UnknownName(f"dtype of '{self.name}'", dtype, self.dtypes)
        axes: dict[str, int] = {}
        options: dict[str, Any] = {}
        for part in (p.strip() for p in text.split(",")) if text.strip() else ():
            name, equals, value = part.partition("=")
            if not equals:
                raise ValueError(
                    f"workload part '{part}' of '{self.name}' should read NAME=VALUE, such as {self.example}"
                )
            if name in axes or name in options:
                raise ValueError(f"workload '{text}' of '{self.name}' names {name} twice")
            if name in self.axes:
                axes[name] = _size(name, value)
            elif name.isupper():
                raise UnknownName(f"axis of '{self.name}'", name, self.axes)
            else:
                if name not in self.options:
                    raise UnknownName(f"option of '{self.name}'", name, self.options)
                options[name] = self._allowed(name, value)
        if missing := [a for a in self.axes if a not in axes]:
            raise ValueError(f"workload '{text}' of '{self.name}' lacks {', '.join(missing)}: write {self.example}")
        if math.prod(axes.values()) >= 2**59:
            raise ValueError(
                f"workload '{text}' of '{self.name}' spans {math.prod(axes.values()):.3g} points; expected under 2**59"
            )
        return Workload(axes, dtype or "", options)

    def _allowed(self, name: str, text: str) -> Any:
        """The value of an option that is written so."""
        allowed = self.options[name]
        if isinstance(allowed, range):
            if text.removeprefix("-").isdecimal() and int(text) in allowed:
                return int(text)
            expected = f"a whole number, {allowed.start} … {allowed.stop - 1}"
            raise ValueError(f"option {name} of '{self.name}' is {text}; expected {expected}")
        for value in allowed:
            if str(value) == text:
                return value
        raise UnknownName(f"{name} of '{self.name}'", text, map(str, allowed))

    @property
    def example(self) -> str:
        """A small workload, as a user would write it."""
        sizes = next((w.axes for w in self.workloads.get("quick", ())), dict.fromkeys(self.axes, 64))
        return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def _size(name: str, value: str) -> int:
    scale = {"k": 2**10, "m": 2**20, "g": 2**30}.get(value[-1:].lower(), 1)
    digits = value[:-1] if scale > 1 else value
    base, power, exponent = digits.partition("**")
    try:
        size = int(base)
        if power:
            size = size ** int(exponent) if 0 <= int(exponent) <= 62 and abs(size) < 2**31 else 2**62
    except ValueError:
        raise ValueError(
            f"size of axis {name} is '{value}'; expected a whole number such as 4096, 4k or 2**12"
        ) from None
    if size < 0 or size * scale >= 2**62:
        raise ValueError(f"size of axis {name} is {value}; expected 0 or more, and under 2**62")
    return size * scale
