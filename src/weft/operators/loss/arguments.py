"""What cross entropy takes: errors that name the argument, what came in and what would be right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.operators.call import FLOATS, check_device, check_flag, check_tensor, traced
from weft.operators.loss.definition import REDUCTIONS
from weft.operators.loss.kernels import Options

FP32 = torch.finfo(torch.float32)


def check(
    name: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    soft_cap: float | None,
    asked: Options,
    check_labels: bool,
) -> None:
    check_tensor(name, "logits", logits)
    check_tensor(name, "target", target, (torch.int64, torch.int32))
    check_device(name, "target", target, "logits", logits)
    if logits.ndim != 2 or target.ndim != 1 or target.shape[0] != logits.shape[0]:
        raise ValueError(
            f"{name}: arguments 'logits' and 'target' have shapes {tuple(logits.shape)} and {tuple(target.shape)}; "
            "expected [M, V] and [M] (flatten leading dimensions)"
        )
    if weight is not None:
        check_tensor(name, "weight", weight, tuple(dict.fromkeys((logits.dtype, *FLOATS[:1]))))
        check_device(name, "weight", weight, "logits", logits)
        if weight.shape != logits.shape[1:]:
            raise ValueError(
                f"{name}: argument 'weight' has shape {tuple(weight.shape)}; expected {tuple(logits.shape[1:])}, one for "
                f"each class of 'logits' {tuple(logits.shape)}"
            )
        if weight.requires_grad:
            raise ValueError(f"{name}: argument 'weight' wants a gradient, which there is none of; expected a constant")
    if not isinstance(asked.ignore_index, int) or isinstance(asked.ignore_index, bool):
        raise TypeError(f"{name}: argument 'ignore_index' is {asked.ignore_index!r:.40}; expected an int")
    if not -(2**63) <= asked.ignore_index < 2**63:
        raise ValueError(f"{name}: argument 'ignore_index' is {asked.ignore_index!r:.40}; expected an int of 64 bits")
    check_flag(name, "check_labels", check_labels)
    if not _number(asked.label_smoothing) or not 0 <= asked.label_smoothing <= 1:
        raise ValueError(f"{name}: argument 'label_smoothing' is {asked.label_smoothing!r}; expected 0 … 1")
    if not _number(asked.z_loss) or not 0 <= asked.z_loss <= FP32.max:
        raise ValueError(
            f"{name}: argument 'z_loss' is {asked.z_loss!r:.40}; expected a number of at least 0 that fp32 can hold"
        )
    if soft_cap is not None and (not _number(soft_cap) or not FP32.tiny <= soft_cap <= FP32.max):
        raise ValueError(
            f"{name}: argument 'soft_cap' is {soft_cap!r:.40}; expected a positive number that fp32 can hold, or None for none"
        )
    if asked.reduction not in REDUCTIONS:
        raise ValueError(f"{name}: argument 'reduction' is {asked.reduction!r}; expected {', '.join(REDUCTIONS)}")
    if check_labels:
        _check_labels(name, target, logits.shape[1], asked.ignore_index)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_labels(name: str, target: Tensor, classes: int, ignore_index: int) -> None:
    if traced(target):
        raise ValueError(
            f"{name}: check_labels=True needs the values of 'target', which tracing does not know; expected False there"
        )
    target = target.long()  # an ignore_index need not fit int32
    wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name}: argument 'target' has label {int(target[row])} in row {row} ({int(wrong.sum())} such in all); "
            f"expected 0 … {classes - 1}, or ignore_index {ignore_index}"
        )
