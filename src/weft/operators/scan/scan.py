"""What scans share as operators: choice, call and gradient."""

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
    on_gpu,
    reference_gradients,
    traced,
)
from weft.operators.launch import INTERPRETING, Plans
from weft.operators.reduction.views import View, views_of
from weft.operators.scan import columns, vectors
from weft.operators.scan.columns import ColumnsPlan
from weft.operators.scan.gradient_columns import ColumnsGradientPlan
from weft.operators.scan.gradient_vectors import VectorsGradientPlan
from weft.operators.scan.plans import Formula, GradientPlan, Kernels, LongRowsPlan, TilesPlan, scan_plan

VECTORS_FROM = 2**20  # elements from which the CUDA C++ kernels are chosen: below, launching is what counts
COPY = "the dimensions beside 'dim' do not collapse into one stride each, so a copy would be needed"


class Scan:
    """One operator's kernels and call. What is passed on is always ``(x, dim, exclusive, reverse)``.

    Args:
        name: the operator's.
        scan: the inclusive forward scan in PyTorch, ``(x, dim)``.
        formula: what the kernels compute.
        log: whether the gradient is that of a logarithm of sums, or of products; None where it is a scan itself (a sum's).
        wide_in_autocast: PyTorch gives fp32 under autocast.
    """

    def __init__(
        self,
        name: str,
        scan: Callable[[Tensor, int], Tensor],
        formula: Formula,
        *,
        log: bool | None,
        wide_in_autocast: bool = False,
    ):
        self.name, self.scan, self.formula, self.log = name, scan, formula, log
        self.wide_in_autocast = wide_in_autocast
        self.configured = Kernels.of(name, formula)
        self.triton_plans = Plans(self._triton_plan)
        self.vector_plans = Plans(self._vector_plan)
        self.backward_plans = Plans(self._backward_plan)
        self.vector_backward_plans = Plans(self._vector_backward_plan)
        self.public_plans = Plans(self._public_plan)
        self.public_backward_plans = Plans(self._public_backward_plan)
        self.function = _autograd(self)

    def reference(self, x: Tensor, dim: int = -1, exclusive: bool = False, reverse: bool = False) -> Tensor:
        """In PyTorch, which has neither option: by shifting and turning the input."""
        if reverse:
            x = x.flip(dim)
        if exclusive and x.ndim and x.shape[dim]:  # what comes first is no result of theirs: its derivatives are 0
            none = torch.full_like(x.narrow(dim, 0, 1), self.formula.neutral)
            y = torch.cat([none, self.scan(x.narrow(dim, 0, x.shape[dim] - 1), dim)], dim)
        elif exclusive:
            y = x.masked_fill(torch.ones_like(x, dtype=torch.bool), self.formula.neutral)
        else:
            y = self.scan(x, dim)
        return y.flip(dim) if reverse else y

    # ---- plans -------------------------------------------------------------------------------------------------------

    def _triton_plan(
        self, x: Tensor, dim: int, exclusive: bool, reverse: bool, dtype: torch.dtype
    ) -> TilesPlan | LongRowsPlan:
        v, y = _views(x, dim)
        return scan_plan(v, y, x, self.formula, self.configured, int(exclusive), reverse)

    def _vector_plan(
        self, x: Tensor, dim: int, exclusive: bool, reverse: bool, dtype: torch.dtype
    ) -> vectors.VectorsPlan | ColumnsPlan:
        v, y = _views(x, dim)
        how = {"exclusive": exclusive, "reverse": reverse}
        if v.K > 1:
            return ColumnsPlan(v, y, x, dtype, self.formula.columns, self.configured.columns_vectors, **how)
        return vectors.VectorsPlan(v, y, x, dtype, self.formula, self.configured.vectors, **how)

    def why_not(self, v: View, y: View, x: Tensor, dtype: torch.dtype) -> str:
        """Why our CUDA C++ kernels cannot take x (an empty string when they can)."""
        return columns.why_not((v, y), dtype, x) if v.K > 1 else vectors.why_not(v, y, x, dtype, self.formula)

    def _public_plan(self, x: Tensor, *how: Any) -> tuple[Plans, Any] | None:
        """The plans that are chosen and the one of this call; None where PyTorch is called."""
        chosen = self.choose(x, *how)
        return None if chosen.plans is None else (chosen.plans, chosen.plan_for(x, *how, x.dtype))

    def _backward_plan(
        self, x: Tensor, y: Tensor, dy: Tensor, dim: int, exclusive: bool, reverse: bool
    ) -> GradientPlan:
        found = views_of(x, dim % x.ndim, y, dy, torch.empty_like(x, device="meta"))
        if found is None:
            raise Declined(COPY)
        return GradientPlan(found, x, self.configured, log=bool(self.log), shift=int(exclusive), reverse=reverse)

    def _vector_backward_plan(
        self, x: Tensor, y: Tensor, dy: Tensor, dim: int, exclusive: bool, reverse: bool
    ) -> VectorsGradientPlan | ColumnsGradientPlan:
        tensors = x, y, dy, torch.empty_like(x, device="meta")
        found = views_of(x, dim % x.ndim, *tensors[1:])
        if found is None:
            raise Declined(COPY)
        how = {"log": bool(self.log), "exclusive": exclusive, "reverse": reverse}
        if found[0].K > 1:
            return ColumnsGradientPlan(found, tensors, self.configured.gradient_columns, **how)
        return VectorsGradientPlan(found, tensors, self.configured.gradient_vectors, **how)

    def _public_backward_plan(
        self, x: Tensor, y: Tensor, dy: Tensor, *how: Any
    ) -> GradientPlan | VectorsGradientPlan | ColumnsGradientPlan:
        if x.numel() >= VECTORS_FROM and not INTERPRETING and not columns.too_few(_views(x, how[0])[0], x):
            with contextlib.suppress(Declined):
                return self._vector_backward_plan(x, y, dy, *how)
        return self._backward_plan(x, y, dy, *how)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def check(self, x: Tensor, dim: int, exclusive: bool, reverse: bool) -> int:
        """``dim`` from the front. Raises TypeError or ValueError."""
        check_tensor(self.name, "x", x)
        for name, value in (("exclusive", exclusive), ("reverse", reverse)):
            if not isinstance(value, bool):
                raise TypeError(f"{self.name}: argument '{name}' is {value!r}; expected True or False")
        return check_dim(self.name, dim, x.ndim)

    def choose(self, x: Tensor, dim: int = -1, exclusive: bool = False, reverse: bool = False) -> Choice:
        front = self.check(x, dim, exclusive, reverse)
        if not on_gpu(x):
            return Choice("torch", "the tensor is on the CPU, where weft runs the reference")
        if traced(x):
            return Choice("torch", "traced: PyTorch's own operators, which a compiler fuses with their neighbours")
        if x.ndim == 0 or not x.numel():
            return Choice("torch", "empty or a scalar: nothing to launch")
        try:
            v, y = _views(x, front)
        except Declined as declined:
            return Choice("torch", str(declined))
        large = x.numel() >= VECTORS_FROM and not INTERPRETING
        if large and not columns.too_few(v, x) and not self.why_not(v, y, x, self.dtype(x)):
            what = "columns side by side" if v.K > 1 else "rows of adjacent elements"
            return Choice("cuda", f"{what}: 16 bytes an access", self.vector_plans)
        return Choice("triton", "one stride before, along and after the scanned axis", self.triton_plans)

    def triton(self, x: Tensor, dim: int = -1, exclusive: bool = False, reverse: bool = False) -> Tensor:
        """Our Triton kernels, whatever :meth:`choose` says."""
        return self.by(self.triton_plans, x, dim, exclusive, reverse)

    def cuda(self, x: Tensor, dim: int = -1, exclusive: bool = False, reverse: bool = False) -> Tensor:
        """Our CUDA C++ kernels; raises Declined as ``why_not`` of ``vectors``, of ``columns`` and of
        ``gradient_vectors`` say."""
        return self.by(self.vector_plans, x, dim, exclusive, reverse, self.vector_backward_plans)

    def by(
        self, plans: Plans, x: Tensor, dim: int, exclusive: bool, reverse: bool, backward: Plans | None = None
    ) -> Tensor:
        """Args: plans, backward: of the launches; of the gradient Triton's where None is given."""
        if x.ndim == 0 or not x.numel():
            return self.reference(x, dim, exclusive, reverse)
        out: Tensor = differentiable(
            self.function, x, dim, exclusive, reverse, self.dtype(x), plans, None, backward or self.backward_plans
        )
        return out

    def run(
        self, x: Tensor, dim: int, exclusive: bool, reverse: bool, dtype: torch.dtype, plans: Plans, plan: Any = None
    ) -> Tensor:
        """The launches alone; ``plan``: where it is known."""
        y = torch.empty_like(x, dtype=dtype)
        (plan or plans.of((x,), dim, exclusive, reverse, dtype))(x, y)
        return y

    def __call__(self, x: Tensor, dim: int, exclusive: bool, reverse: bool) -> Tensor:
        """What the public function does."""
        if isinstance(x, Tensor) and eager(x, gradient=True, autocast=not self.wide_in_autocast):
            ready = self.public_plans.of((x,), dim, exclusive, reverse)
            if ready is not None:
                plans, plan = ready
                if torch.is_grad_enabled() and x.requires_grad:
                    return self.function.apply(
                        x, dim, exclusive, reverse, x.dtype, plans, plan, self.public_backward_plans
                    )
                y = torch.empty_like(x)
                plan(x, y)
                return y
        plans = self.choose(x, dim, exclusive, reverse).plans
        if plans is None:
            return self.reference(x, dim, exclusive, reverse)
        return self.by(plans, x, dim, exclusive, reverse, self.public_backward_plans)

    def dtype(self, x: Tensor) -> torch.dtype:
        wide = self.wide_in_autocast and x.is_cuda and torch.is_autocast_enabled("cuda")
        return torch.float32 if wide else x.dtype

    def gradient(
        self, x: Tensor, y: Tensor, dy: Tensor, dim: int, exclusive: bool, reverse: bool, plans: Plans
    ) -> Tensor:
        """dx of a product or a logarithm of sums."""
        dx = torch.empty_like(x)
        if views_of(x, dim % x.ndim, dy) is None:
            dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)  # of any strides (expanded, say) out of autograd
        plans.of((x, y, dy), dim, exclusive, reverse)(x, y, dy, dx)
        return dx

    def implement(self, operator: Operator, compiled: tuple[str, ...] = ()) -> None:
        """Registers kernel, reference and ``torch.compile`` as the operator's implementations, and how it chooses.

        Args:
            compiled: the directions that ``torch.compile`` has; all when empty.
        """
        operator.choice(guarded(self.choose))
        operator.implementation("triton", arch=">=sm_80")(self.triton)
        operator.implementation("cuda", arch=">=sm_80", devices=("cuda",))(self.cuda)
        operator.implementation("torch")(self.reference)
        peer = operator.implementation("torch.compile", devices=("cuda",), directions=compiled)
        peer(peers.Compiled(self.reference))


