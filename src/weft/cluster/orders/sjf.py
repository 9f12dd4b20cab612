"""Shortest job first, by the estimate (the duration where the trace has none)."""

from __future__ import annotations

from weft.cluster.order import Order

ORDER = Order("sjf", lambda jobs: (jobs.estimate,), "the shortest first", validated={"": "Helios' vcvGl"})
