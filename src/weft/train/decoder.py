"""A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU, over ``weft.ops`` or PyTorch.

Source: Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models"; grouped queries: Ainslie et al. 2023.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # a target that does not count
EPS = 1e-6
THETA = 10_000.0

# B sequences, S tokens, C width, H query heads, G key heads, D head dim, F hidden width, V vocabulary


class Norm(nn.Module):
    def __init__(self, width: int, operators: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.operators = operators

    def forward(self, x: Tensor) -> Tensor:
        if self.operators == "weft":
            from weft import ops

            return ops.rms_norm(x, whole(self.weight), EPS)
        return F.rms_norm(x, self.weight.shape, whole(self.weight), EPS)


class Block(nn.Module):
    """``qkv`` has the rows of one key head after another, each group's queries, key and value, and ``gate`` and ``up`` are two
    layers: so a rank of tensor parallelism holds whole heads and the same hidden units in a plain shard of rows."""

    def __init__(self, width: int, heads: int, kv_heads: int, operators: str, deterministic: bool, fp8: bool) -> None:
        super().__init__()
        self.group, self.head_dim = heads // kv_heads, width // heads  # queries that share a key head
        self.operators, self.deterministic = operators, deterministic
        hidden = -(-width * 8 // 3 // 64) * 64
        self.attention_norm, self.mlp_norm = Norm(width, operators), Norm(width, operators)
        self.qkv = linear(width, (heads + 2 * kv_heads) * self.head_dim, fp8)
        self.out = linear(width, width, fp8)
        self.gate, self.up = linear(width, hidden, fp8), linear(width, hidden, fp8)
        self.down = linear(hidden, width, fp8)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape  # x [B, S, C], cos and sin [S, D/2]
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.unflatten(-1, (-1, self.group + 2, self.head_dim))  # [B, S, G, H/G + 2, D]
        q, k, v = qkv.split((self.group, 1, 1), dim=3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)  # [B, S, H, D], [B, S, G, D] twice
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        x = x + self.out(self.attended(q, k, v, cos, sin).transpose(1, 2).reshape(b, s, -1))
        h = self.mlp_norm(x)
        return x + self.down(self.gated(self.gate(h), self.up(h)))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of tokens ``[B, S, heads, D]`` what each head reads, ``[B, H, S, D]``."""
        if self.operators == "weft":
            from weft import ops

            q, k = ops.rotary_embedding(q, k, cos, sin)
        else:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.operators != "torch":
            from weft import ops

            y: Tensor = ops.attention(q, k, v, causal=True, deterministic=self.deterministic)
            return y
        if q.dtype == torch.float32:  # in which PyTorch's fused kernel knows no groups, and all scores would be stored
            k, v = (t.repeat_interleave(self.group, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.operators == "weft":
            from weft import ops

            y: Tensor = ops.swiglu(gate, up)
            return y
        if self.operators == "outline":
            return checkpoint(swiglu, gate, up, use_reentrant=False)
        return swiglu(gate, up)


class Decoder(nn.Module):
    """Args: vocabulary V; the widths as ``GptSettings`` has them; ``recompute``: each block runs again in backward; ``fp8``:
    products of the blocks as :class:`weft.nn.Linear` makes them. ``operators``: weft, torch, or outline, PyTorch's that keep
    for backward what weft's keep, where fake tensors would see references that keep more."""

    def __init__(
        self, vocabulary: int, length: int, layers: int, width: int, heads: int, kv_heads: int,
        operators: str = "weft", recompute: bool = False, deterministic: bool = False, fp8: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.operators, self.recompute = operators, recompute
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, operators, deterministic, fp8) for _ in range(layers))
        self.norm = Norm(width, operators)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.length, self.head_dim = length, width // heads
        for name, p in self.named_parameters():
            if p.ndim == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if into_residual else 0.02)

    def hidden(self, x: Tensor) -> Tensor:
        """Tokens ``[B, S]`` → what the head takes ``[B, S, C]``."""
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * THETA ** -(
            torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim
        )  # [S, D/2]
        cos, sin = angles.cos(), angles.sin()
        h = F.embedding(x, whole(self.embedding.weight))  # [B, S, C]
        for block in self.blocks:
            h = checkpoint(block, h, cos, sin, use_reentrant=False) if self.recompute else block(h, cos, sin)
        return self.norm(h)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, None]:
        """Tokens and the ones after them, ``[B, S]`` → the sum of the losses ``[]`` of targets that are not -100."""
        h = self.hidden(x).flatten(0, 1)  # [B S, C]
        target = y.flatten()
        if self.operators != "torch":
            from weft import ops

            head = whole(self.head.weight)
            return ops.linear_cross_entropy(h, head, target, ignore_index=IGNORE, reduction="sum"), None
        logits = F.linear(h, whole(self.head.weight)).float()  # [B S, V]
        return F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum"), None


def linear(inputs: int, outputs: int, fp8: bool) -> nn.Linear:
    if not fp8:
        return nn.Linear(inputs, outputs, bias=False)
    from weft.nn import Linear

    return Linear(inputs, outputs, bias=False, fp8=True)


def whole(weight: Tensor) -> Tensor:
    """A weight that every rank of tensor parallelism holds, as a plain tensor; any other as it is."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[B, S, H, D]``: its halves turned by the angles ``[S, D/2]``."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
