"""The reference simulator: every scheduling rule in the plainest Python, one step at a time. To read, and to test with.

sim = Simulator(placement="best")
sim.add_node("a", gpus=4, gpu_memory_gb=24)
sim.add_job("train", gpus=2, memory_per_gpu_gb=16, duration=5)
sim.step()      # to the next time at which something happens
sim.status()    # every GPU free or busy; every job pending, running or completed

``model.py`` has nodes, pieces and jobs; ``placing.py`` puts a job's pieces on nodes; ``state.py`` is what every rule
works on; ``backfill.py``, ``preemption.py``, ``tenants.py`` and ``rounds.py`` are the rules; ``simulator.py`` is the
clock. The compiled engine (``weft.cluster.engine``) gives the same schedules.
"""

from weft.cluster.reference.simulator import Simulator, simulate, simulator

__all__ = ["Simulator", "simulate", "simulator"]
