"""``weft deploy render``, ``lint`` and ``diff``."""

from pathlib import Path
from typing import Annotated

import typer

from weft.console import print_line, told

PANEL = "Deployment"
Cluster = Annotated[Path, typer.Argument(metavar="CLUSTER", help="cluster.yaml")]


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    app.command("deploy render", rich_help_panel=PANEL)(render)
    app.command(rich_help_panel=PANEL)(launch)


def render(
    cluster: Cluster,
    to: Annotated[str, typer.Option(help="kubernetes, slurm, compose or cloud")],
    out: Annotated[Path, typer.Option(help="the folder; files there that weft did not write are never replaced")],
) -> None:
    """Write the configuration of a whole cluster from its description: the same text each time, whatever changed by itself."""
    from weft.deploy import rendering

    files = rendering.render(rendering.load(cluster), to)
    changed = rendering.write(files, out)
    told(f"{out}: {len(files)} files, {len(changed)} changed")


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
