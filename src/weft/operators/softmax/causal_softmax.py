"""``causal_softmax(x, scale=1.0)``: softmax over the last dimension of which each row sees the columns up to its own.

Row i of [S, T] keeps the columns j <= i + T - S, so the last row keeps all. Forward compulsorily reads what is kept (half of a
square) and writes all of y; backward reads what is kept of y and dy and writes all of dx. Bandwidth is the limit.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Workload, workload, workloads
from weft.operators import mutants, peers
from weft.operators.autograd import differentiable
from weft.operators.call import Choice, beside, eager, guarded, widened
from weft.operators.contiguous import by_rows
from weft.operators.launch import Plans
from weft.operators.random_inputs import LAYOUTS, VALUES, drawn
from weft.operators.softmax.dispatch import CAUSAL, MASKED_FORWARD
from weft.operators.softmax.masked_softmax import BY_KERNEL, PUBLIC, MaskedSoftmax, choose_masked, masked_tolerance


def hidden(x: Tensor, shift: int = 0) -> Tensor:
    """[S, T]: what each row does not see."""
    s, t = x.shape[-2:]
    return beside(x, torch.ones(s, t, dtype=torch.bool, device=x.device).triu(1 + t - s + shift))


def torch_causal_softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    return torch.softmax((x * scale).masked_fill(hidden(x), -torch.inf), -1)


def reference(x: Tensor, scale: float = 1.0) -> Tensor:
    return torch_causal_softmax(x if x.dtype == torch.float64 else x.float(), scale).to(x.dtype)


def launched(x: Tensor, scale: float = 1.0, *, plans: tuple[Plans, Plans]) -> Tensor:
    return differentiable(MaskedSoftmax, x, x.detach(), scale, CAUSAL, plans, lambda x: reference(x, scale))


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [B, S, T]; the option ``scale`` in per cent."""
    return {"x": drawn(w, g, device, w["B"], w["S"], w["T"]), "scale": w.option("scale", 100) / 100}


def seen(w: Workload) -> int:
    """Elements that some row keeps."""
    s, t = w["S"], w["T"]
    rows = min(s, t)  # that keep anything: t - rows + 1 … t columns
    return w["B"] * rows * (2 * t - rows + 1) // 2


def cost(w: Workload, direction: str) -> Cost:
    n, size = seen(w), w["B"] * w["S"] * w["T"] * w.bytes_per_element
    if direction == "forward":
        return Cost(reads=n * w.bytes_per_element, writes=size, vector_flops=5 * n, special_ops=n)
    return Cost(reads=2 * n * w.bytes_per_element, writes=size, vector_flops=5 * n)


def _with(change: Any) -> Any:
    return lambda x, scale=1.0: torch.softmax(change(x.float(), scale), -1).to(x.dtype)


def _gradient(dy: Tensor, x: Tensor, scale: float = 1.0) -> tuple[Tensor]:
    y = reference(x, scale)
    dx = scale * y * (dy - (dy * y).sum(-1, keepdim=True))
    return (dx.masked_fill(hidden(x), 0),)


def _sum_left_out(dy: Tensor, x: Tensor, scale: float = 1.0) -> tuple[Tensor]:
    return (scale * reference(x, scale) * dy,)


points = functools.partial(workloads, "BST")

