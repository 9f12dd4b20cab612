"""The highest priority first."""

from weft.cluster.order import Order

ORDER = Order("priority", lambda jobs: (-jobs.priority,), "the highest priority first")
