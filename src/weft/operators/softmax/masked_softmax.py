"""``masked_softmax(x, mask, scale=1.0)``: softmax(scale * x + mask) over the last dimension.

Forward compulsorily reads x and the mask (as small as it is before it is broadcast) and writes y; backward reads y and dy and
writes dx. Bandwidth is the limit.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, eager, guarded, on_gpu, traced, widened
from weft.operators.contiguous import by_rows, needs_copy
from weft.operators.launch import Plans
from weft.operators.layout import readable
from weft.operators.random_inputs import LAYOUTS, VALUES, drawn, random_tensor
from weft.operators.softmax.dispatch import ADDITIVE, BOOLEAN, CAUSAL, MASKED_BACKWARD, MASKED_FORWARD, NONE

# ---- calls of causal_softmax and masked_softmax around the tables of kernels -----------------------------------------

PUBLIC = MASKED_FORWARD, MASKED_BACKWARD
BY_KERNEL = {kernel: (MASKED_FORWARD.kernel(kernel), MASKED_BACKWARD.kernel(kernel)) for kernel in ("triton", "cuda")}


def as_bytes(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


class MaskedSoftmax(KernelFunction):
    """``plans`` of forward and backward. ``reference(x)`` is the same in PyTorch; its autograd serves where a second gradient
    is needed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor, scale: float, kind: str, plans: tuple[Plans, Plans],
        reference: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        y = torch.empty_like(x)
        forward_plans, ctx.backward_plans = plans
        if y.numel():
            forward_plans.of((x, mask), scale, kind)(x, as_bytes(mask), y)
        ctx.save_for_backward(y, x)
        ctx.scale, ctx.causal, ctx.reference = scale, kind == CAUSAL, reference
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, x = ctx.saved_tensors
        rest = (None,) * 5
        if torch.is_grad_enabled():
            return *reference_gradients(ctx.reference, (x,), (True,), (dy,)), *rest
        dx = torch.empty_like(y)
        if dx.numel():
            dy = readable(dy, y)
            ctx.backward_plans.of((y, dy), ctx.scale, ctx.causal)(y, dy, dx)
        return (dx, *rest)


def choose_masked(x: Tensor, mask: Tensor, scale: float, kind: str, direction: str) -> Choice:
    if isinstance(x, Tensor) and on_gpu(x) and not traced(x) and needs_copy(x):
        copy = x.new_empty(x.shape)
        chosen = choose_masked(copy, copy if mask is x else mask, scale, kind, direction)
        return Choice(chosen.implementation, f"of a contiguous copy: {chosen.reason}")
    chosen = MASKED_FORWARD.choose(x, mask, scale, kind)
    if direction == "forward" or chosen.implementation == "torch":
        return chosen
    y = torch.empty_like(x)
    return MASKED_BACKWARD.choose(y, y, float(scale), kind == CAUSAL)


def masked_tolerance(reference: Callable[..., Tensor]) -> dict[str, Tolerance]:
    """Forward: a score is rounded before its exponential is taken, which costs half an ulp for each unit of the score.
    Backward: dx is a difference that vanishes where one column has all the weight, so errors are relative to its terms: to
    the root of their squares' mean over the columns that a row sees. The columns that it does not see have none."""

    def terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        (dy,), y = gradients, reference(**arguments)
        each = arguments["scale"] * y * (dy.abs() + (y * dy.abs()).sum(-1, keepdim=True))
        return [(each.square().sum(-1, keepdim=True) / (each != 0).sum(-1, keepdim=True).clamp(min=1)).sqrt()]

    return {"forward": Tolerance(scale="element", ulps=2.0), "backward": Tolerance(scale=terms, terms=lambda w: 32)}


def torch_masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    scores = x * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -torch.inf)
        scores = scores + mask.to(x.dtype)
    return torch.softmax(scores, -1)


