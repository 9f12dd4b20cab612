"""An extremum whose gradient needs no x: forward keeps one bit of each element, backward reads these and dy.

That takes an extent all of which is in a program's registers when the extremum is known: rows of up to ``MOST``
elements, columns of up to ``WALK`` that are walked by a thread each, and columns of more where a tile of them still is
wide enough. The kernels are in ``kept_kernels.py``; dense rows of 3, 5, 6 or 7 elements have others in CUDA C++
(``kept_tiny.py``).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import KernelFunction
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import INTERPRETING, Plan, Plans
from weft.operators.reduction import kept_kernels
from weft.operators.reduction.plans import TINY, Formula
from weft.operators.reduction.views import View, strides_of_result, views_of

MOST = 512 if INTERPRETING else 8192  # elements of a tile
WALK = 32  # bits of the register in which a thread that walks along N keeps them
NARROW = 64  # columns that a tile has at least where the tensor has as many: 128 bytes of 16-bit floats

# ---- configurations --------------------------------------------------------------------------------------------------


def rows_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Rows of n elements (a power of two; up to TINY the extent itself)."""
    if n <= TINY:
        return {"TILE": 4096 if bucket(n) == n else 1024, "num_warps": 4}
    return {"TILE": max(2048, n), "num_warps": 4 if n <= 4096 else 8}


