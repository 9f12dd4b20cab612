"""``spmm(matrix, b)``: a sparse matrix times a dense one.

2·K operations for each stored element, whose gather of a row of b is K·s bytes: compulsory reads are few (b once), but a row
of b is read as often as its column is named, out of whatever cache holds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import BYTES, Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants
from weft.operators.call import Choice, cast_for_products, check_same, check_tensor, guarded
from weft.operators.random_inputs import random_tensor
from weft.operators.sparse import spmv
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.dispatch import SPMM, SPMM_KERNELS
from weft.operators.sparse.gradient import Product
from weft.operators.sparse.pattern import rows_of_elements
from weft.operators.sparse.random_matrices import OPTIONS, distinct, random_csr, stored


def reference(matrix: CSR, b: Tensor) -> Tensor:
    """Products and sums in fp32 or wider; 64 columns at a time, since every product of a stored element is written out."""
    wide = torch.promote_types(matrix.values.dtype, torch.float32)
    values, columns = matrix.values.to(wide)[:, None], matrix.columns.long()
    rows = rows_of_elements(matrix.row_offsets, matrix.stored)

    def product(part: Tensor) -> Tensor:
        out = torch.zeros((matrix.shape[0], part.shape[1]), dtype=wide, device=b.device)
        return out.index_add(0, rows, values * part.to(wide)[columns])

    return torch.cat([product(part) for part in b.split(64, 1)], 1).to(b.dtype)


def torch_spmm(matrix: CSR, b: Tensor) -> Tensor:
    """cuSPARSE on a GPU, through a ``sparse_csr`` tensor of the same memory."""
    if not matrix.stored or not b.numel() or (not b.is_cuda and b.dtype != torch.float32):
        return reference(matrix, b)  # PyTorch's sparse product on a CPU has no 16-bit kernel
    if b.is_cuda and matrix.stored > matrix.shape[0] * matrix.shape[1]:
        raise Declined("cuSPARSE takes no more elements than the matrix has places")
    return torch.mm(spmv.sparse_tensor(matrix), b)


# ---- autograd --------------------------------------------------------------------------------------------------------


def launch(matrix: CSR, b: Tensor, kernel: str) -> Tensor:
    """A·B by a kernel of ``SPMM_KERNELS``."""
    shape = (matrix.shape[0], b.shape[1])
    if not matrix.stored or not b.shape[1]:
        return b.new_zeros(shape)
    y = b.new_empty(shape)
    SPMM_KERNELS[kernel](matrix, b, y)
    return y


product = Product(launch, reference)


# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """A matrix with M·R elements and b [N, K]."""
    b = random_tensor(g, (w["N"], w["K"]), w.dtype, device, layout=w.option("layout", "contiguous"))
    return {"matrix": random_csr(w, g, device), "b": b}


def cost(w: Workload, direction: str) -> Cost:
    """The rows of b are read where an element needs them, once."""
    m, n, k, z = w["M"], w["N"], w["K"], stored(w)
    index, size = BYTES[w.option("indices", "int32")], w.bytes_per_element
    matrix = z * (size + index) + (m + 1) * index
    if direction == "backward":
        m, n = n, m
    return Cost(reads=matrix + distinct(n, z) * k * size, writes=m * k * size, vector_flops=2 * z * k + 1)


def forward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """How large a row's terms are: sums of random signs cancel."""
    return [reference(spmv.squares(arguments["matrix"]), arguments["b"].square()).sqrt()]


def backward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    return [reference(spmv.squares(arguments["matrix"]).transposed(), gradients[0].square()).sqrt()]


def _gradient(dy: Tensor, matrix: CSR, b: Tensor) -> tuple[Tensor]:
    return (reference(matrix.transposed(), dy),)


def _first_columns_only(matrix: CSR, b: Tensor) -> Tensor:
    """Columns past the first block repeat it."""
    y = reference(matrix, b)
    return y[:, torch.arange(y.shape[1], device=y.device) % 8]


def _split_rows_lose_a_part(matrix: CSR, b: Tensor) -> Tensor:
    return reference(spmv.without_first_part(matrix), b)


def _values_unpermuted(dy: Tensor, matrix: CSR, b: Tensor) -> tuple[Tensor]:
    """The transposed pattern with the values in their old order."""
    return (reference(matrix.transposed().with_values(matrix.values), dy),)


TIMED = tuple(workload(M=2**18, N=2**18, R=16, K=k, rows=rows) for k in (32, 128, 512) for rows in ("even", "skewed"))

