"""``softmax(x, dim=-1)``: exp(x - max) / sum along one dimension, forward and backward.

Forward compulsorily reads x and writes y; backward reads y and dy and writes dx. Arithmetic is one exponential and about
four operations an element, so memory bandwidth is the limit (theory and measurements: README.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers, row_cluster
from weft.operators.call import Choice, check_dim, check_tensor, differentiable, eager, guarded, on_gpu, rows_of
from weft.operators.launch import Plans, compile_request, target_sm
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor
from weft.operators.softmax import cluster, cluster_backward
from weft.operators.softmax.gradient import autograd_function, gradient
from weft.operators.softmax.kernels import backward_plans, forward_plans

CLUSTER_FROM = 16384  # columns from which the cluster kernel is the faster one on sm_90 (README.md)

# ---- PyTorch operators -----------------------------------------------------------------------------------------------


@torch.library.triton_op("weft::softmax", mutates_args=())
def softmax_op(x: Tensor, dim: int) -> Tensor:
    if not on_gpu(x):
        return torch.softmax(x, dim)
    y = torch.empty_like(x)
    if y.numel():
        forward_plans.of((x,), dim)(x, y)
    return y


@torch.library.custom_op("weft::softmax_cluster", mutates_args=())
def cluster_op(x: Tensor, dim: int) -> Tensor:
    y = torch.empty_like(x)
    if y.numel():
        # the choice may have been made while tracing, when alignment was not known
        plans = forward_plans if row_cluster.why_not(x.movedim(dim, -1)) else cluster.plans
        plans.of((x,), dim)(x, y)
    return y


@cluster_op.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.triton_op("weft::softmax_backward", mutates_args=())
def backward_op(y: Tensor, dy: Tensor, dim: int) -> Tensor:
    """dx from the forward's result and the gradient of it."""
    if not on_gpu(y):
        return torch.ops.aten._softmax_backward_data(dy, y, dim, y.dtype)
    return gradient(backward_plans, y, dy, dim)


cluster_or_triton = cluster_backward.plans_or(backward_plans, logs=False)


@torch.library.custom_op("weft::softmax_cluster_backward", mutates_args=())
def cluster_backward_op(y: Tensor, dy: Tensor, dim: int) -> Tensor:
    return gradient(cluster_or_triton, y, dy, dim)


@cluster_backward_op.register_fake
def _(y: Tensor, dy: Tensor, dim: int) -> Tensor:
    return torch.empty_like(y)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dim = inputs[1]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    return torch.ops.weft.softmax_backward(y, dy, ctx.dim), None


