"""Random sparse matrices for verification and timing: even, random and skewed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Workload, torch_dtype
from weft.operators.random_inputs import random_tensor
from weft.operators.sparse.csr import CSR

ZIPF = 1.1  # exponent of skewed rows: the longest of 2^20 has an eighth of all elements, two in five are empty

# Options of a workload of any operator over CSR.
OPTIONS = {
    "rows": ("random", "even", "skewed", "one"),  # where elements fall; `one`: all in the middle row
    "columns": ("random", "sorted", "few"),  # `few`: only 3 columns, so that duplicates abound
    "indices": ("int32", "int64"),
}


def stored(w: Workload) -> int:
    """How many elements a workload's matrix has: R a row, none where there are no columns."""
    return w["M"] * w["R"] if w["N"] else 0


def random_csr(w: Workload, g: Any, device: str) -> CSR:
    """[M, N] with M·R elements, R in each row or dealt out at random. Values are drawn from ``g``; the pattern is the
    workload's own, the same for every draw."""
    m, n, z = w["M"], w["N"], stored(w)
    index = torch_dtype(w.option("indices", "int32"))
    values = random_tensor(g, (z,), w.dtype, device, values=w.option("values", "normal"))
    if device == "meta":
        offsets, columns = (torch.empty(size, dtype=index, device=device) for size in (m + 1, z))
        return CSR(offsets, columns, values, (m, n))
    at = torch.Generator(device).manual_seed(m + 3 * n + 7 * z)
    offsets = torch.zeros(m + 1, dtype=torch.int64, device=device)
    torch.cumsum(_lengths(w, z, at, device), 0, out=offsets[1:])
    width = min(n, 3) if w.option("columns") == "few" else n
    columns = torch.randint(0, max(width, 1), (z,), generator=at, device=device)
    if w.option("columns") == "sorted":
        rows = torch.repeat_interleave(torch.arange(m, device=device), offsets.diff())
        columns = torch.sort(rows * n + columns).values % n
    return CSR(offsets.to(index), columns.to(index), values, (m, n), check=False)


def _lengths(w: Workload, z: int, at: torch.Generator, device: str) -> Tensor:
    """How many of z elements each row has."""
    m, rows = w["M"], w.option("rows", "random")
    if not z:
        return torch.zeros(m, dtype=torch.int64, device=device)
    if rows == "even":
        return torch.full((m,), w["R"], device=device)
    if rows == "one":
        return torch.where(torch.arange(m, device=device) == m // 2, z, 0)
    if rows == "random":
        return torch.bincount(torch.randint(0, m, (z,), generator=at, device=device), minlength=m)
    share = torch.arange(1, m + 1, dtype=torch.float64, device=device).pow(-ZIPF).cumsum(0)
    drawn = torch.rand(z, generator=at, dtype=torch.float64, device=device) * share[-1]
    rank = torch.searchsorted(share, drawn).clamp_(max=m - 1)
    place = torch.randperm(m, generator=at, device=device)
    return torch.bincount(place[rank], minlength=m)


def distinct(n: int, z: int) -> int:
    """Of n columns, how many z random elements name: what must be read of the other factor (the expected number)."""
    return int(n * (1 - (1 - 1 / n) ** z)) if n else 0
