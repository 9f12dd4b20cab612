"""How a tensor lies in memory: in rows of one stride, dense, overlapping itself or another one."""

import numpy as np
import torch

from weft.definition import Declined


def rows_of(x: torch.Tensor) -> tuple[int, int, int, int] | None:
    """A tensor as rows of its last dimension: ``(M, N, row_stride, column_stride)``, or None if the leading dimensions do not
    collapse into one stride."""
    *sizes, n = x.shape
    *strides, column_stride = x.stride()
    m, row_stride = 1, None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if row_stride is None:
            row_stride = stride
        elif stride != row_stride * m:
            return None
        m *= size
    if 0 in sizes:
        m = 0
    return m, n, n if row_stride is None else row_stride, column_stride


def within_reach(x: torch.Tensor) -> bool:
    """Whether x lies in rows of one stride whose columns a kernel can reach by 32-bit offsets."""
    found = rows_of(x)
    return found is not None and (found[1] - 1) * found[3] < 2**31


def dense(x: torch.Tensor) -> bool:
    """Whether x's elements fill contiguous memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(x.stride(), x.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def overlapping(x: torch.Tensor) -> bool:
    """Whether elements of x may share memory, as those of an expanded tensor do: a dimension's stride is shorter than the span
    of the dimensions with shorter strides."""
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride < span:
            return x.numel() > 0
        span += stride * (size - 1)
    return False


def sharing(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of a shares memory with one of b; interleaved views of one tensor may share none."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return np.shares_memory(np.asarray(_Layout(a)), np.asarray(_Layout(b)))


class _Layout:
    """A tensor's memory layout as a NumPy array; nothing is read."""

    def __init__(self, t: torch.Tensor):
        size = t.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (t.data_ptr(), False),
            "shape": tuple(t.shape),
            "strides": tuple(stride * size for stride in t.stride()),
        }


def readable(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A gradient of x's shape that row kernels can read: copied if its strides (expanded, say) do not collapse into rows."""
    return torch.empty_like(x).copy_(dy) if rows_of(dy) is None else dy


def views(*tensors: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Each tensor as rows. Raises Declined for strides that do not collapse into rows, for which a copy would be needed."""
    found = [rows_of(t) for t in tensors]
    if None in found:
        raise Declined("the leading dimensions do not collapse into rows of one stride, so a copy would be needed")
    return found  # type: ignore[return-value]
