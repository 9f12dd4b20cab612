"""``weft deploy render``, ``lint`` and ``diff``."""

from pathlib import Path
from typing import Annotated

import typer

from weft.console import told

PANEL = "Deployment"
Cluster = Annotated[Path, typer.Argument(metavar="CLUSTER", help="cluster.yaml")]


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    app.command("deploy render", rich_help_panel=PANEL)(render)


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
