"""The event loops compiled with Numba. Each gives the schedule that the reference simulator gives, a million jobs in
seconds.

``node.py``, ``classes.py``: nodes, kinds of pieces and classes of jobs as arrays. ``index.py``: which node takes a
piece. ``allocate.py``, ``topology.py``: all nodes of a job. ``wait_reasons.py``: why jobs wait. ``queues.py``,
``tables.py``: what every loop works on. A loop for each way to decide: ``simple_loop.py`` (strict, skip),
``tenant_loop.py`` (shares and quotas), ``easy_loop.py``, ``conservative_loop.py`` and ``preemption_loop.py``, with
``easy_*``, ``conservative_*`` and ``preemption_*``.
"""
