"""The plan of ``cluster.cu``: RMSNorm with a row spread over a cluster of blocks (sm_90 and later)."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Configurations, bucket
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plans
from weft.operators.row_cluster import RowCluster, candidates, heuristic

SOURCE = Path(__file__).parent / "cluster.cu"
SHORTEST = 8192  # below, all multiprocessors copy the same few lines of the weight out of L2 at once, and wait for it
configuration = Configurations(__file__, "cluster", heuristic, candidates)


def plan(x: Tensor, weight: Tensor, eps: float, weighted: bool) -> CudaPlan:
    """Of ``(x, weight, y)`` with y = ``torch.empty_like(x)``; raises Declined as ``row_cluster.why_not`` says."""
    if not pointer_aligned(weight):
        raise Declined("a weight that does not begin on 16 bytes")
    if x.shape[-1] < SHORTEST:
        raise Declined(
            f"{x.shape[-1]} columns; below {SHORTEST} all blocks read the same few lines of the weight at once"
        )
    rows = RowCluster.of(x, configuration(x.device, x.dtype, bucket(x.shape[-1])))
    types = f"{CTYPES[x.dtype]}, {CTYPES[weight.dtype]}, {rows.template}, {str(weighted).lower()}"
    scalars = (*rows.scalars, ctypes.c_float(eps))
    kernel = f"rms_norm_cluster<{types}>"
    shared = rows.elements * weight.element_size() if weighted else 0
    return CudaPlan(SOURCE, kernel, rows.grid, rows.threads, scalars, rows.cluster, shared)


plans = Plans(plan)
