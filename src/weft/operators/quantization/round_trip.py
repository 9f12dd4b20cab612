"""What a scheme loses: ``round_trip_error(x, format, granularity, …)``, and a table of schemes over inputs of three kinds.

python -m weft.operators.quantization.round_trip     # writes the table into README.md
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.operators.dropout.philox import WORD, words
from weft.operators.quantization.dequantize import dequantize
from weft.operators.quantization.formats import FORMATS, spread
from weft.operators.quantization.quantize import quantize
from weft.records import write_whole

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- round trips: python -m weft.operators.quantization.round_trip -->\n", "<!-- end -->"


@dataclass(frozen=True)
class RoundTripError:
    """Of ``dequantize(*quantize(x))`` against x, over the elements that are finite in both.

    Args:
        relative_rms: root mean square of the error over that of x.
        largest: the largest error, in x's units.
        snr_db: 20 log10 of 1 / relative_rms: signal to noise in decibels; infinite where nothing is lost.
        saturated: share of elements whose nearest value is beyond the format's largest (none with scales of absmax).
        zeros: share of elements that are not 0 and become 0.
        bits: of values and scales, over the number of elements.
    """

    relative_rms: float
    largest: float
    snr_db: float
    saturated: float
    zeros: float
    bits: float


def round_trip_error(x: Tensor, format: str, granularity: str = "row", **options: Any) -> RoundTripError:
    """What quantising x by a scheme loses.

    Args:
        x: any tensor that ``quantize`` takes.
        format, granularity, options: as ``quantize`` takes them.

    Returns:
        A :class:`RoundTripError`; of an empty tensor, and of one that is all zeros, its errors are 0.

    Raises:
        TypeError, ValueError: as ``quantize``.
    """
    values, scale = quantize.public(x, format, granularity, **options)  # type: ignore[misc]
    x = x.detach()  # a model's weight wants a gradient, and what is read from it here is numbers
    group_size = options.get("group_size", 128)
    back = dequantize.public(values, scale, granularity, group_size=group_size, columns=x.shape[-1])  # type: ignore[misc]
    known = x.isfinite() & back.isfinite()
    exact, got = (torch.where(known, t, 0.0).double() for t in (x, back))
    error = got - exact
    elements = max(x.numel(), 1)
    signal, noise = (float(t.square().sum()) / elements for t in (exact, error))
    relative = math.sqrt(noise / signal) if signal else 0.0
    beyond = exact.abs() / spread(scale, tuple(x.shape), granularity, group_size) > reach(format)
    return RoundTripError(
        relative_rms=relative,
        largest=float(error.abs().max()) if x.numel() else 0.0,
        snr_db=-20 * math.log10(relative) if relative else math.inf,
        saturated=int(beyond.sum()) / elements,
        zeros=int(((got == 0) & (exact != 0)).sum()) / elements,
        bits=8 * (values.nbytes + scale.nbytes) / elements,
    )


def reach(format: str) -> float:
    """The largest number that rounds to the format's largest value without a bound: half a step above it."""
    made = FORMATS[format]
    return made.largest + (2.0 ** (math.floor(math.log2(made.largest)) - made.mantissa - 1) if made.mantissa else 0.5)


# ---- the table in README.md ------------------------------------------------------------------------------------------

SCHEMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "int8, tensor": ("int8", "tensor", {}),
    "int8, row": ("int8", "row", {}),
    "int8, column": ("int8", "column", {}),
    "int8, group of 128": ("int8", "group", {}),
    "fp8_e4m3, tensor": ("fp8_e4m3", "tensor", {}),
    "fp8_e4m3, row": ("fp8_e4m3", "row", {}),
    "fp8_e4m3, group of 128": ("fp8_e4m3", "group", {}),
    "fp8_e4m3, group of 128, power of two": ("fp8_e4m3", "group", {"power_of_two": True}),
    "fp8_e4m3, block": ("fp8_e4m3", "block", {}),
    "fp8_e4m3, row, stochastic": ("fp8_e4m3", "row", {"rounding": "stochastic", "seed": 1}),
    "fp8_e5m2, row": ("fp8_e5m2", "row", {}),
    "int4, row": ("int4", "row", {}),
    "int4, group of 128": ("int4", "group", {}),
    "int4, group of 32": ("int4", "group", {"group_size": 32}),
}


def uniform(shape: tuple[int, int], seed: int) -> Tensor:
    """Numbers in (0, 1), fp64, by Philox: the same on every machine."""
    group = torch.arange(shape[0] * shape[1])
    word, *_ = words((group & WORD, group >> 32, 0, 0), (seed, 0))
    return ((word.double() + 0.5) / 2**32).view(shape)


def samples(rows: int = 512, columns: int = 1024) -> dict[str, Tensor]:
    """fp32 [rows, columns]: normal; Student's t with 3 degrees of freedom (weights and gradients have such tails); normal
    with every 128th column 30 times as large (activations of language models have such columns)."""
    normal, other, third, fourth = (
        torch.erfinv(2 * uniform((rows, columns), seed) - 1) * math.sqrt(2) for seed in range(4)
    )
    heavy = normal / ((other.square() + third.square() + fourth.square()) / 3).sqrt()
    columns_apart = normal.clone()
    columns_apart[:, 5::128] *= 30
    return {"Gaussian": normal.float(), "heavy tails": heavy.float(), "outlier columns": columns_apart.float()}


def table() -> str:
    """Signal to noise in decibels, and the share of what becomes 0, of every scheme on every kind of input."""
    made = samples()
    lines = [
        "| scheme | bits an element | " + " | ".join(f"{kind}: SNR, zeros" for kind in made) + " |",
        "| --- | ---: |" + " ---: |" * len(made),
    ]
    for name, (format, granularity, options) in SCHEMES.items():
        found = [round_trip_error(x, format, granularity, **options) for x in made.values()]
        cells = [f"{e.snr_db:.1f} dB, {100 * e.zeros:.1f} %" for e in found]
        lines.append(f"| {name} | {found[0].bits:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def refreshed(text: str) -> str:
    """README.md with today's table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    write_whole(README, refreshed(README.read_text(encoding="utf-8")))
    sys.stdout.write(table())
