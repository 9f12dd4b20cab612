"""The launch of ``dequantize_vectors.cu``: dequantisation of rows of whole 16-byte vectors in packed conversions."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plans
from weft.operators.quantization.formats import BLOCK, Scheme, scale_shape
from weft.operators.quantization.lines import rows

SOURCE = Path(__file__).parent / "dequantize_vectors.cu"
THREADS = 256
MOST = 2**31 - 2**16  # vectors and rows that 32 bits count, the last block's included
NAMES = {"int8": "Int8", "int4": "Int4", "fp8_e4m3": "E4m3", "fp8_e5m2": "E5m2"}


def quotient(divisor: int) -> int:
    """The kernel's ``Quotient``: x // divisor of x < 2**31 is (2 x · factor >> 32) >> shift. The factor is less than 1 too
    large, so x · factor / 2**(31 + shift) exceeds x / divisor by less than 1 / 2**shift, at most 1 / divisor."""
    shift = (divisor - 1).bit_length()
    return -(-(2 ** (31 + shift)) // divisor) | shift << 32


def vectors_plan(values: Tensor, scale: Tensor, scheme: Scheme, n: int, out: torch.dtype) -> CudaPlan:
    """The launch of ``(values as bytes, scale, out)``, scale contiguous fp32, out contiguous [..., n].

    Raises:
        Declined: values that are no rows of one stride; rows or groups that are no whole vectors; addresses that are not
            aligned; more vectors than 32 bits count.
    """
    m, _, v_row, v_col = rows(values)
    vector, name = 16 // out.itemsize, NAMES[scheme.format]
    in_bytes = vector // scheme.of.per_byte
    if n % vector:
        raise Declined(f"rows of {n} elements; the kernel writes {vector} of {out} at a time")
    if v_col != 1 or v_row % in_bytes or not pointer_aligned(values):
        raise Declined(f"values that are not dense along rows, on 16 bytes, in rows of a multiple of {in_bytes} bytes")
    if scheme.granularity == "group" and scheme.group_size < n and scheme.group_size % vector:
        raise Declined(f"groups of {scheme.group_size} elements; a vector of {vector} of {out} has one scale")
    if scheme.granularity == "column" and not pointer_aligned(scale):
        raise Declined("columns' scales that do not begin on 16 bytes")
    per_row = n // vector
    if max(m, m * per_row) > MOST:
        raise Declined(f"{m * per_row} vectors; the kernel counts them in 32 bits")
    each = min(8, 32 // in_bytes)  # 32 bytes of a thread on their way
    if scheme.granularity == "column":
        kernel = f"dequantize_columns<{CTYPES[out]}, {name}, {THREADS}, {each}>"
        threads, scalars = -(-m // each) * per_row, _scalars(m, per_row, quotient(per_row), v_row)
        return CudaPlan(SOURCE, kernel, (-(-threads // THREADS), 1), THREADS, scalars)
    by, of_row, of_group, matrix, s_row = "GROUPS", per_row, per_row, 1, 0
    dense = v_row == per_row * in_bytes or m == 1
    if scheme.granularity == "block":
        by, of_group, matrix = "BLOCKS", BLOCK // vector, values.shape[-2]
        s_row = scale_shape((n,), "group", BLOCK)[-1]
    elif scheme.granularity == "tensor":
        by = "TENSOR" if dense else by
    else:
        length = min(scheme.group_size, n) if scheme.granularity == "group" else n
        if dense and n % length == 0:
            by, of_row = "LINES", length // vector
        else:
            of_group, s_row = length // vector, -(-n // length)
    kernel = f"dequantize_vectors<{CTYPES[out]}, {name}, {by}, {THREADS}, {each}>"
    vectors, quotients = m * per_row, (quotient(of_row), quotient(of_group))
    scalars = _scalars(vectors, per_row, *quotients, matrix, quotient(matrix), s_row, v_row)
    return CudaPlan(SOURCE, kernel, (-(-vectors // (THREADS * each)), 1), THREADS, scalars)


def _scalars(*numbers: int) -> tuple[ctypes.c_longlong, ...]:
    return tuple(map(ctypes.c_longlong, numbers))


vectors_plans = Plans(vectors_plan)
