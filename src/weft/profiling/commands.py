"""``weft profile``."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.console import Json, note, out, print_json

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")


def register(app: typer.Typer) -> None:
    """Adds the command to the ``weft`` command."""
    app.command(rich_help_panel="Operators")(profile)


def profile(
    what: Annotated[
        list[str], typer.Argument(metavar="TRACE... | -- COMMAND...", help="traces, or a Python program to run")
    ],
    compare: Annotated[
        bool, typer.Option("--compare", help="two traces: what got faster, slower, is new, is gone")
    ] = False,
    html: Annotated[str, typer.Option(help="write the page here; of a command profile.html beside the trace")] = "",
    trace: Annotated[str, typer.Option("--out", help="of a command: the trace, for Perfetto too")] = "profile.json.gz",
    wait: Annotated[int, typer.Option(min=0, help="steps that pass first")] = 2,
    warm_up: Annotated[int, typer.Option(min=0, help="steps recorded and dropped")] = 1,
    active: Annotated[int, typer.Option(min=1, max=100, help="steps recorded")] = 3,
    step: Annotated[str, typer.Option(help="what ends a step: optimizer, or forward (inference)")] = "optimizer",
    stacks: Annotated[bool, typer.Option("--stacks", help="Python stacks and modules; slows the host")] = False,
    most_mib: Annotated[int, typer.Option(min=1, help="size of the trace, unpacked")] = 64,
    as_json: Json = False,
) -> None:
    """Where the time of a program goes, how far kernels are from the limit, and what to do first."""
    from weft.profiling import terminal

    if step not in ("optimizer", "forward"):
        raise typer.BadParameter(f"--step is '{step}'; expected optimizer or forward")
    if all(_is_trace(w) for w in what):
        paths = [Path(w) for w in what]
    else:
        if compare:
            raise typer.BadParameter("--compare takes two traces")
        options = ["--wait", wait, "--warm-up", warm_up, "--active", active, "--step", step, "--most-mib", most_mib]
        paths = [_record(what, Path(trace), [*map(str, options), *(["--stacks"] if stacks else [])])]
        html = html or str(paths[0].with_name(paths[0].name.partition(".")[0] + ".html"))
    if compare:
        _compare(paths, html, as_json)
        return
    if all(p.suffix == ".csv" for p in paths):
        _ncu(paths, as_json)
        return
    profiles = [_analysed(path) for path in paths]
    if html:
        from weft.profiling import page

        Path(html).write_text(page.page(profiles), encoding="utf-8")
    if as_json:
        print_json({"profiles": [p.to_dict() for p in profiles]})
        return
    terminal.print_profiles(out, profiles)
    if html:
        note.print(f"page: {html}", style="dim", soft_wrap=True)


def _is_trace(word: str) -> bool:
    return word.endswith((".json", ".json.gz", ".gz", ".sqlite", ".csv", ".nsys-rep", ".ncu-rep", ".qdrep"))


def _analysed(path: Path) -> Any:
    from weft.profiling import analysis, files

    return analysis.analyse(files.read(path))


def _compare(paths: list[Path], html: str, as_json: bool) -> None:
    from weft.profiling import comparison, terminal

    if len(paths) != 2:
        raise typer.BadParameter(f"--compare takes two traces, before and after; {len(paths)} came in")
    found = comparison.compare(*map(_analysed, paths))
    if html:
        from weft.profiling import page

        Path(html).write_text(page.comparison(found), encoding="utf-8")
    if as_json:
        print_json(found.to_dict())
    else:
        terminal.print_comparison(out, found)


def _ncu(paths: list[Path], as_json: bool) -> None:
    from weft.profiling import ncu, terminal

    kernels = [kernel for path in paths for kernel in ncu.read(path)]
    if as_json:
        print_json({"kernels": [vars(k) for k in kernels]})
    else:
        terminal.print_ncu(out, kernels)


def _record(command: list[str], out_path: Path, options: list[str]) -> Path:
    """Runs the command under :mod:`weft.profiling.run`; the trace that it wrote.

    Raises:
        ValueError: it is no Python program, or a launcher of several.
        typer.Exit: it failed, with its status.
    """
    from weft.profiling.run import NOTHING

    python, program = _program(command)
    if not str(out_path).endswith((".json", ".json.gz")):
        raise ValueError(f"--out is '{out_path}'; expected a path that ends in .json or .json.gz")
    out_path.unlink(missing_ok=True)
    line = [*python, "-m", "weft.profiling.run", "--out", str(out_path), *options, "--", *program]
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH", "")
    env = {**os.environ, "PYTHONPATH": path if "site-packages" in root else os.pathsep.join(filter(None, (path, root)))}
    status = subprocess.run(line, env=env, stdout=sys.stderr, check=False).returncode
    if status not in (0, NOTHING):
        note.print(f"weft: the command ended with status {status}", style="bold red", soft_wrap=True)
    if not out_path.is_file():
        if status == 0:  # os._exit, or ranks of its own
            note.print(f"weft: the command ended and left no trace in {out_path}", style="bold red", soft_wrap=True)
        raise typer.Exit(status if 0 < status != NOTHING else 1)
    return out_path


def _program(command: list[str]) -> tuple[list[str], list[str]]:
    """(interpreter and its options, program and its arguments)."""
    first = Path(command[0]).name
    if first in LAUNCHERS or command[1:3] == ["-m", "torch.distributed.run"]:
        raise ValueError(
            f"{first} starts the ranks itself; run {first} … -m weft.profiling.run --out profile.json.gz train.py …, "
            "then weft profile profile.rank*.json.gz"
        )
    if re.fullmatch(r"python[\d.]*", first):
        at = 1
        while at < len(command) and command[at].startswith("-") and command[at] not in ("-m", "-c"):
            at += 2 if command[at] in ("-X", "-W") else 1
        if at < len(command) and command[at] != "-c":
            return command[:at], command[at:]
    elif first.endswith(".py"):
        return [sys.executable], command
    elif (found := shutil.which(command[0])) is not None:
        with open(found, "rb") as file:
            if re.match(rb"#!.*python", file.readline(200)):
                return [sys.executable], [found, *command[1:]]
    raise ValueError(
        f"'{' '.join(command)}' is no Python program; expected -- python train.py …, or traces (.json, .sqlite, .csv)"
    )
