"""Judges results against the float64 reference and against what PyTorch makes in the same dtype."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.definition import Tolerance


@dataclass(frozen=True)
class Verdict:
    """``share`` is the largest error as a share of what is allowed: above 1 is wrong. ``reason`` says what is wrong."""

    ok: bool
    share: float | None = None
    reason: str = ""


def judge(
    got: Sequence[Tensor],
    want: Sequence[Tensor],
    in_torch: Sequence[Tensor],
    tolerance: Tolerance,
    scales: Sequence[Tensor] | None = None,
    nonfinite: Sequence[Tensor] | None = None,
    terms: int = 0,
    eps: float = 0.0,
) -> Verdict:
    """Compares results one by one.

    Args:
        got: an implementation's results.
        want: the float64 reference's results.
        in_torch: PyTorch's in the implementation's dtype; its error sets the tolerance.
        nonfinite: the reference's in that dtype, which says where NaN and infinities go (PyTorch's fused kernels differ
            from its formulas there, and between CPU and GPU); ``in_torch`` when None.
        terms: how many terms were summed one after the other in fp32 (``Tolerance.terms``).
        eps: least epsilon of ``Tolerance.ulps``, where it is not that of the results' dtype.
        scales: magnitudes that errors are relative to, for a tolerance that computes them from the arguments.
    """
    if len(got) != len(in_torch):
        return Verdict(False, None, f"{len(got)} results; expected {len(in_torch)}")
    worst = 0.0
    for index, (g, w, b) in enumerate(zip(got, want, in_torch, strict=True)):
        where = f"result {index}: " if len(got) > 1 else ""
        if reason := _form(g, b):
            return Verdict(False, None, where + reason)
        special = b if nonfinite is None else nonfinite[index]
        verdict = _values(g, w, b, special, tolerance, scales[index] if scales else None, terms, eps)
        if not verdict.ok:
            return Verdict(False, verdict.share, where + verdict.reason)
        worst = max(worst, verdict.share or 0.0)
    return Verdict(True, worst)


def _form(got: Tensor, in_torch: Tensor) -> str:
    for what in ("shape", "dtype", "device"):
        if getattr(got, what) != getattr(in_torch, what):
            return f"{what} is {getattr(got, what)}; expected {getattr(in_torch, what)}"
    return ""


def _values(
    got: Tensor, want: Tensor, in_torch: Tensor, special: Tensor, tolerance: Tolerance, scale: Tensor | None, terms: int,
    eps: float,
) -> Verdict:  # fmt: skip
    if got.numel() == 0:
        return Verdict(True, 0.0)
    if tolerance.exact or not got.is_floating_point():
        same = (got == in_torch) | (got.isnan() & in_torch.isnan())
        if tolerance.neighbours and not got.is_floating_point() and got.dtype != torch.bool:
            near = (got.long() - in_torch.long()).abs() <= 1
            if bool(near.all()) and int((~same).sum()) <= max(1, int(tolerance.neighbours * got.numel())):
                return Verdict(True, 0.0)
        return (
            Verdict(True, 0.0)
            if bool(same.all())
            else Verdict(False, None, _first(got, in_torch, ~same, "PyTorch has"))
        )
    numbers = torch.finfo(got.dtype)
    if got.dtype.itemsize == 1:  # PyTorch computes little with them
        got, in_torch, special = got.float(), in_torch.float(), special.float()
    finite = special.isfinite()
    misplaced = ~((got == special) | (got.isnan() & special.isnan())) & ~finite | ~got.isfinite() & finite
    if bool(misplaced.any()):
        return Verdict(False, None, _first(got, special, misplaced, "PyTorch has"))
    finite &= want.isfinite()
    scale = _scale(want, finite, tolerance, numbers.tiny, scale)
    error, usual = _error(got, want, scale, finite), _error(in_torch, want, scale, finite & in_torch.isfinite())
    floor = tolerance.ulps * max(numbers.eps, eps) + 1.4 * terms**0.5 * torch.finfo(torch.float32).eps
    spread = float(usual.square().mean().sqrt())
    largest, mean = float(error.max()), float(error.square().mean().sqrt())
    allowed = max(tolerance.multiple * max(float(usual.max()), 4 * spread), floor)
    # the mean of a few squares may be near the largest one
    allowed_mean = max(tolerance.multiple * spread, floor / 2 * (1 + got.numel() ** -0.5))
    share = max(largest / allowed, mean / allowed_mean)
    if share <= 1:
        return Verdict(True, share)
    if largest > allowed:
        words = f"the largest error is {largest:.3g}, allowed {allowed:.3g}; float64 has"
        return Verdict(False, share, _first(got, want, error > allowed, words))
    return Verdict(False, share, f"root mean square error {mean:.3g} over {allowed_mean:.3g} allowed")


def _scale(want: Tensor, finite: Tensor, tolerance: Tolerance, tiny: float, scale: Tensor | None) -> Tensor:
    """What errors are relative to: the reference's magnitude, or what the tolerance says where that is larger. Never
    less than ``tiny``, the smallest normal number: below it a dtype has no relative precision to ask for."""
    clean = torch.where(finite, want, 0.0)
    magnitude = clean.abs()
    if scale is not None:
        magnitude = torch.maximum(magnitude, scale.nan_to_num(0.0, 0.0, 0.0))
    elif tolerance.scale == "tensor" or want.ndim == 0:
        magnitude = torch.maximum(magnitude, clean.square().mean().sqrt())
    elif tolerance.scale == "row":
        magnitude = torch.maximum(magnitude, clean.square().mean(-1, keepdim=True).sqrt())
    return magnitude.clamp_min(tiny)


def _error(got: Tensor, want: Tensor, scale: Tensor, finite: Tensor) -> Tensor:
    return torch.where(finite, (got.double() - want).abs() / scale, 0.0)


def _first(got: Tensor, other: Tensor, at: Tensor, words: str) -> str:
    index = tuple(int(i) for i in at.nonzero()[0])
    values = f"{float(got[index]):.6g}, {words} {float(other[index]):.6g}"
    return f"{int(at.sum())} of {got.numel()} elements, first at {index}: {values}"
