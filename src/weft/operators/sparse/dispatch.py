"""Which kernel computes each sparse product. Gradients of ``spmv`` and ``spmm`` take the kernel of forward, by its name
(``SPMV_KERNELS``, ``SPMM_KERNELS``), with the transposed matrix: choosing afresh would wait for the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.operators.call import traced
from weft.operators.dispatch import ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.sparse import kernels, sell, sparse_hopper, spmm_kernels, spmv_kernels
from weft.operators.sparse.balance import RowStatistics, partition, statistics
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.sell import SELL

MOST_PADDING = 2.0  # lanes that row-split may occupy for each stored element
LONGEST_ROW = 16384  # elements that one group of lanes may walk: 128 steps of the widest
UNPACKED_IN_REGISTERS = (
    128  # columns of b; 64 take 0.4 times what the dense matrix does, 4096 3.6 times (docs/notes/sparse.md)
)

# ---- spmv and spmm ---------------------------------------------------------------------------------------------------


@dataclass
class MatrixCall(Call):
    """A CSR (of spmv a SELL too) times x: [N], or [N, K]."""

    matrix: CSR | SELL
    x: Tensor

    @property
    def empty(self) -> bool:
        return not len(self.matrix.values) or not self.x.shape[1:].numel()

    @property
    def traced(self) -> bool:
        return traced(self.matrix.values, self.x)

    @property
    def rows(self) -> RowStatistics:
        """Computed once for a matrix; the first call waits for the device."""
        assert isinstance(self.matrix, CSR)  # a SELL has a kernel of its own
        return statistics(self.matrix)


def spmv_row_split(matrix: CSR, x: Tensor, y: Tensor) -> None:
    tensors = (matrix.row_offsets, matrix.columns, matrix.values, x)
    spmv_kernels.row_plans.of(tensors)(*tensors, y)


def spmv_merge(matrix: CSR, x: Tensor, y: Tensor) -> None:
    cut = partition(matrix, spmv_kernels.merge_items(matrix.values))
    tensors = (matrix.row_offsets, matrix.columns, matrix.values, x, cut.rows, cut.heads, cut.runs)
    spmv_kernels.merge_plans.of(tensors)(*tensors, y)


def spmv_sell(matrix: CSR | SELL, x: Tensor, y: Tensor) -> None:
    sell.launch(matrix if isinstance(matrix, SELL) else sell.sell_of(matrix), x, y)


def spmm_row_split(matrix: CSR, b: Tensor, y: Tensor) -> None:
    """One column is a vector."""
    if b.shape[1] == 1:
        return spmv_row_split(matrix, b[:, 0], y[:, 0])
    tensors = (matrix.row_offsets, matrix.columns, matrix.values, b)
    spmm_kernels.row_plans.of(tensors)(*tensors, y)
    return None


def spmm_merge(matrix: CSR, b: Tensor, y: Tensor) -> None:
    """One column is a vector."""
    if b.shape[1] == 1:
        return spmv_merge(matrix, b[:, 0], y[:, 0])
    cut = partition(matrix, spmm_kernels.ITEMS)
    tensors = (matrix.row_offsets, matrix.columns, matrix.values, b, cut.rows, cut.runs)
    spmm_kernels.merge_plans.of(tensors)(*tensors, y)
    return None


SPMV_KERNELS = {"row_split": spmv_row_split, "merge": spmv_merge, "sell": spmv_sell}
SPMM_KERNELS = {"row_split": spmm_row_split, "merge": spmm_merge}
NOTHING = Route("torch", lambda c: c.empty, "no stored elements or no columns: nothing to launch")

SPMV = Dispatch(
    MatrixCall,
    ON_CPU,
    TRACED,
    NOTHING,
    Route("sell", lambda c: isinstance(c.matrix, SELL), "the matrix is in slices: the kernel for them",
          lambda c: spmv_sell),
    Route("merge", lambda c: c.rows.padding > MOST_PADDING, "uneven rows: equal parts of rows and elements",
          lambda c: spmv_merge),
    Route("merge", lambda c: c.rows.longest > LONGEST_ROW, "a long row: equal parts of rows and elements",
          lambda c: spmv_merge),
    Route("row_split", lambda c: True, "even rows: a group of lanes for each", lambda c: spmv_row_split),
)  # fmt: skip
SPMM = Dispatch(
    MatrixCall,
    ON_CPU,
    TRACED,
    NOTHING,
    Route("merge", lambda c: c.rows.padding > MOST_PADDING, "uneven rows: equal parts of rows and elements",
          lambda c: spmm_merge),
    Route("merge", lambda c: c.rows.longest > LONGEST_ROW, "a long row: equal parts of rows and elements",
          lambda c: spmm_merge),
    Route("row_split", lambda c: True, "even rows: a group of lanes for each", lambda c: spmm_row_split),
)  # fmt: skip

# ---- structured sparsity ---------------------------------------------------------------------------------------------

DENSE = Route("torch", lambda c: c.traced, "traced: PyTorch's own operators, of a dense matrix")


@dataclass
class PruneCall(Call):
    """A plan is called with ``(x, y)``, y contiguous."""

    x: Tensor


@dataclass
class BsrCall(Call):
    """A plan is called with ``(row_offsets, columns, values, b, y)``, y contiguous."""

    row_offsets: Tensor
    columns: Tensor
    values: Tensor
    x: Tensor
    precision: str

    @property
    def traced(self) -> bool:
        return traced(self.values, self.x)


@dataclass
class Sparse24Call(Call):
    """a [M, K] by its values and metadata, times b [K, N]. A plan is called with ``(values, metadata, b, c)``, c contiguous."""

    values: Tensor
    metadata: Tensor
    x: Tensor
    precision: str

    @property
    def traced(self) -> bool:
        return traced(self.values, self.x)

    @property
    def n(self) -> int:
        return self.x.shape[1]

    @property
    def empty(self) -> bool:
        return len(self.values) * self.n == 0


def hopper_unsupported(c: Sparse24Call) -> str:
    return sparse_hopper.why_not(c.values, c.metadata, c.x)


PRUNE_2_4 = Dispatch(
    PruneCall,
    ON_CPU,
    TRACED,
    Route("triton", lambda c: True, "groups of four as they lie, one read and one write",
          lambda c: kernels.prune_plan(c.x)),
)  # fmt: skip
BSR_MATMUL = Dispatch(
    BsrCall,
    ON_CPU,
    DENSE,
    Route("triton", lambda c: True, "stored blocks on the matrix units",
          lambda c: kernels.bsr_plan(c.row_offsets, c.columns, c.values, c.x, c.precision)),
)  # fmt: skip
SPARSE_2_4_MATMUL = Dispatch(
    Sparse24Call,
    ON_CPU,
    DENSE,
    Route("cuda", lambda c: not c.empty, "on Hopper's sparse tensor cores",
          lambda c: sparse_hopper.SparseHopperPlan(c.values, c.metadata, c.x), hopper_unsupported, sm=90),
    Route("torch dense", lambda c: c.n > UNPACKED_IN_REGISTERS,
          "unpacked to a dense matrix for a library's product, which is faster for many columns"),
    Route("triton", lambda c: True, "unpacked in registers, on any matrix units",
          lambda c: kernels.sparse_2_4_plan(c.values, c.metadata, c.x, c.precision)),
)  # fmt: skip
