"""The ladder of the matrix product: what each rung changes, and how it is launched. C[M, N] = A[M, K] · B[K, N] in bf16.

Rungs 1 to 8 are in ``matmul.cu``, 9 to 12 in ``matmul_hopper.cu``, 13 and 14 in ``matmul_triton.py``. All take both operands
row-major (layout NN), so that their times compare. What each is predicted to gain, counted, is in docs/notes/gemm-ladder.md.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.course.ladders import matmul_triton
from weft.definition import Declined
from weft.operators.cuda import CudaPlan, pointer_aligned
from weft.operators.hopper import tensor_maps
from weft.operators.launch import Plans, compile_request, multiprocessors, target_sm
from weft.operators.matmul.matmul import matmul as operator

SOURCE = Path(__file__).parent / "matmul.cu"
HOPPER = Path(__file__).parent / "matmul_hopper.cu"


@dataclass(frozen=True)
class Rung:
    """A step of the ladder.

    Args:
        name: as in ``ladder-<number>-<name>``.
        idea: what it changes, in a line.
        kernel: C++ name with template arguments; empty for Triton's rungs.
        tile: rows and columns of C that a block computes.
        threads: of a block.
        arch: the least architecture.
        stages: tiles of A and B in dynamic shared memory at a time, each ``tile[0]`` × 64 and 64 × ``tile[1]``.
        cluster: blocks of a cluster; they lie below one another.
        persistent: as many blocks as multiprocessors, each with many tiles.
        backend: ``cuda`` or ``triton``.
    """

    name: str
    idea: str
    kernel: str = ""
    tile: tuple[int, int] = (0, 0)
    threads: int = 0
    arch: str = ">=sm_80"
    stages: int = 0
    cluster: int = 1
    persistent: bool = False
    backend: str = "cuda"


RUNGS = {
    1: Rung(
        "naive",
        "one thread an element; a warp's threads lie along M, so each load of A takes 32 sectors",
        "ladder_element<32, 8, false>",
        (32, 8),
        256,
    ),
    2: Rung(
        "coalesced",
        "a warp's threads lie along N: one address of A for all, 64 bytes of B and C side by side",
        "ladder_element<8, 32, true>",
        (8, 32),
        256,
    ),
    3: Rung(
        "shared-memory",
        "32 × 32 tiles in shared memory: each element is fetched 32 times less often",
        "ladder_shared<32>",
        (32, 32),
        1024,
    ),
    4: Rung(
        "register-column",
        "8 × 1 elements a thread: 9 reads of shared memory for 8 multiply-adds instead of 16",
        "ladder_registers<64, 64, 32, 8, 1>",
        (64, 64),
        512,
    ),
    5: Rung(
        "register-tile",
        "8 × 8 elements a thread: 16 reads for 64 multiply-adds",
        "ladder_registers<128, 128, 16, 8, 8>",
        (128, 128),
        256,
    ),
    6: Rung(
        "vectorised",
        "16 bytes an access everywhere, so 2 reads for 64 multiply-adds, and no bank asked twice",
        "ladder_vectors<128, 128, 32, 1>",
        (128, 128),
        256,
    ),
    7: Rung(
        "double-buffered",
        "cp.async into a second buffer: the next tiles come while these are multiplied",
        "ladder_vectors<128, 128, 32, 2>",
        (128, 128),
        256,
    ),
    8: Rung(
        "tensor-cores",
        "mma.sync out of swizzled shared memory by ldmatrix: 2048 multiply-adds an instruction; three stages",
        "ladder_mma<128, 128, 64, 3>",
        (128, 128),
        128,
        stages=3,
    ),
    9: Rung(
        "tma-wgmma",
        "TMA fetches, wgmma multiplies straight from shared memory: no thread touches an operand",
        "ladder_wgmma<4>",
        (128, 128),
        256,
        ">=sm_90",
        stages=4,
    ),
    10: Rung(
        "warp-specialised",
        "one warpgroup fetches, two multiply 64 × 256 each and never wait for one another",
        "ladder_specialised<10>",
        (128, 256),
        384,
        ">=sm_90",
        stages=4,
    ),
    11: Rung(
        "persistent",
        "a block a multiprocessor; C leaves through TMA under the next tile; tiles in groups of 8 rows",
        "ladder_specialised<11>",
        (128, 256),
        384,
        ">=sm_90",
        stages=4,
        persistent=True,
    ),
    12: Rung(
        "multicast",
        "clusters of two: each block fetches half of B's slice for both",
        "ladder_specialised<12>",
        (128, 256),
        384,
        ">=sm_90",
        stages=4,
        cluster=2,
        persistent=True,
    ),
    13: Rung("triton", "rungs 1 to 9 in twenty lines: tl.dot in a loop over K", backend="triton"),
    14: Rung(
        "triton-descriptors",
        "TMA descriptors in a persistent grid: rungs 9 and 11 from Triton",
        arch=">=sm_90",
        backend="triton",
    ),
}
# Terms in one accumulator of tensor cores, which cut off what does not fit (docs/notes/gemm-ladder.md).
LONGEST_SUM = 2**18
STAGE_COLUMNS = 64  # of A in a stage, and rows of B


def rung(number: int) -> Callable[..., Tensor]:
    """The function of one rung: ``(a, b, precision) -> c``.

    It declines what the kernel leaves out for the sake of reading: other layouts than NN, sums that want to be split, and
    from rung 6 on rows that do not begin on 16 bytes.
    """
    plans = Plans(lambda a, b: _plan(number, a, b))

    def matmul(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
        c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
        if not a.shape[1]:
            return c.zero_()
        if c.numel():
            plans.of((a, b))(a, b, c)
        return c

    return matmul


def _plan(number: int, a: Tensor, b: Tensor) -> Any:
    made, (m, k), n = RUNGS[number], a.shape, b.shape[1]
    if not a.is_contiguous() or not b.is_contiguous():
        raise Declined("the ladder's kernels take both operands row-major and contiguous (layout NN)")
    if max(m, n, k) >= 2**31 - 2**10:
        raise Declined(f"sizes {m}, {n}, {k}; the ladder's kernels count them in 32 bits")
    if number >= 8 and k > LONGEST_SUM:
        raise Declined(f"a sum of {k} terms; tensor cores' accumulators lose too much from {LONGEST_SUM} on")
    if number >= 6 and number != 13 and (k % 8 or n % 8 or not pointer_aligned(a, b)):
        raise Declined(f"16-byte accesses need rows that begin on 16 bytes; these have {k} and {n} elements")
    if made.backend == "triton":
        return matmul_triton.plan(a, b, descriptors=number == 14)
    if made.arch == ">=sm_90" and target_sm(a.device) != 90:
        raise Declined(f"wgmma is Hopper's alone (sm_90a); this is sm_{target_sm(a.device)}")
    tiles = -(-m // (made.tile[0] * made.cluster)) * -(-n // made.tile[1])
    if made.persistent:
        tiles = min(tiles, multiprocessors(a.device) // made.cluster)
    stage = sum(made.tile) * STAGE_COLUMNS * a.element_size()
    if made.arch == ">=sm_90":
        plan = CudaPlan(HOPPER, made.kernel, (tiles * made.cluster, 1), made.threads, (), made.cluster)
        # up to 1023 bytes to an address that swizzles, two barriers a stage, four boxes of C where it leaves through TMA
        boxes = 4 * STAGE_COLUMNS * 128 if made.persistent else 0
        plan.shared_bytes = 1024 + made.stages * (stage + 16) + boxes
        return MappedPlan(plan, made.tile[0])
    size = ctypes.c_longlong if number <= 5 else ctypes.c_int
    return CudaPlan(SOURCE, made.kernel, (tiles, 1), made.threads, (size(m), size(n), size(k)), 1, made.stages * stage)


# ---- tensor maps: what TMA is told about a matrix ----------------------------------------------------------------------------


class MappedPlan:
    """A kernel of ``matmul_hopper.cu``. Call it with (a, b, c).

    A plan is cached by shapes, a tensor map holds an address, so each triple of addresses gets its own launch. PyTorch's
    allocator hands the same addresses out again and again; the least recently used of LIMIT is given up.
    """

    LIMIT = 64

    def __init__(self, plan: CudaPlan, rows: int):
        self.plan, self.rows = plan, rows
        self.launch = functools.lru_cache(self.LIMIT)(self._launch)

    def __call__(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        if compile_request() or a.is_meta:
            self.plan(a, b, c)
            return
        (m, k), n = a.shape, b.shape[1]
        self.launch(a.data_ptr(), b.data_ptr(), c.data_ptr(), m, n, k)(a, b, c)

    def _launch(self, a: int, b: int, c: int, m: int, n: int, k: int) -> CudaPlan:
        maps = (encode(a, m, k, self.rows), encode(b, k, n, 64), encode(c, m, n, 64))
        scalars = (*maps, ctypes.c_int(m), ctypes.c_int(n), ctypes.c_int(k))
        p = self.plan
        return CudaPlan(p.source, p.expression, p.grid, p.block, scalars, p.cluster, p.shared_bytes)


def encode(address: int, rows: int, columns: int, box_rows: int) -> tensor_maps.TensorMap:
    """The tensor map of a row-major bf16 matrix that is moved in boxes of ``box_rows`` × 64, swizzled by 128 bytes."""
    return tensor_maps.encode(address, torch.bfloat16, (columns, rows), (columns * 2,), (64, box_rows))


for _number, _rung in RUNGS.items():
    operator.rung(
        _number,
        _rung.name,
        idea=_rung.idea,
        backend=_rung.backend,
        arch=_rung.arch,
        devices=("cuda",) if _rung.backend == "cuda" else ("cuda", "cpu"),
        dtypes=("bf16",) if _rung.backend == "cuda" else ("bf16", "fp16"),
        directions=("forward",),
    )(rung(_number))
