"""The ``weft`` command: each verb reads its arguments, calls one function of a room, and prints what comes back.

With ``--json`` one object stands alone on standard output; everything else goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft import __version__, generate_command, simulate_command, simulate_help
from weft.console import Json, note, out
from weft.console import print_json as _print_json


class Verbs(TyperGroup):
    """A verb may be two words, of which the first is a verb too: ``simulate``, ``simulate compare``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)


app = typer.Typer(
    cls=Verbs,
    help="GPU performance workbench: a claim is a measurement against a limit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
HARDWARE, OPERATORS, CLUSTER, DOCUMENTS = "Hardware", "Operators", "Cluster", "Documents"

INTERRUPTED = "weft: interrupted; what was saved stays"

Names = Annotated[
    list[str] | None, typer.Argument(metavar="[OPERATOR]...", help="operators or families; all when none is named")
]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="fp32, fp16 or bf16; may be repeated")]
Implementations = Annotated[list[str] | None, typer.Option("--implementation", help="by name; may be repeated")]
Directions = Annotated[list[str] | None, typer.Option("--direction", help="forward or backward; may be repeated")]


def _not_empty(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """An empty variable of a shell is no wish for every workload."""
    said = context.get_parameter_source(parameter.name or "")
    if said is not None and said.name == "COMMANDLINE" and not value.strip():
        raise typer.BadParameter("is empty; expected a point of the axes, such as M=64,N=500")
    return value


WorkloadText = Annotated[
    str, typer.Option("--workload", callback=_not_empty, help="a point of the axes: M=64,N=500,dim=0")
]


def _seed(value: int) -> int:
    """The range is not declared: in the help it would take half of a terminal's width."""
    if not 0 <= value <= 2**62:
        raise typer.BadParameter(f"{value} is not in the range 0 … 2**62")
    return value


def main() -> int:
    """Runs the command. A mistake of the user's is one line on standard error and exit status 2; a disk or a file that
    fails, or memory that does not suffice, is one line and exit status 1."""
    from weft.definition import UnknownName

    for stream in (sys.stdout, sys.stderr):  # a terminal that has no × shows a ?, and loses no result
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        status = app(standalone_mode=False) or 0  # typer returns the status of an Exit
        if status == 130:
            note.print(INTERRUPTED, markup=False)
        return status
    except (UnknownName, ImportError, ValueError, FileNotFoundError) as error:
        note.print(f"weft: {error}", style="bold red", markup=False, soft_wrap=True)
        return 2
    except OSError as error:
        note.print(f"weft: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except MemoryError as error:
        return _no_memory(str(error))
    except (KeyboardInterrupt, typer.Abort):
        note.print(INTERRUPTED, markup=False)
        return 130
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # the command line's own usage errors
            error.show()
            return int(error.exit_code)
        # PyTorch has no class of its own for this on a CPU
        if isinstance(error, RuntimeError) and (asked := re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))):
            return _no_memory(f"{asked[1]} asked for at once")
        raise
    return 0


def _no_memory(why: str) -> int:
    note.print(f"weft: not enough memory{why and f': {why}'}", style="bold red", markup=False, soft_wrap=True)
    return 1


def _device() -> str:
    """``cuda`` when PyTorch sees one; else ``cpu``, with Triton's interpreter switched on before kernels are imported."""
    from weft.hardware.query import has_gpu

    if has_gpu() and not os.environ.get("TRITON_INTERPRET"):
        return "cuda"
    os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"


# ---- hardware --------------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=HARDWARE)
def doctor(
    level: Annotated[
        str, typer.Option(help="quick, or full: also run a kernel, a matrix product and a copy")
    ] = "quick",
    as_json: Json = False,
) -> None:
    """What is installed, what sees the GPU, what does not fit together, and the fix for each."""
    from weft.hardware import doctor as room

    raise typer.Exit(room.main([*(["--json"] if as_json else []), "--level", level]))


@app.command(rich_help_panel=HARDWARE)
def ceilings(
    as_json: Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="smaller arrays, fewer configurations, as the report does")
    ] = False,
) -> None:
    """Measure what this machine gives: bandwidth by mix of reads and writes, matrix rate by dtype."""
    from weft.bench import run, terminal

    bench = run.start(_device(), quick=quick, say=_say)
    measured = bench.ceiling_records()
    if as_json:
        _print_json({"records": [json.loads(m.to_json()) for m in measured]})
    else:
        out.print(terminal.ceilings_table(measured))