spmm = Operator(
    name="spmm",
    axes={"M": "rows", "N": "columns", "R": "stored elements in a row, in the mean", "K": "columns of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options={
        **OPTIONS,
        "layout": ("contiguous", "unaligned", "sliced", "strided", "transposed"),
        "values": ("normal", "nonfinite"),
    },
    differentiable=("b",),
    tolerance={
        "forward": Tolerance(scale=forward_scale, ulps=2.0, terms=lambda w: 32),
        "backward": Tolerance(scale=backward_scale, ulps=2.0, terms=lambda w: 32),
    },
    workloads={
        "verify": [
            workload(M=7, N=9, R=3, K=4),
            workload(M=12, N=10, R=3, K=33),
            workload(M=1, N=1, R=1, K=1),
            workload(M=5, N=1, R=2, K=16),
            workload(M=0, N=5, R=3, K=4),
            workload(M=5, N=0, R=3, K=4),
            workload(M=5, N=6, R=3, K=0),
            workload(M=6, N=4, R=0, K=4),
            workload(M=40, N=9, R=1, K=9, rows="skewed"),
            workload(M=12, N=20, R=4, K=1, rows="skewed"),
            workload(M=4, N=10, R=6, K=130, rows="even"),
            workload(M=16, N=12, R=6, K=17, rows="skewed"),
            workload(M=8, N=12, R=20, K=8, rows="one"),
            workload(M=8, N=10, R=5, K=8, columns="few", indices="int64"),
            *(workload(M=7, N=9, R=3, K=20, layout=at) for at in ("unaligned", "sliced", "strided", "transposed")),
            workload(M=8, N=12, R=4, K=8, values="nonfinite"),
        ],
        "full": [workload(M=2**14, N=2**14, R=16, K=100, rows=rows) for rows in ("even", "skewed", "one")],
        "huge": [workload("bf16", M=2**20, N=2**10, R=2, K=2**11 + 8)],
        "bench": [w.at("fp32") for w in TIMED],
        "quick": [workload("fp32", M=2**16, N=2**16, R=16, K=128, rows=rows) for rows in ("even", "skewed")],
        "host": [workload("fp32", M=64, N=64, R=16, K=32)],
        "compile": [
            workload(M=1000, N=1000, R=16, K=100),
            workload(M=1000, N=1000, R=16, K=512, indices="int64"),
            workload(M=1000, N=1000, R=1, K=8, layout="transposed"),
        ],
        "tune": [*(w.at(t) for t in ("fp32", "bf16") for w in TIMED)],
        "model": [workload("bf16", M=14336, N=4096, R=410, K=64)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("columns of the first block repeat", _first_columns_only),
        Mutant("split rows lose a part", _split_rows_lose_a_part),
        Mutant("row of b off by one", lambda matrix, b: reference(matrix, b.roll(1, 0))),
        *mutants.usual(_gradient, "backward"),
        Mutant("values in their old order", _values_unpermuted, "backward"),
    ],
)


@spmm.implementation("row_split", backend="triton", arch=">=sm_80")
def row_split(matrix: CSR, b: Tensor) -> Tensor:
    return product(matrix, b, "row_split")


@spmm.implementation("merge", backend="triton", arch=">=sm_80")
def merge(matrix: CSR, b: Tensor) -> Tensor:
    return product(matrix, b, "merge")


spmm.implementation("torch")(torch_spmm)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(matrix: CSR, b: Tensor) -> None:
    if not isinstance(matrix, CSR):
        raise TypeError(
            f"spmm: argument 'matrix' is a {type(matrix).__name__}; expected a weft.operators.sparse.CSR "
            "(CSR.from_torch, CSR.from_scipy)"
        )
    check_tensor("spmm", "matrix.values", matrix.values)
    check_tensor("spmm", "b", b)
    check_same("spmm", "b", b, "matrix.values", matrix.values)
    if b.ndim != 2 or b.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"spmm: argument 'b' has shape {tuple(b.shape)}; expected ({matrix.shape[1]}, K), as many rows as the matrix has "
            "columns"
        )


@spmm.choice
@guarded
def choose(matrix: CSR, b: Tensor, *, direction: str = "forward") -> Choice:
    check(matrix, b)
    return spmv.with_statistics(SPMM.choose(matrix, b), matrix, direction)


@spmm.function
def spmm_function(matrix: CSR, b: Tensor) -> Tensor:
    """A sparse matrix times a dense one.

    Args:
        matrix: [M, N]; values in float32, float16 or bfloat16.
        b: [N, K], of the values' dtype and device, any strides.

    Returns:
        [M, K] of b's dtype, contiguous; summed in fp32 in a fixed order and rounded once: the same bits every time. Under
        autocast, values and b are cast as ``torch.mm`` casts them.

    Raises:
        TypeError: not a :class:`CSR`, dtypes that differ or are not these.
        ValueError: a b that is no matrix of N rows, or on another device.

    The first call with a matrix computes its row statistics, which waits for the device; later calls wait for nothing.
    Gradients: of b by the transposed matrix, whose pattern is kept; of the values by dot products of rows of dy and b (SDDMM).

    Merge-based parts: Yang, Buluç & Owens, "Design principles for sparse matrix multiplication on the GPU", Euro-Par 2018.
    """
    choice = choose(matrix, b)
    values, b = cast_for_products(matrix.values, b)
    if values is not matrix.values:
        matrix = matrix.with_values(values)
    if choice.implementation == "torch":
        return reference(matrix, b)
    return product(matrix, b, choice.implementation)
