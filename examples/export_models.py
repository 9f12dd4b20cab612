"""Two models for ``weft export``: the digits CNN, and a transformer over weft's operators.

    weft export examples/export_models.py:transformer --latency

Each function returns the module, the inputs of a call, and those of a call of another size: dimensions that differ are dynamic.
"""

import torch
from torch import Tensor, nn

import weft
from weft.train.digits import network

VOCABULARY, WIDTH, HEADS = 1000, 128, 4  # B sequences, S tokens, C width, H heads


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, C]
        y = self.qkv(weft.ops.rms_norm(x, self.attention_norm))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in y.chunk(3, -1))  # [B, H, S, C / H]
        x = x + self.out(weft.ops.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
        gate, up = self.up(weft.ops.rms_norm(x, self.mlp_norm)).chunk(2, -1)
        return x + self.down(weft.ops.swiglu(gate, up))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY))
    return model, torch.randint(VOCABULARY, (2, 24)), torch.randint(VOCABULARY, (3, 17))


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    return network(), torch.rand(4, 1, 8, 8), torch.rand(7, 1, 8, 8)
