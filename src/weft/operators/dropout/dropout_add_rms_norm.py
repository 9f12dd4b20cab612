"""``dropout_add_rms_norm(x, residual, weight, p, seed)``: h = residual + dropout(x), and its RMSNorm, in one pass.

The end of a block of a transformer and the beginning of the next. Together they read 2 tensors and write 2, forward; apart they
would move 7. Backward reads h, dy and dh and writes 2. The mask is made again from the seed.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import (
    FLOATS,
    Choice,
    KernelFunction,
    check_device,
    check_same,
    check_tensor,
    differentiable,
    guarded,
    on_gpu,
    rows_of,
    traced,
)
from weft.operators.dropout import dropout
from weft.operators.dropout.norm_kernels import backward_plans, forward_plans
from weft.operators.dropout.philox import GROUP
from weft.operators.dropout.seeds import OFFSETS, check_probability, check_seed, draw, scale_of, threshold_of
from weft.operators.launch import Plans, target_sm
from weft.operators.normalization import dropped_backward
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor
from weft.operators.row_programs import ONE_PASS

EPS = 1e-6
NAME = "dropout_add_rms_norm"
Pair = tuple[Tensor, Tensor]


def normalised(h: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = h if h.dtype == torch.float64 else h.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(h.dtype)


def reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    p: float = 0.5,
    seed: int | Tensor | None = None,
    offset: int = 0,
    eps: float = EPS,
) -> Pair:
    wide = x if x.dtype == torch.float64 else x.float()
    h = (residual.to(wide.dtype) + dropout.reference(wide, p, seed, offset)).to(x.dtype)
    return normalised(h, weight, eps), h


def in_torch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    p: float = 0.5,
    seed: int | Tensor | None = None,
    offset: int = 0,
    eps: float = EPS,
) -> Pair:
    """As model code has it; with a seed, the same mask."""
    h = residual + dropout.in_torch(x, p, seed, offset)
    return F.rms_norm(h, (h.shape[-1],), weight.to(h.dtype), eps), h


# ---- call ------------------------------------------------------------------------------------------------------------


def _mask(x: Tensor, seed: int | Tensor, offset: int, threshold: int) -> tuple[Any, ...]:
    held = isinstance(seed, Tensor)
    return seed if held else x, 0 if held else seed % 2**64, offset, threshold * 2**16 - 1, scale_of(threshold)


def _autograd(backwards: Plans) -> type[torch.autograd.Function]:
    class Function(KernelFunction):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, p: float, seed: int | Tensor, offset: int, eps: float
        ) -> Pair:
            y, h = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
            if h.numel():
                plan = forward_plans.of((x, residual, weight), eps, isinstance(seed, Tensor))
                plan(x, residual, weight, y, h, *_mask(x, seed, offset, threshold_of(p)))
            ctx.call = p, None if isinstance(seed, Tensor) else seed, offset, eps
            ctx.save_for_backward(h, weight, *((seed,) if isinstance(seed, Tensor) else ()))
            return y, h

        @staticmethod
        def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
            h, weight, *held = ctx.saved_tensors
            p, seed, offset, eps = ctx.call
            seed = held[0] if held else seed
            if (
                torch.is_grad_enabled()
            ):  # a gradient of the gradient is wanted; h, our own result, leads on to the arguments
                # Of views, since the weight itself is reached through h as well, by this very function: without end.
                inner = h.view_as(h), weight.view_as(weight)
                through, dw = torch.autograd.grad(normalised(*inner, eps), inner, dy, create_graph=True)
                return dropout.reference(dh + through, p, seed, offset), dh + through, dw, *(None,) * 4
            dr, dx, dw = torch.empty_like(h), torch.empty_like(h), torch.empty_like(weight)
            if not h.numel():
                return dx, dr, dw.zero_(), *(None,) * 4
            dy, dh = (
                g if rows_of(g) is not None else g.contiguous() for g in (dy, dh)
            )  # expanded, say, out of autograd
            plan = backwards.of((h, dy, dh, weight), eps, bool(held))
            plan(h, dy, dh, weight, dr, dx, dw, *_mask(h, seed, offset, threshold_of(p)))
            return (dx, dr, dw, *(None,) * 4)

    return Function


def fastest_gradient(h: Tensor, dy: Tensor, dh: Tensor, weight: Tensor, eps: float, seed_in_memory: bool) -> Any:
    """The CUDA kernel where the card and the rows allow it, else Triton's."""
    if h.is_cuda and target_sm(h.device) >= 90:
        with contextlib.suppress(Declined):
            return dropped_backward.DroppedPlan(h, dy, dh, weight, eps, seed_in_memory)
    return backward_plans.of((h, dy, dh, weight), eps, seed_in_memory)


FUNCTIONS = {
    "triton": _autograd(backward_plans),
    "cuda": _autograd(dropped_backward.plans),
    "fastest": _autograd(Plans(fastest_gradient)),
}


