"""The ``weft`` command. Each package adds its own commands (its ``commands.py``).

With ``--json`` a command prints one object on standard output; everything else goes to standard error.
"""

import re
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from weft import __version__
from weft.bench import commands as bench
from weft.cluster import commands as cluster
from weft.comm import commands as comm
from weft.console import note, out
from weft.deploy import commands as deploy
from weft.export import commands as export
from weft.hardware import commands as hardware
from weft.inference import commands as inference
from weft.learn import commands as learn
from weft.profiling import commands as profiling
from weft.report import commands as report
from weft.train import commands as train

NARROW = 120  # columns; with fewer, Rich's table of options cuts their names
HYPHEN = "\N{NON-BREAKING HYPHEN}"


class Verbs(TyperGroup):
    """A command's name may be two words, the first of which may be a command too: ``simulate``, ``simulate compare``."""

    def get_command(self, ctx: Any, name: str) -> Any:
        """On a narrow terminal its help is plain text, where its options are not in groups."""
        command: Any = super().get_command(ctx, name)
        grouped = command is not None and any(getattr(p, "rich_help_panel", None) for p in command.params)
        if command is not None and not grouped and out.width < NARROW and command.rich_markup_mode is not None:
            _make_plain(command)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        both = " ".join(args[:2])
        second = {name: c for name, c in self.commands.items() if name.startswith(f"{args[0]} ")}
        if second and args[0] not in self.commands and (len(args) == 1 or args[1] in ctx.help_option_names):
            for name, command in second.items():
                out.print(f"weft {name}: {command.get_short_help_str(200)}", soft_wrap=True)
            ctx.exit(0 if len(args) > 1 else 2)
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)


def _make_plain(command: Any) -> None:
    """Its help without Rich's tables; no line ends within ``topology-required`` or another name with hyphens."""
    command.rich_markup_mode, usual = None, command.format_help

    def format_help(ctx: Any, formatter: Any) -> None:
        write, write_list = formatter.write, formatter.write_dl
        formatter.write = lambda text: write(text.replace(HYPHEN, "-"))
        formatter.write_dl = lambda rows, *more, **named: write_list(
            [(name, text.replace("-", HYPHEN)) for name, text in rows], *more, **named
        )
        usual(ctx, formatter)

    command.format_help = format_help


app = typer.Typer(
    cls=Verbs,
    help="GPU performance workbench: a claim is a measurement against a limit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
INTERRUPTED = "weft: interrupted"

hardware.register(app)
bench.register(app)
profiling.register(app)
export.register(app)
train.register(app)
inference.register(app)
comm.register(app)
cluster.register(app)
deploy.register(app)
report.register(app)
learn.register(app)


@app.command(rich_help_panel="Documents")
def version() -> None:
    """Print weft's version."""
    out.print(__version__)


def main() -> int:
    """Runs the command. A user's mistake prints one line on standard error and exits with status 2; a disk or file error,
    or too little memory, prints one line and exits with status 1."""
    from weft.definition import UnknownName

    for stream in (sys.stdout, sys.stderr):  # a terminal that has no × shows a ?, and loses no result
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        status = app(standalone_mode=False) or 0  # typer returns the status of an Exit
        if status == 130:
            note.print(INTERRUPTED)
        return status
    except (UnknownName, ImportError, ValueError, FileNotFoundError) as error:
        note.print(f"weft: {_line(error)}", style="bold red", soft_wrap=True)
        return 2
    except OSError as error:
        note.print(f"weft: {_line(error)}", style="bold red", soft_wrap=True)
        return 1
    except MemoryError as error:
        return _no_memory(str(error))
    except (KeyboardInterrupt, typer.Abort):
        note.print(INTERRUPTED)
        return 130
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # the command line's own usage errors
            error.show()
            return int(error.exit_code)
        # PyTorch raises a plain RuntimeError for this on a CPU
        if isinstance(error, RuntimeError) and (asked := re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))):
            return _no_memory(f"{asked[1]} asked for at once")
        raise
    return 0


def _line(error: Exception) -> str:
    """What went wrong; of the system's own errors without their number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"'{error.filename}': {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


def _no_memory(why: str) -> int:
    note.print(f"weft: not enough memory{why and f': {why}'}", style="bold red", soft_wrap=True)
    return 1
