"""PTX interpreted on the CPU, thread by thread, for CUDA C++ exercises on machines without a GPU.

A block's threads run as arrays: each step executes one instruction for all threads that stand at the lowest address, so
threads that diverged meet again. Accesses out of bounds, races (also between blocks), barriers that not all threads reach and
shuffles whose mask names absent lanes are reported with the line of the source; sectors, bank conflicts, atomics and FLOPs are
counted. Known differences from a GPU: no caches or time; approximate functions are NumPy's; a race is found, not shown; an
order that blocks make among themselves by fences and flags is not seen, and told as a race.

The instructions: NVIDIA, PTX ISA (https://docs.nvidia.com/cuda/parallel-thread-execution/), as far as NVRTC emits them for
kernels of a page; another one is an ``Unsupported``.
"""

from collections.abc import Sequence
from typing import Any

from weft.learn.ptx.machine import Counts, Launch, Machine, Stopped
from weft.learn.ptx.module import Module, parse
from weft.learn.ptx.values import Unsupported

__all__ = ["Counts", "Launch", "Module", "Stopped", "Unsupported", "launch", "parse"]


def launch(
    module: Module, entry: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], names: Sequence[str],
    shared_bytes: int = 0, seed: int = 0, time_limit_s: float = 8.0, traced: int = 0,
) -> Launch:  # fmt: skip
    """Runs a kernel; NumPy arrays in ``args`` are its global memory and are written in place.

    Args:
        names: Of the arguments, for messages.
        shared_bytes: Dynamic shared memory.
        seed: Of the order of blocks and of atomics.
        traced: Warps whose accesses of global memory are kept.

    Raises:
        Unsupported: An instruction that is not known here.
        Stopped: It did not end in time.
    """
    of = (_three(grid), _three(block))
    return Machine(module, module.entries[entry], args, names, *of, shared_bytes, seed, time_limit_s, traced).run()


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return int(x), int(y), int(z)
