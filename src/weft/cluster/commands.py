"""``weft simulate`` and its commands ``compare``, ``check`` and ``generate``."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from weft.cluster.command_options import (
    CheckpointEvery,
    ClusterFile,
    Columns,
    Format,
    FormatOptions,
    GpuMemory,
    Limit,
    ListsPlugins,
    Nodes,
    Pictures,
    Quotas,
    RestartCost,
    Since,
    Trace,
    Until,
    WarmUp,
    Weights,
    Where,
    check_picture,
    cluster_extra,
    cluster_of,
    format_options,
    jobs_of,
    tenants_of,
    warm_up_of,
)
from weft.console import Json, note, out, print_json, told
from weft.words import count

PANEL = "Cluster"
STATED = "Stated (with --nodes or --cluster, and --load)"
LIKE = "Like another trace"


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    commands: dict[str, Callable[..., None]] = {
        "": simulate,
        " compare": compare,
        " check": check,
        " generate": generate,
    }
    for name, function in commands.items():
        app.command(f"simulate{name}", cls=ListsPlugins, rich_help_panel=PANEL)(function)


def simulate(
    path: Trace,
    format: Format = "",
    nodes: Nodes = "",
    gpu_memory: GpuMemory = 0.0,
    cluster: ClusterFile = None,
    order: Annotated[
        str,
        typer.Option(
            help="ORDERS, or a file; with -skip, -easy or -conservative jobs behind the head may start", metavar="NAME"
        ),
    ] = "fifo",
    placement: Annotated[str, typer.Option(help="PLACEMENTS, or a file ./mine.py", metavar="NAME")] = "best",
    ties: Annotated[str, typer.Option(help="lowest, highest or random; by default the placement's own")] = "",
    seed: Annotated[int, typer.Option(min=0, help="of random ties")] = 0,
    restart_cost: RestartCost = 0.0,
    checkpoint_every: CheckpointEvery = 0.0,
    weights: Weights = "",
    quota: Quotas = "",
    warm_up: WarmUp = "",
    where: Where = "",
    limit: Limit = None,
    since: Since = "",
    until: Until = "",
    option: FormatOptions = None,
    columns: Columns = "",
    plain: Annotated[
        bool,
        typer.Option("--plain", help="in plain Python: for policies that Numba cannot compile, and thousands of jobs"),
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="save every job and event (Parquet) and the summary there")
    ] = None,
    pictures: Pictures = None,
    as_json: Json = False,
) -> None:
    """Run the jobs of a trace through a cluster: how long they take and wait, how full it is, and why.

    `weft simulate compare PATH` runs several policies side by side.

    Exit status 1 when no job could run or a disk failed, 2 for a wrong argument, 130 after Ctrl-C.
    """
    with cluster_extra():
        from weft.cluster import metrics, policy, terminal
        from weft.cluster import save as saving
        from weft.cluster import simulate as run
        from weft.cluster.placement import check_ties

    policy.find_order(order)
    check_ties(ties or policy.find_placement(placement).ties)
    made = cluster_of(nodes, gpu_memory, cluster)
    tenants, warm_up_s = tenants_of(weights, quota), warm_up_of(warm_up)
    options = format_options(format, option or [], columns)
    if pictures:
        check_picture(pictures)
    if save:
        saving.check(save)
    # What a policy of a user prints goes to standard error.
    with _progress(f"reading {path.name}", as_json) as step, contextlib.redirect_stdout(sys.stderr):
        jobs = jobs_of(path, format, options, where, limit, since, until)
        result = run(
            jobs, made, order, placement, ties=ties, seed=seed, restart_s=restart_cost, checkpoint_s=checkpoint_every,
            warm_up_s=warm_up_s, plain=plain, **tenants, on_progress=lambda *at: step("simulating", *at),
        )  # fmt: skip
    found = metrics.summary(result)
    if as_json:
        print_json(found)
    else:
        terminal.show(out, found)
    if save:
        saving.write(save, result, found)
        told(f"saved in {save}")
    if pictures:
        from weft.cluster import pictures as drawing

        told(f"drawn: {drawing.write(pictures, [result], path.name)}")
    raise typer.Exit(130 if not result.complete else 0 if found["completed"] else 1)


def compare(
    path: Trace,
    format: Format = "",
    nodes: Nodes = "",
    gpu_memory: GpuMemory = 0.0,
    cluster: ClusterFile = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORDER:PLACEMENT[:TIES]",
            help="may be repeated; by default every order that neither preempts nor needs tenants (priority only where "
            "priorities differ), with best, first, worst and consolidate. Orders: ORDERS, those that do not preempt also "
            "with -skip, -easy, -conservative (those among "
            "tenants with -skip only); placements: PLACEMENTS",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="how many, for each policy with something random")] = 10,
    ties: Annotated[str, typer.Option(metavar="RULE,…", help="rules to try as well: lowest,highest,random")] = "",
    shuffle_same_second: Annotated[
        bool,
        typer.Option("--shuffle-same-second", help="try random orders of jobs that are submitted at the same time"),
    ] = False,
    restart_cost: RestartCost = 0.0,
    checkpoint_every: CheckpointEvery = 0.0,
    weights: Weights = "",
    quota: Quotas = "",
    warm_up: WarmUp = "",
    metric: Annotated[str, typer.Option(metavar="NAME", help="to rank by: METRICS")] = "jct.mean",
    processes: Annotated[int | None, typer.Option(min=1, help="that run side by side; by default all cores")] = None,
    where: Where = "",
    limit: Limit = None,
    since: Since = "",
    until: Until = "",
    option: FormatOptions = None,
    columns: Columns = "",
    pictures: Pictures = None,
    as_json: Json = False,
) -> None:
    """Run several policies on one trace and rank them, with what seeds, ties and same-second jobs change.

    Exit status 1 when a run failed, no job could run or a disk failed, 2 for a wrong argument, 130 after Ctrl-C.
    """
    with cluster_extra():
        from weft.cluster import compare as run
        from weft.cluster import terminal
        from weft.cluster.comparison import INTERRUPTED, METRICS, Policy, has_priorities, same_second
    from weft.definition import UnknownName

    policies = [Policy.parse(text) for text in policy or []]
    if metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    made = cluster_of(nodes, gpu_memory, cluster)
    tenants, warm_up_s = tenants_of(weights, quota), warm_up_of(warm_up)
    options = format_options(format, option or [], columns)
    if pictures:
        check_picture(pictures)
    with _progress(f"reading {path.name}", as_json) as step:
        jobs = jobs_of(path, format, options, where, limit, since, until)
        step("starting processes", 0, None)
        compared = run(
            jobs,
            made,
            policies,
            seeds=seeds,
            ties=[rule.strip() for rule in ties.split(",") if rule.strip()],
            shuffle_same_second=shuffle_same_second,
            restart_s=restart_cost,
            checkpoint_s=checkpoint_every,
            warm_up_s=warm_up_s,
            **tenants,
            metric=metric,
            processes=processes,
            keep=pictures is not None,
            on_progress=lambda *at: step("simulating", *at),
        )
    if not policies and not has_priorities(jobs):
        told("all jobs have the same priority: the order priority, which is fifo then, is left out")
    if shuffle_same_second and not same_second(jobs):
        told("no two jobs are submitted at the same time: there is nothing to shuffle")
    if as_json:
        print_json(terminal.as_json(compared, metric))
    else:
        terminal.show_compared(out, compared, metric)
    results = [r.result for each in compared for r in each.runs if r.result is not None]
    if pictures and results:
        from weft.cluster import pictures as drawing

        told(f"drawn: {drawing.write(pictures, results, path.name)}")
    failed = [why for each in compared for why in each.failed]
    none_ran = not any(run.found["completed"] for each in compared for run in each.runs)
    raise typer.Exit(130 if INTERRUPTED in failed else 1 if failed or none_ran else 0)


def check(
    path: Trace,
    format: Format = "",
    nodes: Nodes = "",
    gpu_memory: GpuMemory = 0.0,
    cluster: ClusterFile = None,
    where: Where = "",
    limit: Limit = None,
    since: Since = "",
    until: Until = "",
    option: FormatOptions = None,
    columns: Columns = "",
    as_json: Json = False,
) -> None:
    """Say what is read of a trace, what is dropped and why, and what a simulation assumes where the trace says nothing.

    With a cluster also the jobs that it can never run. Exit status 2 for a wrong argument or file.
    """
    with cluster_extra():
        from weft.cluster import terminal
        from weft.cluster.check import check as run

    options = format_options(format, option or [], columns)
    made = cluster_of(nodes, gpu_memory, cluster) if nodes or cluster or gpu_memory else None
    with _progress(f"reading {path.name}", as_json):
        found = run(jobs_of(path, format, options, where, limit, since, until), made)
    if as_json:
        print_json(found)
    else:
        terminal.show_check(out, found)


@contextlib.contextmanager
def _progress(begin: str, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A progress bar on a terminal; nothing with ``--json`` or where standard error is no terminal. Yields a function of the
    activity, how much is done, and of how much (None while unknown)."""
    columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=note, transient=True, disable=quiet or not note.is_terminal) as bar:
        task = bar.add_task(begin, total=None)

        def step(activity: str, done: int, total: int | None) -> None:
            if bar.tasks[0].description != activity:
                bar.reset(task, description=activity, total=total)
            bar.update(task, completed=done, total=total)

        yield step


