"""``spmv(matrix, x)``: a sparse matrix times a vector."""

import torch
from torch import Tensor

from weft.definition import Operator, workload, workloads
from weft.operators.call import Choice, guarded
from weft.operators.sparse import products
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.pattern import rows_of_elements
from weft.operators.sparse.products import cast, check_product, define, implement, loses_a_part, product, reference
from weft.operators.sparse.sell import SELL


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


EVEN = workloads("MNR", (2**20, 2**20, 16), (2**18, 2**18, 128), rows="even")
TIMED = (*EVEN, workload(M=2**20, N=2**20, R=16, rows="skewed"))

spmv = Operator(
    **define(
        "spmv",
        "x",
        axes={},
        layouts=("contiguous", "unaligned", "strided"),
        workloads={
            "verify": [
                *workloads("MNR", (7, 9, 3), (40, 30, 5), (1, 1, 1), (5, 1, 2), (0, 5, 3), (5, 0, 3), (6, 4, 0)),
                *workloads("MNR", (300, 50, 1), (40, 50, 6), rows="skewed"),
                workload(M=12, N=40, R=16, rows="even"),
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
            "ladder": [TIMED[0].at("fp32"), TIMED[-1].at("fp32")],
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
        wrong={
            "last element of each row left out": _last_of_each_row_left_out,
            "duplicates overwrite": _duplicates_overwrite,
            "empty rows dropped": _rows_moved,
            "split rows lose a part": loses_a_part,
            "column off by one": lambda matrix, x: reference(matrix, x.roll(1)),
        },
    )
)
implement(spmv, "row_split", "merge")


@spmv.choice
@guarded
def choose(matrix: CSR | SELL, x: Tensor, *, direction: str = "forward") -> Choice:
    hint = "CSR (CSR.from_torch, CSR.from_scipy) or SELL"
    expected = "({},), as many as the matrix has columns"
    check_product("spmv", matrix, (CSR, SELL), hint, x, expected, right="x", ndim=1, gradient=True)
    return products.choice(matrix.as_csr() if isinstance(matrix, SELL) else matrix, x, direction)


@spmv.function
def spmv_function(matrix: CSR | SELL, x: Tensor) -> Tensor:
    """A sparse matrix times a vector.

    Args:
        matrix: [M, N]; values in float32, float16 or bfloat16. A SELL is brought into rows once for its values, and has no
            gradients.
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
    kernel = choose(matrix, x).implementation
    if not isinstance(matrix, SELL):
        return product(*cast(matrix, x), kernel)
    if torch.is_grad_enabled() and (x.requires_grad or matrix.values.requires_grad):
        raise NotImplementedError(
            "spmv: a SELL matrix has no gradients; expected a CSR, or a call under torch.no_grad()"
        )
    return product(matrix.as_csr(), x, kernel)