def why_not(x: Tensor, residual: Tensor, p: float) -> str:
    """Why our kernel does not take these (an empty string when it does)."""
    n = x.shape[-1]
    if not threshold_of(p):
        return "nothing is dropped: add_rms_norm does it"
    if n > ONE_PASS or n % GROUP:
        return f"rows of {n} columns; the kernel takes multiples of {GROUP} up to {ONE_PASS}"
    if rows_of(x) is None or rows_of(residual) is None:
        return "the leading dimensions do not collapse into rows of one stride: a copy would be needed"
    return ""


def run(
    which: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    p: float = 0.5,
    seed: int | Tensor | None = None,
    offset: int = 0,
    eps: float = EPS,
) -> Pair:
    """Forward in Triton, backward by the kernel that ``which`` names."""
    if reason := why_not(x, residual, p):
        raise Declined(reason)
    if seed is None:
        seed, offset = draw(x.device)
    pair: Pair = differentiable(FUNCTIONS[which], x, residual, weight.contiguous(), p, seed, offset, eps)
    return pair


by_triton, by_cuda = functools.partial(run, "triton"), functools.partial(run, "cuda")


# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x and residual [M, N], weight [N]. Options: ``layout`` of x, ``residual`` (its layout), ``values``, ``p`` in per cent,
    ``offset``, ``seed=drawn``: none is given, and each implementation has masks of its own."""
    shape, values = (w["M"], w["N"]), w.option("values", "normal")
    number = 0 if g is None else int(torch.randint(2**63 - 1, (), generator=g, device=g.device))
    return {
        "x": random_tensor(g, shape, w.dtype, device, layout=w.option("layout", "contiguous"), values=values),
        "residual": random_tensor(g, shape, w.dtype, device, layout=w.option("residual", "contiguous")),
        "weight": random_tensor(g, shape[1:], w.dtype, device),
        "p": w.option("p", 50) / 100,
        "seed": None if w.option("seed") == "drawn" else number,
        "offset": w.option("offset", 0),
        "eps": EPS,
    }


def cost(w: Workload, direction: str) -> Cost:
    """Forward: x, residual and the weight; y and h. Backward: h, dy, dh and the weight; dx, dresidual and dweight."""
    n, row = w["M"] * w["N"], w["N"] * w.bytes_per_element
    size = n * w.bytes_per_element
    if direction == "forward":
        return Cost(reads=2 * size + row, writes=2 * size, vector_flops=6 * n, special_ops=2 * w["M"])
    return Cost(reads=3 * size + row, writes=2 * size + row, vector_flops=12 * n, special_ops=2 * w["M"])


def _terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """The gradients are sums with random signs, and one is a difference: how large their terms are."""
    (dy, dh), weight = gradients, arguments["weight"]
    _, h = reference(**arguments)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + arguments["eps"])
    each = dh.square().mean(-1, keepdim=True).sqrt() + rstd * (dy * weight).square().mean(-1, keepdim=True).sqrt()
    return [each * scale_of(threshold_of(arguments["p"])), each, (dy * h * rstd).square().sum(0).sqrt()]


def gradient(dy: Tensor, dh: Tensor, **named: Any) -> tuple[Tensor, ...]:
    leaves = {a: named[a].detach().requires_grad_() for a in ("x", "residual", "weight")}
    with torch.enable_grad():
        return torch.autograd.grad(reference(**{**named, **leaves}), list(leaves.values()), (dy, dh))


def _one_without(place: int) -> Any:
    """Wrong: one gradient of the results is taken for zero."""

    def mutant(*gradients: Tensor, **named: Any) -> tuple[Tensor, ...]:
        return gradient(*(g * (i != place) for i, g in enumerate(gradients)), **named)

    return mutant


WIDTHS = (1024, 4096, 8192, 32768)

dropout_add_rms_norm = Operator(
    name=NAME,
    axes={"M": "rows", "N": "columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options={
        "layout": LAYOUTS,
        "residual": LAYOUTS,
        "values": VALUES,
        "p": range(101),
        "offset": range(OFFSETS),
        "seed": ("number", "drawn"),
    },
    differentiable=("x", "residual", "weight"),
    tolerance={"forward": Tolerance(ulps=2.0), "backward": Tolerance(scale=_terms, ulps=2.0, terms=lambda w: 32)},
    workloads={
        "verify": [
            *(workload(M=m, N=n) for m, n in ((1, 8), (3, 16), (37, 104), (5, 1000), (2, 4096))),
            *(workload(M=3, N=n) for n in (1, 7, 100)),
            *(workload(M=9, N=104, p=p) for p in (0, 10, 100)),
            workload(M=9, N=104, offset=3),
            *(workload(M=9, N=40, layout=at, residual=at) for at in ("unaligned", "sliced", "strided", "transposed")),
            workload(M=9, N=40, layout="expanded", residual="sliced"),
            workload(M=0, N=8),
            workload(M=9, N=40, values="nonfinite"),
            workload(M=3, N=8200),
        ],
        "full": [workload(M=70, N=n) for n in (2**14, 2**15)],
        "bench": [workload(M=2**27 // n, N=n, p=10, seed="drawn") for n in WIDTHS],
        "quick": [workload(M=2**10, N=2**12, p=10, seed="drawn")],
        "compile": [workload(M=64, N=n) for n in (104, 4096, 2**15)],
        "tune": [
            workload(d, M=2**26 // n, N=n) for d in ("fp32", "bf16") for n in (1024, 2048, 4096, 8192, 16384, 32768)
        ],
        "huge": [workload("bf16", M=2**19 + 1, N=2**12)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("nothing dropped", lambda x, residual, weight, p, **n: reference(x, residual, weight, 0.0, **n)),
        Mutant("residual dropped", lambda x, residual, weight, **n: reference(residual, x, weight, **n)),
        Mutant(
            "weight left out", lambda x, residual, weight, **n: reference(x, residual, torch.ones_like(weight), **n)
        ),
        Mutant("h without x", lambda x, residual, *a, **n: (reference(x, residual, *a, **n)[0], residual.clone())),
        *mutants.usual(gradient, "backward"),
        Mutant("dy left out", _one_without(0), "backward"),
        Mutant("dh left out", _one_without(1), "backward"),
        Mutant("another mask", lambda dy, dh, offset, **n: gradient(dy, dh, offset=offset + 1, **n), "backward"),
    ],
)

dropout_add_rms_norm.implementation("triton", arch=">=sm_80")(by_triton)
dropout_add_rms_norm.implementation("cuda", arch=">=sm_90", devices=("cuda",), directions=("backward",))(by_cuda)
dropout_add_rms_norm.implementation("torch")(in_torch)
dropout_add_rms_norm.implementation("torch.compile", devices=("cuda",))(peers.Compiled(in_torch))

# ---- what users call -------------------------------------------------------------------------------------------------


@dropout_add_rms_norm.choice
@guarded
def choose(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    p: float = 0.5,
    seed: int | Tensor | None = None,
    offset: int = 0,
    eps: float = EPS,
) -> Choice:
    check_tensor(NAME, "x", x)
    check_tensor(NAME, "residual", residual)
    check_same(NAME, "residual", residual, "x", x)
    check_tensor(NAME, "weight", weight, tuple(dict.fromkeys((x.dtype, *FLOATS[:1]))))
    check_device(NAME, "weight", weight, "x", x)
    if x.ndim == 0 or residual.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{NAME}: arguments 'x', 'residual' and 'weight' have shapes {tuple(x.shape)}, {tuple(residual.shape)} and "
            f"{tuple(weight.shape)}; expected [..., N], the same and [N]"
        )
    check_probability(NAME, p, True)
    check_seed(NAME, x, seed, offset)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= 3e38:
        raise ValueError(f"{NAME}: argument 'eps' is {eps!r}; expected a number of at least 0 that fp32 can hold")
    if not on_gpu(x):
        return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
    if traced(x, residual, weight):
        return Choice("torch", "traced: PyTorch's own operators, which a compiler fuses with their neighbours")
    if not x.numel():
        return Choice("torch", "empty tensors: nothing to launch")
    if reason := why_not(x, residual, p):
        return Choice("torch", reason)
    return Choice("triton", f"{x.shape[-1]} columns, held in registers; the mask is made from the seed", forward_plans)


@dropout_add_rms_norm.function
def dropout_add_rms_norm_function(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    p: float = 0.5,
    seed: int | Tensor | None = None,
    offset: int = 0,
    eps: float = EPS,
) -> tuple[Tensor, Tensor]:
    """h = residual + dropout(x), and its RMSNorm over the last dimension, in one pass.

    Args:
        x: [..., N]; float32, float16 or bfloat16.
        residual: the same shape, dtype and device.
        weight: [N], of x's dtype or float32.
        p, seed, offset: as :func:`weft.ops.dropout` takes them; the mask is the same.
        eps: added to the mean square.

    Returns:
        ``(y, h)`` in x's dtype: the rounded h, and y = ``h / sqrt(mean(h²) + eps) * weight``, in fp32 and rounded
        once.

    Raises:
        TypeError: not tensors of those dtypes.
        ValueError: shapes or devices that do not match; p, seed, offset or eps out of range.

    Backward saves h, the weight and the seed; the weight's gradient is summed in fp32 in a fixed order.
    """
    if choose(x, residual, weight, p, seed, offset, eps).implementation == "torch":
        return reference(x, residual, weight, p, seed, offset, eps)
    return run("fastest", x, residual, weight, p, seed, offset, eps)