def _views(x: Tensor, dim: int) -> tuple[View, View]:
    """x and a result like it as [M, N, K]; raises Declined where strides do not allow it."""
    found = views_of(x, dim % x.ndim, torch.empty_like(x, device="meta"))
    if found is None:
        raise Declined(COPY)
    return found[0], found[1]


def _autograd(op: Scan) -> type[torch.autograd.Function]:
    class Function(KernelFunction):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, dim: int, exclusive: bool, reverse: bool, dtype: torch.dtype, plans: Plans,
            plan: Any, backward: Plans,
        ) -> Tensor:  # fmt: skip
            y = op.run(x, dim, exclusive, reverse, dtype, plans, plan)
            ctx.how, ctx.dtype, ctx.plans, ctx.backward = (dim, exclusive, reverse), x.dtype, plans, backward
            if op.log is not None:
                ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            dim, exclusive, reverse = ctx.how
            if op.log is None:  # what an element adds to is all that comes after it
                if views_of(dy, dim % dy.ndim, torch.empty_like(dy, device="meta")) is None:
                    dy = dy.contiguous()
                plans = ctx.plans  # dy comes with any strides: where forward's kernel does not take them, Triton's does
                if plans is op.vector_plans and op.why_not(*_views(dy, dim), dy, ctx.dtype):
                    plans = op.triton_plans
                dx = differentiable(op.function, dy, dim, exclusive, not reverse, ctx.dtype, plans, None, ctx.backward)
                return dx, *(None,) * 7
            x, y = ctx.saved_tensors
            if torch.is_grad_enabled():
                whole = reference_gradients(lambda x: op.reference(x, dim, exclusive, reverse), (x,), (True,), (dy,))
                return whole[0], *(None,) * 7
            return op.gradient(x, y, dy, dim, exclusive, reverse, ctx.backward), *(None,) * 7

    return Function