# ---- generate --------------------------------------------------------------------------------------------------------


def generate(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="the trace to write, .csv or .parquet")],
    jobs: Annotated[int, typer.Option(min=1, help="how many")],
    seed: Annotated[int, typer.Option(min=0, help="the same seed gives the same trace")] = 0,
    load: Annotated[
        float | None,
        typer.Option(help="GPUs requested in the long run ÷ GPUs of the cluster: sets the rate of arrivals"),
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
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="instead: a saved profile")] = None,
    save_profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="save what the jobs are drawn from there (JSON)")
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
        from weft.cluster.files import atomic, trace_writer
        from weft.cluster.synthetic import profile_file
        from weft.cluster.synthetic.fit import fit

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
    trace_writer.check(output)
    for path in filter(None, (output, save_profile)):
        atomic.check(path)
    made = cluster_of(nodes, 0.0, cluster) if nodes or cluster or not (like or profile) else None
    if like:
        trace = jobs_of(like, format, format_options(format, option or [], columns), where, limit)
        for warning in trace.warnings:
            told(warning)
        found = fit(trace, _date(begins))
    elif profile:
        found = profile_file.load(profile)
    else:
        found = _stated_profile(shape)
    drawn = found.generate(jobs, seed=seed, load=load, cluster=made)
    trace_writer.write(output, drawn, f"seed {seed}, {found.source}" + (f", load {load:g}" if load else ""))
    if save_profile:
        profile_file.save(save_profile, found)
    told(found.describe(found.rate(load, made) if load else 0.0))
    if empty := int(((drawn.gpus == 0) & (drawn.cpu == 0)).sum()):
        requests = "requests" if empty == 1 else "request"
        told(
            f"{count(empty, 'job')} {requests} neither GPUs nor cores; formats csv and parquet leave them out when the file is "
            "read"
        )
    at = f" at load {load:g}" if load else ""
    told(
        f"{count(len(drawn), 'generated job')} of {(drawn.submit[-1] - drawn.submit[0]) / 86400:.1f} days{at} in {output}"
    )


def _stated_profile(shape: dict[str, Any]) -> Any:
    from weft.cluster.synthetic.arrivals import HOURS, WEEKDAYS, Arrivals
    from weft.cluster.synthetic.distributions import LogNormal
    from weft.cluster.synthetic.generate import SIZES
    from weft.cluster.synthetic.profile import stated

    def given(name: str, default: float) -> float:
        return default if shape[name] is None else float(shape[name])

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
