"""Triton kernels of the loss of x [T, D] · weight [V, D]ᵀ without gradient: no logit leaves the chip.

A program computes BLOCK_T × BLOCK_V tiles of logits, one after the other along the vocabulary, and keeps each row's running
maximum, sum of exponentials (online softmax, Milakov & Gimelshein 2018), smoothed sum and label's logit. The vocabulary is
shared out over programs; a second kernel combines their parts in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import shared_limit
from weft.operators.launch import INTERPRETING, Plan, Plans, multiprocessors
from weft.operators.loss.dispatch import label_sums
from weft.operators.loss.kernels import Sum, capped, labels_of, loss_of
from weft.operators.loss.reference import Options
from weft.operators.matmul.kernels import round_to_tf32
from weft.operators.softmax.kernels import exponential


@triton.jit
def linear_statistics(
    x_ptr, w_ptr, bias_ptr, class_ptr, target_ptr, parts_ptr, T, D, V, x_row, x_col, w_row, w_col, bias_stride,
    class_stride, target_stride, each, cap, HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr, ACCURATE: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """parts [4, splits, T] in fp32: of each row, over ``each`` tiles of the vocabulary, the maximum, the sum of
    exponentials, the (weighted) sum of logits and the label's logit, 0 where it lies elsewhere. Rows and classes past the
    edge wrap around to valid ones; such classes count for nothing and such rows are not stored. Programs run in groups of
    GROUP tiles of rows, so that those that run together share weights in L2."""
    pid = tl.program_id(0)
    tiles_t, tiles_v = tl.cdiv(T, BLOCK_T), tl.cdiv(V, BLOCK_V)
    splits = tl.cdiv(tiles_v, each)
    in_group = GROUP * splits
    first = pid // in_group * GROUP
    height = min(tiles_t - first, GROUP)
    row = (first + pid % in_group % height) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = pid % in_group // height

    d = tl.arange(0, BLOCK_D)
    label = tl.load(target_ptr + row.to(tl.int64) * target_stride, mask=row < T, other=-1)
    x_rows = x_ptr + (row % T).to(tl.int64)[:, None] * x_row + d.to(tl.int64)[None, :] * x_col  # [BLOCK_T, BLOCK_D]
    top = tl.full([BLOCK_T], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    weighted = tl.zeros([BLOCK_T], tl.float32)
    at_label = tl.zeros([BLOCK_T], tl.float32)
    for tile in range(split * each, min((split + 1) * each, tiles_v)):
        v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        column = (v % V).to(tl.int64)
        a = x_rows
        b = w_ptr + d.to(tl.int64)[:, None] * w_col + column[None, :] * w_row  # [BLOCK_D, BLOCK_V]
        z = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        for start in range(0, D, BLOCK_D):
            if EVEN_D:
                a_tile, b_tile = tl.load(a), tl.load(b)
            else:
                a_tile = tl.load(a, mask=d[None, :] < D - start, other=0.0)
                b_tile = tl.load(b, mask=d[:, None] < D - start, other=0.0)
            if PRECISION == "tf32" and x_ptr.dtype.element_ty == tl.float32:
                a_tile, b_tile = round_to_tf32(a_tile), round_to_tf32(b_tile)
            z = tl.dot(a_tile, b_tile, z, input_precision=PRECISION)
            a += BLOCK_D * x_col
            b += BLOCK_D * w_col
        if HAS_BIAS:
            z += tl.load(bias_ptr + column * bias_stride).to(tl.float32)[None, :]
        z = capped(z, cap, CAP, ACCURATE)
        inside = v < V
        at_label += tl.sum(tl.where(v[None, :] == label[:, None], z, 0.0), axis=1)
        if SMOOTH:
            if HAS_WEIGHT:
                of_class = tl.load(class_ptr + column * class_stride).to(tl.float32)
                weighted += tl.sum(tl.where(inside[None, :], z * of_class[None, :], 0.0), axis=1)
            else:
                weighted += tl.sum(tl.where(inside[None, :], z, 0.0), axis=1)
        z = tl.where(inside[None, :], z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, axis=1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a row that has seen only -inf
        total = total * exponential(top - base, ACCURATE) + tl.sum(exponential(z - base[:, None], ACCURATE), axis=1)
        top = higher
    part = (T + tl.full([], 0, tl.int64)) * splits  # elements of each of the four
    at = parts_ptr + split.to(tl.int64) * T + row
    tl.store(at, top, mask=row < T)
    tl.store(at + part, total, mask=row < T)
    tl.store(at + 2 * part, weighted, mask=row < T)
    tl.store(at + 3 * part, at_label, mask=row < T)


@triton.jit
def combine_statistics(
    parts_ptr, target_ptr, class_ptr, sums_ptr, loss_ptr, T, V, splits, target_stride, class_stride, ignore, smoothing, z,
    HAS_WEIGHT: tl.constexpr, MEAN: tl.constexpr, SMOOTH: tl.constexpr, ACCURATE: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """loss [T] from the parts, SPLITS at a time."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _label, counts, weight, by_weight, by_number, all_weights = labels_of(
        target_ptr, class_ptr, sums_ptr, row, T, V, target_stride, class_stride, ignore,
        HAS_WEIGHT, MEAN, HAS_WEIGHT and SMOOTH,
    )  # fmt: skip
    part = (T + tl.full([], 0, tl.int64)) * splits
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    at_label = tl.zeros([ROWS], tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        inside = (split[:, None] < splits) & (row[None, :] < T)
        at = parts_ptr + split.to(tl.int64)[:, None] * T + row[None, :]
        top = tl.load(at, mask=inside, other=-float("inf"))
        higher = tl.maximum(best, tl.max(top, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        share = tl.load(at + part, mask=inside, other=0.0) * exponential(top - base[None, :], ACCURATE)
        total = total * exponential(best - base, ACCURATE) + tl.sum(share, axis=0)
        best = higher
        weighted += tl.sum(tl.load(at + 2 * part, mask=inside, other=0.0), axis=0)
        at_label += tl.sum(tl.load(at + 3 * part, mask=inside, other=0.0), axis=0)
    lse = best + tl.log(total)
    loss = loss_of(lse, at_label, weighted, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH)
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0 * by_weight), mask=row < T)  # NaN for the mean over no label


MOST_TILES = 8  # of the vocabulary that a program walks: parts are then 1/256 of the logits' bytes (tiles of 256, bf16)
WAVES = 4  # of programs that there are before each walks more than one tile


def heuristic(sm: int, dtype: torch.dtype, precision: str, t: int, d: int, v: int) -> Config:
    """Tiles as of a matrix product: 128 × 256 where a block has 227 KiB of shared memory, fewer bytes a stage at 99 KiB."""
    if INTERPRETING:
        return _config(32, 64, 32, 2, 4, 2)
    if dtype == torch.float32:
        return _config(64, 64, 32, 8, 4, 3) if precision == "ieee" else _config(128, 128, 32, 8, 8, 3)
    if t <= 64:
        return _config(64, 128, 64, 8, 8, 3)
    if sm in (90, 100):
        return _config(128, 256, 64, 16, 8, 3)
    return _config(128, 128, 32 if sm in (86, 89, 120) else 64, 8, 8, 3)


def _config(t: int, v: int, d: int, group: int, warps: int, stages: int) -> Config:
    return {"BLOCK_T": t, "BLOCK_V": v, "BLOCK_D": d, "GROUP": group, "num_warps": warps, "num_stages": stages}


def candidates(sm: int, dtype: torch.dtype, precision: str, t: int, d: int, v: int) -> Any:
    choices = {"BLOCK_T": (64, 128, 256), "BLOCK_V": (128, 256), "BLOCK_D": (32, 64), "GROUP": (8, 16)}
    for c in grid_of({**choices, "num_warps": (4, 8), "num_stages": (3, 4)}):
        per_thread = c["BLOCK_T"] * c["BLOCK_V"] // (c["num_warps"] * 32)
        shared = (c["BLOCK_T"] + c["BLOCK_V"]) * c["BLOCK_D"] * dtype.itemsize * c["num_stages"]
        if 32 <= per_thread <= 128 and 32 * 1024 < shared <= shared_limit(sm):
            yield c


configuration = Configurations(__file__, "linear_statistics", heuristic, candidates)


class Loss:
    """Of ``(x, weight, bias, target, class_weight)``: the loss. x itself is passed for a bias or class weights that there are
    none of."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, of_class: Tensor, options: Options, has_bias: bool,
        has_weight: bool, precision: str,
    ):  # fmt: skip
        (t, d), v = x.shape, weight.shape[0]
        self.sums = label_sums(target, of_class, v, options, has_weight)
        self.total = None if options.reduction == "none" else Sum(t)
        config = configuration(x.device, x.dtype, precision, bucket(t), bucket(d), bucket(v))
        tile = {name: config[name] for name in ("BLOCK_T", "BLOCK_V", "BLOCK_D", "GROUP")}
        tiles_t, tiles_v = triton.cdiv(t, tile["BLOCK_T"]), triton.cdiv(v, tile["BLOCK_V"])
        each = max(1, min(MOST_TILES, tiles_t * tiles_v // (WAVES * multiprocessors(x.device))))
        splits = triton.cdiv(tiles_v, each)
        smooth, accurate = options.label_smoothing > 0, x.dtype == torch.float32
        flags = {"HAS_WEIGHT": has_weight, "SMOOTH": smooth, "ACCURATE": accurate}
        strides = (*x.stride(), *weight.stride(), bias.stride(0), of_class.stride(0), target.stride(0))
        scalars, grid = (t, d, v, *strides, each, float(options.soft_cap or 0.0)), (tiles_t * splits,)
        known = {"EVEN_D": d % tile["BLOCK_D"] == 0, "PRECISION": precision, **tile}
        constants = {"HAS_BIAS": has_bias, **flags, "CAP": bool(options.soft_cap), **known}
        self.parts = (4, splits, t)
        self.tiles = Plan(linear_statistics, grid, scalars, constants, config["num_warps"], config["num_stages"])
        numbers = (options.ignore_index, float(options.label_smoothing), float(options.z_loss))
        scalars = (t, v, splits, target.stride(0), of_class.stride(0), *numbers)
        constants = {**flags, "MEAN": options.reduction == "mean", "SPLITS": 16, "ROWS": 64}
        self.combine = Plan(combine_statistics, (triton.cdiv(t, 64),), scalars, constants, 4)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, of_class: Tensor) -> Tensor:
        parts = torch.empty(self.parts, device=x.device, dtype=torch.float32)
        loss = torch.empty(x.shape[0], device=x.device, dtype=torch.float32)
        sums = loss if self.sums is None else self.sums(target, of_class)
        self.tiles(x, weight, bias, of_class, target, parts)
        self.combine(parts, target, of_class, sums, loss)
        if self.total is not None:
            total = torch.empty((), device=x.device, dtype=torch.float32)
            self.total(loss, total)
            loss = total
        return loss


loss_plans = Plans(Loss)
