"""The page's section on serving: runs of ``weft bench-llm --save``, the newest of each model, way to run it and load."""

from collections.abc import Iterable, Mapping
from typing import Any

from weft.drawing.embedding import embed
from weft.drawing.palette import LIGHT as INK
from weft.drawing.quantities import figures, ratio, si
from weft.inference.bench.figures import lengths_text, rate_text, rows

FILE = "serving"  # of a machine's records
WAY = ("machine", "model", "url", "dtype", "quantize", "cache_dtype", "draft")
TIMES = (("ttft", "first token", "ours"), ("itl", "between tokens", "second"))


def section(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the template shows of the lines of ``serving.jsonl``; those without figures are skipped."""
    newest = {
        (*(str(line.get(k)) for k in WAY), lengths_text(line["runs"][0]["load"])): line
        for line in lines
        if any("seconds" in run.get("figures", {}) for run in line.get("runs", []))
    }
    return [_shown(line) for line in newest.values()]


def _shown(line: Mapping[str, Any]) -> dict[str, Any]:
    runs = [run for run in line["runs"] if "seconds" in run["figures"]]
    parts = [line.get(k) and f"{name} {line[k]}" for k, name in (("quantize", "weights"), ("draft", "draft"))]
    how = [line["dtype"], *parts] if "dtype" in line else [line["url"]]
    versions = line.get("versions", {})
    busy = line.get("load_average")
    footnote = [f"load average before the run {figures(busy)}"] if busy else []
    footnote += (f"torch {versions.get('torch', '?')}", f"commit {line.get('commit', '')}", line.get("run", "")[:10])
    return {
        "title": f"{line['model']} on {line.get('machine', '?')}, " + ", ".join(filter(None, how)),
        "load": f"{runs[0]['load']['requests']} requests of {lengths_text(runs[0]['load'])} at each rate",
        "slo": line.get("slo"),
        "table": rows(runs),
        "chart": embed(_times(runs)),
        "bound": _bound(line.get("bound")),
        "peers": [_against(peer, runs) for peer in line.get("peers", [])],
        "footnote": " · ".join(footnote),
    }


def _bound(bound: Mapping[str, Any] | None) -> str:
    if not bound:
        return ""
    read = f"{si(bound['weights'], 'B')} of weights and {si(bound['token'], 'B')} of cache for each token before it"
    rate = f" at {si(bound['matrix'], 'FLOP/s')}" if bound["matrix"] else ", not bounded in this dtype"
    flops = si(bound["layers"] + bound["head"], "FLOP")
    return f"a step reads {read}, at {si(bound['bandwidth'], 'B/s')}; {flops} a token{rate}"


def _against(peer: Mapping[str, Any], runs: list[dict[str, Any]]) -> str:
    if "error" in peer:
        return f"{peer['peer']} failed: {peer['error']}"
    ours = next((r["figures"]["output_tokens_per_s"] for r in runs if r["load"]["rate"] is None), None)
    text = (
        f"{peer['peer']} ({peer['how']}), all prompts at once: {figures(peer['output_tokens_per_s'])} output tokens/s"
    )
    return text + (f"; weft {ratio(ours / peer['output_tokens_per_s'])}" if ours else "")


def _times(runs: list[dict[str, Any]]) -> Any:
    """Milliseconds to the first token and between tokens, p50 to p99, a row a rate."""
    from bokeh.models import ColumnDataSource, FixedTicker

    from weft.drawing.chart import Chart, empty, hover
    from weft.report.growth import decades

    found = [
        (row + shift, name, ink, [1e3 * run["figures"][f"{key}_{p}_s"] for p in ("p50", "p99")], rate_text(run["load"]["rate"]))
        for row, run in enumerate(runs)
        for shift, (key, name, ink) in zip((-0.15, 0.15), TIMES, strict=True)
        if f"{key}_p50_s" in run["figures"]
    ]  # fmt: skip
    values = [v for *_, pair, _ in found for v in pair]
    low, high = min(values) / 1.6, max(values) * 1.6
    plot = empty(
        80 + 60 * len(runs), (low, high), (len(runs) - 0.4, -0.6), x_axis_type="log", x_axis_label="milliseconds (log)"
    )
    ticks = decades(low, high)
    plot.xaxis.ticker, plot.xaxis.major_label_overrides = FixedTicker(ticks=list(ticks)), ticks
    plot.yaxis.ticker = FixedTicker(ticks=list(range(len(runs))))
    plot.yaxis.major_label_overrides = {i: rate_text(run["load"]["rate"]) for i, run in enumerate(runs)}
    plot.ygrid.visible = False
    for _, name, ink in TIMES:
        mine = [f for f in found if f[1] == name]
        y, x = [f[0] for f in mine], [f[3] for f in mine]
        plot.segment(x0=[v[0] for v in x], x1=[v[1] for v in x], y0=y, y1=y, line_color=INK[ink], line_width=2)
        for i, marker in enumerate(("diamond", "triangle")):
            dots = plot.scatter(
                "x", "y", source=ColumnDataSource({"x": [], "y": []}), marker=marker, color=INK[ink], size=11
            )
            tips = [{"arrivals a second": f[4], f"{name}, {('p50', 'p99')[i]}": f"{figures(f[3][i])} ms"} for f in mine]
            hover(plot, dots, tips, {"x": [v[i] for v in x], "y": y})
    told = "; ".join(f"{rate}: {name} {figures(x[0])} ms, p99 {figures(x[1])} ms" for _, name, _, x, rate in found)
    return Chart(
        "Waiting for tokens, by arrivals a second",
        plot,
        f"Marks: {told}.",
        "From the mark of half the requests to that of 99 in 100. More arrivals mean a larger batch: each step takes "
        "longer, and a prompt waits for the steps before it.",
        [("◆ p50 ▲ p99", "first token"), ("◆ p50 ▲ p99", "between tokens")],
        {"first token": "ours", "between tokens": "second"},
    )
