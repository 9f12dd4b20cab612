"""What a run's timelines say, as figures and as shares of what the model's bytes and FLOPs allow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.drawing.quantities import figures, known, percent
from weft.inference.bench.load import Timeline
from weft.inference.config import ModelConfig

if TYPE_CHECKING:
    from weft.hardware.ceilings import Ceilings

FILE = "serving"  # of a machine's records


@dataclass(frozen=True)
class Slo:
    """A service level of each request: seconds to its first token, and between its tokens (mean)."""

    ttft: float = math.inf
    itl: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Of ``ttft=0.5,itl=0.05``, in seconds.

        Raises:
            ValueError: anything else.
        """
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                values[name.strip()] = float(value)
            except ValueError:
                values[name.strip()] = math.nan
        if set(values) - {"ttft", "itl"} or not all(v > 0 for v in values.values()):
            raise ValueError(f"--slo is {text!r:.80}; expected seconds of ttft, itl or both, as in ttft=0.5,itl=0.05")
        return cls(**values)

    def met(self, line: Timeline) -> bool:
        gaps = line.gaps
        return line.error is None and line.first <= self.ttft and (not gaps or sum(gaps) / len(gaps) <= self.itl)


@dataclass(frozen=True)
class Bound:
    """What a model must move, and what this machine moves.

    Args:
        weights: bytes that a step reads, whatever the batch.
        token: bytes of a token's keys and values.
        layers, head: FLOPs of a token in the products of the layers' weights, and of the vocabulary's.
        bandwidth, matrix: bytes and FLOPs a second; ``matrix`` is infinite where it was not measured in this dtype.
    """

    weights: int
    token: int
    layers: float
    head: float
    bandwidth: float
    matrix: float

    @classmethod
    def of(cls, model: Any, cache_token: int, ceilings: "Ceilings") -> "Bound":
        """Of a decoder. The bandwidth is the better of reading and copying."""
        kind = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[str(model.dtype).removeprefix("torch.")]
        layers, head = model_flops(model.config)
        rates = [ceilings.bandwidth[mix] for mix in ((1, 0), (1, 1))]
        return cls(model.bytes, cache_token, layers, head, max(rates), ceilings.matrix.get(kind, math.inf))

    def step(self, batch: float, context: float) -> float:
        """Seconds of a decode step of so many sequences of so many tokens."""
        flops = batch * (self.layers + self.head)
        return max((self.weights + batch * context * self.token) / self.bandwidth, flops / self.matrix)

    def prompt(self, tokens: float) -> float:
        """Seconds of a prompt alone (attention's products are not counted)."""
        return max(self.weights / self.bandwidth, (tokens * self.layers + self.head) / self.matrix)

    def whole(self, lines: Sequence[Timeline]) -> float:
        """Seconds below which no schedule of these requests can come, were they all there at once."""
        made = sum(line.tokens for line in lines)
        flops = (sum(line.input_tokens for line in lines) + made) * self.layers + made * self.head
        cache = sum(line.tokens * (line.input_tokens + line.tokens / 2) for line in lines) * self.token
        steps = max(line.tokens for line in lines)
        return max(flops / self.matrix, (steps * self.weights + cache) / self.bandwidth)


def model_flops(config: ModelConfig) -> tuple[float, float]:
    """FLOPs of a token in the layers' weights and in the head's."""
    h, d = config.hidden_size, config.head_dim
    attention = h * d * (2 * config.heads + 2 * config.kv_heads)
    total, e = 0.0, config.experts
    for i in range(config.layers):
        width = config.intermediate_size
        if e is not None and i in e.layers:
            width = e.per_token * e.intermediate_size + e.shared_size
        total += attention + 3 * h * width
    return 2 * total, 2.0 * h * config.vocab_size


