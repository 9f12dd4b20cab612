"""``spmv(matrix, x)``: a sparse matrix times a vector.

2 operations for each stored element, of which a value and a column index are read: 0.25 FLOP per byte in fp32, so bandwidth is
the limit; of the device's memory for the stored elements, of the L2 cache for x, whose every use is a gather of 32 bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from weft.definition import BYTES, Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants
from weft.operators.call import Choice, cast_for_products, check_same, check_tensor, guarded
from weft.operators.random_inputs import random_tensor
from weft.operators.sparse.balance import statistics
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.dispatch import SPMV, SPMV_KERNELS, spmv_sell
from weft.operators.sparse.gradient import Product
from weft.operators.sparse.pattern import rows_of_elements
from weft.operators.sparse.random_matrices import OPTIONS, distinct, random_csr, stored
from weft.operators.sparse.sell import SELL


def reference(matrix: CSR, x: Tensor) -> Tensor:
    """Products and sums in fp32 or wider."""
    wide = torch.promote_types(matrix.values.dtype, torch.float32)
    products = matrix.values.to(wide) * x.to(wide)[matrix.columns.long()]
    rows = rows_of_elements(matrix.row_offsets, matrix.stored)
    return torch.zeros(matrix.shape[0], dtype=wide, device=x.device).index_add(0, rows, products).to(x.dtype)


def torch_spmv(matrix: CSR, x: Tensor) -> Tensor:
    """cuSPARSE on a GPU, through a ``sparse_csr`` tensor of the same memory."""
    if not matrix.stored or (not x.is_cuda and x.dtype != torch.float32):
        return reference(matrix, x)  # PyTorch's sparse product on a CPU has no 16-bit kernel
    if x.is_cuda and matrix.stored > matrix.shape[0] * matrix.shape[1]:
        raise Declined("cuSPARSE takes no more elements than the matrix has places")
    return torch.mv(sparse_tensor(matrix), x)


def sparse_tensor(matrix: CSR) -> Tensor:
    """The matrix as PyTorch's, made once for its values: a user would have it so."""
    if matrix.values.requires_grad:
        return matrix.to_torch()
    made = matrix.kept("torch", dict)
    if made.get("values") is not matrix.values:
        made.update(values=matrix.values, tensor=matrix.to_torch())
    tensor: Tensor = made["tensor"]
    return tensor


# ---- autograd --------------------------------------------------------------------------------------------------------


def launch(matrix: CSR, x: Tensor, kernel: str) -> Tensor:
    """A·x by a kernel of ``SPMV_KERNELS``."""
    if not matrix.stored:
        return x.new_zeros(matrix.shape[0])
    y = x.new_empty(matrix.shape[0])
    SPMV_KERNELS[kernel](matrix, x, y)
    return y


product = Product(launch, reference)


# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """A matrix with M·R elements and x [N]."""
    x = random_tensor(g, (w["N"],), w.dtype, device, layout=w.option("layout", "contiguous"))
    return {"matrix": random_csr(w, g, device), "x": x}


def cost(w: Workload, direction: str) -> Cost:
    """The vector read is read where an element needs it."""
    m, n, z = w["M"], w["N"], stored(w)
    index, size = BYTES[w.option("indices", "int32")], w.bytes_per_element
    matrix = z * (size + index) + (m + 1) * index
    if direction == "forward":
        return Cost(reads=matrix + distinct(n, z) * size, writes=m * size, vector_flops=2 * z + 1)
    return Cost(reads=matrix + distinct(m, z) * size, writes=n * size, vector_flops=2 * z + 1)


def squares(matrix: CSR) -> CSR:
    return matrix.with_values(matrix.values.square())


def forward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """How large a row's terms are: sums of random signs cancel."""
    return [reference(squares(arguments["matrix"]), arguments["x"].square()).sqrt()]


def backward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    return [reference(squares(arguments["matrix"]).transposed(), gradients[0].square()).sqrt()]


def _gradient(dy: Tensor, matrix: CSR, x: Tensor) -> tuple[Tensor]:
    return (reference(matrix.transposed(), dy),)


def _last_of_each_row_left_out(matrix: CSR, x: Tensor) -> Tensor:
    last = matrix.row_offsets[1:][matrix.row_offsets.diff() > 0].long() - 1
    return reference(matrix.with_values(matrix.values.index_fill(0, last, 0)), x)


