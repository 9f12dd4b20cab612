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
from weft.operators import mutants, peers, row_cluster
from weft.operators.call import FLOATS, Choice, check_device, check_tensor, eager, on_gpu, rows_of
from weft.operators.cuda import pointer_aligned
from weft.operators.launch import Plans, target_sm
from weft.operators.normalization import cluster
from weft.operators.normalization.kernels import backward_plans, forward_plans
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

CLUSTER_FROM = 16384  # columns from which the cluster kernel is the faster one on sm_90 (README.md)
EPS = 1e-6


def reference(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


# ---- PyTorch operators -----------------------------------------------------------------------------------------------


def _weight_or(x: Tensor, weight: Tensor | None) -> Tensor:
    """The kernel's weight argument: contiguous, or x itself (never read) without one."""
    if weight is None:
        return x
    return weight if weight.stride(-1) == 1 or weight.numel() < 2 else torch.empty_like(weight).copy_(weight)


@torch.library.triton_op("weft::rms_norm", mutates_args=())
def rms_norm_op(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if not on_gpu(x):
        return reference(x, weight, eps)
    y = torch.empty_like(x)
    if y.numel():
        w = _weight_or(x, weight)
        forward_plans.of((x, w), eps, weight is not None)(x, w, y)
    return y


@torch.library.custom_op("weft::rms_norm_cluster", mutates_args=())
def cluster_op(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = torch.empty_like(x)
    if y.numel():
        w = _weight_or(x, weight)
        # the choice may have been made while tracing, when alignment was not known
        plans = forward_plans if row_cluster.why_not(x) or not pointer_aligned(w) else cluster.plans
        plans.of((x, w), eps, weight is not None)(x, w, y)
    return y


@cluster_op.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.triton_op("weft::rms_norm_backward", mutates_args=())
def backward_op(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(dx, dweight); dweight is empty without a weight."""
    if not on_gpu(x):
        return _backward_reference(dy, x, weight, eps)
    dx = torch.empty_like(x)
    dw = torch.empty(0, device=x.device, dtype=x.dtype) if weight is None else torch.empty_like(weight)
    if dx.numel() == 0:
        return dx, dw.zero_()
    w = _weight_or(x, weight)
    if rows_of(dy) is None:
        dy = torch.empty_like(x).copy_(dy)  # a gradient of any strides (expanded, say) may come from autograd
    backward_plans.of((x, dy, w), eps, weight is not None)(x, dy, w, dx, dw)
    return dx, dw


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
cluster_op.register_autograd(_backward, setup_context=_save)

# ---- implementations -------------------------------------------------------------------------------------------------


def rms_norm_triton(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    if weight is not None and eager(x, weight) and x.numel() and weight.is_contiguous():
        y = torch.empty_like(x)
        forward_plans.of((x, weight), eps, True)(x, weight, y)
        return y
    return torch.ops.weft.rms_norm(x, weight, eps)


def rms_norm_cluster(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    if weight is not None and eager(x, weight) and x.numel() and weight.is_contiguous():
        y = torch.empty_like(x)
        cluster.plans.of((x, weight), eps, True)(x, weight, y)
        return y
    return torch.ops.weft.rms_norm_cluster(x, weight, eps)


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


WIDTHS = (256, 1024, 4096, 8192, 16384, 32768, 65536, 131072)

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
rms_norm.implementation("cuda", arch=">=sm_90", devices=("cuda",), directions=("forward",))(rms_norm_cluster)
rms_norm.implementation("torch")(torch_rms_norm)
rms_norm.implementation("torch.compile", devices=("cuda",))(peers.Compiled(torch_rms_norm))
rms_norm.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)
rms_norm.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)
rms_norm.implementation("numpy", devices=("cpu",), directions=("forward",), dtypes=("fp32",))(numpy)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(x: Tensor, weight: Tensor | None, eps: float) -> None:
    check_tensor("rms_norm", "x", x)
    if x.ndim == 0:
        raise ValueError("rms_norm: argument 'x' is a scalar; expected at least one dimension")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= 3e38:
        raise ValueError(f"rms_norm: argument 'eps' is {eps!r}; expected a number of at least 0 that fp32 can hold")
    if weight is None:
        return
    check_tensor("rms_norm", "weight", weight, tuple(dict.fromkeys((x.dtype, *FLOATS[:1]))))
    check_device("rms_norm", "weight", weight, "x", x)
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: argument 'weight' has shape {tuple(weight.shape)}; expected {tuple(x.shape[-1:])}, "
            f"the last dimension of 'x' {tuple(x.shape)}"
        )


@rms_norm.choice
def choose(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Choice:
    check(x, weight, eps)
    if not on_gpu(x):
        return Choice("torch", "the tensor is on the CPU, where weft runs the reference")
    if x.numel() == 0:
        return Choice("torch", "empty: nothing to launch")
    if rows_of(x) is None:
        return Choice("torch", "the leading dimensions do not collapse into rows of one stride: a copy would be needed")
    n = x.shape[-1]
    aligned = not row_cluster.why_not(x) and (weight is None or pointer_aligned(weight))
    if n >= CLUSTER_FROM and target_sm(x.device) >= 90 and aligned:
        return Choice("cuda", f"{n} columns: a cluster of blocks holds a row, which is read once", cluster.plans)
    return Choice("triton", f"{n} columns: " + ("held in registers" if n <= 32768 else "read twice"), forward_plans)


def _public_plan(x: Tensor, weight: Tensor, eps: float) -> Any:
    plans = choose(x, weight, eps).plans
    return None if plans is None or not weight.is_contiguous() else plans.of((x, weight), eps, True)


public_plans = Plans(_public_plan)


class _Eager(torch.autograd.Function):
    """The plan with a gradient, in plain eager mode: the autograd of a custom operator alone costs 40 us on the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x)
        public_plans.of((x, weight), eps)(x, weight, y)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *torch.ops.weft.rms_norm_backward(dy, x, weight, ctx.eps), None


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
    if weight is not None and eager(x, weight) and (plan := public_plans.of((x, weight), eps)) is not None:
        y = torch.empty_like(x)
        plan(x, weight, y)
        return y
    chosen = choose(x, weight, eps).implementation
    if chosen == "torch":
        return reference(x, weight, eps)
    if weight is not None and weight.is_contiguous() and eager(x, weight, gradient=True):
        return _Eager.apply(x, weight, eps)
    return (torch.ops.weft.rms_norm if chosen == "triton" else torch.ops.weft.rms_norm_cluster)(x, weight, eps)
