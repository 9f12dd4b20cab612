"""The ladder of the matrix product: what each rung changes, and how it is launched. C[M, N] = A[M, K] · B[K, N] in bf16.

Rungs 1 to 8 are in ``matmul.cu``, 9 to 12 in ``matmul_hopper.cu``, 13 and 14 here. All take both operands
row-major (layout NN), so that their times compare. What each is predicted to gain, counted, is in docs/notes/gemm-ladder.md.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CudaPlan, pointer_aligned
from weft.operators.hopper import tensor_maps
from weft.operators.launch import (
    INTERPRETING,
    DescriptorPlan,
    Plan,
    Plans,
    compile_request,
    multiprocessors,
    target_sm,
)
from weft.operators.matmul.matmul import matmul as operator

SOURCE = Path(__file__).parent / "matmul.cu"
HOPPER = Path(__file__).parent / "matmul_hopper.cu"


RUNGS = {
    1: ("naive", "one thread an element; a warp's threads lie along M, so each load of A takes 32 sectors"),
    2: ("coalesced", "a warp's threads lie along N: one address of A for all, 64 bytes of B and C side by side"),
    3: ("shared-memory", "32 × 32 tiles in shared memory: each element is fetched 32 times less often"),
    4: ("register-column", "8 × 1 elements a thread: 9 reads of shared memory for 8 multiply-adds instead of 16"),
    5: ("register-tile", "8 × 8 elements a thread: 16 reads for 64 multiply-adds"),
    6: ("vectorised", "16 bytes an access everywhere, so 2 reads for 64 multiply-adds, and no bank asked twice"),
    7: ("double-buffered", "cp.async into a second buffer: the next tiles come while these are multiplied"),
    8: (
        "tensor-cores",
        "mma.sync out of swizzled shared memory by ldmatrix: 2048 multiply-adds an instruction; three stages",
    ),
    9: ("tma-wgmma", "TMA fetches, wgmma multiplies straight from shared memory: no thread touches an operand"),
    10: ("warp-specialised", "one warpgroup fetches, two multiply 64 × 256 each and never wait for one another"),
    11: ("persistent", "a block a multiprocessor; C leaves through TMA under the next tile; tiles in groups of 8 rows"),
    12: ("multicast", "clusters of two: each block fetches half of B's slice for both"),
    13: ("triton", "rungs 1 to 9 in twenty lines: tl.dot in a loop over K"),
    14: ("triton-descriptors", "TMA descriptors in a persistent grid: rungs 9 and 11 from Triton"),
}


class Kernel(NamedTuple):
    """How a rung in CUDA C++ is launched.

    Args:
        expression: C++ name with template arguments.
        tile: rows and columns of C that a block computes.
        threads: of a block.
        stages: tiles of A and B in dynamic shared memory at a time, each ``tile[0]`` × 64 and 64 × ``tile[1]``.
        cluster: blocks of a cluster; they lie below one another.
        persistent: as many blocks as multiprocessors, each with many tiles.
    """

    expression: str
    tile: tuple[int, int]
    threads: int
    stages: int = 0
    cluster: int = 1
    persistent: bool = False


KERNELS = {
    1: Kernel("ladder_element<32, 8, false>", (32, 8), 256),
    2: Kernel("ladder_element<8, 32, true>", (8, 32), 256),
    3: Kernel("ladder_shared<32>", (32, 32), 1024),
    4: Kernel("ladder_registers<64, 64, 32, 8, 1>", (64, 64), 512),
    5: Kernel("ladder_registers<128, 128, 16, 8, 8>", (128, 128), 256),
    6: Kernel("ladder_vectors<128, 128, 32, 1>", (128, 128), 256),
    7: Kernel("ladder_vectors<128, 128, 32, 2>", (128, 128), 256),
    8: Kernel("ladder_mma<128, 128, 64, 3>", (128, 128), 128, stages=3),
    9: Kernel("ladder_wgmma<4>", (128, 128), 256, stages=4),
    10: Kernel("ladder_specialised<10>", (128, 256), 384, stages=4),
    11: Kernel("ladder_specialised<11>", (128, 256), 384, stages=4, persistent=True),
    12: Kernel("ladder_specialised<12>", (128, 256), 384, stages=4, cluster=2, persistent=True),
}
ON_HOPPER = (9, 10, 11, 12, 14)  # the other rungs run from sm_80 on
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
    (m, k), n = a.shape, b.shape[1]
    if not a.is_contiguous() or not b.is_contiguous():
        raise Declined("the ladder's kernels take both operands row-major and contiguous (layout NN)")
    if max(m, n, k) >= 2**31 - 2**10:
        raise Declined(f"sizes {m}, {n}, {k}; the ladder's kernels count them in 32 bits")
    if number >= 8 and k > LONGEST_SUM:
        raise Declined(f"a sum of {k} terms; tensor cores' accumulators lose too much from {LONGEST_SUM} on")
    if number >= 6 and number != 13 and (k % 8 or n % 8 or not pointer_aligned(a, b)):
        raise Declined(f"16-byte accesses need rows that begin on 16 bytes; these have {k} and {n} elements")
    if number not in KERNELS:
        return triton_plan(a, b, descriptors=number == 14)
    made = KERNELS[number]
    if number in ON_HOPPER and target_sm(a.device) != 90:
        raise Declined(f"wgmma is Hopper's alone (sm_90a); this is sm_{target_sm(a.device)}")
    tiles = -(-m // (made.tile[0] * made.cluster)) * -(-n // made.tile[1])
    if made.persistent:
        tiles = min(tiles, multiprocessors(a.device) // made.cluster)
    stage = sum(made.tile) * STAGE_COLUMNS * a.element_size()
    if number in ON_HOPPER:
        plan = CudaPlan(HOPPER, made.expression, (tiles * made.cluster, 1), made.threads, (), made.cluster)
        # up to 1023 bytes to an address that swizzles, two barriers a stage, four boxes of C where it leaves through TMA
        boxes = 4 * STAGE_COLUMNS * 128 if made.persistent else 0
        plan.shared_bytes = 1024 + made.stages * (stage + 16) + boxes
        return MappedPlan(plan, made.tile[0])
    size = ctypes.c_longlong if number <= 5 else ctypes.c_int
    return CudaPlan(
        SOURCE, made.expression, (tiles, 1), made.threads, (size(m), size(n), size(k)), 1, made.stages * stage
    )


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


# ---- rungs 13 and 14: Triton allots registers and shared memory, pipelines and swizzles by itself ---------------------


@triton.jit
def ladder_dot(
    a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """a_ptr [M, K], b_ptr [K, N], c_ptr [M, N], row-major. One program computes BLOCK_M × BLOCK_N of C."""
    across = tl.cdiv(N, BLOCK_N)
    m = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    n = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K).to(tl.int64)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    c = acc.to(c_ptr.dtype.element_ty)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def ladder_descriptors(
    a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """The same through descriptors, which TMA moves whole blocks by; what lies outside is zero and is not stored. Each
    program computes every ``num_programs``-th tile, in groups of GROUP tile rows."""
    a_blocks = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b_blocks = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    c_blocks = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), down * across, tl.num_programs(0)):
        first = tile // (GROUP * across) * GROUP
        height = min(down - first, GROUP)
        m = (first + tile % (GROUP * across) % height) * BLOCK_M
        n = tile % (GROUP * across) // height * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(a_blocks.load([m, k]), b_blocks.load([k, n]), acc)
        c_blocks.store([m, n], acc.to(c_ptr.dtype.element_ty))


def triton_plan(a: Tensor, b: Tensor, descriptors: bool) -> Plan:
    """The launch of C = A·B for contiguous a [M, K] and b [K, N]. Call it with (a, b, c)."""
    (m, k), n, sm = a.shape, b.shape[1], target_sm(a.device)
    small = sm in (86, 89, 120)  # 99 KiB of shared memory
    block_m, block_n, block_k = (32, 64, 32) if INTERPRETING else (128, 128 if small else 256, 32 if small else 64)
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    blocks: dict[str, Any] = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    if not descriptors:
        return Plan(ladder_dot, (tiles,), (m, n, k), blocks, 8, 3)
    programs = min(tiles, multiprocessors(a.device))
    return DescriptorPlan(ladder_descriptors, (programs,), (m, n, k), {**blocks, "GROUP": 8}, 8, 3)


for _number, (_name, _idea) in RUNGS.items():
    _cuda = _number in KERNELS
    operator.rung(
        _number,
        _name,
        idea=_idea,
        backend="cuda" if _cuda else "triton",
        arch=">=sm_90" if _number in ON_HOPPER else ">=sm_80",
        devices=("cuda",) if _cuda else ("cuda", "cpu"),
        dtypes=("bf16",) if _cuda else ("bf16", "fp16"),
        directions=("forward",),
    )(rung(_number))
