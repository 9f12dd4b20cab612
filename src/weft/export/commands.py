"""``weft export``."""

import importlib
import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.console import Json, out, print_json, print_line

EXPECTED = (
    "expected the folder of weft train, FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, which returns (module, inputs, inputs "
    "of other sizes)"
)


def register(app: typer.Typer) -> None:
    """Adds the command to the ``weft`` command."""
    app.command("export", rich_help_panel="Models")(export)


def export(
    model: Annotated[
        str,
        typer.Argument(
            help="folder of weft train, or FILE.py:FUNCTION, which returns (module, inputs, inputs of other sizes)"
        ),
    ],
    path: Annotated[str, typer.Option("--out", help="the file")] = "model.onnx",
    latency: Annotated[
        bool, typer.Option("--latency", help="also time PyTorch and ONNX Runtime on this machine")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a model as ONNX with dynamic dimensions, checked with ONNX Runtime at both sizes."""
    from weft.export.model import to_onnx

    module, inputs, others = _made(model)
    found = to_onnx(module, inputs, others, path)
    times = _latency(module, inputs, path) if latency else {}
    if as_json:
        print_json({**asdict(found), "latency_us": times})
        return
    print_line(f"{found.path}: {found.mib:.2f} MiB, opset {found.opset}")
    for name, shape in found.inputs.items():
        print_line(f"  {name}: [{', '.join(map(str, shape))}]")
    for check in found.checks:
        print_line(f"  equal to PyTorch at {' '.join(map(str, check.shapes))}: error {check.error:.1e}")
    if times:
        out.print(_table(times))


def _latency(module: Any, inputs: Any, path: str) -> dict[str, float | str]:
    from weft.export.runtimes import latency
    from weft.hardware import query

    return latency(module, inputs, path, device=query.choose_device())


def _table(times: dict[str, float | str]) -> Any:
    from rich import box
    from rich.table import Table

    from weft.drawing.quantities import figures

    table = Table(title="Latency", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("runtime")
    table.add_column("ms", justify="right")
    for name, us in times.items():
        table.add_row(name, us if isinstance(us, str) else figures(us / 1e3))
    return table


def _made(model: str) -> tuple[Any, Any, Any]:
    if Path(model).is_dir():
        from weft.export import trained

        module, first, second = trained.load(model)
        return module, (first,), (second,)
    where, _, name = model.rpartition(":")
    if not where or not name:
        raise ValueError(f"'{model}' names no function; {EXPECTED}")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise ValueError(f"no file '{where}'; {EXPECTED}")
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None and spec.loader is not None  # a .py file has a loader
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
    else:
        try:
            loaded = importlib.import_module(where)
        except ModuleNotFoundError as missing:
            if missing.name != where.partition(".")[0] and missing.name != where:
                raise  # a module that the model's own imports
            raise ValueError(f"no module '{where}'; {EXPECTED}") from None
    function = getattr(loaded, name, None)
    if not callable(function):
        raise ValueError(f"'{where}' has no function '{name}'; {EXPECTED}")
    made = function()
    if not isinstance(made, tuple) or len(made) != 3 or not hasattr(made[0], "forward"):
        raise ValueError(f"{name}() returned {type(made).__name__}; {EXPECTED}")
    module, inputs, others = made
    return module, *(each if isinstance(each, (tuple, list)) else (each,) for each in (inputs, others))
