"""The ladder's two rungs in Triton, whose compiler allots registers and shared memory, pipelines and swizzles by itself."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.launch import INTERPRETING, Plan, compile_request, multiprocessors, target_sm


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


class DescriptorPlan(Plan):
    """A plan whose kernel makes its descriptors itself, in memory that Triton asks the host for."""

    def __call__(self, *tensors: Tensor) -> None:
        if not INTERPRETING and compile_request() is None:
            triton.set_allocator(_memory)
        super().__call__(*tensors)


def _memory(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")  # PyTorch's allocator gives multiples of 512 bytes


def plan(a: Tensor, b: Tensor, descriptors: bool) -> Plan:
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
