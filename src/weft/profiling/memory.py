"""The caching allocator's events as a timeline, and what was alive at the peak."""

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import Any

from weft.profiling import attribution, cost
from weft.profiling.trace import MemoryEvent, Span, Trace

POINTS = 400  # of a timeline
TOP = 12  # allocations listed


@dataclass
class Memory:
    """``timeline`` is (ns, bytes allocated), with each stretch's maximum; ``top`` what was alive at the peak, by its origin."""

    device: str
    peak: int
    peak_at: int
    before: int  # bytes that were allocated before the profile began
    timeline: list[tuple[int, int]]
    top: list[dict[str, Any]]
    remedies: list["Remedy"]


@dataclass
class Remedy:
    """What would lower the peak, and by how much at most."""

    what: str
    saves: int  # bytes
    rule: str


def of(trace: Trace) -> Memory | None:
    """Of the device with the highest peak (a GPU where there is one); None where allocations were not recorded."""
    devices: dict[str, list[MemoryEvent]] = {}
    for event in trace.memory:
        devices.setdefault(event.device, []).append(event)
    found = [_of(trace, device, events) for device, events in devices.items()]
    return max(found, key=lambda m: (m.device.startswith("cuda"), m.peak), default=None)


def _of(trace: Trace, device: str, events: list[MemoryEvent]) -> Memory:
    first = events[0]
    level = before = max(0, first.total - first.size) if first.total is not None else 0
    levels = []
    for event in events:
        level = event.total if event.total is not None else max(0, level + event.size)
        levels.append(level)
    peak = max(levels)
    at = levels.index(peak)
    alive: dict[int, MemoryEvent] = {}
    for event in events[: at + 1]:
        if event.size > 0:
            alive[event.address] = event
        else:
            alive.pop(event.address, None)
    origins = _origins(trace, list(alive.values()), events[at])
    remedies = _remedies(origins, any(s.name.startswith(attribution.ENGINE) for s in trace.host))
    return Memory(device, peak, events[at].time, before, _thin(events, levels), origins.top(), remedies)


def _thin(events: list[MemoryEvent], levels: list[int]) -> list[tuple[int, int]]:
    """At most POINTS points: of each stretch the highest."""
    stride = -(-len(events) // POINTS)
    return [
        max(((events[i].time, levels[i]) for i in range(at, min(at + stride, len(events)))), key=lambda p: p[1])
        for at in range(0, len(events), stride)
    ]


@dataclass
class Origins:
    """Bytes and blocks alive at the peak, by (operator, phase, module, stack, dtype); the phase in which the peak came."""

    sizes: Counter[tuple[Any, ...]]
    counts: Counter[tuple[Any, ...]]
    phase: str

    def top(self) -> list[dict[str, Any]]:
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for key, size in self.sizes.items():
            names = {"operator": key[0], "phase": key[1], "module": key[2], "stack": list(key[3])}
            row = found.setdefault(key[:4], names | {"bytes": 0, "count": 0})
            row["bytes"] += size
            row["count"] += self.counts[key]
        return sorted(found.values(), key=lambda row: -row["bytes"])[:TOP]

    def total(self, phase: str, *dtypes: str) -> int:
        return sum(n for key, n in self.sizes.items() if key[1] == phase and (not dtypes or key[4] in dtypes))


def _remedies(origins: Origins, backward: bool) -> list[Remedy]:
    """The four that cost no change of the model, those that save something, the largest first."""
    saved, fp32, gradients = origins.total("forward"), origins.total("forward", "fp32"), origins.total("backward")
    found = [
        Remedy("torch.no_grad() or torch.inference_mode()", 0 if backward else saved,
               "there is no backward: all that forward operators keep at the peak"),
        Remedy("zero_grad(set_to_none=True) before forward", gradients if origins.phase == "forward" else 0,
               "gradients of the last step that are alive at a peak in forward"),
        Remedy("torch.autocast in bf16", fp32 // 2, "half of what fp32 operators of forward keep"),
        Remedy("half the batch, accumulated twice", saved // 2 if backward else 0, "half of what forward keeps for backward"),
    ]  # fmt: skip
    return sorted((r for r in found if r.saves > 0), key=lambda r: -r.saves)


def _origins(trace: Trace, alive: list[MemoryEvent], peak: MemoryEvent) -> Origins:
    threads: dict[Any, list[Span]] = {}
    for span in trace.host:
        threads.setdefault(span.thread, []).append(span)
    forward = attribution.forward_operators(trace)
    sizes: Counter[tuple[Any, ...]] = Counter()
    counts: Counter[tuple[Any, ...]] = Counter()
    for event in alive:
        inside = _open(threads.get(event.thread, []), event.time)
        ops = [s for s in inside if s.kind == "op"]
        phase, module = attribution.context(ops[0] if ops else inside[0] if inside else None, forward)
        caller = next((s.name for s in ops if not s.name.startswith("aten::empty") and s.name != "aten::resize_"), "")
        frames = attribution.stack(ops[0]) if ops else []
        dtype = next((found for s in ops if (found := cost.dtype(s.args))), "")
        key = (caller or (ops[0].name if ops else "(outside of operators)"), phase, module, tuple(frames), dtype)
        sizes[key] += event.size
        counts[key] += 1
    around = _open(threads.get(peak.thread, []), peak.time)
    return Origins(sizes, counts, attribution.context(around[0] if around else None, forward)[0])


def _open(spans: list[Span], time: int) -> list[Span]:
    """The spans of a thread that are open at a time, the innermost first."""
    i = bisect.bisect_right(spans, time, key=lambda s: s.start) - 1
    innermost = spans[i] if i >= 0 else None
    while innermost is not None and innermost.end < time:
        innermost = innermost.parent
    return [] if innermost is None else [innermost, *innermost.within()]
