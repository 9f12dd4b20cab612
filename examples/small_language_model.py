"""A language model that trains on a CPU in half a minute, for examples that compare optimizers.

A transformer of two layers (0.28 M parameters) reads bytes of the Python sources that came with this Python; a loss is nats a
byte. Not an example itself: the others import it.
"""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

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


class Text:
    """2 MB of the standard library, the first files of the alphabet. The last tenth is kept for testing."""

    def __init__(self):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        read = bytearray(b"".join(f.read_bytes() for f in files)[: 2 * 2**20])
        whole = torch.frombuffer(read, dtype=torch.uint8).long()
        self.known, self.unknown = whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]
        self.test = drawn(self.unknown, 128, torch.Generator().manual_seed(1))


def drawn(text: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Pieces from random places: [count, CONTEXT + 1]."""
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


Line = tuple[str, str, str, Sequence[int], Sequence[float]]  # label, colour of weft's palette, style, steps, losses


def draw_losses(path: str | Path, lines: Sequence[Line], highest: float | None = None, what: str = "test loss") -> None:
    """A picture of losses, ``.png`` or ``.svg``, up to ``highest``.

    Raises:
        ModuleNotFoundError: no matplotlib (pip install 'weft[pictures]').
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from weft.drawing.palette import LIGHT as INK

    figure = Figure(figsize=(6.4, 3.9), layout="constrained", facecolor=INK["paper"])
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, ink, style, steps, losses in lines:
        axes.plot(steps, losses, style, color=INK[ink], label=label or None, linewidth=1.5)
    axes.set(xlabel="steps", ylabel=f"{what}, nats a byte", facecolor=INK["paper"])
    axes.set_ylim(top=highest)
    axes.grid(color=INK["rule"], linewidth=0.8)
    axes.legend(fontsize=8, facecolor=INK["paper"])
    for side in axes.spines.values():
        side.set_color(INK["rule"])
    with rc_context({"svg.hashsalt": "weft"}):  # and no date: the same losses give the same file
        figure.savefig(path, dpi=130, metadata={"Date": None} if Path(path).suffix == ".svg" else None)
