"""Memory that remembers who touched each element last: for bounds and races."""

from typing import Any

import numpy as np

NONE, SEVERAL = -1, -2


class Memory:
    """Bytes, and for each unit of ``grain`` of them the last read, write and atomic.

    Args:
        itemsize: Of an element, for messages.
    """

    def __init__(self, name: str, data: Any, grain: int, itemsize: int, shape: tuple[int, ...] = ()) -> None:
        self.name, self.data, self.grain, self.itemsize, self.shape = name, data, grain, itemsize, shape
        units = -(-len(data) // grain) or 1
        self.write = Marks(units)
        self.read = Marks(units)
        self.atomic = Marks(units)


class Marks:
    """The last access of a kind to each unit: thread, warp, block, epoch of the block and of the warp, line."""

    def __init__(self, units: int) -> None:
        self.thread = np.full(units, NONE, np.int64)
        self.warp = np.full(units, NONE, np.int64)
        self.block = np.full(units, NONE, np.int64)
        self.epoch = np.zeros(units, np.int64)
        self.warp_epoch = np.zeros(units, np.int64)
        self.line = np.zeros(units, np.int64)

    def races(self, at: Any, block: int, epoch: int, thread: Any, warp: Any, warp_epoch: Any) -> Any:
        """Where an access now is unordered with the marked one, of another thread."""
        marked = self.thread[at]
        other_block = (self.block[at] != block) & (self.block[at] != NONE)
        same_epoch = (self.block[at] == block) & (self.epoch[at] == epoch)
        other_warp = self.warp[at] != warp
        unordered = same_epoch & (other_warp | (self.warp_epoch[at] == warp_epoch))
        return (marked != NONE) & (other_block | ((marked != thread) & unordered))

    def mark(
        self, at: Any, block: int, epoch: int, thread: Any, warp: Any, warp_epoch: Any, line: int, joins: bool
    ) -> None:
        if joins:  # readers and atomics do not exclude each other: remember that there were several
            thread, warp = _one_or_several(at, thread), _one_or_several(at, warp)
            again = (self.block[at] == block) & (self.epoch[at] == epoch)
            thread = np.where(again & (self.thread[at] != thread), SEVERAL, thread)
            warp = np.where(again & (self.warp[at] != warp), SEVERAL, warp)
            elsewhere = (self.block[at] != NONE) & (self.block[at] != block)
            self.block[at] = np.where(elsewhere, SEVERAL, block)
        else:
            self.block[at] = block
        self.thread[at], self.warp[at] = thread, warp
        self.epoch[at], self.warp_epoch[at], self.line[at] = epoch, warp_epoch, line


def _one_or_several(at: Any, who: Any) -> Any:
    """SEVERAL where different ones access the same unit by one instruction."""
    units, inverse = np.unique(at, return_inverse=True)
    if len(units) == len(at):
        return who
    low, high = np.full(len(units), np.iinfo(np.int64).max), np.full(len(units), np.iinfo(np.int64).min)
    np.minimum.at(low, inverse, who)
    np.maximum.at(high, inverse, who)
    return np.where(low == high, low, SEVERAL)[inverse]
