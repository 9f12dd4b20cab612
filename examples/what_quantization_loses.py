"""Signal-to-noise ratio of each way to quantise, on inputs of three kinds: the table in docs/notes/quantization.md.

python examples/what_quantization_loses.py
"""

import torch

from weft.operators.quantization.dequantize import round_trip_error

SCHEMES = {
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


def samples(rows: int = 512, columns: int = 1024) -> dict[str, torch.Tensor]:
    """fp32 [rows, columns]: normal; Student's t with 3 degrees of freedom (weights and gradients have such tails); normal
    with every 128th column 30 times as large (activations of language models have such columns)."""
    g = torch.Generator().manual_seed(0)
    normal, *others = (torch.randn(rows, columns, generator=g) for _ in range(4))
    heavy = normal / (sum(t.square() for t in others) / 3).sqrt()
    outliers = normal.clone()
    outliers[:, 5::128] *= 30
    return {"Gaussian": normal, "heavy tails": heavy, "outlier columns": outliers}


def main() -> None:
    made = samples()
    print("| scheme | bits an element | " + " | ".join(f"{kind}: SNR, zeros" for kind in made) + " |")
    print("| --- | ---: |" + " ---: |" * len(made))
    for name, (format, granularity, options) in SCHEMES.items():
        found = [round_trip_error(x, format, granularity, **options) for x in made.values()]
        cells = [f"{e.snr_db:.1f} dB, {100 * e.zeros:.1f} %" for e in found]
        print(f"| {name} | {found[0].bits:.2f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
