"""How many clusters or blocks of a CUDA kernel a device runs at once, and how much shared memory a block may have."""

import torch

from weft.definition import SHARED_LIMIT, Declined
from weft.operators.cuda import CudaError, CudaPlan, driver
from weft.operators.launch import compile_request, multiprocessors


def shared_limit(sm: int) -> int:
    """Bytes of shared memory that one block may have."""
    return SHARED_LIMIT[max(a for a in SHARED_LIMIT if a <= sm)]


def active_clusters(plan: CudaPlan, device: torch.device) -> int:
    """Clusters (blocks, for a plan without clusters) that run at the same time, 0 where not even one fits; estimated where
    there is no device to ask."""
    if compile_request() or device.type != "cuda" or not torch.cuda.is_available():
        return max(1, multiprocessors(device) // plan.cluster)
    config, kernel = plan._prepare(device)
    if plan.cluster > 1:
        code, count = driver().cuOccupancyMaxActiveClusters(kernel, config)
    else:
        code, count = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, plan.block, plan.shared_bytes)
        count *= multiprocessors(device)
    if int(code):
        raise CudaError(f"counting clusters of {plan.expression}: {code.name}")
    return int(count)


def not_resident(plan: CudaPlan, device: torch.device) -> str:
    """Why no cluster runs ("" where one does)."""
    return "" if active_clusters(plan, device) else f"no cluster of {plan.cluster} blocks fits on this device"


def resident(plan: CudaPlan, device: torch.device) -> int:
    """How many run at the same time; raises Declined where none fits."""
    if reason := not_resident(plan, device):
        raise Declined(reason)
    return active_clusters(plan, device)
