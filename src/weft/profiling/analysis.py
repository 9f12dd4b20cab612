"""A trace as tables: operators with their share of time and of the ceilings, steps, idle time by cause, copies, memory."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from weft import records
from weft.definition import Cost
from weft.profiling import advice, attribution, cost, idle, memory, trace
from weft.profiling.attribution import Work, short
from weft.profiling.tables import Copies, Idle, Profile, Row, Step
from weft.profiling.trace import Trace, clipped, merged, overlap, without


def analyse(found: Trace, ceilings: Any = None) -> Profile:
    """The tables of a trace, and what to do first.

    Args:
        found: of :func:`weft.profiling.read`.
        ceilings: measured rates (:class:`weft.hardware.ceilings.Ceilings`); by default the newest records of the trace's GPU
            in ``results/`` or ``WEFT_RESULTS``.
    """
    window = found.window()
    work = attribution.of(found, window)
    limits, named = (ceilings, "given") if ceilings is not None else recorded(found.gpu)
    gaps = idle.gaps(found, work, window)
    busy = merged(clipped(w.span, window) for w in work)
    profile = Profile(
        source=found.source,
        device="cuda" if found.on_gpu else "cpu",
        gpu=found.gpu,
        rank=found.rank,
        window_us=(window[1] - window[0]) / 1e3,
        busy_us=sum(end - start for start, end in busy) / 1e3,
        launches=sum(1 for s in found.host if _launch(s) and window[0] <= s.start <= window[1]),
        rows=rows(work, limits),
        steps=_steps(found, work, busy),
        idle=_idle(gaps),
        copies=_copies(work),
        memory=memory.of(found),
        dropped=dict(found.dropped),
        ceilings=named,
        work=work,
        trace=found,
    )
    profile.advice = advice.ranked(profile, gaps, limits)
    return profile


def recorded(gpu: str) -> tuple[Any, str]:
    """(Ceilings, "NVIDIA H200, measured 2026-11-20") of the newest run that measured them on this GPU; (None, "") without."""
    from weft.hardware.ceilings import Ceilings

    measured = records.Store().read(gpu, records.CEILING) if gpu else []
    if not measured:
        return None, ""
    newest = max(m.time for m in measured)
    found = Ceilings("cuda")
    for m in measured:
        kind, _, mix = m.implementation.partition(" ")
        if m.time == newest and kind == "memory" and ":" in mix:
            reads, writes = mix.split(":")
            found.bandwidth[int(reads), int(writes)] = m.details["value"]
        elif m.time == newest and mix == "matrix":
            found.matrix[kind] = m.details["value"]
    return found, f"{gpu}, measured {newest[:10]}"


def rows(work: list[Work], limits: Any) -> list[Row]:
    """Work grouped by operator, phase, module and dtype, the longest first."""
    groups: dict[tuple[str, str, str, str], list[Work]] = {}
    for w in work:
        dtype = cost.dtype(w.op.args) if w.op is not None else ""
        groups.setdefault((w.operator, w.phase, w.module, dtype), []).append(w)
    total = sum(w.ns for w in work) or 1
    found = []
    for (operator, phase, module, dtype), members in groups.items():
        ns = sum(w.ns for w in members)
        names = Counter(short(w.span.name) for w in members if w.span.kind != "op")
        row = Row(
            operator, phase, module, [n for n, _ in names.most_common(3)], len(members), ns / 1e3, ns / total, dtype
        )
        _rates(row, members, limits)
        found.append(row)
    return sorted(found, key=lambda r: -r.time_us)


def _rates(row: Row, members: list[Work], limits: Any) -> None:
    """Fills in bandwidth, FLOP rate and share of the ceiling."""
    by_op: dict[Any, int] = {}
    origins = {w.op: w.origin for w in members if w.op is not None}
    for w in members:  # an operator may launch several kernels
        if w.op is not None:
            by_op[w.op] = by_op.get(w.op, 0) + w.ns
    known: list[tuple[Cost, int]] = []
    for op, ns in by_op.items():
        origin = origins[op]
        found = cost.of(op.name, op.args) if origin is None else cost.of_backward(origin.name, origin.args)
        if found is not None and ns > 0:
            known.append((found, ns))
    seconds = sum(ns for _, ns in known) / 1e9
    if not seconds:
        return
    moved = sum(c.bytes_moved for c, _ in known)
    flops = sum(c.flops for c, _ in known)
    row.bytes_per_s = moved / seconds
    row.flops_per_s = flops / seconds if flops else None
    if limits is not None:
        bounds = [limits.limit(c) for c, _ in known]
        if all(us for us, _ in bounds):
            row.share_of_ceiling = sum(us for us, _ in bounds) / (seconds * 1e6)
            row.limit_name = Counter(name for _, name in bounds).most_common(1)[0][0]


def _launch(span: trace.Span) -> bool:
    return span.kind == "call" and bool(trace.LAUNCH.match(span.name))


def _steps(found: Trace, work: list[Work], busy: list[tuple[int, int]]) -> list[Step]:
    loading = merged((s.start, s.end) for s in found.host if s.name.startswith(trace.DATA_LOADER))
    made = []
    for step in found.steps:
        span = (step.start, step.end)
        inside = [w for w in work if w.span.start < step.end and w.span.end > step.start]
        at_work = overlap(busy, *span)
        copies = sum(max(0, _length(clipped(w.span, span))) for w in inside if w.span.kind == "copy")
        device = {m.device for m in found.memory}
        device = {d for d in device if d.startswith("cuda")} or device
        levels = [
            m.total for m in found.memory if m.device in device and m.total is not None and span[0] <= m.time <= span[1]
        ]
        made.append(
            Step(
                step.name,
                step.ns / 1e3,
                at_work / 1e3,
                (step.ns - at_work) / 1e3,
                sum(w.span.kind == "kernel" for w in inside),
                sum(1 for s in found.host if _launch(s) and span[0] <= s.start < span[1]),
                copies / 1e3,
                overlap(loading, *span) / 1e3,
                max(levels, default=None),
            )
        )
    return made


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _idle(gaps: Iterable[idle.Gap]) -> list[Idle]:
    by_cause: dict[str, list[idle.Gap]] = {}
    for gap in gaps:
        by_cause.setdefault(gap.cause, []).append(gap)
    made = []
    for cause, members in by_cause.items():
        parts: Counter[str] = Counter()
        for gap in members:
            parts[gap.what] += gap.ns
        what = [(name, ns / 1e3) for name, ns in parts.most_common(3) if name]
        made.append(Idle(cause, sum(g.ns for g in members) / 1e3, len(members), what))
    return sorted(made, key=lambda i: -i.time_us)


def copy_kind(span: trace.Span) -> tuple[str, str]:
    """(``HtoD``, ``pageable``) from Kineto's ``Memcpy HtoD (Pageable -> Device)``."""
    words = span.name.replace("(", " ").replace(")", " ").split()
    kind = next((w for w in words if "to" in w and len(w) == 4), span.name)
    lower = span.name.lower()
    return kind, "pageable" if "pageable" in lower else "pinned" if "pinned" in lower else ""


def _copies(work: list[Work]) -> list[Copies]:
    computing = merged((w.span.start, w.span.end) for w in work if w.span.kind == "kernel")
    groups: dict[tuple[str, str], list[Work]] = {}
    for w in work:
        if w.span.kind == "copy":
            groups.setdefault(copy_kind(w.span), []).append(w)
    made = []
    for (kind, host_memory), members in groups.items():
        ns = sum(w.ns for w in members)
        moved = sum(size for w in members if isinstance(size := w.span.args.get("bytes"), int) and size > 0)
        exposed = without(merged((w.span.start, w.span.end) for w in members), computing)
        rate = moved / ns * 1e9 if ns and moved else None
        made.append(Copies(kind, host_memory, len(members), moved, ns / 1e3, exposed / 1e3, rate))
    return sorted(made, key=lambda c: -c.time_us)
