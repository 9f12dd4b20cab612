"""What ``weft bench --resume`` has left to do: points that are not on record for today's sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.definition import Implementation, Operator, Workload
from weft.records import Store
from weft.source import source_hash

Point = tuple[Operator, Workload, str]


def left(
    points: Iterable[Point], chosen: Mapping[str, Sequence[Implementation]], bench: Any, store: Store
) -> list[Point]:
    """Points without a record of this machine, cache and source, and those where an implementation of ours could run that has
    none at any point of this operator and direction: it is new. (One that has some and not this one has declined it.)"""
    done: set[tuple[str, ...]] = set()
    seen: set[tuple[str, ...]] = set()
    for m in store.read(bench.context()["gpu"]):
        if m.cache == bench.timer.cache:
            done.add((m.operator, m.direction, m.source, m.workload, m.dtype))
            seen.add((m.operator, m.direction, m.source, m.implementation))

    def undone(op: Operator, w: Workload, direction: str) -> bool:
        key = op.name, direction, source_hash(op.module)
        if (*key, str(w), w.dtype) not in done:
            return True
        new = [made for made in chosen[op.name] if made.ours and (*key, made.name) not in seen]
        return any(bench.present(op, made, w, direction) for made in new)

    return [point for point in points if undone(*point)]
