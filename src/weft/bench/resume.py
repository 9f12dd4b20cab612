"""What ``weft bench --resume`` has left to do: points without a record of the current commit."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft import records
from weft.definition import Implementation, Operator, Workload
from weft.records import Store

Point = tuple[Operator, Workload, str]


def left(
    points: Iterable[Point], chosen: Mapping[str, Sequence[Implementation]], bench: Any, store: Store
) -> list[Point]:
    """Points without a record of this machine, cache and commit, and points where one of our implementations can run that
    has no record of this operator and direction: it is new. (One with a record elsewhere has declined this point.)"""
    commit = records.commit()
    done: set[tuple[str, ...]] = set()
    measured: set[tuple[str, ...]] = set()
    for m in store.read(bench.context()["gpu"]):
        if m.cache == bench.timer.cache and m.commit == commit:
            done.add((m.operator, m.direction, m.workload, m.dtype))
            measured.add((m.operator, m.direction, m.implementation))

    def is_left(op: Operator, w: Workload, direction: str) -> bool:
        if (op.name, direction, str(w), w.dtype) not in done:
            return True
        new = [i for i in chosen[op.name] if i.ours and (op.name, direction, i.name) not in measured]
        return any(bench.present(op, i, w, direction) for i in new)

    return [point for point in points if is_left(*point)]
