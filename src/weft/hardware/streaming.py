"""The plain streaming kernel that bandwidth ceilings are measured with."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def stream(in_ptr, out_ptr, n, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Reads READS arrays of n floats and writes their sum to WRITES arrays; each array follows the last in memory. Without
    writes, a sum that is never NaN decides about a store that never happens. POLICY says what L2 does with lines read:
    with ``evict_last`` it gives up written ones first, which some machines' memory prefers."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 1.5, tl.float32)
    for r in tl.static_range(READS):
        total += tl.load(in_ptr + r * n.to(tl.int64) + i, eviction_policy=POLICY)
    for w in tl.static_range(WRITES):
        tl.store(out_ptr + w * n.to(tl.int64) + i, total)
    if WRITES == 0:
        tl.store(out_ptr + i, total, mask=total != total)


def stream_call(
    reads: int, writes: int, bytes_per_array: int, *, quick: bool = False
) -> list[tuple[Callable[[], Any], int]]:
    """Calls that stream, one for each configuration, with the bytes that each moves."""
    n = bytes_per_array // 4 // 2**16 * 2**16
    source = torch.randn(max(reads, 1) * n, device="cuda")
    target = torch.empty(max(writes, 1) * n, device="cuda")
    tiles = [(1024, 4), (4096, 8)] if quick else [(1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8)]

    def call(block: int, warps: int, policy: str) -> Callable[[], Any]:
        return lambda: stream[(n // block,)](source, target, n, reads, writes, block, policy, num_warps=warps)

    calls = [call(*tile, policy) for tile in tiles for policy in ("", "evict_last")]
    return [(c, (reads + writes) * n * 4) for c in calls]
