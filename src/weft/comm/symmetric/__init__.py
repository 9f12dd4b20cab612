"""Collectives over memory that all ranks of a host map, and products that overlap with theirs: faster than NCCL where each
measured itself to be."""

from weft.comm.symmetric.all_reduce import AllReduce
from weft.comm.symmetric.expert_all_to_all import ExpertAllToAll
from weft.comm.symmetric.expert_feed_forward import expert_feed_forward
from weft.comm.symmetric.overlapped_matmul import AllGatherMatmul, MatmulReduceScatter

__all__ = ["AllGatherMatmul", "AllReduce", "ExpertAllToAll", "MatmulReduceScatter", "expert_feed_forward"]
