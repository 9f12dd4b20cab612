"""Random tensors in the layouts and value ranges that operators are verified on."""

import math
from typing import Any

import torch

from weft.definition import UnknownName, Workload, torch_dtype

LAYOUTS = ("contiguous", "unaligned", "sliced", "strided", "transposed", "expanded")
VALUES = ("normal", "large", "tiny", "nonfinite", "minus_inf_rows")


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def random_tensor(
    g: Any, shape: tuple[int, ...], dtype: str, device: str = "cpu", layout: str = "contiguous", values: str = "normal"
) -> torch.Tensor:
    """A random tensor.

    Args:
        g: a ``torch.Generator`` (of ``device``, or a CPU one).
        layout: ``contiguous``; ``unaligned`` (storage offset of one element); ``sliced`` (rows longer than the view);
            ``strided`` (every second element of the last dimension); ``transposed`` (last two dimensions, column-major);
            ``expanded`` (first dimension has stride 0).
        values: ``normal``; ``large`` (near the dtype's largest); ``tiny``; ``nonfinite`` (NaN and infinities
            sprinkled in); ``minus_inf_rows`` (every second row all −inf).
    """
    if device == "meta":
        return _laid_out(shape, layout, lambda s: torch.empty(s, dtype=torch_dtype(dtype), device="meta"))
    if values not in VALUES:
        raise UnknownName("values", values, VALUES)

    def fill(s: tuple[int, ...]) -> torch.Tensor:
        x = torch.empty(s, dtype=torch_dtype(dtype), device=device)
        if g is not None and g.device.type != x.device.type:
            return x.copy_(torch.randn(s, generator=g, dtype=torch.float32).to(x.dtype))
        return x.normal_(generator=g)

    x = _laid_out(shape, layout, fill)
    if values == "normal" or x.numel() == 0:
        return x
    if values == "large":
        return x.mul_(torch.finfo(x.dtype).max / 16 if dtype != "fp16" else 2000.0)
    if values == "tiny":
        return x.mul_(torch.finfo(x.dtype).tiny * 4)
    flat = torch.arange(x.numel(), device=x.device).view(x.shape)
    if values == "minus_inf_rows":
        rows = flat // max(x.shape[-1], 1) % 2 == 0
        return x.masked_fill_(rows, -torch.inf)
    for period, value in ((97, torch.nan), (89, torch.inf), (83, -torch.inf)):
        x.masked_fill_(flat % period == period // 2, value)
    return x


def drawn(w: Workload, g: Any, device: str, *shape: int) -> torch.Tensor:
    """A random tensor in the workload's dtype, layout and values."""
    layout, values = w.option("layout", "contiguous"), w.option("values", "normal")
    return random_tensor(g, shape, w.dtype, device, layout=layout, values=values)


def of_vectors(layout: str) -> str:
    """The layout of a vector beside matrices of a layout."""
    return layout if layout in ("unaligned", "strided") else "contiguous"


# options of operators on vectors of N elements: a layout of all tensors or of each, and rows=R for [R, N / R]
OF_VECTORS = {
    "layout": (*LAYOUTS, *(f"{x}+{y}" for x in LAYOUTS for y in LAYOUTS)),
    "values": VALUES,
    "rows": range(1, 2**31),
}


def vector_shape(operator: str, w: Workload) -> tuple[int, ...]:
    rows = w.option("rows", 0)
    if rows and w["N"] % rows:
        raise ValueError(f"workload '{w}' of '{operator}': rows is {rows}; expected a divisor of N")
    return (rows, w["N"] // rows) if rows else (w["N"],)


def vectors(operator: str, names: tuple[str, ...], w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Arguments of one shape."""
    layouts, values = w.option("layout", "contiguous").split("+") * 2, w.option("values", "normal")
    return {
        name: random_tensor(g, vector_shape(operator, w), w.dtype, device, layout=layout, values=values)
        for name, layout in zip(names, layouts, strict=False)
    }


def _laid_out(shape: tuple[int, ...], layout: str, fill: Any) -> torch.Tensor:
    if layout == "contiguous" or not shape:
        return fill(shape)
    *lead, n = shape
    if layout == "unaligned":
        return fill((math.prod(shape) + 1,))[1:].view(shape)
    if layout == "sliced":
        return fill((*lead, n + 3))[..., :n]
    if layout == "strided":
        return fill((*lead, 2 * n))[..., ::2]
    if layout == "transposed":
        return fill((*lead[:-1], n, lead[-1])).transpose(-1, -2) if lead else fill(shape)
    if layout == "expanded":
        return fill((1, *shape[1:])).expand(shape)
    raise UnknownName("layout", layout, LAYOUTS)
