"""The plan of ``cluster.cu``: softmax and log-softmax with a row spread over a cluster of blocks (sm_90 and later)."""

from __future__ import annotations

import functools
from pathlib import Path

from torch import Tensor

from weft.operators.configs import Configurations, bucket
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import Plans
from weft.operators.row_cluster import RowCluster, candidates, heuristic

SOURCE = Path(__file__).parent / "cluster.cu"
configuration = Configurations(__file__, "cluster", heuristic, candidates)


def plan(x: Tensor, dim: int, logs: bool = False) -> CudaPlan:
    """Softmax of x over ``dim`` (log-softmax with ``logs``) into ``torch.empty_like(x)``.

    Raises:
        Declined: what ``row_cluster.why_not`` says.
    """
    along = x.movedim(dim, -1)
    rows = RowCluster.of(along, configuration(x.device, x.dtype, bucket(along.shape[-1])))
    kernel = f"softmax_cluster<{CTYPES[x.dtype]}, {rows.template}, {str(logs).lower()}>"
    return CudaPlan(SOURCE, kernel, rows.grid, rows.threads, rows.scalars, rows.cluster)


plans = Plans(plan)
log_plans = Plans(functools.partial(plan, logs=True))
