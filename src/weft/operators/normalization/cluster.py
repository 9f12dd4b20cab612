"""The plan of ``cluster.cu``: RMSNorm with a row spread over a cluster of blocks (sm_90 and later)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Configurations, bucket
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plans
from weft.operators.row_cluster import RowCluster, candidates, heuristic

SOURCE = Path(__file__).parent / "cluster.cu"
# The weight's slice is held beside the row's, so a thread takes half as much of each.
configuration = Configurations(__file__, "cluster", functools.partial(heuristic, bytes_a_thread=64), candidates)


def plan(x: Tensor, weight: Tensor, eps: float, weighted: bool) -> CudaPlan:
    """Of ``(x, weight, y)`` with y = ``torch.empty_like(x)``; raises Declined as ``row_cluster.why_not`` says."""
    if not pointer_aligned(weight):
        raise Declined("a weight that does not begin on 16 bytes")
    rows = RowCluster.of(x, configuration(x.device, x.dtype, bucket(x.shape[-1])))
    types = f"{CTYPES[x.dtype]}, {CTYPES[weight.dtype]}, {rows.template}, {str(weighted).lower()}"
    scalars = (*rows.scalars, ctypes.c_float(eps))
    kernel = f"rms_norm_cluster<{types}>"
    return CudaPlan(SOURCE, kernel, rows.grid, rows.threads, scalars, rows.cluster)


plans = Plans(plan)
