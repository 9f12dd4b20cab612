"""What the definitions of reductions share: inputs, cost, workloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Tolerance, Workload, workload
from weft.operators import mutants
from weft.operators.call import check_dim
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

LARGEST = 2**28
FLOATS = ("normal", "large", "tiny", "nonfinite")


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [M, N], or [M, N, K] with the option ``inner``; ``dim=all`` reduces everything."""
    shape = (w["M"], w["N"], w.option("inner")) if w.option("inner") else (w["M"], w["N"])
    dim = None if w.option("dim") == "all" else w.option("dim", -1)
    if dim is not None:
        check_dim("the workload", dim, len(shape))
    values = w.option("values", "normal")
    x = random_tensor(
        g,
        shape,
        w.dtype,
        device,
        layout=w.option("layout", "contiguous"),
        values=VALUES[0] if values == "ties" else values,
    )
    if values == "ties" and device != "meta":
        x.copy_(x.mul(2).round().clamp(-2, 2))  # few distinct values
    return {"x": x, "dim": dim, "keepdim": w.option("keepdim", False)}


def results_of(w: Workload) -> int:
    shape = [w["M"], w["N"], w.option("inner", 1)]
    if w.option("dim") == "all":
        return 1
    dim = w.option("dim", -1) % (3 if w.option("inner") else 2)
    return shape[0] * shape[1] * shape[2] // max(shape[dim], 1)


