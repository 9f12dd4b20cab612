"""``softmax(x, dim=-1)``: exp(x - max) / sum along one dimension, forward and backward; with what ``log_softmax`` shares.

Forward reads x and writes y; backward reads y and dy and writes dx. Arithmetic is one exponential and about four operations
an element, so memory bandwidth is the limit.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable
from weft.operators.call import Choice, eager, guarded, on_gpu, traced, widened
from weft.operators.checks import check_dim, check_dtype, check_tensor
from weft.operators.launch import Plans
from weft.operators.layout import rows_of
from weft.operators.random_inputs import LAYOUTS, VALUES, drawn
from weft.operators.softmax.dispatch import BACKWARD, FORWARD

# ---- calls of softmax and log_softmax around the tables of kernels -----------------------------------------------------


def launch_forward(plans: Plans, x: Tensor, dim: int, logs: bool) -> Tensor:
    y = torch.empty_like(x)
    if y.numel():
        plans.of((x,), dim, logs)(x, y)
    return y


def launch_backward(plans: Plans, y: Tensor, dy: Tensor, dim: int, logs: bool) -> Tensor:
    """dx from the result y and its gradient."""
    dx = torch.empty_like(y)
    if dx.numel():
        if rows_of(dy.movedim(dim, -1)) is None:
            dy = torch.empty_like(y).copy_(dy)  # autograd may pass a gradient of any strides (expanded, say)
        plans.of((y, dy), dim, logs)(y, dy, dx)
    return dx


def row_sum(t: Tensor, dim: int) -> Tensor:
    return t.sum(dim, keepdim=True)


class SoftmaxFunction(KernelFunction):
    """Under autograd, by ``plans`` of forward and backward; ``backward_op`` is the backward as an operator of
    ``torch.library``, for a second gradient and for compilers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, logs: bool, plans: tuple[Plans, Plans], backward_op: Any) -> Tensor:
        y = launch_forward(plans[0], x, dim, logs)
        ctx.save_for_backward(y)
        ctx.options = dim, logs
        ctx.plans, ctx.backward_op = plans[1], backward_op
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled() or traced(y, dy):
            return ctx.backward_op(y, dy, ctx.options[0]), *[None] * 4
        return launch_backward(ctx.plans, y, dy, *ctx.options), *[None] * 4


