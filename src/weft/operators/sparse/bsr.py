"""``BSR``: a sparse matrix of dense square blocks."""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.operators.checks import check_shape
from weft.operators.sparse.pattern import Compressed, rows_of_elements

if TYPE_CHECKING:
    import scipy.sparse

BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True, eq=False, repr=False)
class BSR(Compressed):
    """A sparse matrix [M, N] of Z dense blocks [B, B], block row by block row. Blocks that are stored twice add up.

    Args:
        row_offsets: [M / B + 1], int32 or int64: block row i's blocks are row_offsets[i] … row_offsets[i + 1] - 1.
        columns: [Z], int32 or int64: the blocks' block columns.
        values: [Z, B, B], B one of 16, 32, 64 and 128; float32, float16, bfloat16 or float64.
        shape: (M, N), multiples of B.
        check: whether to look at the indices themselves, which waits for the device once.

    Raises:
        TypeError: not tensors of these dtypes, a shape that is not two whole numbers.
        ValueError: sizes that do not fit, devices that differ, tensors that are not contiguous, row offsets that fall or
            columns out of range (the error names the block row).
    """

    IN_TORCH = staticmethod(torch.sparse_bsr_tensor)
    ROW, COUNTS, VALUE_DIMENSIONS = "block row", "{} blocks and 'columns' {} elements", 3

    def _rows_and_columns(self) -> tuple[int, int]:
        (m, n), (_, rows, columns) = self.shape, self.values.shape
        if rows != columns or rows not in BLOCKS:
            raise ValueError(
                f"BSR: argument 'values' has blocks of {rows} × {columns}; expected squares of {', '.join(map(str, BLOCKS))}"
            )
        if m % rows or n % rows:
            raise ValueError(f"BSR: argument 'shape' is {self.shape}; expected multiples of the block size {rows}")
        return m // rows, n // rows

    def __repr__(self) -> str:
        (m, n), (z, b, _), dtype = self.shape, self.values.shape, str(self.values.dtype).removeprefix("torch.")
        return f"BSR({m} × {n}, {z} blocks of {b} × {b}, {dtype}, {self.values.device})"

    @property
    def block(self) -> int:
        """B, rows and columns of a block."""
        return self.values.shape[1]

    @classmethod
    def from_torch(cls, a: Tensor, block: int | None = None) -> "BSR":
        """From a matrix of layout ``sparse_bsr`` (shares its memory), or with a block size of any other layout."""
        if not isinstance(a, Tensor):
            raise TypeError(f"BSR.from_torch: argument 'a' is a {type(a).__name__}; expected a torch.Tensor")
        check_shape("BSR.from_torch", "a", a, a.ndim == 2, "a matrix")
        if a.layout != torch.sparse_bsr:
            if block not in BLOCKS:
                raise ValueError(
                    f"BSR.from_torch: argument 'block' is {block!r}; expected one of {BLOCKS} for layout {a.layout}"
                )
            check_shape(
                "BSR.from_torch", "a", a, not (a.shape[0] % block or a.shape[1] % block), f"multiples of {block}"
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "in beta state", once a process
                a = a.to_sparse_bsr((block, block))
        values = a.values().contiguous()
        values = values if values.requires_grad else values.detach()  # as CSR.from_torch does
        return cls(a.crow_indices(), a.col_indices(), values, (a.shape[0], a.shape[1]))

    @classmethod
    def from_scipy(cls, a: "scipy.sparse.spmatrix | scipy.sparse.sparray", block: int, device: Any = "cpu") -> "BSR":
        """From any of SciPy's sparse matrices or arrays (anything else: TypeError), in blocks of ``block`` rows and columns (of
        another size than there is, or that does not divide the matrix: ValueError)."""
        if not hasattr(a, "tobsr"):
            raise TypeError(f"BSR.from_scipy: argument 'a' is a {type(a).__name__}; expected a sparse matrix of SciPy")
        shape = int(a.shape[0]), int(a.shape[1])
        if block not in BLOCKS or shape[0] % block or shape[1] % block:
            raise ValueError(
                f"BSR.from_scipy: argument 'block' is {block!r} for a matrix {shape}; expected one of {BLOCKS} that divides "
                "both"
            )
        a = a.tobsr((block, block))
        offsets, columns, values = (torch.from_numpy(t).to(device) for t in (a.indptr, a.indices, a.data))
        return cls(offsets, columns, values, shape)

    def to_dense(self, dtype: Any = None) -> Tensor:
        """[M, N]; blocks that are stored twice add up, in ``dtype`` (the values' by default)."""
        values, (m, n), b = self.values.to(dtype or self.values.dtype), self.shape, self.block
        at = (rows_of_elements(self.row_offsets, len(self.columns)), self.columns.long())
        blocks = values.new_zeros((m // b, n // b, b, b)).index_put(at, values, accumulate=True)
        return blocks.transpose(1, 2).reshape(m, n)
