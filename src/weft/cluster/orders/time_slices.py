"""Time slices: every six minutes the jobs with the least time so far hold the GPUs, as in the rounds of Gavel
(Narayanan et al., OSDI 2020) without its programs. A policy in plain Python, to copy and change."""

from weft.cluster.order import Order, Rounds

ROUND_S = 360.0


def least_served_first(view):
    return sorted(view.jobs, key=lambda job: (view.served(job), job.number))


ORDER = Order(
    "time-slices",
    lambda jobs: (),
    "every six minutes the least served first, preempting others",
    rounds=Rounds(least_served_first, ROUND_S),
)
