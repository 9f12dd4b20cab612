"""The calls of this family around their tables of kernels: autograd functions, and operators of ``torch.library``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Tolerance
from weft.operators.call import (
    Choice,
    KernelFunction,
    differentiable,
    eager,
    on_gpu,
    readable,
    reference_gradients,
    rows_of,
    traced,
)
from weft.operators.launch import Plans
from weft.operators.softmax.dispatch import BACKWARD, CAUSAL, FORWARD, MASKED_BACKWARD, MASKED_FORWARD

# ---- softmax and log_softmax -------------------------------------------------------------------------------------------


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


def second_gradients(y: Tensor, dy: Tensor, g: Tensor, dim: int, logs: bool) -> tuple[Tensor, Tensor]:
    """The gradients of y and dy, in PyTorch, from g, that of dx = y * (dy - sum(y * dy)) or dy - exp(y) * sum(dy)."""
    if logs:
        p = y.exp()
        return -g * p * row_sum(dy, dim), g - row_sum(g * p, dim)
    weighted = row_sum(g * y, dim)
    return g * (dy - row_sum(y * dy, dim)) - weighted * dy, y * (g - weighted)


class RowSoftmax:
    """``softmax``, or ``log_softmax`` with ``logs``: its operators of ``torch.library``, which compilers trace, its autograd
    functions (autograd of such an operator costs 40 us on the host) and its implementations."""

    def __init__(self, logs: bool):
        name, aten = "log_softmax" if logs else "softmax", torch.ops.aten
        reference = torch.log_softmax if logs else torch.softmax
        reference_backward = aten._log_softmax_backward_data if logs else aten._softmax_backward_data
        self.logs, self.reference = logs, reference

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
            plan = FORWARD.of((x,), dim, logs)
            return reference(x, dim) if plan is None else launch_forward(FORWARD, x, dim, logs)

        @torch.library.custom_op(f"weft::{name}_cluster_backward", mutates_args=())
        def by_cluster_backward(y: Tensor, dy: Tensor, dim: int) -> Tensor:
            return launch_backward(BACKWARD, y, dy, dim, logs)

        by_cluster.register_fake(lambda x, dim: torch.empty_like(x))
        by_cluster_backward.register_fake(lambda y, dy, dim: torch.empty_like(y))

        def save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
            ctx.save_for_backward(output)
            ctx.dim = inputs[1]

        def save_backward(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
            ctx.save_for_backward(inputs[0], inputs[1])
            ctx.dim = inputs[2]

        def first(backward: Any, ctx: Any, dy: Tensor) -> tuple[Any, ...]:
            return backward(*ctx.saved_tensors, dy, ctx.dim), None

        def second(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            y, dy = ctx.saved_tensors
            return *second_gradients(y, dy, g, ctx.dim, logs), None

        for forward, backward in ((by_triton, by_triton_backward), (by_cluster, by_cluster_backward)):
            forward.register_autograd(functools.partial(first, backward), setup_context=save)
            backward.register_autograd(second, setup_context=save_backward)

        kernels = {"triton": name, "cuda": f"{name}_cluster"}
        self.registered = {kernel: getattr(torch.ops.weft, of).default for kernel, of in kernels.items()}
        self.autograd = autograd_function(FORWARD, BACKWARD, by_triton_backward)
        self.by_kernel = {
            kernel: autograd_function(FORWARD.kernel(kernel), BACKWARD.kernel(kernel), by_triton_backward)
            for kernel in kernels
        }

    def implementation(self, kernel: str) -> Callable[..., Tensor]:
        def implementation(x: Tensor, dim: int = -1) -> Tensor:
            if traced(x) or not on_gpu(x):
                return self.registered[kernel](x, dim)
            return differentiable(self.by_kernel[kernel], x, dim, self.logs)

        return implementation

    def choose(self, x: Tensor, dim: int, direction: str) -> Choice:
        """The backward is PyTorch's where the forward is."""
        chosen = FORWARD.choose(x, dim, self.logs)
        if direction == "forward" or chosen.implementation == "torch":
            return chosen
        y = torch.empty_like(x)
        return BACKWARD.choose(y, y, dim, self.logs)

    def __call__(self, x: Tensor, dim: int, choose: Callable[..., Choice]) -> Tensor:
        """A call that is not plain eager mode without a gradient."""
        if eager(x, gradient=True) and FORWARD.of((x,), dim, self.logs) is not None:
            return self.autograd.apply(x, dim, self.logs)
        chosen = choose(x, dim).implementation
        if chosen == "torch":
            return self.reference(x, dim)
        if torch.is_autocast_enabled("cuda"):
            x = x.float()
        return self.registered[chosen](x, dim)


def autograd_function(forward_plans: Plans, backward_plans: Plans, registered: Any) -> type[KernelFunction]:
    """``registered`` is the backward as an operator of ``torch.library``, for a second gradient and for compilers."""

    class Function(KernelFunction):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int, logs: bool) -> Tensor:
            y = launch_forward(forward_plans, x, dim, logs)
            ctx.save_for_backward(y)
            ctx.options = dim, logs
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
            (y,) = ctx.saved_tensors
            if torch.is_grad_enabled() or traced(y, dy):
                return registered(y, dy, ctx.options[0]), None, None
            return launch_backward(backward_plans, y, dy, *ctx.options), None, None

    return Function


# ---- causal_softmax and masked_softmax ---------------------------------------------------------------------------------

PUBLIC = MASKED_FORWARD, MASKED_BACKWARD
BY_KERNEL = {kernel: (MASKED_FORWARD.kernel(kernel), MASKED_BACKWARD.kernel(kernel)) for kernel in ("triton", "cuda")}


def as_bytes(mask: Tensor) -> Tensor:
    """A boolean mask as kernels read it: a byte an element."""
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
        seen = (each != 0).sum(-1, keepdim=True).clamp(min=1)
        return [(each.square().sum(-1, keepdim=True) / seen).sqrt()]

    return {"forward": Tolerance(scale="element", ulps=2.0), "backward": Tolerance(scale=terms, terms=lambda w: 32)}
