"""``dropout(x, p=0.5, seed=None, offset=0, training=True)``: each element is 0 with probability p, else x / (1 − p).

Forward reads x and writes y; backward reads dy and writes dx, with the mask made again from the seed: nothing is stored.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable
from weft.operators.call import Choice, beside, eager, guarded
from weft.operators.dropout.dispatch import DROPOUT
from weft.operators.dropout.kernels import launchable
from weft.operators.dropout.philox import at_least
from weft.operators.dropout.seeds import OFFSETS, STEPS, Seed, check_seed, draw, scale_of, threshold_of
from weft.operators.elementwise.pointwise import LARGEST
from weft.operators.random_inputs import LAYOUTS, VALUES, drawn, vector_shape


def reference(x: Tensor, p: float = 0.5, seed: Seed = None, offset: int = 0, training: bool = True) -> Tensor:
    threshold = threshold_of(p)
    if not training or not threshold:
        return x
    if seed is None:  # PyTorch's random numbers; its own product would leave NaN where it drops what is not finite
        factor = F.dropout(torch.ones_like(x), threshold / STEPS)
        return torch.where(factor != 0, x * factor, 0.0)
    keep = beside(x, at_least(x.shape, seed, offset, threshold, x.device))
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.where(keep, wide * scale_of(threshold), 0.0).to(x.dtype)


def in_torch(x: Tensor, p: float = 0.5, seed: Seed = None, offset: int = 0, training: bool = True) -> Tensor:
    """PyTorch's own; with a seed, which it does not take, the same mask as ours."""
    return F.dropout(x, p, training) if seed is None else reference(x, p, seed, offset, training)


class Dropout(KernelFunction):
    """Linear, with a mask that depends on neither values nor layout: its gradient is itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int | Tensor, offset: int) -> Tensor:
        in_memory = isinstance(seed, Tensor)
        if in_memory:
            ctx.save_for_backward(seed)
        ctx.call = (p, None if in_memory else seed, offset)
        return TRITON.of((x,), p, True, in_memory)(x, seed, offset)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        p, seed, offset = ctx.call
        if seed is None:
            (seed,) = ctx.saved_tensors
        if not launchable(dy):
            dy = dy.contiguous()  # of any strides (expanded, say) out of autograd
        return differentiable(Dropout, dy, p, seed, offset), None, None, None


TRITON = DROPOUT.kernel("triton")


def dropout_triton(x: Tensor, p: float = 0.5, seed: Seed = None, offset: int = 0, training: bool = True) -> Tensor:
    if seed is None:
        seed, offset = draw(x.device)
    return differentiable(Dropout, x, p if training else 0.0, seed, offset)


def drawn_seed(w: Workload, g: Any) -> Any:
    """A number, or None with ``seed=drawn``."""
    number = 0 if g is None else int(torch.randint(2**63 - 1, (), generator=g, device=g.device))
    return None if w.option("seed") == "drawn" else number


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Options: ``rows=R`` (x is [R, N / R]), ``layout``, ``values``, ``p`` in per cent, ``offset``, ``training``, ``seed``: a
    number, a ``tensor``, or ``drawn``: none is given, as users call it, and each implementation has masks of its own."""
    x = drawn(w, g, device, *vector_shape("dropout", w))
    seed = drawn_seed(w, g)
    if w.option("seed") == "tensor":
        seed = torch.full((1,), seed, dtype=torch.int64, device=device)
    offset, training = w.option("offset", 0), w.option("training", True)
    return {"x": x, "p": w.option("p", 50) / 100, "seed": seed, "offset": offset, "training": training}


def cost(w: Workload, direction: str) -> Cost:
    """x and y, or dy and dx. Random numbers are integer arithmetic, which is not counted."""
    size = w["N"] * w.bytes_per_element
    return Cost(size, size, vector_flops=w["N"])


def gradient(dy: Tensor, x: Tensor, *call: Any, **named: Any) -> tuple[Tensor]:
    return (reference(dy, *call, **named),)


def _memory_order(x: Tensor, *call: Any, **named: Any) -> Tensor:
    """Wrong: the mask follows memory, not the logical index."""
    if x.ndim < 2:
        return reference(x, *call, **named)
    return reference(x.transpose(-1, -2), *call, **named).transpose(-1, -2)


