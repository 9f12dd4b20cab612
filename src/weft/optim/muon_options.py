"""What Muon's options may be."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from weft.operators.orthogonalization.coefficients import schedule
from weft.optim.muon_matrices import HIGHER_DIMS
from weft.optim.options import check_betas, check_flags

SCALES = (None, "original", "match_rms_adamw")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_options(group: dict[str, Any]) -> None:
    """Raises ValueError for options out of their ranges, in PyTorch's words where it has some; TypeError for switches that
    are not bools."""
    check_flags(group)
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    kinds: dict[str, Any] = {"lr": (Real, Tensor), "update_rms": (Real, type(None))}
    for name in ("lr", "momentum", "weight_decay", "eps", "adamw_eps", "update_rms"):
        if isinstance(group[name], bool) or not isinstance(group[name], kinds.get(name, Real)):
            raise ValueError(f"{name} should be a number but is: {group[name]!r:.40}")
    if not (lr >= 0.0 and math.isfinite(lr)):
        raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
    if not 0.0 <= group["momentum"] <= 1.0:
        raise ValueError(f"momentum should be >= 0 and <= 1 but is: {group['momentum']}")
    if not (group["weight_decay"] >= 0.0 and math.isfinite(group["weight_decay"])):
        raise ValueError(f"weight decay should be >= 0 but is: {group['weight_decay']}")
    if group["adjust_lr_fn"] not in SCALES:
        raise ValueError(
            f"Adjust learning rate function {group['adjust_lr_fn']} is not supported; expected original or match_rms_adamw"
        )
    if not (group["eps"] > 0 and math.isfinite(group["eps"])):
        raise ValueError(f"eps should be > 0 but is: {group['eps']}")
    steps = schedule(group["ns_coefficients"], group["ns_steps"])
    if not all(math.isfinite(value) for step in steps for value in step):
        raise ValueError(f"ns_coefficients should be finite but are: {group['ns_coefficients']}")
    if group["update_rms"] is not None:
        if not (group["update_rms"] > 0 and math.isfinite(group["update_rms"])):
            raise ValueError(f"update_rms should be > 0 or None but is: {group['update_rms']}")
        if group["adjust_lr_fn"] is not None:
            raise ValueError(
                f"update_rms is {group['update_rms']} and adjust_lr_fn {group['adjust_lr_fn']}: each sets the update's size; "
                "expected one of them"
            )
    if group["ns_dtype"] not in DTYPES:
        raise ValueError(f"ns_dtype should be one of {', '.join(map(str, DTYPES))} but is: {group['ns_dtype']}")
    if group["higher_dims"] not in HIGHER_DIMS:
        raise ValueError(f"higher_dims should be one of {', '.join(HIGHER_DIMS)} but is: {group['higher_dims']}")
    parts = group["split_rows"]
    sizes = [parts] if isinstance(parts, int) else parts or [1]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes):
        raise ValueError(f"split_rows should be a number of parts or their sizes, at least 1, but is: {parts}")
    check_betas(group["betas"])
    if not group["adamw_eps"] >= 0.0:
        raise ValueError(f"Invalid epsilon value: {group['adamw_eps']}")
