"""A job file as an sbatch script."""

import math
import shlex
from collections.abc import Iterable
from typing import Any

from weft.cluster.specification import Priority, Specification
from weft.definition import UnknownName
from weft.deploy.manifests import pool_of
from weft.deploy.slurm import MPS_PER_GPU
from weft.train.launch import GRACE_S, JobFile
from weft.train.settings import JOB
from weft.words import seconds


def script(job: JobFile, made: Specification | None = None, logs: str = "") -> str:
    """The script. Every node runs one torchrun, which starts the processes; they meet at the first node.

    Args:
        made: the cluster file, which says how the pool's GPUs are called and who may have them.

    Raises:
        UnknownName: a pool, team or priority that the cluster file does not have.
        ValueError: a node of the pool has fewer GPUs than the job asks for.
    """
    options = {
        "job-name": job.id,
        "nodes": f"{job.min_nodes}-{job.nodes}" if job.min_nodes else str(job.nodes),
        "ntasks-per-node": "1",
        "output": f"{logs or job.logs}/%x-%j.log",
        "open-mode": "append",  # a job that is started again goes on in its file
        "signal": f"TERM@{GRACE_S}",
    }
    if job.gpus_per_node:
        options["gres"] = gres(job, made)
    if job.cpus:
        options["cpus-per-task"] = str(job.cpus)
    if job.memory_gb:
        options["mem"] = f"{job.memory_gb}G"
    if job.pool:
        options["partition"] = job.pool
    if job.team:
        options["account"] = job.team
    if made and job.team and made.slurm.accounting:
        team = _named("team", job.team, made.teams)
        options["qos"] = f"borrow-{made.root_of(team.cohort)}" if job.borrow and team.cohort else team.name
    limit = seconds(job.time_limit) if job.time_limit else 0.0
    if made and made.priorities:
        priority = _priority(job, made)
        if priority:
            top = max(each.value for each in made.priorities)
            if nice := top - priority.value:  # users may lower their jobs, not raise them
                options["nice"] = str(nice)
            limit = limit or priority.max_hours * 3600
    if limit:
        options["time"] = str(math.ceil(limit / 60))
    flags = ["requeue"] if job.retries or job.min_nodes else ["no-requeue"]
    if job.min_nodes:
        flags.append("no-kill")  # the job goes on when a node fails
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in options.items())]
    lines += [f"#SBATCH --{flag}" for flag in flags]
    variables = {name: shlex.quote(value) for name, value in job.scheduled.items()}
    if JOB not in job.env:
        variables[JOB] = '"slurm-$SLURM_JOB_ID"'  # a script may be submitted twice
    lines += ["set -euo pipefail", *(f"export {name}={value}" for name, value in variables.items())]
    return "\n".join([*lines, *_run(job)]) + "\n"


def _run(job: JobFile) -> list[str]:
    command = shlex.join(job.command)
    if job.nodes == 1 and job.processes == 1:
        return [f"srun {command}"]
    nodes = f"{job.min_nodes}:{job.nodes}" if job.min_nodes else str(job.nodes)
    keep = " --no-kill --kill-on-bad-exit=0 --wait=0" if job.min_nodes else ""
    return [
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "head=$(scontrol --oneliner show node \"$head\" | sed 's/.* NodeAddr=\\([^ ]*\\).*/\\1/')",
        "port=$((29400 + SLURM_JOB_ID % 1000))",
        f"srun{keep} torchrun --nnodes={nodes} --nproc-per-node={job.processes} --max-restarts={job.retries} \\",
        '    --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID" \\',
        f"    --rdzv-conf=join_timeout={job.wait_s} --no-python {command}",
    ]


def gres(job: JobFile, made: Specification | None) -> str:
    """What a node of the job has of its pool: GPUs of a type, MIG slices, shards or percents of MPS."""
    count = job.gpus_per_node
    pool = pool_of(job, made)
    if pool is None:
        return f"gpu:{count}"
    if pool.sharing.mode == "mig":
        return f"gpu:{pool.sharing.profile}:{count}"
    if pool.sharing.mode == "time-slicing":
        return f"shard:{count}"
    if pool.sharing.mode == "mps":
        return f"mps:{count * (MPS_PER_GPU // pool.sharing.replicas)}"
    return f"gpu:{pool.name}:{count}"


def _priority(job: JobFile, made: Specification) -> Priority | None:
    if job.priority:
        found: Priority = _named("priority", job.priority, made.priorities)
        return found
    return next((each for each in made.priorities if each.default), None)


def _named(what: str, name: str, of: Iterable[Any]) -> Any:
    for each in of:
        if each.name == name:
            return each
    raise UnknownName(what, name, [each.name for each in of])