causal_softmax = Operator(
    name="causal_softmax",
    axes={"B": "batches and heads", "S": "rows (queries)", "T": "columns (keys)"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"layout": LAYOUTS, "values": VALUES, "scale": range(-1000, 1001)},
    differentiable=("x",),
    tolerance=masked_tolerance(reference),
    workloads={
        "verify": [
            *points((1, 1, 1), (2, 3, 3), (3, 5, 9), (2, 9, 5), (1, 40, 100), (2, 33, 33)),
            *points((0, 3, 3), (2, 0, 3), (2, 3, 0)),
            *(w for layout in LAYOUTS[1:] for w in points((3, 9, 17), layout=layout)),
            *(w for scale in (25, -100) for w in points((2, 20, 20), scale=scale)),
            *points((2, 20, 20), values="large"),
            *points((3, 20, 20), values="nonfinite"),
            *points((2, 20, 20), values="minus_inf_rows"),
            *points((1, 3, 2048), (1, 9, 264), (2, 35, 150), (1, 3, 1101)),
            *points((2, 7, 520), values="nonfinite"),
            *points((1, 70, 64), values="minus_inf_rows", scale=-100),
            *points((1, 2, 33000)),
        ],
        "full": [
            *points((2, 1000, 1000), (1, 100, 2**16 + 3)),
            *points((2, 1030, 1024), values="minus_inf_rows", scale=-100),
            *points(*((1, n, n) for n in (256, 512, 2048, 4096, 8192, 16384)), (1, 100, 32768)),
        ],
        "huge": [workload("bf16", B=2**15 + 1, S=256, T=t) for t in (257, 264)],
        "bench": [workload(B=2**28 // n**2, S=n, T=n) for n in (512, 1024, 2048, 4096, 8192, 16384)],
        "quick": [workload(B=4, S=1024, T=1024)],
        "compile": [workload(B=2, S=64, T=n) for n in (100, 603, 4096, 2**16)],
        "tune": [
            workload(d, B=2**28 // n**2, S=n, T=n)
            for d in ("fp32", "bf16")
            for n in (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
        ],
        "model": [workload("bf16", B=32, S=2048, T=2048, scale=9)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("sees one more", _with(lambda x, scale: (x * scale).masked_fill(hidden(x, 1), -torch.inf))),
        Mutant(
            "counted from the first row",
            _with(lambda x, scale: (x * scale).masked_fill(~torch.ones_like(x).tril().bool(), -torch.inf)),
        ),
        Mutant("scale left out", _with(lambda x, scale: x.masked_fill(hidden(x), -torch.inf))),
        Mutant("hidden as zeros", _with(lambda x, scale: (x * scale).masked_fill(hidden(x), 0.0))),
        *mutants.usual(_gradient, "backward"),
        Mutant("sum left out", _sum_left_out, "backward"),
        Mutant("scale left out", lambda dy, x, scale=1.0: (_gradient(dy, x, scale)[0] / scale,), "backward"),
    ],
)

causal_softmax.implementation("triton", arch=">=sm_80")(functools.partial(launched, plans=BY_KERNEL["triton"]))
causal_softmax.implementation("cuda", arch=">=sm_80")(functools.partial(launched, plans=BY_KERNEL["cuda"]))
peers.register(causal_softmax, torch_causal_softmax)


@causal_softmax.choice
@guarded
def choose(x: Tensor, scale: float = 1.0, direction: str = "forward") -> Choice:
    (x,) = widened(x)
    return choose_masked(x, x, scale, CAUSAL, direction)


@causal_softmax.function
def causal_softmax_function(x: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of ``scale * x`` over the last dimension, each row over the columns that it may see.

    Args:
        x: [..., S, T]; float32, float16 or bfloat16. Row i sees the columns 0 … i + T - S.
        scale: multiplies x.

    Returns:
        A tensor of x's shape and dtype, 0 where a row does not see; sums are taken in fp32. A row that sees nothing (S > T), or
        holds NaN or +inf or only -inf among what it sees, is NaN. Under autocast x is cast to float32.

    Raises:
        TypeError: x is not a tensor of those dtypes.
        ValueError: x has fewer than two dimensions, or scale is not finite.
    """
    if eager(x) and (plan := MASKED_FORWARD.of((x, x), scale, CAUSAL)) is not None:
        y = torch.empty_like(x)
        plan(x, x, y)
        return y
    chosen = choose(x, scale).implementation
    (x,), scale = widened(x), float(scale)
    return reference(x, scale) if chosen == "torch" else launched(by_rows(x), scale, plans=PUBLIC)
