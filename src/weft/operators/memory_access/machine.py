"""What the predictions of this family are made from: a machine in eight numbers."""

import functools
from dataclasses import dataclass

BANKS = 32  # of shared memory, one 4-byte word of each a cycle


@dataclass(frozen=True)
class Machine:
    """Defaults are an H200's."""

    memory: float = 4.3e12  # bytes a second that a plain copy moves, reads and writes together
    fetch: int = 64  # bytes that L2 fetches from memory at once: two sectors
    l2: int = 60 * 10**6  # bytes that it holds
    l2_per_cycle: int = (
        5120  # bytes that it gives all multiprocessors (NVIDIA's figure for A100, whose L2 has the same shape)
    )
    multiprocessors: int = 132
    threads: int = 2048  # resident on each multiprocessor
    clock: float = 1.98e9  # cycles a second
    latency: float = 700e-9  # seconds from a load to its value, out of memory that is busy

    @property
    def l2_rate(self) -> float:
        """Bytes a second out of L2."""
        return self.l2_per_cycle * self.clock


COPY_EFFICIENCY = 0.9  # of the bus: refreshes, and turning round between reads and writes


@functools.cache
def here() -> Machine:
    """This machine, as far as its driver says; an H200 where there is no GPU."""
    import torch

    from weft.hardware.query import theoretical_bandwidth

    if not torch.cuda.is_available():
        return Machine()
    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        memory=COPY_EFFICIENCY * theoretical_bandwidth() or Machine.memory,
        l2=p.L2_cache_size,
        multiprocessors=p.multi_processor_count,
        threads=p.max_threads_per_multi_processor,
        clock=getattr(p, "clock_rate", Machine.clock / 1e3) * 1e3,
    )
