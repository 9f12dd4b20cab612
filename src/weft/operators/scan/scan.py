"""What the three scans share: the public call, its gradient and single kernels; inputs, cost, workloads and mutants."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.axis_view import axis_views
from weft.operators.call import Choice, eager, guarded, materialised
from weft.operators.checks import check_dim, check_dtype
from weft.operators.launch import Plans
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor
from weft.operators.scan.dispatch import BACKWARD, FORWARD, Scan

LARGE = 2**28
BOTH = (True, False)


# ---- the call: what follows is always (x, dim, exclusive, reverse) ---------------------------------------------------


def scan_along(
    op: Scan, x: Tensor, dim: int, exclusive: bool, reverse: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """What the public functions do. ``dtype``: of the result, to which x is cast first."""
    if dtype is None and isinstance(x, Tensor) and eager(x, gradient=True, autocast=not op.wide_in_autocast):
        plan = FORWARD.of((x,), op, dim, exclusive, reverse, x.dtype)
        if plan is not None:
            if torch.is_grad_enabled() and x.requires_grad:
                return Function.apply(x, plan, op, (dim, exclusive, reverse), x.dtype, FORWARD, BACKWARD)
            y = torch.empty_like(x)
            plan(x, y)
            return y
    op.check(x, dim, exclusive, reverse)
    (x,) = materialised(x)
    if dtype not in (None, torch.float32):
        check_dtype(op.name, dtype)
        with torch.autocast("cuda", enabled=False):  # which would take fp32
            return scan_along(op, x.to(dtype), dim, exclusive, reverse)
    options = (op, dim, exclusive, reverse, dtype or _dtype(op, x))
    if FORWARD.choose(x, *options).implementation == "torch":
        return op.reference(x if dtype is None else x.to(dtype), dim, exclusive, reverse)
    plan = FORWARD.of((x,), *options)
    return differentiable(Function, x, plan, op, options[1:4], options[4], FORWARD, BACKWARD)


def _by_kernel(op: Scan, name: str) -> Callable[..., Tensor]:
    """The operator by one kernel, whichever the table takes; by "cuda-padded" the gradient alone. Raises Declined as the
    table's rows of that name say."""
    forward, backward = FORWARD if name == "cuda-padded" else FORWARD.kernel(name), BACKWARD.kernel(name)

    def run(x: Tensor, dim: int = -1, exclusive: bool = False, reverse: bool = False) -> Tensor:
        if x.ndim == 0 or not x.numel():
            return op.reference(x, dim, exclusive, reverse)
        how, dtype = (dim, exclusive, reverse), _dtype(op, x)
        return differentiable(Function, x, forward.of((x,), op, *how, dtype), op, how, dtype, forward, backward)

    return run


def _dtype(op: Scan, x: Tensor) -> torch.dtype:
    """Of the result."""
    wide = op.wide_in_autocast and x.is_cuda and torch.is_autocast_enabled("cuda")
    return torch.float32 if wide else x.dtype


