"""What the figures mean: the share of the link, spikes, stragglers, and the difference from an earlier run."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.alpha_beta import LEAST_POINTS, AlphaBeta, fit
from weft.drawing.quantities import figures

# The share of the measured link that the largest size at least reaches on a sound machine. NCCL on two H200s over NVLink
# reaches 0.54 (all_gather) to 0.86 of a copy at 64 MiB, 0.61 to 0.93 at 256 MiB; a link that fell back to PCIe or the host
# stays under 0.15. Gloo and MPI copy through sockets or shared memory more than once, so a memory copy is several times
# their best.
NORMAL = {"nccl": 0.5, "mpi": 0.15, "gloo": 0.03}
LARGE = {
    "nccl": 64 << 20,
    "mpi": 8 << 20,
    "gloo": 8 << 20,
}  # bytes from which a bandwidth is judged: below, latency counts
CHANGE = 0.1  # of the time, beside the spread of both runs, from which a point is said to have changed

ADVICE = {
    "nccl": "weft topology shows whether peers reach each other by NVLink; NCCL_DEBUG=INFO which transport NCCL took",
    "gloo": "Gloo talks through sockets: is another program on the cores, is GLOO_SOCKET_IFNAME the fast interface?",
    "mpi": "is another program on the cores, does MPI have shared memory (/dev/shm)?",
}


def model(records: Sequence[dict[str, Any]]) -> AlphaBeta | None:
    """The fit of the medians of one collective's records; None for fewer than three sizes."""
    points = {r["bytes"]: r["p50_us"] for r in records if r["bytes"]}
    return fit(list(points), list(points.values())) if len(points) >= LEAST_POINTS else None


def size_text(count: float) -> str:
    """``4 KiB``, ``1.5 MiB``, ``100 B``."""
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.3g} B"


def model_line(found: AlphaBeta) -> str:
    """One line about a fit."""
    first, last = found.stretches[0], found.stretches[-1]
    error = f" ± {figures(first.alpha_error, 2)}" if first.alpha_error is not None else ""
    words = f"alpha-beta: latency {figures(first.alpha_us)}{error} us, then "
    if last.beta_us <= 0 or (last.beta_error or 0) > last.beta_us:
        words += "no bandwidth that can be told from the noise (--max larger)"
    else:
        words += f"{figures(found.gb_s)} GB/s algbw"
        if last.beta_error is not None:
            words += f" ± {figures(found.gb_s * last.beta_error / last.beta_us, 2)}"
        half = found.bandwidth_from
        words += f", half of it from {size_text(half)} on" if half else ""
    if found.unseen_median is not None:
        words += f"; unseen sizes within {found.unseen_median:.0%} (median), {found.unseen_max:.0%} (worst)"
    return words + f"; {len(found.stretches)} stretch(es)"


def judge(records: Sequence[dict[str, Any]], peak: dict[str, Any]) -> str:
    """The best bus bandwidth against the link; empty for a collective without bytes."""
    timed = [r for r in records if r["bytes"]]
    if not timed or not peak.get("gb_s"):
        return ""
    best = max(timed, key=lambda r: r["busbw"])
    share = best["busbw"] / peak["gb_s"]
    text = f"busbw {figures(best['busbw'])} GB/s is {share:.0%} of the {figures(peak['gb_s'])} GB/s of a {peak['what']}"
    if peak.get("theoretical_gb_s"):
        text += f" ({best['busbw'] / peak['theoretical_gb_s']:.0%} of the links' {peak['theoretical_gb_s']:.3g})"
    normal = NORMAL[best["backend"]]
    if best["bytes"] < LARGE[best["backend"]]:
        return f"{text}; too small to judge a link (--max 64M)"
    if share >= normal:
        return f"{text}: normal (at least {normal:.0%})"
    return f"{text}: LOW (expected at least {normal:.0%}); {ADVICE[best['backend']]}"


def oddities(r: dict[str, Any]) -> list[str]:
    """Spikes and stragglers of a record."""
    found = []
    if r["spikes"]:
        worst = max(r["spikes"], key=lambda s: s["time_us"])
        found.append(
            f"{r['spike_count']} of {r['iterations']} iterations took more than 3 times the median; the worst, "
            f"{worst['iteration']}, {worst['time_us']:,.0f} us, slowest on rank {worst['slowest_rank']}"
        )
    if r["straggler"] is not None:
        found.append(f"rank {r['straggler']} enters {r['late_us'][r['straggler']]:,.0f} us after the median rank")
    return found


KEY = ("collective", "bytes", "dtype", "op", "root", "in_place", "mode", "registered", "backend", "ranks", "subgroups")


def read(path: str | Path) -> list[dict[str, Any]]:
    """The records of an earlier run: a file that ``--json`` printed.

    Raises:
        FileNotFoundError, ValueError: no such file, or one without records.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))["records"]
        if not all(isinstance(r, dict) and "time_us" in r for r in found):
            raise TypeError
    except FileNotFoundError:
        raise FileNotFoundError(f"no file '{path}' of an earlier run") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} holds no records; expected what weft comm --json printed") from None
    return found


def changes(records: Iterable[dict[str, Any]], earlier: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each point that both runs have: ``ratio`` of the medians (above 1: slower now), and ``changed`` where it is beyond
    10 % and the middle 60 % of both runs' iterations do not overlap."""
    before = {tuple(r.get(k) for k in KEY): r for r in earlier}
    found = []
    for r in records:
        old = before.get(tuple(r.get(k) for k in KEY))
        if old is None:
            continue
        ratio = r["p50_us"] / old["p50_us"]
        apart = r["p20_us"] > old["p80_us"] or r["p80_us"] < old["p20_us"]
        changed = apart and abs(ratio - 1) > CHANGE
        found.append(
            {k: r[k] for k in ("collective", "bytes")}
            | {"before_us": old["p50_us"], "now_us": r["p50_us"], "ratio": ratio, "changed": changed}
        )
    return found
