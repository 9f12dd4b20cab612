"""``sparse_2_4_matmul(a, b)``: a 2:4 semi-structured matrix times a dense one.

Half of a dense product's operations; half of A's bytes, and 2 more for each 16 columns. The Triton kernel unpacks A in
registers and multiplies densely: it saves A's bytes, not operations, and runs anywhere. On Hopper ``sparse_hopper.cu``
saves both.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants
from weft.operators.call import Choice, cast_for_products, check_same, check_tensor, guarded
from weft.operators.matmul.dispatch import default_precision
from weft.operators.random_inputs import random_tensor
from weft.operators.sparse.dispatch import SPARSE_2_4_MATMUL
from weft.operators.sparse.semi_structured import CODES, Sparse24

# ---- implementations -------------------------------------------------------------------------------------------------


def reference(a: Sparse24, b: Tensor) -> Tensor:
    """As a dense product, in fp32 or wider."""
    wide = torch.promote_types(b.dtype, torch.float32)
    return (a.to_dense().to(wide) @ b.to(wide)).to(b.dtype)


def unpacking(a: Sparse24, b: Tensor) -> Tensor:
    c = b.new_empty((a.shape[0], b.shape[1]))
    if c.numel():
        SPARSE_2_4_MATMUL.kernel("triton").of((a.values, a.metadata, b), default_precision())(
            a.values, a.metadata, b, c
        )
    return c


def sparse_tensor_cores(a: Sparse24, b: Tensor) -> Tensor:
    """On Hopper's sparse tensor cores; it says in words what it does not take."""
    plan = SPARSE_2_4_MATMUL.kernel("cuda").of((a.values, a.metadata, b), "ieee")
    c = b.new_empty((a.shape[0], b.shape[1]))
    plan(a.values, a.metadata, b, c)
    return c


_theirs: weakref.WeakKeyDictionary[Sparse24, Any] = weakref.WeakKeyDictionary()


def torch_semi_structured(a: Sparse24, b: Tensor) -> Tensor:
    """``torch.sparse.to_sparse_semi_structured`` (cuSPARSELt, or CUTLASS without it), converted once a matrix."""
    if not b.is_cuda:
        return reference(a, b)
    (m, k), n = a.shape, b.shape[1]
    if b.dtype == torch.float32 or m % 32 or k % 64 or n % 8 or not m * k * n:
        raise Declined(
            "PyTorch's semi-structured product takes 16-bit matrices of multiples of 32 × 64 and 8 columns of b"
        )
    if a not in _theirs:
        _theirs[a] = torch.sparse.to_sparse_semi_structured(a.to_dense())
    return torch.mm(_theirs[a], b)


def dense(a: Sparse24, b: Tensor) -> Tensor:
    """The dense product of the same matrix, unpacked at every call."""
    return torch.mm(a.to_dense(), b)


# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """A random 2:4 matrix [M, K] and b [K, N]."""
    m, k = w["M"], w["K"]
    values = random_tensor(g, (m, k // 2), w.dtype, device)
    b = random_tensor(g, (k, w["N"]), w.dtype, device, layout=w.option("layout", "contiguous"))
    if device == "meta":
        return {"a": Sparse24(values, torch.empty((m, k // 16), dtype=torch.int16, device=device), (m, k)), "b": b}
    at = g.device if g is not None else device
    drawn = torch.randint(0, len(CODES), (m, k // 16, 4), generator=g, device=at).to(device)
    codes = torch.tensor(CODES, device=device)[drawn]
    words = (codes << torch.arange(0, 16, 4, device=device)).sum(-1)
    metadata = torch.where(words < 2**15, words, words - 2**16).to(torch.int16)
    return {"a": Sparse24(values, metadata, (m, k), check=False), "b": b}


def cost(w: Workload, direction: str) -> Cost:
    """Products with stored elements only."""
    m, n, k, size = w["M"], w["N"], w["K"], w.bytes_per_element
    reads = m * (k // 2) * size + m * (k // 16) * 2 + k * n * size
    return Cost(reads, m * n * size, {w.dtype: float(m * n * k)}, vector_flops=1)


def _changed(values: Any = None, metadata: Any = None) -> Any:
    """The product with some of the matrix replaced."""

    def wrong(a: Sparse24, b: Tensor) -> Tensor:
        v = a.values if values is None else values(a.values)
        at = a.metadata if metadata is None else metadata(a.metadata)
        return reference(Sparse24(v.contiguous(), at.contiguous(), a.shape, check=False), b)

    return wrong


TIMED = (
    workload("bf16", M=8192, N=8192, K=8192),
    workload("bf16", M=4096, N=4096, K=4096),
    workload("bf16", M=8192, N=64, K=8192),
)

sparse_2_4_matmul = Operator(
    name="sparse_2_4_matmul",
    axes={"M": "rows of a", "N": "columns of b", "K": "columns of a, rows of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"layout": ("contiguous", "unaligned", "sliced", "strided", "transposed")},
    tolerance=Tolerance(scale="tensor", terms=lambda w: max(w["K"], 32)),
    workloads={
        "verify": [
            *(
                workload(M=m, N=n, K=k)
                for m, n, k in ((1, 1, 16), (16, 16, 32), (33, 40, 80), (64, 33, 64), (7, 5, 272))
            ),
            *(workload(M=m, N=n, K=k) for m, n, k in ((0, 4, 16), (4, 0, 16), (5, 4, 0))),
            *(workload(M=20, N=24, K=48, layout=at) for at in ("unaligned", "sliced", "strided", "transposed")),
            *(workload(M=m, N=n, K=k) for m, n, k in ((150, 72, 256), (1, 8, 128))),
            *(workload(M=70, N=40, K=128, layout=at) for at in ("sliced", "transposed")),
        ],
        "full": [workload(M=256, N=256, K=512)],
        "bench": TIMED,
        "quick": TIMED[1:2],
        "host": [workload("fp32", M=64, N=64, K=64)],
        "compile": [
            workload(M=1024, N=1024, K=1024),
            workload(M=64, N=64, K=1040, layout="transposed"),
            workload("bf16", M=4096, N=4096, K=4096, layout="transposed"),
        ],
        "tune": TIMED,
    },
    mutants=[
        *mutants.usual(reference),
        Mutant(
            "values of each pair swapped", _changed(values=lambda v: v.reshape(len(v), -1, 2).flip(2).reshape(v.shape))
        ),
        Mutant("always the first two", _changed(metadata=lambda t: torch.full_like(t, 0x4444))),
        Mutant("bytes of the metadata swapped", _changed(metadata=lambda t: (t << 8) | ((t >> 8) & 255))),
        Mutant("metadata of the next row", _changed(metadata=lambda t: t.roll(1, 0) if len(t) > 1 else t * 0 + 0x4444)),
    ],
)

sparse_2_4_matmul.implementation("triton", arch=">=sm_80")(unpacking)
sparse_2_4_matmul.implementation("cuda", arch="==sm_90", dtypes=("bf16", "fp16"), devices=("cuda",))(
    sparse_tensor_cores
)
sparse_2_4_matmul.implementation("torch")(torch_semi_structured)
sparse_2_4_matmul.implementation("torch dense")(dense)

# ---- what users call -------------------------------------------------------------------------------------------------

PRODUCTS = {"torch": reference, "torch dense": dense, "triton": unpacking, "cuda": sparse_tensor_cores}


def check(a: Sparse24, b: Tensor) -> None:
    if not isinstance(a, Sparse24):
        raise TypeError(
            f"sparse_2_4_matmul: argument 'a' is a {type(a).__name__}; expected a weft.operators.sparse.Sparse24 "
            "(Sparse24.from_dense)"
        )
    check_tensor("sparse_2_4_matmul", "a.values", a.values)
    check_tensor("sparse_2_4_matmul", "b", b)
    check_same("sparse_2_4_matmul", "b", b, "a.values", a.values)
    if b.ndim != 2 or b.shape[0] != a.shape[1]:
        raise ValueError(
            f"sparse_2_4_matmul: argument 'b' has shape {tuple(b.shape)}; expected ({a.shape[1]}, N), as many rows as 'a' has "
            "columns"
        )
    if torch.is_grad_enabled() and (b.requires_grad or a.values.requires_grad):
        raise NotImplementedError("sparse_2_4_matmul: it has no gradients; expected a call under torch.no_grad()")


@sparse_2_4_matmul.choice
@guarded
def choose(a: Sparse24, b: Tensor) -> Choice:
    check(a, b)
    return SPARSE_2_4_MATMUL.choose(a.values, a.metadata, b, "ieee")


@sparse_2_4_matmul.function
def sparse_2_4_matmul_function(a: Sparse24, b: Tensor) -> Tensor:
    """A 2:4 semi-structured matrix times a dense one.

    Args:
        a: [M, K]; values in float32, float16 or bfloat16.
        b: [K, N], of the values' dtype and device, any strides.

    Returns:
        [M, N] of b's dtype, contiguous, summed in fp32: the same bits every time. Where sparse tensor cores do not take it
        (they do 16-bit floats on sm_90, K a multiple of 128 and N of 8), of more than 128 columns it is a dense product, of a
        matrix [M, K] that is made at every call. float32 is multiplied as ``torch.get_float32_matmul_precision()`` says. Under
        autocast, values and b are cast as ``torch.mm`` casts them.

    Raises:
        TypeError: not a :class:`Sparse24`, dtypes that differ or are not these.
        ValueError: a b that is no matrix of K rows, or on another device.
        NotImplementedError: a gradient is wanted.
    """
    check(a, b)
    values, b = cast_for_products(a.values, b)
    if values is not a.values:
        a = Sparse24(values, a.metadata, a.shape, check=False)
    return PRODUCTS[choose(a, b).implementation](a, b)
