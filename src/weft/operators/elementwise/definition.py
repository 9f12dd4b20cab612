"""What the definitions of element-wise operators share: inputs, cost, workloads, and the mutants that all must reject."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Tolerance, Workload, workload
from weft.operators import mutants
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

LARGEST = 2**28


def define(
    name: str,
    arguments: tuple[str, ...],
    reference: Callable[..., Tensor],
    *,
    flops: int,
    special_ops: int,
    backward_reads: int = 0,
    backward_bits: int = 0,
    wrong: Sequence[Mutant] = (),
    choices: Mapping[str, tuple[str, ...]] | None = None,
    directions: tuple[str, ...] = ("forward", "backward"),
    tuned: bool = False,
    exact: bool = False,
    ulps: float = 1.0,
    backward_scale: str | Callable[..., list[Tensor]] = "row",
    extremes: tuple[str, ...] = ("nonfinite", "large", "tiny"),
) -> dict[str, Any]:
    """The fields of an ``Operator`` of N elements (``rows=R``: [R, N/R], for layouts of rows).

    Args:
        arguments: names of the tensors, all alike and all differentiable.
        flops, special_ops: of an element, forward (backward: about twice).
        backward_reads, backward_bits: tensors that the gradient has to read, and bits of each element besides.
        wrong: mutants of this operator's own.
        choices: arguments that are one of some words, the default first.
        tuned: whether ``weft tune`` measures this one for all that have as many inputs.
        exact: whether results must be PyTorch's bits.
        ulps: the floor of the tolerance, half the roundings that the formula takes.
        backward_scale: what errors of the gradients are relative to, as for :class:`weft.definition.Tolerance`.
        extremes: values that it is verified on besides ordinary ones.
    """

    chosen = choices or {}
    others = [{word: value} for word, words in chosen.items() for value in words[1:]]

    def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
        layouts = w.option("layout", "contiguous").split("+") * 2
        values = w.option("values", "normal")
        tensors = {
            argument: random_tensor(g, shape(name, w), w.dtype, device, layout=layout, values=values)
            for argument, layout in zip(arguments, layouts, strict=False)
        }
        return {**tensors, **{word: w.option(word, words[0]) for word, words in chosen.items()}}

    def cost(w: Workload, direction: str) -> Cost:
        n, size = w["N"], w["N"] * w.bytes_per_element
        if direction == "forward":
            return Cost(len(arguments) * size, size, vector_flops=flops * n, special_ops=special_ops * n)
        writes = len(arguments) * size
        reads = backward_reads * size + (n * backward_bits + 7) // 8
        return Cost(reads, writes, vector_flops=2 * flops * n, special_ops=special_ops * n)

    def gradient(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
        leaves = {a: named[a].detach().requires_grad_() for a in arguments}
        with torch.enable_grad():
            return torch.autograd.grad(reference(**{**named, **leaves}), list(leaves.values()), dy)

    pairs = LAYOUTS if len(arguments) == 1 else (*LAYOUTS, *(f"{x}+{y}" for x in LAYOUTS for y in LAYOUTS))
    mixed = [] if len(arguments) == 1 else ["contiguous+unaligned", "sliced+transposed", "expanded+contiguous"]
    return {
        "name": name,
        "axes": {"N": "elements"},
        "inputs": inputs,
        "reference": reference,
        "cost": cost,
        "directions": directions,
        "differentiable": arguments,
        "options": {"layout": pairs, "values": VALUES, "rows": range(1, 2**31), **chosen},
        "tolerance": {
            "forward": Tolerance(exact=exact, ulps=ulps),
            "backward": Tolerance(exact=exact, ulps=ulps, scale=backward_scale),
        },
        "workloads": {
            "verify": [
                *(workload(N=n) for n in (1, 2, 1023, 1025, 4096)),
                workload(N=0),
                *(workload(N=1002, layout=layout) for layout in ("unaligned", "strided")),
                *(
                    workload(N=21 * 50, rows=21, layout=layout)
                    for layout in ("sliced", "transposed", "strided", "expanded", *mixed)
                ),
                *(
                    workload(N=2000, values=values, **other)
                    for other in ({}, *others)
                    for values in ("normal", *extremes)
                ),
            ],
            "bench": [workload(N=LARGEST, **other) for other in ({}, *others)],
            "quick": [workload(N=2**22)],
            "sizes": [workload(N=n) for n in (2**16, 2**20, 2**24)],
            "compile": [workload(N=2**20), workload(N=42 * 50, rows=42, layout="sliced")]
            + [workload(N=2**20, **other) for other in others],
            "tune": [workload(d, N=n) for n in (2**20, 2**22, 2**24, 2**26) for d in ("fp32", "bf16")] if tuned else [],
            "huge": [workload("bf16", N=2**31 + 17)],
        },
        "mutants": [
            *mutants.usual(reference),
            *wrong,
            *(mutants.usual(gradient, "backward") if "backward" in directions else []),
        ],
    }


def shape(name: str, w: Workload) -> tuple[int, ...]:
    rows = w.option("rows", 0)
    if rows and w["N"] % rows:
        raise ValueError(f"workload '{w}' of '{name}': rows is {rows}; expected a divisor of N")
    return (rows, w["N"] // rows) if rows else (w["N"],)
