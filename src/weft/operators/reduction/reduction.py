"""What reductions share as operators: choice, call and gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Operator
from weft.operators import peers
from weft.operators.call import (
    Choice,
    KernelFunction,
    check_dim,
    check_tensor,
    differentiable,
    eager,
    guarded,
    materialised,
    on_gpu,
    reference_gradients,
    traced,
)
from weft.operators.launch import INTERPRETING, Plans
from weft.operators.reduction import kept, kept_tiny, spread_tiny, tiny
from weft.operators.reduction.argmax_plans import ArgmaxPlan
from weft.operators.reduction.kept_spans import SpansReady
from weft.operators.reduction.plans import (
    Formula,
    ReducePlan,
    Spread,
    SpreadPlan,
)
from weft.operators.reduction.views import View, strides_of_result, view_of, views_of

COPY = "the dimensions beside 'dim' do not collapse into one stride each, so a copy would be needed"


class Reduction:
    """One operator's kernels and call. What is passed on is always ``(x, dim, keepdim, order)``; order is that of a norm.

    Args:
        name: the operator's.
        reference: the same in PyTorch, with those arguments.
        formula: of an order; None where no kernel has it. For argmax, None at all.
        spread: of an order, the gradient where it needs x.
        mean: results are divided by the number of elements.
        empty: whether a result of no elements exists.
        wide_in_autocast: PyTorch gives fp32 under autocast.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Tensor],
        formula: Callable[[float], Formula | None] | None,
        spread: Callable[[float], Spread] | None = None,
        *,
        mean: bool = False,
        empty: bool = False,
        wide_in_autocast: bool = False,
    ):
        self.name, self.reference, self.formula, self.spread = name, reference, formula, spread
        self.mean, self.empty, self.wide_in_autocast = mean, empty, wide_in_autocast
        self.forward_plans = Plans(self._forward_plan)
        self.tiny_plans = Plans(self._tiny_plan)
        self.backward_plans = Plans(self._backward_plan)
        self.tiny_backward_plans = Plans(self._tiny_backward_plan)
        self.public_backward_plans = Plans(self._public_backward_plan)
        self.public_plans = Plans(lambda x, *how: self.choose(x, *how).plan_for(x, *how, self.dtype(x)))
        self.function = _autograd(self)
        self.kept_plans = Plans(self._kept_plan)
        self.kept_tiny_plans = Plans(self._kept_tiny_plan)
        self.public_kept_plans = Plans(self._public_kept_plan)

    # ---- plans -------------------------------------------------------------------------------------------------------

    def _forward_plan(self, x: Tensor, dim: int | None, keepdim: bool, order: float, dtype: torch.dtype) -> Any:
        """Args: dtype: of the result, which the launch is compiled for (under autocast another than x's)."""
        dim = None if dim is None else dim % x.ndim
        view = view_of(x, dim, in_order=self.formula is None)
        if view is None:
            raise Declined(COPY)
        total = dim is None and view.M * view.K > 1
        if self.formula is None:
            return Ready(ArgmaxPlan(view, x.device, x.dtype, total=total), x, dim, keepdim)
        formula = self.formula(order)
        if formula is None:
            raise Declined(f"order {order}: the kernels take 1, 2 and inf")
        return Ready(ReducePlan(view, x.device, x.dtype, formula, self._divisor(x, dim), total=total), x, dim, keepdim)

    def _tiny_plan(self, x: Tensor, dim: int | None, keepdim: bool, order: float, dtype: torch.dtype) -> Ready:
        dim = None if dim is None else dim % x.ndim
        view = view_of(x, dim)
        if view is None:
            raise Declined(COPY)
        if dim is None and view.M > 1:
            raise Declined("a reduction over everything; the kernel takes rows")
        formula = self.formula(order) if self.formula is not None else None
        return Ready(tiny.plan(x, view, dtype, formula, self._divisor(x, dim)), x, dim, keepdim)

    def _kept_plan(self, x: Tensor, dim: int | None, keepdim: bool, order: float) -> kept.KeptReady | SpansReady:
        formula = self._formula_with_bits(order)
        at = None if dim is None else dim % x.ndim
        found = views_of(x, at, torch.empty_like(x, device="meta"))
        if found is not None and ((at is None and found[0].M * found[0].K > 1) or kept.why_not(found[0])):
            return self._spans_plan(x, at, keepdim, order, (found[0], found[1]), formula)
        return self._kept_by(x, dim, keepdim, lambda v, dx: kept.KeptTiles(v, dx, x.device, x.dtype, formula))

    def _spans_plan(
        self, x: Tensor, dim: int | None, keepdim: bool, order: float, found: tuple[View, View], formula: Formula
    ) -> SpansReady:
        assert self.spread is not None  # its bits could be kept
        shape = shape_of_result(x, dim, keepdim)

        def reference(x: Tensor) -> Tensor:
            return self.reference(x, dim, keepdim, order)

        return SpansReady(x, dim, keepdim, shape, found, formula, self.spread(order), reference)

    def _kept_tiny_plan(self, x: Tensor, dim: int | None, keepdim: bool, order: float) -> kept.KeptReady:
        formula = self._formula_with_bits(order)
        return self._kept_by(x, dim, keepdim, lambda v, dx: kept_tiny.KeptRows(x, v, dx, formula))

    def _public_kept_plan(self, x: Tensor, dim: int | None, keepdim: bool, order: float) -> Any:
        """The better of both, None where neither takes x."""
        large = x.numel() >= tiny.FROM and not INTERPRETING
        for plan in (self._kept_tiny_plan, self._kept_plan) if large else (self._kept_plan,):
            with contextlib.suppress(Declined):
                return plan(x, dim, keepdim, order)
        return None

    def _kept_by(self, x: Tensor, dim: int | None, keepdim: bool, made: Any) -> kept.KeptReady:
        dim = None if dim is None else dim % x.ndim
        return kept.KeptReady(x, dim, keepdim, shape_of_result(x, dim, keepdim), made)

    def _formula_with_bits(self, order: float) -> Formula:
        if self.formula is None or self.spread is None or not self.spread(order).bits:
            raise Declined("the gradient takes more than which elements equal the result")
        formula = self.formula(order)
        assert formula is not None  # every extremum has one
        return formula

    def _divisor(self, x: Tensor, dim: int | None) -> float:
        return float(x.numel() if dim is None else x.shape[dim]) if self.mean else 1.0

    def _backward_plan(
        self, x: Tensor, dy: Tensor, dim: int | None, keepdim: bool, order: float, tiny: bool = False
    ) -> Any:
        """Triton's, or of ``tiny`` rows CUDA C++'s where it takes them."""
        assert self.spread is not None  # only then does a gradient need x
        found, strides = self._backward_views(x, dy, dim, keepdim)
        if tiny and dim is not None:
            with contextlib.suppress(Declined):
                return spread_tiny.plan(x, dy, found[0], found[1], strides, self.spread(order))
        return SpreadPlan(found[0], found[1], strides, x, self.spread(order), total=dim is None)

    def _tiny_backward_plan(self, x: Tensor, dy: Tensor, dim: int | None, keepdim: bool, order: float) -> Any:
        return self._backward_plan(x, dy, dim, keepdim, order, tiny=True)

    def _public_backward_plan(self, x: Tensor, dy: Tensor, dim: int | None, keepdim: bool, order: float) -> Any:
        large = x.numel() >= tiny.FROM and not INTERPRETING
        return self._backward_plan(x, dy, dim, keepdim, order, tiny=large)

    def _backward_views(
        self, x: Tensor, dy: Tensor, dim: int | None, keepdim: bool
    ) -> tuple[list[View], tuple[int, int]]:
        """Of x and of its gradient, and the strides of dy beside ``dim``."""
        dim = None if dim is None else dim % x.ndim
        found = views_of(x, dim, torch.empty_like(x, device="meta"))
        strides = (0, 0) if dim is None else strides_of_result(dy, dim, keepdim)
        if found is None or strides is None:
            raise Declined(COPY)
        if dim is not None and found[0].M == 1 and x.shape[:dim].numel() > 1:
            strides = strides[::-1]  # the rows became columns
        return found, strides

    # ---- calls -------------------------------------------------------------------------------------------------------

    def check(self, x: Tensor, dim: int | None, keepdim: bool) -> int | None:
        """``dim`` from the front. Raises TypeError or ValueError."""
        check_tensor(self.name, "x", x)
        if not isinstance(keepdim, bool):
            raise TypeError(f"{self.name}: argument 'keepdim' is {keepdim!r}; expected True or False")
        front = None if dim is None else check_dim(self.name, dim, x.ndim)
        along = x.numel() if front is None else x.shape[front] if x.ndim else 1
        if along == 0 and not self.empty:
            raise ValueError(
                f"{self.name}: argument 'x' has shape {tuple(x.shape)}, no elements along dim={dim}; expected at least one"
            )
        return front

    def choose(self, x: Tensor, dim: int | None, keepdim: bool, order: float) -> Choice:
        front = self.check(x, dim, keepdim)
        if not on_gpu(x):
            return Choice("torch", "the tensor is on the CPU, where weft runs the reference")
        if traced(x):
            return Choice("torch", "traced: PyTorch's own operators, which a compiler fuses with their neighbours")
        if x.ndim == 0 or not x.numel():
            return Choice("torch", "empty or a scalar: nothing to launch")
        if self.formula is not None and self.formula(order) is None:
            return Choice("torch", f"a norm of order {order}: the kernels take 1, 2 and inf")
        view = view_of(x, front, in_order=self.formula is None)
        if view is None:
            return Choice("torch", COPY)
        large = front is not None and x.numel() >= tiny.FROM and not INTERPRETING
        if large and not self.why_not_tiny(x, view, order):
            return Choice("cuda", f"dense rows of {view.N} elements", self.tiny_plans)
        return Choice("triton", "one stride before, along and after the reduced axis", self.forward_plans)

    def why_not_tiny(self, x: Tensor, view: View, order: float) -> str:
        """Why :meth:`choose` leaves rows to Triton (an empty string where CUDA C++'s kernel of tiny rows takes them)."""
        return tiny.why_not(x, view, self.dtype(x), self.formula(order) if self.formula is not None else None)

    def triton(self, x: Tensor, dim: int | None, keepdim: bool, order: float = 2.0) -> Tensor:
        """Triton's kernel, whatever :meth:`choose` says."""
        return self._by(self.forward_plans, x, dim, keepdim, order)

    def cuda(self, x: Tensor, dim: int | None, keepdim: bool, order: float = 2.0) -> Tensor:
        """CUDA C++'s, whatever :meth:`choose` says. Where it has the gradient alone, and one is wanted, forward is Triton's."""
        plans = self.forward_plans if self._gradient_alone(x, dim, order) else self.tiny_plans
        return self._by(plans, x, dim, keepdim, order, self.tiny_backward_plans)

    def _gradient_alone(self, x: Tensor, dim: int | None, order: float) -> bool:
        if dim is None or self.spread is None or not (torch.is_grad_enabled() and x.requires_grad and x.numel()):
            return False
        found = views_of(x, dim % x.ndim, torch.empty_like(x, device="meta"))
        if found is None or not self.why_not_tiny(x, found[0], order):
            return False
        return not spread_tiny.why_not(x, found[0], found[1], self.spread(order))

    def triton_kept(self, x: Tensor, dim: int | None, keepdim: bool, order: float = 2.0) -> Tensor:
        """Triton's kernels that keep bits for the gradient, whether or not one is wanted."""
        return self._keeping(self.kept_plans, x, dim, keepdim, order)

    def cuda_kept(self, x: Tensor, dim: int | None, keepdim: bool, order: float = 2.0) -> Tensor:
        """CUDA C++'s."""
        return self._keeping(self.kept_tiny_plans, x, dim, keepdim, order)

    def _keeping(self, plans: Plans, x: Tensor, dim: int | None, keepdim: bool, order: float) -> Tensor:
        if x.ndim == 0 or not x.numel():
            return self.reference(x, dim, keepdim, order)
        out: Tensor = differentiable(kept.Function, x, plans, dim, keepdim, order)
        return out

    def _by(
        self, plans: Plans, x: Tensor, dim: int | None, keepdim: bool, order: float, gradients: Plans | None = None
    ) -> Tensor:
        if x.ndim == 0 or not x.numel():
            return self.reference(x, dim, keepdim, order)
        if self.formula is None:
            return self.run(plans, x, dim, keepdim, order, torch.int64)
        gradients = gradients or self.backward_plans
        out: Tensor = differentiable(self.function, x, dim, keepdim, order, self.dtype(x), plans, gradients)
        return out

    def keeps(self, x: Tensor, dim: int | None, keepdim: bool, order: float) -> bool:
        """Whether the public function makes the gradient of x of bits."""
        may = self.spread is not None and self.spread(order).bits
        return may and self.public_kept_plans.of((x,), dim, keepdim, order) is not None

    def run(self, plans: Plans, x: Tensor, dim: int | None, keepdim: bool, order: float, dtype: torch.dtype) -> Tensor:
        """The launches alone."""
        ready = plans.of((x,), dim, keepdim, order, dtype)
        out = torch.empty(ready.shape, dtype=dtype, device=x.device)
        ready(x, out)
        return out

    def __call__(self, x: Tensor, dim: int | None, keepdim: bool, order: float = 2.0) -> Tensor:
        """What the public function does."""
        if isinstance(x, Tensor) and eager(x, gradient=True, autocast=not self.wide_in_autocast):
            ready = self.public_plans.of((x,), dim, keepdim, order)
            if ready is not None:
                if self.formula is not None and torch.is_grad_enabled() and x.requires_grad:
                    if self.keeps(x, dim, keepdim, order):
                        return kept.Function.apply(x, self.public_kept_plans, dim, keepdim, order)
                    plans = self.choose(x, dim, keepdim, order).plans
                    how = (dim, keepdim, order, self.dtype(x))
                    return self.function.apply(x, *how, plans, self.public_backward_plans)
                out = torch.empty(ready.shape, dtype=self.dtype(x), device=x.device)
                ready(x, out)
                return out
        (x,) = materialised(x)
        choice = self.choose(x, dim, keepdim, order)
        if choice.implementation == "torch":
            return self.reference(x, dim, keepdim, order)
        if torch.is_grad_enabled() and x.requires_grad and self.keeps(x, dim, keepdim, order):
            return self._keeping(self.public_kept_plans, x, dim, keepdim, order)
        return self._by(choice.plans, x, dim, keepdim, order, self.public_backward_plans)

    def dtype(self, x: Tensor) -> torch.dtype:
        if self.formula is None:
            return torch.int64
        wide = self.wide_in_autocast and x.is_cuda and torch.is_autocast_enabled("cuda")
        return torch.float32 if wide else x.dtype

    def gradient(
        self, x: Tensor, y: Tensor, dy: Tensor, dim: int | None, keepdim: bool, order: float, plans: Plans
    ) -> Tensor:
        """dx, where it needs x."""
        dx = torch.empty_like(x)
        if dim is not None and strides_of_result(dy, dim % x.ndim, keepdim) is None:
            dy = dy.contiguous()  # one element a result; gradients of any strides may come from autograd
        plans.of((x, dy), dim, keepdim, order)(x, y, dy, dx)
        return dx

    def implement(self, operator: Operator, call: Callable[..., Any]) -> None:
        """Registers kernel, reference and ``torch.compile`` as the operator's implementations, and how it chooses.

        Args:
            call: ``(function of (x, dim, keepdim, order)) -> function of the operator's arguments``.
        """
        operator.choice(guarded(call(self.choose)))
        operator.implementation("triton", arch=">=sm_80")(call(self.triton))
        if self.formula is not None:
            operator.implementation("cuda", arch=">=sm_80", devices=("cuda",))(call(self.cuda))
        if self.spread is not None and self.spread(2.0).bits:
            operator.implementation("triton-kept", backend="triton", arch=">=sm_80")(call(self.triton_kept))
            operator.implementation("cuda-kept", backend="cuda", arch=">=sm_80", devices=("cuda",))(
                call(self.cuda_kept)
            )
        operator.implementation("torch")(call(self.reference))
        operator.implementation("torch.compile", devices=("cuda",))(peers.Compiled(call(self.reference)))