class RowSoftmax:
    """``softmax``, or ``log_softmax`` with ``logs``: its operators of ``torch.library``, which compilers trace, and its calls
    (autograd of such an operator costs 40 us on the host, :class:`SoftmaxFunction` less)."""

    def __init__(self, logs: bool):
        name, aten = "log_softmax" if logs else "softmax", torch.ops.aten
        reference = torch.log_softmax if logs else torch.softmax
        reference_backward = aten._log_softmax_backward_data if logs else aten._softmax_backward_data
        self.name, self.logs, self.reference = name, logs, reference

        @torch.library.triton_op(f"weft::{name}", mutates_args=())
        def by_triton(x: Tensor, dim: int) -> Tensor:
            # a compiler that traces may pass a symbolic integer
            return launch_forward(FORWARD.kernel("triton"), x, int(dim), logs) if on_gpu(x) else reference(x, dim)

        @torch.library.triton_op(f"weft::{name}_backward", mutates_args=())
        def by_triton_backward(y: Tensor, dy: Tensor, dim: int) -> Tensor:
            if not on_gpu(y):
                return reference_backward(dy, y, dim, y.dtype)
            return launch_backward(BACKWARD.kernel("triton"), y, dy, dim, logs)

        # Chosen while tracing, when alignment is not known: what runs is what the table says of the tensors at hand.
        @torch.library.custom_op(f"weft::{name}_cluster", mutates_args=())
        def by_cluster(x: Tensor, dim: int) -> Tensor:
            return reference(x, dim) if FORWARD.of((x,), dim, logs) is None else launch_forward(FORWARD, x, dim, logs)

        @torch.library.custom_op(f"weft::{name}_cluster_backward", mutates_args=())
        def by_cluster_backward(y: Tensor, dy: Tensor, dim: int) -> Tensor:
            return launch_backward(BACKWARD, y, dy, dim, logs)

        by_cluster.register_fake(lambda x, dim: torch.empty_like(x))
        by_cluster_backward.register_fake(lambda y, dy, dim: torch.empty_like(y))

        def save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
            ctx.save_for_backward(output)
            ctx.dim = inputs[1]

        def save_backward(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
            *tensors, ctx.dim = inputs
            ctx.save_for_backward(*tensors)

        def first(backward: Any, ctx: Any, dy: Tensor) -> tuple[Any, ...]:
            return backward(*ctx.saved_tensors, dy, ctx.dim), None

        def second(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            """The gradients of y and dy, in PyTorch, from g, that of dx = y * (dy - sum(y * dy)) or dy - exp(y) * sum(dy)."""
            (y, dy), dim = ctx.saved_tensors, ctx.dim
            if logs:
                p = y.exp()
                return -g * p * row_sum(dy, dim), g - row_sum(g * p, dim), None
            weighted = row_sum(g * y, dim)
            return g * (dy - row_sum(y * dy, dim)) - weighted * dy, y * (g - weighted), None

        for forward, backward in ((by_triton, by_triton_backward), (by_cluster, by_cluster_backward)):
            forward.register_autograd(functools.partial(first, backward), setup_context=save)
            backward.register_autograd(second, setup_context=save_backward)

        of = {"triton": name, "cuda": f"{name}_cluster"}
        self.registered = {kernel: getattr(torch.ops.weft, of[kernel]).default for kernel in of}
        self.backward_op = by_triton_backward
        self.choose = guarded(self.by_tables)

    def register(self, operator: Operator) -> None:
        """The implementations of ours and PyTorch's, and the choice."""
        operator.implementation("triton", arch=">=sm_80")(functools.partial(self.by_kernel, "triton"))
        operator.implementation("cuda", arch=">=sm_90")(functools.partial(self.by_kernel, "cuda"))
        peers.register(operator, operator.reference)
        operator.choice(self.choose)

    def by_kernel(self, kernel: str, x: Tensor, dim: int = -1) -> Tensor:
        if traced(x) or not on_gpu(x):
            return self.registered[kernel](x, dim)
        plans = (FORWARD.kernel(kernel), BACKWARD.kernel(kernel))
        return differentiable(SoftmaxFunction, x, dim, self.logs, plans, self.backward_op)

    def by_tables(
        self, x: Tensor, dim: int = -1, direction: str = "forward", dtype: torch.dtype | None = None
    ) -> Choice:
        """The backward is PyTorch's where the forward is."""
        x = x if dtype is None else self.cast(x, dtype)
        chosen = FORWARD.choose(x, dim, self.logs, direction == "backward")
        if direction == "forward" or chosen.implementation == "torch":
            return chosen
        y = torch.empty_like(x)
        return BACKWARD.choose(y, y, dim, self.logs)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        check_tensor(self.name, "x", x)
        check_dtype(self.name, dtype)
        return x.to(dtype)

    def __call__(self, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """A call that is not plain eager mode without a gradient."""
        if dtype is not None:
            with torch.autocast("cuda", enabled=False):  # which would take fp32
                return self(self.cast(x, dtype), dim)
        wanted = torch.is_grad_enabled() and getattr(x, "requires_grad", False)
        if eager(x, gradient=True) and FORWARD.of((x,), dim, self.logs, wanted) is not None:
            return SoftmaxFunction.apply(x, dim, self.logs, (FORWARD, BACKWARD), self.backward_op)
        chosen = self.choose(x, dim).implementation
        if chosen == "torch" or FORWARD.choose(x, dim, self.logs, wanted).implementation == "torch":
            return self.reference(x, dim)
        return self.registered[chosen](*widened(x), dim)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [M, N], or [M, N, K] with the option K and dim=1."""
    shape = (w["M"], w["N"], w.option("inner")) if w.option("inner") else (w["M"], w["N"])
    check_dim("softmax", w.option("dim", -1), len(shape))
    return {"x": drawn(w, g, device, *shape), "dim": w.option("dim", -1)}


def cost(w: Workload, direction: str, logs: bool) -> Cost:
    n = w["M"] * w["N"] * w.option("inner", 1)
    size = n * w.bytes_per_element
    if direction == "forward":
        return Cost(reads=size, writes=size, vector_flops=4 * n, special_ops=n)
    return Cost(reads=2 * size, writes=size, vector_flops=(3 if logs else 4) * n, special_ops=n if logs else 0)


def normalised(x: Tensor, dim: int, logs: bool, padding: float = 0.0) -> Tensor:
    """The definition without the maximum, the sum off by ``padding``."""
    total = x.exp().sum(dim, keepdim=True) + padding
    return x - total.log() if logs else x.exp() / total


def gradient(logs: bool, total: Callable[[Tensor, int], Any] = row_sum) -> Callable[..., tuple[Tensor, ...]]:
    """dx by its formula; ``total`` is the sum over a row, or a wrong one."""

    def dx(dy: Tensor, x: Tensor, dim: int = -1) -> tuple[Tensor, ...]:
        y = torch.softmax(x, dim)
        return (dy - y * total(dy, dim) if logs else y * (dy - total(dy * y, dim)),)

    return dx


points = functools.partial(workloads, "MN")
WIDTHS = (256, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


def definition(
    name: str, reference: Any, tolerance: dict[str, Tolerance], wrong: list[Mutant], sets: dict[str, Any], logs: bool
) -> dict[str, Any]:
    """The arguments of ``Operator`` for softmax, or with ``logs`` for log-softmax. ``wrong`` and ``sets`` are the mutants and
    the sets of workloads that only this operator has."""

    def in_fp32(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, dim=-1: change(x.float(), dim).to(x.dtype)

    return {
        "name": name,
        "axes": {"M": "rows", "N": "columns"},
        "inputs": inputs,
        "reference": reference,
        "cost": functools.partial(cost, logs=logs),
        "options": {"layout": LAYOUTS, "values": VALUES, "dim": range(-2, 3), "inner": range(1, 2**31)},
        "differentiable": ("x",),
        "tolerance": tolerance,
        "workloads": {
            "verify": [
                *points((1, 1), (3, 5), (2, 256), (37, 100), (5, 1000), (1, 4097), (0, 7), (7, 0)),
                *(w for layout in LAYOUTS[1:] for w in points((9, 33), layout=layout)),
                *points((6, 64), values="large"),
                *points((40, 50), values="nonfinite"),
                *points((3, 2048)),
                *points((40, 2056), values="nonfinite"),
                *points((6, 50), (6, 2048), values="minus_inf_rows"),
                *points((6, 2048), values="large"),
                *points((4, 33), inner=5, dim=1),
                *points((4, 33), dim=0),
                *points((9, 150), (2, 600), (3, 1101), (1, 5000)),  # rows in two tiles
                *points((2, 33000)),
                *points((9, 8203)),  # rows that begin anywhere
                *points((3, 9001), values="nonfinite"),
            ],
            "full": [workload(M=2, N=n) for n in (2**15, 2**15 + 1, 2**16 + 8, 2**17, 2**18)],
            "huge": [workload("bf16", M=2**14 + 1, N=2**17), workload("bf16", M=2**23 + 3, N=257)],
            "bench": [workload(M=2**28 // n, N=n) for n in WIDTHS],
            "quick": [workload(M=2**22 // n, N=n) for n in (1024, 4096)],
            "compile": [workload(M=64, N=n) for n in (100, 603, 4096, 9001, 2**16)],
            "tune": [
                workload(d, M=2**28 // n, N=n)
                for d in ("fp32", "bf16")
                for n in (64, 128, 256, 512, 1024, 2048, *WIDTHS[2:])
            ],
            **sets,
        },
        "mutants": [
            *mutants.usual(reference),
            Mutant("no maximum subtracted", in_fp32(lambda x, dim: normalised(x, dim, logs))),
            Mutant("padding counted", in_fp32(lambda x, d: normalised(x - x.amax(d, keepdim=True), d, logs, 1e-3))),
            *mutants.usual(gradient(logs), "backward"),
            Mutant("sum left out", gradient(logs, lambda t, dim: 0), "backward"),
            Mutant("sum of half a row", gradient(logs, lambda t, dim: row_sum(t.chunk(2, dim)[0], dim)), "backward"),
            *wrong,
        ],
    }


def reference(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x, dim)


softmax = Operator(
    **definition(
        "softmax",
        reference,
        {"forward": Tolerance(scale="element"), "backward": Tolerance(scale="row", terms=lambda w: 32)},
        [Mutant("wrong dimension", lambda x, dim=-1: torch.softmax(x, dim - 1 if x.ndim > 1 else dim))],
        {
            "ladder": [workload(M=2**28 // 4096, N=4096)],
            "cpu": [workload("fp32", M=2**13, N=2**12)],  # 128 MiB a tensor: larger than caches
            "model": [workload("bf16", M=32 * 2048, N=2048), workload("bf16", M=4096, N=128256)],
        },
        logs=False,
    )
)


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


calls = RowSoftmax(logs=False)
calls.register(softmax)
softmax.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)
softmax.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)
softmax.implementation("numpy", devices=("cpu",), directions=("forward",), dtypes=("fp32",))(numpy)


@softmax.function
def softmax_function(x: Tensor, dim: int = -1, *, dtype: dtype | None = None) -> Tensor:
    """Softmax along one dimension.

    Args:
        x: any shape; float32, float16 or bfloat16.
        dim: the dimension that sums to 1.
        dtype: of the result; x is cast to it first. None for x's.

    Returns:
        A tensor of x's shape and dtype. Sums are taken in fp32. A row that holds NaN or +inf, or only -inf, is NaN.
        Under autocast the input is cast to float32, as ``torch.softmax`` does.

    Raises:
        TypeError: x is not a tensor of those dtypes, dim not an int, or dtype no floating one.
        ValueError: dim is out of range.

    Backward saves the result only. Source: online softmax, Milakov & Gimelshein 2018 (arXiv 1805.02867).
    """
    if dtype is None and eager(x) and (plan := FORWARD.of((x,), dim, False)) is not None:
        y = torch.empty_like(x)
        plan(x, y)
        return y
    return calls(x, dim, dtype)
