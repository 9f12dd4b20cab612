"""A small language model trained by AdamW with moments of 32 bits and of 8, from the same start on the same text.

    python examples/optimizer_in_8_bits.py [STEPS] [PICTURE]

Prints both losses (nats a byte, of text that is not trained on) as they go down, and draws them where PICTURE (.png or .svg)
is given. 1000 steps of both take about a minute on two cores, without a GPU.
"""

import sys

import torch
from small_language_model import BATCH, LanguageModel, Text, draw_losses, drawn

from weft.optim import AdamW, AdamW8bit


def train(kind, steps: int, at: list[int], **options) -> list[float]:
    """Test losses after these numbers of steps."""
    torch.manual_seed(0)
    text = Text()
    generator = torch.Generator().manual_seed(2)
    model = LanguageModel()
    optimizer = kind(model.parameters(), lr=2e-3, weight_decay=0.1, max_norm=1.0, **options)
    losses = []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(step / 50, 1.0)
        optimizer.zero_grad()
        model(drawn(text.known, BATCH, generator)).backward()
        optimizer.step()
        if step in at:
            with torch.no_grad():
                losses.append(float(model(text.test)))
    return losses


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    parts = 10 if len(sys.argv) < 3 else 40  # a picture shows more than a table
    at = sorted({max(steps * i // parts, 1) for i in range(1, parts + 1)})
    wide, narrow = train(AdamW, steps, at), train(AdamW8bit, steps, at)
    print("  step   32 bits    8 bits")
    for step, a, b in zip(at, wide, narrow, strict=True):
        print(f"{step:6} {a:9.4f} {b:9.4f}")
    print(f"8 bits end {100 * (narrow[-1] / wide[-1] - 1):+.2f} % from 32 bits")
    if len(sys.argv) > 2:
        draw_losses(sys.argv[2], [("AdamW, 32 bits", "ours", "-", at, wide), ("AdamW8bit", "second", "--", at, narrow)])


if __name__ == "__main__":
    main()
