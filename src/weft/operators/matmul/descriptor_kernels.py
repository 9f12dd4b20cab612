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
from weft.operators.launch import INTERPRETING, PLAIN, Plan, compile_request, multiprocessors, target_sm
from weft.operators.matmul import tensor_maps


@triton.jit
def matmul_descriptors(
    a_ptr, b_ptr, c_ptr, M, N, K, a_step, b_step, A_ACROSS: tl.constexpr, B_ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C [M, N] = A·B, row-major, accumulated in fp32. Each program computes every ``num_programs``-th tile, in groups of GROUP
    tile rows. ACROSS: the operand's rows run along M or N instead of K; ``step``: elements from one to the next. K is not 0.
    What lies outside a matrix comes as zeros and is not stored."""
    tl.assume(K > 0)  # as in matmul_tiled
    if A_ACROSS:
        a_blocks = tl.make_tensor_descriptor(a_ptr, [K, M], [a_step, 1], [BLOCK_K, BLOCK_M])
    else:
        a_blocks = tl.make_tensor_descriptor(a_ptr, [M, K], [a_step, 1], [BLOCK_M, BLOCK_K])
    if B_ACROSS:
        b_blocks = tl.make_tensor_descriptor(b_ptr, [K, N], [b_step, 1], [BLOCK_K, BLOCK_N])
    else:
        b_blocks = tl.make_tensor_descriptor(b_ptr, [N, K], [b_step, 1], [BLOCK_N, BLOCK_K])
    c_blocks = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    in_group = GROUP * tiles_n
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        first = tile // in_group * GROUP
        height = min(tiles_m - first, GROUP)
        m = (first + tile % in_group % height) * BLOCK_M
        n = tile % in_group // height * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            a = a_blocks.load([k, m]).T if A_ACROSS else a_blocks.load([m, k])
            b = b_blocks.load([k, n]) if B_ACROSS else b_blocks.load([n, k]).T
            acc = tl.dot(a, b, acc)
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
    across, wide = a.stride(1) != 1, b.stride(1) == 1
    layout = ("T" if across else "N") + ("N" if wide else "T")
    config = configuration(a.device, layout, bucket(m), bucket(n), bucket(k))
    tiles = triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"])
    return DescriptorPlan(
        matmul_descriptors,
        (min(tiles, multiprocessors(a.device)),),
        (m, n, k, a.stride(1 if across else 0), b.stride(0 if wide else 1)),
        {"A_ACROSS": across, "B_ACROSS": wide, **{name: config[name] for name in config if name.isupper()}},
        config["num_warps"],
        config["num_stages"],
    )
