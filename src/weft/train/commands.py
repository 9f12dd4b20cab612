"""``weft train cnn``, ``weft train gpt`` and ``weft launch``."""

import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich import box
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from weft.console import Json, note, out, print_json, told
from weft.train.settings import CnnSettings, GptSettings, Settings, read

PANEL = "Training"


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    app.command("train cnn", rich_help_panel=PANEL)(_command(CnnSettings, "Train a CNN on labelled images."))
    app.command("train gpt", rich_help_panel=PANEL)(_command(GptSettings, "Train a Llama-style decoder on text."))


def _command(cls: type[Settings], help: str) -> Callable[..., None]:
    """A command with a flag for each setting; what is not given is the file's or the default."""

    def command(
        file: Annotated[str | None, typer.Option("--file", help="YAML file of settings; flags win over it")] = None,
        ablate: Annotated[
            int, typer.Option(help="run each technique alone for so many steps, and print the ladder")
        ] = 0,
        predict: Annotated[
            bool, typer.Option("--predict", help="say how much memory the run needs; train nothing")
        ] = False,
        limit_gib: Annotated[
            float, typer.Option(min=0, help="memory that --predict is to fit into; else the GPU's")
        ] = 0,
        as_json: Json = False,
        **flags: Any,
    ) -> None:
        settings = read(cls, file, flags)
        try:
            if ablate:
                _ablate(settings, ablate, as_json)
            elif predict:
                _predict(settings, limit_gib, as_json)
            else:
                _run(settings, as_json)
        except ModuleNotFoundError as missing:
            if missing.name not in ("torch", "numpy"):
                raise
            raise ModuleNotFoundError(
                "training needs PyTorch: pip install 'weft[gpu,train]'", name="torch"
            ) from missing

    own = list(inspect.signature(command).parameters.values())[:-1]
    flags = []
    for f in fields(cls):
        default = f" (default: {f.default})" if f.default not in ("", False) else ""  # [default …] is markup to Rich
        kind = type(f.default) | None
        flag = f"--{f.name.replace('_', '-')}"
        names = [f"{flag}/--no-{flag[2:]}"] if isinstance(f.default, bool) else [flag]
        option = Annotated[kind, typer.Option(*names, help=f.metadata["help"] + default, show_default=False)]  # type: ignore[valid-type]
        flags.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option))
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    command.__signature__ = inspect.Signature([*flags, *keywords])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*flags, *keywords)}
    command.__doc__ = help
    return command


def _run(settings: Settings, as_json: bool) -> None:
    from weft.train.loop import NotFinite, train

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=note,
        disable=os.environ.get("RANK", "0") != "0",
    )
    task = progress.add_task("training", total=None, figures="")

    def shown(done: int, steps: int, figures: dict[str, Any]) -> None:
        rate = next((f"{figures[k]:,.0f} {k}" for k in ("images/s", "tokens/s") if k in figures), "")
        mfu = f", MFU {figures['mfu']:.0%}" if "mfu" in figures else ""
        progress.update(task, completed=done, total=steps, figures=f"loss {figures['loss']:.3f}, {rate}{mfu}")

    result = None
    try:
        with progress:
            result = train(settings, on_step=shown)
    except NotFinite as error:
        note.print(f"weft: {error}", style="bold red", soft_wrap=True)
        raise typer.Exit(1) from None
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
    if result is None:  # out of memory; what the run held is free now
        raise MemoryError(_too_much(settings))
    if os.environ.get("RANK", "0") == "0":
        if as_json:
            print_json(result.to_dict())
        else:
            _print(result)
        if not result.loss:
            told(f"nothing was left to do: the checkpoint in {settings.out} is of step {result.steps}")
    if result.interrupted:
        told(f"interrupted after step {result.steps}; go on with --resume --out {settings.out}")
        raise typer.Exit(130)


def _too_much(settings: Settings) -> str:
    """What a step was predicted to need, and what would make it fit."""
    import gc

    import torch

    from weft.train import memory, ranks

    gc.collect()
    device = ranks.choose_device(settings.device)
    total = torch.cuda.get_device_properties(device).total_memory
    found = memory.predict(settings, total, device)
    if found.limit is None or found.peak <= found.limit:
        needed = f"{found.peak / 2**30:.1f} GiB of {total / 2**30:.1f}"
        return f"a step was predicted to need {needed}: is another process on this GPU?"
    switches = ", ".join(f"{name} ({size / 2**30:.1f} GiB)" for name, size in found.fits.items()) or "no single switch"
    return f"a step needs about {found.peak / 2**30:.1f} GiB of {total / 2**30:.1f}; what would fit: {switches}"