def _half_of_the_bits(x: Tensor, p: float = 0.5, seed: Any = None, offset: int = 0, training: bool = True) -> Tensor:
    """Wrong: both halves of a word are its lower one, so neighbours share their fate."""
    y = reference(x, p, seed, offset, training)
    if not training or not threshold_of(p) or y.numel() < 2:
        return y
    keep = at_least(x.shape, seed, offset, threshold_of(p), x.device).flatten()
    keep[1::2] = keep[: keep.numel() // 2 * 2 : 2]
    return torch.where(keep.view(x.shape), x.float() * scale_of(threshold_of(p)), 0.0).to(x.dtype)


ROW_LAYOUTS = ("sliced", "transposed", "strided", "expanded")

dropout = Operator(
    name="dropout",
    axes={"N": "elements"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "layout": LAYOUTS,
        "values": VALUES,
        "rows": range(1, 2**31),
        "p": range(101),
        "offset": range(OFFSETS),
        "training": (True, False),
        "seed": ("number", "tensor", "drawn"),
    },
    differentiable=("x",),
    tolerance=Tolerance(scale="element"),
    workloads={
        "verify": [
            *(workload(N=n) for n in (1, 7, 8, 1023, 1025, 4100)),
            workload(N=0),
            *(workload(N=3000, p=p) for p in (0, 1, 10, 90, 100)),
            workload(N=1000, training=False),
            workload(N=1000, offset=1),
            workload(N=1000, offset=2**61 + 12345),
            workload(N=1000, seed="tensor"),
            *(workload(N=1002, layout=at) for at in ("unaligned", "strided")),
            *(workload(N=21 * n, rows=21, layout=at) for n in (50, 56) for at in ROW_LAYOUTS),
            workload(N=3 * 600, rows=3, layout="sliced"),
            workload(N=3 * 1203, rows=3, layout="sliced"),
            *(workload(N=2000, values=values) for values in ("large", "tiny", "nonfinite")),
        ],
        "bench": [workload(N=LARGEST, p=p, seed="drawn") for p in (10, 50)],
        "quick": [workload(N=2**22, p=10, seed="drawn")],
        "sizes": [workload(N=n, p=10, seed="drawn") for n in (2**16, 2**20, 2**24)],
        "compile": [
            workload(N=2**20),
            workload(N=2**20, seed="tensor"),
            workload(N=42 * 50, rows=42, layout="sliced"),
            workload(N=42 * 512, rows=42, layout="sliced"),
        ],
        "tune": [workload(d, N=n) for n in (2**20, 2**22, 2**24, 2**26) for d in ("fp32", "bf16")],
        "huge": [workload("bf16", N=2**31 + 17)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("not scaled", lambda x, p=0.5, *a, **k: reference(x, p, *a, **k) * (1 - p)),
        Mutant("mask inverted", lambda x, *a, **k: x * 2 - reference(x, *a, **k)),
        Mutant("seed ignored", mutants.changed(reference, seed=lambda seed: 0)),
        Mutant("offset ignored", mutants.changed(reference, offset=lambda offset: 0)),
        Mutant("upper words ignored", mutants.changed(reference, seed=lambda seed: seed & 0xFFFFFFFF)),
        Mutant("mask by memory order", _memory_order),
        Mutant("neighbours dropped together", _half_of_the_bits),
        Mutant("drops in evaluation", mutants.changed(reference, training=lambda training: True)),
        *mutants.usual(gradient, "backward"),
        Mutant("not scaled", lambda dy, x, p=0.5, *a, **k: (gradient(dy, x, p, *a, **k)[0] * (1 - p),), "backward"),
        Mutant("passes everywhere", lambda dy, *a, **k: (dy.clone(),), "backward"),
        Mutant("another mask", mutants.changed(gradient, offset=lambda offset: offset + 1), "backward"),
    ],
)

dropout.implementation("triton", arch=">=sm_80")(dropout_triton)
peers.register(dropout, in_torch)


@dropout.choice
@guarded
def choose(
    x: Tensor, p: float = 0.5, seed: Seed = None, offset: int = 0, training: bool = True, direction: str = "forward"
) -> Choice:
    """Of both directions: the gradient lies in memory as the result does, and is dropped as x was."""
    chosen = DROPOUT.choose(x, p, training, isinstance(seed, Tensor))
    check_seed("dropout", x, seed, offset)
    return chosen


@dropout.function
def dropout_function(
    x: Tensor, p: float = 0.5, seed: int | Tensor | None = None, offset: int = 0, training: bool = True
) -> Tensor:
    """Sets each element to 0 with probability p and divides the others by 1 − p.

    The mask is never stored: 16 bits of Philox4x32-10 decide over an element, a function of the seed, the offset and the
    element's row-major index in x alone. The same arguments give the same mask for every dtype, layout, device and GPU.

    Args:
        x: any shape; float32, float16 or bfloat16.
        p: 0 … 1, rounded to a multiple of 2**-16; the scale is that of the rounded p, so the expectation is x.
        seed: an int of 64 bits; or an int64 tensor of one element on x's device, read when the kernel runs (a captured graph
            takes what it then holds); or None: drawn from PyTorch's default generator of the device, as its own dropout
            does (``torch.manual_seed`` and activation checkpointing work, the device is not waited for, a captured graph
            draws anew at each replay; on a CPU, and while a compiler traces, the mask is PyTorch's).
        offset: 0 … 2**62 − 1: another one with the same seed is an independent mask (a layer's number, a step's); only with
            a seed.
        training: False returns x.

    Returns:
        A tensor of x's shape and dtype, computed in fp32 and rounded once; x itself where nothing is dropped. What is
        dropped is 0, also where x is not finite (PyTorch's is NaN there).

    Raises:
        TypeError: not a tensor of those dtypes.
        ValueError: p, seed or offset out of range, or a seed on another device.

    Source: Srivastava et al. 2014; Salmon et al. 2011 for the random numbers.
    """
    if training is True and not isinstance(seed, Tensor) and eager(x, gradient=True, autocast=True):
        ready = DROPOUT.of((x,), p, True, False)
        if ready is not None:
            if seed is not None or offset != 0:
                check_seed("dropout", x, seed, offset)
            if seed is None:
                seed, offset = draw(x.device)
            if isinstance(seed, Tensor) or (torch.is_grad_enabled() and x.requires_grad):
                return differentiable(Dropout, x, p, seed, offset)
            return ready(x, seed, offset)
    chosen = choose(x, p, seed, offset, training).implementation
    return (reference if chosen == "torch" else dropout_triton)(x, p, seed, offset, training)
