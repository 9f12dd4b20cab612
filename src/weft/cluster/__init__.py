"""Simulating the scheduling of a GPU cluster: traces, nodes, policies, an exact and fast engine, metrics. No PyTorch."""

from weft.cluster.compare import Compared, Policy, compare
from weft.cluster.generate import generate
from weft.cluster.model import Cluster, Jobs, NodeGroup
from weft.cluster.reference import Simulator
from weft.cluster.result import Result
from weft.cluster.simulate import simulate

__all__ = [
    "Cluster",
    "Compared",
    "Jobs",
    "NodeGroup",
    "Policy",
    "Result",
    "Simulator",
    "compare",
    "generate",
    "simulate",
]
