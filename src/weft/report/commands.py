"""``weft report``, ``tables`` and ``stubs``."""

from pathlib import Path
from typing import Annotated

import typer

from weft.console import note, out, print_line


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    for function in (report, tables, stubs):
        app.command(rich_help_panel="Documents")(function)


def report(
    output: Annotated[Path, typer.Option(help="folder of the page")] = Path("report"),
) -> None:
    """Verify, measure quickly, train a first model, and render one self-contained page."""
    from weft.hardware import query
    from weft.report import run

    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"--output is '{output}', which is a file; expected a folder")
    path = run.run(query.choose_device(), note, output)
    out.print(f"Open {path}", soft_wrap=True)


def tables(
    check: Annotated[bool, typer.Option("--check", help="change nothing; exit 1 when a table is out of date")] = False,
) -> None:
    """Regenerate docs/measured and the tables between markers in Markdown files from the committed records."""
    from weft.report import documents

    raise typer.Exit(documents.refresh_all(Path.cwd(), check, print_line))


def stubs(
    check: Annotated[bool, typer.Option("--check", help="change nothing; exit 1 when the stub is out of date")] = False,
) -> None:
    """Regenerate ops.pyi, the types of the public functions."""
    from weft.report import stubs

    raise typer.Exit(stubs.refresh_stub(check, print_line))
