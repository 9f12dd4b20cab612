"""Each technique of a training run by itself: what it does to time, memory and loss, as a table, JSON and a plot."""

import dataclasses
import gc
import html
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.definition import UnknownName
from weft.train import memory, ranks
from weft.train.loop import train
from weft.train.settings import Settings

OFF: dict[str, Any] = {  # the run that techniques are compared with, where the settings say nothing else
    "amp": "none", "tf32": False, "cudnn_benchmark": False, "channels_last": False, "accumulate": 1,
    "checkpoint_activations": False, "compile": False, "cuda_graph": False, "operators": "torch", "optimizer": "adamw",
    "prefetch": False, "fp8": False,
}  # fmt: skip
TECHNIQUES: dict[str, dict[str, Any]] = {
    "amp bf16": {"amp": "bf16"},
    "amp fp16": {"amp": "fp16"},
    "fp8, amp bf16": {"fp8": True, "amp": "bf16"},
    "TF32": {"tf32": True},
    "cudnn.benchmark": {"cudnn_benchmark": True},
    "channels last": {"channels_last": True},
    "accumulate 2": {"accumulate": 2},
    "act. checkpointing": {"checkpoint_activations": True},
    "torch.compile": {"compile": True},
    "CUDA graph": {"cuda_graph": True},
    "weft operators": {"operators": "weft"},
    "weft AdamW": {"optimizer": "weft-adamw"},
    "weft AdamW, 8-bit": {"optimizer": "weft-adamw-8bit"},
    "prefetch, pinned": {"prefetch": True},
}
TOGETHER = (
    "amp bf16",
    "TF32",
    "cudnn.benchmark",
    "channels last",
    "CUDA graph",
    "weft operators",
    "weft AdamW",
    "prefetch, pinned",
)
SIZES = ("data", "batch", "length", "layers", "width", "heads", "kv_heads")  # that a page of the ladder names
GPU_ONLY = ("fp8, amp bf16", "TF32", "cudnn.benchmark", "CUDA graph")


@dataclass
class Rung:
    """One run: ``speedup`` is the baseline's time divided by this one's. ``why_not`` says why there are no figures."""

    technique: str
    step_ms: float | None = None
    speedup: float | None = None
    memory_bytes: int | None = None  # peak: measured on a GPU, predicted on a CPU
    loss: float | None = None  # mean of the last tenth of the steps
    why_not: str = ""


def ladder(settings: Settings, steps: int, say: Callable[[str], None] = lambda text: None) -> list[Rung]:
    """The baseline, each technique that the job has alone, and those that go together; the same data, weights and steps.
    The baseline has what the settings switch on: of ``amp="bf16"`` all rungs are in bf16.

    Raises:
        ValueError: fewer than 5 steps; more than one rank.
    """
    if steps < 5:
        raise ValueError(f"ablate is {steps} steps; expected at least 5, of which the first 3 are not timed")
    if settings.parallel != "none" or getattr(settings, "tensor_parallel", 1) > 1:
        raise ValueError("ablate runs on one device; expected parallel=none and tensor_parallel=1")
    default = {f.name: f.default for f in dataclasses.fields(settings)}
    off = {name: value for name, value in OFF.items() if name in default and getattr(settings, name) == default[name]}
    off |= {"resume": False} | ({"steps": steps + 1} if "steps" in default else {})  # the last step would validate
    plain = dataclasses.replace(settings, **off)
    on_gpu = ranks.choose_device(settings.device).type == "cuda"
    chosen = {
        name: change
        for name, change in TECHNIQUES.items()
        if change.keys() <= default.keys() and any(getattr(plain, key) != value for key, value in change.items())
    }
    if plain.compile or plain.cuda_graph:  # not both at once
        chosen = {name: change for name, change in chosen.items() if not {"compile", "cuda_graph"} & change.keys()}
    together = {
        k: v
        for name in TOGETHER
        if name in chosen and (on_gpu or name not in GPU_ONLY)
        for k, v in chosen[name].items()
    }
    rungs: list[Rung] = []
    for name, change in {"baseline": {}, **chosen, "together": together}.items():
        if name in GPU_ONLY and not on_gpu:
            rungs.append(Rung(name, why_not="needs a GPU"))
            continue
        say(name)
        rungs.append(_measured(name, dataclasses.replace(plain, **change), steps))
        first = rungs[0].step_ms
        if first and rungs[-1].step_ms:
            rungs[-1].speedup = first / rungs[-1].step_ms
    return rungs


