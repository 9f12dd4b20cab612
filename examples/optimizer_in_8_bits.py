"""A small language model trained by AdamW with moments of 32 bits and of 8, from the same start on the same text.

    python examples/optimizer_in_8_bits.py [STEPS]

A transformer of two layers reads bytes of the Python sources that came with this Python. Prints both losses (nats a byte, of
text that is not trained on) as they go down. 1000 steps of both take about a minute on two cores, without a GPU.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional as F

from weft.optim import AdamW, AdamW8bit

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 96, 4, 2, 64, 12


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.between = torch.nn.LayerNorm(WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):  # [B, S, WIDTH]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.between(x))


class LanguageModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, WIDTH)
        self.places = torch.nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, text):  # [B, CONTEXT + 1] bytes -> loss
        x = self.blocks(self.embedding(text[:, :-1]) + self.places)
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def standard_library() -> torch.Tensor:
    """2 MB of it, the first files of the alphabet; the last tenth is kept for testing."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)[: 2 * 2**20]), dtype=torch.uint8).long()


def drawn(text: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def train(kind, steps: int, at: list[int], **options) -> list[float]:
    """Test losses after these numbers of steps."""
    torch.manual_seed(0)
    text = standard_library()
    known, unknown = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    test = drawn(unknown, 128, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    model = LanguageModel()
    optimizer = kind(model.parameters(), lr=2e-3, weight_decay=0.1, max_norm=1.0, **options)
    losses = []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(step / 50, 1.0)
        optimizer.zero_grad()
        model(drawn(known, BATCH, generator)).backward()
        optimizer.step()
        if step in at:
            with torch.no_grad():
                losses.append(float(model(test)))
    return losses


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    at = sorted({max(steps * i // 10, 1) for i in range(1, 11)})
    wide, narrow = train(AdamW, steps, at), train(AdamW8bit, steps, at)
    print("  step   32 bits    8 bits")
    for step, a, b in zip(at, wide, narrow, strict=True):
        print(f"{step:6} {a:9.4f} {b:9.4f}")
    print(f"8 bits end {100 * (narrow[-1] / wide[-1] - 1):+.2f} % from 32 bits")


if __name__ == "__main__":
    main()
