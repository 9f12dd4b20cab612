"""What the six reductions share: the public call, its gradient and single kernels; inputs, cost, workloads and mutants."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.axis_view import collapsed, result_strides
from weft.operators.call import Choice, eager, guarded, materialised, traced
from weft.operators.checks import check_dim
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor
from weft.operators.reduction.dispatch import BACKWARD, FORWARD, Reduction, ReductionCall
from weft.operators.reduction.extremum_mask import SavingPlan

LARGE = 2**28


# ---- the call: what follows is always (x, dim, keepdim, order), order being that of a norm ------------------------------


def reduce(
    op: Reduction, x: Tensor, dim: Any, keepdim: bool, order: float = 0.0, dtype: torch.dtype | None = None
) -> Tensor:
    """What the public functions do. ``dtype``: of the result, to which x is cast first."""
    if isinstance(x, Tensor) and eager(x, gradient=True, autocast=not op.wide_in_autocast):
        gradient = op.formula is not None and torch.is_grad_enabled() and x.requires_grad
        plan = FORWARD.of((x,), op, dim, keepdim, order, dtype, gradient)
        if plan is not None:
            return Reduce.apply(x, plan, op, (dim, keepdim, order), BACKWARD) if gradient else plan(x)
    (x,) = materialised(x)
    if isinstance(dim, (tuple, list)):
        flat, one = merged(op, x, dim, keepdim)
        if not isinstance(one, tuple):
            y = reduce(op, flat, one, keepdim, order, dtype)
            return y.unflatten(one, (1,) * (1 + x.ndim - flat.ndim)) if keepdim and one is not None else y
    options = (op, dim, keepdim, order, _into(op, x, dtype), _wants_gradient(op, x))
    if FORWARD.choose(x, *options).implementation == "torch":
        return op.reference(x, dim, keepdim, order, *(() if dtype is None else (dtype,)))
    return _launch(FORWARD.of((x,), *options), x, op, (dim, keepdim, order), BACKWARD)


def merged(op: Reduction, x: Tensor, dim: Any, keepdim: bool) -> tuple[Tensor, Any]:
    """x with several reduced dimensions made one, and that one, where they are neighbours of one stride; else x and ``dim``
    from the front."""
    dims = op.check(x, dim, keepdim)
    if not isinstance(dims, tuple) or not x.numel() or traced(x):
        return x, dims
    first, end = dims[0], dims[-1] + 1
    if end - first > len(dims) or collapsed(x.shape[first:end], x.stride()[first:end]) is None:
        return x, dims
    return x.flatten(first, end - 1), first


def _by_kernel(op: Reduction, name: str) -> Callable[..., Tensor]:
    """The operator by one kernel, whichever the table takes. Raises Declined as the table's rows of that name say."""

    def run(x: Tensor, dim: int | None, keepdim: bool, order: float) -> Tensor:
        if x.ndim == 0 or not x.numel():
            return op.reference(x, dim, keepdim, order)
        mask, forward, formula = name.endswith("-mask"), name, op.formula and op.formula(order)
        if formula and not mask and _wants_gradient(op, x):
            if formula.extremum:
                raise Declined("no mask is saved for the gradient; triton-mask and cuda-mask save one")
            if formula.gradient is not None:
                forward = "triton"  # the kernel of that name takes gradients of dtypes that its forward does not take
        plan = FORWARD.kernel(forward).of((x,), op, dim, keepdim, order, _into(op, x), mask)
        return _launch(plan, x, op, (dim, keepdim, order), BACKWARD.kernel(name))

    return run


def _into(op: Reduction, x: Any, dtype: torch.dtype | None = None) -> torch.dtype | None:
    """The dtype that the caller, or else autocast, asks for."""
    wide = dtype is None and op.wide_in_autocast and torch.is_autocast_enabled("cuda") and getattr(x, "is_cuda", False)
    return torch.float32 if wide else dtype


def _wants_gradient(op: Reduction, x: Any) -> bool:
    return op.formula is not None and torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad


def _launch(plan: Any, x: Tensor, op: Reduction, how: tuple[Any, ...], gradients: Any) -> Tensor:
    if op.formula is None:
        return plan(x)
    return differentiable(Reduce, x, plan, op, how, gradients)


