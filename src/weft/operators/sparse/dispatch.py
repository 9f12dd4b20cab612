"""Which kernel multiplies by a CSR matrix. Gradients take the kernel of forward, by its name (``KERNELS``), with the transposed
matrix, or ``merge`` where its rows may be long (``transposed``): choosing afresh would wait for the device."""

from dataclasses import dataclass

from torch import Tensor

from weft.operators.call import traced
from weft.operators.dispatch import ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.sparse.balance import RowStatistics, statistics
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.kernels import COLUMNS, ITEMS, by_parts, by_rows

MOST_PADDING = 2.0  # lanes that row-split may occupy for each stored element
SHORT_ROW = 128  # elements that are walked one by one, four at once, in less time than a part of 512 takes
FEW_WARPS = 2048  # about 16 on each of a large machine's multiprocessors
LONGEST_ROW = 16384  # elements that one group of lanes may walk: 128 steps of the widest

KERNELS = {"row_split": by_rows, "merge": by_parts}  # (matrix, b, y)


@dataclass
class MatrixCall(Call):
    """A CSR times x: [N], or [N, K]. A plan is called with ``(matrix, x, y)``."""

    matrix: CSR
    x: Tensor

    @property
    def empty(self) -> bool:
        return not len(self.matrix.values) or not self.x.shape[1:].numel()

    @property
    def traced(self) -> bool:
        return traced(self.matrix.values, self.x)

    @property
    def few(self) -> bool:
        """Whether A·B has too few parts, a warp each, to keep a machine busy, and rows short enough to be walked one by one."""
        if self.x.ndim == 1 or self.rows.longest > SHORT_ROW:
            return False
        return (self.matrix.shape[0] + self.matrix.stored) * self.x.shape[1] <= FEW_WARPS * ITEMS * COLUMNS

    @property
    def even(self) -> bool:
        return self.rows.padding <= MOST_PADDING and self.rows.longest <= LONGEST_ROW

    def transposed(self, kernel: str) -> str:
        """The kernel for the transposed matrix, by that of the matrix: short rows say nothing of its columns, whose elements
        one group of lanes would walk."""
        (_, n), z = self.matrix.shape, self.matrix.stored
        bounded = z <= LONGEST_ROW and z // max(n, 1) <= SHORT_ROW
        return kernel if kernel != "row_split" or bounded or self.even else "merge"

    @property
    def rows(self) -> RowStatistics:
        """Computed once for a matrix; the first call waits for the device."""
        return statistics(self.matrix)


SPMV_AND_SPMM = Dispatch(
    MatrixCall, ON_CPU, TRACED,
    Route("torch", lambda c: c.empty, "no stored elements or no columns: nothing to launch"),
    Route("row_split", lambda c: c.few, "few and short rows: a program for some of them and some columns of b",
          lambda c: by_rows),
    Route("merge", lambda c: c.rows.padding > MOST_PADDING, "uneven rows: equal parts of rows and elements",
          lambda c: by_parts),
    Route("merge", lambda c: c.rows.longest > LONGEST_ROW, "a long row: equal parts of rows and elements",
          lambda c: by_parts),
    Route("row_split", lambda c: True, "even rows: a group of lanes for each", lambda c: by_rows),
)  # fmt: skip
