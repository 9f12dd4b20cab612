"""An access pattern as an operator: its call, its choice, its implementations, and what all definitions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, check_tensor, eager, guarded, materialised, on_gpu, traced
from weft.operators.launch import Plans
from weft.operators.random_inputs import random_tensor

LARGEST = 2**28  # elements that are read or written in the benchmarks

Launch = tuple[tuple[Tensor, ...], tuple[Any, ...]]  # the tensors that a kernel is given, and the options of its plan


def scattered(*tensors: Tensor) -> str:
    """Why a pattern cannot be laid over these tensors (an empty string when it can)."""
    for t in tensors:
        if not t.is_contiguous():
            return f"strides {tuple(t.stride())}: the pattern is measured on contiguous tensors"
    return ""


class Pattern:
    """One access pattern.

    Args:
        name: the operator's.
        reference: the same in PyTorch.
        lower: the arguments of a call, checked, as ``(tensors, options)`` of a plan.
        result: ``(*tensors, *options) -> an empty tensor`` for the result.
        triton, cuda: ``(*tensors, *options) -> plan``; called with the tensors and the result.
        declines: ``(*tensors) -> why`` the kernels do not take them (an empty string when they do).
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Tensor],
        lower: Callable[..., Launch],
        result: Callable[..., Tensor],
        triton: Callable[..., Any],
        cuda: Callable[..., Any] | None = None,
        *,
        declines: Callable[..., str] = scattered,
    ):
        self.name, self.reference, self.lower, self.result, self.declines = name, reference, lower, result, declines
        self.triton_plans = Plans(triton)
        self.cuda_plans = Plans(cuda) if cuda else None

    def choose(self, *args: Any, **named: Any) -> Choice:
        tensors, options = self.lower(*args, **named)
        if not on_gpu(tensors[0]):
            return Choice("torch", "the tensor is on the CPU, where weft runs the reference")
        if traced(*tensors):
            return Choice("torch", "traced: PyTorch's own operators, which a compiler fuses with their neighbours")
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return Choice("torch", "a gradient is wanted: these kernels measure a forward pass")
        if not self.result(*tensors, *options).numel():
            return Choice("torch", "an empty result: nothing to launch")
        if reason := self.declines(*tensors):
            return Choice("torch", reason)
        return Choice("triton", "contiguous tensors: the pattern is the kernel's own", self.triton_plans)

    def run(self, plans: Plans, *args: Any, **named: Any) -> Tensor:
        """By these plans (on the CPU, by the reference); raises Declined where the tensors have a pattern of their own."""
        tensors, options = self.lower(*args, **named)
        tensors = materialised(*tensors)
        if not on_gpu(tensors[0]):
            return self.reference(*args, **named)
        if reason := self.declines(*tensors):
            raise Declined(reason)
        out = self.result(*tensors, *options)
        if out.numel():
            plans.of(tensors, *options)(*tensors, out)
        return out

    def __call__(self, *args: Any) -> Tensor:
        """What the public function does."""
        tensors, _ = self.lower(*args)
        if eager(*tensors, autocast=True) and not self.declines(*tensors):
            return self.run(self.triton_plans, *args)
        chosen = self.choose(*args)
        return self.reference(*args) if chosen.plans is None else self.run(chosen.plans, *args)

    def implement(
        self, operator: Operator, torch_function: Callable[..., Tensor] | None = None, *, compiled: bool = True
    ) -> None:
        """Registers our kernels, PyTorch's way (the reference unless given) and, if ``compiled``, ``torch.compile`` of it."""
        operator.choice(guarded(self.choose))
        found = torch_function or self.reference
        operator.implementation("triton", arch=">=sm_80")(lambda **args: self.run(self.triton_plans, **args))
        if self.cuda_plans is not None:
            plans = self.cuda_plans
            operator.implementation("cuda", arch=">=sm_80", devices=("cuda",))(lambda **args: self.run(plans, **args))
        operator.implementation("torch")(found)
        if compiled:
            operator.implementation("torch.compile", devices=("cuda",))(peers.Compiled(found))


def check_line(operator: str, x: Any) -> None:
    """Raises TypeError or ValueError unless x is a floating tensor of one dimension."""
    check_tensor(operator, "x", x)
    if x.ndim != 1:
        raise ValueError(f"{operator}: argument 'x' has shape {tuple(x.shape)}; expected one dimension")


def check_whole(operator: str, name: str, value: Any, allowed: Sequence[int]) -> None:
    """Raises TypeError or ValueError unless ``value`` is an int among those allowed."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{operator}: argument '{name}' is {value!r}; expected an int")
    if value not in allowed:
        span = f"{allowed[0]} … {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
        raise ValueError(f"{operator}: argument '{name}' is {value}; expected {span}")


def line(w: Workload, g: Any, device: str, n: int) -> Tensor:
    """A random x of n elements, in the workload's layout and values."""
    layout, values = w.option("layout", "contiguous"), w.option("values", "normal")
    return random_tensor(g, (n,), w.dtype, device, layout=layout, values=values)


def define(
    name: str,
    reference: Callable[..., Tensor],
    *,
    options: Mapping[str, Sequence[Any]],
    verify: Sequence[Workload],
    bench: Sequence[Workload],
    huge: Sequence[Workload],
    wrong: Sequence[Mutant],
    sizes: Sequence[int] = (1, 2, 1023, 1025, 4096),
) -> dict[str, Any]:
    """Fields of an ``Operator`` that are alike in this family; ``axes``, ``inputs``, ``cost`` and ``predicted`` are not.

    Args:
        verify: beside ``sizes`` with default options, and none at all.
        wrong: mutants of this operator's own.
    """
    layouts = {"layout": ("contiguous", "unaligned", "strided"), "values": ("normal", "large", "tiny", "nonfinite")}
    return {
        "name": name,
        "reference": reference,
        "options": {**layouts, **options},
        "tolerance": Tolerance(exact=True),
        "workloads": {
            "verify": [*(workload(N=n) for n in sizes), workload(N=0), *verify],
            "bench": list(bench),
            "quick": [Workload({"N": 2**22}, "", bench[len(bench) // 2].options)],
            "compile": [Workload({"N": 2**20}, "", w.options) for w in bench],
            "tune": [],
            "huge": list(huge),
        },
        "mutants": [*mutants.usual(reference), *wrong],
    }
