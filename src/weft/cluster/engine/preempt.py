"""The event loop of orders that may stop running jobs (``weft.cluster.preempt`` is the plain form of it)."""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.heaps import add_event, add_waiting, remove_event, remove_waiting
from weft.cluster.engine.node import TOPOLOGY
from weft.cluster.engine.rack_room import make_room_near
from weft.cluster.engine.reasons import PRIORITY, begin_waiting, end_waiting, settle, why
from weft.cluster.engine.room import lift, make_room, put_back, reseat, seat
from weft.cluster.engine.run import ARRIVED, COMPLETED, RUNNING
from weft.cluster.engine.standing import (
    CHANGED,
    CODE,
    DRIFT,
    FALLEN,
    LIFTED,
    NOW,
    PLACED,
    STARTED,
    STRETCHES,
    UNDER_WAY,
    WRITTEN_PLACES,
    end_stretch,
    fall,
    give_turn,
    go_on,
    key,
    lose_nodes,
    next_event,
    queue_again,
    settle_down,
    sort_by_key,
    start,
)
from weft.cluster.order import FREE

# A stretch of time in which a job held its nodes, which begin at `slot` in `held`; of job NOBODY it is void. `gpus`: as of
# a place.
STRETCH = np.dtype([("job", "i8"), ("begin", "f8"), ("end", "f8"), ("slot", "i8")])
HELD = np.dtype([("node", "i4"), ("gpus", "i4")])
NOBODY = -1
NOTHING_LEFT, GO_ON, NEEDS_ROOM = range(3)


@compiled
def record(jobs, j, classes, places, where, stretches, held, progress, now):
    """Writes down the stretch that ends now."""
    k, slot, to = progress[STRETCHES], jobs[j].slot, progress[WRITTEN_PLACES]
    stretches[k].job, stretches[k].begin, stretches[k].end, stretches[k].slot = j, jobs[j].begins, now, to
    count = classes[jobs[j].cls].count + (classes[jobs[j].cls].rest >= 0)
    for i in range(count):
        held[to + i].node, held[to + i].gpus = where[slot + i], places[slot + i].gpus
    progress[STRETCHES] += 1
    progress[WRITTEN_PLACES] += count
    progress[PLACED] -= count


@compiled
def unblock_after(waiting, classes, jobs, j):
    """Those who stand after a job that stopped others may find more room than it took."""
    for c in range(len(classes)):
        if classes[c].size:
            head = waiting[classes[c].begin]
            if head.key > jobs[j].key or (head.key == jobs[j].key and head.job > j):
                classes[c].blocked = False


@compiled
def next_in_queue(waiting, classes, jobs):
    """Of those who wait, and may have become able to start, the first: its class, -1 for none, and itself."""
    c, j = -1, np.int64(-1)
    for other in range(len(classes)):
        if classes[other].size and not classes[other].blocked:
            head = waiting[classes[other].begin]
            if c < 0 or head.key < jobs[j].key or (head.key == jobs[j].key and head.job < j):
                c, j = other, head.job
    return c, j


@compiled
def next_lifted(jobs, moved, progress):
    """Of those who were lifted in this round and not asked since, the first; -1 for none."""
    first = np.int64(-1)
    for k in range(progress[LIFTED]):
        j = moved[k]
        if not jobs[j].pending or jobs[j].asked:
            continue
        if first < 0 or jobs[j].key < jobs[first].key or (jobs[j].key == jobs[first].key and j < first):
            first = j
    return first


@compiled
def come_and_go(
    jobs, waiting, events, progress, where, first, places, fallen, stretches, held, thresholds, rules, nodes,
    pieces, log, meta, room, classes, total, waits, now,
):  # fmt: skip
    """What happens at a moment before the round: jobs end, come to another level, and arrive."""
    progress[CHANGED] = rules[DRIFT] == FREE
    progress[STARTED] = progress[LIFTED] = progress[FALLEN] = 0
    while progress[RUNNING] and events[0].key == now:
        j = events[0].job
        remove_event(events, jobs, progress, j)
        progress[CHANGED] = 1
        if jobs[j].ends == now:
            lift(nodes, pieces, log, meta, room, classes, first, places, where, jobs, j)
            record(jobs, j, classes, places, where, stretches, held, progress, now)
            jobs[j].lost += jobs[j].resume
            progress[COMPLETED] += 1
            continue
        fall(jobs, j, rules, progress, now)
        reseat(log, meta, classes, first, places, where, jobs, rules, j, now)
        add_event(events, jobs, progress, next_event(jobs, j, thresholds), j)
        fallen[progress[FALLEN]] = j
        progress[FALLEN] += 1
    while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
        j, c = progress[ARRIVED], jobs[progress[ARRIVED]].cls
        give_turn(jobs, j, progress, True)
        jobs[j].key = key(np.int64(rules[CODE]), jobs[j], jobs[j].left, 0.0, rules)
        jobs[j].ends = np.nan
        begin_waiting(classes, total, waits, c, j, now)
        add_waiting(waiting, jobs, classes, c, jobs[j].key, j)
        if waiting[classes[c].begin].job == j:
            classes[c].blocked = False
        progress[ARRIVED] += 1
    if progress[CHANGED]:
        for c in range(len(classes)):
            classes[c].blocked = False


