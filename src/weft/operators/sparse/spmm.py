"""``spmm(matrix, b)``: a sparse matrix times a dense one."""

import torch
from torch import Tensor

from weft.definition import Operator, workload, workloads
from weft.operators.call import Choice, guarded
from weft.operators.sparse import products
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.dispatch import MatrixCall
from weft.operators.sparse.kernels import ITEMS
from weft.operators.sparse.products import cast, check_product, define, implement, loses_a_part, product, reference


def _first_columns_only(matrix: CSR, b: Tensor) -> Tensor:
    """Columns past the first block repeat it."""
    y = reference(matrix, b)
    return y[:, torch.arange(y.shape[1], device=y.device) % 8]


TIMED = tuple(workload(M=2**18, N=2**18, R=16, K=k, rows=rows) for k in (32, 128, 512) for rows in ("even", "skewed"))

spmm = Operator(
    # two sums of each part of the merge path: of the row that it leaves open, and of that which it closes
    workspace=lambda w: 2 * (w["M"] * (1 + w["R"]) // ITEMS + 1) * w["K"] * 4,
    **define(
        "spmm",
        "b",
        axes={"K": "columns of b"},
        layouts=("contiguous", "unaligned", "sliced", "strided", "transposed"),
        workloads={
            "verify": [
                *workloads("MNRK", (7, 9, 3, 4), (12, 10, 3, 33), (1, 1, 1, 1), (5, 1, 2, 16)),
                *workloads("MNRK", (0, 5, 3, 4), (5, 0, 3, 4), (5, 6, 3, 0), (6, 4, 0, 4)),
                *workloads("MNRK", (40, 9, 1, 9), (12, 20, 4, 1), (16, 12, 6, 17), rows="skewed"),
                workload(M=4, N=10, R=6, K=130, rows="even"),
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
        wrong={
            "columns of the first block repeat": _first_columns_only,
            "split rows lose a part": loses_a_part,
            "row of b off by one": lambda matrix, b: reference(matrix, b.roll(1, 0)),
        },
    ),
)
implement(spmm, "row_split", "merge")


@spmm.choice
@guarded
def choose(matrix: CSR, b: Tensor, *, direction: str = "forward") -> Choice:
    expected = "({}, K), as many rows as the matrix has columns"
    check_product("spmm", matrix, (CSR,), "CSR (CSR.from_torch, CSR.from_scipy)", b, expected, gradient=True)
    return products.choice(matrix, b, direction)


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
    kernel = choose(matrix, b).implementation
    matrix, b = cast(matrix, b)
    return product(matrix, b, kernel, MatrixCall(matrix, b).transposed(kernel))
