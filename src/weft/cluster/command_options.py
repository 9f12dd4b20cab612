"""Options of ``weft simulate``, ``compare`` and ``generate``, their help, and their values as the simulator takes them."""

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

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
Since = Annotated[
    str,
    typer.Option("--from", metavar="TIME", help="leave out jobs submitted before: 2d, 36h after the first, or a date"),
]
Until = Annotated[str, typer.Option("--until", metavar="TIME", help="leave out jobs submitted from then on")]
WarmUp = Annotated[
    str,
    typer.Option(
        "--warm-up",
        metavar="SPAN",
        help="such as 1d: jobs submitted in the first day run but count in no metric of jobs",
    ),
]
Nodes = Annotated[str, typer.Option(metavar="COUNTxGPUS,…", help="the cluster: 20x8, or 4xA100:8,2xH100:4")]
GpuMemory = Annotated[float, typer.Option(min=0.0, help="with --nodes: GB of each GPU; unknown, and no limit, while 0")]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", metavar="FILE", help="instead of --nodes: a cluster file")
]
RestartCost = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="that a preempted job holds its GPUs again before it works on; of orders that preempt",
    ),
]
CheckpointEvery = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="of work between checkpoints: work after the last one is lost by preemption; 0: nothing is lost",
    ),
]
Weights = Annotated[
    str, typer.Option(metavar="TENANT=WEIGHT,…", help="of orders among tenants: team-a=2,team-b=1; else 1")
]
Quotas = Annotated[
    str,
    typer.Option(
        "--quota",
        metavar="TENANT=GPUS[:BORROWED[:LENT]],…|FILE",
        help="nominal quota of each tenant in GPUs, how many more it may borrow, and how many of its own it may lend: "
        "team-a=32,team-b=16:8:4,*=0; or a YAML file, also with cores and memory",
    ),
]
Pictures = Annotated[Path | None, typer.Option(metavar="FILE", help="a page .html, or an overview .png or .svg")]


# ---- help ------------------------------------------------------------------------------------------------------------


class ListsPlugins(TyperCommand):
    """A command whose help lists the formats, orders and placements that are installed, and which refuses an option that is
    given twice, of which the last one would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = self.make_parser(ctx).parse_args(args=list(args))[2]
        for parameter in given:
            if given.count(parameter) > 1 and not getattr(parameter, "multiple", True):
                raise typer.BadParameter(f"{parameter.opts[0]} is given twice; expected it once", ctx=ctx)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            text = getattr(parameter, "help", None) or ""
            for word, names in PLUGINS.items():
                if word in text:
                    try:
                        text = text.replace(word, names())
                    except ImportError:
                        text = text.replace(word, "those of `pip install 'weft[cluster]'`")
            if text:
                parameter.help = text  # type: ignore[attr-defined]  # options and arguments have it, their base class does not
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
    from weft.cluster.comparison import METRICS

    # By stem: a whole name is longer than the column of a narrow terminal, and would be cut.
    ends: dict[str, list[str]] = {}
    for name in METRICS:
        stem, dot, end = name.rpartition(".")
        ends.setdefault(stem or name, []).extend([dot + end] if stem else [])
    return ", ".join(" ".join([stem, *of]) for stem, of in ends.items())


PLUGINS = {
    "FORMATS": _formats,
    "FORMAT_OPTIONS": _format_options,
    "ORDERS": _orders,
    "PLACEMENTS": _placements,
    "METRICS": _metrics,
}


# ---- values ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "numpy":
            raise
        raise ModuleNotFoundError(
            f"the simulator needs NumPy and Numba: pip install 'weft[cluster]' ({error})", name=error.name
        ) from None


def cluster_of(nodes: str, gpu_memory: float, file: Path | None) -> Any:
    from weft.cluster import Cluster, cluster_file

    if bool(nodes) == bool(file):
        what = "both --nodes and --cluster are given" if nodes else "the cluster is missing"
        raise ValueError(f"{what}; expected one: --nodes 20x8, or --cluster FILE")
    if not file:
        return Cluster.parse(nodes, gpu_memory)
    if gpu_memory:
        raise ValueError("--gpu-memory goes with --nodes; in a cluster file it is gpu_memory_gb of each group")
    return cluster_file.load(file)


def tenants_of(weights: str, quota: str) -> dict[str, Any]:
    """Weights and quotas as the simulator takes them."""
    from weft.cluster import quota as quotas

    return {
        "weights": quotas.parse_weights(weights) if weights else {},
        "quotas": quotas.given(quota) if quota else {},
    }


def format_options(format: str, pairs: list[str], columns: str) -> dict[str, Any]:
    """A format's options beside the path: ``columns`` is a mapping, an option that is a number by default a number, else a
    word."""
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
        default = inspect.signature(known[format].load).parameters[name].default
        if name == "columns":
            found[name] = _mapping(value)
        elif isinstance(default, float):
            try:
                found[name] = float(value)
            except ValueError:
                raise ValueError(f"option '{name}' is '{value}'; expected a number, such as {default:g}") from None
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


def warm_up_of(text: str) -> float:
    """Seconds of ``--warm-up``."""
    from weft.words import seconds

    return seconds(text) if text else 0.0


def jobs_of(
    path: Path, format: str, options: dict[str, Any], where: str, limit: int | None, since: str = "", until: str = ""
) -> Any:
    from weft.cluster import trace

    column, equals, value = where.partition("=")
    if where and not equals:
        raise ValueError(f"--where is '{where}'; expected COLUMN=VALUE, such as vc=vcvGl")
    return trace.load(path, format, {column: value} if where else {}, limit, since, until, **options)


def check_picture(path: Path) -> None:
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
