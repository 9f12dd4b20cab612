"""A small GPT learns alike with weft's attention and with PyTorch's.

    python examples/gpt_against_sdpa.py [STEPS] [PICTURE]

Four layers, 256 wide, grouped queries; text from Python's standard library. Three runs from one seed: with
``weft.ops.attention``, with PyTorch's default and with its plain (math) attention. What rounding does, the noise, is the
difference of the last two. Default: 200 steps; bf16 on a GPU, fp32 and some minutes on a CPU.
"""

import sys

import torch
from small_language_model import Text, draw_losses
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, HEADS, KV_HEADS, LAYERS, CONTEXT, BATCH = 256, 4, 2, 4, 256, 16


def by_weft(q, k, v):
    return ops.attention(q, k, v, causal=True)


def by_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def by_torch_math(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return by_torch(q, k, v)


class Block(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.head = attend, WIDTH // HEADS
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.head)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):  # [B, S, WIDTH]
        heads = self.qkv(self.before(x)).unflatten(-1, (-1, self.head)).transpose(1, 2)  # [B, heads, S, D]
        x = x + self.out(self.attend(*heads.split((HEADS, KV_HEADS, KV_HEADS), 1)).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class GPT(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(256, WIDTH), torch.nn.Linear(WIDTH, 256)
        self.places = torch.nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = torch.nn.Sequential(*(Block(attend) for _ in range(LAYERS)))

    def forward(self, text):  # [B, CONTEXT + 1] bytes -> loss
        logits = self.head(self.blocks(self.embedding(text[:, :-1]) + self.places))
        return F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())


def train(attend, text: torch.Tensor, steps: int) -> list[float]:
    """The loss of every step; weights and batches depend on the seed alone."""
    torch.manual_seed(0)
    model, g = GPT(attend).to(DEVICE), torch.Generator().manual_seed(0)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=g)
        batch = text[starts[:, None] + torch.arange(CONTEXT + 1)].to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def apart(one: list[float], other: list[float]) -> float:
    """Root of the mean square of the differences of two curves."""
    return (sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one)) ** 0.5


def draw(path: str, ours: list[float], theirs: list[float], plain: list[float]) -> None:
    drawing = (
        ("PyTorch", "second", "-", theirs),
        ("PyTorch, plain", "muted", ":", plain),
        ("weft", "ours", "--", ours),
    )
    at = range(1, len(ours) + 1)
    draw_losses(path, [(*how, at, losses) for *how, losses in drawing], what="training loss")


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    text = Text().known
    ours, theirs, plain = (train(attend, text, steps) for attend in (by_weft, by_torch, by_torch_math))
    print(
        f"{steps} steps on {DEVICE}: weft {ours[-1]:.4f}, PyTorch {theirs[-1]:.4f}, PyTorch plain {plain[-1]:.4f} nats a byte"
    )
    print(f"weft and PyTorch differ by {apart(ours, theirs):.1e}, PyTorch and itself by {apart(theirs, plain):.1e}")
    if len(sys.argv) > 2:
        draw(sys.argv[2], ours, theirs, plain)


if __name__ == "__main__":
    main()
