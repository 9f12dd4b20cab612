"""``dropout_add_rms_norm(x, residual, weight, p, seed)``: h = residual + dropout(x), and its RMSNorm, in one pass.

The end of a block of a transformer and the beginning of the next. Together they read 2 tensors and write 2, forward; apart they
would move 7. Backward reads h, dy and dh and writes 2. The mask is made again from the seed.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable
from weft.operators.call import Choice, guarded
from weft.operators.dispatch import Dispatch
from weft.operators.dropout import dropout
from weft.operators.dropout.dispatch import BACKWARD, FORWARD, NAME
from weft.operators.dropout.seeds import OFFSETS, Seed, check_seed, draw, scale_of, threshold_of
from weft.operators.launch import Plans
from weft.operators.normalization.dispatch import alike, default_eps
from weft.operators.normalization.reference import normalised
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

EPS = 1e-6
Pair = tuple[Tensor, Tensor]


def reference(
    x: Tensor, residual: Tensor, weight: Tensor, p: float = 0.5, seed: Seed = None, offset: int = 0, eps: float = EPS
) -> Pair:
    wide = x if x.dtype == torch.float64 else x.float()
    h = (residual.to(wide.dtype) + dropout.reference(wide, p, seed, offset)).to(x.dtype)
    return normalised(h, weight, None, eps, centered=False), h


def in_torch(
    x: Tensor, residual: Tensor, weight: Tensor, p: float = 0.5, seed: Seed = None, offset: int = 0, eps: float = EPS
) -> Pair:
    """As model code has it; with a seed, the same mask."""
    h = residual + dropout.in_torch(x, p, seed, offset)
    return F.rms_norm(h, (h.shape[-1],), weight.to(h.dtype), eps), h


def _mask(x: Tensor, seed: int | Tensor, offset: int, threshold: int) -> tuple[Any, ...]:
    held = isinstance(seed, Tensor)
    return seed if held else x, 0 if held else seed % 2**64, offset, threshold * 2**16 - 1, scale_of(threshold)


class AddNorm(KernelFunction):
    """Forward in Triton, backward by kernels that ``backwards`` makes the plans of."""

    @staticmethod
    def forward(ctx: Any, backwards: Any, x: Tensor, residual: Tensor, weight: Tensor, *options: Any) -> Pair:
        p, seed, offset, eps = options
        y, h = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        in_memory = isinstance(seed, Tensor)
        plan = TRITON.of((x, residual, weight), p, eps, in_memory)
        if h.numel():
            plan(x, residual, weight, y, h, *_mask(x, seed, offset, threshold_of(p)))
        ctx.call = backwards, p, None if in_memory else seed, offset, eps
        ctx.save_for_backward(h, weight, *((seed,) if in_memory else ()))
        return y, h

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, *held = ctx.saved_tensors
        backwards, p, seed, offset, eps = ctx.call
        seed = held[0] if held else seed
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted; h, our result, leads on to the arguments
            # Of views, since the weight itself is reached through h as well, by this very function: without end.
            inner = h.view_as(h), weight.view_as(weight)
            out = normalised(*inner, None, eps, centered=False)
            through, dw = torch.autograd.grad(out, inner, dy, create_graph=True)
            return None, dropout.reference(dh + through, p, seed, offset), dh + through, dw, *(None,) * 4
        dr, dx, dw = torch.empty_like(h), torch.empty_like(h), torch.empty_like(weight)
        if not h.numel():
            return None, dx, dr, dw.zero_(), *(None,) * 4
        plan = backwards.of((h, dy, dh, weight), eps, bool(held))
        plan(h, dy, dh, weight, dr, dx, dw, *_mask(h, seed, offset, threshold_of(p)))
        return None, dx, dr, dw, *(None,) * 4


TRITON = FORWARD.kernel("triton")


def run(
    backwards: Dispatch | Plans, x: Tensor, residual: Tensor, weight: Tensor, p: float = 0.5, seed: Seed = None,
    offset: int = 0, eps: float = EPS,
) -> Pair:  # fmt: skip
    """Forward in Triton, backward by a kernel of ``backwards``."""
    if seed is None:
        seed, offset = draw(x.device)
    return differentiable(AddNorm, backwards, x, residual, weight.contiguous(), p, seed, offset, eps)


by_triton = functools.partial(run, BACKWARD.kernel("triton"))
by_cuda = functools.partial(run, BACKWARD.kernel("cuda"))


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x and residual [M, N], weight [N]. Options: ``layout`` of x, ``residual`` (its layout), ``values``, ``p`` in per cent,
    ``offset``, ``seed=drawn``: none is given, and each implementation has masks of its own."""
    shape, values = (w["M"], w["N"]), w.option("values", "normal")
    seed = dropout.drawn_seed(w, g)
    return {
        "x": random_tensor(g, shape, w.dtype, device, layout=w.option("layout", "contiguous"), values=values),
        "residual": random_tensor(g, shape, w.dtype, device, layout=w.option("residual", "contiguous")),
        "weight": random_tensor(g, shape[1:], w.dtype, device),
        "p": w.option("p", 50) / 100,
        "seed": seed,
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


gradient = mutants.gradient_of(reference, "x", "residual", "weight")


def _one_without(left_out: int) -> Any:
    """Wrong: one gradient of the results is taken for zero."""

    def mutant(*gradients: Tensor, **named: Any) -> tuple[Tensor, ...]:
        return gradient(*(g * (i != left_out) for i, g in enumerate(gradients)), **named)

    return mutant


WIDTHS = (1024, 4096, 8192, 32768)

dropout_add_rms_norm = Operator(
    name=NAME,
    axes={"M": "rows", "N": "columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
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
            *(workload(M=m, N=n) for m, n in ((3, 1), (3, 7), (3, 100), (19, 259), (37, 30), (2, 33001))),
            *(workload(M=9, N=104, p=p) for p in (0, 10, 100)),
            workload(M=9, N=104, offset=3),
            *(workload(M=9, N=40, layout=at, residual=at) for at in ("unaligned", "sliced", "strided", "transposed")),
            *(workload(M=9, N=41, layout=at) for at in ("unaligned", "sliced", "strided", "transposed")),
            workload(M=9, N=40, layout="expanded", residual="sliced"),
            workload(M=0, N=8),
            workload(M=9, N=40, values="nonfinite"),
            workload(M=3, N=8200),
        ],
        "full": [workload(M=70, N=n) for n in (2**14, 2**15)],
        "bench": [workload(M=2**27 // n, N=n, p=10, seed="drawn") for n in WIDTHS],
        "quick": [workload(M=2**10, N=2**12, p=10, seed="drawn")],
        "compile": [workload(M=64, N=n) for n in (104, 4096, 2**15)],
        "tune": [workload(d, M=2**26 // n, N=n) for d in ("fp32", "bf16") for n in [2**i for i in range(10, 16)]],
        "huge": [workload("bf16", M=2**19 + 1, N=2**12)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("nothing dropped", mutants.changed(reference, p=lambda p: 0.0)),
        Mutant("residual dropped", lambda x, residual, weight, **n: reference(residual, x, weight, **n)),
        Mutant("weight left out", mutants.changed(reference, weight=torch.ones_like)),
        Mutant("h without x", lambda x, residual, *a, **n: (reference(x, residual, *a, **n)[0], residual.clone())),
        *mutants.usual(gradient, "backward"),
        Mutant("dy left out", _one_without(0), "backward"),
        Mutant("dh left out", _one_without(1), "backward"),
        Mutant("another mask", mutants.changed(gradient, offset=lambda offset: offset + 1), "backward"),
    ],
)

dropout_add_rms_norm.implementation("triton", arch=">=sm_80")(by_triton)
dropout_add_rms_norm.implementation("cuda", arch=">=sm_90", directions=("backward",))(by_cuda)
peers.register(dropout_add_rms_norm, in_torch)


@dropout_add_rms_norm.choice
@guarded
def choose(
    x: Tensor, residual: Tensor, weight: Tensor, p: float = 0.5, seed: Seed = None, offset: int = 0,
    eps: float | None = EPS, direction: str = "forward",
) -> Choice:  # fmt: skip
    x, residual, weight = alike(x, residual, weight)
    in_memory = isinstance(seed, Tensor)
    forward = FORWARD.choose(x, residual, weight, p, eps, in_memory)
    check_seed(NAME, x, seed, offset)
    if direction == "forward" or forward.implementation == "torch":
        return forward
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return BACKWARD.choose(h, h, h, weight.contiguous(), eps, in_memory)


@dropout_add_rms_norm.function
def dropout_add_rms_norm_function(
    x: Tensor, residual: Tensor, weight: Tensor, p: float = 0.5, seed: int | Tensor | None = None, offset: int = 0,
    eps: float | None = EPS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h = residual + dropout(x), and its RMSNorm over the last dimension, in one pass.

    Args:
        x: [..., N]; float32, float16, bfloat16 or float64.
        residual: the same shape and device, and dtype or, as of ``add_rms_norm``, another one.
        weight: [N], of x's dtype or float32.
        p, seed, offset: as :func:`weft.ops.dropout` takes them; the mask is the same.
        eps: added to the mean square; None as of ``rms_norm``.

    Returns:
        ``(y, h)`` in the dtype of ``x + residual``: the rounded h, and y = ``h / sqrt(mean(h²) + eps) * weight``, in fp32 and
        rounded once.

    Raises:
        TypeError, ValueError: as ``add_rms_norm`` and ``dropout``.

    Backward saves h, the weight and the seed; the weight's gradient is summed in fp32 in a fixed order.
    """
    x, residual, weight = alike(x, residual, weight)
    chosen = choose(x, residual, weight, p, seed, offset, eps).implementation
    eps = default_eps(x) if eps is None else eps
    if chosen == "torch":
        return reference(x, residual, weight, p, seed, offset, eps)
    return run(BACKWARD, x, residual, weight, p, seed, offset, eps)
