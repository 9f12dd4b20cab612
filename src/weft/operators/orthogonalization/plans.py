"""Launches of the products: tile, warps and stages by architecture, dtype and shape."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import INTERPRETING, Plan, Plans
from weft.operators.matmul.kernels import layout_of
from weft.operators.orthogonalization.kernels import product, symmetric_product
from weft.operators.orthogonalization.triangle import tiles

SHARED_PER_BLOCK = {86: 99 * 1024, 89: 99 * 1024, 120: 99 * 1024, 80: 163 * 1024}  # bytes; the others have 227 KiB


def precision_now() -> str:
    """How fp32 products are computed, as ``torch.set_float32_matmul_precision`` says: ``ieee`` for "highest", else ``tf32``."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def matrices(x: Tensor) -> Tensor | None:
    """x [..., M, N] as [B, M, N] without a copy, or None where its leading dimensions have no one stride."""
    if x.ndim == 3:
        return x
    if x.ndim == 2:
        return x.unsqueeze(0)
    try:
        return x.view(x.shape[:-2].numel(), *x.shape[-2:])
    except RuntimeError:
        return None


# ---- configurations --------------------------------------------------------------------------------------------------


def symmetric_heuristic(sm: int, dtype: torch.dtype, layout: str, precision: str, b: int, m: int, k: int) -> Config:
    """Tiles of 128 where there are enough of them to fill the machine, else of 64."""
    large = b * m * m >= 1024 * 1024 and _tensor_cores(dtype, layout, precision)
    return {"BLOCK": 32 if INTERPRETING else 128 if large else 64, **_depth(sm, dtype, layout)}


def product_heuristic(
    sm: int, dtype: torch.dtype, layout: str, precision: str, b: int, m: int, n: int, k: int
) -> Config:
    """Hopper's matrix units want a wide tile; elsewhere 128 × 128 where there are enough of them, else 64 × 64."""
    large = b * m * n >= 1024 * 1024 and _tensor_cores(dtype, layout, precision)
    wide = sm == 90 and large and dtype != torch.float32
    sides = (32, 64) if INTERPRETING else (128, 256) if wide else (128, 128) if large else (64, 64)
    return {"BLOCK_M": sides[0], "BLOCK_N": sides[1], **_depth(sm, dtype, layout)}


def _tensor_cores(dtype: torch.dtype, layout: str, precision: str) -> bool:
    """Whether tensor cores are what is to be kept busy: not in full fp32, nor where elements are loaded one by one, whose
    pointers fill the registers that a large tile's sums would need."""
    return (dtype, precision) != (torch.float32, "ieee") and not layout.endswith(UNALIGNED)


