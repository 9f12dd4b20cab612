"""Orders: how the queue is sorted. One file each: a module with an ``ORDER``.

An order is the *queue sort* plug-in of the Kubernetes scheduling framework: sort keys of the jobs, the first one first::

    from weft.cluster.order import Order

    ORDER = Order("sjf", lambda jobs: (jobs.estimate,), "the shortest first")
"""

from weft.cluster.plugins import discover

ORDERS = discover(__name__, "ORDER")