class Ready:
    """A plan with the shape of its result."""

    def __init__(self, plan: Callable[[Tensor, Tensor], None], x: Tensor, dim: int | None, keepdim: bool):
        self.plan, self.shape = plan, shape_of_result(x, dim, keepdim)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        self.plan(x, out)


def shape_of_result(x: Tensor, dim: int | None, keepdim: bool) -> tuple[int, ...]:
    """``dim`` counts from the front."""
    if dim is None:
        return (1,) * x.ndim if keepdim else ()
    return (*x.shape[:dim], *((1,) if keepdim else ()), *x.shape[dim + 1 :])


def _autograd(op: Reduction) -> type[torch.autograd.Function]:
    class Function(KernelFunction):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, dim: int | None, keepdim: bool, order: float, dtype: torch.dtype, plans: Plans,
            gradients: Plans,
        ) -> Tensor:  # fmt: skip
            out = op.run(plans, x, dim, keepdim, order, dtype)
            ctx.how, ctx.gradients = (dim, keepdim, order), gradients
            if op.spread is None:
                ctx.shape, ctx.dtype = x.shape, x.dtype
            else:
                ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            dim, keepdim, order = ctx.how
            if op.spread is None:
                return (_broadcast(dy, ctx.shape, ctx.dtype, dim, keepdim, op.mean), *[None] * 6)
            x, y = ctx.saved_tensors
            if torch.is_grad_enabled():
                dx = reference_gradients(lambda x: op.reference(x, dim, keepdim, order), (x,), (True,), (dy,))[0]
            else:
                dx = op.gradient(x, y, dy, dim, keepdim, order, ctx.gradients)
            return dx, *[None] * 6

    return Function


def _broadcast(dy: Tensor, shape: torch.Size, dtype: torch.dtype, dim: int | None, keepdim: bool, mean: bool) -> Tensor:
    """The gradient of a sum is that of its result at every element: a view, so nothing of x's size is written."""
    if mean:
        dy = dy / (shape.numel() if dim is None else shape[dim])
    if dim is not None and not keepdim:
        dy = dy.unsqueeze(dim)
    return dy.to(dtype).expand(shape)
