"""Operators whose results at one place depend on the inputs at that place alone: kernels, plans and the call, for all of them.

Such an operator gives its *formula*, a Triton function of fp32 values, and one for its gradient; a kernel takes the
formula as a compile-time constant. Everything is computed in fp32 and rounded once. While a compiler traces, PyTorch's own
operators stand in, so that they are fused with their neighbours: an opaque kernel would cost a trip through memory there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Operator
from weft.operators import peers
from weft.operators.call import (
    Choice,
    KernelFunction,
    check_same,
    check_tensor,
    dense,
    differentiable,
    eager,
    guarded,
    on_gpu,
    overlapping,
    reference_gradients,
    rows_of,
    traced,
    views,
)
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import Plan, Plans

# ---- kernels: [M, N] views of any two strides; dense tensors are one row ---------------------------------------------


@triton.jit
def place(N, BLOCK: tl.constexpr):
    """This program's row, and its BLOCK columns. In int64: tensors may hold more than 2**31 elements."""
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    return row, (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def read(ptr, row, col, row_stride, col_stride, N):
    at = ptr + row * row_stride + col * col_stride
    return tl.load(at, mask=col < N, eviction_policy="evict_last").to(tl.float32)  # the hint: softmax/README.md


@triton.jit
def write(ptr, row, col, row_stride, col_stride, N, value):
    tl.store(ptr + row * row_stride + col * col_stride, value.to(ptr.dtype.element_ty), mask=col < N)


@triton.jit
def map_one(a_ptr, out_ptr, N, a_row, a_col, out_row, out_col, F: tl.constexpr, BLOCK: tl.constexpr):
    """out = F(a, PRECISE); PRECISE says that the result keeps all of fp32."""
    row, col = place(N, BLOCK)
    PRECISE: tl.constexpr = out_ptr.dtype.element_ty == tl.float32
    a = read(a_ptr, row, col, a_row, a_col, N)
    write(out_ptr, row, col, out_row, out_col, N, F(a, PRECISE))


@triton.jit
def map_two(
    a_ptr, b_ptr, out_ptr, N, a_row, a_col, b_row, b_col, out_row, out_col, F: tl.constexpr, BLOCK: tl.constexpr
):
    """out = F(a, b, PRECISE)"""
    row, col = place(N, BLOCK)
    PRECISE: tl.constexpr = out_ptr.dtype.element_ty == tl.float32
    a = read(a_ptr, row, col, a_row, a_col, N)
    b = read(b_ptr, row, col, b_row, b_col, N)
    write(out_ptr, row, col, out_row, out_col, N, F(a, b, PRECISE))


@triton.jit
def map_three(
    a_ptr, b_ptr, c_ptr, out_ptr, other_ptr, N, a_row, a_col, b_row, b_col, c_row, c_col, out_row, out_col,
    other_row, other_col, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out, other = F(a, b, c, PRECISE)"""
    row, col = place(N, BLOCK)
    PRECISE: tl.constexpr = out_ptr.dtype.element_ty == tl.float32
    a = read(a_ptr, row, col, a_row, a_col, N)
    b = read(b_ptr, row, col, b_row, b_col, N)
    c = read(c_ptr, row, col, c_row, c_col, N)
    out, other = F(a, b, c, PRECISE)
    write(out_ptr, row, col, out_row, out_col, N, out)
    write(other_ptr, row, col, other_row, other_col, N, other)


KERNELS = {1: map_one, 2: map_two, 3: map_three}  # by the number of inputs

# ---- plans -----------------------------------------------------------------------------------------------------------


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    return {"BLOCK": 1024, "num_warps": 4}


def heavy_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """More elements a thread: what a program does once is shared among them."""
    return {"BLOCK": 2048, "num_warps": 4}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = grid_of({"BLOCK": (512, 1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)})
    return [c for c in every if 4 <= c["BLOCK"] // (32 * c["num_warps"]) <= 64]


SMALL, LARGE = 2**20, 2**26  # elements between which configurations depend on the size
CONFIGURATIONS = {  # by the number of inputs, and whether arithmetic weighs as much as memory
    (1, False): Configurations(__file__, "map_one", heuristic, candidates),
    (2, False): Configurations(__file__, "map_two", heuristic, candidates),
    (3, False): Configurations(__file__, "map_three", heuristic, candidates),
    (1, True): Configurations(__file__, "heavy_one", heavy_heuristic, candidates),
    (2, True): Configurations(__file__, "heavy_two", heavy_heuristic, candidates),
    (3, True): Configurations(__file__, "heavy_three", heavy_heuristic, candidates),
}


def plan(formula: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], heavy: bool = False) -> Plan:
    """The launch of a formula over inputs and outputs of one shape.

    Raises:
        Declined: strides that do not collapse into rows, for which a copy would be needed.
    """
    rows, n, strides = laid_out(*inputs, *outputs)
    config = configuration(len(inputs), inputs[0], n, heavy)
    tile = {"F": formula, "BLOCK": config["BLOCK"]}
    grid = (rows * triton.cdiv(n, config["BLOCK"]),)
    return Plan(KERNELS[len(inputs)], grid, (n, *strides), tile, config["num_warps"])


def laid_out(*tensors: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Tensors of one shape as rows: ``(rows, columns, two strides of each)``; dense ones in one order are one row.

    Raises:
        Declined: strides that do not collapse into rows.
    """
    first = tensors[0]
    if dense(first) and all(t.stride() == first.stride() for t in tensors):
        return 1, first.numel(), (0, 1) * len(tensors)
    found = views(*tensors)
    return *found[0][:2], tuple(stride for view in found for stride in view[2:])


def configuration(inputs: int, x: Tensor, columns: int, heavy: bool = False) -> Config:
    """The measured one for so many inputs like x, with a BLOCK no longer than rows need."""
    config = CONFIGURATIONS[inputs, heavy](x.device, x.dtype, min(max(bucket(x.numel()), SMALL), LARGE))
    return {**config, "BLOCK": min(config["BLOCK"], bucket(columns, 128))}


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


# ---- the operator ----------------------------------------------------------------------------------------------------


class Pointwise:
    """One operator's kernels and call.

    Args:
        name: the operator's.
        arguments: names of its tensors (one or two).
        forward: Triton function ``(a, [b,] PRECISE) -> result``.
        backward: Triton function ``(a, [b,] gradient, PRECISE) -> gradient of a, [of b]``; None where gradients are the
            result's own (a sum).
        reference: the same in PyTorch; its autograd serves where a gradient of the gradient is wanted.
        heavy: whether its arithmetic takes about as long as its bytes.
        function: an autograd function of ``(*tensors, inplace)`` that does something better than to save its inputs.
    """

    def __init__(
        self,
        name: str,
        arguments: tuple[str, ...],
        forward: Any,
        backward: Any,
        reference: Callable[..., Tensor],
        *,
        heavy: bool = False,
        function: type[torch.autograd.Function] | None = None,
    ):
        self.name, self.arguments, self.reference = name, arguments, reference
        self.forward, self.backward = forward, backward
        self.forward_plans = Plans(lambda *x: plan(self.forward, x, (like(x[0]),), heavy))
        self.inplace_plans = Plans(lambda *x: plan(self.forward, x, (x[0],), heavy))
        self.backward_plans = Plans(lambda *x: plan(self.backward, x, tuple(like(x[0]) for _ in arguments), heavy))
        self.public_plans = Plans(lambda *x: self.choose(*x).plan_for(*x))
        self.saves_inputs = function is None
        self.function = function or _autograd(self)

    def check(self, *x: Tensor) -> None:
        """Raises TypeError or ValueError unless these are floating tensors of one shape, dtype and device."""
        for name, value in zip(self.arguments, x, strict=True):
            check_tensor(self.name, name, value)
            check_same(self.name, name, value, self.arguments[0], x[0])
            if value.shape != x[0].shape:
                raise ValueError(
                    f"{self.name}: argument '{name}' has shape {tuple(value.shape)} and '{self.arguments[0]}' has "
                    f"{tuple(x[0].shape)}; expected the same shape"
                )

    def choose(self, *x: Tensor, inplace: bool = False) -> Choice:
        self.check(*x)
        if not on_gpu(x[0]):
            return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
        if traced(*x):
            return Choice("torch", "traced: PyTorch's own operators, which a compiler fuses with their neighbours")
        if not x[0].numel():
            return Choice("torch", "empty tensors: nothing to launch")
        if inplace and overlapping(x[0]):
            return Choice("torch", "places that share memory, over which PyTorch writes nothing and says so")
        every = x if inplace else (*x, like(x[0]))
        if not (dense(x[0]) and all(t.stride() == x[0].stride() for t in every)) and None in map(rows_of, every):
            return Choice("torch", "strides that do not collapse into rows, for which a copy would be needed")
        return Choice("triton", "dense or row-strided tensors", self.forward_plans)

    def triton(self, **named: Tensor) -> Tensor:
        """Our kernel, whatever :meth:`choose` says (on CPU tensors the reference)."""
        x = [named[a] for a in self.arguments]
        out: Tensor = differentiable(self.function, *x, False) if on_gpu(x[0]) else self.reference(*x)
        return out

    def __call__(self, *x: Tensor, inplace: bool = False) -> Tensor:
        """What the public function does."""
        if not inplace and eager(*x, gradient=True, autocast=True) and (ready := self.public_plans.of(x)) is not None:
            if torch.is_grad_enabled() and any(t.requires_grad for t in x):
                return self.function.apply(*x, False)
            out = torch.empty_like(x[0])
            ready(*x, out)
            return out
        if not isinstance(inplace, bool):
            raise TypeError(f"{self.name}: argument 'inplace' is {inplace!r:.40}; expected True or False")
        chosen = self.choose(*x, inplace=inplace)
        if inplace and torch.is_grad_enabled() and x[0].requires_grad:
            leaf = any(t is not None and t.requires_grad and t.is_leaf for t in (x[0], x[0]._base))
            if self.saves_inputs or leaf:
                why = (
                    "which the gradient needs"
                    if self.saves_inputs
                    else "a leaf (or a view of one) that wants a gradient"
                )
                raise ValueError(
                    f"{self.name}: inplace=True overwrites '{self.arguments[0]}', {why}; expected inplace=False, or a "
                    "tensor that wants no gradient"
                )
        if chosen.implementation == "torch":
            return x[0].copy_(self.reference(*x)) if inplace else self.reference(*x)
        result: Tensor = differentiable(self.function, *x, inplace)
        return result

    def implement(self, operator: Operator, torch_function: Callable[..., Tensor] | None = None) -> None:
        """Registers the kernel, what a user writes in PyTorch (the reference, if not given) and ``torch.compile`` of it as
        the operator's implementations, and how it chooses."""
        implement(operator, self, torch_function or self.reference)


def implement(operator: Operator, ours: Pointwise | Variants, torch_function: Callable[..., Tensor]) -> None:
    operator.choice(guarded(ours.choose))
    operator.implementation("triton", arch=">=sm_80")(ours.triton)
    operator.implementation("torch")(torch_function)
    operator.implementation("torch.compile", devices=("cuda",))(peers.Compiled(torch_function))


class Variants:
    """An operator of which one option picks the formula.

    Args:
        name, arguments, reference, heavy: as :class:`Pointwise`; the reference takes the option too.
        option: its name.
        formulas: of each value of the option, the forward and the backward formula; the first value is the default.
    """

    def __init__(
        self,
        name: str,
        arguments: tuple[str, ...],
        option: str,
        formulas: dict[str, tuple[Any, Any]],
        reference: Callable[..., Tensor],
        *,
        heavy: bool = False,
    ):
        self.name, self.option, self.reference = name, option, reference
        self.known = {
            value: Pointwise(name, arguments, *pair, functools.partial(reference, **{option: value}), heavy=heavy)
            for value, pair in formulas.items()
        }
        self.default = next(iter(formulas))

    def of(self, value: Any) -> Pointwise:
        """Raises ValueError for a value that the option does not have."""
        found = self.known.get(value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(
                f"{self.name}: argument '{self.option}' is {value!r:.40}; expected {' or '.join(map(repr, self.known))}"
            )
        return found

    def __call__(self, *x: Tensor, choice: str, inplace: bool = False) -> Tensor:
        return self.of(choice)(*x, inplace=inplace)

    def triton(self, **named: Any) -> Tensor:
        return self.of(named.pop(self.option, self.default)).triton(**named)

    def choose(self, *call: Any, inplace: bool = False) -> Choice:
        *x, value = call if isinstance(call[-1], str) else (*call, self.default)
        return self.of(value).choose(*x, inplace=inplace)

    def implement(self, operator: Operator, torch_function: Callable[..., Tensor] | None = None) -> None:
        implement(operator, self, torch_function or self.reference)


def _autograd(op: Pointwise) -> type[torch.autograd.Function]:
    inputs = len(op.arguments)

    class Function(KernelFunction):
        @staticmethod
        def forward(ctx: Any, *call: Any) -> Tensor:
            x, inplace = call[:inputs], call[inputs]
            out: Tensor = x[0] if inplace else torch.empty_like(x[0])
            if out.numel():
                (op.inplace_plans if inplace else op.forward_plans).of(x)(*x, out)
            if inplace:
                ctx.mark_dirty(out)
            if op.backward is not None:
                ctx.save_for_backward(*x)
            return out

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            if op.backward is None:
                return (*(dy,) * inputs, None)
            saved = ctx.saved_tensors
            if torch.is_grad_enabled():
                return (*reference_gradients(op.reference, saved, ctx.needs_input_grad[:inputs], (dy,)), None)
            gradients = tuple(torch.empty_like(saved[0]) for _ in saved)
            if dy.numel():
                if dy.stride() != saved[0].stride() and None in (rows_of(dy), rows_of(saved[0])):
                    dy = torch.empty_like(saved[0]).copy_(
                        dy
                    )  # autograd may bring one of any strides (expanded, permuted)
                op.backward_plans.of((*saved, dy))(*saved, dy, *gradients)
            return (*gradients, None)

    return Function
