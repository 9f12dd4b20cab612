"""Which kernel computes a product of matrices or of batches of them: the table is ``FORWARD``; gradients are products of their
own.

a [*batch, M, K], b [*batch, K, N], c [*batch, M, N]; batch dimensions broadcast.
"""

import dataclasses
import itertools
import math
import threading
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.autograd import KernelFunction, differentiable
from weft.operators.call import Choice, cast_for_products, eager, on_gpu
from weft.operators.checks import check_same, check_shape, check_tensor
from weft.operators.dispatch import EMPTY, Call, Dispatch, Route
from weft.operators.hopper import gemm, padded
from weft.operators.launch import Plans, target_sm
from weft.operators.matmul import kernels
from weft.operators.matmul.kernels import LEVELS

PRECISIONS = ("ieee", "tf32", "tf32x3")
# multiplications below which cuBLAS was ahead of our loop wherever it was measured on an H200, by up to three times where
# K is long and tiles are few
SMALL = 4e9
Launch = tuple[Any, tuple[int, ...]]  # a plan, to be called with (a, b, c), and the shape of c


def default_precision() -> str:
    """What ``torch.set_float32_matmul_precision`` says: ``ieee`` for "highest", else ``tf32``."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


# ---- batches ---------------------------------------------------------------------------------------------------------


def batch_of(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """The batch dimensions of the product. Raises RuntimeError unless they broadcast."""
    return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))


def result_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    return (*batch_of(a, b), a.shape[-2], b.shape[-1])


def as_matrices(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A vector a as a row, a vector b as a column: views."""
    return a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b


