"""Kubernetes objects as plain dictionaries, and as YAML text that is the same for the same objects."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from weft.cluster.specification import Pool, Specification, Team
from weft.train.launch import JobFile

Manifest = dict[str, Any]

# Labels of nodes, and of what is rendered.
POOL, RACK = "weft.dev/pool", "weft.dev/rack"
TEAM, JOB, USER = "weft.dev/team", "weft.dev/job", "weft.dev/user"
MANAGED = {"app.kubernetes.io/managed-by": "weft"}
SYSTEM = "weft-system"  # the namespace of weft's own daemons
# Text that kubectl's YAML reads as a number or truth value, such as 1e-3, and PyYAML as text, which it leaves unquoted.
GO_READS = re.compile(r"[-+]?(\.?\d[\d_]*\.?[\d_]*([eE][-+]?\d+)?|0[xXoObB][\da-fA-F_]+)|[yYnN]")
TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def manifest(
    api: str, kind: str, name: str, namespace: str = "", labels: Mapping[str, str] | None = None, **content: Any
) -> Manifest:
    """An object with its metadata."""
    about: dict[str, Any] = {"name": name}
    if namespace:
        about["namespace"] = namespace
    about["labels"] = MANAGED | dict(labels or {})
    return {"apiVersion": api, "kind": kind, "metadata": about, **content}


def of_team(team: Team, api: str, kind: str, name: str, **content: Any) -> Manifest:
    """An object in a team's namespace."""
    return manifest(api, kind, name, team.name, {TEAM: team.name}, **content)


def pool_of(job: JobFile, made: Specification | None) -> Pool | None:
    """The pool that a job names, where there is a cluster file.

    Raises:
        UnknownName: the cluster has no such pool.
        ValueError: none of its nodes has what the job asks of each: it would wait for ever.
    """
    if not (made and job.pool):
        return None
    pool = made.pool(job.pool)
    most = pool.nodes.gpus * pool.sharing.replicas
    if job.gpus_per_node > most:
        raise ValueError(
            f"the job asks for {job.gpus_per_node} GPUs of a node; expected at most {most} in '{pool.name}'"
        )
    return pool


def yaml_text(documents: Iterable[Any]) -> str:
    """YAML documents, keys in their order, long text unfolded.

    Raises:
        ModuleNotFoundError: PyYAML is missing.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise ModuleNotFoundError("weft deploy needs PyYAML: pip install 'weft[deploy]'", name="yaml") from None
    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's: 20 times as fast

    class Dumper(base):
        def ignore_aliases(self, data: Any) -> bool:  # a value that comes twice is written twice
            return True

    def represented(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else "'" if GO_READS.fullmatch(text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represented)
    text: str = yaml.dump_all(
        documents,
        Dumper=Dumper,
        sort_keys=False,
        default_flow_style=False,
        explicit_start=True,
        width=10_000,
        allow_unicode=True,
    )
    return text


def gpu_pools(made: Specification) -> list[Pool]:
    return [pool for pool in made.pools if pool.gpus]


def nvidia_pools(made: Specification) -> list[Pool]:
    return [pool for pool in gpu_pools(made) if pool.accelerator.resource.startswith("nvidia.com/")]