class Reduce(KernelFunction):
    """A sum or mean, whose gradient is a view of the result's; a norm, whose gradient reads x; or an extremum by a plan that
    saves what its gradient needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Any, op: Reduction, how: tuple[Any, ...], gradients: Any) -> Tensor:
        ctx.plan, ctx.op, ctx.how, ctx.gradients, ctx.shape, ctx.dtype = plan, op, how, gradients, x.shape, x.dtype
        out: Tensor
        if isinstance(plan, SavingPlan):
            out, saved = plan.save(x)
            ctx.save_for_backward(*saved)
            return out
        out = plan(x)
        formula = op.formula and op.formula(how[2])
        if formula and formula.gradient is not None:
            ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        op, (dim, keepdim, order) = ctx.op, ctx.how
        if isinstance(ctx.plan, SavingPlan):
            gradient = ctx.plan.differentiable if torch.is_grad_enabled() else ctx.plan.gradient
            return gradient(dy, *ctx.saved_tensors), None, None, None, None
        if not ctx.saved_tensors:
            return _broadcast(dy, ctx.shape, ctx.dtype, dim, keepdim, op.mean), None, None, None, None
        x, y = ctx.saved_tensors
        if dim is not None and result_strides(dy, dim % x.ndim, keepdim) is None:
            dy = dy.contiguous()  # it has one element a result, and autograd brings gradients of any strides
        plan = None if torch.is_grad_enabled() else ctx.gradients.of((x, dy), op, dim, keepdim, order)
        if plan is None:
            with torch.set_grad_enabled(True):
                dx = reference_gradients(lambda x: op.reference(x, dim, keepdim, order), (x,), (True,), (dy,))[0]
        else:
            dx = torch.empty_like(x)
            plan(x, y, dy, dx)
        return dx, None, None, None, None


def _broadcast(dy: Tensor, shape: torch.Size, dtype: torch.dtype, dim: int | None, keepdim: bool, mean: bool) -> Tensor:
    """The gradient of a sum is that of its result at every element: a view, so nothing of x's size is written."""
    if mean:
        dy = dy / (shape.numel() if dim is None else shape[dim])
    if dim is not None and not keepdim:
        dy = dy.unsqueeze(dim)
    return dy.to(dtype).expand(shape)


def _choose(
    op: Reduction, direction: str, x: Tensor, dim: Any, keepdim: bool, order: float, dtype: torch.dtype | None = None
) -> Choice:
    x, dim = merged(op, x, dim, keepdim)
    if direction == "forward":
        return FORWARD.choose(x, op, dim, keepdim, order, _into(op, x, dtype), _wants_gradient(op, x))
    call = ReductionCall(x, op, dim, keepdim, order)
    return BACKWARD.choose(x, torch.empty(call.shape, dtype=x.dtype, device="meta"), op, dim, keepdim, order)


def without_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``(x, dim, keepdim, order)`` as one of the arguments of all operators but ``norm``."""
    return lambda x, dim=None, keepdim=False, **dtype: function(x, dim, keepdim, 0.0, **dtype)


def implement(op: Reduction, operator: Operator, call: Callable[..., Any] = without_order) -> None:
    """Registers the implementations of an operator and how it chooses. ``call`` makes of a function of ``(x, dim, keepdim,
    order)`` one of the operator's arguments."""

    def choice(*args: Any, direction: str = "forward", **named: Any) -> Choice:
        return call(lambda *how, **dtype: _choose(op, direction, *how, **dtype))(*args, **named)

    formula = op.formula and op.formula(2.0)
    saves = formula is not None and formula.extremum
    names = ("triton", "cuda", "triton-mask", "cuda-mask") if saves else ("triton", "cuda")
    operator.choice(guarded(choice))
    for name in names:
        backend = name.removesuffix("-mask")
        devices = ("cuda",) if backend == "cuda" else ("cuda", "cpu")
        directions = ("forward",) if saves and name == backend else ()
        declared: dict[str, Any] = {"arch": ">=sm_80", "devices": devices, "directions": directions}
        operator.implementation(name, backend=backend, **declared)(call(_by_kernel(op, name)))
    peers.register(operator, call(op.reference))