def _depth(sm: int, dtype: torch.dtype, layout: str) -> Config:
    """Stages of 128 bytes along K; of 64 bytes where a block has 99 KiB of shared memory."""
    bytes_along_k = 64 if sm in (86, 89, 120) or layout.endswith(UNALIGNED) else 128
    return {"BLOCK_K": bytes_along_k // dtype.itemsize, "GROUP": 8, "num_warps": 8, "num_stages": 3}


def _candidates(sm: int, dtype: torch.dtype, sides: dict[str, tuple[int, ...]]) -> Any:
    limit = SHARED_PER_BLOCK.get(sm, 227 * 1024)
    depths = tuple(bytes_ // dtype.itemsize for bytes_ in (64, 128, 256))
    for c in grid_of({**sides, "BLOCK_K": depths, "GROUP": (4, 8), "num_warps": (4, 8), "num_stages": (2, 3, 4)}):
        m, n = (c["BLOCK"], c["BLOCK"]) if "BLOCK" in c else (c["BLOCK_M"], c["BLOCK_N"])
        sums_a_thread = m * n // (c["num_warps"] * 32)
        if 32 <= sums_a_thread <= 128 and (m + n) * c["BLOCK_K"] * dtype.itemsize * c["num_stages"] <= limit:
            yield c


def symmetric_candidates(sm: int, dtype: torch.dtype, *rest: Any) -> Any:
    return _candidates(sm, dtype, {"BLOCK": (64, 128, 256)})


def product_candidates(sm: int, dtype: torch.dtype, *rest: Any) -> Any:
    return _candidates(sm, dtype, {"BLOCK_M": (64, 128, 256), "BLOCK_N": (64, 128, 256)})


symmetric_configuration = Configurations(__file__, "symmetric_product", symmetric_heuristic, symmetric_candidates)
product_configuration = Configurations(__file__, "product", product_heuristic, product_candidates)

UNALIGNED = "-unaligned"


def _layout(*tensors: Tensor) -> str:
    """NN, NT, TN or TT of the operands, and whether their elements can be loaded 16 bytes at a time: sizes and strides are
    multiples of 16, as Triton asks."""
    aligned = all(
        value == 1 or value % 16 == 0 for t in tensors for value in (*t.shape[1:], *t.stride()[t.shape[0] == 1 :])
    )
    return layout_of(tensors[0][0], tensors[1][0]) + ("" if aligned else UNALIGNED)


# ---- launches --------------------------------------------------------------------------------------------------------


def symmetric_plan(a: Tensor, b: Tensor, precision: str, beta: float, of_a: float, of_b: float) -> Plan:
    """C = beta·A·B + of_a·A + of_b·B, symmetric, for a [B, M, K] and b [B, K, M] of any strides, into a contiguous c [B, M, M].
    Call it with (a, b, c), where any tensor of the same memory will do for a and b: strides are in the plan."""
    batch, m, k = a.shape
    key = (a.dtype, _layout(a, b), precision, bucket(batch), bucket(m), bucket(k))
    config = symmetric_configuration(a.device, *key)
    tile = {name: config[name] for name in ("BLOCK", "BLOCK_K", "GROUP")}
    return Plan(
        symmetric_product,
        (batch * tiles(triton.cdiv(m, tile["BLOCK"])),),
        (m, k, *a.stride(), *b.stride(), beta, of_a, of_b),
        {**tile, "EVEN_K": k % tile["BLOCK_K"] == 0, "PRECISION": precision, "ADDS_A": of_a != 0, "ADDS_B": of_b != 0},
        config["num_warps"],
        config["num_stages"],
    )


def product_plan(a: Tensor, b: Tensor, c: Tensor, precision: str, beta: float, of_b: float) -> Plan:
    """C = beta·A·B + of_b·B for a [B, M, M], b and c [B, M, N], all of any strides. Call it with (a, b, c)."""
    batch, m, n = b.shape
    key = (a.dtype, _layout(a, b, c), precision, bucket(batch), bucket(m), bucket(n), bucket(m))
    config = product_configuration(a.device, *key)
    tile = {name: config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP")}
    return Plan(
        product,
        (batch * triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),),
        (m, n, m, *a.stride(), *b.stride(), *c.stride(), beta, of_b),
        {**tile, "EVEN_K": m % tile["BLOCK_K"] == 0, "PRECISION": precision},
        config["num_warps"],
        config["num_stages"],
    )


symmetric_plans = Plans(symmetric_plan)
product_plans = Plans(product_plan)


def launch_symmetric(a: Tensor, b: Tensor, c: Tensor, beta: float, of_a: float = 0.0, of_b: float = 0.0) -> None:
    """Writes beta·A·B + of_a·A + of_b·B, symmetric, into a contiguous c [..., M, M]."""
    if c.numel():
        symmetric_plans.of((a, b), precision_now(), beta, of_a, of_b)(a, b, c)


def launch_product(a: Tensor, b: Tensor, c: Tensor, beta: float, of_b: float) -> None:
    """Writes beta·A·B + of_b·B into c [B, M, N]."""
    if c.numel():
        product_plans.of((a, b, c), precision_now(), beta, of_b)(a, b, c)
