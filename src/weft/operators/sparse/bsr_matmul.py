"""``bsr_matmul(matrix, b)``: a matrix of dense blocks times a dense matrix, on tensor cores.

2·B²·K operations for each stored block of B²·s bytes: with K in the hundreds the rate of the matrix units is the limit, as in a
dense product, of which only the stored share is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import BYTES, Cost, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import mutants
from weft.operators.call import Choice, cast_for_products, check_same, check_tensor, guarded
from weft.operators.matmul.dispatch import default_precision
from weft.operators.random_inputs import random_tensor
from weft.operators.sparse.bsr import BLOCKS, BSR
from weft.operators.sparse.dispatch import BSR_MATMUL
from weft.operators.sparse.random_matrices import distinct

# ---- implementations -------------------------------------------------------------------------------------------------


def reference(matrix: BSR, b: Tensor) -> Tensor:
    """As a dense product, in fp32 or wider."""
    wide = torch.promote_types(b.dtype, torch.float32)
    return (matrix.to_dense(wide) @ b.to(wide)).to(b.dtype)


def torch_bsr(matrix: BSR, b: Tensor) -> Tensor:
    """``torch.mm`` of a ``sparse_bsr`` tensor of the same memory."""
    if not len(matrix.columns) or not b.numel() or not b.is_cuda:
        return reference(matrix, b)
    return torch.mm(matrix.to_torch(), b)


def bsr_triton(matrix: BSR, b: Tensor) -> Tensor:
    y = b.new_empty((matrix.shape[0], b.shape[1]))
    if y.numel():
        tensors = (matrix.row_offsets, matrix.columns, matrix.values, b)
        BSR_MATMUL.kernel("triton").of(tensors, default_precision())(*tensors, y)
    return y


# ---- definition ------------------------------------------------------------------------------------------------------


def blocks_of(w: Workload) -> tuple[int, int, int]:
    """Block rows, block columns and stored blocks of a workload."""
    block = w.option("block", 16)
    rows, columns = w["M"] // block, w["N"] // block
    return rows, columns, rows * w["R"] if columns else 0


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """M/B·R blocks, dealt out over the block rows at random (the same for every draw), and b [N, K]."""
    (rows, columns, z), block = blocks_of(w), w.option("block", 16)
    index = torch_dtype(w.option("indices", "int32"))
    values = random_tensor(g, (z, block, block), w.dtype, device)
    b = random_tensor(g, (w["N"], w["K"]), w.dtype, device, layout=w.option("layout", "contiguous"))
    shape = (rows * block, columns * block)
    if device == "meta":
        offsets, at = (torch.empty(size, dtype=index, device=device) for size in (rows + 1, z))
        return {"matrix": BSR(offsets, at, values, shape), "b": b}
    pattern = torch.Generator(device).manual_seed(rows + 3 * columns + 7 * z)
    drawn = torch.randint(0, max(rows, 1), (z,), generator=pattern, device=device)
    lengths = torch.bincount(drawn, minlength=rows)[:rows]
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    at = torch.randint(0, max(columns, 1), (z,), generator=pattern, device=device)
    return {"matrix": BSR(offsets.to(index), at.to(index), values, shape, check=False), "b": b}


def cost(w: Workload, direction: str) -> Cost:
    (rows, columns, z), block, k = blocks_of(w), w.option("block", 16), w["K"]
    index, size = BYTES[w.option("indices", "int32")], w.bytes_per_element
    matrix = z * (block * block * size + index) + (rows + 1) * index
    reads = matrix + distinct(columns, z) * block * k * size
    flops = 2.0 * z * block * block * k
    return Cost(reads, rows * block * k * size, {w.dtype: flops}, vector_flops=1)


def scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """How large a row's terms are: sums of random signs cancel."""
    m, b = arguments["matrix"], arguments["b"]
    return [reference(BSR(m.row_offsets, m.columns, m.values.square(), m.shape, check=False), b.square()).sqrt()]


def _changed(values: Any = None, columns: Any = None) -> Any:
    """The product with some of the matrix replaced."""

    def wrong(matrix: BSR, b: Tensor) -> Tensor:
        v = matrix.values if values is None else values(matrix.values)
        at = matrix.columns if columns is None else columns(matrix)
        return reference(BSR(matrix.row_offsets, at, v.contiguous(), matrix.shape, check=False), b)

    return wrong


TIMED = tuple(workload("bf16", M=8192, N=8192, R=r, K=4096, block=b) for b, r in ((32, 64), (64, 32), (128, 16)))

