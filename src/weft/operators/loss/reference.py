"""What cross entropy and cross entropy with its gradient share: reference, inputs, workloads, and ways to be wrong."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Workload, torch_dtype, workload
from weft.operators.random_inputs import LAYOUTS, VALUES, drawn, random_tensor

REDUCTIONS = ("mean", "sum", "none")
IGNORED = -100  # in workloads


class Options(NamedTuple):
    """What a call asks for besides its tensors."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    reduction: str = "mean"


def composed(logits: Tensor, target: Tensor, *, weight: Tensor | None = None, **options: Any) -> Tensor:
    """What a user of PyTorch writes: ``F.cross_entropy``, with the z-loss and the cap composed around it."""
    o, soft = Options(**options), target.is_floating_point()  # class probabilities
    target = target if soft else target.long()
    x = o.soft_cap * torch.tanh(logits / o.soft_cap) if o.soft_cap else logits
    named: dict[str, Any] = {"ignore_index": o.ignore_index, "label_smoothing": o.label_smoothing}
    weight = None if weight is None else weight.to(x.dtype)
    loss = F.cross_entropy(x, target, weight, reduction=o.reduction, **named)
    if not o.z_loss:
        return loss
    counts = torch.ones_like(x[:, :1], dtype=torch.bool)[:, 0] if soft else target != o.ignore_index
    z = o.z_loss * torch.logsumexp(x, -1).square().masked_fill(~counts, 0)
    if o.reduction == "none":
        return loss + z
    return loss + (z.sum() if o.reduction == "sum" else z.sum() / counts.sum())


def wide(t: Tensor) -> Tensor:
    """In what formulas compute: fp32, or float64."""
    return t if t.dtype == torch.float64 else t.float()


def reference(logits: Tensor, target: Tensor, *, ignore_index: int = -100, **options: Any) -> Tensor:
    """In fp32 or wider, rounded once; the logits of ignored rows count for nothing, whatever they are."""
    x = wide(logits)
    if target.is_floating_point():
        return composed(x, target.to(x.dtype), **options).to(logits.dtype)
    target = target.long()  # an ignore_index need not fit int32
    x = x.masked_fill((target == ignore_index)[:, None], 0)
    label, outside = in_range(target, x.shape[1], ignore_index)
    stray = nan_where(outside, x)
    loss = composed(x + stray[:, None], label, ignore_index=ignore_index, **options)
    if not x.shape[1]:  # no logit that could carry the NaN
        loss = loss + (stray if loss.ndim else stray.sum())
    return loss.to(logits.dtype)