def _duplicates_overwrite(matrix: CSR, x: Tensor) -> Tensor:
    at = (rows_of_elements(matrix.row_offsets, matrix.stored), matrix.columns.long())
    dense = torch.zeros(matrix.shape, device=x.device).index_put(at, matrix.values.float())
    return (dense @ x.float()).to(x.dtype)


def _rows_moved(matrix: CSR, x: Tensor) -> Tensor:
    """Empty rows are dropped, and those after them move up."""
    y = reference(matrix, x)
    there = y[matrix.row_offsets.diff() > 0]
    return torch.cat([there, y.new_zeros(len(y) - len(there))])


def without_first_part(matrix: CSR) -> CSR:
    """The first 50 elements of a longer row are another part's, and forgotten."""
    rows = rows_of_elements(matrix.row_offsets, matrix.stored)
    place = torch.arange(matrix.stored, device=rows.device) - matrix.row_offsets.long()[rows]
    lost = (place < 50) & (matrix.row_offsets.diff()[rows] > 50)
    return matrix.with_values(matrix.values.masked_fill(lost, 0))


def _values_unpermuted(dy: Tensor, matrix: CSR, x: Tensor) -> tuple[Tensor]:
    """The transposed pattern with the values in their old order."""
    return (reference(matrix.transposed().with_values(matrix.values), dy),)


TIMED = (
    workload(M=2**20, N=2**20, R=16, rows="even"),
    workload(M=2**18, N=2**18, R=128, rows="even"),
    workload(M=2**20, N=2**20, R=16, rows="skewed"),
)

