"""Rotary position embedding: the frequencies of every scaling that Llama, Qwen and Mistral checkpoints use.

Sources: Su et al. 2021 (arXiv 2104.09864); linear: Chen et al. 2023 (arXiv 2306.15595); dynamic: bloc97 2023; YaRN: Peng et
al. 2023 (arXiv 2309.00071); llama3: Llama 3.1's release.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

KNOWN = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
OPTIONAL = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned"}


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

    @classmethod
    def read(cls, values: dict[str, Any], head_dim: int, length: int, where: str) -> "RotaryConfig":
        """From ``rope_parameters`` (Transformers 5), or ``rope_theta`` and ``rope_scaling`` with ``rope_type`` or ``type``."""
        scaling = {**(values.get("rope_parameters") or {}), **(values.get("rope_scaling") or {})}
        if any(isinstance(value, dict) for value in scaling.values()):
            raise ValueError(f"{where}: rope_parameters has a set for each kind of layer; expected one for all")
        kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
        scaling.pop("type", None)
        if not isinstance(kind, str) or kind not in KNOWN:
            raise ValueError(f"{where}: rope_type is {kind!r}; expected one of {', '.join(KNOWN)}")

        def given(name: str, other: float) -> float:
            inner, outer = number(scaling.pop(name, None), name, where), number(values.get(name), name, where)
            first, second = (outer, inner) if name.startswith("original") else (inner, outer)
            return first or second or other

        theta, part = given("rope_theta", 10000.0), given("partial_rotary_factor", 1.0)
        original = int(given("original_max_position_embeddings", length))
        for name in sorted(scaling.keys() - {*KNOWN[kind], *OPTIONAL}) if kind != "default" else ():
            if scaling[name] is not None:
                raise ValueError(f"{where}: unknown key {name!r} of rotary scaling {kind!r}; it may change the result")
        for name in KNOWN[kind]:
            value = scaling.get(name)
            if kind == "yarn" and name == "factor" and value is None:
                value = scaling["factor"] = length / original
            if not number(value, f"{name} of rotary scaling {kind!r}", where):
                raise ValueError(f"{where}: {name} of rotary scaling {kind!r} is {value!r}; expected a positive number")
        for name in OPTIONAL - {"truncate", "finetuned"}:
            number(scaling.get(name), name, where)
        if theta <= 1 or part != 1:
            raise ValueError(f"{where}: rope_theta is {theta}, partial_rotary_factor {part}; expected > 1, and 1")
        if kind == "llama3" and (low := scaling["low_freq_factor"]) >= scaling["high_freq_factor"]:
            raise ValueError(f"{where}: low_freq_factor is {low}; expected less than high_freq_factor")
        return cls(
            dim=head_dim, theta=theta, kind=kind, factor=float(scaling.get("factor") or 1.0),
            original=length if kind == "dynamic" else original, low=float(scaling.get("low_freq_factor") or 1.0),
            high=float(scaling.get("high_freq_factor") or 4.0), beta_fast=float(scaling.get("beta_fast") or 32),
            beta_slow=float(scaling.get("beta_slow") or 1), truncate=bool(scaling.get("truncate", True)),
            attention_factor=_attention_factor(scaling) if kind == "yarn" else 1.0,
        )  # fmt: skip

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


def number(value: Any, name: str, where: str) -> float | None:
    """The value, or None if it is None. Raises ValueError for what is no positive, finite number, or zero."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300):
        raise ValueError(f"{where}: {name} is {value!r:.80}; expected a positive number")
    return None if value is None else float(value)


def _attention_factor(scaling: dict[str, Any]) -> float:
    """YaRN's, as given or by its formula."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = float(scaling["factor"])

    def scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    m, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return scale(float(m)) / scale(float(all_dims)) if m and all_dims else scale(1.0)
