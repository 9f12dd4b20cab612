"""The next weight on its way into the L2 cache while small kernels of one token leave the memory idle.

Between two products a decoding step has kernels (norm, new keys, attention) that read next to nothing. A branch of the captured
graph asks for the beginning of the next weight meanwhile; the product then finds it in L2.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 4096  # bytes that one thread asks for
THREADS = 128


@triton.jit
def ask(ptr, pieces, PIECE: tl.constexpr, THREADS: tl.constexpr):
    at = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    address = tl.cast(ptr, tl.int64) + (at % pieces).to(tl.int64) * PIECE  # past the end: again from the beginning
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], 4096; mov.u32 $0, 0; }", "=r,l", [address], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


class Prefetcher:
    """Asks for weights on a stream of its own, within the capture of a graph."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    @staticmethod
    def of(device: torch.device) -> "Prefetcher | None":
        """One for GPUs that have the instruction (Hopper and later)."""
        return (
            Prefetcher(device) if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0) else None
        )

    def __call__(self, *weights: tuple[Tensor, int]) -> None:
        """Asks for so many bytes of each weight, behind what the current stream has done; nothing waits for it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for weight, count in weights:
                pieces = min(count, weight.numel() * weight.element_size()) // PIECE
                if pieces:
                    ask[(triton.cdiv(pieces, THREADS),)](weight, pieces, PIECE, THREADS, num_warps=4)

    def join(self) -> None:
        """Ends the branch."""
        torch.cuda.current_stream().wait_stream(self.stream)


def weight_of(layer: Any) -> Tensor | None:
    """The memory of a dense layer's weight."""
    found = getattr(layer, "weight", None)
    return found if isinstance(found, Tensor) and found.is_contiguous() else None