class Function(KernelFunction):
    """``forward`` and ``backward`` are the tables, or their plans of one name."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: Any, op: Scan, how: tuple[int, bool, bool], dtype: torch.dtype, forward: Plans,
        backward: Plans,
    ) -> Tensor:  # fmt: skip
        y = torch.empty_like(x, dtype=dtype)
        plan(x, y)
        ctx.op, ctx.how, ctx.dtype, ctx.tables = op, how, x.dtype, (forward, backward)
        if op.log is not None:
            ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        op, (dim, exclusive, reverse), (forward, backward) = ctx.op, ctx.how, ctx.tables
        if op.log is None:  # an element adds to all that come after it
            if axis_views(dy, dim % dy.ndim, torch.empty_like(dy, device="meta")) is None:
                dy = dy.contiguous()
            how = (dim, exclusive, not reverse)
            plan = forward.of((dy,), op, *how, ctx.dtype)
            return differentiable(Function, dy, plan, op, how, ctx.dtype, forward, backward), *(None,) * 6
        x, y = ctx.saved_tensors
        if axis_views(x, dim % x.ndim, dy) is None:
            dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)  # of any strides (expanded, say) out of autograd
        plan = None if torch.is_grad_enabled() else backward.of((x, y, dy), op, dim, exclusive, reverse)
        if plan is None:
            with torch.set_grad_enabled(True):
                dx = reference_gradients(lambda x: op.reference(x, dim, exclusive, reverse), (x,), (True,), (dy,))[0]
        else:
            dx = torch.empty_like(x)
            plan(x, y, dy, dx)
        return dx, *(None,) * 6


def implement(op: Scan, defined: Operator, compiled: tuple[str, ...] = ()) -> None:
    """Registers the implementations of an operator and how it chooses. ``compiled`` are the directions that ``torch.compile``
    has, all when empty."""

    def choice(
        x: Tensor, dim: int = -1, exclusive: bool = False, reverse: bool = False, direction: str = "forward",
        dtype: torch.dtype | None = None,
    ) -> Choice:  # fmt: skip
        op.check(x, dim, exclusive, reverse)
        check_dtype(op.name, dtype)
        x = x if dtype in (None, torch.float32) else x.to(dtype)
        if direction == "forward" or op.log is None:  # a sum's gradient: a sum of dy, which is taken to lie as x does
            return FORWARD.choose(x, op, dim, exclusive, reverse != (direction == "backward"), dtype or _dtype(op, x))
        like = torch.empty_like(x, device="meta")
        return BACKWARD.choose(x, like, like, op, dim, exclusive, reverse)

    defined.choice(guarded(choice))
    defined.implementation("triton", arch=">=sm_80")(_by_kernel(op, "triton"))
    defined.implementation("cuda", arch=">=sm_80")(_by_kernel(op, "cuda"))
    if op.log is not None:
        named: dict[str, Any] = {"backend": "cuda", "arch": ">=sm_90", "directions": ("backward",)}
        defined.implementation("cuda-padded", **named)(_by_kernel(op, "cuda-padded"))
    peers.register(defined, op.reference, directions=compiled)


# ---- the definition --------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [M, N], or [M, N, K] with the option ``inner``."""
    shape = (w["M"], w["N"], w.option("inner")) if w.option("inner") else (w["M"], w["N"])
    dim = w.option("dim", -1)
    check_dim("the workload", dim, len(shape))
    layout, values = w.option("layout", "contiguous"), w.option("values", "normal")
    x = random_tensor(g, shape, w.dtype, device, layout=layout, values=VALUES[0] if values == "zeros" else values)
    if values == "zeros" and device != "meta":
        x.masked_fill_(x.abs() < 0.1, 0.0)
    return {"x": x, "dim": dim, "exclusive": w.option("exclusive", False), "reverse": w.option("reverse", False)}


