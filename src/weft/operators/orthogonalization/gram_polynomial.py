"""``gram_polynomial(a, alpha, beta)``: alpha·A + beta·A·A of symmetric matrices, computing each distinct element once.

The middle product of a quintic Newton–Schulz step, with A = X·Xᵀ: M²·(M + 1) operations where PyTorch's ``addmm`` does 2·M³.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, cast_for_products, eager, guarded, on_gpu
from weft.operators.orthogonalization.dispatch import POLYNOMIAL
from weft.operators.random_inputs import random_tensor

# ---- PyTorch operators -----------------------------------------------------------------------------------------------


@torch.library.triton_op("weft::gram_polynomial", mutates_args=())
def gram_polynomial_op(a: Tensor, alpha: float, beta: float) -> Tensor:
    if not on_gpu(a):
        return reference(a, alpha, beta)
    return POLYNOMIAL.kernel("triton").of((a,), alpha, beta)(a)


@torch.library.custom_op("weft::gram_polynomial_hopper", mutates_args=())
def hopper_op(a: Tensor, alpha: float, beta: float) -> Tensor:
    return POLYNOMIAL.kernel("cuda").of((a,), alpha, beta)(a)


@hopper_op.register_fake
def _(a: Tensor, alpha: float, beta: float) -> Tensor:
    return a.new_empty(a.shape)


def _save(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    a, ctx.alpha, ctx.beta = inputs
    ctx.save_for_backward(a)


def _backward(ctx: Any, dp: Tensor) -> tuple[Tensor, None, None]:
    (a,) = ctx.saved_tensors
    return ctx.alpha * dp + ctx.beta * (dp @ a.mT + a.mT @ dp), None, None


gram_polynomial_op.register_autograd(_backward, setup_context=_save)
hopper_op.register_autograd(_backward, setup_context=_save)

# ---- implementations -------------------------------------------------------------------------------------------------


def reference(a: Tensor, alpha: float, beta: float) -> Tensor:
    """PyTorch's product with the addition in its epilogue."""
    if a.ndim == 2:
        return torch.addmm(a, a, a, beta=alpha, alpha=beta)
    wide = a.flatten(0, -3)
    return torch.baddbmm(wide, wide, wide, beta=alpha, alpha=beta).view(a.shape)


def kernel(name: str) -> Callable[..., Tensor]:
    op = {"triton": gram_polynomial_op, "cuda": hopper_op}[name]

    def implementation(a: Tensor, alpha: float, beta: float) -> Tensor:
        plan = POLYNOMIAL.kernel(name).of((a,), alpha, beta)  # declines what the kernel does not support
        out: Tensor = plan(a) if eager(a) else op(a, float(alpha), float(beta))
        return out

    return implementation


def quack(a: Tensor, alpha: float, beta: float) -> Tensor:
    from quack.gemm_interface import gemm_symmetric

    if a.ndim > 3:
        raise Declined("QuACK's symmetric GEMM takes one batch dimension")
    out: Tensor = gemm_symmetric(a, a, a, alpha=beta, beta=alpha)
    return out


# ---- definition ------------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "unaligned", "sliced", "strided", "transposed")  # a matrix of equal rows is not symmetric
VALUES = ("normal", "nonfinite")


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """a [B, M, M] symmetric, or [M, M] where B is 1; the coefficients are those of the classic Newton–Schulz step."""
    shape = (w["M"], w["M"]) if w["B"] == 1 else (w["B"], w["M"], w["M"])
    layout, values = w.option("layout", "contiguous"), w.option("values", "normal")
    a = random_tensor(g, shape, w.dtype, device, layout=layout, values=values)
    a.copy_(a.tril() + a.tril(-1).mT)
    return {"a": a, "alpha": -4.7750, "beta": 2.0315}


def cost(w: Workload, direction: str) -> Cost:
    """Half of A says all of it; every element of the result is written. A multiply and an add for each term of each distinct
    element."""
    b, m, size = w["B"], w["M"], w.bytes_per_element
    distinct = b * m * (m + 1) // 2
    return Cost(distinct * size, b * m * m * size, {w.dtype: 2.0 * distinct * m})


def _epilogue_left_out(a: Tensor, alpha: float, beta: float) -> Tensor:
    return reference(a, 0.0, beta)


