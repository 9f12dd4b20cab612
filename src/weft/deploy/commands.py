"""``weft deploy render``, ``lint`` and ``diff``, ``weft launch``, ``weft cost``, ``weft doctor``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from weft.console import Json, print_json, print_line, told

PANEL = "Deployment"
Cluster = Annotated[Path, typer.Argument(metavar="CLUSTER", help="cluster.yaml")]


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    app.command(rich_help_panel="Hardware")(doctor)
    for name, function in (("deploy render", render), ("deploy lint", lint), ("deploy diff", diff)):
        app.command(name, rich_help_panel=PANEL)(function)
    app.command(rich_help_panel=PANEL)(launch)
    app.command(rich_help_panel=PANEL)(cost)


def render(
    cluster: Cluster,
    to: Annotated[str, typer.Option(help="kubernetes, slurm, compose or cloud")],
    out: Annotated[
        Path, typer.Option(help="the folder; files there that weft did not write for this target are never touched")
    ],
) -> None:
    """Write the configuration of a whole cluster from its description: the same text each time, whatever changed by itself."""
    from weft.deploy import rendering

    files = rendering.render(rendering.load(cluster), to)
    changed = rendering.write(files, out, to)
    told(f"{out}: {len(files)} files, {len(changed)} changed")


def lint(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH…", help="cluster.yaml, folders and files of manifests and Helm values")
    ],
    as_json: Json = False,
) -> None:
    """Find what is valid and does not do what it seems to.

    Sharing modes that exclude each other, names that do not match, options that are silently ignored, quotas that never
    fit, removed API versions. Exit status 1 with findings, 2 for a file that cannot be read.
    """
    from weft.deploy import lint as rules
    from weft.deploy import rendering
    from weft.deploy.located import parse, read

    descriptions = [
        path for path in paths if path.is_file() and any("nodes" in d.value for d in _mappings(parse, path))
    ]
    if len(descriptions) > 1:
        raise ValueError(f"{' and '.join(map(str, descriptions))} are cluster files; expected one")
    made = rendering.load(descriptions[0]) if descriptions else None
    found = rules.lint(read([path for path in paths if path not in descriptions]), made)
    if as_json:
        keys = ("line", "rule", "what", "fix")
        print_json({"findings": [{"path": str(f.path), **{key: getattr(f, key) for key in keys}} for f in found]})
    else:
        for each in found:
            print_line(str(each))
        told(f"{len(found)} findings of {len(rules.RULES)} rules")
    raise typer.Exit(int(bool(found)))


def _mappings(parse: Any, path: Path) -> list[Any]:
    from weft.cluster.files.text import text_of

    return [
        found
        for found in parse(path, text_of(path).read())
        if isinstance(found.value, dict) and "kind" not in found.value
    ]


def diff(
    cluster: Cluster,
    to: Annotated[str, typer.Option(help="kubernetes, slurm, compose or cloud")] = "kubernetes",
    folder: Annotated[
        Path | None, typer.Option(help="what was rendered before; by default the live cluster (kubectl)")
    ] = None,
) -> None:
    """Show what rendering, or applying to the live cluster, would change.

    Exit status 1 where something would change, 2 for an error."""
    from weft.deploy import diff as changes
    from weft.deploy import rendering

    files = rendering.render(rendering.load(cluster), to)
    if folder is None and to != "kubernetes":
        raise ValueError(f"--folder is missing: only Kubernetes is compared live, and --to is {to}")
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"--folder {folder}: no such folder; expected one that weft deploy render has written")
    try:
        text = changes.against_folder(files, folder, to) if folder else changes.against_cluster(files)
    except FileNotFoundError:
        raise
    except OSError as error:  # status 1 says that something differs
        raise ValueError(str(error)) from None
    if text:
        print_line(text.rstrip())
    raise typer.Exit(int(bool(text)))


def doctor(
    level: Annotated[
        str, typer.Option(help="quick, or full: also run a kernel, a matrix product and a copy")
    ] = "quick",
    cluster: Annotated[Path | None, typer.Option(help="cluster.yaml: hold driver, toolkit and GPUs against it")] = None,
    as_json: Json = False,
) -> None:
    """What is installed, what sees the GPU, what does not fit together, and the fix for each."""
    from weft.hardware import doctor as checks

    if not cluster:
        raise typer.Exit(checks.main([*(["--json"] if as_json else []), "--level", level]))
    from weft.definition import UnknownName
    from weft.deploy import node_check, rendering

    if level not in checks.LEVELS:
        raise UnknownName("level", level, checks.LEVELS)
    made = rendering.load(cluster)
    raise typer.Exit(checks.show([*checks.examine(level), *node_check.findings(made)], as_json))


def launch(
    file: Annotated[Path, typer.Argument(help="job.yaml: command, processes, nodes, env, retries, team, pool …")],
    to: Annotated[str, typer.Option(help="local, slurm or kubernetes")] = "local",
    cluster: Annotated[
        Path | None, typer.Option(help="cluster.yaml: how pools' GPUs are called, teams, priorities")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the script or the objects, submit nothing")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="do not follow the logs")] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="in place of the file's")] = None,
    rendezvous: Annotated[str | None, typer.Option(help="host:port, in place of the file's")] = None,
) -> None:
    """Run a job: here as torchrun does (a failed rank ends the others, and its log is shown), or through a scheduler.

    Exit status 1 when the job failed, 2 for a wrong argument or file. Ctrl-C stops a local job; another one runs on.
    """
    from weft.definition import UnknownName
    from weft.train import launch as local

    if to not in ("local", "slurm", "kubernetes"):
        raise UnknownName("target", to, ("local", "slurm", "kubernetes"))
    changed = {key: value for key, value in (("nodes", nodes), ("rendezvous", rendezvous)) if value is not None}
    job = local.read(str(file), scheduler=to != "local", **changed)
    if to == "local":
        if dry_run or detach or cluster:
            raise ValueError("--dry-run, --detach and --cluster go with --to slurm or kubernetes")
        told(f"logs of all ranks: {local.launch(job)}")
        return

    from weft.deploy import kubernetes_job, rendering, slurm_job, submission
    from weft.deploy.manifests import yaml_text

    made = rendering.load(cluster) if cluster else None
    if to == "slurm":
        text = slurm_job.script(job, made, str(Path(job.logs).absolute()))
        if dry_run:
            print_line(text.rstrip())
            return
        Path(job.logs).mkdir(parents=True, exist_ok=True)
        number = submission.submit_slurm(text)
        told(f"job {number} is submitted")
        if not detach:
            submission.follow_slurm(number, told)
        return
    objects = kubernetes_job.manifests(job, made)
    if dry_run:
        print_line(yaml_text(objects).rstrip())
        return
    told(submission.submit_kubernetes(objects))
    if not detach:
        submission.follow_kubernetes(job, objects[-1], told)


def cost(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Prometheus' address or a saved answer, what sacct wrote, or a saved simulation"
        ),
    ],
    cluster: Annotated[Path | None, typer.Option(help="cluster.yaml: prices, GPUs, shares")] = None,
    price: Annotated[float, typer.Option(min=0, help="of a GPU hour, where the cluster file has none")] = 0.0,
    since: Annotated[str, typer.Option(help="of an address or sacct: 2026-11-01, or 30d before the end")] = "",
    until: Annotated[str, typer.Option(help="2026-12-01; by default now, or the last job's end")] = "",
    step: Annotated[str, typer.Option(help="of an address: a job counts in whole steps; 60s, longer over weeks")] = "",
    by: Annotated[str, typer.Option(help="team, user or job")] = "team",
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="write a row for each job")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write a page")] = None,
    as_json: Json = False,
) -> None:
    """GPU hours that were allocated, used and idle, what they cost, and what they were good for, by team, user and job."""
    from weft.definition import UnknownName
    from weft.deploy import rendering
    from weft.deploy.cost import files, prometheus, sacct, simulation, table, usage
    from weft.words import seconds

    if by not in usage.KEYS:
        raise UnknownName("--by", by, usage.KEYS)
    made = rendering.load(cluster) if cluster else None
    path = Path(source)
    if source.startswith(("http://", "https://")):
        begin, end = table.span(since or "30d", until)
        period = prometheus.usage(
            prometheus.fetch(source, begin, end, seconds(step) if step else 0.0), made, price, source
        )
    elif path.is_dir():
        period = simulation.load(path, made, price)
    elif not path.exists():
        raise FileNotFoundError(f"there is no file {path}; expected an address, a file or a folder")
    elif table.is_json(path):
        period = prometheus.load(path, made, price)
    else:
        begin_end = table.span(since, until) if since else (None, None)
        period = sacct.load(path, made, begin_end[0], begin_end[1], price)
    if csv:
        files.write_csv(csv, period)
        told(f"written: {csv}")
    if html:
        files.write_html(html, period)
        told(f"written: {html}")
    found = usage.report(period)
    if as_json:
        print_json(found)
    else:
        table.show(found, by)
