"""Blocks of the paged key/value cache: which are free, which sequence has which, and which hold a prefix that others share.

A full block is found by its tokens *and* the block before it, compared whole: there is no hash that could collide, and a block
whose predecessor was overwritten is never found.
"""

from collections import OrderedDict
from collections.abc import Sequence as Items

ROOT = 0


class Blocks:
    """``count`` blocks of ``size`` tokens.

    A block has as many owners as sequences use it. Without owners it is free, but keeps its contents until it is taken: the
    block that has been free the longest is taken first.
    """

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.owners = [0] * count
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self.found: dict[tuple[int, tuple[int, ...]], int] = {}  # (version of the block before, tokens) -> block
        self.key: list[tuple[int, tuple[int, ...]] | None] = [None] * count
        self.version = [0] * count  # of the contents; a number stands for one beginning of a text for ever
        self.versions = 0
        self.queries = self.hits = 0  # tokens that were looked up, and found

    @property
    def used(self) -> int:
        return self.count - len(self.free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def match(self, tokens: Items[int], root: int = ROOT, multiple: int = 1) -> list[int]:
        """The blocks that hold the beginning of ``tokens``, all but the last token at most; a multiple of ``multiple``.
        They are not taken yet."""
        found: list[int] = []
        version = root
        for start in range(0, (len(tokens) - 1) // self.size * self.size, self.size):
            block = self.found.get((version, tuple(tokens[start : start + self.size])))
            if block is None:
                break
            found.append(block)
            version = self.version[block]
        return found[: len(found) // multiple * multiple]

    def take(self, shared: Items[int], new: int) -> list[int] | None:
        """Makes the caller an owner of the shared blocks and of ``new`` others; None, and nothing is taken, if too few are
        free."""
        revived = sum(self.owners[block] == 0 for block in shared)
        if new + revived > len(self.free):
            return None
        for block in shared:
            if self.owners[block] == 0:
                del self.free[block]
            self.owners[block] += 1
        taken = []
        for _ in range(new):
            block, _ = self.free.popitem(last=False)
            self._forget(block)
            self.owners[block] = 1
            taken.append(block)
        return [*shared, *taken]

    def give_back(self, blocks: Items[int]) -> None:
        """Ends the caller's ownership; the last block of a sequence is taken again first."""
        for block in reversed(blocks):
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self.free[block] = None
                if self.key[block] is None:  # holds nothing that could be found
                    self.free.move_to_end(block, last=False)

    def publish(self, block: int, before: int | None, tokens: tuple[int, ...], root: int = ROOT) -> None:
        """Lets others find a full block, whose contents are written; ``before`` is the block of the tokens before."""
        if self.key[block] is not None:
            return
        key = (root if before is None else self.version[before], tokens)
        if (same := self.found.get(key)) is not None:
            self.version[block] = self.version[same]  # blocks behind it continue that one's chain
            return
        self.versions += 1
        self.version[block] = self.versions
        self.found[key], self.key[block] = block, key

    def _forget(self, block: int) -> None:
        if (key := self.key[block]) is not None:
            del self.found[key]
            self.key[block] = None
