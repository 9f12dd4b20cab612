"""``gram_polynomial(a, alpha, beta)``: alpha·A + beta·A·A of symmetric matrices, computing each distinct element once."""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants
from weft.operators.call import guarded
from weft.operators.orthogonalization.calls import SymmetricProduct, implement, matrices, quack
from weft.operators.orthogonalization.dispatch import POLYNOMIAL


def reference(a: Tensor, alpha: float, beta: float) -> Tensor:
    """PyTorch's product with the addition in its epilogue."""
    if a.ndim == 2:
        return torch.addmm(a, a, a, beta=alpha, alpha=beta)
    wide = a.flatten(0, -3)
    return torch.baddbmm(wide, wide, wide, beta=alpha, alpha=beta).view(a.shape)


def gradient(dp: Tensor, a: Tensor, alpha: float, beta: float) -> Tensor:
    return alpha * dp + beta * (dp @ a.mT + a.mT @ dp)


call = SymmetricProduct("gram_polynomial", POLYNOMIAL, reference, gradient)


LAYOUTS = ("contiguous", "unaligned", "sliced", "strided", "transposed")  # a matrix of equal rows is not symmetric
VALUES = ("normal", "nonfinite")


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """a [B, M, M] symmetric, or [M, M] where B is 1; the coefficients are those of the classic Newton–Schulz step."""
    a = matrices(w, g, device, columns="M")
    a.copy_(a.tril() + a.tril(-1).mT)
    return {"a": a, "alpha": -4.7750, "beta": 2.0315}


def cost(w: Workload, direction: str) -> Cost:
    """Half of A says all of it; every element of the result is written. A multiply and an add for each term of each distinct
    element."""
    b, m, size = w["B"], w["M"], w.bytes_per_element
    distinct = b * m * (m + 1) // 2
    return Cost(distinct * size, b * m * m * size, {w.dtype: 2.0 * distinct * m})


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
            *workloads("BM", (1, 1), (1, 16), (1, 33), (1, 70), (1, 100), (3, 5), (3, 40), (1, 0), (0, 3)),
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
        Mutant("epilogue left out", lambda a, alpha, beta: reference(a, 0.0, beta)),
        Mutant("coefficients exchanged", lambda a, alpha, beta: reference(a, beta, alpha)),
        Mutant("mirror not written", lambda a, alpha, beta: reference(a, alpha, beta).tril()),
        Mutant(
            "alpha on the diagonal alone", lambda a, alpha, beta: alpha * torch.eye(a.shape[-1]).to(a) + beta * (a @ a)
        ),
    ],
)

implement(
    gram_polynomial,
    call.kernel,
    lambda a, alpha, beta: quack(a, a, a, alpha=beta, beta=alpha),
    "triton",
    "cuda",
    "strips",
)
gram_polynomial.choice(guarded(POLYNOMIAL.choose))


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
    return call(a, alpha, beta)