class _Enough(Exception):
    pass


def _measured(name: str, settings: Settings, steps: int) -> Rung:
    gc.collect()  # models and graphs of the rung before
    on_gpu = ranks.choose_device(settings.device).type == "cuda"
    if on_gpu:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated() if on_gpu else 0  # of the caller
    torch._dynamo.reset()
    seen: list[tuple[float, float]] = []

    def stop(done: int, of: int, figures: dict[str, Any]) -> None:
        seen.append((figures["ms"], figures["loss"]))
        if done == steps:
            raise _Enough

    try:
        train(settings, on_step=stop, save=False)
    except _Enough:
        pass
    except (ValueError, UnknownName):
        raise
    except RuntimeError as error:  # of the technique: out of memory, no compiler
        return Rung(name, why_not=str(error).splitlines()[0][:60])
    peak = torch.cuda.max_memory_allocated() - left if on_gpu else memory.predict(settings).peak
    timed = sorted(ms for ms, _ in seen[3:])
    tail = [loss for _, loss in seen[-max(1, len(seen) // 10) :]]
    return Rung(name, timed[len(timed) // 2], None, peak, sum(tail) / len(tail))


def write(rungs: list[Rung], settings: Settings, out: str, hardware: str = "") -> list[Path]:
    """``ablation.json`` and ``ablation.html`` (a self-contained page: bars of time and memory, and a table)."""
    from bokeh.embed import file_html
    from bokeh.layouts import column
    from bokeh.models import Div
    from bokeh.resources import INLINE

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "hardware": hardware,
        "settings": dataclasses.asdict(settings),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    data = folder / "ablation.json"
    data.write_text(json.dumps(facts | {"rungs": [dataclasses.asdict(r) for r in rungs]}, indent=1), encoding="utf-8")
    found = [r for r in rungs if r.step_ms is not None and r.memory_bytes is not None]
    plots = [
        _bars(found, "milliseconds a step", lambda r: r.step_ms, "{:.1f}"),
        _bars(found, "MiB at the peak", lambda r: (r.memory_bytes or 0) / 2**20, "{:,.0f}"),
    ]
    style = {"font-family": "system-ui, sans-serif"}
    about = Div(text=_about(settings, hardware), styles=style)
    page = folder / "ablation.html"
    whole = column(about, *plots if found else (), Div(text=_table(rungs), styles=style), sizing_mode="stretch_width")
    page.write_text(file_html(whole, INLINE, "weft: techniques, one by one"), encoding="utf-8")
    return [data, page]


def _bars(found: list[Rung], axis: str, value: Callable[[Rung], Any], shown: str) -> Any:
    from weft.drawing.chart import Bar, bars, round_ticks

    top = max((value(r) for r in found), default=1.0) * 1.2
    group = [
        Bar(r.technique, value(r), shown.format(value(r)), r is not found[0], {"technique": r.technique}) for r in found
    ]
    return bars([(axis, group)], axis="", end=top, ticks={t: f"{t:g}" for t in round_ticks(top)})


def _about(settings: Settings, hardware: str) -> str:
    sizes = [f"{name} {getattr(settings, name)}" for name in SIZES if hasattr(settings, name)]
    default = {f.name: f.default for f in dataclasses.fields(settings)}
    on = {name: getattr(settings, name) for name in OFF if name in default}
    sizes += [f"{name} {value}" for name, value in on.items() if value not in (default[name], OFF[name])]
    return f"<h2>Techniques, one by one</h2><p>{', '.join(filter(None, (hardware, *sizes)))}</p>"


def _table(rungs: list[Rung]) -> str:
    rows = ["<tr><th>technique<th>ms/step<th>speed<th>MiB<th>loss"]
    for r in rungs:
        if r.step_ms is None or r.memory_bytes is None:
            rows.append(f"<tr><td>{html.escape(r.technique)}<td colspan=4>{html.escape(r.why_not)}")
        else:
            numbers = f"{r.step_ms:.2f}", f"{r.speedup or 1:.2f}x", f"{r.memory_bytes / 2**20:,.0f}", f"{r.loss:.4f}"
            rows.append(f"<tr><td>{html.escape(r.technique)}" + "".join(f"<td align=right>{n}" for n in numbers))
    return f"<table cellpadding=4>{''.join(rows)}</table>"
