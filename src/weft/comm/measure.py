"""Times one collective at one size on all ranks, and counts wrong elements before and after."""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from weft.comm.collectives import Buffers, Collective
from weft.comm.group import Group
from weft.comm.settings import ITEM_BYTES, Settings
from weft.comm.values import DTYPES, fill, poison, wrong
from weft.timing import quantile

BUDGET_S = 0.3  # of one point, where the number of iterations is not given
LEAST, MOST = 10, 500  # iterations
MOST_QUEUED = 100  # of them while a GPU waits: its queue holds about a thousand launches and events
WARM_UP = 3
IN_FLIGHT = 4  # calls, in mode async
IN_GRAPH = 10  # calls, in mode graph
SPIKE = 3.0  # times the median
SPIKES_KEPT = 8  # of a point, the worst
LATE_SHARE, LATE_US = 0.5, 20.0  # of the median, and at least: how late a rank enters that others wait for
Empty = Callable[[int, torch.dtype], Any]  # allocates so many elements


def counts(collective: Collective, size: int, dtype: str, n: int) -> tuple[int, int, int]:
    """(elements of the whole, elements of one rank's part, bytes that are reported) for a requested size."""
    item = ITEM_BYTES[dtype]
    part = max(size // item // n, 1)
    count = part * n if collective.split else max(size // item, 1)
    return count, part, count * item if any(collective.elements(count, n, 0)) else 0


def plan(collective: Collective, settings: Settings, n: int) -> list[int]:
    """The requested sizes without those that come to the same number of elements."""
    found = {counts(collective, size, settings.dtype, n)[2]: size for size in reversed(settings.bytes)}
    return sorted(found.values())


def bytes_needed(collective: Collective, size: int, settings: Settings, n: int) -> int:
    """Bytes of buffers on the rank that needs most, and of indices while results are compared."""
    count, _, _ = counts(collective, size, settings.dtype, n)
    sets = IN_FLIGHT if settings.mode == "async" else 1
    whole = sum(collective.elements(count, n, 0)) * ITEM_BYTES[settings.dtype]
    return sets * whole + 40 * min(count, 1 << 22)


class Point:
    """One collective at one size. All ranks make the same one.

    Args:
        empty: allocates a buffer; by default PyTorch's own memory.
    """

    def __init__(
        self,
        collective: Collective,
        size: int,
        group: Group,
        settings: Settings,
        device: torch.device,
        empty: Empty | None = None,
    ):
        self.collective, self.group, self.settings, self.device = collective, group, settings, device
        self.count, self.part, self.bytes = counts(collective, size, settings.dtype, group.size)
        self.in_place = self._in_place()
        sets = IN_FLIGHT if settings.mode == "async" else 1
        self.empty = empty or (lambda n, dtype: torch.empty(n, dtype=dtype, device=device))
        self.host_s = 0.0  # that a call takes to return
        self.buffers = [self._make() for _ in range(sets)]

    def _in_place(self) -> bool:
        """Whether calls are in place: what was asked, and by default what the backend's interface has alone."""
        place, alias = self.settings.place, self.collective.alias
        if place == "in" and not alias:
            raise ValueError(f"{self.collective.name} has no in-place call; leave --place out")
        return place == "in" or (place == "default" and alias == "same" and self.group.backend != "mpi")

    def _make(self) -> Buffers:
        g, s = self.group, self.settings
        inputs, outputs = self.collective.elements(self.count, g.size, g.rank)
        dtype = DTYPES[s.dtype]
        if self.in_place:
            whole = self.empty(max(inputs, outputs), dtype)
            mine = whole[g.rank * self.part :][: self.part]
            inp = mine if self.collective.alias == "input in output" else whole
            out = mine if self.collective.alias == "output in input" else whole
        else:
            inp = self.empty(inputs, dtype)
            out = self.empty(outputs, dtype)
        return Buffers(inp, out, g.size, g.rank, self.part, s)

    def measure(self) -> tuple[dict[str, Any], ...] | None:
        """What rank 0 gathers: a dictionary for each rank, of ``stamps_us`` (the beginning of each iteration and the end of
        the last, from a common start) and ``wrong``; None on other ranks."""
        control, name = self.group.control, f"{self.collective.name} {self.bytes} B {self.settings.dtype}"
        self.group.checked = self.settings.checked
        with control.region(f"checking {name}"):
            bad = self._check(lambda b: self.collective.call(self.group, b))
        self.group.checked = False  # nothing but the collective is timed
        with control.region(f"timing {name}"):
            call, per_call, once = self._call()
            for _ in range(WARM_UP):
                call()
            self._synchronize()
            iterations = self._iterations(call, per_call)
        with control.region(f"timing {name}", control.deadline_s + 10 * BUDGET_S):
            base_us, stamps = self._time(call, iterations)
            self._synchronize()
        with control.region(f"checking {name}"):
            bad += self._check(lambda b: once())
        self.group.checked = self.settings.checked
        name = f"times/{self.collective.name}/{self.settings.dtype}/{self.bytes}"
        found = control.gather(
            name,
            {
                "stamps_us": stamps, "base_us": base_us, "host": socket.gethostname(), "wrong": bad, "per_stamp": per_call,
            },
        )  # fmt: skip
        return None if found is None else tuple(found)

    # ---- right?

    def _check(self, call: Callable[[Buffers], Any]) -> int:
        """Wrong elements of one call on fresh inputs and poisoned outputs, on this rank."""
        s, g = self.settings, self.group
        for b in self.buffers:
            poison(b.out)
            fill(b.inp, g.rank, s.dtype, s.op, g.size)
        self._synchronize()
        if g.backend != "nccl":
            g.transport.barrier(True)
        call(self.buffers[0])
        self._synchronize()
        b = self.buffers[0]
        if self.collective.expected(b, torch.zeros(1, dtype=torch.int64)) is None:
            return 0
        return wrong(b.out, lambda j: self.collective.expected(b, j), s.dtype, s.op, g.size)  # type: ignore[arg-type,return-value]

    # ---- fast?

    def _call(self) -> tuple[Callable[[], None], int, Callable[[], None]]:
        """What is called between two time stamps, how many collectives that is, and one round of it to check: on each buffer
        one call, since in place a second one would reduce results."""
        c, g, b = self.collective, self.group, self.buffers[0]
        if self.settings.mode == "async":

            def flight() -> None:
                for handle in [c.call(g, each, wait=False) for each in self.buffers]:
                    if handle is not None:
                        handle.wait()

            return flight, IN_FLIGHT, flight
        if self.settings.mode == "graph":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                c.call(g, b)
            torch.cuda.current_stream().wait_stream(stream)
            graphs = []
            for calls in (IN_GRAPH, 1):
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1]):
                    for _ in range(calls):
                        c.call(g, b)
            return graphs[0].replay, IN_GRAPH, graphs[1].replay

        def one() -> None:
            c.call(g, b)

        return one, 1, one

    def _iterations(self, call: Callable[[], None], per_call: int) -> int:
        """Time stamps to take: what was asked, or what the budget holds on the slowest rank."""
        begin = time.perf_counter()
        for _ in range(WARM_UP):
            call()
        self.host_s = (time.perf_counter() - begin) / WARM_UP
        self._synchronize()
        if self.settings.iterations:
            return max(1, -(-self.settings.iterations // per_call))
        seconds = torch.tensor([(time.perf_counter() - begin) / WARM_UP], dtype=torch.float64, device=self.device)
        self.group.transport.all_reduce(seconds, seconds, "max", True)
        if self.settings.subgroups:  # groups share the links: the same number in all
            return LEAST
        queued = self.device.type == "cuda" and self.settings.mode != "blocking"
        return int(min(max(BUDGET_S / max(seconds.item(), 1e-7), LEAST), MOST_QUEUED if queued else MOST))

    def _time(self, call: Callable[[], None], iterations: int) -> tuple[float | None, list[float]]:
        """This host's clock at the first stamp (None: the stamps are a GPU's) and the stamps since, microseconds."""
        if self.device.type == "cuda" and self.settings.mode != "blocking":
            return None, self._time_events(call, iterations)
        wait = self.device.type == "cuda"
        call()
        if wait:
            torch.cuda.synchronize()
        self.group.transport.barrier(True)  # in a rooted collective a rank could run ahead
        stamps = [time.perf_counter()]
        for _ in range(iterations):
            call()
            if wait:
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())
        return stamps[0] * 1e6, [(t - stamps[0]) * 1e6 for t in stamps]

    def _time_events(self, call: Callable[[], None], iterations: int) -> list[float]:
        """The device is kept busy while the host queues the calls, so that no launch gaps are timed; an all-reduce before
        the first event brings all ranks together (in a rooted collective one could run ahead, and then wait long)."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
        torch.cuda._sleep(int(2e9 * min(1.5 * iterations * self.host_s + 1e-3, 0.2)))  # cycles: about 2 GHz
        together = torch.zeros(1, device=self.device)
        self.group.transport.all_reduce(together, together, "sum", True)
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        return [events[0].elapsed_time(event) * 1e3 for event in events]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def record(point: Point, found: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One point as ``--json`` prints it. Times in microseconds, rates in GB/s (1e9), nccl-tests' definitions: ``time_us`` is
    the mean over iterations and ranks; p50 and p99 are of each iteration's slowest rank."""
    s, size = point.settings, point.bytes
    per_stamp = found[0]["per_stamp"]
    by_rank = [[(b - a) / per_stamp for a, b in pairwise(one["stamps_us"])] for one in found]
    each = [max(column) for column in zip(*by_rank, strict=True)]
    time_us = statistics.mean(map(statistics.mean, by_rank))
    algbw = size / time_us / 1e3
    middle = statistics.median(each)
    late = (
        _lateness(found) if not point.collective.rooted and point.collective.name != "send_recv" else [0.0] * len(found)
    )
    straggler = max(range(len(late)), key=lambda r: late[r])
    spikes = [i for i, t in enumerate(each) if t > SPIKE * middle and t > middle + LATE_US]
    worst = sorted(sorted(spikes, key=lambda i: -each[i])[:SPIKES_KEPT])
    return {
        "collective": point.collective.name,
        "bytes": size,
        "dtype": s.dtype,
        "time_us": time_us,
        "algbw": algbw,
        "busbw": algbw * point.collective.factor(point.group.size),
        "wrong": sum(one["wrong"] for one in found),
        "count": point.count if size else 0,
        "op": s.op if point.collective.reduces else None,
        "root": s.root if point.collective.rooted else None,
        "in_place": point.in_place,
        "mode": s.mode,
        "registered": s.registered,
        "backend": point.group.backend,
        "ranks": len(found),
        "subgroups": s.subgroups or None,
        "iterations": len(each) * per_stamp,
        "p20_us": quantile(each, 0.2),
        "p50_us": middle,
        "p80_us": quantile(each, 0.8),
        "p99_us": quantile(each, 0.99),
        "max_us": max(each),
        "rank_us": [statistics.mean(times) for times in by_rank],
        "spikes": [
            {"iteration": i, "time_us": each[i], "slowest_rank": max(range(len(by_rank)), key=lambda r: by_rank[r][i])}
            for i in worst
        ],
        "spike_count": len(spikes),
        "straggler": straggler if late[straggler] > max(LATE_SHARE * middle, LATE_US) else None,
        "late_us": late,
    }


def _lateness(found: Sequence[dict[str, Any]]) -> list[float]:
    """How late each rank enters an iteration, against the median rank: the median over the iterations. Ranks of one host
    share its clock; between hosts, and on GPUs, all are taken to start together. (In rooted collectives ranks do not wait
    for each other, so entries say nothing.)"""
    first: dict[str, float] = {}
    entries = []
    for one in found:
        base = one["base_us"] or 0.0
        shift = base - first.setdefault(one["host"], base)
        entries.append([t + shift for t in one["stamps_us"][:-1]])
    middles = [statistics.median(column) for column in zip(*entries, strict=True)]
    return [statistics.median(t - m for t, m in zip(rank, middles, strict=True)) for rank in entries]
