"""Ranks as threads of this process, whose memories are ordinary tensors: the algorithms over symmetric memory without GPUs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

DEADLINE_S = 20


class Memory:
    """As ``weft.comm.symmetric.memory.SymmetricMemory``. ``log`` (shared) gets what each rank did."""

    def __init__(self, rank, buffers, flags, meeting):
        self.rank, self.ranks, self._buffers, self._flags, self._meeting = rank, len(buffers), buffers, flags, meeting

    def of(self, rank, shape, dtype, offset=0):
        count = torch.Size(shape).numel() * dtype.itemsize
        return self._buffers[rank][offset : offset + count].view(dtype).view(*shape)

    def signal(self, rank):
        self._flags[self.rank, rank].release()

    def wait(self, rank):
        if not self._flags[rank, self.rank].acquire(timeout=DEADLINE_S):
            raise TimeoutError(f"rank {self.rank} waits for rank {rank}")

    def barrier(self):
        self._meeting.wait(DEADLINE_S)


def on_ranks(n, size, call):
    """``call(memory)`` on n ranks at once; their results in order of rank."""
    buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(n)]
    flags = {(a, b): threading.Semaphore(0) for a in range(n) for b in range(n)}
    meeting = threading.Barrier(n)
    with ThreadPoolExecutor(n) as pool:
        calls = [pool.submit(call, Memory(r, buffers, flags, meeting)) for r in range(n)]
        results = [c.result(timeout=2 * DEADLINE_S) for c in calls]
    assert not any(f.acquire(blocking=False) for f in flags.values())  # every signal was waited for
    return results
