"""An element-wise operator: its definition, its call and its gradient, all from one :class:`Formula` (or one for each value of
an option)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, eager, guarded, on_gpu, promoted
from weft.operators.checks import check_flag
from weft.operators.elementwise.dispatch import AGAIN, BACKWARD, FORWARD, Formula, like
from weft.operators.layout import rows_of
from weft.operators.random_inputs import LAYOUTS, OF_VECTORS, vectors

LARGEST = 2**28  # elements in the benchmarks
KERNEL, GRADIENT_KERNEL = FORWARD.kernel("triton"), BACKWARD.kernel("triton")


class Map(KernelFunction):
    """``(formula, in_place, plan or None, *inputs)``; the inputs are saved for backward."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, in_place: bool, plan: Any, *x: Tensor) -> Tensor:
        out = x[0] if in_place else torch.empty_like(x[0])
        if out.numel():
            (plan or KERNEL.of(x, formula, in_place))(*x, out)
        if in_place:
            ctx.mark_dirty(out)
        ctx.formula = formula
        if formula.backward is not None:
            ctx.save_for_backward(*x)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        formula, saved = ctx.formula, ctx.saved_tensors
        if formula.backward is None:
            return (None, None, None, *(dy,) * len(formula.arguments))
        if torch.is_grad_enabled():
            return None, None, None, *reference_gradients(formula.reference, saved, ctx.needs_input_grad[3:], (dy,))
        gradients = tuple(torch.empty_like(saved[0]) for _ in saved)
        if dy.numel():
            if dy.stride() != saved[0].stride() and None in (rows_of(dy), rows_of(saved[0])):
                dy = torch.empty_like(saved[0]).copy_(dy)  # autograd may bring one of any strides (expanded, permuted)
            GRADIENT_KERNEL.of((*saved, dy), formula, 0)(*saved, dy, *gradients)
        return None, None, None, *gradients


