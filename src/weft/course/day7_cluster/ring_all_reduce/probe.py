"""Runs the learner's program on all ranks, and carries their chunks around the ring."""

import numpy as np


def run(exercise, datas):
    """[results, the data afterwards, steps, the most bytes that a rank has sent]."""
    n = len(datas)
    mine = [d.copy() for d in datas]
    programs = [exercise.all_reduce(rank, n, mine[rank]) for rank in range(n)]
    results, sent, steps, inbox = [None] * n, [0] * n, 0, [None] * n
    while True:
        outbox, ended = [], 0
        for rank, program in enumerate(programs):
            try:
                chunk = np.array(program.send(inbox[rank]))
                sent[rank] += chunk.nbytes
                outbox.append(chunk)
            except StopIteration as stop:
                results[rank], ended = stop.value, ended + 1
        if ended == n:
            return [results, mine, steps, max(sent)]
        if ended or steps > 10 * n:
            raise RuntimeError(f"after {steps} steps {ended} of {n} ranks have ended: the others would wait for ever")
        steps += 1
        inbox = [outbox[(rank - 1) % n] for rank in range(n)]
