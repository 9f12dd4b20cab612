"""``CSR``: a sparse matrix as row offsets, column indices and values."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from weft.operators.checks import check_shape
from weft.operators.sparse.pattern import VALUES, Compressed, Kept, Made, check_array, rows_of_elements, transposed

if TYPE_CHECKING:
    import scipy.sparse


@dataclass(frozen=True, eq=False, repr=False)
class CSR(Compressed):
    """A sparse matrix [M, N] with Z stored elements, row by row.

    Within a row, columns may come in any order and more than once: their values add up. What products need to know of the
    pattern (row statistics, a partition into equal work, the transposed pattern) is computed at the first need, which waits for
    the device, and kept with the matrix until the tensors of its pattern are changed in place. Values may change at any time.

    Args:
        row_offsets: [M + 1], int32 or int64: row m's elements are row_offsets[m] … row_offsets[m + 1] - 1.
        columns: [Z], int32 or int64 (may differ from the row offsets': more than 2³¹ elements need int64 offsets only).
        values: [Z]; float32, float16, bfloat16 or float64.
        shape: (M, N).
        check: whether to look at the indices themselves, which waits for the device once. Without it, wrong ones are read and
            written out of bounds.

    Raises:
        TypeError: not tensors of these dtypes, a shape that is not two whole numbers.
        ValueError: lengths that do not fit, devices that differ, tensors that are not contiguous, row offsets that fall or
            columns out of range (the error names the row).
    """

    IN_TORCH = staticmethod(torch.sparse_csr_tensor)
    ROW, COUNTS, VALUE_DIMENSIONS = "row", "{} elements and 'columns' {}", 1
    _kept: ClassVar[Kept | None] = None  # each matrix sets its own

    def __repr__(self) -> str:
        m, n = self.shape
        dtype = str(self.values.dtype).removeprefix("torch.")
        return f"CSR({m} × {n}, {self.stored} stored, {dtype}, {self.values.device})"

    @property
    def stored(self) -> int:
        """Z, the number of stored elements."""
        return len(self.values)

    def with_values(self, values: Tensor) -> "CSR":
        """The same pattern with other values [Z], and with all that was computed from it."""
        check_array("CSR", "values", values, VALUES, 1, self.row_offsets)
        if len(values) != self.stored:
            raise ValueError(f"CSR: argument 'values' has {len(values)} elements; expected {self.stored}")
        self.kept("pattern", lambda: None)  # so that both share what is computed later
        return super().with_values(values)

    def kept(self, key: Any, make: Callable[[], Made]) -> Made:
        """What ``make()`` gives, computed once for this pattern."""
        if self._kept is None or not self._kept.holds_for(self.row_offsets, self.columns):
            object.__setattr__(self, "_kept", Kept(self.row_offsets, self.columns))
        assert self._kept is not None  # just set
        return self._kept.get(key, make)

    def kept_with_values(self, key: Any, make: Callable[[], Made]) -> Made:
        """What ``make()`` gives, computed once for this pattern with its values as they are."""
        held = self.kept(("of values", key), lambda: [Kept(self.values)])
        if not held[0].holds_for(self.values):
            held[0] = Kept(self.values)
        return held[0].get(key, make)

    def transposed(self) -> "CSR":
        """The transposed matrix, [N, M]; its pattern is computed once."""

        def make() -> tuple[CSR, Tensor]:
            offsets, columns, order = transposed(self.row_offsets, self.columns, self.shape[1])
            return CSR(offsets, columns, self.values[order], self.shape[::-1], check=False), order

        pattern, order = self.kept("transposed", make)
        return pattern.with_values(self.values[order])

    @classmethod
    def from_torch(cls, a: Tensor) -> "CSR":
        """From a matrix of layout ``sparse_csr`` (shares its memory), ``sparse_coo`` (duplicates stay), ``sparse_bsr``,
        ``sparse_csc`` or dense (its zeros are left out)."""
        if not isinstance(a, Tensor):
            raise TypeError(f"CSR.from_torch: argument 'a' is a {type(a).__name__}; expected a torch.Tensor")
        check_shape("CSR.from_torch", "a", a, a.ndim == 2, "a matrix")
        shape = (a.shape[0], a.shape[1])
        if a.layout == torch.sparse_bsr:
            a = a.to_sparse()  # PyTorch has no way from blocks to CSR
        if a.layout == torch.sparse_coo:
            if a.sparse_dim() != 2:
                raise ValueError("CSR.from_torch: argument 'a' has dense dimensions; expected two sparse ones")
            row, column = a._indices()
            rows, order = torch.sort(row, stable=True)
            starts = torch.searchsorted(rows, torch.arange(a.shape[0] + 1, device=a.device))
            return cls(starts, column[order], a._values()[order], shape)
        if a.layout != torch.sparse_csr:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "in beta state", once a process
                a = a.to_sparse_csr()
        # a view of a sparse tensor, which torch.compile does not take: let go of it where no gradient needs it
        values = a.values()
        return cls(a.crow_indices(), a.col_indices(), values if values.requires_grad else values.detach(), shape)

    @classmethod
    def from_scipy(cls, a: "scipy.sparse.spmatrix | scipy.sparse.sparray", device: Any = "cpu") -> "CSR":
        """From any of SciPy's sparse matrices or arrays. Raises TypeError for anything else."""
        if not hasattr(a, "tocsr"):
            raise TypeError(f"CSR.from_scipy: argument 'a' is a {type(a).__name__}; expected a sparse matrix of SciPy")
        a = a.tocsr()
        offsets, columns, values = (torch.from_numpy(t).to(device) for t in (a.indptr, a.indices, a.data))
        return cls(offsets, columns, values, (int(a.shape[0]), int(a.shape[1])))

    def to_scipy(self) -> "scipy.sparse.csr_array":
        """A ``scipy.sparse.csr_array`` of a copy on the CPU; bfloat16 becomes float32."""
        try:
            from scipy.sparse import csr_array
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("CSR.to_scipy needs SciPy: pip install scipy", name="scipy") from error
        values = self.values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
        return csr_array((values.numpy(), self.columns.cpu().numpy(), self.row_offsets.cpu().numpy()), shape=self.shape)

    def to_dense(self) -> Tensor:
        """[M, N], duplicates added up in the values' dtype."""
        at = (rows_of_elements(self.row_offsets, self.stored), self.columns.long())
        return self.values.new_zeros(self.shape).index_put(at, self.values, accumulate=True)
