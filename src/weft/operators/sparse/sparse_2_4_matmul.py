"""``sparse_2_4_matmul(a, b)``: a 2:4 semi-structured matrix times a dense one.

Half of a dense product's operations; half of A's bytes, and 2 more for each 16 columns. The Triton kernel unpacks A in
registers and multiplies densely: it saves A's bytes, not operations, and runs anywhere. On Hopper ``sparse_hopper.cu``
saves both.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload, workloads
from weft.operators import mutants
from weft.operators.call import Choice, guarded, product_dtype
from weft.operators.configs import Config, Configurations, bucket, tiles
from weft.operators.cuda import shared_limit
from weft.operators.dispatch import ON_CPU, Call, Dispatch, Route
from weft.operators.hopper import padded
from weft.operators.hopper.gemm import ON_HOPPER
from weft.operators.launch import INTERPRETING, Plan
from weft.operators.matmul.dispatch import default_precision
from weft.operators.random_inputs import random_tensor
from weft.operators.sparse import sparse_hopper
from weft.operators.sparse.products import TRACED_DENSE, cast, check_product
from weft.operators.sparse.semi_structured import PLACES, Sparse24, metadata_of

# columns of b; 64 take 0.4 times what the dense matrix does, 4096 3.6 times (docs/notes/sparse.md)
UNPACKED_IN_REGISTERS = 128


@triton.jit
def unpacked(place, first, second, low, high):
    """The element at one place of its group: one of the two that are stored, or zero."""
    return tl.where(low == place, first, tl.where(high == place, second, tl.zeros_like(first)))


@triton.jit
def multiply_unpacked(
    values_ptr, metadata_ptr, b_ptr, c_ptr, M, N, K, b_row, b_col,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One TILE_M × TILE_N tile of C. Of DEPTH columns of A, DEPTH / 2 values and a 4-bit code for each group of four are read;
    selections put the values in their places, and the matrix units multiply."""
    tiles_n = tl.cdiv(N, TILE_N)
    m = (tl.program_id(0) // tiles_n).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = ((tl.program_id(0) % tiles_n) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    pair, group, k = tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // 4), tl.arange(0, DEPTH)
    rows = m[:, None] < M
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, K, DEPTH):
        at = start // 2 + pair
        values = values_ptr + m[:, None] * (K // 2) + at[None, :]
        stored = tl.load(values, mask=rows & (at[None, :] < K // 2), other=0.0)
        at = start // 4 + group
        words = metadata_ptr + m[:, None] * (K // 16) + (at // 4)[None, :]
        word = tl.load(words, mask=rows & (at[None, :] < K // 4), other=0)
        code = word.to(tl.int32) >> ((at % 4) * 4)[None, :]
        low, high = code & 3, (code >> 2) & 3
        first, second = tl.split(tl.reshape(stored, [TILE_M, DEPTH // 4, 2]))
        even = tl.join(unpacked(0, first, second, low, high), unpacked(2, first, second, low, high))
        odd = tl.join(unpacked(1, first, second, low, high), unpacked(3, first, second, low, high))
        a = tl.reshape(tl.join(even, odd), [TILE_M, DEPTH])
        inside = (start + k[:, None] < K) & (n[None, :] < N)
        b = tl.load(b_ptr + (start + k).to(tl.int64)[:, None] * b_row + n[None, :] * b_col, mask=inside, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total.to(c_ptr.dtype.element_ty), mask=rows & (n[None, :] < N))


def heuristic(sm: int, dtype: torch.dtype, m: int, n: int) -> Config:
    """A tile that leaves registers for the unpacking."""
    few = max(m // 128, 1) * max(n // 128, 1) < 132  # tiles of 128 x 128: not one for each multiprocessor
    side, depth, warps = (64, 64, 4) if min(m, n) <= 64 or few else (128, 64, 8)
    if INTERPRETING:
        side, depth, warps = 32, 32, 4
    elif dtype == torch.float32:
        depth = 32
    stages = 3 if side == 128 and sm not in (86, 89, 120) else 2
    return {"TILE_M": side, "TILE_N": side, "DEPTH": depth, "num_warps": warps, "num_stages": stages}


def candidates(sm: int, dtype: torch.dtype, m: int, n: int) -> Any:
    sizes = {"TILE_M": (64, 128), "TILE_N": (64, 128, 256), "DEPTH": (32, 64, 128)}
    for c in tiles({**sizes, "num_warps": (4, 8), "num_stages": (2, 3, 4)}, 32, 128, of=("TILE_M", "TILE_N")):
        if (c["TILE_M"] + c["TILE_N"]) * c["DEPTH"] * dtype.itemsize * c["num_stages"] <= shared_limit(sm):
            yield c


configuration = Configurations(__file__, "sparse_2_4_matmul", heuristic, candidates)


@dataclass
class Sparse24Call(Call):
    """a [M, K] by its values and metadata, times b [K, N]. A plan is called with ``(values, metadata, b, c)``, c contiguous."""

    values: Tensor
    metadata: Tensor
    x: Tensor
    precision: str

    @property
    def n(self) -> int:
        return self.x.shape[1]

    @property
    def empty(self) -> bool:
        return len(self.values) * self.n == 0


def hopper_unsupported(c: Sparse24Call) -> str:
    return sparse_hopper.why_not(c.values, c.metadata, c.x)


class CopiedPlan:
    """That launch of a copy of b whose rows begin on 16 bytes, with columns of zeros up to a multiple of 8."""

    def __init__(self, c: Sparse24Call):
        self.sizes = (c.x.shape[0], padded.up_to(c.n))
        self.launch = sparse_hopper.SparseHopperPlan(
            c.values, c.metadata, c.x.new_empty(self.sizes, device="meta"), c.x.device
        )

    def __call__(self, values: Tensor, metadata: Tensor, b: Tensor, c: Tensor) -> None:
        wide = c if c.shape[1] == self.sizes[1] else c.new_empty((len(c), self.sizes[1]))
        self.launch(values, metadata, padded.copied_to(b, *self.sizes), wide)
        if wide is not c:
            padded.copy(wide, c)


def copied_unsupported(c: Sparse24Call) -> str:
    b = c.x.new_empty((c.x.shape[0], padded.up_to(c.n)), device="meta")
    reason = sparse_hopper.why_not(c.values, c.metadata, b, c.x.device)
    return reason or ("" if hopper_unsupported(c) else padded.NOTHING)


def plan(c: Sparse24Call) -> Plan:
    b, m, (k, n) = c.x, len(c.values), c.x.shape
    config = configuration(b.device, b.dtype, bucket(m), bucket(n))
    tile = {name: config[name] for name in ("TILE_M", "TILE_N", "DEPTH")}
    grid = (triton.cdiv(m, tile["TILE_M"]) * triton.cdiv(n, tile["TILE_N"]),)
    constants = {**tile, "PRECISION": c.precision}
    return Plan(multiply_unpacked, grid, (m, n, k, *b.stride()), constants, config["num_warps"], config["num_stages"])


FORWARD = Dispatch(
    Sparse24Call, ON_CPU, TRACED_DENSE,
    Route("cuda", lambda c: not c.empty, "on Hopper's sparse tensor cores",
          lambda c: sparse_hopper.SparseHopperPlan(c.values, c.metadata, c.x), hopper_unsupported, sm=90),
    Route("cuda-padded", lambda c: not c.empty, "on Hopper's sparse tensor cores, by a copy of b that TMA takes",
          CopiedPlan, copied_unsupported, sm=90),
    Route("torch dense", lambda c: c.n > UNPACKED_IN_REGISTERS,
          "unpacked to a dense matrix for a library's product, which is faster for many columns"),
    Route("triton", lambda c: True, "unpacked in registers, on any matrix units", plan),
)  # fmt: skip


def reference(a: Sparse24, b: Tensor) -> Tensor:
    """As a dense product, in fp32 or wider; under autocast in its dtype, as ``torch.mm``."""
    wide = torch.promote_types(b.dtype, torch.float32)
    return (a.to_dense().to(wide) @ b.to(wide)).to(product_dtype(b))


def unpacking(a: Sparse24, b: Tensor) -> Tensor:
    c = b.new_empty((a.shape[0], b.shape[1]))
    if c.numel():
        FORWARD.kernel("triton").of((a.values, a.metadata, b), default_precision())(a.values, a.metadata, b, c)
    return c


def sparse_tensor_cores(a: Sparse24, b: Tensor, kernel: str = "cuda") -> Tensor:
    """On Hopper's sparse tensor cores; it says in words what it does not take."""
    plan = FORWARD.kernel(kernel).of((a.values, a.metadata, b), "ieee")
    c = b.new_empty((a.shape[0], b.shape[1]))
    plan(a.values, a.metadata, b, c)
    return c


_theirs: weakref.WeakKeyDictionary[Sparse24, Any] = weakref.WeakKeyDictionary()


def torch_semi_structured(a: Sparse24, b: Tensor) -> Tensor:
    """``torch.sparse.to_sparse_semi_structured`` (cuSPARSELt, or CUTLASS without it), converted once a matrix."""
    if not b.is_cuda:
        return reference(a, b)
    (m, k), n = a.shape, b.shape[1]
    if b.dtype == torch.float32 or m % 32 or k % 64 or n % 8 or not m * k * n:
        raise Declined(
            "PyTorch's semi-structured product takes 16-bit matrices of multiples of 32 × 64 and 8 columns of b"
        )
    if a not in _theirs:
        _theirs[a] = torch.sparse.to_sparse_semi_structured(a.to_dense())
    return torch.mm(_theirs[a], b)


def dense(a: Sparse24, b: Tensor) -> Tensor:
    """The dense product of the same matrix, unpacked at every call."""
    return torch.mm(a.to_dense(), b)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """A random 2:4 matrix [M, K] and b [K, N]."""
    m, k = w["M"], w["K"]
    values = random_tensor(g, (m, k // 2), w.dtype, device)
    b = random_tensor(g, (k, w["N"]), w.dtype, device, layout=w.option("layout", "contiguous"))
    if device == "meta":
        return {"a": Sparse24(values, torch.empty((m, k // 16), dtype=torch.int16, device=device), (m, k)), "b": b}
    at = g.device if g is not None else device
    drawn = torch.randint(0, len(PLACES), (m, k // 4), generator=g, device=at).to(device)
    metadata = metadata_of(torch.tensor(PLACES, device=device)[drawn])
    return {"a": Sparse24(values, metadata, (m, k), check=False), "b": b}


def cost(w: Workload, direction: str) -> Cost:
    """Products with stored elements only."""
    m, n, k, size = w["M"], w["N"], w["K"], w.bytes_per_element
    reads = m * (k // 2) * size + m * (k // 16) * 2 + k * n * size
    return Cost(reads, m * n * size, {w.dtype: float(m * n * k)}, vector_flops=1)


def _of_values(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: reference(a.with_values(change(a.values)), b)


def _of_metadata(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: reference(Sparse24(a.values, change(a.metadata), a.shape, check=False), b)


TIMED = workloads("MNK", (8192, 8192, 8192), (4096, 4096, 4096), (8192, 64, 8192), dtype="bf16")

sparse_2_4_matmul = Operator(
    name="sparse_2_4_matmul",
    axes={"M": "rows of a", "N": "columns of b", "K": "columns of a, rows of b"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={"layout": ("contiguous", "unaligned", "sliced", "strided", "transposed")},
    tolerance=Tolerance(scale="tensor", terms=lambda w: max(w["K"], 32)),
    workloads={
        "verify": [
            *workloads("MNK", (1, 1, 16), (16, 16, 32), (33, 40, 80), (64, 33, 64), (7, 5, 272), (150, 72, 256)),
            *workloads("MNK", (1, 8, 128), (0, 4, 16), (4, 0, 16), (5, 4, 0)),
            *(workload(M=20, N=24, K=48, layout=at) for at in ("unaligned", "sliced", "strided", "transposed")),
            *(workload(M=70, N=40, K=128, layout=at) for at in ("sliced", "transposed")),
        ],
        "full": [workload(M=256, N=256, K=512)],
        "bench": TIMED,
        "quick": TIMED[1:2],
        "host": [workload("fp32", M=64, N=64, K=64)],
        "compile": [
            workload(M=1024, N=1024, K=1024),
            workload(M=64, N=64, K=1040, layout="transposed"),
            workload("bf16", M=4096, N=4096, K=4096, layout="transposed"),
        ],
        "tune": TIMED,
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("values of each pair swapped", _of_values(lambda v: v.unflatten(1, (-1, 2)).flip(2).flatten(1))),
        Mutant("always the first two", _of_metadata(lambda t: torch.full_like(t, 0x4444))),
        Mutant("bytes of the metadata swapped", _of_metadata(lambda t: (t << 8) | ((t >> 8) & 255))),
        Mutant("metadata of the next row", _of_metadata(lambda t: t.roll(1, 0) if len(t) > 1 else t * 0 + 0x4444)),
    ],
)

sparse_2_4_matmul.implementation("triton", arch=">=sm_80")(unpacking)
sparse_2_4_matmul.implementation("cuda", **ON_HOPPER)(sparse_tensor_cores)
by_copies = functools.partial(sparse_tensor_cores, kernel="cuda-padded")
sparse_2_4_matmul.implementation("cuda-padded", backend="cuda", **ON_HOPPER)(by_copies)
sparse_2_4_matmul.implementation("torch")(torch_semi_structured)
sparse_2_4_matmul.implementation("torch dense")(dense)

PRODUCTS: dict[str, Callable[..., Tensor]] = {
    **{"torch": reference, "torch dense": dense, "triton": unpacking},
    **{"cuda": sparse_tensor_cores, "cuda-padded": by_copies},
}


def check(a: Sparse24, b: Tensor) -> None:
    expected = "({}, N), as many rows as 'a' has columns"
    check_product("sparse_2_4_matmul", a, (Sparse24,), "Sparse24 (Sparse24.from_dense)", b, expected, left="a")


@sparse_2_4_matmul.choice
@guarded
def choose(a: Sparse24, b: Tensor) -> Choice:
    check(a, b)
    return FORWARD.choose(a.values, a.metadata, b, "ieee")


@sparse_2_4_matmul.function
def sparse_2_4_matmul_function(a: Sparse24, b: Tensor) -> Tensor:
    """A 2:4 semi-structured matrix times a dense one.

    Args:
        a: [M, K]; values in float32, float16 or bfloat16.
        b: [K, N], of the values' dtype and device, any strides.

    Returns:
        [M, N] of b's dtype, contiguous, summed in fp32: the same bits every time. Where sparse tensor cores do not take it
        (they do 16-bit floats on sm_90, K a multiple of 128), of more than 128 columns it is ``torch.mm`` of a dense matrix
        [M, K] that is made at every call, which sums as PyTorch's settings allow (``allow_bf16_reduced_precision_reduction``).
        float32 is multiplied as ``torch.get_float32_matmul_precision()`` says. Under autocast, values and b are cast as
        ``torch.mm`` casts them.

    Raises:
        TypeError: not a :class:`Sparse24`, dtypes that differ or are not these.
        ValueError: a b that is no matrix of K rows, or on another device.
        NotImplementedError: a gradient is wanted.
    """
    check(a, b)
    a, b = cast(a, b)
    return PRODUCTS[choose(a, b).implementation](a, b)