def reference(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    return torch_masked_softmax(x if x.dtype == torch.float64 else x.float(), mask, scale).to(x.dtype)


def kind_of(mask: Tensor | None) -> str:
    return NONE if mask is None else BOOLEAN if getattr(mask, "dtype", None) == torch.bool else ADDITIVE


def launched(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, plans: tuple[Plans, Plans]) -> Tensor:
    read = (x if mask is None else mask).detach()
    return differentiable(MaskedSoftmax, x, read, scale, kind_of(mask), plans, lambda x: reference(x, mask, scale))


SHAPES = {  # of the mask, for x [B, H, S, T]
    "full": lambda b, h, s, t: (b, h, s, t),
    "heads": lambda b, h, s, t: (b, 1, s, t),
    "keys": lambda b, h, s, t: (b, 1, 1, t),
    "square": lambda b, h, s, t: (s, t),
}


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [B, H, S, T]; options: the mask's ``shape`` and ``kind``, ``scale`` in per cent."""
    shape = tuple(w[a] for a in "BHST")
    x = drawn(w, g, device, *shape)
    mask, kind = None, w.option("kind", BOOLEAN)
    if kind != NONE:
        mask = random_tensor(g, SHAPES[w.option("shape", "heads")](*shape), w.dtype, device)
        if kind == BOOLEAN:
            mask = mask > -0.5
            if mask.shape[-1] and not w.option("empty"):
                mask[..., 0] = True
    return {"x": x, "mask": mask, "scale": w.option("scale", 100) / 100}


def cost(w: Workload, direction: str) -> Cost:
    shape = tuple(w[a] for a in "BHST")
    n, places = math.prod(shape), math.prod(SHAPES[w.option("shape", "heads")](*shape))
    size = n * w.bytes_per_element
    each = {NONE: 0, BOOLEAN: 1, ADDITIVE: w.bytes_per_element}[w.option("kind", BOOLEAN)]
    if direction == "forward":
        return Cost(reads=size + places * each, writes=size, vector_flops=6 * n, special_ops=n)
    return Cost(reads=2 * size, writes=size, vector_flops=5 * n)


def _gradient(dy: Tensor, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor]:
    y = reference(x, mask, scale)
    return (scale * y * (dy - (dy * y).sum(-1, keepdim=True)),)


def _inverted(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    return reference(x, ~mask if mask is not None and mask.dtype == torch.bool else mask, scale)


points = functools.partial(workloads, "BHST")
SMALL = (2, 3, 4, 20)

masked_softmax = Operator(
    name="masked_softmax",
    axes={"B": "batches", "H": "heads", "S": "rows (queries)", "T": "columns (keys)"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "layout": LAYOUTS,
        "values": VALUES,
        "shape": tuple(SHAPES),
        "kind": (NONE, BOOLEAN, ADDITIVE),
        "scale": range(-1000, 1001),
        "empty": (True, False),
    },
    differentiable=("x",),
    tolerance=masked_tolerance(reference),
    workloads={
        "verify": [
            *points((1, 1, 1, 1), (1, 1, 3, 5), (2, 3, 4, 33), (1, 2, 5, 1000)),
            *(w for shape in SHAPES for kind in (BOOLEAN, ADDITIVE) for w in points(SMALL, shape=shape, kind=kind)),
            *points(SMALL, kind=NONE, scale=30),
            *points(SMALL, kind=ADDITIVE, scale=-50),
            *points((0, 3, 4, 5), (2, 3, 4, 0)),
            *(w for layout in LAYOUTS[1:5] for w in points((2, 3, 5, 17), layout=layout)),
            *points((2, 2, 5, 20), values="large", kind=ADDITIVE),
            *points((2, 2, 5, 20), values="nonfinite"),
            *points((2, 20, 2, 3), empty=True),
            *points((1, 1, 3, 2048), kind=ADDITIVE),
            *points((2, 4, 3, 264), values="minus_inf_rows"),
            *points((2, 4, 3, 264), kind=ADDITIVE, values="nonfinite", shape="keys"),
            *(w for kind in (BOOLEAN, ADDITIVE) for w in points((1, 2, 5, 150), (1, 2, 2, 1101), kind=kind)),
            *points((1, 2, 1, 33000)),
        ],
        "full": [
            *(w for n in (2**15, 2**16 + 3) for k in (BOOLEAN, ADDITIVE) for w in points((2, 3, 7, n), kind=k)),
            *(
                workload(B=2, H=8, S=6, T=n, kind=k, shape=shape)
                for n in (264, 512, 1032, 2048, 4096, 8192, 16384)
                for shape, k in (("full", BOOLEAN), ("heads", ADDITIVE), ("keys", ADDITIVE), ("square", BOOLEAN))
            ),
        ],
        "huge": [workload("bf16", B=2, H=2**14 + 1, S=256, T=t) for t in (257, 264)],
        "bench": [
            *(workload(B=2**24 // n**2, H=16, S=n, T=n, kind=BOOLEAN) for n in (512, 1024, 2048, 4096)),
            workload(B=4, H=16, S=2048, T=2048, kind=ADDITIVE),
            workload(B=4, H=16, S=2048, T=2048, kind=BOOLEAN, shape="keys"),
        ],
        "quick": [workload(B=1, H=4, S=1024, T=1024)],
        "compile": [
            workload(B=1, H=2, S=64, T=n, kind=k) for n in (100, 603, 4096, 2**16) for k in (BOOLEAN, ADDITIVE)
        ],
        "tune": [
            workload(d, B=max(2**24 // n**2, 1), H=16, S=n, T=n, kind=k)
            for d in ("fp32", "bf16")
            for k in (NONE, BOOLEAN, ADDITIVE)
            for n in (256, 512, 1024, 2048, 4096, 8192)
        ],
        "model": [workload("bf16", B=4, H=32, S=2048, T=2048, shape="keys", scale=9)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("mask left out", lambda x, mask=None, scale=1.0: reference(x, None, scale)),
        Mutant("scale left out", lambda x, mask=None, scale=1.0: reference(x, mask, 1.0)),
        Mutant("mask inverted", _inverted),
        *mutants.usual(_gradient, "backward"),
        Mutant("scale left out", lambda dy, x, mask, scale: (_gradient(dy, x, mask, scale)[0] / scale,), "backward"),
        Mutant("mask left out", lambda dy, x, mask=None, scale=1.0: _gradient(dy, x, None, scale), "backward"),
    ],
)

masked_softmax.implementation("triton", arch=">=sm_80")(functools.partial(launched, plans=BY_KERNEL["triton"]))
masked_softmax.implementation("cuda", arch=">=sm_80", directions=("forward",))(
    functools.partial(launched, plans=BY_KERNEL["cuda"])
)
peers.register(masked_softmax, torch_masked_softmax)


@masked_softmax.choice
@guarded
def choose(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, direction: str = "forward") -> Choice:
    (x,) = widened(x)
    return choose_masked(x, x if mask is None else mask, scale, kind_of(mask), direction)


@masked_softmax.function
def masked_softmax_function(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Softmax of ``scale * x + mask`` over the last dimension.

    Args:
        x: [..., N]; float32, float16 or bfloat16.
        mask: broadcastable to x: boolean (true is kept, false adds -inf) or floating (added); None for none.
        scale: multiplies x.

    Returns:
        A tensor of x's shape and dtype; computed in fp32 and rounded once. A row of which nothing is left is NaN, as in
        PyTorch. Under autocast x is cast to float32.

    Raises:
        TypeError: tensors of other dtypes.
        ValueError: a mask that does not broadcast to x or lies elsewhere, or a scale that is not finite.
    """
    read = x if mask is None else mask
    if eager(x, read) and (plan := MASKED_FORWARD.of((x, read), scale, kind_of(mask))) is not None:
        y = torch.empty_like(x)
        plan(x, as_bytes(read), y)
        return y
    chosen = choose(x, mask, scale).implementation
    (x,), scale = widened(x), float(scale)
    return reference(x, mask, scale) if chosen == "torch" else launched(by_rows(x), mask, scale, plans=PUBLIC)
