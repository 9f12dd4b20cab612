"""``weft simulate`` and ``weft simulate compare``: their arguments, and what is checked before anything is simulated."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from typer.core import TyperCommand

from weft.console import Json, note, out, print_json


class NamesPlugins(TyperCommand):
    """A command whose help names the formats, orders and placements that are there when it is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            text = getattr(parameter, "help", None) or ""
            for word, names in PLUGINS.items():
                if word in text:
                    try:
                        text = text.replace(word, names())
                    except ImportError:
                        text = text.replace(word, "those that `pip install 'weft[cluster]'` brings")
            if text:
                parameter.help = text  # type: ignore[attr-defined]  # options and arguments have one, their base has not
        super().format_help(ctx, formatter)


def _formats() -> str:
    from weft.cluster import trace

    return ", ".join(trace.formats())


def _format_options() -> str:
    from weft.cluster import trace

    return ", ".join(f"{name}: {' '.join(of.options)}" for name, of in trace.formats().items() if of.options)


def _orders() -> str:
    from weft.cluster.orders import ORDERS

    return ", ".join(ORDERS)


def _placements() -> str:
    from weft.cluster.placements import PLACEMENTS

    return ", ".join(PLACEMENTS)


def _metrics() -> str:
    from weft.cluster.compare import METRICS

    return ", ".join(METRICS)


PLUGINS = {
    "FORMATS": _formats,
    "FORMAT_OPTIONS": _format_options,
    "ORDERS": _orders,
    "PLACEMENTS": _placements,
    "METRICS": _metrics,
}

Trace = Annotated[Path, typer.Argument(metavar="PATH", help="a trace, plain or gzip'd")]
Format = Annotated[str, typer.Option(help="of the trace; one of FORMATS", metavar="NAME")]
FormatOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="of the format; may be repeated (FORMAT_OPTIONS)"),
]
Columns = Annotated[
    str, typer.Option(metavar="NAME=FILE'S,…", help="weft's name = the csv or parquet file's: gpus=num, submit=time")
]
Where = Annotated[str, typer.Option(metavar="COLUMN=VALUE", help="keep the jobs of one tenant: vc=vcvGl")]
Limit = Annotated[int | None, typer.Option(min=1, help="keep only the first so many jobs")]
Nodes = Annotated[str, typer.Option(metavar="COUNTxGPUS,…", help="the cluster: 20x8, or 4x8,2x4")]
GpuMemory = Annotated[float, typer.Option(min=0.0, help="with --nodes: GB of each GPU; not looked at while 0")]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", metavar="FILE", help="instead of --nodes: a cluster file")
]
RestartCost = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="that a job which was stopped holds its GPUs before it works on; of orders that stop jobs",
    ),
]
CheckpointEvery = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="of work between checkpoints: what came after the last one is lost; 0: nothing is",
    ),
]
Weights = Annotated[
    str, typer.Option(metavar="TENANT=WEIGHT,…", help="of orders among tenants: team-a=2,team-b=1; else 1")
]
Quotas = Annotated[
    str,
    typer.Option(
        "--quota",
        metavar="TENANT=GPUS[:BORROWED],…|FILE",
        help="GPUs that each tenant has, and how many of others' it may borrow: team-a=32,team-b=16:8,*=0; or a YAML file",
    ),
]
Pictures = Annotated[Path | None, typer.Option(metavar="FILE", help="a page .html, or an overview .png or .svg")]


