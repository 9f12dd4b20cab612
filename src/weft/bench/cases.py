"""Runs one implementation on one workload: its arguments, its results, its gradients.

Arguments are trees (tensors, lists, tuples, dicts, dataclasses). A call's *results* are its outputs followed by the
arguments it may mutate; for the direction ``backward``, the gradients of the differentiable arguments.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.bench.errors import Verdict, judge
from weft.definition import Declined, Operator, Workload

Results = list[Tensor]


def tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors(getattr(tree, field.name))


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with every tensor replaced; everything else passes through."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        mapped = [map_tensors(function, value) for value in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)  # a named tuple, or not
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        made = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(made, field.name, map_tensors(function, getattr(tree, field.name)))
        return made
    return tree


def clone(t: Tensor) -> Tensor:
    """A copy with the same strides, storage offset and gaps."""
    if t.is_meta:
        return t
    storage = t.untyped_storage()
    copied = torch.empty(0, dtype=t.dtype, device=t.device).set_(
        storage.clone(), t.storage_offset(), t.size(), t.stride()
    )
    return copied.requires_grad_(t.requires_grad)


def to_float64(t: Tensor) -> Tensor:
    """A copy: in-place references must not reach the arguments as drawn."""
    return t.detach().to(torch.float64, copy=True) if t.is_floating_point() else t.clone()


class PoisonedEmpty(TorchDispatchMode):
    """Within it, uninitialised tensors hold NaN (integers the largest value, booleans true), so that elements that a kernel
    never wrote show."""

    NAMES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in self.NAMES and isinstance(out, Tensor) and not out.is_meta:
            integer = not out.is_floating_point() and out.dtype != torch.bool
            out.fill_(torch.iinfo(out.dtype).max if integer else torch.nan)
        return out


def leaf(t: Tensor) -> Tensor:
    """A leaf that requires a gradient; integers pass through."""
    return t.detach().requires_grad_() if t.is_floating_point() else t


def output_gradients(operator: Operator, workload: Workload, out: Any, g: torch.Generator) -> list[Tensor]:
    """Random gradients for every floating output, drawn like inputs."""
    drawn = []
    for t in tensors(out):
        if t.is_floating_point():
            drawn.append(torch.empty(t.shape, dtype=t.dtype, device=t.device).normal_(generator=g))
    return drawn


def bind(
    operator: Operator,
    function: Callable[..., Any],
    direction: str,
    arguments: dict[str, Any],
    gradients: list[Tensor] | None = None,
) -> tuple[Callable[[], Any], list[Tensor]]:
    """Does what is not timed and returns the timed call, with the tensors to compare besides its result.

    Args:
        arguments: as drawn; of ``backward`` the differentiable ones are made leaves.
        gradients: of the outputs, for ``backward``; drawn as ones-like noise from seed 0 when None.
    """
    if direction == "forward":
        mutated = list(tensors([arguments[name] for name in operator.mutates]))
        return lambda: function(**arguments), mutated
    ready = {
        name: map_tensors(leaf, value) if name in operator.differentiable else value
        for name, value in arguments.items()
    }
    leaves = [t for t in tensors([ready[name] for name in operator.differentiable]) if t.requires_grad]
    outputs = [t for t in tensors(function(**ready)) if t.is_floating_point()]
    if gradients is None:
        g = torch.Generator(outputs[0].device).manual_seed(0) if not outputs[0].is_meta else None
        gradients = [torch.empty(o.shape, dtype=o.dtype, device=o.device).normal_(generator=g) for o in outputs]
    wanted = gradients
    return lambda: torch.autograd.grad(outputs, leaves, wanted, retain_graph=True), []


def results(
    operator: Operator,
    function: Callable[..., Any],
    direction: str,
    arguments: dict[str, Any],
    gradients: list[Tensor] | None = None,
) -> Results:
    """Runs once and returns outputs and mutated arguments (not copies), or gradients."""
    call, mutated = bind(operator, function, direction, arguments, gradients)
    return [*tensors(call()), *mutated]


def expected(
    operator: Operator, direction: str, arguments: dict[str, Any], gradients: list[Tensor] | None = None
) -> Results:
    """What the float64 reference gives."""
    wide = map_tensors(to_float64, arguments)
    return results(operator, operator.reference, direction, wide, [g.double() for g in gradients or []] or None)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What the results of one case are compared with: computed once for many implementations."""

    operator: Operator
    workload: Workload
    direction: str
    want: Results  # the float64 reference
    torch: Results  # PyTorch in this dtype: ``torch``, or ``torch …`` where that declines or fails, or the reference
    nonfinite: Results  # the reference in this dtype: where NaN and infinities belong
    scales: list[Tensor] | None

    @classmethod
    def of(
        cls, op: Operator, w: Workload, direction: str, arguments: dict[str, Any], gradients: list[Tensor] | None = None
    ) -> "Baseline":
        def run(function: Callable[..., Any]) -> Results:
            return results(op, function, direction, map_tensors(clone, arguments), gradients)

        nonfinite = in_torch = run(op.reference)
        for peer in [i for name, i in op.implementations.items() if name.split()[0] == "torch"]:
            try:
                in_torch = run(peer.function)
                break
            except torch.cuda.OutOfMemoryError:  # the caller's: nothing can be compared here
                raise
            except (Declined, RuntimeError):  # the next one
                continue
        scale = op.tolerance_of(direction).scale
        scales = None
        if not isinstance(scale, str):
            scales = scale(map_tensors(to_float64, arguments), [g.double() for g in gradients or []])
        return cls(op, w, direction, expected(op, direction, arguments, gradients), in_torch, nonfinite, scales)

    def judge(self, got: Results) -> Verdict:
        tolerance = self.operator.tolerance_of(self.direction)
        terms = tolerance.terms(self.workload) if tolerance.terms else 0
        in_torch = self.torch
        if tolerance.ranks:
            got, in_torch = ([tolerance.ranks(self.workload, t) for t in of] for of in (got, in_torch))
        eps = tolerance.eps(self.workload) if tolerance.eps else 0.0
        return judge(got, self.want, in_torch, tolerance, self.scales, self.nonfinite, terms, eps)