def define(
    name: str,
    reference: Callable[..., Tensor],
    *,
    flops: int = 1,
    backward: bool = False,
    backward_bits: bool = False,
    tolerance: Any,
    result_bytes: int = 0,
    empty: bool = False,
    nonfinite: bool = True,
    ties: bool = False,
    tuned: bool = False,
    wrong: Sequence[Mutant] = (),
    gradient_wrong: Sequence[Mutant] = (),
    more: Sequence[Workload] = (),
    options: dict[str, Sequence[Any]] | None = None,
    make_inputs: Callable[..., dict[str, Any]] = inputs,
) -> dict[str, Any]:
    """The fields of an ``Operator`` over [M, N].

    Args:
        reference: with the operator's arguments.
        flops: of an element.
        backward: whether the gradient takes a kernel (that of a sum is a view of the result's).
        backward_bits: whether all that a gradient needs of x is which elements equal the result, so that forward may keep
            a bit of each. Of a row that is longer than a place (32 bits) that may be kept instead: mostly one equals.
        result_bytes: of one result where it is not of x's dtype.
        empty: whether a result of no elements exists.
        ties: also on data with few distinct values.
        more: further workloads to verify.
    """

    def cost(w: Workload, direction: str) -> Cost:
        n = w["M"] * w["N"] * w.option("inner", 1)
        size, result = n * w.bytes_per_element, results_of(w) * (result_bytes or w.bytes_per_element)
        if direction == "forward":
            return Cost(reads=size, writes=result, vector_flops=flops * n)
        kept = (min(n, 32 * results_of(w)) + 7) // 8
        reads = kept + result if backward_bits else size + 2 * result
        return Cost(reads=reads, writes=size, vector_flops=(flops + 1) * n)

    def gradient(dy: Tensor, x: Tensor, **how: Any) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(reference(leaf, **how), leaf, dy)

    each = ("fp32", "bf16")
    return {
        "name": name,
        "axes": {"M": "rows", "N": "columns"},
        "inputs": make_inputs,
        "reference": reference,
        "cost": cost,
        "directions": ("forward", "backward") if backward else ("forward",),
        "differentiable": ("x",) if backward else (),
        "options": {
            "layout": LAYOUTS,
            "values": (*VALUES, "ties"),
            "dim": ("all", *range(-3, 3)),
            "inner": range(1, 2**31),
            "keepdim": (True, False),
            **(options or {}),
        },
        "tolerance": tolerance,
        "workloads": {
            "verify": [
                *(workload(M=m, N=n) for m, n in ((1, 1), (3, 5), (37, 2), (21, 7), (5, 100), (2, 1025))),
                *(workload(M=m, N=n, dim="all") for m, n in ((1, 7), (9, 129))),
                *(workload(M=m, N=n, dim=0) for m, n in ((5, 3), (70, 21), (700, 3))),
                *(workload(M=3, N=n, inner=k, dim=1) for n, k in ((2, 9), (40, 5), (6, 1))),
                workload(M=4, N=3, inner=5, dim=0, keepdim=True),
                workload(M=9, N=8),
                workload(M=9, N=48, keepdim=True),
                workload(M=0, N=7),
                *([workload(M=7, N=0)] if empty else []),
                *(workload(M=9, N=33, layout=at) for at in LAYOUTS[1:]),
                *(workload(M=9, N=33, layout=at, dim="all") for at in ("sliced", "transposed")),
                workload(M=9, N=33, layout="transposed", dim=0),
                workload(M=9, N=33, layout="sliced", dim=0),
                *([workload(M=200, N=11, values="nonfinite")] if nonfinite else []),
                workload(M=6, N=6, values="large"),
                *([workload(M=9, N=40, values="ties"), workload(M=30, N=9, dim=0, values="ties")] if ties else []),
                *more,
            ],
            "full": [workload(M=1, N=70001, dim="all"), workload(M=3, N=5000), workload(M=3000, N=40, dim=0)],
            "bench": [
                workload(M=1, N=LARGEST, dim="all"),
                *(workload(M=LARGEST // n, N=n) for n in (256, 4096, 65536)),
                workload(M=2**14, N=2**14, dim=0),
                *(workload(M=2**27, N=n) for n in range(2, 9)),
                *(workload(M=2**15, N=n, inner=2**12, dim=1) for n in (2, 3, 4, 8)),
            ],
            "quick": [workload(M=1, N=2**22, dim="all"), workload(M=2**10, N=2**12)],
            "sizes": [workload(M=1, N=n, dim="all") for n in (2**12, 2**16, 2**20)],
            "compile": [
                workload(M=1, N=2**24, dim="all"),
                *(workload(M=2**12, N=n) for n in (3, 8, 1000, 2**14)),
                workload(M=2**10, N=2**10, dim=0),
                workload(M=64, N=4, inner=2**12, dim=1),
            ],
            "tune": [
                *(workload(d, M=LARGEST // n, N=n) for d in each for n in (64, 256, 1024, 4096, 16384)),
                *(workload(d, M=1, N=LARGEST, dim="all") for d in each),
                *(workload(d, M=n, N=LARGEST // n, dim=0) for d in each for n in (64, 1024, 2**14, 2**16)),
                *(workload(d, M=2**26, N=n) for d in each for n in range(2, 9)),
                *(workload(d, M=2**14, N=n, inner=2**12, dim=1) for d in each for n in range(2, 9)),
            ]
            if tuned
            else [],
            "huge": [workload("bf16", M=1, N=2**31 + 17, dim="all"), workload("bf16", M=2**30 + 3, N=2)],
        },
        "mutants": [
            *mutants.usual(reference),
            *wrong,
            *(mutants.usual(gradient, "backward") if backward else []),
            *gradient_wrong,
        ],
    }


def terms(w: Workload) -> int:
    """How many elements a lane adds one after the other."""
    along = w["M"] * w["N"] if w.option("dim") == "all" else max(w["M"], w["N"])
    return min(along, 256)


def size_of_terms(x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """What the rounding of a sum is relative to: terms may cancel, their squares do not."""
    return torch.linalg.vector_norm(x, 2.0, dim, keepdim)


SUMS = Tolerance(
    scale=lambda arguments, _: [size_of_terms(arguments["x"], arguments["dim"], arguments["keepdim"])], terms=terms
)


def every_tie(reference: Callable[..., Tensor]) -> Callable[..., Any]:
    """Wrong on purpose: each element that equals the result gets all of the gradient."""

    def gradient(dy: Tensor, x: Tensor, **how: Any) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            shares = torch.autograd.grad(reference(leaf, **how).sum(), leaf)[0]
        dim, keep = how["dim"], how["keepdim"]
        spread = dy if dim is None or keep else dy.unsqueeze(dim)
        return ((shares.sign() * spread).to(x.dtype),)

    return gradient


def one_tie(reference: Callable[..., Tensor]) -> Callable[..., Any]:
    """Wrong on purpose: the first of equal elements gets all of the gradient."""

    def gradient(dy: Tensor, x: Tensor, *, dim: int | None, keepdim: bool) -> tuple[Tensor, ...]:
        out = torch.zeros_like(x)
        if not x.numel():
            return (out,)
        best = reference(x, dim, True)
        if dim is None:
            out.view(-1)[(x == best).flatten().byte().argmax()] = dy.flatten()[0]
            return (out,)
        at = (x == best).byte().argmax(dim, keepdim=True)
        return (out.scatter(dim, at, dy if keepdim else dy.unsqueeze(dim)),)

    return gradient
