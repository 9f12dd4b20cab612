"""The plan of ``group_cluster.cu``: GroupNorm with a group spread over a cluster of blocks (sm_90 and later)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators import row_cluster
from weft.operators.configs import Configurations, bucket
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import Plans, target_sm
from weft.operators.normalization.group_plans import taken_apart
from weft.operators.residency import shared_limit
from weft.operators.row_cluster import RowCluster, candidates, heuristic

SOURCE = Path(__file__).parent / "group_cluster.cu"
configuration = Configurations(__file__, "group_cluster", heuristic, candidates)


def rows_of_groups(x: Tensor, groups: int) -> Tensor:
    """[B * groups, elements of a group] of a contiguous x."""
    return x.view(x.shape[0] * groups, -1)


def why_not(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, dtype: torch.dtype) -> str:
    """Why the cluster kernel does not take these (an empty string when it does)."""
    given = [t for t in (weight, bias) if t is not None]
    if any(t.dtype != given[0].dtype or (t.stride(0) != 1 and len(t) > 1) for t in given):
        return "a weight and a bias of two dtypes, or not contiguous"
    if not x.is_contiguous():
        return "it takes a contiguous tensor"
    if dtype != x.dtype:
        return "a result of another dtype than x's (autocast)"
    rows, space = rows_of_groups(x, groups), x.shape[2:].numel()
    if reason := row_cluster.why_not(rows):
        return f"groups: {reason}"
    if space * x.element_size() % 16:
        return "channels that do not begin and end on 16 bytes"
    return ""


def plan(*call: Any) -> CudaPlan:
    """As :func:`group_plans.forward_plan`, which takes the same; raises Declined as :func:`why_not` says."""
    x, weight, bias, groups, eps, kept = taken_apart(*call)
    if reason := why_not(x, weight, bias, groups, call[-1]):
        raise Declined(reason)
    rows, space = rows_of_groups(x, groups), x.shape[2:].numel()
    n = rows.shape[1]
    config = configuration(x.device, x.dtype, bucket(n))
    threads, count = config["THREADS"], 16 // x.element_size()
    blocks = bucket(-(-n // (threads * config["EACH"])))
    each = -(-n // (blocks * threads * count)) * count  # what an even share of the blocks takes
    grid = RowCluster.of(rows, {"THREADS": threads, "EACH": each})
    shared = (grid.elements // space + 2) * 8
    if shared > shared_limit(target_sm(x.device)):
        raise Declined(f"{space} elements a channel: too many channels for a block's shared memory")
    like = weight if weight is not None else bias if bias is not None else x
    flags = ", ".join(str(f).lower() for f in (weight is not None, bias is not None, kept))
    kernel = f"group_norm_cluster<{CTYPES[x.dtype]}, {CTYPES[like.dtype]}, {grid.template}, {flags}>"
    sizes = (ctypes.c_uint(v) for v in (groups, x.shape[1] // groups, space))
    scalars = (*grid.scalars, *sizes, ctypes.c_float(eps))
    return CudaPlan(SOURCE, kernel, grid.grid, grid.threads, scalars, grid.cluster, shared)


plans = Plans(plan)
