"""What the norms share: the autograd functions around their launches, and how a call chooses between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import (
    Choice,
    KernelFunction,
    check_device,
    check_same,
    check_tensor,
    differentiable,
    eager,
    on_gpu,
    readable,
    reference_gradients,
    rows_of,
    traced,
    transformed,
)
from weft.operators.launch import Plans, target_sm
from weft.operators.normalization import backward, cluster, stream
from weft.operators.normalization.kind import Given, Kind
from weft.operators.normalization.plans import backward_plans, forward_plans

CLUSTER_FROM = 16384  # columns from which the cluster kernel is the faster one on sm_90 (README.md)
GRADIENT_CLUSTER_FROM = (
    512  # the same for gradients, but for those that are faster by clusters from their shortest rows on
)
GRADIENT_STREAM_FROM = 2**17 + 1  # columns from which gradients are made by groups of blocks instead (stream.py)
STREAM_BEFORE_TRITON = 2**14  # columns from which groups of blocks are faster than Triton, where clusters hold no row
Statistics = tuple[Tensor, Tensor]  # mean and 1 / deviation of each row, fp32 [M]


def contiguous(weight: Tensor | None) -> Tensor | None:
    """A weight as kernels read it; a strided one is copied: N elements."""
    if weight is None or weight.stride(-1) == 1 or weight.numel() < 2:
        return weight
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device).copy_(weight)


def forward(plans: Plans, given: Given, eps: float, kind: Kind, kept: bool) -> tuple[Tensor, Tensor, Statistics]:
    """(y, h, statistics): h is x where nothing is added, statistics are empty where they are not kept."""
    x = given.x
    y = torch.empty_like(x)
    h = torch.empty_like(x) if kind.added else x
    rows = x.numel() // max(x.shape[-1], 1) if kept else 0
    mean, rstd = torch.empty((2, rows), dtype=torch.float32, device=x.device).unbind(0) if kept else (x, x)
    if y.numel():
        plans.of(given.key(kind), eps, kind, kept)(*given, y, h, mean, rstd)
    return y, h, (mean, rstd)


def gradients(
    plans: Plans,
    x: Tensor,
    dy: Tensor,
    more: Tensor | None,
    weight: Tensor | None,
    kept: Statistics,
    eps: float,
    kind: Kind,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias) of what was normalised; ``more`` is added to dx."""
    dx = torch.empty_like(x)
    sums = 0 if weight is None else 2 if kind.centered else 1
    dweights = torch.empty((sums, x.shape[-1]), dtype=x.dtype if weight is None else weight.dtype, device=x.device)
    if dx.numel() == 0:
        dweights.zero_()
    else:
        dy = readable(dy, x)
        more = None if more is None else readable(more, x)
        call = (x, dy, x if more is None else more, x if weight is None else weight)
        plans.of(call, eps, kind, more is not None)(*call, *kept, dx, dweights)
    dw, db = (*dweights.unbind(0), None, None)[:2]
    return dx, dw, db


def fastest_gradient(*call: Any) -> Any:
    """One pass by clusters or by groups of blocks where the card and the rows allow it, else the Triton kernels."""
    x, *_, kind, added = call
    always = added or (kind.centered and x.dtype != torch.float32)
    in_order: list[tuple[int, Callable[..., Any]]] = [
        (GRADIENT_STREAM_FROM, stream.StreamPlan),
        (backward.SHORTEST if always else GRADIENT_CLUSTER_FROM, backward.BackwardPlan),
        (STREAM_BEFORE_TRITON, stream.StreamPlan),
    ]
    for least, plan in in_order:
        if target_sm(x.device) >= 90 and x.is_cuda and x.shape[-1] >= least:
            with contextlib.suppress(Declined):
                return plan(*call)
    return backward_plans.of(call[:4], *call[4:])


any_gradient = Plans(fastest_gradient)


