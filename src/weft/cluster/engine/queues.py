"""Jobs as the loops have them, and their heaps: completions, waiting jobs by rank, and jobs by a key."""

import numpy as np

from weft.cluster.engine.compiled import compiled

# `begins`: as planned; `ends`: by its estimate; `place`: its position in its heap, or among its class by rank; `slot`:
# where its nodes begin in `where`; `line`: its queue of one class and one tenant (tenant_loop.py).
JOB = np.dtype(
    [
        *((name, "f8") for name in ("submit", "duration", "estimate", "start", "begins", "ends")),
        *((name, "i4") for name in ("cls", "rank", "place", "line")),
        ("slot", "i8"),
    ]
)
COMPLETION = np.dtype([("time", "f8"), ("job", "i8")])
ENTRY = np.dtype([("key", "f8"), ("job", "i8")])  # by key (of events their time), then by job
NO_RANK = np.iinfo(np.int32).max
ARRIVED, COMPLETED, RUNNING, PROGRESS = 0, 1, 2, 3  # `progress`: how many jobs


@compiled
def next_event(jobs, running, progress):
    """When the next job arrives or completes: inf where none does."""
    now = np.inf
    if progress[ARRIVED] < len(jobs):
        now = jobs[progress[ARRIVED]].submit
    if progress[RUNNING]:
        now = min(now, running[0].time)
    return now


# ---- waiting jobs of a class, by rank --------------------------------------------------------------------------------


@compiled
def push_rank(heap, classes, c, rank):
    begin, k = classes[c].begin, classes[c].size
    classes[c].size += 1
    while k > 0:
        parent = (k - 1) >> 1
        if heap[begin + parent] <= rank:
            break
        heap[begin + k] = heap[begin + parent]
        k = parent
    heap[begin + k] = rank


@compiled
def pop_rank(heap, classes, c):
    classes[c].size -= 1
    begin, size = classes[c].begin, classes[c].size
    last = heap[begin + size]
    k = 0
    while True:
        child = 2 * k + 1
        if child >= size:
            break
        if child + 1 < size and heap[begin + child + 1] < heap[begin + child]:
            child += 1
        if heap[begin + child] >= last:
            break
        heap[begin + k] = heap[begin + child]
        k = child
    heap[begin + k] = last


# ---- completions -----------------------------------------------------------------------------------------------------


@compiled
def before(a, b):
    return a.time < b.time or (a.time == b.time and a.job < b.job)


@compiled
def push_completion(running, progress, time, job):
    k = progress[RUNNING]
    progress[RUNNING] += 1
    while k > 0:
        parent = (k - 1) >> 1
        above = running[parent]
        if above.time < time or (above.time == time and above.job < job):
            break
        running[k].time, running[k].job = above.time, above.job
        k = parent
    running[k].time, running[k].job = time, job


@compiled
def pop_completion(running, progress):
    progress[RUNNING] -= 1
    size = progress[RUNNING]
    k = 0
    while True:
        child = 2 * k + 1
        if child >= size:
            break
        if child + 1 < size and before(running[child + 1], running[child]):
            child += 1
        if not before(running[child], running[size]):
            break
        running[k].time, running[k].job = running[child].time, running[child].job
        k = child
    running[k].time, running[k].job = running[size].time, running[size].job


# ---- heaps from which any job can be removed: `jobs[j].place` is its position ----------------------------------------


@compiled
def put(heap, jobs, begin, k, key, job):
    heap[begin + k].key, heap[begin + k].job = key, job
    jobs[job].place = k


@compiled
def rise(heap, jobs, begin, k):
    key, job = heap[begin + k].key, heap[begin + k].job
    while k > 0:
        parent = (k - 1) >> 1
        above, whose = heap[begin + parent].key, heap[begin + parent].job
        if above < key or (above == key and whose < job):
            break
        put(heap, jobs, begin, k, above, whose)
        k = parent
    put(heap, jobs, begin, k, key, job)


@compiled
def sink(heap, jobs, begin, k, size):
    key, job = heap[begin + k].key, heap[begin + k].job
    while True:
        child = 2 * k + 1
        if child >= size:
            break
        below, whose = heap[begin + child].key, heap[begin + child].job
        if child + 1 < size:
            other, its = heap[begin + child + 1].key, heap[begin + child + 1].job
            if other < below or (other == below and its < whose):
                child, below, whose = child + 1, other, its
        if key < below or (key == below and job < whose):
            break
        put(heap, jobs, begin, k, below, whose)
        k = child
    put(heap, jobs, begin, k, key, job)


@compiled
def push(heap, jobs, begin, size, key, job):
    put(heap, jobs, begin, size, key, job)
    rise(heap, jobs, begin, size)


@compiled
def remove(heap, jobs, begin, size, job):
    """Takes a job out of a heap of ``size``, wherever it is."""
    k, last = np.int64(jobs[job].place), size - 1
    if k != last:
        moved = np.int64(heap[begin + last].job)
        put(heap, jobs, begin, k, heap[begin + last].key, moved)
        rise(heap, jobs, begin, k)
        sink(heap, jobs, begin, np.int64(jobs[moved].place), last)
