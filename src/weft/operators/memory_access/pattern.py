"""An access pattern as an operator: its call, its implementations, and what all definitions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, eager, guarded, materialised, on_gpu
from weft.operators.launch import Plans
from weft.operators.memory_access.dispatch import FORWARD, Pattern
from weft.operators.memory_access.machine import Machine, here
from weft.operators.random_inputs import random_tensor

OPTIONS = {"layout": ("contiguous", "unaligned", "strided"), "values": ("normal", "large", "tiny", "nonfinite")}
LARGEST = 2**28  # elements that are read or written in the benchmarks


def call(pattern: Pattern, *args: Any) -> Tensor:
    """What the public functions do."""
    tensors, options = pattern.lowered(*args)
    plan = None
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

    def by_kernel(name: str) -> Callable[..., Tensor]:
        plans = FORWARD.kernel(name)
        return lambda **args: _launch(plans, pattern, **args)

    operator.choice(guarded(choose))
    found = torch_function or pattern.reference
    operator.implementation("triton", arch=">=sm_80")(by_kernel("triton"))
    if pattern.cuda is not None:
        operator.implementation("cuda", arch=">=sm_80", devices=("cuda",))(by_kernel("cuda"))
    operator.implementation("torch")(found)
    if compiled:
        operator.implementation("torch.compile", devices=("cuda",))(peers.Compiled(found))


def line(w: Workload, g: Any, device: str, n: int) -> Tensor:
    """A random x of n elements, in the workload's layout and values."""
    layout, values = w.option("layout", "contiguous"), w.option("values", "normal")
    return random_tensor(g, (n,), w.dtype, device, layout=layout, values=values)


def copy_cost(w: Workload, direction: str) -> Cost:
    """Of the elements that are wanted, not of those between them."""
    size = w["N"] * w.bytes_per_element
    return Cost(reads=size, writes=size)


def define(
    pattern: Pattern,
    *,
    verify: Sequence[Workload],
    bench: Sequence[Workload],
    huge: Workload,
    wrong: Sequence[Mutant],
    predicted: Callable[[Workload, Machine], float] = lambda w, machine: 1.0,
    axis: str = "elements",
    length: Callable[[int, Any], int] = lambda n, option: n,
    cost: Callable[[Workload, str], Cost] = copy_cost,
    sizes: Sequence[int] = (1, 2, 1023, 1025, 4096),
    tune: Sequence[Workload] = (),
) -> dict[str, Any]:
    """The fields of an ``Operator`` on x [N] and the pattern's option.

    Args:
        verify: besides ``sizes`` with the default option, and none at all.
        wrong: mutants of this operator's own.
        predicted: the share of the ceiling that a machine is expected to reach; all of it where every byte of a sector is used.
        axis: what N counts; ``length`` is the number of elements of x, of N and the option.
    """
    name, allowed, default = pattern.option or ("", (), None)

    def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
        x = line(w, g, device, length(w["N"], w.option(name, default)))
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
            "verify": [*(workload(N=n) for n in (*sizes, 0)), *verify],
            "bench": list(bench),
            "quick": [Workload({"N": 2**22}, "", bench[len(bench) // 2].options)],
            "compile": [Workload({"N": 2**20}, "", w.options) for w in bench],
            "tune": list(tune),
            "huge": [huge],
        },
        "mutants": [*mutants.usual(pattern.reference), *wrong],
    }