class Norm:
    """One norm's call.

    Args:
        name: the operator's.
        centered: LayerNorm, else RMSNorm.
        added: whether a residual is added first; the call then returns (y, h).
        reference: ``(x, residual, weight, bias, eps)`` in PyTorch; without a residual it returns y alone.
        registered: the same as an operator of ``torch.library``, for what traces; without one the reference is traced.
    """

    def __init__(
        self,
        name: str,
        centered: bool,
        added: bool,
        reference: Callable[..., Any],
        registered: Callable[..., Any] | None = None,
    ):
        self.name, self.centered, self.added, self.reference = name, centered, added, reference
        self.registered = registered
        self.public_plans = Plans(self._public_plan)
        self.functions = {
            "triton": _autograd(self, forward_plans, backward_plans),
            "cuda": _autograd(self, Plans(self._cluster_or_triton), backward.plans),
            "cuda-stream": _autograd(self, Plans(self._cluster_or_triton), stream.plans),
            "fastest": _autograd(self, Plans(self._fastest_forward), any_gradient),
        }

    def kind(self, weight: Tensor | None, bias: Tensor | None) -> Kind:
        return Kind(self.centered, weight is not None, bias is not None, self.added)

    # ---- which kernel ----

    def _fastest_forward(self, *call: Any) -> Any:
        given, _, kind, _ = Given.of_call(call)
        return cluster.plan(*call) if self._by_cluster(given, kind) else forward_plans.of(call[:-3], *call[-3:])

    def _cluster_or_triton(self, *call: Any) -> Any:
        given, _, kind, _ = Given.of_call(call)
        return forward_plans.of(call[:-3], *call[-3:]) if cluster.why_not(given, kind) else cluster.plan(*call)

    def _by_cluster(self, given: Given, kind: Kind) -> bool:
        long = given.x.shape[-1] >= CLUSTER_FROM
        return long and target_sm(given.x.device) >= 90 and not cluster.why_not(given, kind)

    def choose(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Choice:
        self.check(x, residual, weight, bias, eps)
        given, kind = Given.of(x, residual, weight, bias), self.kind(weight, bias)
        if not on_gpu(x):
            return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
        if transformed() or (traced(*given.key(kind)) and not self.registered):
            return Choice("torch", "traced: PyTorch's own operators, which a compiler fuses with their neighbours")
        if x.numel() == 0:
            return Choice("torch", "an empty tensor: nothing to launch")
        for name, t in (("x", x), ("residual", given.residual)):
            if rows_of(t) is None:
                return Choice("torch", f"the leading dimensions of '{name}' do not collapse into rows of one stride")
        n = x.shape[-1]
        if self._by_cluster(given, kind):
            return Choice("cuda", f"{n} columns: a cluster of blocks holds a row, which is read once", cluster.plans)
        held = "held in registers" if n <= 32768 else "read twice"
        return Choice("triton", f"{n} columns: {held}", forward_plans)

    def check(self, x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> None:
        """Raises TypeError or ValueError, naming the argument."""
        check_tensor(self.name, "x", x)
        if x.ndim == 0:
            raise ValueError(f"{self.name}: argument 'x' is a scalar; expected at least one dimension")
        if self.added:
            check_tensor(self.name, "residual", residual)
            check_same(self.name, "residual", residual, "x", x)
            if residual.shape != x.shape:
                raise ValueError(
                    f"{self.name}: argument 'residual' has shape {tuple(residual.shape)} and 'x' has {tuple(x.shape)}; "
                    "expected the same shape"
                )
        for name, value in (("weight", weight), ("bias", bias)):
            if value is None:
                continue
            check_tensor(self.name, name, value, tuple(dict.fromkeys((x.dtype, torch.float32))))
            check_device(self.name, name, value, "x", x)
            if tuple(value.shape) != (x.shape[-1],):
                raise ValueError(
                    f"{self.name}: argument '{name}' has shape {tuple(value.shape)}; expected ({x.shape[-1]},), the last "
                    f"dimension of 'x' {tuple(x.shape)}"
                )
        if bias is not None and (weight is None or bias.dtype != weight.dtype):
            found = "None" if weight is None else f"of dtype {weight.dtype}"
            raise TypeError(
                f"{self.name}: argument 'weight' is {found}; expected a weight of dtype {bias.dtype}, which 'bias' has"
            )
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= 3e38:
            raise ValueError(
                f"{self.name}: argument 'eps' is {eps!r}; expected a number of at least 0 that fp32 can hold"
            )

    # ---- the call ----

    def run(
        self, which: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Any:
        """The named kernels, whatever :meth:`choose` says (on CPU tensors the reference)."""
        if not on_gpu(x):
            return self.reference(x, residual, weight, bias, eps)
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight, bias))
        if which == "cuda" and not wanted:
            given, kind = Given.of(x, residual, contiguous(weight), contiguous(bias)), self.kind(weight, bias)
            if x.numel() and (reason := cluster.why_not(given, kind)):
                raise Declined(reason)
        return differentiable(self.functions[which], x, residual, weight, bias, eps)

    def _public_plan(self, *call: Any) -> Any:
        given, eps, kind, _ = Given.of_call(call)
        residual = given.residual if kind.added else None
        weight, bias = given.weight if kind.weighted else None, given.bias if kind.biased else None
        chosen = self.choose(given.x, residual, weight, bias, eps)
        if chosen.plans is None or contiguous(weight) is not weight or contiguous(bias) is not bias:
            return None
        return chosen.plans.of(call[:-3], *call[-3:])

    def __call__(self, x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> Any:
        """What the public function does."""
        if eps.__class__ is int and abs(eps) <= 3e38:
            eps = float(eps)  # of more bits than a kernel's scalar may have
        if isinstance(weight, Tensor) and (residual is not None) == self.added:
            given = Given.of(x, residual, weight, bias)
            kind = self.kind(weight, bias)
            key = given.key(kind)
            if all(isinstance(t, Tensor) for t in key) and eager(*key):
                plan = self.public_plans.of(key, eps, kind, False)
                if plan is not None:
                    y = torch.empty_like(x)
                    h = torch.empty_like(x) if self.added else x
                    plan(*given, y, h, x, x)
                    return (y, h) if self.added else y
        if self.choose(x, residual, weight, bias, eps).implementation == "torch":
            return self.reference(x, residual, weight, bias, eps)
        if self.registered and traced(x):
            return self.registered(x, residual, weight, bias, eps)
        return differentiable(self.functions["fastest"], x, residual, weight, bias, eps)


def _autograd(norm: Norm, forwards: Plans, backwards: Plans) -> type[torch.autograd.Function]:
    class Function(KernelFunction):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
        ) -> Any:
            kind, kept = norm.kind(weight, bias), norm.centered and any(ctx.needs_input_grad)
            given = Given.of(x, residual, contiguous(weight), contiguous(bias))
            y, h, statistics = forward(forwards, given, eps, kind, kept)
            ctx.kind, ctx.eps = kind, eps
            ctx.save_for_backward(h, None if weight is None else given.weight, bias, *statistics)
            return (y, h) if norm.added else y

        @staticmethod
        def backward(ctx: Any, dy: Tensor, dh: Tensor | None = None) -> tuple[Tensor | None, ...]:
            h, weight, bias, mean, rstd = ctx.saved_tensors
            kind = ctx.kind
            if torch.is_grad_enabled():  # a gradient of the gradient is wanted
                call = (h, None, weight, bias, ctx.eps)
                wanted = [isinstance(a, Tensor) and a.requires_grad for a in call]
                dx, _, dw, db, _ = reference_gradients(norm.reference, call, wanted, (dy,))
                dx = dx if dh is None or dx is None else dx + dh
            else:
                more = dh if norm.added else None
                dx, dw, db = gradients(backwards, h, dy, more, weight, (mean, rstd), ctx.eps, kind)
            return dx, dx if norm.added else None, dw, db if bias is not None else None, None

    return Function
