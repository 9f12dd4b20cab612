"""``weft simulate generate``: a trace from stated numbers, from a saved profile, or like another trace."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.console import told
from weft.simulate_options import (
    ClusterFile,
    Columns,
    Format,
    FormatOptions,
    Limit,
    Nodes,
    Where,
    cluster_extra,
    cluster_of,
    jobs_of,
    options_of,
)
from weft.words import count

STATED = "Stated (with --nodes or --cluster, and --load)"
LIKE = "Like another trace"


def generate(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="the trace to write, .csv or .parquet")],
    jobs: Annotated[int, typer.Option(min=1, help="how many")],
    seed: Annotated[int, typer.Option(min=0, help="the same seed gives the same trace")] = 0,
    load: Annotated[
        float | None,
        typer.Option(help="GPUs asked for in the long run ÷ GPUs of the cluster: sets the rate of arrivals"),
    ] = None,
    nodes: Nodes = "",
    cluster: ClusterFile = None,
    sizes: Annotated[
        str, typer.Option(metavar="GPUS:SHARE,…", help="1:0.6,8:0.4", rich_help_panel=STATED, show_default=False)
    ] = "",
    median: Annotated[
        float | None, typer.Option(help="of the durations, seconds; 600 by default", rich_help_panel=STATED)
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="of the durations' logarithm; 2 by default", rich_help_panel=STATED)
    ] = None,
    tenants: Annotated[
        int | None, typer.Option(min=1, help="with shares as 1, 1/2, 1/3 …", rich_help_panel=STATED)
    ] = None,
    over_estimate: Annotated[
        float | None, typer.Option(help="estimates are 1 to so many times the duration", rich_help_panel=STATED)
    ] = None,
    hours: Annotated[
        str, typer.Option(metavar="24 NUMBERS", help="the rate by hour: 1,1,2,…", rich_help_panel=STATED)
    ] = "",
    weekdays: Annotated[
        str, typer.Option(metavar="7 NUMBERS", help="the rate by weekday: 5,5,5,5,5,1,1", rich_help_panel=STATED)
    ] = "",
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="instead: a profile that was saved")] = None,
    save_profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="keep what the jobs are drawn from there (JSON)")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="instead: fit a profile to this trace", rich_help_panel=LIKE)
    ] = None,
    format: Format = "",
    option: FormatOptions = None,
    columns: Columns = "",
    where: Where = "",
    limit: Limit = None,
    begins: Annotated[
        str,
        typer.Option(metavar="DATE", help="local time of the trace's second 0: 2017-10-09T07:00", rich_help_panel=LIKE),
    ] = "",
) -> None:
    """Write a generated trace, from stated numbers (--nodes 20x8 --load 0.7), a --profile, or --like another trace."""
    with cluster_extra():
        from weft.cluster import profile_file, trace_file, whole_file
        from weft.cluster.fit import fit

    shape = {
        "--sizes": sizes, "--median": median, "--sigma": sigma, "--tenants": tenants, "--over-estimate": over_estimate,
        "--hours": hours, "--weekdays": weekdays,
    }  # fmt: skip
    of_trace = {
        "--format": format, "--option": option, "--columns": columns, "--where": where, "--limit": limit,
        "--begins": begins,
    }  # fmt: skip
    if like and profile:
        raise ValueError("both --like and --profile are given; expected one")
    for source, others in ((like or profile, shape), (not like, of_trace)):
        if source and (given := [name for name, value in others.items() if value]):
            raise ValueError(
                f"{', '.join(given)} {'goes with --like' if others is of_trace else 'goes with neither --like nor --profile'}"
            )
    trace_file.check(output)
    for path in filter(None, (output, save_profile)):
        whole_file.check(path)
    made = cluster_of(nodes, 0.0, cluster) if nodes or cluster or not (like or profile) else None
    if like:
        trace = jobs_of(like, format, options_of(format, option or [], columns), where, limit)
        for warning in trace.warnings:
            told(warning)
        found = fit(trace, _date(begins))
    elif profile:
        found = profile_file.load(profile)
    else:
        found = _stated(shape)
    drawn = found.generate(jobs, seed=seed, load=load, cluster=made)
    trace_file.write(output, drawn, f"seed {seed}, {found.source}" + (f", load {load:g}" if load else ""))
    if save_profile:
        profile_file.save(save_profile, found)
    told(found.told(found.rate(load, made) if load else 0.0))
    if bare := int(((drawn.gpus == 0) & (drawn.cpu == 0)).sum()):
        ask = "asks" if bare == 1 else "ask"
        told(
            f"{count(bare, 'job')} {ask} neither GPU nor cores; formats csv and parquet leave them out when the file is read"
        )
    at = f" at load {load:g}" if load else ""
    told(
        f"{count(len(drawn), 'generated job')} of {(drawn.submit[-1] - drawn.submit[0]) / 86400:.1f} days{at} in {output}"
    )


def _stated(shape: dict[str, Any]) -> Any:
    from weft.cluster.arrivals import HOURS, WEEKDAYS, Arrivals
    from weft.cluster.generate import SIZES
    from weft.cluster.profile import stated
    from weft.cluster.quantity import LogNormal

    def given(name: str, usual: float) -> float:
        return usual if shape[name] is None else float(shape[name])

    return stated(
        sizes=_shares(shape["--sizes"]) if shape["--sizes"] else SIZES,
        durations=LogNormal(given("--median", 600.0), given("--sigma", 2.0)),
        tenants=shape["--tenants"] or 1,
        over_estimate=given("--over-estimate", 1.0),
        arrivals=Arrivals(
            hours=_numbers("--hours", shape["--hours"], HOURS),
            weekdays=_numbers("--weekdays", shape["--weekdays"], WEEKDAYS),
        ),
    )


def _shares(text: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for pair in text.split(","):
        gpus, _, share = (part.strip() for part in pair.partition(":"))
        try:
            size, value = int(gpus), float(share)
        except ValueError:
            raise ValueError(f"--sizes is '{text}'; expected GPUS:SHARE,…, such as 1:0.6,8:0.4") from None
        if size in found:
            raise ValueError(f"--sizes names {count(size, 'GPU')} twice; expected it once")
        found[size] = value
    return found


def _numbers(name: str, text: str, count: int) -> tuple[float, ...]:
    if not text:
        return (1.0,) * count
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} is '{text}'; expected {count} numbers with commas between them") from None
    if len(found) != count:
        raise ValueError(f"{name} are {len(found)} numbers; expected {count}")
    return found


def _date(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        raise ValueError(f"--begins is '{text}'; expected a date, such as 2017-10-09T07:00") from None
