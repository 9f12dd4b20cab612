"""``weft doctor`` and ``weft ceilings``."""

import json
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from weft.console import Json, out, print_json, told


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    for function in (doctor, ceilings):
        app.command(rich_help_panel="Hardware")(function)


def doctor(
    level: Annotated[
        str, typer.Option(help="quick, or full: also run a kernel, a matrix product and a copy")
    ] = "quick",
    as_json: Json = False,
) -> None:
    """What is installed, what sees the GPU, what does not fit together, and the fix for each."""
    from weft.hardware import doctor as checks

    raise typer.Exit(checks.main([*(["--json"] if as_json else []), "--level", level]))


def ceilings(
    as_json: Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="smaller arrays, fewer configurations, as the report does")
    ] = False,
) -> None:
    """Measure what this machine gives: bandwidth by mix of reads and writes, matrix rate by dtype."""
    from weft.hardware import ceilings, query

    device = query.choose_device()
    measured = ceilings.as_records(ceilings.measure(device, quick=quick, say=told), query.context(device))
    if as_json:
        print_json({"records": [json.loads(m.to_json()) for m in measured]})
        return
    table = Table(title="Measured ceilings", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("ceiling")
    table.add_column("rate", justify="right")
    for m in measured:
        scale, unit = (1e12, "T" + m.unit) if m.details["value"] > 1e12 else (1e9, "G" + m.unit)
        table.add_row(m.implementation, f"{m.details['value'] / scale:.2f} {unit}")
    out.print(table)