def _coefficients_exchanged(a: Tensor, alpha: float, beta: float) -> Tensor:
    return reference(a, beta, alpha)


def _mirror_not_written(a: Tensor, alpha: float, beta: float) -> Tensor:
    return reference(a, alpha, beta).tril()


def _identity_added(a: Tensor, alpha: float, beta: float) -> Tensor:
    return alpha * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) + beta * (a @ a)


BENCH = (*(workload("bf16", B=1, M=m) for m in (2048, 4096, 8192)), workload("bf16", B=16, M=2048))

gram_polynomial = Operator(
    name="gram_polynomial",
    axes={"B": "matrices", "M": "rows and columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"layout": LAYOUTS, "values": VALUES},
    tolerance=Tolerance(scale="tensor", terms=lambda w: w["M"]),
    workloads={
        "verify": [
            *(workload(B=1, M=m) for m in (1, 16, 33, 70, 100)),
            *(workload(B=3, M=m) for m in (5, 40)),
            *(workload(B=b, M=m) for b, m in ((1, 0), (0, 3))),
            *(workload(B=1, M=40, layout=at) for at in LAYOUTS[1:]),
            workload(B=2, M=33, layout="sliced"),
            workload(B=1, M=20, values="nonfinite"),
        ],
        "full": [workload(B=2, M=200), workload(B=1, M=256)],
        "huge": [workload("bf16", B=520, M=2048)],
        "bench": BENCH,
        "quick": [workload("bf16", B=1, M=4096)],
        "host": [workload(B=1, M=64)],
        "compile": [workload("bf16", B=1, M=4096), workload("fp16", B=4, M=500), workload("fp32", B=1, M=2048)],
        "tune": BENCH,
        "model": [workload("bf16", B=32, M=4096)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("epilogue left out", _epilogue_left_out),
        Mutant("coefficients exchanged", _coefficients_exchanged),
        Mutant("mirror not written", _mirror_not_written),
        Mutant("alpha on the diagonal alone", _identity_added),
    ],
)

gram_polynomial.implementation("triton", arch=">=sm_80")(kernel("triton"))
gram_polynomial.implementation("cuda", arch="==sm_90", dtypes=("bf16", "fp16"), devices=("cuda",))(kernel("cuda"))
gram_polynomial.implementation("torch")(reference)
gram_polynomial.implementation("torch.compile", devices=("cuda",))(peers.Compiled(reference))
gram_polynomial.implementation("quack", requires="quack-kernels", devices=("cuda",), dtypes=("bf16", "fp16"))(quack)

# ---- what users call -------------------------------------------------------------------------------------------------


@gram_polynomial.choice
@guarded
def choose(a: Tensor, alpha: float, beta: float) -> Choice:
    return POLYNOMIAL.choose(a, alpha, beta)


@gram_polynomial.function
def gram_polynomial_function(a: Tensor, alpha: float, beta: float) -> Tensor:
    """The polynomial alpha·A + beta·A·A of symmetric matrices, such as Gram matrices.

    Args:
        a: [..., M, M], symmetric (not checked: of others, what lies below the result's diagonal stands above it too);
            float32, float16 or bfloat16, any strides.
        alpha: coefficient of A.
        beta: coefficient of A·A.

    Returns:
        [..., M, M] of a's dtype, computed in fp32 and rounded once, symmetric to the bit (where leading dimensions have no
        common stride, PyTorch's product is called, which need not be). fp32 products follow
        ``torch.get_float32_matmul_precision()``. Under autocast a is cast as by ``torch.addmm``.

    Raises:
        TypeError: not a tensor of those dtypes, coefficients that are no numbers.
        ValueError: not a square matrix or a batch of them.

    The gradient is that of alpha·A + beta·A·A, by PyTorch's products.
    """
    if eager(a):
        plan = POLYNOMIAL.of((a,), alpha, beta)
        return reference(a, float(alpha), float(beta)) if plan is None else plan(a)
    chosen = choose(a, alpha, beta).implementation
    if chosen == "torch":
        return reference(a, float(alpha), float(beta))
    (a,) = cast_for_products(a)
    out: Tensor = (hopper_op if chosen == "cuda" else gram_polynomial_op)(a, float(alpha), float(beta))
    return out
