"""``weft list``, ``verify``, ``compile-check``, ``bench`` and ``tune``."""

import json
import os
from typing import Annotated

import typer

from weft.console import Json, note, out, print_json

PANEL = "Operators"

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


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    app.command("list", rich_help_panel=PANEL)(list_operators)
    app.command(rich_help_panel=PANEL)(verify)
    app.command("compile-check", rich_help_panel=PANEL)(compile_check)
    app.command(rich_help_panel=PANEL)(bench)
    app.command(rich_help_panel=PANEL)(tune)


def list_operators(names: Names = None, as_json: Json = False) -> None:
    """Operators, their implementations, directions and workloads."""
    from weft.bench import run, terminal
    from weft.hardware import query

    query.choose_device()
    described = run.describe(names or [])
    if as_json:
        print_json({"operators": described})
    else:
        out.print(terminal.operators_table(described))


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
    from weft.bench import verify as checks
    from weft.hardware import query

    device = query.choose_device()
    operators = registry.select(names or [])
    narrowed = bool(workload or implementation)
    with terminal.progress(note, "verify") as step:
        found = checks.verify(
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
        print_json(found)
    else:
        terminal.print_verification(out, found)
    if not found["checked"] + found["unverifiable"]:
        raise ValueError(
            "nothing was verified: no kernel of ours takes what was asked for, or --budget was over before"
        )
    raise typer.Exit(
        1 if found["failed"] or found["mutants_survived"] or (found["not_reached"] and not found["checked"]) else 0
    )


def compile_check(
    names: Names = None,
    arch: Annotated[list[str] | None, typer.Option(help="sm_80, 86, 89, 90, 100 or 120; may be repeated")] = None,
    implementation: Annotated[str, typer.Option(help="one implementation, by name")] = "",
    dtype: Dtypes = None,
    share: Annotated[int, typer.Option(min=1, help="compile one in so many points")] = 1,
    seed: Annotated[str, typer.Option(help="which of them: any text, such as a commit")] = "",
    processes: Annotated[int, typer.Option(min=1, help="that compile side by side")] = 2,
    as_json: Json = False,
) -> None:
    """Compile every kernel for each architecture it declares, without a GPU. Exit status 1 when one does not fit."""
    from weft import registry
    from weft.bench import compile_check as checks
    from weft.bench import terminal

    os.environ.pop("TRITON_INTERPRET", None)  # a process that compiles must not have it
    try:
        wanted = [int(a.removeprefix("sm_")) for a in arch or []]
    except ValueError:
        raise typer.BadParameter(f"{arch}: expected sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120") from None
    operators = registry.select(names or [])
    with terminal.progress(note, "compile") as step:
        found = checks.timed(
            operators,
            archs=wanted,
            implementation=implementation,
            dtypes=dtype or [],
            share=share,
            seed=seed,
            processes=processes,
            on_result=lambda compiled: step(compiled[-1].kernel[:40] if compiled else ""),
        )
    if as_json:
        print_json(found)
    else:
        terminal.print_compiled(out, found)
    raise typer.Exit(1 if found["failed"] else 0)


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
    random: Annotated[
        int, typer.Option("--random", min=0, help="instead: public functions at so many random points")
    ] = 0,
    seed: Annotated[str, typer.Option(help="of --random; else the first 8 hexadecimal digits of the commit")] = "",
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
    from weft.hardware import query
    from weft.records import Saver

    if cache not in ("cold", "warm"):
        raise typer.BadParameter(f"--cache is '{cache}'; expected cold or warm")
    saver = Saver() if save else None
    if host:
        measured = run.run_host(names or [], query.choose_device(), saver=saver)
    elif random:
        measured = run.run_random(
            names or [], query.choose_device(), note, count=random, seed=seed, dtypes=dtype or [],
            directions=direction or [], budget_s=budget, saver=saver, jobs=jobs,
        )  # fmt: skip
    else:
        measured = run.run_bench(
            names or [],
            query.choose_device(),
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
        print_json({"records": [json.loads(m.to_json()) for m in measured]})
    elif host:
        out.print(terminal.host_table(measured))
    elif random:
        terminal.print_random(out, measured)
    else:
        terminal.print_measurements(out, measured)
    if saver:
        saver.finish()
    if saver and saver.failure:
        raise OSError(f"not everything was saved: {saver.failure}")


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
    from weft.hardware import query

    run.run_tune(
        names or [], query.choose_device(), out, dtype or [], implementation, direction or [], kernel or [], processes
    )
