"""What the link between two ranks gives at most, measured in the same run: the limit that bus bandwidth is compared with."""

import time
from typing import Any

import torch

from weft.comm.group import Group

CPU_BYTES = 64 << 20  # beyond the caches


def measure(world: Group, device: torch.device) -> dict[str, Any]:
    """``gb_s`` and ``what`` it is. All ranks call it.

    On GPUs: a copy from GPU 0 to the GPU of the next rank of this host by copy engine; beside it what the driver says the
    NVLinks give. On CPUs: every rank copies memory at once, which is what a message between processes at least takes.
    """
    if device.type != "cuda":
        return _memory(world)
    from weft.hardware import bandwidth, topology

    found: dict[str, Any] = {"gb_s": None, "what": "no second GPU on the host of rank 0"}
    if world.rank == 0 and torch.cuda.device_count() > 1:
        found = {"gb_s": bandwidth.copy_gb_s(0, 1), "what": "copy between GPU 0 and GPU 1 by copy engine"}
        found["theoretical_gb_s"] = topology.link_gb_s(0, 1)
    everyone = torch.zeros(1, device=device)
    world.transport.all_reduce(everyone, everyone, "sum", True)  # the others wait, so that nothing disturbs it
    torch.cuda.synchronize()
    return found


def _memory(world: Group) -> dict[str, Any]:
    source, target = torch.ones(CPU_BYTES, dtype=torch.uint8), torch.empty(CPU_BYTES, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target.copy_(source)
    times = []
    for _ in range(5):
        world.transport.barrier(True)
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    torch.set_num_threads(threads)
    slowest = torch.tensor([sorted(times)[2]], dtype=torch.float64)
    world.transport.all_reduce(slowest, slowest, "max", True)
    return {
        "gb_s": CPU_BYTES / slowest.item() / 1e9,
        "what": f"memory copy by {world.size} processes at once, each",
    }
