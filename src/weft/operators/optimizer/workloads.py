"""What the definitions of the optimizers share: their tensors, cost, workloads and mutants."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Workload, workload
from weft.operators.mutants import changed
from weft.operators.random_inputs import random_tensor

LAYER = (  # of a language model of 1.24 G parameters
    *((2048, 2048), (512, 2048), (512, 2048), (2048, 2048)),  # attention
    *((8192, 2048), (8192, 2048), (2048, 8192)),  # feed forward
    *((2048,), (2048,)),  # norms
)
LANGUAGE_MODEL: tuple[tuple[int, ...], ...] = (*(LAYER * 16), (128256, 2048))  # its 16 layers and its embedding
MEAN = round(sum(torch.Size(s).numel() for s in LANGUAGE_MODEL) / len(LANGUAGE_MODEL))

AXES = {"T": "tensors", "P": "elements of each, in the mean"}
OPTIONS = {
    "shapes": ("equal", "uneven", "language_model"),
    "layout": ("contiguous", "unaligned", "transposed"),
    "values": ("normal", "nonfinite"),
    "states": ("same", "fp32"),
    "maximize": (True, False),
}
NUMBERS = {"lr": 1e-1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}  # of every draw


def shapes(w: Workload) -> list[tuple[int, ...]]:
    """Of the tensors: all [P]; or from 0 elements to about twice P; or those of a language model."""
    kind = w.option("shapes", "equal")
    if kind == "language_model":
        if (w["T"], w["P"]) != (len(LANGUAGE_MODEL), MEAN):
            raise ValueError(
                f"shapes=language_model is T={w['T']},P={w['P']}; expected T={len(LANGUAGE_MODEL)},P={MEAN}"
            )
        return list(LANGUAGE_MODEL)
    if kind == "uneven":
        return [(2 * w["P"] * i // max(w["T"] - 1, 1),) for i in range(w["T"])]
    if w.option("layout") == "transposed":
        return [(3, w["P"] // 3)] * w["T"]
    return [(w["P"],)] * w["T"]


def elements(w: Workload) -> int:
    return sum(torch.Size(s).numel() for s in shapes(w))


def lists(w: Workload, g: Any, device: str, states: dict[str, bool]) -> dict[str, list[Tensor]]:
    """Weights, gradients and states (name → whether it is never negative); gradients may be non-finite."""
    layout = w.option("layout", "contiguous")

    def drawn(values: str = "normal", dtype: str = w.dtype) -> list[Tensor]:
        return [random_tensor(g, s, dtype, device, layout=layout, values=values) for s in shapes(w)]

    made = {"params": drawn(), "grads": drawn(w.option("values", "normal"))}
    dtype = "fp32" if w.option("states", "same") == "fp32" else w.dtype
    for name, positive in states.items():
        made[name] = [t.abs_() if positive else t for t in drawn(dtype=dtype)]
    return made


def counts(w: Workload, device: str) -> list[Tensor]:
    """Steps done, fp32; neighbouring tensors have different numbers."""
    return [torch.tensor(float(i % 7 * 11), device=device) for i in range(w["T"])]


def decline_mixed(params: Sequence[Tensor], states: Sequence[Tensor]) -> None:
    """Raises Declined where states have another dtype than weights: PyTorch's optimizers have one for both."""
    if any(p.dtype != s.dtype for p, s in zip(params, states, strict=True)):
        raise Declined("PyTorch has states of the weight's dtype")


def cost(w: Workload, states: int, flops: int, special: int = 0) -> Cost:
    """Weight, gradient and states are read, weight and states written."""
    n, size = elements(w), w.bytes_per_element
    state_size = states * (4 if w.option("states", "same") == "fp32" else size)
    return Cost((2 * size + state_size) * n, (size + state_size) * n, vector_flops=flops * n, special_ops=special * n)


MODEL: dict[str, Any] = {"T": len(LANGUAGE_MODEL), "P": MEAN, "shapes": "language_model"}
WORKLOADS = {
    "verify": [
        *(workload(T=t, P=p) for t, p in ((1, 1), (3, 100))),
        workload(T=5, P=700, shapes="uneven"),
        *(workload(T=2, P=p) for p in (4096, 2049)),
        workload(T=3, P=2053, layout="unaligned"),
        workload(T=2, P=300, layout="transposed"),
        workload(T=3, P=500, maximize=True),
        workload(T=2, P=1000, values="nonfinite"),
        *(workload(dtype, T=2, P=2100, states="fp32") for dtype in ("fp16", "bf16")),
    ],
    "bench": [
        *(workload(dtype, **MODEL) for dtype in ("fp32", "bf16")),
        workload("bf16", **MODEL, states="fp32"),
        workload("fp32", T=1000, P=64),
    ],
    "quick": [workload(T=64, P=2**18)],
    "host": [workload("fp32", T=1000, P=64)],
    "compile": [workload(T=2, P=5000), workload("bf16", T=2, P=5000, states="fp32")],
    "tune": [workload(d, T=16, P=2**23) for d in ("fp32", "bf16")],
    "huge": [workload("bf16", T=1, P=2**31 + 17)],
}


def with_verified(*more: Workload) -> dict[str, list[Workload]]:
    """The workloads of every optimizer, and those that are verified besides."""
    return {**WORKLOADS, "verify": [*WORKLOADS["verify"], *more]}


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def mutants(reference: Callable[..., None], *states: str) -> list[Mutant]:
    """Mutants of every optimizer, made from its reference (which works in place)."""

    def last_left_out(**arguments: Any) -> None:
        reference(**{n: v[:-1] if isinstance(v, list) else v for n, v in arguments.items()})

    def tail_skipped(params: list[Tensor], **arguments: Any) -> None:
        """The last partial chunk is never written."""
        before = [p.clone() for p in params]
        reference(params=params, **arguments)
        for p, b in zip(params, before, strict=True):
            flat, old = p.view(-1) if p.is_contiguous() else p.t().reshape(-1), b.reshape(-1)
            if p.is_contiguous():
                flat[flat.numel() // 16 * 16 :] = old[flat.numel() // 16 * 16 :]

    def spoils_gradients(**arguments: Any) -> None:
        reference(**arguments)
        for g in arguments["grads"]:
            g.mul_(2)

    return [
        Mutant("weights not written", changed(reference, params=copies)),
        *(Mutant(f"{name} not written", changed(reference, **{name: copies})) for name in states),
        Mutant("last tensor left out", last_left_out),
        Mutant("tail skipped", tail_skipped),
        Mutant("gradients shifted by one", changed(reference, grads=lambda gs: [g.roll(1) for g in gs])),
        Mutant("gradient's sign turned", changed(reference, maximize=lambda maximize: not maximize)),
        Mutant("another learning rate", changed(reference, lr=lambda lr: 1.01 * lr)),
        Mutant("no decay", changed(reference, weight_decay=lambda decay: 0.0)),
        Mutant("gradients changed", spoils_gradients),
    ]
