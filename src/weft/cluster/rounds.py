"""Policies that decide in rounds, in plain Python and with the whole state before them.

::

    def decide(view):
        return sorted(view.jobs, key=view.served)  # who should hold GPUs, the most important first

    ORDER = Order("time-slices", lambda jobs: (), "…", rounds=Rounds(decide, every_s=360))

Jobs are given room in that order: a job that runs keeps its nodes, unless one before it in the list needs them. Who is not
in the list holds no GPUs until the next round. Rounds come at every arrival and completion, or at every multiple of so many
seconds. Nothing here is compiled: thousands of jobs, not millions.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weft.cluster import preempt
from weft.cluster.model import Cluster, Jobs
from weft.cluster.parts import Job
from weft.cluster.result import REASONS, Result, Stretches
from weft.cluster.seen import SeenJob, SeenNode, SeenSimulator
from weft.words import count

if TYPE_CHECKING:
    from weft.cluster.reference import Simulator


class PolicyError(ValueError):
    """A policy that raises, or decides what cannot be; the message has its name, the moment, and the job it is about."""


@dataclass(frozen=True)
class View:
    """What a policy sees at a round. Nothing of it can be written to.

    Args:
        now: seconds.
        jobs: all that have arrived and not ended; ``job.row`` is its row of the trace, ``job.state`` ``running`` or not,
            ``job.placed`` its nodes.
        nodes: with what is free of them.
        simulator: all else: quotas, racks, costs, the history (:class:`weft.cluster.seen.SeenSimulator`).
    """

    now: float
    jobs: tuple[SeenJob, ...]
    nodes: tuple[SeenNode, ...]
    simulator: SeenSimulator

    def served(self, job: Job) -> float:
        """Seconds that a job has held its GPUs."""
        return job.served + (self.now - job.begins if job.state == "running" else 0.0)

    def left(self, job: Job) -> float:
        """Seconds until it would end by its estimate, were it to hold its GPUs from now on; a restart counts."""
        if job.state == "running":
            return job.left + job.resume - (self.now - job.begins)
        return job.left + float(self.simulator.restart_s if job.stops else 0.0)


def following(now: float, every_s: float) -> float:
    """The first round after a moment, of those every so many seconds; inf where they come with what happens."""
    if not every_s:
        return math.inf
    turn = math.floor(now / every_s)
    while turn * every_s <= now:  # the quotient is rounded
        turn += 1
    return turn * every_s


def decide(sim: Simulator) -> None:
    """One round, where it is time for one: asks the policy, stops who is not to go on, and starts who is to."""
    assert sim.order.rounds
    every = sim.order.rounds.every_s
    if every and round(sim.now / every) * every != sim.now:
        return
    running = [job for job in sim.jobs.values() if job.state == "running"]
    there = {job.number: job for job in sorted([*sim.queue, *running], key=lambda job: job.number)}
    shown = {number: SeenJob(job) for number, job in there.items()}
    view = View(sim.now, tuple(shown.values()), tuple(map(SeenNode, sim.nodes)), SeenSimulator(sim))
    name = f"policy '{sim.order.name}' at {sim.now:g} s"
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is the result's
            chosen = list(sim.order.rounds.decide(view))
    except (Exception, SystemExit) as error:
        raise PolicyError(f"{name} raised {type(error).__name__}: {error}") from error
    seen: set[int] = set()
    for rank, job in enumerate(chosen):
        if not isinstance(job, SeenJob) or shown.get(job.number) is not job:
            raise PolicyError(f"{name} chose {getattr(job, 'id', job)!r}; expected jobs of view.jobs")
        if job.number in seen:
            raise PolicyError(f"{name} chose job {job.id!r} twice; expected each once")
        seen.add(job.number)
        there[job.number].rank = float(rank)
    for job in running:
        if job.number not in seen:
            for node, piece, gpus in job.placed:
                node.give_back(piece, job.id, gpus)
            preempt.end_stretch(sim, job)
    left_out = [job for job in sim.queue if job.number not in seen]
    sim.queue = [job for job in sim.queue if job.number in seen]
    preempt.start_in_turn(sim, [])
    sim.queue += left_out
    sim.history.append((sim.now, "round", sim.order.name))
    if sim.queue and not sim.coming and not any(job.state == "running" for job in there.values()):
        first = min(sim.queue, key=lambda job: job.number)
        raise PolicyError(
            f"{name} starts none of those that wait ({count(len(sim.queue), 'job')}), and nothing runs or will come: "
            f"job {first.id!r} waits since {first.submit:g} s"
        )


def run(
    sim: Simulator,
    jobs: Jobs,
    cluster: Cluster,
    result: Callable[..., Result],
    until: float,
    on_progress: Callable[[int, int], None],
) -> Result:
    """Runs a trace on a simulator that has the cluster's nodes and knows the trace.

    Args:
        result: makes one of what happened; it knows jobs, cluster, order, placement, ties and seed.

    Raises:
        PolicyError: see there.
    """
    never = {}
    numbers = {}
    for j in range(len(jobs)):
        if reason := sim.add(jobs.take(np.array([j]))):
            never[j] = reason
        else:
            numbers[j] = sim.jobs[jobs.id[j]]
    begin, complete = time.process_time(), True
    try:
        while sim.next_moment() <= until:
            if not sim.step():
                break
            on_progress(sum(job.state == "completed" for job in numbers.values()), len(numbers))
    except KeyboardInterrupt:
        complete = False
    cpu_s = time.process_time() - begin
    place = {name: n for n, name in enumerate(cluster.names)}
    start, end, lost = np.full(len(jobs), np.nan), np.full(len(jobs), np.nan), np.zeros(len(jobs))
    stops, waited = np.zeros(len(jobs), np.int64), np.zeros((len(jobs), len(REASONS)))
    stretches: list[tuple[int, float, float, list[int], list[int]]] = []
    for j in range(len(jobs)):
        job = numbers.get(j)
        if job is None or job.start is None:
            stretches.append((j, np.nan, np.nan, [], []))
            continue
        start[j], stops[j], lost[j] = job.start, job.stops, job.lost
        waited[j] = [job.waited.get(reason, 0.0) for reason in REASONS]
        stretches += [(j, since, till, [place[name] for name in names], on) for since, till, names, on in job.stretches]
        if job.end is not None:
            end[j] = job.end
            on = [sum(1 << gpu for gpu in gpus) for _, _, gpus in job.placed]
            stretches.append((j, job.begins, job.end, [place[node.id] for node, _, _ in job.placed], on))
    count = [len(where) for *_, where, _ in stretches]
    held = Stretches(
        np.array([j for j, *_ in stretches], np.int64),
        np.array([since for _, since, *_ in stretches], float),
        np.array([till for _, _, till, *_ in stretches], float),
        np.concatenate(([0], np.cumsum(count))).astype(np.int64),
        np.array([n for *_, where, _ in stretches for n in where], np.int32),
        np.array([gpus for *_, on in stretches if sim.detailed for gpus in on], np.int32),
    )
    return result(
        start=start,
        end=end,
        stretches=held,
        waited=waited,
        stops=stops,
        lost=lost,
        unschedulable=never,
        cpu_s=cpu_s,
        restart_s=sim.restart_s,
        checkpoint_s=sim.checkpoint_s,
        complete=complete,
    )