def _backward_by_cluster(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    return torch.ops.weft.softmax_cluster_backward(y, dy, ctx.dim), None


def _save_backward(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.dim = inputs[2]


def _twice_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    """Of dx = y * (dy - sum(y * dy)): the gradients of y and dy, in PyTorch."""
    y, dy = ctx.saved_tensors
    inner = (y * dy).sum(ctx.dim, keepdim=True)
    weighted = (g * y).sum(ctx.dim, keepdim=True)
    return g * (dy - inner) - weighted * dy, y * (g - weighted), None


softmax_op.register_autograd(_backward, setup_context=_save)
cluster_op.register_autograd(_backward_by_cluster, setup_context=_save)
for _op in (backward_op, cluster_backward_op):
    _op.register_autograd(_twice_backward, setup_context=_save_backward)

# ---- implementations -------------------------------------------------------------------------------------------------


def reference(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x, dim)


def softmax_triton(x: Tensor, dim: int = -1) -> Tensor:
    if eager(x) and x.numel():
        y = torch.empty_like(x)
        forward_plans.of((x,), dim)(x, y)
        return y
    return torch.ops.weft.softmax(x, dim)


_ByCluster = autograd_function(cluster.plans, cluster_backward.plans(logs=False), cluster_backward_op)


def softmax_cluster(x: Tensor, dim: int = -1) -> Tensor:
    if x.numel() and (reason := row_cluster.why_not(x.movedim(dim, -1))):
        raise Declined(reason)
    if eager(x, gradient=True) or compile_request():
        y: Tensor = differentiable(_ByCluster, x, dim)
        return y
    return torch.ops.weft.softmax_cluster(x, dim)


def liger(x: Tensor, dim: int = -1) -> Tensor:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    if dim % x.ndim != x.ndim - 1:
        raise Declined("Liger's softmax takes the last dimension")
    return LigerSoftmaxFunction.apply(x)


def quack(x: Tensor, dim: int = -1) -> Tensor:
    from quack.softmax import softmax as quack_softmax

    if x.ndim != 2 or dim % 2 != 1:
        raise Declined("QuACK's softmax takes the last dimension of a matrix")
    return quack_softmax(x)


def numpy(x: Tensor, dim: int = -1) -> Tensor:
    import numpy as np

    a = x.numpy()
    e = np.exp(a - a.max(axis=dim, keepdims=True))
    return torch.from_numpy(e / e.sum(axis=dim, keepdims=True))


# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [M, N], or [M, N, K] with the option K and dim=1."""
    shape = (w["M"], w["N"], w.option("inner")) if w.option("inner") else (w["M"], w["N"])
    layout, values = w.option("layout", "contiguous"), w.option("values", "normal")
    check_dim("softmax", w.option("dim", -1), len(shape))
    return {"x": random_tensor(g, shape, w.dtype, device, layout=layout, values=values), "dim": w.option("dim", -1)}


def cost(w: Workload, direction: str) -> Cost:
    n = w["M"] * w["N"] * w.option("inner", 1)
    size = n * w.bytes_per_element
    if direction == "forward":
        return Cost(reads=size, writes=size, vector_flops=4 * n, special_ops=n)
    return Cost(reads=2 * size, writes=size, vector_flops=4 * n)


def _wrong(change: Any) -> Any:
    return lambda x, dim=-1: change(x.float(), dim).to(x.dtype)


def _unstable(x: Tensor, dim: int) -> Tensor:
    return x.exp() / x.exp().sum(dim, keepdim=True)


def _padded(x: Tensor, dim: int) -> Tensor:
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / (e.sum(dim, keepdim=True) + 1e-3)


def _gradient(dy: Tensor, x: Tensor, dim: int = -1) -> tuple[Tensor, ...]:
    y = torch.softmax(x, dim)
    return (y * (dy - (dy * y).sum(dim, keepdim=True)),)


def _half_summed(dy: Tensor, x: Tensor, dim: int = -1) -> tuple[Tensor, ...]:
    """A block that hears nothing of the other."""
    y = torch.softmax(x, dim)
    return (y * (dy - (dy * y).chunk(2, dim)[0].sum(dim, keepdim=True)),)


WIDTHS = (256, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)

softmax = Operator(
    name="softmax",
    axes={"M": "rows", "N": "columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options={"layout": LAYOUTS, "values": VALUES, "dim": range(-2, 3), "inner": range(1, 2**31)},
    differentiable=("x",),
    tolerance={"forward": Tolerance(scale="element"), "backward": Tolerance(scale="row", terms=lambda w: 32)},
    workloads={
        "verify": [
            *(workload(M=m, N=n) for m, n in ((1, 1), (3, 5), (2, 256), (37, 100), (5, 1000), (1, 4097))),
            workload(M=0, N=7),
            workload(M=7, N=0),
            *(workload(M=9, N=33, layout=at) for at in ("unaligned", "sliced", "strided", "transposed", "expanded")),
            workload(M=6, N=64, values="large"),
            workload(M=40, N=50, values="nonfinite"),
            workload(M=3, N=2048),
            workload(M=40, N=2056, values="nonfinite"),
            workload(M=6, N=50, values="minus_inf_rows"),
            workload(M=6, N=2048, values="minus_inf_rows"),
            workload(M=6, N=2048, values="large"),
            workload(M=4, N=33, inner=5, dim=1),
            workload(M=4, N=33, dim=0),
            workload(M=2, N=33000),
        ],
        "full": [workload(M=2, N=n) for n in (2**15, 2**15 + 1, 2**16 + 8, 2**17, 2**18)],
        "huge": [workload("bf16", M=2**14 + 1, N=2**17), workload("bf16", M=2**23 + 3, N=257)],
        "bench": [workload(M=2**28 // n, N=n) for n in WIDTHS],
        "quick": [workload(M=2**22 // n, N=n) for n in (1024, 4096)],
        "ladder": [workload(M=2**28 // 4096, N=4096)],
        "cpu": [workload("fp32", M=2**13, N=2**12)],  # 128 MiB a tensor: larger than caches
        "compile": [workload(M=64, N=n) for n in (100, 4096, 2**16)],
        "tune": [
            workload(d, M=2**28 // n, N=n)
            for d in ("fp32", "bf16")
            for n in (64, 128, 256, 512, 1024, 2048, *WIDTHS[2:])
        ],
        "model": [workload("bf16", M=32 * 2048, N=2048), workload("bf16", M=4096, N=128256)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("no maximum subtracted", _wrong(_unstable)),
        Mutant("padding counted", _wrong(_padded)),
        Mutant("wrong dimension", lambda x, dim=-1: torch.softmax(x, dim - 1 if x.ndim > 1 else dim)),
        *mutants.usual(_gradient, "backward"),
        Mutant("sum left out", lambda dy, x, dim=-1: (torch.softmax(x, dim) * dy,), "backward"),
        Mutant("sum of half a row", _half_summed, "backward"),
    ],
)

softmax.implementation("triton", arch=">=sm_80")(softmax_triton)
softmax.implementation("cuda", arch=">=sm_90", devices=("cuda",))(softmax_cluster)
softmax.implementation("torch")(reference)
softmax.implementation("torch.compile", devices=("cuda",))(peers.Compiled(reference))
softmax.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)
softmax.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)
softmax.implementation("numpy", devices=("cpu",), directions=("forward",), dtypes=("fp32",))(numpy)

# ---- what users call -------------------------------------------------------------------------------------------------


@softmax.choice
@guarded
def choose(x: Tensor, dim: int = -1) -> Choice:
    check_tensor("softmax", "x", x)
    front = check_dim("softmax", dim, x.ndim)
    along = x.movedim(front, -1) if x.ndim else x
    if not on_gpu(x):
        return Choice("torch", "the tensor is on the CPU, where weft runs the reference")
    if x.ndim == 0 or x.numel() == 0:
        return Choice("torch", "empty or a scalar: nothing to launch")
    if rows_of(along) is None:
        return Choice("torch", "the leading dimensions do not collapse into rows of one stride: a copy would be needed")
    n = along.shape[-1]
    if along.stride(-1) != 1 and n > 1:
        return Choice(
            "torch", f"stride {along.stride(-1)} along 'dim': PyTorch's kernel for inner dimensions is faster"
        )
    if n >= CLUSTER_FROM and target_sm(x.device) >= 90 and not row_cluster.why_not(along):
        reason = f"{n} columns: a cluster of blocks holds a row, which is read once"
        return Choice("cuda", reason + cluster_backward.too(along), cluster.plans)
    return Choice("triton", f"{n} columns: " + ("held in registers" if n <= 32768 else "read twice"), forward_plans)


public_plans = Plans(lambda x, dim: choose(x, dim).plan_for(x, dim))


_Eager = autograd_function(
    public_plans,
    cluster_backward.plans_or(backward_plans, logs=False, least=cluster_backward.FROM),
    backward_op,
)


@softmax.function
def softmax_function(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax along one dimension.

    Args:
        x: any shape; float32, float16 or bfloat16.
        dim: the dimension that sums to 1.

    Returns:
        A tensor of x's shape and dtype. Sums are taken in fp32. A row that holds NaN or +inf, or only -inf, is NaN.
        Under autocast the input is cast to float32, as ``torch.softmax`` does.

    Raises:
        TypeError: x is not a tensor of those dtypes, or dim not an int.
        ValueError: dim is out of range.

    Backward saves the result only. Source: online softmax, Milakov & Gimelshein 2018 (arXiv 1805.02867).
    """
    if eager(x) and (plan := public_plans.of((x,), dim)) is not None:
        y = torch.empty_like(x)
        plan(x, y)
        return y
    chosen = choose(x, dim).implementation
    if chosen == "torch":
        return torch.softmax(x, dim)
    if eager(x, gradient=True):
        return _Eager.apply(x, dim)
    if torch.is_autocast_enabled("cuda"):
        x = x.float()
    return torch.ops.weft.softmax(x, dim) if chosen == "triton" else torch.ops.weft.softmax_cluster(x, dim)