def forms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory as [*levels, M, K] and [*levels, K, N] with the fewest batch dimensions (levels): neighbours that both
    operands step through alike are merged, and the innermost becomes rows of a where b is the same for all of it.

    The elements of the product keep their order, so a contiguous result is the same memory as well. For launches, not for
    autograd: it goes by strides, also of operands that the caller expanded.
    """
    if a.ndim == b.ndim == 2:
        return a, b
    (m, k), n = a.shape[-2:], b.shape[-1]
    batch = batch_of(a, b)
    a, b = a.expand(*batch, m, k), b.expand(*batch, k, n)
    levels: list[tuple[int, int, int]] = []  # size, strides in a and in b; outermost first
    for size, step_a, step_b in zip(a.shape[:-2], a.stride(), b.stride(), strict=False):
        if size == 1:
            continue
        if levels and levels[-1][1:] == (size * step_a, size * step_b):
            levels[-1] = (levels[-1][0] * size, step_a, step_b)
        else:
            levels.append((size, step_a, step_b))
    row = a.stride(-2)
    if levels and levels[-1][2] == 0 and (m == 1 or levels[-1][1] == m * row):
        size, step, _ = levels.pop()
        m, row = m * size, step if m == 1 else row
    sizes, of_a, of_b = ([level[i] for level in levels] for i in range(3))
    return (
        a.as_strided([*sizes, m, k], [*of_a, row, a.stride(-1)]),
        b.as_strided([*sizes, k, n], [*of_b, *b.stride()[-2:]]),
    )


def rows_follow(a: Tensor, levels: int) -> bool:
    """Whether the last ``levels`` batch dimensions of a and its rows are one dimension."""
    outer = a.ndim - 2 - levels
    sizes, strides = a.shape[outer:-1], a.stride()[outer:-1]
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    return all(step == size * stride for (_, step), (size, stride) in itertools.pairwise(kept))


# ---- calls and launches ----------------------------------------------------------------------------------------------


class MatmulCall(Call):
    """A product, checked. ``name`` is the public function's; ``dtype`` that of c, a's when None. Vectors are taken as
    ``torch.matmul`` takes them, but not by ``batched_matmul``: a and b are views of them, ``shape`` is without their 1."""

    def __init__(
        self, a: Tensor, b: Tensor, precision: str | None = None, name: str = "matmul", dtype: torch.dtype | None = None
    ):
        check(name, a, b, precision)
        self.vectors = a.ndim == 1, b.ndim == 1
        a, b = as_matrices(a, b)
        self.x = self.a = a
        self.b, self.precision, self.dtype = b, precision, dtype or a.dtype
        *batch, m, n = result_shape(a, b)
        self.shape = (*batch, *(() if self.vectors[0] else (m,)), *(() if self.vectors[1] else (n,)))

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    @property
    def two_matrices(self) -> bool:
        return len(self.shape) == 2 and not any(self.vectors)

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """With as few batch dimensions as their strides allow."""
        return forms(self.a, self.b)

    @property
    def tf32x3(self) -> bool:
        return self.precision == "tf32x3" and self.a.dtype == torch.float32

    @property
    def small(self) -> bool:
        return self.a.numel() * self.b.shape[-1] < SMALL

    @property
    def on_lines(self) -> bool:
        """Whether rows of a, b and c begin on lines of 128 bytes. TMA asks for two lines for a row of a stage where they do
        not: cuBLAS was up to 1.3 times as fast as our loop, and level where they do."""
        return gemm.on_lines(self.a, self.b) and self.b.shape[-1] * self.a.element_size() % 128 == 0

    @property
    def many_small(self) -> bool:
        a, b = self.operands
        return a.ndim > 2 and math.prod(a.shape[:-2]) >= 1024 and max(*a.shape[-2:], b.shape[-1]) <= 64


def check(name: str, a: Tensor, b: Tensor, precision: str | None) -> None:
    """Raises TypeError or ValueError, naming the argument."""
    check_tensor(name, "a", a)
    check_tensor(name, "b", b)
    check_same(name, "b", b, "a", a)
    least, vector = (1, "a vector, ") if name == "matmul" else (2, "")
    for argument, t in (("a", a), ("b", b)):
        expected = f"{vector}a matrix or a batch of them ({'one dimension' if vector else 'two dimensions'} or more)"
        check_shape(name, argument, t, t.ndim >= least, expected)
    shapes = f"'a' has shape {tuple(a.shape)} and 'b' {tuple(b.shape)}"
    a, b = as_matrices(a, b)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"{name}: {shapes}; expected b with {a.shape[-1]} rows (its last dimension but one), as many as 'a' has columns"
        )
    for of_a, of_b in zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False):
        if of_a != of_b and 1 not in (of_a, of_b):
            raise ValueError(
                f"{name}: {shapes}; expected batch dimensions (all but the last two) that broadcast: counted from the last, "
                f"equal ones or 1, not {of_a} and {of_b}"
            )
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"{name}: argument 'precision' is {precision!r}; expected {', '.join(PRECISIONS)} or None")


def tiled_unsupported(c: MatmulCall) -> str:
    levels = c.operands[0].ndim - 2
    if levels > LEVELS:
        return f"{levels} batch dimensions that do not merge into {LEVELS}, so a copy would be needed"
    return ""


def tiled_launch(c: MatmulCall) -> Launch:
    return kernels.plan(*c.operands, c.precision or default_precision()), c.shape


def padded_unsupported(c: MatmulCall) -> str:
    if c.a.dtype == torch.float32 or any(c.vectors):
        return "float32, or a vector; copies are of matrices of 16-bit floats"
    return "" if c.operands[0].ndim <= 3 else "batch dimensions that do not merge into one, so that each needs a copy"


def padded_launch(c: MatmulCall) -> Launch:
    plan = (padded.LoopPlan if padded.by_loop(*c.operands) else padded.PaddedPlan)(*c.operands)
    return (lambda a, b, out: plan(*forms(a, b), out)), c.shape


def hopper_unsupported(c: MatmulCall) -> str:
    if c.sm != 90:
        return f"wgmma and TMA as it uses them are of sm_90, this is sm_{c.sm}"
    if c.a.dtype == torch.float32:
        return "float32; it takes 16-bit floats"
    if not c.two_matrices:
        return "a vector, or a batch of matrices"
    return gemm.why_not(c.a, c.b, c.dtype)


FORWARD = Dispatch(
    MatmulCall,
    Route("torch", lambda c: not c.on_gpu, "the tensors are on the CPU, where weft runs PyTorch's product in full precision"),
    EMPTY,
    Route("torch", lambda c: c.traced and not c.tf32x3, "traced: PyTorch's own product, which a compiler sees"),
    Route("torch", lambda c: not c.tf32x3 and (c.a.dtype == torch.float32 or c.sm != 90),
          "cuBLAS: no kernel of ours was measured to be faster here"),
    Route("triton", lambda c: c.tf32x3, "PyTorch has no 3×tf32 product", tiled_launch, tiled_unsupported),
    Route("triton", lambda c: c.many_small, "1024 or more small matrices: a program each, 1.4 times cuBLAS at 4096 x 64³",
          tiled_launch, tiled_unsupported),
    Route("cuda", lambda c: not c.small and c.on_lines,
          "two large matrices of 16-bit floats by TMA and wgmma: level with cuBLAS in the mean",
          lambda c: (gemm.HopperPlan(c.a, c.b), c.shape), hopper_unsupported, sm=90),
    Route("padded", lambda c: padded.pays(*c.operands) or padded.by_loop(*c.operands),
          "the main loop storing rows that begin anywhere, or cuBLAS on copies, filled up to multiples of 8",
          padded_launch, padded_unsupported),
    Route("torch", lambda c: True,
          "cuBLAS: level or ahead in batches, small products and rows that do not begin on lines, and of what TMA cannot take"),
)  # fmt: skip


def choice_of(direction: str, *arguments: Any) -> Choice:
    """The row that a call takes. Its gradient is two products more: by the same kernel, or by cuBLAS where TMA cannot take
    their operands."""
    choice = FORWARD.choose(*arguments)
    if direction == "backward" and choice.implementation != "torch":
        return dataclasses.replace(choice, reason=f"two products, as the forward call's: {choice.reason}")
    a, b, *_ = arguments
    if direction == "backward" and on_gpu(a) and _copies_pay.of((a, b)):
        return dataclasses.replace(
            choice, reason="products of copies filled up to multiples of 8 where they pay, or Hopper's main loop's"
        )
    return choice


# ---- products --------------------------------------------------------------------------------------------------------


def launched(plans: Any, a: Tensor, b: Tensor, *options: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The product by a table's plan, or PyTorch's where the table says so."""
    if (ready := plans.of((a, b), *options)) is None:
        return torch.matmul(a, b)
    plan, shape = ready
    c = torch.empty(shape, dtype=dtype or a.dtype, device=a.device)
    plan(a, b, c)
    return c