# ---- the definition --------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [M, N], or [M, N, K] with the option ``inner``; ``dim=all`` reduces everything."""
    shape = (w["M"], w["N"], w.option("inner")) if w.option("inner") else (w["M"], w["N"])
    dim = None if w.option("dim") == "all" else w.option("dim", -1)
    if dim is not None:
        check_dim("the workload", dim, len(shape))
    layout, values = w.option("layout", "contiguous"), w.option("values", "normal")
    x = random_tensor(g, shape, w.dtype, device, layout=layout, values=VALUES[0] if values == "ties" else values)
    if values == "ties" and device != "meta":
        x.copy_(x.mul(2).round().clamp(-2, 2))  # few distinct values
    return {"x": x, "dim": dim, "keepdim": w.option("keepdim", False)}


def results_of(w: Workload) -> int:
    shape = [w["M"], w["N"], w.option("inner", 1)]
    if w.option("dim") == "all":
        return 1
    dim = w.option("dim", -1) % (3 if w.option("inner") else 2)
    return shape[0] * shape[1] * shape[2] // max(shape[dim], 1)


def define(
    op: Reduction, tolerance: Any, *, reference: Callable[..., Tensor] | None = None, flops: int = 1,
    tuned: bool = False, wrong: Sequence[Mutant] = (), gradient_wrong: Sequence[Mutant] = (),
    more: Sequence[Workload] = (), options: dict[str, Sequence[Any]] | None = None,
    make_inputs: Callable[..., dict[str, Any]] = inputs,
) -> dict[str, Any]:  # fmt: skip
    """The fields of an ``Operator`` over [M, N]: ``reference`` where the arguments are not ``(x, dim, keepdim)``, ``flops`` of
    an element, ``more`` workloads to verify."""
    reference = reference or op.reference
    formula = op.formula and op.formula(2.0)
    saves_mask = formula is not None and formula.extremum
    backward = saves_mask or (formula is not None and formula.gradient is not None)  # of a sum it is a view of dy
    ties = saves_mask or formula is None  # data with few distinct values

    def cost(w: Workload, direction: str) -> Cost:
        n = w["M"] * w["N"] * w.option("inner", 1)
        size, result = n * w.bytes_per_element, results_of(w) * (8 if formula is None else w.bytes_per_element)
        if direction == "forward":
            return Cost(reads=size, writes=result, vector_flops=flops * n)
        # forward must save a bit of each element that equals the result; of a row of more than 32 elements an index would do
        mask = (min(n, 32 * results_of(w)) + 7) // 8
        reads = mask + result if saves_mask else size + 2 * result
        return Cost(reads=reads, writes=size, vector_flops=(flops + 1) * n)

    each = ("fp32", "bf16")
    return {
        "name": op.name,
        "axes": {"M": "rows", "N": "columns"},
        "inputs": make_inputs,
        "reference": reference,
        "cost": cost,
        "directions": ("forward", "backward") if backward else ("forward",),
        "differentiable": ("x",) if backward else (),
        "options": {
            "layout": LAYOUTS,
            "values": (*VALUES, "ties"),
            "dim": ("all", *range(-3, 3)),
            "inner": range(1, 2**31),
            "keepdim": (True, False),
            **(options or {}),
        },
        "tolerance": tolerance,
        "workloads": {
            "verify": [
                *(workload(M=m, N=n) for m, n in ((1, 1), (3, 5), (37, 2), (21, 7), (5, 100), (2, 1025))),
                *(workload(M=m, N=n, dim="all") for m, n in ((1, 7), (9, 129))),
                *(workload(M=m, N=n, dim=0) for m, n in ((5, 3), (70, 21), (700, 3))),
                *(workload(M=3, N=n, inner=k, dim=1) for n, k in ((2, 9), (40, 5), (6, 1))),
                workload(M=4, N=3, inner=5, dim=0, keepdim=True),
                workload(M=9, N=8),
                workload(M=9, N=48, keepdim=True),
                workload(M=0, N=7),
                *([workload(M=7, N=0)] if op.empty else []),
                *(workload(M=9, N=33, layout=at) for at in LAYOUTS[1:]),
                *(workload(M=9, N=33, layout=at, dim="all") for at in ("sliced", "transposed")),
                workload(M=9, N=33, layout="transposed", dim=0),
                workload(M=9, N=33, layout="sliced", dim=0),
                workload(M=200, N=11, values="nonfinite"),
                workload(M=6, N=6, values="large"),
                *([workload(M=9, N=40, values="ties"), workload(M=30, N=9, dim=0, values="ties")] if ties else []),
                *more,
            ],
            "full": [
                workload(M=1, N=70001, dim="all"),
                workload(M=3000, N=40, dim=0),
                *(workload(M=3, N=n) for n in (4095, 5000, 5001, 16390)),
            ],
            "ladder": [workload("fp32", M=1, N=LARGE, dim="all")],
            "bench": [
                workload(M=1, N=LARGE, dim="all"),
                *(workload(M=LARGE // n, N=n) for n in (256, 4096, 65536)),
                workload(M=2**14, N=2**14, dim=0),
                *(workload(M=2**27, N=n) for n in range(2, 9)),
                *(workload(M=2**15, N=n, inner=2**12, dim=1) for n in (2, 3, 4, 8)),
            ],
            "quick": [workload(M=1, N=2**22, dim="all"), workload(M=2**10, N=2**12)],
            "sizes": [workload(M=1, N=n, dim="all") for n in (2**12, 2**16, 2**20)],
            "compile": [
                workload(M=1, N=2**24, dim="all"),
                *(workload(M=2**12, N=n) for n in (3, 8, 1000, 2**14)),
                workload(M=2**10, N=2**10, dim=0),
                workload(M=64, N=4, inner=2**12, dim=1),
            ],
            "tune": [
                *(workload(d, M=LARGE // n, N=n) for d in each for n in (64, 256, 1024, 4096, 16384)),
                *(workload(d, M=1, N=LARGE, dim="all") for d in each),
                *(workload(d, M=n, N=LARGE // n, dim=0) for d in each for n in (64, 1024, 2**14, 2**16)),
                *(workload(d, M=2**26, N=n) for d in each for n in range(2, 9)),
                *(workload(d, M=2**14, N=n, inner=2**12, dim=1) for d in each for n in range(2, 9)),
            ]
            if tuned
            else [],
            "huge": [workload("bf16", M=1, N=2**31 + 17, dim="all"), workload("bf16", M=2**30 + 3, N=2)],
        },
        "mutants": [
            *mutants.usual(reference),
            *wrong,
            *(mutants.usual(mutants.gradient_of(reference, "x"), "backward") if backward else []),
            *gradient_wrong,
        ],
    }


def terms(w: Workload) -> int:
    """How many elements a thread adds one after the other."""
    along = w["M"] * w["N"] if w.option("dim") == "all" else max(w["M"], w["N"])
    return min(along, 256)


def size_of_terms(x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """The size that the rounding of a sum is relative to: terms may cancel, their squares do not."""
    return torch.linalg.vector_norm(x, 2.0, dim, keepdim)


SUMS = Tolerance(
    scale=lambda arguments, _: [size_of_terms(arguments["x"], arguments["dim"], arguments["keepdim"])], terms=terms
)


# ---- mutants of gradients with ties ------------------------------------------------------------------------------------


def every_tie(reference: Callable[..., Tensor]) -> Callable[..., Any]:
    """Wrong on purpose: each element that equals the result gets the whole gradient."""

    def gradient(dy: Tensor, x: Tensor, **how: Any) -> tuple[Tensor, ...]:
        (shares,) = mutants.gradient_of(reference, "x")(torch.ones_like(dy), x=x, **how)
        spread = dy if how["dim"] is None or how["keepdim"] else dy.unsqueeze(how["dim"])
        return ((shares.sign() * spread).to(x.dtype),)

    return gradient


def one_tie(reference: Callable[..., Tensor]) -> Callable[..., Any]:
    """Wrong on purpose: the first of equal elements gets the whole gradient."""

    def gradient(dy: Tensor, x: Tensor, *, dim: int | None, keepdim: bool) -> tuple[Tensor, ...]:
        out = torch.zeros_like(x)
        if not x.numel():
            return (out,)
        best = reference(x, dim, True)
        if dim is None:
            out.view(-1)[(x == best).flatten().byte().argmax()] = dy.flatten()[0]
            return (out,)
        at = (x == best).byte().argmax(dim, keepdim=True)
        return (out.scatter(dim, at, dy if keepdim else dy.unsqueeze(dim)),)

    return gradient
