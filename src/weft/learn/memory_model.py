"""How a GPU serves a warp's accesses: 32-byte sectors of global memory, 32 banks of shared memory.

Source: the CUDA C++ Programming Guide, "Device Memory Accesses" and "Shared Memory" of compute capability 5.x and later.
"""

from collections.abc import Iterable

WARP = 32
SECTOR_BYTES = 32
BANKS = 32
BANK_BYTES = 4


def sectors(addresses: Iterable[int], size: int = 4) -> int:
    """32-byte sectors that one access of a warp moves: its transactions.

    Args:
        addresses: The byte address of each active lane.
        size: Bytes an access.
    """
    return len({s for a in addresses for s in range(a // SECTOR_BYTES, (a + size - 1) // SECTOR_BYTES + 1)})


def bank_conflicts(addresses: Iterable[int]) -> int:
    """How many more times than once shared memory must be read for one 4-byte access of a warp.

    Lanes that read the same word share it (a broadcast); lanes that read different words of one bank wait for each other.
    """
    words: dict[int, set[int]] = {}
    for address in addresses:
        word = address // BANK_BYTES
        words.setdefault(word % BANKS, set()).add(word)
    return max((len(w) for w in words.values()), default=1) - 1
