"""What the loop that stops jobs needs and leaves behind, beyond the tables of all loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.engine import preempt, standing
from weft.cluster.engine.heaps import ENTRY
from weft.cluster.engine.prepare import Tables
from weft.cluster.engine.run import RUNNING
from weft.cluster.engine.tree import NEVER
from weft.cluster.engine.yields import PLACE
from weft.cluster.model import WHOLE, Jobs
from weft.cluster.order import Preemption
from weft.cluster.orders import ORDERS
from weft.cluster.result import REASONS, Stretches


class Kept:
    """The loop, and the stretches that it has written down so far.

    Args:
        tables: with jobs of the dtype ``standing.JOB``.
        jobs, rows: the trace, and which of it those jobs are.
        order: how it stops jobs.
        restart_s, checkpoint_s: of :func:`weft.cluster.simulate.simulate`.
    """

    def __init__(
        self,
        tables: Tables,
        jobs: Jobs,
        rows: NDArray[np.int64],
        order: Preemption,
        restart_s: float,
        checkpoint_s: float,
        history: Jobs,
    ):
        self.tables, self.trace, self.rows = tables, jobs, rows
        table = tables.jobs
        table["left"], table["work"], table["key"] = table["estimate"], table["duration"], np.nan
        table["gpus"] = (jobs.gpus * jobs.milli / WHOLE)[rows]
        table["priority"] = jobs.priority[rows]
        count = len(tables.state[0])
        self.waiting, self.events = np.zeros(len(rows), ENTRY), np.zeros(len(rows), ENTRY)
        self.first, self.places = np.full(count, -1, np.int32), np.zeros(len(tables.where), PLACE)
        self.tree = np.full((len(tables.pieces), tables.state[3][-1]), NEVER)
        self.read, self.asked = np.full(len(tables.pieces), -1, np.int64), np.full(len(tables.pieces), np.nan)
        self.sorted_at = np.full(count, np.nan)
        self.stopped, self.moved, self.fallen = np.zeros((3, len(rows)), np.int64)
        self.stretches = np.zeros(len(rows) + 1, preempt.STRETCH)
        self.held = np.zeros(len(tables.where) + 1, preempt.HELD)
        self.thresholds = np.array([(level, order.by_gpus) for level in order.levels], float).reshape(-1, 2)
        codes = [each.name for each in ORDERS.values() if each.preemption]
        code = next(codes.index(each.name) for each in ORDERS.values() if each.preemption is order)
        rules = [order.drift, code, order.equals, restart_s, checkpoint_s, np.nan, len(tables.on) > 0]
        self.rules = np.concatenate([rules, order.context(history)])

    def advance(self, most: int) -> bool:
        """Runs up to ``most`` moments; says whether anything is left to happen."""
        t, (nodes, best, ways, levels, log, meta, context, room) = self.tables, self.tables.state
        while True:
            left = preempt.advance(
                t.jobs, self.waiting, self.events, t.progress, t.where, t.on, self.first, self.places,
                self.sorted_at, self.tree, self.read, self.asked, self.stopped, self.moved, self.fallen, self.stretches,
                self.held, self.thresholds, self.rules, nodes, t.pieces, best, ways, levels, log, meta, context,
                room, t.classes, t.total, t.waits, t.until, most,
            )  # fmt: skip
            if left != preempt.NEEDS_ROOM:
                return bool(left)
            self.stretches = np.concatenate([self.stretches, np.zeros_like(self.stretches)])
            self.held = np.concatenate([self.held, np.zeros_like(self.held)])

    def result(self) -> dict[str, Any]:
        """Columns of :class:`weft.cluster.result.Result`, by name."""
        t, table, waiting = self.tables, self.tables.jobs, self._waiting()
        stretches = self._stretches()
        columns = {"start": np.nan, "end": np.nan, "stops": 0, "lost": 0.0}
        found: dict[str, Any] = {name: np.full(len(self.trace), usual) for name, usual in columns.items()}
        for name in ("start", "stops", "lost"):
            found[name][self.rows] = table[name]
        last = np.flatnonzero(np.diff(np.append(stretches.job, -1)))  # of each job
        found["end"][stretches.job[last]] = stretches.end[last]
        found["end"][self.rows[waiting]] = np.nan
        t.waits[waiting] += t.total[table["cls"][waiting]]
        t.waits[np.isnan(table["start"])] = 0.0
        if len(self.rows) < len(self.trace):
            every = np.zeros((len(self.trace), len(REASONS)))
            every[self.rows] = t.waits
            t.waits = every
        return {**found, "waited": t.waits, "stretches": stretches}

    def _stretches(self) -> Stretches:
        """Those that were written down, and those of jobs that were running when it was interrupted: they run to their end."""
        t, table, count = self.tables, self.tables.jobs, self.tables.progress[standing.STRETCHES]
        running = np.sort(self.events["job"][: t.progress[RUNNING]])
        pieces = (t.classes["count"] + (t.classes["rest"] >= 0))[table["cls"][running]]
        written = t.progress[standing.WRITTEN_PLACES]
        slot = np.concatenate([self.stretches["slot"][:count], written + np.cumsum(pieces) - pieces])
        now = [slice(s, s + n) for s, n in zip(table["slot"][running], pieces, strict=True)]
        held = np.concatenate([self.held["node"][:written], *(t.where[places] for places in now)])
        on = np.concatenate([self.held["gpus"][:written], *(self.places["gpus"][places] for places in now)])
        length = np.diff(np.append(slot, len(held)))
        job = np.concatenate([self.stretches["job"][:count], running])
        begin = np.concatenate([self.stretches["begin"][:count], table["begins"][running]])
        order = np.lexsort((begin, job))
        order = order[job[order] != preempt.NOBODY]
        job, begin, slot, length = job[order], begin[order], slot[order], length[order]
        end = np.concatenate([self.stretches["end"][:count], table["ends"][running]])[order]
        first = np.concatenate(([0], np.cumsum(length)))
        source = np.repeat(slot - first[:-1], length) + np.arange(first[-1])
        return Stretches(self.rows[job], begin, end, first, held[source], on[source] if len(t.on) else t.on)

    def _waiting(self) -> NDArray[np.int64]:
        """Who waits when nothing is left to happen or it was interrupted."""
        classes = self.tables.classes
        parts = [self.waiting["job"][c["begin"] : c["begin"] + c["size"]] for c in classes]
        return np.sort(np.concatenate([np.zeros(0, np.int64), *parts]))
