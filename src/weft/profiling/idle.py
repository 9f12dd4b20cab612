"""When the GPU had nothing to do, and why.

A gap is a time in which no kernel and no copy runs on the device. Its cause is found on the thread that launched what ends it:

- ``data loader``: at least half of the gap passed inside ``DataLoader.__next__``;
- ``synchronisation``: the host was waiting for the GPU when it ran dry (``.item()``, ``.cpu()``, ``cudaStreamSynchronize``), so
  that nothing was queued behind;
- ``allocation``: at least half of it passed inside ``cudaMalloc``, ``cudaFree`` and the like;
- ``queued``: the launch had returned before the gap began: the GPU itself took so long to begin;
- ``launch``: the host was launching all the while, or the gap is at most 250 µs: the GPU is faster than the launches;
- ``host``: a longer stretch in which Python or operators launched nothing;
- ``unknown``: the trace has no launch for what ends the gap.
"""

import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from weft.profiling import trace as traces
from weft.profiling.attribution import Work
from weft.profiling.trace import Span, Trace, merged, overlap

SHORT = 250_000  # ns: a gap that the Python and the dispatch of one or a few launches explain
MOST_SEEN = 2_000  # spans of a long gap that are looked at
CAUSES = ("launch", "host", "synchronisation", "data loader", "allocation", "queued", "unknown")


@dataclass(slots=True)
class Gap:
    start: int
    end: int
    cause: str
    what: str  # the operator, call or Python function that took the time

    @property
    def ns(self) -> int:
        return self.end - self.start


@dataclass
class Host:
    """The host's threads, by what they were doing."""

    loading: dict[Any, list[tuple[int, int]]] = field(default_factory=dict)
    waiting: dict[Any, list[Span]] = field(default_factory=dict)
    allocating: dict[Any, list[tuple[int, int]]] = field(default_factory=dict)
    launching: dict[Any, list[tuple[int, int]]] = field(default_factory=dict)
    starts: dict[Any, list[int]] = field(default_factory=dict)
    spans: dict[Any, list[Span]] = field(default_factory=dict)


def gaps(trace: Trace, work: list[Work], window: tuple[int, int]) -> list[Gap]:
    """The gaps of the busiest device inside the window, in order; empty without device events."""
    if not trace.on_gpu or not work:
        return []
    devices: Counter[Any] = Counter()
    for w in work:
        devices[_device(w)] += w.ns
    device = devices.most_common(1)[0][0]
    host = _host(trace)
    found, reached = [], window[0]
    for w in (w for w in work if _device(w) == device):
        if w.span.start > reached:
            found.append(_gap(reached, w.span.start, w, host))
        reached = max(reached, min(w.span.end, window[1]))
    if window[1] > reached:
        found.append(Gap(reached, window[1], "host", "the end of the last step"))
    return found


def _device(w: Work) -> Any:
    return w.span.thread[0]


def _host(trace: Trace) -> Host:
    host = Host()
    for s in trace.host:
        host.spans.setdefault(s.thread, []).append(s)
        if s.kind == "call":
            if traces.SYNCHRONISE.match(s.name):
                host.waiting.setdefault(s.thread, []).append(s)
            elif traces.ALLOCATE.match(s.name):
                host.allocating.setdefault(s.thread, []).append((s.start, s.end))
            elif traces.LAUNCH.match(s.name):
                host.launching.setdefault(s.thread, []).append((s.start, s.end))
        elif s.name.startswith(traces.DATA_LOADER):
            host.loading.setdefault(s.thread, []).append((s.start, s.end))
    for table in (host.loading, host.allocating, host.launching):
        for thread in table:
            table[thread] = merged(table[thread])
    host.starts = {thread: [s.start for s in spans] for thread, spans in host.spans.items()}
    return host


def _gap(start: int, end: int, next_work: Work, host: Host) -> Gap:
    launch = next_work.launch
    if launch is None:
        return Gap(start, end, "unknown", "")
    half = (end - start) / 2
    # a backward's launches come from autograd's thread, while the main thread may wait or load
    loading = max((overlap(spans, start, end) for spans in host.loading.values()), default=0)
    if loading >= half:
        return Gap(start, end, "data loader", traces.DATA_LOADER)
    if launch.start <= start and launch.end <= start:
        return Gap(start, end, "queued", next_work.operator)
    for thread, spans in host.waiting.items():
        waited = _open_at(spans, start)
        if waited is not None and thread in host.launching:  # not a thread that pins memory, say
            op = next((s.name for s in waited.within() if s.kind == "op"), waited.name)
            return Gap(start, end, "synchronisation", op)
    if overlap(host.allocating.get(launch.thread, []), start, end) >= half:
        return Gap(start, end, "allocation", next_work.operator)
    if end - start <= SHORT or overlap(host.launching.get(launch.thread, []), start, end) >= half:
        return Gap(start, end, "launch", next_work.operator)
    return Gap(start, end, "host", _busiest(host, launch.thread, start, end))


def _open_at(spans: list[Span], start: int) -> Span | None:
    """The wait that was open when the device ran dry."""
    i = bisect.bisect_right(spans, start, key=lambda s: s.start) - 1
    return spans[i] if i >= 0 and spans[i].start <= start < spans[i].end else None


def _busiest(host: Host, thread: Any, start: int, end: int) -> str:
    """The innermost span that covers at least half of the gap; else the operator or function with the largest part of it."""
    spans, starts = host.spans[thread], host.starts[thread]
    first, last = bisect.bisect_left(starts, start), bisect.bisect_right(starts, end)
    before = [spans[first - 1], *spans[first - 1].within()] if first else []
    best, name, depth = 0, "Python", 0
    parts: Counter[str] = Counter()
    for s in (*before, *spans[first : min(last, first + MOST_SEEN)]):
        covered = min(s.end, end) - max(s.start, start)
        if covered <= 0 or traces.STEP.match(s.name) or s.name.startswith("<"):
            continue
        parts[s.name] += covered
        deep = sum(1 for _ in s.within())
        if covered >= (end - start) / 2 and deep >= depth:
            best, name, depth = covered, s.name, deep
    return name if best or not parts else parts.most_common(1)[0][0]
