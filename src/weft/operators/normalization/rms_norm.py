"""``rms_norm(x, weight, eps)``: x / sqrt(mean(x²) + eps) * weight over the last dimension, forward and backward.

Forward compulsorily reads x and writes y; backward reads x and dy and writes dx (weights and their gradient are a row
each). A few operations an element: memory bandwidth is the limit. Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, guarded, on_gpu, traced
from weft.operators.normalization.kind import Given, Kind
from weft.operators.normalization.norm import Norm, contiguous, forward, gradients
from weft.operators.normalization.plans import backward_plans, forward_plans
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

EPS = 1e-6


def reference(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


# ---- PyTorch operators, for what traces -------------------------------------------------------------------------------

PLAIN = Kind(centered=False, weighted=True, biased=False, added=False)


def _kind(weight: Tensor | None) -> Kind:
    return PLAIN._replace(weighted=weight is not None)


@torch.library.triton_op("weft::rms_norm", mutates_args=())
def rms_norm_op(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if not on_gpu(x):
        return reference(x, weight, eps)
    given = Given.of(x, None, contiguous(weight), None)
    return forward(forward_plans, given, eps, _kind(weight), kept=False)[0]


@torch.library.triton_op("weft::rms_norm_backward", mutates_args=())
def backward_op(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(dx, dweight); dweight is empty without a weight."""
    if not on_gpu(x):
        return _backward_reference(dy, x, weight, eps)
    dx, dw, _ = gradients(backward_plans, x, dy, None, contiguous(weight), (x, x), eps, _kind(weight))
    return dx, x.new_empty(0) if dw is None else dw


