"""``batched_matmul(a, b)``: products of many pairs of matrices, batch dimensions broadcast, in bf16, fp16 or fp32.

2·B·M·N·K operations; an operand that is broadcast is read once. A batch that lies as the rows of one matrix, with one b for
all, is one product of two matrices (theory, folding: README.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Operator, Tolerance
from weft.operators import peers
from weft.operators.call import Choice, cast_for_products, check_same, check_tensor, eager, guarded, on_gpu, traced
from weft.operators.launch import Plans, target_sm
from weft.operators.matmul import batched_hopper, batched_kernels
from weft.operators.matmul.batched_definition import MUTANTS, OPTIONS, WORKLOADS, cost, inputs, reference, terms
from weft.operators.matmul.batched_views import batch_of, differentiably, forms, result_shape
from weft.operators.matmul.kernels import PRECISIONS
from weft.operators.matmul.matmul import AtPrecision, default_precision, hopper_op, matmul_op

# ---- PyTorch operators: of as many batch dimensions each, which broadcast -------------------------------------------


@torch.library.triton_op("weft::batched_matmul", mutates_args=())
def batched_op(a: Tensor, b: Tensor, precision: str, wide: bool = False) -> Tensor:
    """With ``wide``, in fp32."""
    if not on_gpu(a):
        return torch.matmul(a, b).to(_dtype(a, wide))
    return _launched(batched_kernels.plans, a, b, precision, wide=wide)


@torch.library.custom_op("weft::batched_matmul_hopper", mutates_args=())
def batched_hopper_op(a: Tensor, b: Tensor, wide: bool = False) -> Tensor:
    return _launched(batched_hopper.plans, a, b, wide=wide)


@batched_hopper_op.register_fake
def _(a: Tensor, b: Tensor, wide: bool = False) -> Tensor:
    return a.new_empty(result_shape(a, b), dtype=_dtype(a, wide))


def _dtype(a: Tensor, wide: bool) -> torch.dtype:
    return torch.float32 if wide else a.dtype


def _launched(plans: Plans, a: Tensor, b: Tensor, *options: str, wide: bool = False) -> Tensor:
    c = torch.empty(result_shape(a, b), dtype=_dtype(a, wide), device=a.device)
    if c.numel():
        plans.of((a, b), *options, *([c.dtype] if wide else []))(a, b, c)
    return c


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, *ctx.options, ctx.wide = inputs
    ctx.save_for_backward(a, b)


def _gradients(ctx: Any, dc: Tensor, multiply: Callable[[Tensor, Tensor, bool], Tensor]) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    dc = dc.to(a.dtype)
    da = _summed(multiply, dc, b.mT, a) if ctx.needs_input_grad[0] else None
    db = _summed(multiply, a.mT, dc, b) if ctx.needs_input_grad[1] else None
    return da, db, *(None for _ in ctx.options), None


def _summed(multiply: Callable[[Tensor, Tensor, bool], Tensor], a: Tensor, b: Tensor, of: Tensor) -> Tensor:
    """The gradient of an operand: a·b, over the batch dimensions that this operand has broadcast added up in fp32, so that it
    is rounded once."""
    batch = batch_of(a, b)
    shared = [i for i, (ours, all) in enumerate(zip(of.shape[:-2], batch, strict=True)) if ours != all]
    return multiply(a, b, True).sum(shared, keepdim=True).to(of.dtype) if shared else multiply(a, b, False)


def _backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
    return _gradients(ctx, dc, lambda a, b, wide: torch.ops.weft.batched_matmul(a, b, *ctx.options, wide))


def _hopper_backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
    return _gradients(ctx, dc, _hopper_or_cublas)


def _hopper_or_cublas(a: Tensor, b: Tensor, wide: bool) -> Tensor:
    """The same kernel where TMA takes the layout: a gradient of odd sizes, or an expanded one, goes to cuBLAS."""
    if batched_hopper.why_not(a, b, _dtype(a, wide)):
        return torch.matmul(a, b).to(_dtype(a, wide))
    return batched_hopper_op(a, b, wide)


batched_op.register_autograd(_backward, setup_context=_save)
batched_hopper_op.register_autograd(_hopper_backward, setup_context=_save)

# ---- implementations -------------------------------------------------------------------------------------------------


def batched_matmul_triton(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    precision = precision or default_precision()
    if eager(a, b):
        return _launched(batched_kernels.plans, a, b, precision)
    if reason := batched_kernels.why_not(a, b):
        raise Declined(reason)
    return differentiably(a, b, lambda x, y: matmul_op(x, y, precision), lambda x, y: batched_op(x, y, precision))


def batched_matmul_hopper(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    if reason := batched_hopper.why_not(a, b):
        raise Declined(reason)
    if eager(a, b):
        return _launched(batched_hopper.plans, a, b)
    return differentiably(a, b, hopper_op, batched_hopper_op)


def cublas(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    if a.dtype != torch.float32 or precision in (None, default_precision()):
        return torch.matmul(a, b)
    if precision == "tf32x3":
        raise Declined("PyTorch has no 3×tf32 product")
    out: Tensor = AtPrecision.apply(a, b, precision)
    return out


def quack(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    from quack.gemm_interface import gemm

    if a.dtype == torch.float32:
        raise Declined("QuACK's GEMM takes 16-bit operands")
    shape, (a, b) = result_shape(a, b), forms(a, b)
    if a.ndim > 3 or (a.ndim == 3 and not (a.stride(0) and b.stride(0))):
        raise Declined("QuACK's GEMM takes [B, M, K] and [B, K, N], with a matrix of each for every product")
    return gemm(a, b, tuned=False).view(shape)


batched_matmul = Operator(
    name="batched_matmul",
    axes={"B": "products", "M": "rows of a", "N": "columns of b", "K": "columns of a, rows of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options=OPTIONS,
    differentiable=("a", "b"),
    tolerance={
        "forward": Tolerance(scale="tensor", terms=lambda w: max(w["M"], w["N"], w["K"])),
        "backward": Tolerance(scale="tensor", terms=terms),
    },
    workloads=WORKLOADS,
    mutants=MUTANTS,
)

batched_matmul.implementation("triton", arch=">=sm_80")(batched_matmul_triton)
batched_matmul.implementation("cuda", arch="==sm_90", dtypes=("bf16", "fp16"), devices=("cuda",))(batched_matmul_hopper)
batched_matmul.implementation("torch")(cublas)
batched_matmul.implementation("torch.compile", devices=("cuda",))(peers.Compiled(reference))
batched_matmul.implementation("quack", requires="quack-kernels", devices=("cuda",), dtypes=("bf16", "fp16"))(quack)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(a: Tensor, b: Tensor, precision: str | None, name: str = "batched_matmul") -> None:
    check_tensor(name, "a", a)
    check_tensor(name, "b", b)
    check_same(name, "b", b, "a", a)
    for argument, t in (("a", a), ("b", b)):
        if t.ndim < 2:
            raise ValueError(
                f"{name}: argument '{argument}' has shape {tuple(t.shape)}; expected a matrix or a batch of them "
                "(two dimensions or more)"
            )
    shapes = f"'a' has shape {tuple(a.shape)} and 'b' {tuple(b.shape)}"
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


def chosen(a: Tensor, b: Tensor, precision: str | None) -> Choice:
    """For arguments that have been checked."""
    if not on_gpu(a):
        return Choice("torch", "the tensors are on the CPU, where weft runs PyTorch's product in full precision")
    if 0 in result_shape(a, b):
        return Choice("torch", "empty: nothing to launch")
    if precision == "tf32x3" and a.dtype == torch.float32:
        return Choice("triton", "PyTorch has no 3×tf32 product", batched_kernels.plans)
    if a.dtype != torch.float32 and target_sm(a.device) == 90:
        if traced(a, b):
            return Choice("torch", "traced: PyTorch's own product, which a compiler sees")
        if batched_kernels.many_small(a, b):
            return Choice("triton", "many small matrices: a program each", batched_kernels.plans)
        if reason := batched_hopper.why_not(a, b) or batched_hopper.slower(a, b):
            return Choice("torch", reason)
        return Choice("cuda", "TMA, wgmma and warps that only fetch, all matrices in one launch", batched_hopper.plans)
    return Choice("torch", "cuBLAS: no kernel of ours has been measured to be faster here (README of the operator)")


@batched_matmul.choice
@guarded
def choose(a: Tensor, b: Tensor, precision: str | None = None) -> Choice:
    return checked(a, b, precision, "batched_matmul")[2]


def checked(a: Tensor, b: Tensor, precision: str | None, name: str) -> tuple[Tensor, Tensor, Choice]:
    """Both as autocast casts them, and what takes them."""
    a, b = cast_for_products(a, b)
    check(a, b, precision, name)
    return a, b, chosen(a, b, precision)


def _public_plan(a: Tensor, b: Tensor, precision: str | None, name: str) -> Any:
    """The plan and the shape of the result, or None where there is nothing of ours to launch."""
    check(a, b, precision, name)
    choice = chosen(a, b, precision)
    if choice.plans is None:
        return None
    options = [precision or default_precision()] if choice.implementation == "triton" else []
    return choice.plan_for(a, b, *options), result_shape(a, b)


public_plans = Plans(_public_plan)


def product(a: Tensor, b: Tensor, precision: str | None, name: str) -> Tensor:
    """What the public functions of this name run."""
    if eager(a, b) and (known := public_plans.of((a, b), precision, name)) is not None:
        plan, shape = known
        c = torch.empty(shape, dtype=a.dtype, device=a.device)
        plan(a, b, c)
        return c
    a, b, choice = checked(a, b, precision, name)
    if choice.implementation == "torch":
        return cublas(a, b, precision) if a.is_cuda and precision != "tf32x3" else reference(a, b)
    return (batched_matmul_hopper if choice.implementation == "cuda" else batched_matmul_triton)(a, b, precision)


@batched_matmul.function
def batched_matmul_function(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    """Products of the matrices in the last two dimensions; the dimensions before them broadcast, as ``torch.matmul``'s do.

    Args:
        a: [..., M, K]; float32, float16 or bfloat16, any strides (of an expanded dimension, 0).
        b: [..., K, N], of a's dtype and device.
        precision: of fp32 products: ``ieee``, ``tf32`` or ``tf32x3``; None follows
            ``torch.get_float32_matmul_precision()``. Without meaning for 16-bit inputs.

    Returns:
        [..., M, N] of a's dtype, accumulated in fp32. Under autocast both inputs are cast as ``torch.matmul`` does.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: fewer than two dimensions; inner dimensions or devices that differ; batch dimensions that do not
            broadcast; an unknown precision.
        Declined: of ``tf32x3``, more than three batch dimensions whose strides do not let them be merged.
    """
    return product(a, b, precision, "batched_matmul")