def _predict(settings: Settings, limit_gib: float, as_json: bool) -> None:
    import torch

    from weft.train import memory, ranks

    device = ranks.choose_device(settings.device)
    limit = round(limit_gib * 2**30) or None
    if limit is None and device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).total_memory
    found = memory.predict(settings, limit, device)
    if as_json:
        print_json(found.to_dict())
        return
    out.print("Predicted memory at the peak of a step")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("category")
    table.add_column("MiB", justify="right")
    for name, size in sorted(found.categories.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{size / 2**20:,.1f}")
    table.add_section()
    table.add_row("total", f"{found.peak / 2**20:,.1f}")
    out.print(table)
    if limit and found.peak <= limit:
        out.print(f"fits into {limit / 2**30:.2f} GiB")
    elif limit:
        out.print(
            f"does not fit into {limit / 2**30:.2f} GiB; with one switch it would:"
            if found.fits
            else f"does not fit into {limit / 2**30:.2f} GiB, nor with any one switch; a smaller batch or model may"
        )
        for name, size in found.fits.items():
            out.print(f"  {name:<28} {size / 2**20:,.1f} MiB")


def _ablate(settings: Settings, steps: int, as_json: bool) -> None:
    from dataclasses import asdict

    from weft.hardware import query
    from weft.train import ablation, ranks

    rungs = ablation.ladder(settings, steps, say=told)
    device = ranks.choose_device(settings.device).type
    files = ablation.write(rungs, settings, settings.out, query.name(device))
    if as_json:
        print_json({"rungs": [asdict(r) for r in rungs], "files": list(map(str, files))})
        return
    table = Table(
        title=f"Techniques, one by one, {steps} steps each", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name in ("technique", "ms/step", "speed", "MiB", "loss"):
        table.add_column(name, justify="left" if name == "technique" else "right")
    for r in rungs:
        if r.step_ms is None or r.memory_bytes is None:
            table.add_row(r.technique, r.why_not, "", "", "")
        else:
            speed = f"{r.speedup:.2f}x" if r.speedup else ""
            table.add_row(r.technique, f"{r.step_ms:.2f}", speed, f"{r.memory_bytes / 2**20:,.0f}", f"{r.loss:.4f}")
    out.print(table)
    if device == "cpu":
        told("memory is predicted, for PyTorch's operators: a CPU does not count it")
    told("written: " + ", ".join(map(str, files)))


def _print(result: Any) -> None:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    loss = f"{result.loss[0]:.4f} → {result.loss[-1]:.4f}" if result.loss else "–"
    rows = {
        "hardware": f"{result.hardware}, {result.ranks} rank(s)",
        "parameters": f"{result.parameters:,}",
        "steps": f"{result.steps:,}" + (f", {len(result.skipped)} left out as not finite" if result.skipped else ""),
        "training loss": loss,
        "validation loss": None if result.validation_loss is None else f"{result.validation_loss:.4f}",
        "accuracy": None if result.accuracy is None else f"{result.accuracy:.2%}",
        "step": None if result.step_ms is None else f"{result.step_ms:.2f} ms (median)",
        "rate": None if result.rate is None else f"{result.rate:,.0f} {result.unit}/s",
        "MFU": None if result.step_ms is None else _mfu(result),
        "peak memory": None if not result.peak_memory_bytes else f"{result.peak_memory_bytes / 2**30:.2f} GiB",
        "checkpoint": result.checkpoint or None,
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, value)
    out.print(table)


def _mfu(result: Any) -> str:
    achieved = f"{result.flops_per_step / result.step_ms * 1e3 / result.ranks / 1e12:.3g} TFLOP/s a rank"
    if result.mfu is None:
        return f"{achieved}; no ceiling of this machine is recorded (weft bench matmul --save)"
    return f"{result.mfu:.1%} of the measured matrix rate ({achieved})"
