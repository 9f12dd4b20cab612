"""An access pattern as an operator: which kernel a call takes, the call, its implementations, what all definitions share; and
the copy that several patterns are.

Why patterns differ: docs/notes/learn/cuda_model.en.md.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, eager, guarded, materialised, on_gpu
from weft.operators.checks import check_shape, check_tensor
from weft.operators.configs import Config, Configurations, tiles
from weft.operators.dispatch import ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import INTERPRETING, Plan, Plans
from weft.operators.memory_access.machine import Machine, here
from weft.operators.random_inputs import drawn

OPTIONS = {"layout": ("contiguous", "unaligned", "strided"), "values": ("normal", "large", "tiny", "nonfinite")}
LARGEST = 2**28  # elements that are read or written in the benchmarks
THREADS = 256  # of a block where the pattern says how many


@dataclass(frozen=True, eq=False)
class Pattern:
    """One way of going through memory, the option of a call that says which one it is."""

    name: str
    reference: Callable[..., Tensor]
    triton: Callable[..., Any]  # ``(*tensors, *options) -> plan``, called with the tensors and the result
    cuda: Callable[..., Any] | None = None
    # an int that a call takes beside x [N]: its name, its allowed values and its default
    option: tuple[str, Sequence[int], int] | None = None
    # of x and the option, the tensors that a kernel is given and the options of its plan
    tensors: Callable[..., tuple[tuple[Tensor, ...], tuple[Any, ...]]] = lambda x, *options: ((x,), options)
    result: Callable[..., Tensor] = lambda x, *options: torch.empty_like(x)  # empty, of ``(*tensors, *options)``
    check: Callable[..., tuple[Any, ...]] | None = None  # of the arguments, in place of :meth:`_checked`
    declines: Callable[..., str] = lambda *tensors: (
        ""
    )  # why kernels do not take them, besides strides ("" when they do)
    cuda_declines: Callable[..., str] = lambda *tensors: ""  # why the CUDA kernel alone does not

    def lowered(self, *args: Any, **named: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The arguments of a call, checked, as tensors and options of a plan."""
        return self.tensors(*(self.check or self._checked)(*args, **named))

    def _checked(self, x: Any, *value: Any, **named: Any) -> tuple[Any, ...]:
        check_tensor(self.name, "x", x, sharded=False)
        check_shape(self.name, "x", x, x.ndim == 1, "one dimension")
        if self.option is None:
            return (x,)
        name, allowed, default = self.option
        number = (*value, *named.values(), default)[0]
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{self.name}: argument '{name}' is {number!r}; expected an int")
        if number not in allowed:
            span = f"{allowed[0]} … {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
            raise ValueError(f"{self.name}: argument '{name}' is {number}; expected {span}")
        return x, number


class Access(Call):
    """``(*tensors, pattern, *options)``"""

    def __init__(self, *arguments: Any):
        at = next(i for i, a in enumerate(arguments) if isinstance(a, Pattern))
        self.tensors, self.pattern, self.options = arguments[:at], arguments[at], arguments[at + 1 :]
        self.x = self.tensors[0]

    @property
    def empty(self) -> bool:
        return not self.pattern.result(*self.tensors, *self.options).numel()

    @property
    def wants_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


STRIDED = "strides: the pattern is measured on contiguous tensors"


def scattered(c: Access) -> str:
    return "" if all(t.is_contiguous() for t in c.tensors) else STRIDED


def declined(c: Access) -> str:
    return scattered(c) or c.pattern.declines(*c.tensors)


def no_cuda(c: Access) -> str:
    if c.pattern.cuda is None:
        return "Triton's kernel has this pattern too"
    return declined(c) or c.pattern.cuda_declines(*c.tensors)


FORWARD = Dispatch(
    Access, ON_CPU, TRACED,
    Route("torch", lambda c: c.wants_gradient, "a gradient is wanted: these kernels measure a forward pass"),
    Route("torch", lambda c: c.empty, "an empty result: nothing to launch"),
    Route("torch", lambda c: bool(scattered(c)), STRIDED),
    Route("torch", lambda c: bool(declined(c)), "blocks of other sizes than powers of two up to 2048 elements"),
    # a stride of 32 has all lanes wait for one bank
    Route("cuda", lambda c: not INTERPRETING and not any(stride == 32 for stride in c.options),
          "data in shared memory, which Triton would read from L1 or count in smaller tiles",
          lambda c: c.pattern.cuda(*c.tensors, *c.options), no_cuda),
    Route("triton", lambda c: True, "contiguous tensors: the pattern is the kernel's own",
          lambda c: c.pattern.triton(*c.tensors, *c.options), declined),
)  # fmt: skip


def call(pattern: Pattern, *args: Any) -> Tensor:
    """What the public functions do."""
    tensors, options = pattern.lowered(*args)
    if eager(*tensors, autocast=True) and (plan := FORWARD.of(tensors, pattern, *options)) is not None:
        out = pattern.result(*tensors, *options)
        plan(*tensors, out)
        return out
    if FORWARD.choose(*tensors, pattern, *options).implementation == "torch":
        return pattern.reference(*args)
    return _launch(FORWARD, pattern, *args)


