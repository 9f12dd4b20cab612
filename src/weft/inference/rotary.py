"""Rotary position embedding: the frequencies of every scaling that Llama, Qwen and Mistral checkpoints use.

Sources: Su et al. 2021 (arXiv 2104.09864); linear: Chen et al. 2023 (arXiv 2306.15595); dynamic: bloc97 2023; YaRN: Peng et
al. 2023 (arXiv 2309.00071); llama3: Llama 3.1's release.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RotaryConfig:
    """``original`` is the length in tokens that the model was pretrained for; ``dim`` that of a head."""

    dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cosines and sines are multiplied with it

    def longest(self, length: int) -> int:
        """Tokens of the longest sequence, where ``max_position_embeddings`` is ``length``."""
        scaled = math.floor(self.original * self.factor) if self.kind in ("dynamic", "yarn") else 0
        return max(length, scaled)

    def depends_on_length(self, tokens: int) -> bool:
        """Whether the angles of a prompt of so many tokens are another's than those of its beginning."""
        return self.kind == "dynamic" and tokens > self.original

    def frequencies(self, device: Any = None) -> "Tensor":
        """Radians per position of each pair of columns, float32 [dim / 2]."""
        import torch

        exponent = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        plain = 1.0 / self.theta**exponent
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            turns = self.original * plain / (2 * math.pi)  # of a pair over the original length
            smooth = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
            return (1 - smooth) * plain / self.factor + smooth * plain
        if self.kind == "yarn":
            low, high = self._bounds()
            ramp = ((torch.arange(self.dim // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)
            return plain / self.factor * ramp + plain * (1 - ramp)
        return plain

    def _bounds(self) -> tuple[float, float]:
        """Pairs of columns between which YaRN goes over from extrapolating to interpolating."""

        def pair(turns: float) -> float:
            return self.dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        return low, high + 0.001 if low == high else high

    def angles(self, positions: "Tensor", lengths: "Tensor | None" = None) -> "tuple[Tensor, Tensor]":
        """(cos, sin) of positions [T], float32 [T, dim / 2]; ``lengths`` [T] are tokens of the sequence that each was computed
        in (its own position plus 1 if None), which dynamic scaling depends on."""
        import torch

        if self.kind == "dynamic":
            length = (positions + 1 if lengths is None else lengths).clamp(min=self.original).double()
            grown = (self.factor * length / self.original - (self.factor - 1)) ** (self.dim / (self.dim - 2))
            exponent = torch.arange(0, self.dim, 2, dtype=torch.float64, device=positions.device) / self.dim
            frequency = (1.0 / (self.theta * grown)[:, None] ** exponent).float()
            angle = positions.float()[:, None] * frequency
        else:
            angle = positions.float()[:, None] * self.frequencies(positions.device)
        return angle.cos() * self.attention_factor, angle.sin() * self.attention_factor
