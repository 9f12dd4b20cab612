"""Model FLOPs of a training step, and their share of the matrix rate that was measured on this machine (MFU)."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from weft.hardware import query
from weft.records import CEILING, Store
from weft.train.jobs import Job
from weft.train.settings import Settings


def of_step(job: Job, examples: int) -> int:
    """FLOPs of forward and backward of so many examples: the products that PyTorch's own operators make on meta tensors.

    Activations that are run again do not count; attention counts as if nothing were masked.
    """
    with torch.device("meta"):
        model = job.plain()
    x, y = (t.to("meta") for t in job.example(examples))
    with FlopCounterMode(display=False) as counter:
        model(x, y)[0].backward()
    return counter.get_total_flops()


def ceiling(settings: Settings, device: torch.device) -> float | None:
    """This machine's newest measured matrix rate for the run's dtype, FLOP/s; None where no record has one.

    ``weft bench --save`` and ``weft report`` write such records.
    """
    dtype = settings.amp if settings.amp != "none" else "tf32" if settings.tf32 and device.type == "cuda" else "fp32"
    found = [m for m in Store().read(query.name(device.type), CEILING) if m.implementation == f"{dtype} matrix"]
    return max(found, key=lambda m: m.time).details["value"] if found else None