# ---- operators -------------------------------------------------------------------------------------------------------


@app.command("list", rich_help_panel=OPERATORS)
def list_operators(names: Names = None, as_json: Json = False) -> None:
    """Operators, their implementations, directions and workloads."""
    from weft.bench import run, terminal

    _device()
    described = run.describe(names or [])
    if as_json:
        _print_json({"operators": described})
    else:
        out.print(terminal.operators_table(described))


@app.command(rich_help_panel=OPERATORS)
def verify(
    names: Names = None,
    implementation: Annotated[str, typer.Option(help="one implementation, by name")] = "",
    direction: Annotated[str, typer.Option(help="forward or backward")] = "",
    dtype: Dtypes = None,
    workload: WorkloadText = "",
    seed: Annotated[int, typer.Option(callback=_seed, help="of the random inputs")] = 0,
    full: Annotated[
        bool, typer.Option("--full", help="also the larger workloads (and the huge ones on a GPU)")
    ] = False,
    mutants: Annotated[bool, typer.Option(help="check that the verifier rejects the operators' mutants")] = True,
    budget: Annotated[
        float, typer.Option(min=0.0, help="seconds after which no further check starts (not with --full)")
    ] = 240.0,
    as_json: Json = False,
) -> None:
    """Check every kernel of ours against a float64 reference. Exit status 1 on any failure."""
    from weft import registry
    from weft.bench import terminal
    from weft.bench import verify as room

    device = _device()
    operators = registry.select(names or [])
    narrowed = bool(workload or implementation)
    with terminal.progress(note, "verify") as step:
        found = room.verify(
            operators,
            device,
            seed=seed,
            budget_s=None if full else budget,
            mutants=mutants and not narrowed,
            on_result=lambda r: step(f"{r.operator} {r.implementation} {r.workload} {r.dtype}"),
            implementation=implementation,
            direction=direction,
            dtypes=dtype or [],
            workload=workload,
            full=full,
        )
    if as_json:
        _print_json(found)
    else:
        terminal.print_verification(out, found)
    if not found["checked"] + found["unverifiable"]:
        raise ValueError(
            "nothing was verified: no kernel of ours takes what was asked for, or --budget was over before"
        )
    raise typer.Exit(
        1 if found["failed"] or found["mutants_survived"] or (found["not_reached"] and not found["checked"]) else 0
    )


@app.command("compile-check", rich_help_panel=OPERATORS)
def compile_check(
    names: Names = None,
    arch: Annotated[list[str] | None, typer.Option(help="sm_80, 86, 89, 90, 100 or 120; may be repeated")] = None,
    implementation: Annotated[str, typer.Option(help="one implementation, by name")] = "",
    dtype: Dtypes = None,
    processes: Annotated[int, typer.Option(min=1, help="that compile side by side")] = 2,
    as_json: Json = False,
) -> None:
    """Compile every kernel for each architecture it declares, without a GPU. Exit status 1 when one does not fit."""
    from weft import registry
    from weft.bench import compile_check as room
    from weft.bench import terminal

    os.environ.pop("TRITON_INTERPRET", None)  # a process that compiles must not have it
    try:
        wanted = [int(a.removeprefix("sm_")) for a in arch or []]
    except ValueError:
        raise typer.BadParameter(f"{arch}: expected sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120") from None
    operators = registry.select(names or [])
    with terminal.progress(note, "compile") as step:
        found = room.timed(
            operators,
            archs=wanted,
            implementation=implementation,
            dtypes=dtype or [],
            processes=processes,
            on_result=lambda compiled: step(compiled[-1].kernel[:40] if compiled else ""),
        )
    if as_json:
        _print_json(found)
    else:
        terminal.print_compiled(out, found)
    raise typer.Exit(1 if found["failed"] else 0)