def simulate(
    path: Trace,
    format: Format = "",
    nodes: Nodes = "",
    gpu_memory: GpuMemory = 0.0,
    cluster: ClusterFile = None,
    order: Annotated[
        str,
        typer.Option(help="ORDERS; with -skip, -easy or -conservative others than the head may start", metavar="NAME"),
    ] = "fifo",
    placement: Annotated[str, typer.Option(help="PLACEMENTS", metavar="NAME")] = "best",
    ties: Annotated[str, typer.Option(help="lowest, highest or random; by default the placement's own")] = "",
    seed: Annotated[int, typer.Option(min=0, help="of random ties")] = 0,
    restart_cost: RestartCost = 0.0,
    checkpoint_every: CheckpointEvery = 0.0,
    weights: Weights = "",
    quota: Quotas = "",
    where: Where = "",
    limit: Limit = None,
    option: FormatOptions = None,
    columns: Columns = "",
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="keep every job and event (Parquet) and the summary there")
    ] = None,
    pictures: Pictures = None,
    as_json: Json = False,
) -> None:
    """Run the jobs of a trace through a cluster: how long they take and wait, how full it is, and why.

    `weft simulate compare PATH` runs several policies side by side. Exit status 1 when no job could run or a disk failed, 2 for
    a mistake, 130 after Ctrl-C.
    """
    with _cluster_extra():
        from weft.cluster import metrics, terminal
        from weft.cluster import order as orders
        from weft.cluster import placement as placements
        from weft.cluster import save as saving
        from weft.cluster import simulate as run
        from weft.cluster import ties as tie_rules

    orders.find(order)
    tie_rules.check(ties or placements.find(placement).ties)
    made = _cluster(nodes, gpu_memory, cluster)
    tenants = _tenants(weights, quota)
    options = _options(format, option or [], columns)
    if pictures:
        _check_picture(pictures)
    if save:
        saving.check(save)
    with _bar(f"reading {path.name}", as_json) as step:
        jobs = _jobs(path, format, options, where, limit)
        result = run(
            jobs, made, order, placement, ties=ties, seed=seed, restart_s=restart_cost, checkpoint_s=checkpoint_every,
            **tenants, on_progress=lambda *at: step("simulating", *at),
        )  # fmt: skip
    found = metrics.summary(result)
    if as_json:
        print_json(found)
    else:
        terminal.show(out, found)
    if save:
        saving.write(save, result, found)
        _told(f"saved in {save}")
    if pictures:
        from weft.cluster import pictures as drawing

        _told(f"drawn: {drawing.write(pictures, [result])}")
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
            help="may be repeated; by default every order that stops no jobs and asks nothing of tenants (priority only where "
            "priorities differ), with best, first, worst and consolidate. Orders: ORDERS, those that stop no jobs also with "
            "-skip, -easy, -conservative (those among "
            "tenants with -skip only); placements: PLACEMENTS",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="how many of whatever is random")] = 10,
    ties: Annotated[str, typer.Option(metavar="RULE,…", help="rules to try as well: lowest,highest,random")] = "",
    shuffle_same_second: Annotated[
        bool,
        typer.Option("--shuffle-same-second", help="try random orders of jobs that are submitted at the same time"),
    ] = False,
    restart_cost: RestartCost = 0.0,
    checkpoint_every: CheckpointEvery = 0.0,
    weights: Weights = "",
    quota: Quotas = "",
    metric: Annotated[str, typer.Option(metavar="NAME", help="to rank by: METRICS")] = "jct.mean",
    processes: Annotated[int | None, typer.Option(min=1, help="that run side by side; by default all cores")] = None,
    where: Where = "",
    limit: Limit = None,
    option: FormatOptions = None,
    columns: Columns = "",
    pictures: Pictures = None,
    as_json: Json = False,
) -> None:
    """Run several policies on one trace and rank them, with what seeds, ties and same-second jobs change.

    Exit status 1 when a run failed, no job could run or a disk failed, 2 for a mistake, 130 after Ctrl-C.
    """
    with _cluster_extra():
        from weft.cluster import compare as run
        from weft.cluster import terminal
        from weft.cluster.compare import INTERRUPTED, METRICS, Policy, has_priorities, same_second
    from weft.definition import UnknownName

    policies = [Policy.parse(text) for text in policy or []]
    if metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    made = _cluster(nodes, gpu_memory, cluster)
    tenants = _tenants(weights, quota)
    options = _options(format, option or [], columns)
    if pictures:
        _check_picture(pictures)
    with _bar(f"reading {path.name}", as_json) as step:
        jobs = _jobs(path, format, options, where, limit)
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
            **tenants,
            metric=metric,
            processes=processes,
            keep=pictures is not None,
            on_progress=lambda *at: step("simulating", *at),
        )
    if not policies and not has_priorities(jobs):
        _told("all jobs have the same priority: the order priority, which is fifo then, is left out")
    if shuffle_same_second and not same_second(jobs):
        _told("no two jobs are submitted at the same time: there is nothing to shuffle")
    if as_json:
        print_json(terminal.as_json(compared, metric))
    else:
        terminal.show_compared(out, compared, metric)
    results = [r.result for each in compared for r in each.runs if r.result is not None]
    if pictures and results:
        from weft.cluster import pictures as drawing

        _told(f"drawn: {drawing.write(pictures, results)}")
    failed = [why for each in compared for why in each.failed]
    none_ran = not any(run.found["completed"] for each in compared for run in each.runs)
    raise typer.Exit(130 if INTERRUPTED in failed else 1 if failed or none_ran else 0)