def rows_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = grid_of({"TILE": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)})
    return [c for c in every if 4 <= c["TILE"] // (32 * c["num_warps"]) <= 32 and c["TILE"] >= n]


def columns_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Columns of n elements, walked up to WALK (TILE counts columns then), else in tiles."""
    if n <= WALK:  # a vector of 16 bytes a thread: then bytes, results and elements lie in the same threads
        return {"TILE": 128 * 16 // dtype.itemsize, "num_warps": 4}
    return {"TILE": max(4096, NARROW * n), "num_warps": 8}


def columns_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n <= WALK:
        return grid_of({"TILE": (256, 512, 1024, 2048, 4096), "num_warps": (2, 4, 8)})
    return [c for c in rows_candidates(sm, dtype, NARROW * n) if c["num_warps"] >= 4]


# the launches differ in what limits them, so each is measured for itself
CONFIGURATIONS = {
    ("keep", False): Configurations(__file__, "keep_rows", rows_heuristic, rows_candidates),
    ("keep", True): Configurations(__file__, "keep_columns", columns_heuristic, columns_candidates),
    ("share", False): Configurations(__file__, "share_rows", rows_heuristic, rows_candidates),
    ("share", True): Configurations(__file__, "share_columns", columns_heuristic, columns_candidates),
}

# ---- launches --------------------------------------------------------------------------------------------------------


class Kept(Protocol):
    """What keeps bits for one view, and makes the gradient of them."""

    def keep(self, x: Tensor, out: Tensor, bits: Tensor) -> None: ...

    def share(self, dy: Tensor, bits: Tensor, dx: Tensor, strides: tuple[int, int]) -> None:
        """``strides`` are those of dy before and after the reduced axis."""


def why_not(v: View) -> str:
    """Why no bits of a view are kept by a tile (an empty string where they are)."""
    if v.K > 1 and v.N <= WALK:
        return ""
    wide = bucket(v.N) * min(bucket(v.K), 4 if INTERPRETING else NARROW)
    return "" if wide <= MOST else f"{v.N} elements are more than a tile holds: their extremum is known too late"


class KeptTiles:
    """The launches by Triton, of a view of x and the one of dx that matches it."""

    def __init__(self, v: View, dx: View, device: torch.device, dtype: torch.dtype, formula: Formula):
        if reason := why_not(v):
            raise Declined(reason)
        self.v, self.dx, self.device, self.dtype = v, dx, device, dtype
        self.walked = v.K > 1 and v.N <= WALK
        scalars = (v.m, v.n, v.k, 1.0)
        formulas = {"MAP": formula.map, "FINISH": formula.finish, "OTHER": formula.other}
        kernel = kept_kernels.keep_columns if self.walked else kept_kernels.keep_tiles
        self.keep = self._plan("keep", kernel, v, scalars, formulas)

    def share(self, dy: Tensor, bits: Tensor, dx: Tensor, strides: tuple[int, int]) -> None:
        share_plans.of((dy, bits, dx), self, strides)(dy, bits, dx)

    def share_plan(self, strides: tuple[int, int]) -> Plan:
        kernel = kept_kernels.share_columns if self.walked else kept_kernels.share_tiles
        return self._plan("share", kernel, self.dx, (*strides, self.dx.m, self.dx.n, self.dx.k), {})

    def _plan(self, way: str, kernel: Any, at: View, scalars: tuple[Any, ...], formulas: dict[str, Any]) -> Plan:
        """``at`` is the tensor of x's size that is read or written."""
        v = self.v
        key = v.N if v.N <= TINY else bucket(v.N)
        config = CONFIGURATIONS[way, v.K > 1](self.device, self.dtype, key)
        tile, warps = min(config["TILE"], MOST), config["num_warps"]
        constants: dict[str, Any] = dict(formulas)
        if self.walked:
            cols = min(bucket(v.K), tile)
            rows = min(tile // cols, bucket(v.M))
            constants |= {"N": v.N, "ROWS": rows, "COLS": cols}
            extents: tuple[int, ...] = (v.M, v.K)
        else:
            reach = max(2, bucket(v.N))
            cols = min(bucket(v.K), max(tile // reach, 1))
            rows = min(max(tile // (reach * cols), 1), bucket(v.M))
            flat = v.K == 1 and reach == v.N and at.n == 1 and (at.m == v.N or v.M == 1)
            constants |= {"ROWS": rows, "REACH": reach, "COLS": cols, "FLAT": flat}
            extents = (v.M, v.N, v.K)
        constants |= {"UNIT": at.unit(), "DENSE": at.dense_axis}
        grid = (triton.cdiv(v.M, rows) * triton.cdiv(v.K, cols),)
        return Plan(kernel, grid, (*extents, *scalars), constants, warps)


share_plans = Plans(lambda dy, bits, dx, kept, strides: kept.share_plan(strides))


# ---- calls -----------------------------------------------------------------------------------------------------------


def rows_became_columns(x: Tensor, dim: int | None, v: View) -> bool:
    return dim is not None and v.M == 1 and x.shape[:dim].numel() > 1


def with_strides(dy: Tensor, dim: int | None, keepdim: bool, swapped: bool) -> tuple[Tensor, tuple[int, int]]:
    """dy with its strides before and after the reduced axis, as the view has them; where there are none, of a copy: autograd
    may bring one of any strides, and it has one element a result."""
    if dim is None:
        return dy, (0, 0)
    strides = strides_of_result(dy, dim, keepdim)
    if strides is None:
        dy = dy.contiguous()
        strides = strides_of_result(dy, dim, keepdim) or (0, 0)
    return dy, strides[::-1] if swapped else strides


class KeptReady:
    """What keeps bits of tensors like x, with how their result and dx lie. ``kept`` is the shape of the bits.

    Args:
        shape: of the result.
        made: ``(view of x, view of dx) -> Kept``; raises Declined.
    """

    dtype = torch.uint8

    def __init__(self, x: Tensor, dim: int | None, keepdim: bool, shape: tuple[int, ...], made: Any):
        like = torch.empty_like(x, device="meta")
        found = views_of(x, dim, like)
        if found is None:
            raise Declined(
                "the dimensions beside 'dim' do not collapse into one stride each, so a copy would be needed"
            )
        self.view, self.dx = found
        if dim is None and self.view.M * self.view.K > 1:
            raise Declined("everything of a tensor that is not dense")
        self.dim, self.keepdim, self.shape = dim, keepdim, shape
        self.size, self.stride = like.size(), like.stride()
        self.swapped = rows_became_columns(x, dim, self.view)
        self.kept = (self.view.M, triton.cdiv(self.view.N, 8), self.view.K)
        self.launches: Kept = made(*found)

    def __call__(self, x: Tensor, out: Tensor, bits: Tensor) -> None:
        self.launches.keep(x, out, bits)

    def saved(self, x: Tensor, out: Tensor, bits: Tensor) -> tuple[Tensor, ...]:
        """What of a call backward takes."""
        return (bits,)

    def gradient(self, dy: Tensor, bits: Tensor) -> Tensor:
        dx = torch.empty_strided(self.size, self.stride, dtype=dy.dtype, device=dy.device)
        dy, strides = with_strides(dy, self.dim, self.keepdim, self.swapped)
        self.launches.share(dy, bits, dx, strides)
        return dx

    def differentiable(self, dy: Tensor, bits: Tensor) -> Tensor:
        """The gradient where one of it is wanted: PyTorch's formula, linear in dy."""
        equals = self.equals(bits)
        over = tuple(range(equals.ndim)) if self.dim is None else (self.dim,)
        if not self.keepdim:
            dy = dy.view((1,) * equals.ndim) if self.dim is None else dy.unsqueeze(self.dim)
        return dy * equals / equals.sum(over, keepdim=True)

    def equals(self, bits: Tensor) -> Tensor:
        """The bits as a tensor of truth values of x's shape."""
        places = torch.arange(8, dtype=torch.uint8, device=bits.device).view(8, 1)
        every = ((bits.unsqueeze(2) >> places) & 1).view(self.view.M, -1, self.view.K)[:, : self.view.N]
        equals = torch.empty_strided(self.size, self.stride, dtype=torch.bool, device=bits.device)
        equals.as_strided(every.shape, (self.dx.m, self.dx.n, self.dx.k)).copy_(every)
        return equals


class Function(KernelFunction):
    """An extremum by plans of :class:`KeptReady`, which do not save x (it may be overwritten), or of ``SpansReady``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plans: Plans, *how: Any) -> Tensor:
        ready = plans.of((x,), *how)
        out = torch.empty(ready.shape, dtype=x.dtype, device=x.device)
        kept = torch.empty(ready.kept, dtype=ready.dtype, device=x.device)
        ready(x, out, kept)
        ctx.ready, ctx.options = ready, len(how)
        ctx.save_for_backward(*ready.saved(x, out, kept))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        make = ctx.ready.differentiable if torch.is_grad_enabled() else ctx.ready.gradient
        return (make(dy, *ctx.saved_tensors), None, *(None,) * ctx.options)