@app.command(rich_help_panel=OPERATORS)
def bench(
    names: Names = None,
    workload: WorkloadText = "",
    dtype: Dtypes = None,
    direction: Directions = None,
    implementation: Implementations = None,
    which: Annotated[str, typer.Option("--set", help="bench, quick, model …: a set of workloads")] = "bench",
    cache: Annotated[str, typer.Option(help="cold (L2 flushed) or warm")] = "cold",
    ladder: Annotated[bool, typer.Option("--ladder", help="time the teaching versions too")] = False,
    host: Annotated[
        bool, typer.Option("--host", help="instead: what a call on a small input costs on the host")
    ] = False,
    budget: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="seconds of repetitions for each comparison")
    ] = 0.5,
    save: Annotated[bool, typer.Option("--save", help="to results/<gpu>/ (or WEFT_RESULTS)")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="leave out what results/ holds of this commit")] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="processes that compile and check; one at a time measures, alone")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Measure ceilings, then time every implementation side by side against them."""
    from weft.bench import run, terminal
    from weft.records import Saver

    if cache not in ("cold", "warm"):
        raise typer.BadParameter(f"--cache is '{cache}'; expected cold or warm")
    saver = Saver() if save else None
    if host:
        measured = run.run_host(names or [], _device(), saver=saver)
    else:
        measured = run.run_bench(
            names or [],
            _device(),
            note,
            which=which,
            workload=workload,
            dtypes=dtype or [],
            directions=direction or [],
            implementations=implementation or [],
            ladder=ladder,
            cold=cache == "cold",
            budget_s=budget,
            saver=saver,
            resume=resume,
            jobs=jobs,
        )
    if as_json:
        _print_json({"records": [json.loads(m.to_json()) for m in measured]})
    elif host:
        out.print(terminal.host_table(measured))
    else:
        terminal.print_measurements(out, measured)
    if saver:
        saver.finish()
    if saver and saver.failure:
        raise OSError(f"not everything was saved: {saver.failure}")


@app.command(rich_help_panel=OPERATORS)
def tune(
    names: Names = None,
    dtype: Dtypes = None,
    implementation: Annotated[str, typer.Option(help="one implementation, by name")] = "",
    direction: Directions = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="the first word of keys, hopper say; may be repeated")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="that compile ahead")] = max(1, (os.cpu_count() or 2) - 2),
) -> None:
    """Measure kernel configurations on this card and write configs/sm_XX.json."""
    from weft.bench import run

    run.run_tune(names or [], _device(), out, dtype or [], implementation, direction or [], kernel or [], processes)


# ---- cluster ---------------------------------------------------------------------------------------------------------


app.command("simulate", cls=simulate_help.NamesPlugins, rich_help_panel=CLUSTER)(simulate_command.simulate)
app.command("simulate compare", cls=simulate_help.NamesPlugins, rich_help_panel=CLUSTER)(simulate_command.compare)
app.command("simulate generate", cls=simulate_help.NamesPlugins, rich_help_panel=CLUSTER)(generate_command.generate)


# ---- documents -------------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=DOCUMENTS)
def report(
    output: Annotated[Path, typer.Option(help="folder of the page")] = Path("report"),
) -> None:
    """Verify, measure quickly, train a first model, and render one self-contained page."""
    from weft.bench import run

    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"--output is '{output}', which is a file; expected a folder")
    path = run.run_report(_device(), note, output)
    out.print(f"Open {path}", markup=False, soft_wrap=True)


@app.command(rich_help_panel=DOCUMENTS)
def tables(
    check: Annotated[bool, typer.Option("--check", help="change nothing; exit 1 when a table is out of date")] = False,
) -> None:
    """Regenerate the measured tables (docs/measured and Markdown markers) from the committed records."""
    from weft.report import documents

    raise typer.Exit(documents.refresh_all(Path.cwd(), check, _print_line))


@app.command(rich_help_panel=DOCUMENTS)
def stubs(
    check: Annotated[bool, typer.Option("--check", help="change nothing; exit 1 when the stub is out of date")] = False,
) -> None:
    """Regenerate ops.pyi, the types of the public functions."""
    from weft.report import stubs as room

    raise typer.Exit(room.refresh_stub(check, _print_line))


@app.command(rich_help_panel=DOCUMENTS)
def version() -> None:
    """Print weft's version."""
    out.print(__version__)


def _print_line(text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)


def _say(text: str) -> None:
    note.print(text, style="dim", markup=False, soft_wrap=True)