spmv = Operator(
    name="spmv",
    axes={"M": "rows", "N": "columns", "R": "stored elements in a row, in the mean"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options={**OPTIONS, "layout": ("contiguous", "unaligned", "strided"), "values": ("normal", "nonfinite")},
    differentiable=("x",),
    tolerance={
        "forward": Tolerance(scale=forward_scale, ulps=2.0, terms=lambda w: 32),
        "backward": Tolerance(scale=backward_scale, ulps=2.0, terms=lambda w: 32),
    },
    workloads={
        "verify": [
            workload(M=7, N=9, R=3),
            workload(M=40, N=30, R=5),
            workload(M=1, N=1, R=1),
            workload(M=5, N=1, R=2),
            workload(M=0, N=5, R=3),
            workload(M=5, N=0, R=3),
            workload(M=6, N=4, R=0),
            workload(M=300, N=50, R=1, rows="skewed"),
            workload(M=12, N=40, R=16, rows="even"),
            workload(M=40, N=50, R=6, rows="skewed"),
            workload(M=20, N=70, R=12, rows="one"),
            workload(M=1, N=100, R=250),
            workload(M=20, N=10, R=5, columns="few"),
            workload(M=20, N=30, R=5, columns="sorted", indices="int64"),
            *(workload(M=20, N=30, R=5, layout=at) for at in ("unaligned", "strided")),
            workload(M=20, N=30, R=8, values="nonfinite"),
        ],
        "full": [workload(M=2**16, N=2**16, R=16, rows=rows) for rows in ("even", "random", "skewed", "one")],
        "huge": [workload("bf16", M=2**20, N=2**16, R=2**11 + 1, rows="even", indices="int64")],
        "bench": [w.at("fp32") for w in TIMED],
        "quick": [workload("fp32", M=2**18, N=2**18, R=16, rows=rows) for rows in ("even", "skewed")],
        "host": [workload("fp32", M=256, N=256, R=16)],
        "compile": [
            workload(M=1000, N=1000, R=16),
            workload(M=1000, N=1000, R=128, indices="int64"),
            workload(M=1000, N=1000, R=1, layout="strided"),
        ],
        "tune": [*(w.at(t) for t in ("fp32", "bf16") for w in TIMED)],
        "model": [workload("bf16", M=14336, N=4096, R=410)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("last element of each row left out", _last_of_each_row_left_out),
        Mutant("duplicates overwrite", _duplicates_overwrite),
        Mutant("empty rows dropped", _rows_moved),
        Mutant("split rows lose a part", lambda matrix, x: reference(without_first_part(matrix), x)),
        Mutant("column off by one", lambda matrix, x: reference(matrix, x.roll(1))),
        *mutants.usual(_gradient, "backward"),
        Mutant("values in their old order", _values_unpermuted, "backward"),
    ],
)


@spmv.implementation("row_split", backend="triton", arch=">=sm_80")
def row_split(matrix: CSR, x: Tensor) -> Tensor:
    return product(matrix, x, "row_split")


@spmv.implementation("merge", backend="triton", arch=">=sm_80")
def merge(matrix: CSR, x: Tensor) -> Tensor:
    return product(matrix, x, "merge")


@spmv.implementation("sell", backend="triton", arch=">=sm_80")
def sell_c_sigma(matrix: CSR, x: Tensor) -> Tensor:
    """Over slices, into which the matrix is brought once for its values: that is not in the time of later calls."""
    return product(matrix, x, "sell")


spmv.implementation("torch")(torch_spmv)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(matrix: CSR | SELL, x: Tensor) -> None:
    if not isinstance(matrix, (CSR, SELL)):
        raise TypeError(
            f"spmv: argument 'matrix' is a {type(matrix).__name__}; expected a weft.operators.sparse.CSR "
            "(CSR.from_torch, CSR.from_scipy) or SELL"
        )
    check_tensor("spmv", "matrix.values", matrix.values)
    check_tensor("spmv", "x", x)
    check_same("spmv", "x", x, "matrix.values", matrix.values)
    if x.shape != (matrix.shape[1],):
        raise ValueError(
            f"spmv: argument 'x' has shape {tuple(x.shape)}; expected ({matrix.shape[1]},), as many as the matrix has columns"
        )


def with_statistics(choice: Choice, matrix: CSR, direction: str) -> Choice:
    """The choice, with the row statistics that it was made by."""
    if choice.implementation not in ("merge", "row_split"):
        return choice
    reason = f"{choice.reason} ({statistics(matrix)})"
    if direction == "backward":
        reason = f"the transposed matrix by the kernel of forward: {reason}"
    return dataclasses.replace(choice, reason=reason)


@spmv.choice
@guarded
def choose(matrix: CSR | SELL, x: Tensor, *, direction: str = "forward") -> Choice:
    check(matrix, x)
    return with_statistics(SPMV.choose(matrix, x), matrix, direction)  # type: ignore[arg-type]  # a SELL has no statistics


@spmv.function
def spmv_function(matrix: CSR | SELL, x: Tensor) -> Tensor:
    """A sparse matrix times a vector.

    Args:
        matrix: [M, N]; values in float32, float16 or bfloat16. A SELL has no gradients.
        x: [N], of the values' dtype and device, any stride.

    Returns:
        [M] of x's dtype, each row summed in fp32 in a fixed order and rounded once: the same bits every time. Under autocast,
        values and x are cast as ``torch.mv`` casts them.

    Raises:
        TypeError: not a :class:`CSR` or :class:`SELL`, dtypes that differ or are not these.
        ValueError: an x of another length or device.
        NotImplementedError: a gradient is wanted through a SELL.

    The first call with a matrix computes its row statistics, which waits for the device; later calls wait for nothing. Make it
    before a CUDA graph is captured. Gradients: of x by the transposed matrix, whose pattern is kept; of the values.

    Merge-based parts: Merrill & Garland, "Merge-based parallel sparse matrix-vector multiplication", SC16.
    """
    choice = choose(matrix, x)
    if isinstance(matrix, SELL):
        return _sell_product(matrix, x, choice.implementation)
    values, x = cast_for_products(matrix.values, x)
    if values is not matrix.values:
        matrix = matrix.with_values(values)
    if choice.implementation == "torch":
        return reference(matrix, x)
    return product(matrix, x, choice.implementation)


def _sell_product(matrix: SELL, x: Tensor, kernel: str) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or matrix.values.requires_grad):
        raise NotImplementedError(
            "spmv: a SELL matrix has no gradients; expected a CSR, or a call under torch.no_grad()"
        )
    if kernel == "torch":
        return reference(matrix.to_csr(), x)
    y = x.new_empty(matrix.shape[0])
    spmv_sell(matrix, x, y)
    return y
