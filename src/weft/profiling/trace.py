"""What a profile is made of, whoever recorded it: spans on the device and on the host's threads, in integer nanoseconds.

Readers (``kineto``, ``nsys``) fill a :class:`Trace`; all else works on it.
"""

import bisect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

STEP = re.compile(r"(?:ProfilerStep#|(?:train(?:ing)?[ _-]?)?(?:step|iteration)[ _#:-]*)(\d+)$", re.IGNORECASE)
LAUNCH = re.compile(r"(?:cuda|cu)(?:Launch|GraphLaunch)")
SYNCHRONISE = re.compile(r"(?:cuda|cu)(?:Device|Stream|Event|Ctx)Synchronize")
ALLOCATE = re.compile(r"(?:cuda|cu)(?:Mem)?(?:Malloc|Free|HostAlloc|MallocHost|FreeHost|Alloc|HostRegister)(?!Async)")
DATA_LOADER = "enumerate(DataLoader)"


@dataclass(slots=True, eq=False)
class Span:
    """``start`` and ``end`` are nanoseconds; ``parent`` encloses it on the same host thread (set by :func:`nest`)."""

    name: str
    kind: str  # kernel, copy, memset; call (CUDA API), op, annotation, python
    start: int
    end: int
    thread: Any  # a thread of the host, or (device, stream)
    correlation: Any = None  # the same for a launch and what it launched
    args: dict[str, Any] = field(default_factory=dict)
    parent: "Span | None" = None

    @property
    def ns(self) -> int:
        return self.end - self.start

    def within(self) -> Iterator["Span"]:
        """What encloses the span, from the inside out."""
        found = self.parent
        while found is not None:
            yield found
            found = found.parent


@dataclass(slots=True)
class MemoryEvent:
    """One allocation (``size`` > 0) or release of the caching allocator."""

    time: int
    size: int
    address: int
    total: int | None  # bytes allocated after it, where recorded
    device: str  # cuda:0, cpu
    thread: Any


@dataclass
class Trace:
    """One process's profile. ``dropped`` counts the events that could not be used, by reason."""

    source: str
    gpu: str = ""
    rank: int | None = None
    device: list[Span] = field(default_factory=list)  # kernels, copies, memsets
    host: list[Span] = field(default_factory=list)  # calls, operators, annotations, Python functions
    memory: list[MemoryEvent] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def on_gpu(self) -> bool:
        return bool(self.device)

    def finish(self) -> "Trace":
        """Sorts, nests host spans and finds the steps.

        Raises:
            ValueError: there is nothing in it that takes time.
        """
        self.device.sort(key=lambda s: (s.start, s.end))
        self.memory.sort(key=lambda m: m.time)
        self.host = list(nest(self.host))
        began = sorted(s.start for s in self.host if s.kind in ("op", "call"))
        steps = {s.name: s for s in self.host if s.kind == "annotation" and STEP.match(s.name) and _any(began, s)}
        self.steps = sorted(steps.values(), key=lambda s: s.start)
        if not self.device and not self.host:
            lost = "; ".join(f"{n} events dropped: {why}" for why, n in self.dropped.items())
            raise ValueError(
                f"{self.source} holds no kernel, operator or call{lost and f' ({lost})'}; expected a profile"
            )
        start, end = self.window()
        if start == end:
            raise ValueError(f"{self.source} holds nothing that takes time; expected a profile")
        return self

    def window(self) -> tuple[int, int]:
        """From the first step's start to the last one's end; without steps from the first event to the last."""
        spans = self.steps or self.device + self.host
        end = max(s.end for s in spans)
        if self.steps and self.device:  # a step's last kernels run on after its Python has returned
            launched = {s.correlation for s in self.host if s.kind == "call" and s.start <= end}
            end = max([end, *(s.end for s in self.device if s.correlation in launched)])
        return min(s.start for s in spans), end


def _any(times: list[int], span: Span) -> bool:
    """Whether one of the sorted times lies inside: the last step of a loop that ended early is empty."""
    i = bisect.bisect_left(times, span.start)
    return i < len(times) and times[i] < span.end


def nest(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans sorted by start, each with its parent: the innermost span of its thread that is open at its middle (a
    step may begin inside ``Optimizer.step``, and end long after it)."""
    order = {"python": 0, "annotation": 1, "op": 2, "call": 3}
    stacks: dict[Any, list[Span]] = {}
    for span in sorted(spans, key=lambda s: (s.start, -s.end, order.get(s.kind, 4))):
        stack = stacks.setdefault(span.thread, [])
        while (
            stack
            and stack[-1].end <= span.start
            and not (stack[-1].start == span.start and stack[-1].ns == span.ns == 0)
        ):
            stack.pop()
        middle = (span.start + span.end) // 2
        span.parent = next((s for s in reversed(stack) if s.end >= middle), None)
        stack.append(span)
        yield span


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of intervals, as intervals that do not touch, in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def overlap(intervals: list[tuple[int, int]], start: int, end: int) -> int:
    """How much of [start, end] the merged intervals cover."""
    covered = 0
    i = max(0, bisect.bisect_right(intervals, (start, start)) - 1)
    while i < len(intervals) and intervals[i][0] < end:
        covered += max(0, min(end, intervals[i][1]) - max(start, intervals[i][0]))
        i += 1
    return covered


def without(intervals: list[tuple[int, int]], others: list[tuple[int, int]]) -> int:
    """How much of the merged intervals no other merged interval covers."""
    return sum(end - start - overlap(others, start, end) for start, end in intervals)


def clipped(span: Span, window: tuple[int, int]) -> tuple[int, int]:
    return max(span.start, window[0]), min(span.end, window[1])