@compiled
def settle_round(
    jobs,
    waiting,
    progress,
    where,
    first,
    places,
    moved,
    fallen,
    thresholds,
    rules,
    log,
    meta,
    classes,
    total,
    waits,
    now,
):
    """After a round: those who came to another level and still run take their turn there, and those who were stopped theirs.
    Says whether anyone was."""
    sort_by_key(jobs, fallen, progress[FALLEN])
    for k in range(progress[FALLEN]):
        j = fallen[k]
        if not jobs[j].settled and not np.isnan(jobs[j].ends):
            settle_down(jobs, j, rules, progress, now)
            reseat(log, meta, classes, first, places, where, jobs, rules, j, now)
    stops = False
    sort_by_key(jobs, moved, progress[LIFTED])
    for k in range(progress[LIFTED] - 1, -1, -1):  # from the last on: the first is to be the very first
        j = moved[k]
        if jobs[j].pending:
            jobs[j].pending = 0
            end_stretch(jobs, j, rules, now)
            queue_again(jobs, j, rules, thresholds, progress)
            begin_waiting(classes, total, waits, jobs[j].cls, j, now)
            add_waiting(waiting, jobs, classes, jobs[j].cls, jobs[j].key, j)
            stops = True
    progress[LIFTED] = progress[FALLEN] = 0
    return stops


@compiled
def advance(
    jobs, waiting, events, progress, where, on, first, places, sorted_at, tree, read, asked, stopped, moved, fallen,
    stretches, held, thresholds, rules, nodes, pieces, best, ways, levels, log, meta, context, room, classes,
    total, waits, until, most,
):  # fmt: skip
    """Runs up to ``most`` moments, none after ``until``; says whether anything is left to happen, or NEEDS_ROOM where
    ``stretches`` or ``held`` might not hold what comes next."""
    done = 0
    while done < most:
        now = rules[NOW]
        if not progress[UNDER_WAY]:
            now = jobs[progress[ARRIVED]].submit if progress[ARRIVED] < len(jobs) else np.inf
            if progress[RUNNING]:
                now = min(now, events[0].key)
            if now == np.inf or now > until:
                return NOTHING_LEFT
        if progress[STRETCHES] + progress[RUNNING] > len(stretches) or (
            progress[WRITTEN_PLACES] + progress[PLACED] > len(held)
        ):
            return NEEDS_ROOM
        if not progress[UNDER_WAY]:
            rules[NOW], progress[UNDER_WAY] = now, 1
            come_and_go(
                jobs, waiting, events, progress, where, first, places, fallen, stretches, held, thresholds, rules,
                nodes, pieces, log, meta, room, classes, total, waits, now,
            )  # fmt: skip
            continue
        c, j = next_in_queue(waiting, classes, jobs)
        again = next_lifted(jobs, moved, progress)
        if again >= 0 and (c < 0 or jobs[again].key < jobs[j].key or (jobs[again].key == jobs[j].key and again < j)):
            jobs[again].asked = 1
            go_on(jobs, again, rules, now)
            if put_back(nodes, pieces, log, meta, room, classes, first, places, where, jobs, rules, again, now):
                stretches[jobs[again].pending - 1].job = NOBODY
                jobs[again].pending = 0
                progress[PLACED] += classes[jobs[again].cls].count + (classes[jobs[again].cls].rest >= 0)
                add_event(events, jobs, progress, next_event(jobs, again, thresholds), again)
            else:
                lose_nodes(jobs, again, rules, now)
            continue
        if c >= 0:
            if meta[TOPOLOGY]:
                lifted = make_room_near(
                    nodes, pieces, best, ways, levels, log, meta, context, room, classes, tree, read, asked, first, places,
                    sorted_at, where, on, jobs, rules, stopped, j, now,
                )  # fmt: skip
            else:
                lifted = make_room(
                    nodes, pieces, best, ways, levels, log, meta, context, room, classes, tree, read, asked, first, places,
                    sorted_at, where, jobs, rules, stopped, j, 0, 0, False, now,
                )  # fmt: skip
            if lifted < 0:
                classes[c].blocked = True
                continue
            progress[STARTED] = 1
            if lifted:
                unblock_after(waiting, classes, jobs, j)
            remove_waiting(waiting, jobs, classes, c, j)
            end_waiting(classes, total, waits, c, j, now)
            start(jobs, j, rules, progress, now)
            seat(log, meta, classes, first, places, where, jobs, rules, j, now)
            progress[PLACED] += classes[c].count + (classes[c].rest >= 0)
            add_event(events, jobs, progress, next_event(jobs, j, thresholds), j)
            for k in range(lifted):
                victim = stopped[k]
                remove_event(events, jobs, progress, victim)
                record(jobs, victim, classes, places, where, stretches, held, progress, now)
                jobs[victim].pending, jobs[victim].asked = progress[STRETCHES], 0
                lose_nodes(jobs, victim, rules, now)
                moved[progress[LIFTED]] = victim
                progress[LIFTED] += 1
            continue
        if settle_round(
            jobs, waiting, progress, where, first, places, moved, fallen, thresholds, rules, log, meta, classes, total, waits,
            now,
        ):  # fmt: skip
            for c in range(len(classes)):
                classes[c].blocked = False
            continue
        for c in range(len(classes)):
            reason = -1
            if classes[c].size:
                unchanged = not progress[STARTED] and (not progress[CHANGED] or classes[c].reason == PRIORITY)
                if classes[c].reason >= 0 and unchanged:
                    continue
                slot = jobs[waiting[classes[c].begin].job].slot
                reason = why(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot)
            if reason != classes[c].reason:
                settle(classes, total, c, now)
                classes[c].reason = reason
        progress[UNDER_WAY] = 0
        done += 1
    return GO_ON