def define(
    op: Scan, tolerance: dict[str, Tolerance], *, flops: int = 1, special_ops: int = 0,
    make_inputs: Callable[..., dict[str, Any]] = inputs, more: Sequence[Workload] = (), wrong: Sequence[Mutant] = (),
    gradient_wrong: Sequence[Mutant] = (),
) -> dict[str, Any]:  # fmt: skip
    """The fields of an ``Operator`` over [M, N]: ``flops`` and ``special_ops`` of an element, ``more`` workloads to verify."""
    reference = op.reference

    def cost(w: Workload, direction: str) -> Cost:
        n = w["M"] * w["N"] * w.option("inner", 1)
        tensors = 1 if direction == "forward" or op.log is None else 3  # x; or x, y and dy
        reads = tensors * n * w.bytes_per_element
        return Cost(reads, n * w.bytes_per_element, vector_flops=flops * n, special_ops=special_ops * n)

    each = ("fp32", "bf16")
    return {
        "name": op.name,
        "axes": {"M": "rows", "N": "columns"},
        "inputs": make_inputs,
        "reference": reference,
        "cost": cost,
        "differentiable": ("x",),
        "options": {
            "layout": LAYOUTS,
            "values": (*VALUES, "zeros"),
            "dim": range(-3, 3),
            "inner": range(1, 2**31),
            "exclusive": (True, False),
            "reverse": (True, False),
        },
        "tolerance": tolerance,
        "workloads": {
            "verify": [
                *(workload(M=m, N=n) for m, n in ((1, 1), (3, 5), (7, 2), (5, 64), (9, 100), (2, 700))),
                *(workload(M=m, N=n, dim=0) for m, n in ((5, 3), (70, 5), (150, 2))),
                *(workload(M=2, N=n, inner=k, dim=1) for n, k in ((3, 9), (20, 5))),
                *(workload(M=2, N=70, inner=24, dim=1, exclusive=e, reverse=not e) for e in (True, False)),
                *(workload(M=3, N=n, exclusive=True) for n in (1, 33)),
                *(workload(M=3, N=n, reverse=True) for n in (33, 300)),
                *(workload(M=2, N=n, exclusive=True, reverse=True) for n in (33, 600)),
                *(workload(M=2, N=n, exclusive=True) for n in (600, 700)),
                *(workload(M=2, N=700, **exclusive, reverse=True) for exclusive in ({}, {"exclusive": True})),
                *(workload(M=100, N=3, dim=0, exclusive=e, reverse=True) for e in (True, False)),
                workload(M=100, N=3, dim=0, exclusive=True),
                workload(M=0, N=7),
                workload(M=7, N=0),
                *(workload(M=9, N=33, layout=at) for at in LAYOUTS[1:]),
                *(workload(M=9, N=33, layout=at, dim=0) for at in ("sliced", "transposed")),
                *more,
            ],
            "full": [
                workload(M=2, N=40000),
                workload(M=3, N=5000),
                *(workload(M=2, N=n, exclusive=e, reverse=e) for n in (2**15, 2**15 - 7) for e in (True, False)),
                workload(M=3000, N=40, dim=0),
                *(workload(M=2**13, N=136, dim=0, exclusive=e, reverse=r) for e in BOTH for r in BOTH),
                *(workload(M=3, N=n, exclusive=e, reverse=True) for n in (8, 520, 40008) for e in (True, False)),
            ],
            "ladder": [workload("fp32", M=1, N=LARGE)],
            "bench": [
                workload(M=1, N=LARGE),
                *(workload(M=LARGE // n, N=n) for n in (256, 4096, 16384, 65536)),
                workload(M=2**14, N=2**14, dim=0),
                workload(M=2**10, N=2**10, inner=2**8, dim=1),
            ],
            "quick": [workload(M=1, N=2**22), workload(M=2**10, N=2**12)],
            "compile": [
                workload(M=1, N=2**20),
                workload(M=2**10, N=2**10, reverse=True),
                workload(M=2**9, N=1000, exclusive=True),
                workload(M=2**11, N=2**11, dim=0),
                workload(M=2**12, N=8, dim=0),
                workload(M=1, N=2**15),
            ],
            "tune": [
                *(workload(d, M=LARGE // n, N=n) for d in each for n in (64, 256, 1024, 4096, 16384, 65536)),
                *(workload(d, M=1, N=LARGE) for d in each),
                *(workload(d, M=n, N=LARGE // n, dim=0) for d in each for n in (256, 2**14)),
            ],
            "huge": [*(workload("bf16", M=1, N=2**31 + n) for n in (16, 17)), workload("bf16", M=2**23 + 3, N=257)],
        },
        "mutants": [
            *mutants.usual(reference),
            Mutant("exclusive and inclusive exchanged", mutants.changed(reference, exclusive=operator.not_)),
            Mutant("from the other end", mutants.changed(reference, reverse=operator.not_)),
            Mutant("carry lost every 64", lambda x, **how: _pieces(reference, x, **how)),
            *wrong,
            *mutants.usual(mutants.gradient_of(reference, "x"), "backward"),
            *gradient_wrong,
        ],
    }


def _pieces(reference: Callable[..., Tensor], x: Tensor, dim: int, **how: Any) -> Tensor:
    """Each 64 elements scanned alone."""
    if x.shape[dim] <= 64:
        return reference(x, dim=dim, **how)
    return torch.cat([reference(part, dim=dim, **how) for part in x.split(64, dim)], dim)