def in_range(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Labels that PyTorch takes, int64, and which were out of range: for those it raises on a CPU, and on a GPU stops the
    device."""
    label = target.long()
    outside = (label != ignore_index) & ((label < 0) | (label >= classes))
    return label.masked_fill(outside, 0 if classes else ignore_index), outside


def nan_where(outside: Tensor, x: Tensor) -> Tensor:
    """What makes the loss and the gradient of such rows NaN when it is added to their logits."""
    return torch.where(outside, torch.nan, 0.0).to(x.dtype)


def gradient(
    dloss: Tensor, logits: Tensor, target: Tensor, *, weight: Tensor | None = None, **options: Any
) -> tuple[Tensor]:
    """The gradient by its formula, where autograd cannot be used (inside a PyTorch operator)."""
    o, x = Options(**options), wide(logits)
    target = target.long()
    counts = target != o.ignore_index
    label, outside = in_range(target, x.shape[1], o.ignore_index)
    x = x.masked_fill(~counts[:, None], 0) + nan_where(outside, x)[:, None]
    x = o.soft_cap * torch.tanh(x / o.soft_cap) if o.soft_cap else x
    v = x.shape[1]
    w = x.new_ones(v) if weight is None else weight.to(x.dtype)
    label = label.masked_fill(~counts, 0)
    of_label = w[label] * counts if v else counts.to(x.dtype)
    by_weight = 1 / of_label.sum() if o.reduction == "mean" else 1.0
    by_number = 1 / counts.sum() if o.reduction == "mean" else 1.0
    spread = o.label_smoothing / max(v, 1) * by_weight
    at_label = ((1 - o.label_smoothing) * of_label * by_weight)[:, None]
    of_p = at_label + spread * w.sum() + 2 * o.z_loss * by_number * torch.logsumexp(x, -1, keepdim=True)
    dx = torch.softmax(x, -1) * of_p - spread * w
    dx = dx - at_label * (torch.arange(v, device=x.device) == label[:, None])
    if o.soft_cap:
        dx = dx * (1 - (x / o.soft_cap).square())
    dx = (dx * (dloss.to(x.dtype)[:, None] if dloss.ndim else dloss.to(x.dtype))).masked_fill(~counts[:, None], 0)
    return (dx.to(logits.dtype),)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Options: ``ignored`` and ``smoothing`` in per cent, ``z`` in thousandths."""
    m, v = w["M"], w["V"]
    logits = drawn(w, g, device, m, v)
    weight = random_tensor(g, (v,), w.option("weight_dtype", w.dtype), device).abs_() if w.option("weight") else None
    return {
        "logits": logits,
        "target": _labels(w, g, device).to(torch_dtype(w.option("labels", "int64"))),
        "weight": weight,
        **asked_of(w),
    }


def asked_of(w: Workload) -> dict[str, Any]:
    return {
        "ignore_index": IGNORED,
        "label_smoothing": w.option("smoothing", 0) / 100,
        "z_loss": w.option("z", 0) / 1000,
        "soft_cap": float(w.option("cap")) if w.option("cap") else None,
        "reduction": w.option("reduction", "mean"),
    }


def _labels(w: Workload, g: Any, device: str) -> Tensor:
    m, v = w["M"], w["V"]
    if device == "meta" or not v:
        return torch.full((m,), IGNORED, device=device)
    at = g.device if g is not None else device
    label = torch.randint(0, v, (m,), generator=g, device=at)
    share = torch.rand((m,), generator=g, device=at)
    return label.masked_fill(share * 100 < w.option("ignored", 0), IGNORED).to(device)


OPTIONS = {
    "layout": LAYOUTS, "values": VALUES, "reduction": REDUCTIONS, "labels": ("int32", "int64"), "weight": (True, False),
    "weight_dtype": ("fp32", "fp16", "bf16"), "ignored": range(101), "smoothing": range(101), "z": range(1001),
    "cap": range(1001),
}  # fmt: skip


def workloads() -> dict[str, list[Workload]]:
    everything = {"weight": True, "smoothing": 10, "z": 10, "cap": 5, "ignored": 30}
    vocabularies = ((8192, 32000), (8192, 128256), (4096, 256000))
    return {
        "verify": [
            *(workload(M=m, V=v) for m, v in ((3, 1), (1, 5), (5, 3), (37, 100), (5, 1000), (2, 4097))),
            *(workload(M=7, V=50, reduction=r) for r in ("sum", "none")),
            workload(M=0, V=7, reduction="sum"),
            *(workload(M=9, V=33, layout=layout) for layout in LAYOUTS[1:]),
            *(
                workload(M=70, V=300, layout="transposed", **options)
                for options in ({}, {"reduction": "none"}, everything)
            ),
            workload(M=5, V=4500, layout="transposed", values="nonfinite", reduction="none", ignored=30),
            workload(M=40, V=50, ignored=40),
            workload(M=4, V=50, ignored=100, reduction="none"),
            workload(M=40, V=50, weight=True, ignored=30),
            workload(M=6, V=40, labels="int32", weight=True, weight_dtype="fp32", reduction="none"),
            workload(M=20, V=50, smoothing=10, reduction="none"),
            workload(M=20, V=50, z=10, ignored=30),
            workload(M=20, V=50, cap=2),
            workload(M=30, V=70, **everything),
            workload(M=30, V=70, reduction="none", **everything),
            workload(M=40, V=50, values="nonfinite", reduction="none"),
            workload(M=40, V=50, values="nonfinite", reduction="none", ignored=30),
            workload(M=6, V=50, values="minus_inf_rows", reduction="none"),
            workload(M=6, V=64, values="large", reduction="none"),
            workload(M=3, V=2048),
            workload(M=6, V=2056, cap=3, smoothing=10, z=10, ignored=30),
            workload(M=2, V=33000, smoothing=10, weight=True),
            workload(M=3, V=33000, cap=3, ignored=30),
        ],
        "full": [
            workload(M=70, V=32000),
            *(workload(M=40, V=v, ignored=20, z=1, smoothing=10) for v in (2**15 + 1, 2**16 + 8, 128256)),
            workload(M=20, V=128256, cap=30),
            workload(M=20, V=256000, values="nonfinite", reduction="none"),
            workload(M=40000, V=40, weight=True, smoothing=10),
        ],
        "huge": [workload("bf16", M=2**14 + 1, V=2**17), workload("bf16", M=2**23 + 3, V=257)],
        "bench": [workload(M=m, V=v) for m, v in vocabularies],
        "quick": [workload(M=128, V=32000)],
        "options": [
            workload("bf16", M=8192, V=128256, **{o: n}) for o, n in (("z", 1), ("smoothing", 10), ("cap", 30))
        ],
        "small": [workload(M=64, V=1000)],
        "compile": [
            workload(M=64, V=100),
            workload(M=64, V=4096, **everything),
            *(workload(M=64, V=v) for v in (32000, 2**16)),
            workload(M=64, V=4096, layout="transposed", **everything),
            workload(M=2**18, V=300, layout="transposed"),
        ],
        "tune": [
            workload(d, M=2**28 // v, V=v)
            for d in ("fp32", "bf16")
            for v in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32000, 65536, 128256, 256000)
        ],
        "model": [workload("bf16", M=8192, V=128256), workload("bf16", M=8192, V=151936)],
    }


# ---- wrong on purpose ------------------------------------------------------------------------------------------------


def _moved(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    moved = (target + 1) % max(logits.shape[1], 1)
    return reference(logits, torch.where(target == IGNORED, target, moved), **options)


def _all_divide(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    if options.get("reduction") != "mean":
        return reference(logits, target, **options)
    return (reference(logits, target, **{**options, "reduction": "sum"}) / max(len(target), 1)).to(logits.dtype)


def _without(name: str, value: Any = None) -> Callable[..., Tensor]:
    return lambda logits, target, **options: reference(logits, target, **{**options, name: value})


def _padded(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The columns that fill a tile count, as zeros."""
    return reference(F.pad(logits, (0, 1)), target, **{**options, "weight": None, "label_smoothing": 0.0})


WRONG: dict[str, Callable[..., Tensor]] = {
    "label moved": _moved,
    "ignored rows divide": _all_divide,
    "ignored rows count": lambda logits, target, **options: reference(logits, target.clamp_min(0), **options),
    "padding counts": _padded,
    "weight left out": _without("weight"), "smoothing left out": _without("label_smoothing", 0.0),
    "z-loss left out": _without("z_loss", 0.0), "cap left out": _without("soft_cap"),
}  # fmt: skip