@dataclass(eq=False)
class Pointwise:
    """The call of an element-wise operator."""

    name: str
    arguments: tuple[str, ...]  # names of its tensors (one or two)
    # the forward and the backward formula, as of :class:`Formula`, and ``again`` where there is one; or, of each value of
    # ``option``, such a pair
    pairs: Any
    reference: Callable[..., Tensor]
    option: str = ""  # an argument that picks the formula; its first value is the default
    heavy: bool = False
    # an autograd function of ``(formula, in_place, plan, *tensors)``; only :class:`Map` saves the inputs
    function: type[torch.autograd.Function] = Map

    def __post_init__(self) -> None:
        self.formulas = {}
        pairs = self.pairs if isinstance(self.pairs, Mapping) else {"": self.pairs}
        for value, (forward, backward, *again) in pairs.items():
            chosen = functools.partial(self.reference, **{self.option: value}) if self.option else self.reference
            self.formulas[value] = Formula(self.name, self.arguments, forward, backward, chosen, self.heavy, *again)
        self.formula = next(iter(self.formulas.values()))  # the default

    def of(self, value: Any) -> Formula:
        """The formula of a value of the option. Raises ValueError for one that the option does not have."""
        found = self.formulas.get(value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(
                f"{self.name}: argument '{self.option}' is {value!r:.40}; expected {' or '.join(map(repr, self.formulas))}"
            )
        return found

    def __call__(self, *x: Tensor, inplace: bool = False, choice: str | None = None) -> Tensor:
        """What the public function does."""
        formula = self.formula if choice is None and not self.option else self.of(choice)
        if len(x) == 2 and not inplace and getattr(x[0], "dtype", None) is not getattr(x[1], "dtype", None):
            x = promoted(*x)
        if not inplace and eager(*x, gradient=True, autocast=True) and (plan := FORWARD.of(x, formula)) is not None:
            if torch.is_grad_enabled() and any(t.requires_grad for t in x):
                return self.function.apply(formula, False, plan, *x)
            out = torch.empty_like(x[0])
            plan(*x, out)
            return out
        check_flag(self.name, "inplace", inplace)
        chosen = FORWARD.choose(*x, formula, inplace)
        if inplace:
            self._check_gradient(x[0])
        if chosen.implementation == "torch":
            return x[0].copy_(formula.reference(*x)) if inplace else formula.reference(*x)
        return differentiable(self.function, formula, inplace, None, *x)

    def again(self, gate: Tensor, up: Tensor, dy: Tensor, choice: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of both inputs and the result, which was not kept, in one pass."""
        formula = self.formula if choice is None else self.of(choice)
        plan = AGAIN.of((gate, up, dy), formula)
        if plan is None:
            leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
            with torch.enable_grad():
                result = formula.reference(*leaves)
            dgate, dup = torch.autograd.grad(result, leaves, dy)
            return dgate, dup, result.detach()
        found = torch.empty_like(gate), torch.empty_like(up), torch.empty_like(gate)
        plan(gate, up, dy, *found)
        return found

    def _check_gradient(self, x: Tensor) -> None:
        """Raises ValueError where a gradient is wanted that overwriting x makes impossible."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return
        if self.function is Map:
            why = "which the gradient needs"
        elif any(t is not None and t.requires_grad and t.is_leaf for t in (x, x._base)):
            why = "a leaf (or a view of one) that wants a gradient"
        else:
            return
        raise ValueError(
            f"{self.name}: inplace=True overwrites '{self.arguments[0]}', {why}; expected inplace=False, or a tensor that "
            "wants no gradient"
        )

    def triton(self, **named: Any) -> Tensor:
        """Our kernel, whatever the table says (on CPU tensors the reference)."""
        formula = self.of(named[self.option]) if self.option in named else self.formula
        x = [named[a] for a in self.arguments]
        return differentiable(self.function, formula, False, None, *x) if on_gpu(x[0]) else formula.reference(*x)

    def choose(self, *call: Any, inplace: bool = False, direction: str = "forward") -> Choice:
        """``call``: the tensors, then the option's value where there is one."""
        x = call[: len(self.arguments)]
        x = x if inplace else promoted(*x)
        formula = self.of(call[-1]) if len(call) > len(x) else self.formula
        forward = FORWARD.choose(*x, formula, inplace)
        if direction == "forward" or forward.implementation == "torch":
            return forward
        return BACKWARD.choose(*x, like(x[0]), formula, int(self.function is not Map))

    def implement(self, operator: Operator, torch_function: Callable[..., Tensor] | None = None) -> None:
        """Registers the kernel, what a user writes in PyTorch (the reference, if not given) and ``torch.compile`` of it as
        the operator's implementations, and how it chooses."""
        found = torch_function or self.reference
        operator.choice(guarded(self.choose))
        operator.implementation("triton", arch=">=sm_80")(self.triton)
        peers.register(operator, found)


def define(
    call: Pointwise, *, flops: int, special_ops: int, backward_reads: int = 0, backward_bits: int = 0,
    wrong: Sequence[Mutant] = (), directions: tuple[str, ...] = ("forward", "backward"), tuned: bool = False,
    exact: bool = False, ulps: float = 1.0, backward_scale: str | Callable[..., list[Tensor]] = "row",
    extremes: tuple[str, ...] = ("nonfinite", "large", "tiny"),
) -> dict[str, Any]:  # fmt: skip
    """The fields of an ``Operator`` of N elements (``rows=R``: [R, N/R], for layouts of rows).

    Args:
        flops, special_ops: of an element, forward (backward: about twice).
        backward_reads, backward_bits: tensors that the gradient has to read, and bits of each element besides.
        wrong: mutants of this operator's own.
        tuned: whether ``weft tune`` measures this one for all that have as many inputs.
        exact: whether results must be PyTorch's bits.
        ulps: the floor of the tolerance, half the roundings that the formula takes.
        backward_scale: what errors of the gradients are relative to, as for :class:`weft.definition.Tolerance`.
        extremes: values that it is verified on besides ordinary ones.
    """
    name, arguments, reference = call.name, call.arguments, call.reference
    options = {call.option: tuple(call.formulas)} if call.option else {}
    variants: list[dict[str, Any]] = [{}, *({call.option: value} for value in list(call.formulas)[1:])]

    def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
        chosen = {word: w.option(word, words[0]) for word, words in options.items()}
        return {**vectors(name, arguments, w, g, device), **chosen}

    def cost(w: Workload, direction: str) -> Cost:
        n, size = w["N"], w["N"] * w.bytes_per_element
        if direction == "forward":
            return Cost(len(arguments) * size, size, vector_flops=flops * n, special_ops=special_ops * n)
        reads = backward_reads * size + (n * backward_bits + 7) // 8
        return Cost(reads, len(arguments) * size, vector_flops=2 * flops * n, special_ops=special_ops * n)

    layouts = {"layout": LAYOUTS} if len(arguments) == 1 else {}
    mixed = [] if len(arguments) == 1 else ["contiguous+unaligned", "sliced+transposed", "expanded+contiguous"]
    row_layouts = ("sliced", "transposed", "strided", "expanded", *mixed)
    backward = mutants.usual(mutants.gradient_of(reference, *arguments), "backward") if "backward" in directions else []
    tolerance = Tolerance(exact=exact, ulps=ulps)
    return {
        "name": name,
        "axes": {"N": "elements"},
        "inputs": inputs,
        "reference": reference,
        "cost": cost,
        "directions": directions,
        "differentiable": arguments,
        "options": {**OF_VECTORS, **layouts, **options},
        "tolerance": {"forward": tolerance, "backward": replace(tolerance, scale=backward_scale)},
        "workloads": {
            "verify": [
                *(workload(N=n) for n in (1, 2, 1023, 1025, 4096, 0)),
                *(workload(N=1002, layout=layout) for layout in ("unaligned", "strided")),
                *(workload(N=21 * 50, rows=21, layout=layout) for layout in row_layouts),
                *(workload(N=2000, values=v, **variant) for variant in variants for v in ("normal", *extremes)),
            ],
            "bench": [workload(N=LARGEST, **variant) for variant in variants],
            "quick": [workload(N=2**22)],
            "sizes": [workload(N=n) for n in (2**16, 2**20, 2**24)],
            "compile": [
                workload(N=2**20),
                workload(N=42 * 50, rows=42, layout="sliced"),
                *(workload(N=2**20, **variant) for variant in variants[1:]),
            ],
            "tune": [workload(d, N=n) for n in (2**20, 2**22, 2**24, 2**26) for d in ("fp32", "bf16")] if tuned else [],
            "huge": [workload("bf16", N=2**31 + 17)],
        },
        "mutants": [*mutants.usual(reference), *wrong, *backward],
    }