class Product(KernelFunction):
    """The product of two matrices by the table, or at a precision by PyTorch; its gradients are such products too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, precision: str | None) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.precision = precision
        return launched(FORWARD, a, b) if precision is None else _at(a, b, precision)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        both = all(ctx.needs_input_grad[:2]) and ctx.precision is None and not torch.is_grad_enabled()
        if both and a.ndim == b.ndim == 2 and _one_copy.of((dc, a, b)):
            dc = padded.fitting(dc)
        da = product(dc, b.mT, ctx.precision).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
        if b.ndim == 2:  # the sum over the batch is part of the product
            a, dc = a.flatten(0, -2), dc.flatten(0, -2)
        db = product(a.mT, dc, ctx.precision).sum_to_size(b.shape) if ctx.needs_input_grad[1] else None
        return da, db, None


def product(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    """a [M, K] times b [K, N] in eager mode, differentiable; at a precision batches too."""
    return differentiable(Product, a, b, precision)


@Plans
def _one_copy(dc: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether both gradients are Hopper's main loop's, of one copy of dc."""
    return not padded.fits(dc) and padded.by_loop(dc, b.mT) and padded.by_loop(a.mT, dc)


@Plans
def _copies_pay(a: Tensor, b: Tensor) -> bool:
    alike = min(a.ndim, b.ndim) > 1 and a.shape[:-2] == b.shape[:-2]
    if target_sm(a.device) != 90 or a.dtype not in gemm.SIXTEEN_BITS or not alike or not a.numel() * b.shape[-1]:
        return False
    dc = torch.empty(result_shape(a, b), dtype=a.dtype, device="meta")
    products = [forms(*operands) for operands in ((dc, b.mT), (a.mT, dc))]
    return any(padded.pays(*operands) or padded.by_loop(*operands) for operands in products)


def gradients_by_copies(a: Tensor, b: Tensor) -> bool:
    """Whether a gradient is wanted that copies make faster, of a product that they do not."""
    wanted = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    return wanted and eager(a, b, gradient=True, autocast=True) and bool(_copies_pay.of((a, b)))


