"""How ``config.json`` describes a model's rotary embedding: ``rope_parameters`` (Transformers 5), or ``rope_theta`` and
``rope_scaling`` with ``rope_type`` or ``type``."""

import math
from typing import Any

from weft.inference.rotary import RotaryConfig

KNOWN = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
OPTIONAL = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned"}


def read_rotary(values: dict[str, Any], head_dim: int, length: int, where: str) -> RotaryConfig:
    """The rotary embedding that a configuration describes.

    Args:
        values: of ``config.json``.
        head_dim: columns of a head.
        length: ``max_position_embeddings``, tokens.
        where: the file, for errors.

    Raises:
        ValueError: a scaling or a key that is not known, a value out of range; the message names it.
    """
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
    return RotaryConfig(
        dim=head_dim, theta=theta, kind=kind, factor=float(scaling.get("factor") or 1.0),
        original=length if kind == "dynamic" else original, low=float(scaling.get("low_freq_factor") or 1.0),
        high=float(scaling.get("high_freq_factor") or 4.0), beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1), truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(scaling) if kind == "yarn" else 1.0,
    )  # fmt: skip


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