def _launch(plans: Plans, pattern: Pattern, *args: Any, **named: Any) -> Tensor:
    """By a kernel of ``plans``; on the CPU, by the reference."""
    tensors, options = pattern.lowered(*args, **named)
    if not on_gpu(tensors[0]):
        return pattern.reference(*args, **named)
    tensors = materialised(*tensors)
    out = pattern.result(*tensors, *options)
    if out.numel():
        plans.of(tensors, pattern, *options)(*tensors, out)
    return out


def implement(
    operator: Operator, pattern: Pattern, torch_function: Callable[..., Tensor] | None = None, *, compiled: bool = True
) -> None:
    """Registers our kernels, PyTorch's way (the reference unless given) and, if ``compiled``, ``torch.compile`` of it."""

    def choose(*args: Any, **named: Any) -> Choice:
        tensors, options = pattern.lowered(*args, **named)
        return FORWARD.choose(*tensors, pattern, *options)

    operator.choice(guarded(choose))
    found = torch_function or pattern.reference
    for name in ("triton", *(() if pattern.cuda is None else ("cuda",))):
        kernel = functools.partial(_launch, FORWARD.kernel(name), pattern)
        operator.implementation(name, arch=">=sm_80")(kernel)
    operator.implementation("torch")(found)
    if compiled:
        operator.implementation("torch.compile", devices=("cuda",))(peers.Compiled(found))


def copy_cost(w: Workload, direction: str) -> Cost:
    """Of the elements that are wanted, not of those between them."""
    size = w["N"] * w.bytes_per_element
    return Cost(reads=size, writes=size)


def define(
    pattern: Pattern, *, verify: Sequence[Workload], bench: Sequence[Workload], huge: Workload, wrong: Sequence[Mutant],
    predicted: Callable[[Workload, Machine], float] = lambda w, machine: 1.0, axis: str = "elements",
    length: Callable[[int, Any], int] = lambda n, option: n, cost: Callable[[Workload, str], Cost] = copy_cost,
    sizes: Sequence[int] = (1, 2, 1023, 1025, 4096), tune: Sequence[Workload] = (),
) -> dict[str, Any]:  # fmt: skip
    """The fields of an ``Operator`` on x [N] and the pattern's option.

    Args:
        verify: besides ``sizes`` with the default option, none at all, and other layouts.
        wrong: mutants of this operator's own.
        predicted: the share of the ceiling that a machine is expected to reach; all of it where every byte of a sector is used.
        axis: what N counts; ``length`` is the number of elements of x, of N and the option.
    """
    name, allowed, default = pattern.option or ("", (), None)

    def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
        x = drawn(w, g, device, length(w["N"], w.option(name, default)))
        return {"x": x, name: w.option(name, default)} if name else {"x": x}

    return {
        "name": pattern.name,
        "axes": {"N": axis},
        "inputs": inputs,
        "reference": pattern.reference,
        "cost": cost,
        "predicted": lambda w, direction: predicted(w, here()),
        "options": {**OPTIONS, **({name: allowed} if name else {})},
        "tolerance": Tolerance(exact=True),
        "workloads": {
            "verify": [
                *(workload(N=n) for n in (*sizes, 0)),
                *(workload(N=300, layout=layout) for layout in ("unaligned", "strided")),
                *verify,
            ],
            "bench": list(bench),
            "quick": [Workload({"N": 2**22}, "", bench[len(bench) // 2].options)],
            "compile": [Workload({"N": 2**20}, "", w.options) for w in bench],
            "tune": list(tune),
            "huge": [huge],
        },
        "mutants": [*mutants.usual(pattern.reference), *wrong],
    }


@triton.jit
def copy_strided(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    """y[i] = x[i * stride] for i < n. One program writes BLOCK elements; the stride 1 is a constant to the compiler."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64: tensors may hold more than 2**31 elements
    tl.store(y_ptr + i, tl.load(x_ptr + i * stride, mask=i < n, eviction_policy="evict_last"), mask=i < n)


def heuristic(sm: int, dtype: torch.dtype, stride: int) -> Config:
    return {"BLOCK": 1024 if stride == 1 else 512, "num_warps": 4}


blocks = tiles({"BLOCK": (256, 512, 1024, 2048, 4096), "num_warps": (2, 4, 8)}, 4, 32, of=("BLOCK",))
configuration = Configurations(__file__, "copy_strided", heuristic, blocks)


def copy_plan(x: Tensor, stride: int = 1) -> Plan:
    """y = x[::stride] for a contiguous x of one dimension."""
    n = -(-x.numel() // stride)
    config = configuration(x.device, x.dtype, stride)
    grid = (triton.cdiv(n, config["BLOCK"]),)
    return Plan(copy_strided, grid, (n, stride), {"BLOCK": config["BLOCK"]}, config["num_warps"])
