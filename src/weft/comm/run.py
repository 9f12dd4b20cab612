"""One rank's part of a run: joins the others, measures every point, sends the records to the launcher, which prints them."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from weft.comm import environment, ranks
from weft.comm.checked import CollectiveFailed, Control, OtherFailed
from weft.comm.collectives import Collective
from weft.comm.settings import Settings

START_S = 60.0  # in which processes that weft starts side by side have imported PyTorch


def run(
    settings: Settings,
    collectives: Sequence[Collective],
    backend: str,
    who: ranks.Ranks,
    about: Callable[[Control, dict[str, Any]], None],
    emit: Callable[[Control, dict[str, Any]], None],
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Joins and measures. ``about`` (the run's environment and its link's peak) and ``emit`` (a record) are called on rank
    0; ``on_end`` by a watch that ends this process.

    Raises:
        CollectiveFailed: ranks disagree, or one is missing.
        ValueError: the settings do not fit the ranks or the backend.
    """
    from weft.comm import measure, peak

    settings.check_ranks(who.size)
    world, control, device = join(backend, who, settings.deadline_s, on_end)
    try:
        with control.region("the link's peak rate", 60 + settings.deadline_s):
            found = peak.measure(world, device)
        if who.rank == 0:
            about(control, environment.describe(backend) | {"peak": found})
        group = world
        if settings.subgroups:
            n = settings.subgroups
            group = world.subgroups([range(i, i + n) for i in range(0, who.size, n)])
        empty = None
        if settings.registered:
            from weft.comm.torch_transport import registered

            empty = registered(group.transport.group, device)
        for collective in collectives:
            for size in measure.plan(collective, settings, group.size):
                _check_memory(
                    measure.bytes_needed(collective, size, settings, group.size), world, collective.name, size
                )
                point = measure.Point(collective, size, group, settings, device, empty)
                times = point.measure()
                if times is not None:
                    emit(control, measure.record(point, times))
                del point
        with control.region("the end of the run"):
            world.transport.barrier(True)
            world.transport.close()
    except Exception as error:
        if not isinstance(error, OtherFailed):
            kind = "" if isinstance(error, ValueError | MemoryError) else f"{type(error).__name__}: "
            control.fail(str(error) if isinstance(error, CollectiveFailed) else f"rank {who.rank}: {kind}{error}")
        raise
    finally:
        control.close()


def join(
    backend: str, who: ranks.Ranks, deadline_s: float, on_end: Callable[[], None] = lambda: None
) -> tuple[Any, Control, Any]:
    """This process's group of all ranks, its control and its device.

    Raises:
        CollectiveFailed: the rendezvous cannot be reached, or a rank does not come.
        ValueError: more ranks than GPUs on this host.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the errors are raised too, and say it in a line
    import torch

    from weft.comm.group import Group

    meeting_s = max(deadline_s, START_S) if who.by == "weft" else deadline_s
    device = torch.device("cpu")
    if backend == "nccl":
        gpus = torch.cuda.device_count()
        if who.local_rank >= gpus:
            raise ValueError(
                f"rank {who.rank} wants GPU {who.local_rank} of its host, which has {gpus}; start at most {gpus} ranks there"
            )
        device = torch.device("cuda", who.local_rank)
        torch.cuda.set_device(device)
    transport: Any
    if backend == "mpi":
        from weft.comm import mpi_transport

        world = mpi_transport.world()
        who = ranks.Ranks(world.Get_rank(), world.Get_size(), who.local_rank, who.by)
        store = ranks.rendezvous(who, meeting_s, world)
        control = Control(store, who.rank, who.size, deadline_s, on_end)
        transport = mpi_transport.MpiTransport(world)
    else:
        from weft.comm import torch_transport

        store = ranks.rendezvous(who, meeting_s)
        control = Control(store, who.rank, who.size, deadline_s, on_end)
        with control.region(f"{backend}'s set-up", 2 * deadline_s):
            transport = torch_transport.start(backend, store, who.rank, who.size, device, deadline_s)
    return Group(transport, range(who.size), control), control, device


def _check_memory(needed: int, world: Any, name: str, size: int) -> None:
    """Raises before an allocation that would not fit on some rank.

    Raises:
        MemoryError: names the collective and what is free.
    """
    import torch

    device = torch.device("cpu")
    if world.backend == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    else:
        free = _memory_available() // world.size  # ranks of other hosts have theirs: this errs to the safe side
    least = torch.tensor([float(free)], dtype=torch.float64, device=device)
    world.transport.all_reduce(least, least, "min", True)
    if needed > least.item():
        raise MemoryError(
            f"{name} of {size:,} bytes needs {needed >> 20:,} MiB a rank; {int(least.item()) >> 20:,} are free"
        )


def _memory_available() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 1 << 62