bsr_matmul = Operator(
    name="bsr_matmul",
    axes={"M": "rows", "N": "columns", "R": "stored blocks in a block row, in the mean", "K": "columns of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "block": BLOCKS,
        "indices": ("int32", "int64"),
        "layout": ("contiguous", "unaligned", "sliced", "strided", "transposed"),
    },
    tolerance=Tolerance(scale=scale, ulps=2.0, terms=lambda w: max(w["R"] * w.option("block", 16), 32)),
    workloads={
        "verify": [
            workload(M=64, N=48, R=2, K=20),
            workload(M=16, N=16, R=1, K=1),
            workload(M=96, N=64, R=2, K=33, block=32),
            workload(M=128, N=192, R=2, K=40, block=64),
            workload(M=256, N=128, R=1, K=16, block=128),
            workload(M=64, N=32, R=3, K=130, indices="int64"),
            workload(M=0, N=32, R=3, K=4),
            workload(M=32, N=0, R=3, K=4),
            workload(M=32, N=32, R=0, K=4),
            workload(M=32, N=32, R=1, K=0),
            *(workload(M=48, N=32, R=2, K=24, layout=at) for at in ("unaligned", "sliced", "strided", "transposed")),
        ],
        "full": [workload(M=1024, N=1024, R=8, K=512, block=b) for b in (16, 32)],
        "bench": TIMED,
        "quick": [workload("bf16", M=4096, N=4096, R=16, K=4096, block=64)],
        "host": [workload("fp32", M=64, N=64, R=2, K=32)],
        "compile": [
            *(workload(t, M=1024, N=1024, R=4, K=512, block=b) for t in ("bf16", "fp32") for b in BLOCKS),
            workload("fp16", M=1024, N=1024, R=4, K=20, block=16, layout="transposed"),
        ],
        "tune": TIMED,
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("blocks transposed", _changed(values=lambda v: v.transpose(1, 2))),
        Mutant("block column off by one", _changed(columns=lambda m: (m.columns + 1) % max(m.shape[1] // m.block, 1))),
        Mutant(
            "last columns of a block left out", _changed(values=lambda v: v.index_fill(2, v.new_tensor([15]).long(), 0))
        ),
    ],
)

bsr_matmul.implementation("triton", arch=">=sm_80")(bsr_triton)
bsr_matmul.implementation("torch")(torch_bsr)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(matrix: BSR, b: Tensor) -> None:
    if not isinstance(matrix, BSR):
        raise TypeError(
            f"bsr_matmul: argument 'matrix' is a {type(matrix).__name__}; expected a weft.operators.sparse.BSR (BSR.from_torch)"
        )
    check_tensor("bsr_matmul", "matrix.values", matrix.values)
    check_tensor("bsr_matmul", "b", b)
    check_same("bsr_matmul", "b", b, "matrix.values", matrix.values)
    if b.ndim != 2 or b.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"bsr_matmul: argument 'b' has shape {tuple(b.shape)}; expected ({matrix.shape[1]}, K), as many rows as the matrix "
            "has columns"
        )
    if torch.is_grad_enabled() and (b.requires_grad or matrix.values.requires_grad):
        raise NotImplementedError("bsr_matmul: it has no gradients; expected a call under torch.no_grad()")


@bsr_matmul.choice
@guarded
def choose(matrix: BSR, b: Tensor) -> Choice:
    check(matrix, b)
    return BSR_MATMUL.choose(matrix.row_offsets, matrix.columns, matrix.values, b, "ieee")


@bsr_matmul.function
def bsr_matmul_function(matrix: BSR, b: Tensor) -> Tensor:
    """A matrix of dense blocks times a dense one.

    Args:
        matrix: [M, N] of blocks of 16, 32, 64 or 128; values in float32, float16 or bfloat16.
        b: [N, K], of the values' dtype and device, any strides.

    Returns:
        [M, K] of b's dtype, contiguous, summed in fp32 in a fixed order: the same bits every time. float32 is multiplied as
        ``torch.get_float32_matmul_precision()`` says. Under autocast, values and b are cast as ``torch.mm`` casts them.

    Raises:
        TypeError: not a :class:`BSR`, dtypes that differ or are not these.
        ValueError: a b that is no matrix of N rows, or on another device.
        NotImplementedError: a gradient is wanted.
    """
    choice = choose(matrix, b)
    values, b = cast_for_products(matrix.values, b)
    if values is not matrix.values:
        matrix = BSR(matrix.row_offsets, matrix.columns, values, matrix.shape, check=False)
    return reference(matrix, b) if choice.implementation == "torch" else bsr_triton(matrix, b)
