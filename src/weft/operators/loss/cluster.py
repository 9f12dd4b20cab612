"""The plan of ``cluster.cu``: cross entropy with a row spread over a cluster of blocks (sm_90 and later)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators import row_cluster
from weft.operators.call import rows_of
from weft.operators.configs import Configurations, bucket
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.loss.kernels import Options
from weft.operators.row_cluster import RowCluster, candidates, heuristic

SOURCE = Path(__file__).parent / "cluster.cu"
TARGETS = {torch.int64: "i64", torch.int32: "int"}
loss_configuration = Configurations(__file__, "cluster", heuristic, candidates)
with_gradient_configuration = Configurations(__file__, "cluster_with_gradient", heuristic, candidates)


def why_not(x: Tensor, options: Options, has_weight: bool, dx: Tensor) -> str:
    """Why the cluster kernel does not take the call (an empty string when it does)."""
    if options.label_smoothing > 0 and has_weight:
        return "label smoothing with class weights, which every column would have to read"
    return row_cluster.why_not(x) or row_cluster.why_not(dx)


def plan(
    x: Tensor, target: Tensor, weight: Tensor, dx: Tensor, options: Options, has_weight: bool, gradient: bool
) -> CudaPlan:
    """Of ``(x, target, weight, sums, loss, stats, dx)``; without a weight, sums or gradient any tensor stands in for it.

    Raises:
        Declined: as :func:`why_not` says.
    """
    if reason := why_not(x, options, has_weight, dx):
        raise Declined(reason)
    v = x.shape[1]
    configuration = with_gradient_configuration if gradient else loss_configuration
    rows = RowCluster.of(x, configuration(x.device, x.dtype, bucket(v)))
    flags = (has_weight, options.reduction == "mean", options.label_smoothing > 0, options.soft_cap > 0, gradient)
    types = f"{CTYPES[x.dtype]}, {TARGETS[target.dtype]}, {CTYPES[weight.dtype]}"
    kernel = f"cross_entropy_cluster<{types}, {rows.template}, {', '.join(str(f).lower() for f in flags)}>"
    _, _, x_row, _ = rows_of(x) or (0, 0, 0, 0)
    _, _, dx_row, _ = rows_of(dx) or (0, 0, 0, 0)
    integers = (v, x_row, dx_row, target.stride(0), weight.stride(0), options.ignore_index)
    floats = (options.label_smoothing, options.z_loss, options.soft_cap)
    scalars = (*map(ctypes.c_longlong, integers), *map(ctypes.c_float, floats))
    return CudaPlan(SOURCE, kernel, rows.grid, rows.threads, scalars, rows.cluster)