def _backward_reference(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    xhat = wide * rstd
    g = dy if weight is None else dy * weight
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if weight is None:
        return dx.to(x.dtype), x.new_empty(0)
    return dx.to(x.dtype), (dy * xhat).flatten(0, -2).sum(0).to(weight.dtype)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    dx, dw = torch.ops.weft.rms_norm_backward(dy, x, weight, ctx.eps)
    return dx, None if weight is None else dw, None


rms_norm_op.register_autograd(_backward, setup_context=_save)

# ---- implementations -------------------------------------------------------------------------------------------------

norm = Norm(
    "rms_norm",
    centered=False,
    added=False,
    reference=lambda x, residual, weight, bias, eps: reference(x, weight, eps),
    registered=lambda x, residual, weight, bias, eps: torch.ops.weft.rms_norm(x, weight, eps),
)


def rms_norm_triton(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    if traced(x) or not on_gpu(x):
        return torch.ops.weft.rms_norm(x, weight, eps)
    y: Tensor = norm.run("triton", x, None, weight, None, eps)
    return y


def rms_norm_cuda(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    y: Tensor = norm.run("cuda", x, None, weight, None, eps)
    return y


def rms_norm_cuda_stream(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    y: Tensor = norm.run("cuda-stream", x, None, weight, None, eps)
    return y


def torch_rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def liger(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def quack(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    from quack.rmsnorm import rmsnorm

    if x.ndim != 2:
        raise Declined("QuACK's rmsnorm takes a matrix")
    return rmsnorm(x, weight, eps=eps)


def numpy(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    import numpy as np

    a = x.numpy()
    y = a / np.sqrt(np.mean(a * a, axis=-1, keepdims=True) + np.float32(eps))
    return torch.from_numpy(y if weight is None else y * weight.numpy())


# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [M, N], the weight [N] (none with the option weight=False)."""
    layout, values = w.option("layout", "contiguous"), w.option("values", "normal")
    weight = random_tensor(g, (w["N"],), w.dtype, device, layout=w.option("weight_layout", "contiguous"))
    return {
        "x": random_tensor(g, (w["M"], w["N"]), w.dtype, device, layout=layout, values=values),
        "weight": weight if w.option("weight", True) else None,
        "eps": EPS,
    }


def cost(w: Workload, direction: str) -> Cost:
    n, row = w["M"] * w["N"], w["N"] * w.bytes_per_element * w.option("weight", True)
    size = n * w.bytes_per_element
    if direction == "forward":
        return Cost(reads=size + row, writes=size, vector_flops=4 * n, special_ops=2 * w["M"])
    return Cost(reads=2 * size + row, writes=size + row, vector_flops=10 * n, special_ops=2 * w["M"])


def _gradient_terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """dx is a difference that vanishes at N = 1, dw a sum with random signs: how large their terms are."""
    x, weight, (dy,) = arguments["x"], arguments["weight"], gradients
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + arguments["eps"])
    g = dy if weight is None else dy * weight
    dx_terms = rstd * g.square().mean(-1, keepdim=True).sqrt()
    return [dx_terms] if weight is None else [dx_terms, (dy * x * rstd).square().sum(0).sqrt()]


def _wide(x: Tensor, weight: Tensor | None, change: Any) -> Tensor:
    y = change(x.float())
    return (y if weight is None else y * weight).to(x.dtype)


def _gradient(dy: Tensor, x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> tuple[Tensor, ...]:
    dx, dw = _backward_reference(dy, x, weight, eps)
    return (dx,) if weight is None else (dx, dw)


def _no_projection(dy: Tensor, x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> tuple[Tensor, ...]:
    g = dy if weight is None else dy * weight
    _, *rest = _gradient(dy, x, weight, eps)
    return (_wide(x, None, lambda v: g * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)), *rest)


def _last_row_left_out(dy: Tensor, x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> tuple[Tensor, ...]:
    dx, *rest = _gradient(dy, x, weight, eps)
    return (dx, *_gradient(dy[:-1], x[:-1], weight, eps)[1:]) if rest else (torch.zeros_like(dx),)


WIDTHS = (256, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)

rms_norm = Operator(
    name="rms_norm",
    axes={"M": "rows", "N": "columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options={"layout": LAYOUTS, "values": VALUES, "weight": (True, False), "weight_layout": LAYOUTS},
    differentiable=("x", "weight"),
    tolerance={
        "forward": Tolerance(scale="element", ulps=2.0),
        "backward": Tolerance(scale=_gradient_terms, terms=lambda w: 32),
    },
    workloads={
        "verify": [
            *(workload(M=m, N=n) for m, n in ((1, 1), (3, 5), (2, 256), (37, 100), (5, 1000), (1, 4097))),
            workload(M=0, N=7),
            workload(M=7, N=0),
            *(workload(M=9, N=33, layout=at) for at in ("unaligned", "sliced", "strided", "transposed", "expanded")),
            workload(M=9, N=40, weight=False),
            workload(M=9, N=8192, weight=False),
            workload(M=9, N=40, weight_layout="strided"),
            workload(M=6, N=64, values="tiny"),
            workload(M=40, N=50, values="nonfinite"),
            workload(M=3, N=2048),
            workload(M=9, N=8264, values="nonfinite"),
            workload(M=3, N=8200),
            workload(M=2, N=33000),
        ],
        "full": [workload(M=70, N=n) for n in (2**14, 2**15 + 1, 2**16 + 8, 2**17)],
        "huge": [workload("bf16", M=2**14 + 1, N=2**17), workload("bf16", M=2**23 + 3, N=257)],
        "bench": [workload(M=2**28 // n, N=n) for n in WIDTHS],
        "quick": [workload(M=2**22 // n, N=n) for n in (1024, 4096)],
        "cpu": [workload("fp32", M=2**13, N=2**12)],  # 128 MiB a tensor: larger than caches
        "compile": [workload(M=64, N=n) for n in (100, 4096, 2**16)],
        "tune": [
            workload(d, M=2**28 // n, N=n)
            for d in ("fp32", "bf16")
            for n in (64, 128, 256, 512, 1024, 2048, *WIDTHS[2:])
        ],
        "model": [workload("bf16", M=8192, N=n) for n in (4096, 5120, 8192)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant(
            "mean over padding",
            lambda x, weight=None, eps=EPS: _wide(
                x, weight, lambda v: v * torch.rsqrt(v.square().sum(-1, keepdim=True) / (v.shape[-1] + 1) + eps)
            ),
        ),
        Mutant("weight left out", lambda x, weight=None, eps=EPS: reference(x, None, eps)),
        Mutant(
            "layer norm",
            lambda x, weight=None, eps=EPS: reference(x - x.mean(-1, keepdim=True), weight, eps),
        ),
        *mutants.usual(_gradient, "backward"),
        Mutant("projection left out", _no_projection, "backward"),
        Mutant("last row left out of dw", _last_row_left_out, "backward"),
    ],
)

rms_norm.implementation("triton", arch=">=sm_80")(rms_norm_triton)
rms_norm.implementation("cuda", arch=">=sm_90", devices=("cuda",))(rms_norm_cuda)
rms_norm.implementation("cuda-stream", backend="cuda", arch=">=sm_90", devices=("cuda",), directions=("backward",))(
    rms_norm_cuda_stream
)
rms_norm.implementation("torch")(torch_rms_norm)
rms_norm.implementation("torch.compile", devices=("cuda",))(peers.Compiled(torch_rms_norm))
rms_norm.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)
rms_norm.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)
rms_norm.implementation("numpy", devices=("cpu",), directions=("forward",), dtypes=("fp32",))(numpy)

# ---- what users call -------------------------------------------------------------------------------------------------


@rms_norm.choice
@guarded
def choose(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Choice:
    return norm.choose(x, None, weight, None, eps)


@rms_norm.function
def rms_norm_function(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    """Root-mean-square normalisation over the last dimension: ``x / sqrt(mean(x²) + eps) * weight``.

    Args:
        x: [..., N]; float32, float16 or bfloat16.
        weight: [N], of x's dtype or float32; None for none.
        eps: added to the mean square.

    Returns:
        A tensor of x's shape and dtype, computed in fp32 and rounded once.

    Raises:
        TypeError: not tensors of those dtypes.
        ValueError: a weight of another length or device, a scalar x, a negative eps.

    Backward saves x and the weight; the weight's gradient is summed in fp32 in a fixed order, so it is deterministic.
    Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
    """
    y: Tensor = norm(x, None, weight, None, eps)
    return y