# ---- arguments -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cluster_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "numpy":
            raise
        raise ModuleNotFoundError(
            f"the simulator needs NumPy and Numba: pip install 'weft[cluster]' ({error})", name=error.name
        ) from None


def _cluster(nodes: str, gpu_memory: float, file: Path | None) -> Any:
    from weft.cluster import Cluster, cluster_file

    if bool(nodes) == bool(file):
        what = "both --nodes and --cluster are given" if nodes else "the cluster is missing"
        raise ValueError(f"{what}; expected one: --nodes 20x8, or --cluster FILE")
    if not file:
        return Cluster.parse(nodes, gpu_memory)
    if gpu_memory:
        raise ValueError("--gpu-memory goes with --nodes; in a cluster file it is gpu_memory_gb of each group")
    return cluster_file.load(file)


def _tenants(weights: str, quota: str) -> dict[str, Any]:
    """Weights and quotas as the simulator takes them."""
    from weft.cluster import quota as quotas

    return {
        "weights": quotas.parse_weights(weights) if weights else {},
        "quotas": quotas.given(quota) if quota else {},
    }


def _options(format: str, pairs: list[str], columns: str) -> dict[str, Any]:
    """What a format is told beside the path: ``columns`` is a mapping, what is a number by default a number, else a word."""
    from weft.cluster import trace
    from weft.definition import UnknownName

    known = trace.formats()
    if not format:
        raise ValueError(f"--format is missing; expected one of {', '.join(known)}")
    if format not in known:
        raise UnknownName("trace format", format, known)
    found: dict[str, Any] = {}
    for text in [*pairs, *([f"columns={columns}"] if columns else [])]:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--option is '{text}'; expected NAME=VALUE, such as gpu=v100")
        if name not in known[format].options:
            raise UnknownName(f"option of trace format '{format}'", name, known[format].options)
        if name in found:
            raise ValueError(f"option '{name}' is given twice; expected it once")
        usual = inspect.signature(known[format].load).parameters[name].default
        if name == "columns":
            found[name] = _mapping(value)
        elif isinstance(usual, float):
            try:
                found[name] = float(value)
            except ValueError:
                raise ValueError(f"option '{name}' is '{value}'; expected a number, such as {usual:g}") from None
        else:
            found[name] = value
    return found


def _mapping(text: str) -> dict[str, str]:
    """``gpus=gpu_num,submit=time``."""
    found: dict[str, str] = {}
    for pair in text.split(","):
        name, _, there = (part.strip() for part in pair.partition("="))
        if not name or not there:
            raise ValueError(f"--columns is '{text}'; expected NAME=FILE'S,…, such as gpus=gpu_num,submit=time")
        if name in found:
            raise ValueError(f"--columns names '{name}' twice; expected it once")
        found[name] = there
    return found


def _jobs(path: Path, format: str, options: dict[str, Any], where: str, limit: int | None) -> Any:
    from weft.cluster import trace

    column, equals, value = where.partition("=")
    if where and not equals:
        raise ValueError(f"--where is '{where}'; expected COLUMN=VALUE, such as vc=vcvGl")
    return trace.load(path, format, {column: value} if where else {}, limit, **options)


def _check_picture(path: Path) -> None:
    """Raises what writing it would, before anything is simulated."""
    import importlib.util
    import tempfile

    if path.suffix.lower() not in (".html", ".png", ".svg"):
        raise ValueError(f"a picture '{path.name}'; expected a name that ends in .html, .png or .svg")
    if path.suffix.lower() != ".html" and importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(f"a {path.suffix} needs matplotlib: pip install 'weft[pictures]' (a .html does not)")
    if path.is_dir():
        raise IsADirectoryError(f"--pictures is '{path}', a folder; expected a file's name")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"a picture cannot be written in {folder}: {error.strerror}") from None


# ---- standard error --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _bar(begin: str, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on a terminal; nothing with ``--json`` or where standard error is none. Yields what to tell: what is done, how far
    it is, and of how much (None while nobody knows)."""
    columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=note, transient=True, disable=quiet or not note.is_terminal) as bar:
        task = bar.add_task(begin, total=None)

        def step(what: str, done: int, total: int | None) -> None:
            if bar.tasks[0].description != what:
                bar.reset(task, description=what, total=total)
            bar.update(task, completed=done, total=total)

        yield step


def _told(text: str) -> None:
    note.print(text, style="dim", markup=False, soft_wrap=True)
