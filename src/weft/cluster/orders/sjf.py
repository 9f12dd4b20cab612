"""Shortest job first, by the estimate (the duration where the trace has none)."""

from weft.cluster.order import Order

ORDER = Order("sjf", lambda jobs: (jobs.estimate,), "the shortest first", validated={"": "Helios' vcvGl"})
