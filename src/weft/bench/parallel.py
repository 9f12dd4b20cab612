"""``weft bench --jobs N``: N processes compile and check comparisons at once, and time them one at a time.

Compiling peers, tracing and checking against float64 take seconds of one core for each point, timing it less than one. Each
process prepares points of its own; :mod:`weft.bench.turns` stops the others while one times.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch._inductor.config as inductor

from weft import registry
from weft.bench import turns
from weft.definition import Operator, Workload
from weft.records import Measurement

Point = tuple[Operator, Workload, str]
Job = tuple[str, Workload, str, tuple[str, ...]]  # operator, workload, direction, implementations


class ProcessDied(RuntimeError):
    """A process that prepared and timed points ended before its work did."""


def compare(
    bench: Any, points: Sequence[Point], implementations: Mapping[str, Sequence[Any]], processes: int
) -> Iterator[tuple[Point, list[Measurement]]]:
    """Measures the points in several processes, and yields each with its records, as they come.

    Args:
        bench: a :class:`weft.bench.compare.Bench` of this process; the others measure as it would.
        points: operator, workload and direction.
        implementations: of each operator, by name.
        processes: how many.

    Raises:
        ProcessDied: one was killed or crashed; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    lock, checking = context.Lock(), context.Lock()
    processes = min(processes, len(points))
    pids = context.Array("q", processes, lock=False)
    following = context.Value("q", 0)
    jobs: list[Job] = [(op.name, w, d, tuple(i.name for i in implementations[op.name])) for op, w, d in points]
    plain = dataclasses.replace(bench, say=_silent)
    workers: list[Any] = []
    pipes: list[Connection] = []
    for index in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (index, plain, jobs, following, lock, checking, pids, sender)
        workers.append(context.Process(target=_work, args=arguments, daemon=True))
        workers[-1].start()
        sender.close()
        pipes.append(receiver)
    try:
        while pipes:
            waiting = wait(pipes)
            for pipe in [pipe for pipe in pipes if pipe in waiting]:
                try:
                    message = pipe.recv()
                except EOFError:
                    pipes.remove(pipe)
                    continue
                if isinstance(message, str):
                    bench.say(message)
                else:
                    at, rows = message
                    yield points[at], rows
            for worker in workers:
                if worker.exitcode:
                    raise ProcessDied(
                        f"a process of --jobs ended with status {worker.exitcode}; fewer may fit in memory"
                    )
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()  # also one that is stopped
            worker.join()


def _silent(text: str) -> None:
    pass


def _work(
    index: int, bench: Any, jobs: list[Job], following: Any, lock: Any, checking: Any, pids: Any, sender: Any
) -> None:
    """Takes point after point until none is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the others
    inductor.compile_threads = 1  # compile here: helpers of its own would not be stopped
    bench.say = sender.send
    if bench.device == "cuda":
        turn = turns.Turns(lock, checking, pids, turns.device_is_quiet)
    else:
        turn = turns.Turns(lock, checking, pids)
    turn.for_autotuners()
    bench.turns = turn
    with lock:  # nobody measures meanwhile, so nobody's turn misses this process
        pids[index] = os.getpid()
    while True:
        with following.get_lock():
            at = following.value
            following.value += 1
        if at >= len(jobs):
            break
        name, w, direction, implementations = jobs[at]
        op = registry.get(name)
        try:
            rows = bench.compare(op, w, direction, [op.find(i) for i in implementations])
        except turns.TurnTooLong as error:
            sender.send(f"{name} {direction} at {w} {w.dtype} is left out: {error}")
            rows = []
        bench.free()
        sender.send((at, rows))
    pids[index] = 0