@torch.library.triton_op("weft::matmul", mutates_args=())
def matmul_op(a: Tensor, b: Tensor, precision: str, wide: bool = False) -> Tensor:
    """The Triton kernel's product of matrices or of batches with equally many dimensions; in fp32 with ``wide``."""
    dtype = torch.float32 if wide else a.dtype
    if not on_gpu(a):
        return torch.matmul(a, b).to(dtype)
    if 0 in (shape := result_shape(a, b)):
        return torch.empty(shape, dtype=dtype, device=a.device)
    return launched(TILED, a, b, precision, "matmul", dtype, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.precision, _ = inputs
    ctx.save_for_backward(a, b)


def _gradients(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    dc = dc.to(a.dtype)

    def of(left: Tensor, right: Tensor, operand: Tensor) -> Tensor:
        """Over the batch dimensions that this operand has broadcast, added up in fp32, so that it is rounded once."""
        batch = batch_of(left, right)
        summed = [i for i, (own, all) in enumerate(zip(operand.shape[:-2], batch, strict=True)) if own != all]
        c = matmul_op(left, right, ctx.precision, bool(summed))
        return c.sum(summed, keepdim=True).to(operand.dtype) if summed else c

    da = of(dc, b.mT, a) if ctx.needs_input_grad[0] else None
    db = of(a.mT, dc, b) if ctx.needs_input_grad[1] else None
    return da, db, None, None


matmul_op.register_autograd(_gradients, setup_context=_save)
TILED = FORWARD.kernel("triton")


def by_triton(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    """The Triton kernel's product by views that autograd follows.

    Inner batch dimensions of which b has but one matrix become rows of a, where strides allow it: then the gradient of b, a sum
    over them, is part of its product. An operand that is broadcast otherwise keeps its one matrix, in as many dimensions.
    """
    precision = precision or default_precision()
    if eager(a, b) and 0 not in result_shape(a, b):
        return launched(TILED, a, b, precision)
    if reason := tiled_unsupported(MatmulCall(a, b, precision)):
        raise Declined(reason)
    batch, (m, k), n = batch_of(a, b), a.shape[-2:], b.shape[-1]
    a, b = (t[(None,) * (len(batch) + 2 - t.ndim)] for t in (a, b))
    outer, rows = len(batch), a.expand(*batch, m, k)
    while outer and b.shape[outer - 1] == 1 and rows_follow(rows, len(batch) - outer + 1):
        outer -= 1
    alone = all(size == 1 for size in batch[:outer])
    lead_a, lead_b = ((), ()) if alone else (tuple(a.shape[:outer]), tuple(b.shape[:outer]))
    a = a.expand(*a.shape[:outer], *batch[outer:], m, k).view(*lead_a, m * math.prod(batch[outer:]), k)
    b = b.view(*lead_b, k, n)
    return matmul_op(a, b, precision).view(*batch, m, n)


def by_copies(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    """The product of copies, or by Hopper's main loop with rows of the result that begin anywhere."""
    call = MatmulCall(a, b, precision)
    if reason := padded_unsupported(call) or ("" if padded.copied(*call.operands) else padded.NOTHING):
        raise Declined(reason)
    return launched(FORWARD.kernel("padded"), a, b)


# ---- PyTorch's product at a precision --------------------------------------------------------------------------------


def cublas(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    if a.dtype != torch.float32 or precision is None or precision == default_precision():
        return torch.matmul(a, b)
    if precision == "tf32x3":
        raise Declined("PyTorch has no 3×tf32 product")
    return product(a, b, precision)


_SWITCH = threading.RLock()


def _at(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """``torch.matmul`` with PyTorch's precision switch set for it."""
    if precision == "tf32" and not a.is_cuda:  # a CPU has no such mode: round the operands as the GPU does
        a, b = (
            ((t.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32) for t in (a.contiguous(), b.contiguous())
        )
    wanted = "highest" if precision == "ieee" else "high"
    with _SWITCH:  # the switch is the process's: two threads would restore each other's setting
        before = torch.get_float32_matmul_precision()
        if before == wanted:
            return torch.matmul(a, b)
        torch.set_float32_matmul_precision(wanted)
        try:
            return torch.matmul(a, b)
        finally:
            torch.set_float32_matmul_precision(before)


OF_QUACK: dict[str, Any] = {"requires": "quack-kernels", "devices": ("cuda",), "dtypes": ("bf16", "fp16")}


def quack(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    from quack.gemm_interface import gemm

    if a.dtype == torch.float32:
        raise Declined("QuACK's GEMM takes 16-bit operands")
    shape, (a, b) = result_shape(a, b), forms(a, b)
    if a.ndim > 3 or (a.ndim == 3 and not (a.stride(0) and b.stride(0))):
        raise Declined("QuACK's GEMM takes [B, M, K] and [B, K, N], with a matrix of each for every product")
    return gemm(a, b, tuned=False).view(shape)


# ---- what the public functions of both operators run -----------------------------------------------------------------


def public(a: Tensor, b: Tensor, precision: str | None, name: str, choose: Any) -> Tensor:
    if eager(a, b) and (ready := FORWARD.of((a, b), precision, name)) is not None:
        plan, shape = ready
        c = torch.empty(shape, dtype=a.dtype, device=a.device)
        plan(a, b, c)
        return c
    a, b = cast_for_products(a, b)
    chosen = choose(a, b, precision).implementation
    if 1 in (a.ndim, b.ndim) and (chosen != "torch" or precision is not None):
        c = public(*as_matrices(a, b), precision, name, choose)
        c = c.squeeze(-1) if b.ndim == 1 else c
        return c if a.ndim > 1 else c.squeeze(-1 if b.ndim == 1 else -2)
    if chosen == "triton":
        return by_triton(a, b, precision)
    if chosen in ("cuda", "padded") or gradients_by_copies(a, b):
        return product(a, b)
    return cublas(a, b, precision) if a.is_cuda else torch.matmul(a, b)
