"""Products in Triton whose operands come by descriptors, which TMA moves whole blocks by (sm_90 and sm_100; others with TMA
have too little shared memory for these tiles).

An operand whose rows run along K brings 128 bytes of each row to a stage. Fetched by threads, such products reached three
quarters of cuBLAS's rate (README); TMA brings rows of either axis at one rate and needs no registers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket
from weft.operators.hopper import tensor_maps
from weft.operators.launch import INTERPRETING, PLAIN, Plan, compile_request, multiprocessors, target_sm


@triton.jit
def place_of(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The first row and column of a tile: they run in groups of GROUP tile rows, which share slices of both operands in L2."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    height = min(tiles_m - first, GROUP)
    return (first + tile % in_group % height) * BLOCK_M, tile % in_group // height * BLOCK_N


@triton.jit
def blocks_of(ptr, rows, K, step, ACROSS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """The descriptor of an operand with ``rows`` rows of K terms. ACROSS: in memory they run along ``rows`` instead of K;
    ``step``: elements from one line to the next."""
    if ACROSS:
        return tl.make_tensor_descriptor(ptr, [K, rows], [step, 1], [BLOCK_K, BLOCK])
    else:
        return tl.make_tensor_descriptor(ptr, [rows, K], [step, 1], [BLOCK, BLOCK_K])


@triton.jit
def left(blocks, m, k, ACROSS: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of a left operand."""
    if ACROSS:
        return blocks.load([k, m]).T
    else:
        return blocks.load([m, k])


@triton.jit
def right(blocks, n, k, ACROSS: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of a right operand."""
    if ACROSS:
        return blocks.load([k, n])
    else:
        return blocks.load([n, k]).T


@triton.jit
def matmul_descriptors(
    a_ptr, b_ptr, c_ptr, M, N, K, a_step, b_step, A_ACROSS: tl.constexpr, B_ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C [M, N] = A·B, row-major, accumulated in fp32. Each program computes every ``num_programs``-th tile. ACROSS: the
    operand's rows run along M or N instead of K; ``step``: elements from one to the next. K is not 0. What lies outside a
    matrix comes as zeros and is not stored."""
    tl.assume(K > 0)  # as in matmul_tiled
    a_blocks = blocks_of(a_ptr, M, K, a_step, A_ACROSS, BLOCK_M, BLOCK_K)
    b_blocks = blocks_of(b_ptr, N, K, b_step, B_ACROSS, BLOCK_N, BLOCK_K)
    c_blocks = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        m, n = place_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(left(a_blocks, m, k, A_ACROSS), right(b_blocks, n, k, B_ACROSS), acc)
        c_blocks.store([m, n], acc.to(c_ptr.dtype.element_ty))


class DescriptorPlan(Plan):
    """A plan whose kernel makes its descriptors itself, in memory that Triton asks the host for."""

    def __call__(self, *tensors: Tensor) -> None:
        if not INTERPRETING and compile_request() is None:
            triton.set_allocator(_memory)
        super().__call__(*tensors)


def _memory(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")  # PyTorch's allocator gives multiples of 512 bytes


def heuristic(sm: int, layout: str, m: int, n: int, k: int) -> Config:
    """Tiles that a multiprocessor's tensor cores are fed with at 48 bytes a clock, or narrower ones where there are few."""
    if INTERPRETING:
        return _config(32, 64, 32, 4, 2)
    return _config(128, 256 if m * n > 2**21 else 128, 64, 8, 3)


def _config(m: int, n: int, k: int, warps: int, stages: int) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8, "num_warps": warps, "num_stages": stages}


def candidates(sm: int, layout: str, m: int, n: int, k: int) -> Iterable[Config]:
    for columns, depth, stages in ((256, 64, 3), (128, 64, 3), (128, 64, 4), (128, 128, 3)):
        for group in (8, 16):
            yield {**_config(128, columns, depth, 8, stages), "GROUP": group}


configuration = Configurations(__file__, "descriptors", heuristic, candidates)


def fits(a: Tensor, b: Tensor) -> bool:
    """Whether the kernel takes a [M, K] and b [K, N]: 16-bit floats, rows of all three that begin on 16 bytes, terms to add;
    not while tracing, where Triton has nobody to ask for memory."""
    return (
        target_sm(a.device) in (90, 100)
        and a.dtype != torch.float32
        and a.shape[1] > 0
        and b.shape[1] % 8 == 0
        and a.__class__ in PLAIN
        and not any(tensor_maps.why_not("", t, 2, t.stride(1) != 1) for t in (a, b))
    )


def plan(a: Tensor, b: Tensor) -> Plan:
    """The launch of C = A·B for operands that :func:`fits`. Call it with (a, b, c)."""
    (m, k), n = a.shape, b.shape[1]
    layout = layout_of(a, b)
    config = configuration(a.device, layout, bucket(m), bucket(n), bucket(k))
    tiles = triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"])
    return DescriptorPlan(
        matmul_descriptors,
        (min(tiles, multiprocessors(a.device)),),
        (m, n, k, *steps(a, b, layout)),
        {
            "A_ACROSS": layout[0] == "T",
            "B_ACROSS": layout[1] == "N",
            **{name: config[name] for name in config if name.isupper()},
        },
        config["num_warps"],
        config["num_stages"],
    )


def layout_of(a: Tensor, b: Tensor) -> str:
    """NN, NT, TN or TT, of operands that :func:`fits`."""
    return ("T" if a.stride(1) != 1 else "N") + ("N" if b.stride(1) == 1 else "T")


def steps(a: Tensor, b: Tensor, layout: str) -> tuple[int, int]:
    """Elements from one line of each operand in memory to the next."""
    return a.stride(1 if layout[0] == "T" else 0), b.stride(0 if layout[1] == "N" else 1)
