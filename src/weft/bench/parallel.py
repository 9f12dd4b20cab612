"""``weft bench --jobs N``: N processes compile and check comparisons at once, and time them one at a time.

Compiling peers, tracing and checking against float64 take seconds of one core for each point, timing it less than one. Each
process prepares points of its own; :mod:`weft.bench.gpu_lock` stops the others while one times.
"""

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from weft import registry
from weft.bench import gpu_lock
from weft.bench.compare import LostDevice, bytes_of_check
from weft.definition import Operator, Workload
from weft.records import Measurement

# A point takes this many times its compulsory bytes: two sets of inputs, results, tensors saved for backward, workspace.
COPIES = 8
LOST_DEVICE = 75  # exit status of a process that must be replaced
OVERHEAD_BYTES = 2**30  # each process's context, code, and the buffer that flushes the cache

Point = tuple[Operator, Workload, str]
Job = tuple[str, Workload, str, tuple[str, ...]]  # operator, workload, direction, implementations


@dataclasses.dataclass
class Without:
    """A process's last message: measure this point again without the implementation that lost the device."""

    at: int
    implementation: str


class ProcessDied(RuntimeError):
    """A worker process ended before its work did."""


def compare(
    bench: Any, points: Sequence[Point], implementations: Mapping[str, Sequence[Any]], processes: int
) -> Iterator[tuple[Point, list[Measurement]]]:
    """Measures the points in several processes, and yields each with its records, as they come.

    Args:
        bench: a :class:`weft.bench.compare.Bench`, which the workers copy.
        points: operator, workload and direction.
        implementations: of each operator, by name.
        processes: how many.

    Raises:
        ProcessDied: one was killed or crashed; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    processes = min(processes, len(points))
    memory = torch.cuda.mem_get_info()[0] if bench.device == "cuda" else float("inf")
    shared = gpu_lock.SharedState(context, processes, memory - processes * OVERHEAD_BYTES)
    following = context.Value("q", 0)
    jobs: list[Job] = [(op.name, w, d, tuple(i.name for i in implementations[op.name])) for op, w, d in points]
    plain = dataclasses.replace(bench, say=_silent)
    workers: list[Any] = [None] * processes
    again: list[int | None] = [None] * processes  # the point that a replacement process begins with
    pipes: dict[Connection, int] = {}

    def start(index: int) -> None:
        receiver, sender = context.Pipe(duplex=False)
        arguments = (index, plain, jobs, following, again[index], shared, sender)
        again[index] = None
        workers[index] = context.Process(target=_work, args=arguments, daemon=True)
        workers[index].start()
        sender.close()
        pipes[receiver] = index

    for index in range(processes):
        start(index)
    begin = time.monotonic()
    try:
        while pipes:
            for pipe in wait(pipes):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except EOFError:
                    index = pipes.pop(pipe)
                    workers[index].join()
                    if workers[index].exitcode == LOST_DEVICE:
                        start(index)
                    elif workers[index].exitcode:
                        raise ProcessDied(
                            f"a process of --jobs ended with status {workers[index].exitcode}; fewer may fit in memory"
                        ) from None
                    continue
                if isinstance(message, str):
                    bench.say(message)
                elif isinstance(message, Without):
                    name, w, d, names = jobs[message.at]
                    jobs[message.at] = name, w, d, tuple(n for n in names if n != message.implementation)
                    again[pipes[pipe]] = message.at
                else:
                    at, rows = message
                    yield points[at], rows
    finally:
        bench.say(shared.summary(time.monotonic() - begin))
        for worker in workers:
            if worker.is_alive():
                worker.kill()  # SIGKILL also ends a stopped process
            worker.join()


def _lost_device(error: RuntimeError) -> bool:
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except torch.AcceleratorError:
        return True
    return isinstance(error, torch.AcceleratorError)


def _release() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _silent(text: str) -> None:
    pass


def _work(
    index: int,
    bench: Any,
    jobs: list[Job],
    following: Any,
    first: int | None,
    shared: gpu_lock.SharedState,
    sender: Any,
) -> None:
    """Measures points until none is left, beginning with ``first`` if it is given."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends the workers
    bench.say = sender.send
    if bench.device == "cuda":
        import torch._inductor.config as inductor  # takes a second; on a CPU no peer is compiled

        inductor.compile_threads = 1  # compile in this process: SIGSTOP would not reach a pool of compilers
        lock = gpu_lock.GpuLock(shared, index, gpu_lock.wait_for_idle_gpu, _release)
        lock.wrap_autotuners()
    else:
        lock = gpu_lock.GpuLock(shared, index)
    bench.lock = lock
    while True:
        if first is not None:
            at, first = first, None
        else:
            with following.get_lock():
                at = following.value
                following.value += 1
        if at >= len(jobs):
            break
        name, w, direction, implementations = jobs[at]
        op = registry.get(name)
        moved = op.cost(w, direction).bytes_moved
        try:
            with lock.memory(COPIES * moved, bytes_of_check(op.inputs(w, None, "meta"))):
                rows = bench.compare(op, w, direction, [op.find(i) for i in implementations])
                bench.free()
        except (gpu_lock.LockHeldTooLong, torch.cuda.OutOfMemoryError) as error:
            sender.send(f"{name} {direction} at {w} {w.dtype} is left out: {error}")
            rows = []
        except LostDevice as lost:
            sender.send(f"{name} {direction} at {w} {w.dtype} begins anew without {lost.implementation}: {lost}")
            sender.send(Without(at, lost.implementation))
            lock.leave()
            os._exit(LOST_DEVICE)
        except (
            RuntimeError
        ) as error:  # after a kernel's fault the process cannot use the device: cuBLAS may say so first
            if not _lost_device(error):
                raise
            sender.send(f"{name} {direction} at {w} {w.dtype} is left out: {str(error).splitlines()[0]}")
            sender.send((at, []))
            lock.leave()
            os._exit(LOST_DEVICE)
        sender.send((at, rows))
    lock.leave()
