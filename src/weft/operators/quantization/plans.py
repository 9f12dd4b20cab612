"""The launches of quantisation and of its inverse: which kernel, tile and grid."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.dropout.philox import GROUP
from weft.operators.launch import INTERPRETING, Plan, Plans, target_sm
from weft.operators.numbered import NumberedPlan
from weft.operators.quantization.formats import BLOCK, Scheme, values_shape
from weft.operators.quantization.kernels import (
    absmax_strips,
    dequantize_lines,
    quantize_blocks,
    quantize_by_scale,
    quantize_lines,
    quantize_long_lines,
    scales_of_strips,
)
from weft.operators.quantization.lines import Lines, flat, lines_of, matrices, rows
from weft.operators.row_programs import ONE_PASS, candidates, heuristic

WRAP = 8192  # columns that a tensor without gaps is read by where rows do not matter
LONGEST_TILE = 4096  # columns of a tile where nothing needs a whole line


def line_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """As for every family's rows; of long ones 32 elements a thread, which share what a thread does once."""
    config = heuristic(sm, dtype, n)
    return {**config, "num_warps": 16} if 16384 <= n <= ONE_PASS // 2 else config


def block_heuristic(sm: int, dtype: torch.dtype) -> Config:
    return {"num_warps": 8}


def strip_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """A tile of 8192 elements, 32 a thread: four accesses of 16 bits on their way."""
    block = min(n, 1024)
    return {"STRIP": 64, "ROWS": max(1, 8192 // block), "BLOCK": block, "num_warps": 8}


def strip_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    blocks = [b for b in (128, 256, 512, 1024, 2048) if b <= n] or [n]
    every = grid_of({"STRIP": (32, 64, 128, 256), "ROWS": (4, 8, 16, 32), "BLOCK": blocks, "num_warps": (4, 8, 16)})
    return [c for c in every if 8 <= c["ROWS"] * c["BLOCK"] // (32 * c["num_warps"]) <= 64]


def tile_heuristic(sm: int, dtype: torch.dtype, n: int, by: str = "line") -> Config:
    """16 elements a thread; of columns' scales 64 in four rows, which share the columns' divisions."""
    if by == "column":
        block = min(n, 256)
        return {"ROWS": max(1, 8192 // block), "BLOCK": block, "num_warps": 4}
    block = min(n, 2048)
    return {"ROWS": max(1, 2048 // block), "BLOCK": block, "num_warps": 4}


def tile_candidates(sm: int, dtype: torch.dtype, n: int, by: str = "line") -> Any:
    blocks = [b for b in (128, 256, 512, 1024, 2048, 4096) if b <= n] or [n]
    every = grid_of({"ROWS": (1, 2, 4, 8, 16, 32, 64), "BLOCK": blocks, "num_warps": (2, 4, 8, 16)})
    return [c for c in every if 8 <= c["ROWS"] * c["BLOCK"] // (32 * c["num_warps"]) <= 64]


line_configuration = Configurations(__file__, "lines", line_heuristic, candidates)
block_configuration = Configurations(
    __file__, "blocks", block_heuristic, lambda *_: grid_of({"num_warps": (4, 8, 16, 32)})
)
strip_configuration = Configurations(__file__, "strips", strip_heuristic, strip_candidates)
scaled_configuration = Configurations(__file__, "scaled", tile_heuristic, tile_candidates)
inverse_configuration = Configurations(__file__, "dequantize", tile_heuristic, tile_candidates)


def codes(x: Tensor, scheme: Scheme, random: str) -> dict[str, Any]:
    """The constants of every kernel that writes values. RANDOM: ``none``, or where the seed is: ``number`` or ``memory``."""
    made = scheme.of
    hardware = target_sm(x.device) >= 89 and not INTERPRETING
    return {
        "FORMAT": scheme.format,
        "PER_BYTE": made.per_byte,
        "RANDOM": random,
        "PER": 16 // x.element_size(),
        "HARDWARE": hardware and made.mantissa > 0,
    }


def in_order(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Constants in the order of the kernel's signature, as a plan wants them."""
    return {name: constants[name] for name in kernel.arg_names if name in constants}


def plan(x: Tensor, scheme: Scheme, random: str) -> Any:
    """The launches of ``(x, values, scale, seed tensor, seed, offset)``: values contiguous bytes, scale contiguous fp32;
    without a seed in memory any tensor stands for it.

    Raises:
        Declined: strides that do not collapse into rows; stochastic rounding of groups that cut a group of eight.
    """
    if scheme.granularity in ("tensor", "column"):
        return TwoPasses(x, scheme, random)
    if scheme.granularity == "block":
        return block_plan(x, scheme, random)
    m, n, x_row, x_col = rows(x)
    over = lines_of(m, n, scheme, flat(x, n, scheme, random != "none"))
    if random != "none" and not over.whole and over.length % GROUP:
        raise Declined(f"stochastic rounding by groups of {over.length} columns, which is no multiple of {GROUP}")
    config = line_configuration(x.device, x.dtype, bucket(over.length))
    scalars = (
        *over.sizes,
        *over.steps(x_row, x_col),
        x_col,
        *value_steps(over, n, scheme),
        *over.steps(-(-n // GROUP), per=GROUP),
    )
    constants = {
        **codes(x, scheme, random),
        "LARGEST": scheme.of.largest,
        "POWER": scheme.power_of_two,
        "RAGGED": over.ragged,
    }
    if over.length > ONE_PASS:
        constants["BLOCK"] = config["BLOCK"]
        kernel, grid = quantize_long_lines, (over.outer * over.lines,)
    else:
        lines = min(config["ROWS"], bucket(over.lines))
        constants |= {"ROWS": lines, "BLOCK": bucket(over.length, 16), "NESTED": over.outer > 1}
        kernel, grid = quantize_lines, (over.outer * triton.cdiv(over.lines, lines),)
    return NumberedPlan(kernel, grid, scalars, in_order(kernel, constants), config["num_warps"])


def value_steps(over: Lines, n: int, scheme: Scheme) -> tuple[int, int]:
    """The second is also the bytes of a line."""
    of_row = values_shape((over.length if over.whole else n,), scheme.format)[0]
    return over.steps(of_row, per=scheme.of.per_byte)


def block_plan(x: Tensor, scheme: Scheme, random: str) -> NumberedPlan:
    (count, stride), (m, n) = matrices(x), x.shape[-2:]
    config = block_configuration(x.device, x.dtype)
    scalars = (m, n, stride, *x.stride()[-2:], values_shape((n,), scheme.format)[0], -(-n // GROUP))
    constants = {
        **codes(x, scheme, random),
        "BLOCK": BLOCK,
        "LARGEST": scheme.of.largest,
        "POWER": scheme.power_of_two,
    }
    grid = (count * triton.cdiv(m, BLOCK) * triton.cdiv(n, BLOCK),)
    return NumberedPlan(quantize_blocks, grid, scalars, in_order(quantize_blocks, constants), config["num_warps"])


def scaled_plan(x: Tensor, scale: Tensor, scheme: Scheme, random: str, backwards: bool = False) -> Any:
    """The launch of the same with scales that are there."""
    m, n, x_row, x_col = rows(x)
    over = lines_of(m, n, scheme, flat(x, n, scheme, random != "none"))
    if random != "none" and not over.whole and over.length % GROUP:
        raise Declined(f"stochastic rounding by groups of {over.length} columns, which is no multiple of {GROUP}")
    config = scaled_configuration(x.device, x.dtype, min(bucket(over.length, 16), LONGEST_TILE), _by(scheme)["BY"])
    tile, grid = _tile(config, over)
    scalars = (
        *over.sizes,
        x.shape[-2] if x.ndim > 1 else 1,
        *over.steps(x_row, x_col),
        x_col,
        *value_steps(over, n, scheme),
        *over.steps(-(-n // GROUP), per=GROUP),
        *_scale_steps(over, scheme),
    )
    constants = {**codes(x, scheme, random), **tile, **_by(scheme), "BACKWARDS": backwards, "RAGGED": over.ragged}
    return NumberedPlan(quantize_by_scale, grid, scalars, in_order(quantize_by_scale, constants), config["num_warps"])


def inverse_plan(values: Tensor, scale: Tensor, scheme: Scheme, n: int, out: torch.dtype) -> Plan:
    """The launch of ``(values as bytes, scale, out)``, out contiguous [..., n]."""
    m, _, v_row, v_col = rows(values)
    over = lines_of(m, n, scheme, flat(values, n, scheme, False))
    config = inverse_configuration(values.device, out, min(bucket(over.length, 16), LONGEST_TILE))
    tile, grid = _tile(config, over)
    scalars = (
        *over.sizes,
        values.shape[-2] if values.ndim > 1 else 1,
        *over.steps(v_row, v_col, scheme.of.per_byte),
        v_col,
        *over.steps(n),
        *_scale_steps(over, scheme),
    )
    constants = {
        **tile,
        **_by(scheme),
        "FORMAT": scheme.format,
        "PER_BYTE": scheme.of.per_byte,
        "RAGGED": over.ragged,
    }
    return Plan(dequantize_lines, grid, scalars, in_order(dequantize_lines, constants), config["num_warps"])


def _tile(config: Config, over: Lines) -> tuple[dict[str, int], tuple[int]]:
    block = min(config["BLOCK"], bucket(over.length, 16))
    lines = min(config["ROWS"], bucket(over.lines))
    grid = (over.outer * triton.cdiv(over.lines, lines) * triton.cdiv(over.length, block),)
    return {"ROWS": lines, "BLOCK": block}, grid


def _scale_steps(over: Lines, scheme: Scheme) -> tuple[int, int]:
    return (0, 0) if scheme.granularity == "tensor" else over.scale_steps


def _by(scheme: Scheme) -> dict[str, str]:
    return {"BY": scheme.granularity if scheme.granularity in ("column", "block") else "line"}


class TwoPasses:
    """Scales that span rows: two reads of x, and launches for absmax, scales and values."""

    def __init__(self, x: Tensor, scheme: Scheme, random: str):
        m, n, x_row, x_col = rows(x)
        per_column, wrapped, total = scheme.granularity == "column", False, m * n
        if not per_column and x.is_contiguous():
            wrapped, m, n = True, triton.cdiv(total, WRAP), WRAP
            x_row, x_col = WRAP, 1
        config = strip_configuration(x.device, x.dtype, min(bucket(n, 16), WRAP))
        constants = {
            "STRIP": max(config["STRIP"], config["ROWS"]),
            "ROWS": config["ROWS"],
            "BLOCK": min(config["BLOCK"], bucket(n, 16)),
            "PER_COLUMN": per_column,
            "WRAPPED": wrapped,
        }
        across, down = triton.cdiv(n, constants["BLOCK"]), triton.cdiv(m, constants["STRIP"])
        scalars = (m, n, total, x_row, x_col)
        self.shape = (down, n) if per_column else (across * down, 1)
        self.absmax = Plan(absmax_strips, (across * down,), scalars, constants, config["num_warps"])
        block = 64 if per_column else 1
        end = {
            "ROWS": min(bucket(self.shape[0], 16), 4096 // block),
            "BLOCK": block,
            "LARGEST": scheme.of.largest,
            "POWER": scheme.power_of_two,
        }
        self.scales = Plan(scales_of_strips, (triton.cdiv(self.shape[1], block),), self.shape, end, 4)
        self.values = scaled_plan(x, x, scheme, random, backwards=True)

    def __call__(self, x: Tensor, values: Tensor, scale: Tensor, seeds: Tensor, seed: int, offset: int) -> None:
        partial = torch.empty(self.shape, dtype=torch.float32, device=x.device)
        self.absmax(x, partial)
        self.scales(partial, scale)
        self.values(x, values, scale, seeds, seed, offset)


plans = Plans(plan)
scaled_plans = Plans(scaled_plan)
inverse_plans = Plans(inverse_plan)
