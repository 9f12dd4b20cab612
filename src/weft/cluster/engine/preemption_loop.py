"""The event loop of orders that preempt running jobs (``weft.cluster.reference.preemption`` is the plain form)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.engine.allocate import pieces_of
from weft.cluster.engine.compiled import address_of, compiled, entry, inlined
from weft.cluster.engine.node import TOPOLOGY
from weft.cluster.engine.preemption_allocate import allocate, allocate_near, enter, evict, put_back, re_enter
from weft.cluster.engine.preemption_cost import PLACED
from weft.cluster.engine.preemption_keys import (
    CHANGED,
    DEMOTED,
    DRIFT,
    EVICTED,
    IN_PASS,
    JOB,
    NOW,
    PLACED_PIECES,
    PROGRESS,
    STARTED,
    STRETCHES,
    WRITTEN_NODES,
    Queue,
    demote,
    give_sequence,
    go_on,
    join_running,
    key_on_arrival,
    next_change,
    requeue,
    requeue_evicted,
    sort_by_key,
    start,
    stop,
)
from weft.cluster.engine.queues import ARRIVED, COMPLETED, ENTRY, RUNNING, push, remove
from weft.cluster.engine.tables import PLAIN, Tables
from weft.cluster.engine.tree import NEVER
from weft.cluster.engine.wait_reasons import PRIORITY, begin_waiting, end_waiting, set_reason, why
from weft.cluster.model import WHOLE, Jobs
from weft.cluster.order import FREE, KNOWN, Preemption
from weft.cluster.orders import ORDERS
from weft.cluster.result import REASONS, Stretches

__all__ = ["JOB", "Loop"]

# A stretch of time in which a job held its nodes, which begin at `slot` in `held`; of job VOID it is void. `gpus`: as
# of a placed piece.
STRETCH = np.dtype([("job", "i8"), ("begin", "f8"), ("end", "f8"), ("slot", "i8")])
HELD = np.dtype([("node", "i4"), ("gpus", "i4")])
VOID = -1
NOTHING_LEFT, GO_ON, NEEDS_ROOM = range(3)


# ---- heaps -----------------------------------------------------------------------------------------------------------


@inlined
def add_event(q, job):
    push(q.events, q.jobs, 0, q.progress[RUNNING], next_change(q.jobs, job, q.thresholds), job)
    q.progress[RUNNING] += 1


@inlined
def remove_event(q, job):
    remove(q.events, q.jobs, 0, q.progress[RUNNING], job)
    q.progress[RUNNING] -= 1


@inlined
def add_waiting(q, classes, c, job):
    push(q.waiting, q.jobs, classes[c].begin, classes[c].size, q.jobs[job].key, job)
    classes[c].size += 1


@inlined
def remove_waiting(q, classes, c, job):
    remove(q.waiting, q.jobs, classes[c].begin, classes[c].size, job)
    classes[c].size -= 1


@compiled
def unblock_all(classes):
    for c in range(len(classes)):
        classes[c].blocked = False


@inlined
def unblock_after(q, classes, j):
    """Jobs after one that evicted others may find more free than it took."""
    for c in range(len(classes)):
        if classes[c].size:
            head = q.waiting[classes[c].begin]
            if head.key > q.jobs[j].key or (head.key == q.jobs[j].key and head.job > j):
                classes[c].blocked = False


@inlined
def next_waiting(q, classes):
    """Of the waiting jobs that may have become able to start the first: its class, -1 for none, and itself."""
    c, j = -1, np.int64(-1)
    for other in range(len(classes)):
        if classes[other].size and not classes[other].blocked:
            head = q.waiting[classes[other].begin]
            if c < 0 or head.key < q.jobs[j].key or (head.key == q.jobs[j].key and head.job < j):
                c, j = other, head.job
    return c, j


@inlined
def next_evicted(q):
    """Of the jobs evicted in this pass and not tried since, the first; -1 for none."""
    first, jobs = np.int64(-1), q.jobs
    for k in range(q.progress[EVICTED]):
        j = q.evicted[k]
        if not jobs[j].pending or jobs[j].tried:
            continue
        if first < 0 or jobs[j].key < jobs[first].key or (jobs[j].key == jobs[first].key and j < first):
            first = j
    return first


# ---- the loop --------------------------------------------------------------------------------------------------------


@inlined
def record(s, q, j, now):
    """Writes down the stretch that ends now."""
    progress = q.progress
    k, slot, to = progress[STRETCHES], q.jobs[j].slot, progress[WRITTEN_NODES]
    q.stretches[k].job, q.stretches[k].begin, q.stretches[k].end, q.stretches[k].slot = j, q.jobs[j].begins, now, to
    count = pieces_of(s.classes, q.jobs[j].cls)
    for i in range(count):
        q.held[to + i].node, q.held[to + i].gpus = s.where[slot + i], q.placed[slot + i].gpus
    progress[STRETCHES] += 1
    progress[WRITTEN_NODES] += count
    progress[PLACED_PIECES] -= count


@compiled
def happen(s, q, now):
    """What happens at a time before the passes: jobs end, are demoted, and arrive."""
    jobs, progress, classes = q.jobs, q.progress, s.classes
    progress[CHANGED] = q.rules[DRIFT] == FREE
    progress[STARTED] = progress[EVICTED] = progress[DEMOTED] = 0
    while progress[RUNNING] and q.events[0].key == now:
        j = q.events[0].job
        remove_event(q, j)
        progress[CHANGED] = 1
        if jobs[j].ends == now:
            evict(s, q, j)
            record(s, q, j, now)
            jobs[j].lost += jobs[j].restart
            progress[COMPLETED] += 1
            continue
        demote(q, j, now)
        re_enter(s, q, j, now)
        add_event(q, j)
        q.demoted[progress[DEMOTED]] = j
        progress[DEMOTED] += 1
    while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
        j, c = progress[ARRIVED], jobs[progress[ARRIVED]].cls
        give_sequence(q, j, True)
        jobs[j].key = key_on_arrival(q, j)
        jobs[j].ends = np.nan
        begin_waiting(classes, q.total, q.waits, c, j, now)
        add_waiting(q, classes, c, j)
        if q.waiting[classes[c].begin].job == j:
            classes[c].blocked = False
        progress[ARRIVED] += 1
    if progress[CHANGED]:
        unblock_all(classes)


@compiled
def end_pass(s, q, now):
    """After a pass: jobs that were demoted and still run take their sequence number there, and preempted ones theirs.
    Says whether any was preempted."""
    jobs, progress = q.jobs, q.progress
    sort_by_key(jobs, q.demoted, progress[DEMOTED])
    for k in range(progress[DEMOTED]):
        j = q.demoted[k]
        if not jobs[j].runs_in_level and not np.isnan(jobs[j].ends):
            join_running(q, j, now)
            re_enter(s, q, j, now)
    preempted = False
    sort_by_key(jobs, q.evicted, progress[EVICTED])
    for k in range(progress[EVICTED] - 1, -1, -1):  # the most important last: each takes the first sequence number
        j = q.evicted[k]
        if jobs[j].pending:
            jobs[j].pending = 0
            stop(q, j, now)
            requeue(q, j)
            begin_waiting(s.classes, q.total, q.waits, jobs[j].cls, j, now)
            add_waiting(q, s.classes, jobs[j].cls, j)
            preempted = True
    progress[EVICTED] = progress[DEMOTED] = 0
    return preempted


@entry
def advance(s, q, until, most):
    """Runs up to ``most`` event times, none after ``until``; says whether anything is left to happen, or NEEDS_ROOM
    where ``stretches`` or ``held`` might not hold what comes next."""
    jobs, progress, classes = q.jobs, q.progress, s.classes
    done = 0
    while done < most:
        now = q.rules[NOW]
        if not progress[IN_PASS]:
            now = jobs[progress[ARRIVED]].submit if progress[ARRIVED] < len(jobs) else np.inf
            if progress[RUNNING]:
                now = min(now, q.events[0].key)
            if now == np.inf or now > until:
                return NOTHING_LEFT
        if progress[STRETCHES] + progress[RUNNING] > len(q.stretches) or (
            progress[WRITTEN_NODES] + progress[PLACED_PIECES] > len(q.held)
        ):
            return NEEDS_ROOM
        if not progress[IN_PASS]:
            q.rules[NOW], progress[IN_PASS] = now, 1
            happen(s, q, now)
            continue
        c, j = next_waiting(q, classes)
        again = next_evicted(q)
        if again >= 0 and (c < 0 or jobs[again].key < jobs[j].key or (jobs[again].key == jobs[j].key and again < j)):
            jobs[again].tried = 1
            go_on(q, again, now)
            if put_back(s, q, again, now):
                q.stretches[jobs[again].pending - 1].job = VOID
                jobs[again].pending = 0
                progress[PLACED_PIECES] += pieces_of(classes, jobs[again].cls)
                add_event(q, again)
            else:
                requeue_evicted(q, again, now)
            continue
        if c >= 0:
            if s.meta[TOPOLOGY]:
                evicted = allocate_near(s, q, j, now)
            else:
                evicted = allocate(s, q, j, 0, 0, False, now)
            if evicted < 0:
                classes[c].blocked = True
                continue
            progress[STARTED] = 1
            if evicted:
                unblock_after(q, classes, j)
            remove_waiting(q, classes, c, j)
            end_waiting(classes, q.total, q.waits, c, j, now)
            start(q, j, now)
            enter(s, q, j, now)
            progress[PLACED_PIECES] += pieces_of(classes, c)
            add_event(q, j)
            for k in range(evicted):
                victim = q.victims[k]
                remove_event(q, victim)
                record(s, q, victim, now)
                jobs[victim].pending, jobs[victim].tried = progress[STRETCHES], 0
                requeue_evicted(q, victim, now)
                q.evicted[progress[EVICTED]] = victim
                progress[EVICTED] += 1
            continue
        if end_pass(s, q, now):
            unblock_all(classes)
            continue
        for c in range(len(classes)):
            reason = -1
            if classes[c].size:
                unchanged = not progress[STARTED] and (not progress[CHANGED] or classes[c].reason == PRIORITY)
                if classes[c].reason >= 0 and unchanged:
                    continue
                reason = why(s, c, jobs[q.waiting[classes[c].begin].job].slot)
            set_reason(classes, q.total, c, reason, now)
        progress[IN_PASS] = 0
        done += 1
    return GO_ON


# ---- what the loop needs and leaves behind ---------------------------------------------------------------------------


def _code(order: Preemption, job: np.dtype[Any], known: NDArray[np.float64]) -> int:
    """What the engine knows an order's key by: its number, or a user's address, which float64 holds exactly."""
    numbered = [each.preemption for each in ORDERS.values() if each.preemption]
    if any(each is order for each in numbered):
        return next(i for i, each in enumerate(numbered) if each is order)
    try:
        return address_of(order.key, "", job, 0.0, 0.0, known)
    except ValueError as error:
        raise ValueError(f"key of an order: {error}; {PLAIN}") from error


class Loop:
    """The loop, and the stretches that it has written down so far.

    Args:
        tables: with jobs of the dtype :data:`JOB`.
        jobs, rows: the trace, and which of it those jobs are.
        order: how it preempts.
        restart_s, checkpoint_s, history: of :func:`weft.cluster.simulate`.
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
        table, s = tables.jobs, tables.state
        table["remaining"], table["work"], table["key"] = table["estimate"], table["duration"], np.nan
        table["gpus"] = (jobs.gpus * jobs.milli / WHOLE)[rows]
        table["priority"] = jobs.priority[rows]
        known = np.concatenate([np.zeros(KNOWN), order.context(history)])
        rules = [
            order.drift,
            _code(order, table.dtype, known),
            order.equals,
            restart_s,
            checkpoint_s,
            np.nan,
            len(s.on) > 0,
        ]
        victims, evicted, demoted = np.zeros((3, len(rows)), np.int64)
        nodes, kinds = len(s.nodes), len(s.pieces)
        tables.progress = np.zeros(PROGRESS, np.int64)
        self.queue = Queue(
            jobs=table,
            waiting=np.zeros(len(rows), ENTRY),
            events=np.zeros(len(rows), ENTRY),
            progress=tables.progress,
            total=tables.total,
            waits=tables.waits,
            thresholds=np.array([(level, order.by_gpus) for level in order.levels], float).reshape(-1, 2),
            rules=np.concatenate([rules, known[KNOWN:]]),
            victims=victims,
            evicted=evicted,
            demoted=demoted,
            stretches=np.zeros(len(rows) + 1, STRETCH),
            held=np.zeros(len(s.where) + 1, HELD),
            first=np.full(nodes, -1, np.int32),
            placed=np.zeros(len(s.where), PLACED),
            sorted_at=np.full(nodes, np.nan),
            costs=np.full((kinds, s.levels[-1]), NEVER),
            read=np.full(kinds, -1, np.int64),
            costs_at=np.full(kinds, np.nan),
        )

    def advance(self, most: int) -> bool:
        """Runs up to ``most`` event times; says whether anything is left to happen."""
        while True:
            status = advance(self.tables.state, self.queue, self.tables.until, most)
            if status != NEEDS_ROOM:
                return bool(status)
            doubled = {
                name: np.concatenate([old, np.zeros_like(old)])
                for name, old in (("stretches", self.queue.stretches), ("held", self.queue.held))
            }
            self.queue = self.queue._replace(**doubled)

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
        """Those that were written down, and those of jobs that were running when it was interrupted: they run to their
        end."""
        t, q, table, s = self.tables, self.queue, self.tables.jobs, self.tables.state
        count, written = t.progress[STRETCHES], t.progress[WRITTEN_NODES]
        running = np.sort(q.events["job"][: t.progress[RUNNING]])
        pieces = (s.classes["count"] + (s.classes["rest"] >= 0))[table["cls"][running]]
        slot = np.concatenate([q.stretches["slot"][:count], written + np.cumsum(pieces) - pieces])
        now = [slice(begin, begin + n) for begin, n in zip(table["slot"][running], pieces, strict=True)]
        held = np.concatenate([q.held["node"][:written], *(s.where[slots] for slots in now)])
        on = np.concatenate([q.held["gpus"][:written], *(q.placed["gpus"][slots] for slots in now)])
        length = np.diff(np.append(slot, len(held)))
        job = np.concatenate([q.stretches["job"][:count], running])
        begin = np.concatenate([q.stretches["begin"][:count], table["begins"][running]])
        order = np.lexsort((begin, job))
        order = order[job[order] != VOID]
        job, begin, slot, length = job[order], begin[order], slot[order], length[order]
        end = np.concatenate([q.stretches["end"][:count], table["ends"][running]])[order]
        first = np.concatenate(([0], np.cumsum(length)))
        source = np.repeat(slot - first[:-1], length) + np.arange(first[-1])
        return Stretches(self.rows[job], begin, end, first, held[source], on[source] if len(s.on) else s.on)

    def _waiting(self) -> NDArray[np.int64]:
        """The jobs that wait when nothing is left to happen or it was interrupted."""
        parts = [self.queue.waiting["job"][c["begin"] : c["begin"] + c["size"]] for c in self.tables.state.classes]
        return np.sort(np.concatenate([np.zeros(0, np.int64), *parts]))
