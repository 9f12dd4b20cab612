"""Heaps of the loop that stops jobs: what happens next, and who waits, for each class. A job is in one of them at a time, and
``jobs[j].place`` says where it lies, so that it can be taken out or moved."""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.run import RUNNING

ENTRY = np.dtype([("key", "f8"), ("job", "i8")])  # by key (of events their time), then by job


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
def remove(heap, jobs, begin, size, job):
    """Takes a job out of a heap of ``size``, wherever it lies."""
    k, last = np.int64(jobs[job].place), size - 1
    if k != last:
        moved = np.int64(heap[begin + last].job)
        put(heap, jobs, begin, k, heap[begin + last].key, moved)
        rise(heap, jobs, begin, k)
        sink(heap, jobs, begin, np.int64(jobs[moved].place), last)


@compiled
def add_event(events, jobs, progress, time, job):
    k = progress[RUNNING]
    progress[RUNNING] += 1
    put(events, jobs, 0, k, time, job)
    rise(events, jobs, 0, k)


@compiled
def remove_event(events, jobs, progress, job):
    remove(events, jobs, 0, progress[RUNNING], job)
    progress[RUNNING] -= 1


@compiled
def add_waiting(waiting, jobs, classes, c, key, job):
    k = classes[c].size
    classes[c].size += 1
    put(waiting, jobs, classes[c].begin, k, key, job)
    rise(waiting, jobs, classes[c].begin, k)


@compiled
def remove_waiting(waiting, jobs, classes, c, job):
    remove(waiting, jobs, classes[c].begin, classes[c].size, job)
    classes[c].size -= 1
