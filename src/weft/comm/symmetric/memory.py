"""Memory of each rank of a host that all its ranks map, with flags by which they wait for each other on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm.group import Group

BARRIER, SIGNAL = 0, 1  # channels: both take the same kind of flag


class SymmetricMemory:
    """``size`` bytes on every rank, and every rank's at an address here. All ranks make the same ones in the same order.

    Flags are PyTorch's: ``signal`` raises one on another rank behind all that the current stream did before, ``wait`` lets
    the current stream wait for it and lowers it, so both take part in CUDA graphs.

    Raises:
        RuntimeError: PyTorch cannot map the peers' memory.
    """

    def __init__(self, group: Group, size: int):
        import torch.distributed._symmetric_memory as symmetric

        self.rank, self.ranks, self.bytes = group.rank, group.size, size
        device = torch.device("cuda", torch.cuda.current_device())
        self.mine = symmetric.empty(size, dtype=torch.uint8, device=device)
        self.mine.zero_()
        process_group: Any = group.transport.group  # type: ignore[attr-defined]
        self._handle = symmetric.rendezvous(self.mine, process_group.group_name)
        first = self._handle.get_buffer(self.rank, (1,), torch.uint8)
        self._shift = self.mine.data_ptr() - first.data_ptr()
        torch.cuda.synchronize()
        group.transport.barrier(True)  # no access before every buffer is zero

    @property
    def bases(self) -> list[int]:
        """The address here of each rank's buffer."""
        shift = self.mine.data_ptr() - self._handle.buffer_ptrs[self.rank]
        return [p + shift for p in self._handle.buffer_ptrs]

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A contiguous tensor in a rank's memory, ``offset`` bytes from its beginning."""
        found: Tensor = self._handle.get_buffer(rank, tuple(shape), dtype, (self._shift + offset) // dtype.itemsize)
        return found

    def signal(self, rank: int) -> None:
        self._handle.put_signal(rank, SIGNAL)

    def wait(self, rank: int) -> None:
        self._handle.wait_signal(rank, SIGNAL)

    def barrier(self) -> None:
        """Every rank's current stream has come here."""
        self._handle.barrier(BARRIER)