def percentile(values: Sequence[float], share: float) -> float:
    """By rank: the smallest value that at least this share does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(
    lines: Sequence[Timeline], slo: Slo | None = None, bound: Bound | None = None, *, at_once: bool = True
) -> dict[str, Any]:
    """Figures of a run in seconds and tokens a second; with a bound also ``…_share``, the bound divided by the measured time.

    Goodput is of requests that met the service level; those that failed did not. Where requests did not arrive at once their
    rate limits the throughput, which then has no share.
    """
    good = [line for line in lines if line.error is None]
    found: dict[str, Any] = {"requests": len(lines), "failed": len(lines) - len(good)}
    if errors := sorted({line.error for line in lines if line.error}):
        found["errors"] = errors[:5]
    if not good:
        return found
    seconds = max(line.came[-1][0] for line in good) - min(line.sent for line in good)
    read, made = sum(line.input_tokens for line in good), sum(line.tokens for line in good)
    gaps = [gap for line in good for gap in line.gaps]
    firsts, wholes = [line.first for line in good], [line.whole for line in good]
    found |= {
        "seconds": seconds, "requests_per_s": len(good) / seconds, "output_tokens_per_s": made / seconds,
        "total_tokens_per_s": (read + made) / seconds, "input_tokens": read, "output_tokens": made,
    }  # fmt: skip
    for name, values in (("ttft", firsts), ("itl", gaps), ("e2e", wholes)):
        if values:
            found |= {f"{name}_p50_s": percentile(values, 0.5), f"{name}_p99_s": percentile(values, 0.99)}
    found["mean_batch"] = sum(wholes) / seconds  # requests in work, on average
    if slo is not None:
        met = sum(slo.met(line) for line in good)
        found |= {"goodput_requests_per_s": met / seconds, "met_slo": met / len(lines)}
    if bound is not None:
        if at_once:
            found["throughput_share"] = bound.whole(good) / seconds
        found["ttft_share"] = bound.prompt(read / len(good)) / found["ttft_p50_s"]
        if gaps:
            batch = max(1.0, sum(sum(line.gaps) for line in good) / seconds)  # that decode at once, on average
            context = sum(line.input_tokens + line.tokens / 2 for line in good) / len(good)
            found["itl_share"] = bound.step(batch, context) / found["itl_p50_s"]
    return found


ROWS = (  # label, figure, factor
    ("requests/s", "requests_per_s", 1),
    ("output tokens/s", "output_tokens_per_s", 1),
    ("  share of the bound", "throughput_share", None),
    ("requests in work, mean", "mean_batch", 1),
    ("first token, ms, p50", "ttft_p50_s", 1e3),
    ("  p99", "ttft_p99_s", 1e3),
    ("  share of the bound", "ttft_share", None),
    ("between tokens, ms, p50", "itl_p50_s", 1e3),
    ("  p99", "itl_p99_s", 1e3),
    ("  share of the bound", "itl_share", None),
    ("whole request, s, p50", "e2e_p50_s", 1),
    ("  p99", "e2e_p99_s", 1),
    ("within the SLO", "met_slo", None),
    ("  goodput, requests/s", "goodput_requests_per_s", 1),
    ("failed requests", "failed", 1),
)


def rows(runs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of a table with a column for each rate. ``runs``: of a record's ``runs``; figures that none has are left
    out."""
    head = ["arrivals a second", *(rate_text(run["load"]["rate"]) for run in runs)]
    body = []
    for label, name, factor in ROWS:
        values = [run["figures"].get(name) for run in runs]
        if any(known(v) for v in values) and not (name == "failed" and not any(values)):
            cells = [percent(v) if factor is None else figures(v and v * factor) for v in values]
            body.append([label, *cells])
    return head, body


def rate_text(rate: float | None) -> str:
    return "all at once" if rate is None else figures(rate)


def lengths_text(load: Mapping[str, Any]) -> str:
    """``128 + 32…64 tokens``: of prompts and outputs."""
    parts = ["…".join(map(str, dict.fromkeys(load[name]))) for name in ("input_tokens", "output_tokens")]
    return " + ".join(parts) + " tokens"
