"""Where the command line prints: results on standard output, all else on standard error."""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

out = Console(highlight=False, soft_wrap=False, markup=False, emoji=False)  # what users name is no markup
note = Console(stderr=True, highlight=False, markup=False, emoji=False)

Json = Annotated[bool, typer.Option("--json", help="print one JSON object, alone on standard output")]


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def print_line(text: str) -> None:
    """A result, on standard output: whole, however narrow the terminal."""
    out.print(text, soft_wrap=True)


def told(text: str) -> None:
    """Beside a result, on standard error."""
    note.print(text, style="dim", soft_wrap=True)
