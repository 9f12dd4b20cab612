"""``weft launch job.yaml``: the processes of a job on this machine, or its part of several, over torch.distributed's elastic
agent."""

import os
import re
import shlex
import shutil
import socket
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from weft.definition import UnknownName
from weft.train.settings import JOB, load_yaml

TAIL = 20  # lines of a failed rank's log that are shown
GRACE_S = 120  # a scheduler's, between SIGTERM and the end: the time for a checkpoint


@dataclass
class JobFile:
    """``command`` is run ``processes`` times, each with torchrun's variables (RANK, WORLD_SIZE …) and those of ``env``; all are
    started again up to ``retries`` times when one fails. Logs go to ``logs``, one folder for each start and rank.

    Of several ``nodes`` each runs the same file: they meet at ``rendezvous``, ``host:port`` of one of them, within
    ``wait_s``; ``id`` tells jobs apart that meet there. ``processes`` are those of one node. An elastic job goes on with as
    few as ``min_nodes`` when nodes fail.

    The rest is for a scheduler: ``gpus``, ``cpus`` and ``memory_gb`` of each node (as many GPUs as processes by default),
    ``pool``, ``team`` and ``priority`` of the cluster file, ``time_limit`` (``36h``), ``borrow`` beyond the team's quota
    where Slurm has to be asked for it, the container ``image``, a volume ``CLAIM:PATH`` that outlives the job, and the
    ``kind`` in Kubernetes."""

    command: list[str]
    processes: int = 1
    env: dict[str, str] = field(default_factory=dict)
    retries: int = 0
    logs: str = "logs"
    nodes: int = 1
    rendezvous: str = ""
    id: str = "weft"
    wait_s: int = 600
    min_nodes: int = 0
    gpus: int = -1
    cpus: int = 0
    memory_gb: int = 0
    pool: str = ""
    team: str = ""
    priority: str = ""
    time_limit: str = ""
    borrow: bool = False
    image: str = ""
    volume: str = ""
    kind: str = "jobset"

    @property
    def environment(self) -> dict[str, str]:
        """``env``, a name, by which ``weft train`` finds this job's checkpoints when it is started again, and a store of its
        own for each start. The one that PyTorch's starts share has the addresses of the last one's ranks, and a rank that
        reads one waits for it half an hour (github.com/pytorch/pytorch/issues/135712)."""
        return {JOB: f"{self.id}-{time.time():.6f}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **self.env}

    @property
    def scheduled(self) -> dict[str, str]:
        """``environment`` in a scheduler's job: torchrun leaves its ranks the time for a checkpoint, instead of 30 s."""
        return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_S - 10), **self.environment}

    @property
    def gpus_per_node(self) -> int:
        return self.processes if self.gpus < 0 else self.gpus


class RankFailed(OSError):
    """A rank ended badly: which, how, and the end of what it said."""


EXAMPLES = {"time_limit": "36h", "image": "registry/weft:1.0", "volume": "claim:/runs"}
KINDS = ("job", "jobset", "trainjob", "raycluster")
TEXTS = {  # entry → what it must be like
    "id": r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?",
    "pool": r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?",
    "team": r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?",
    "priority": r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?",
    "time_limit": r"[0-9]*\.?[0-9]+\s*(d|h|min|s|)",
    "image": r"[A-Za-z0-9][-A-Za-z0-9_.+:/@]*",
    "volume": r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?:/[-A-Za-z0-9_./]*",
}


def read(file: str, scheduler: bool = False, **changed: Any) -> JobFile:
    """A job file.

    Args:
        scheduler: a scheduler starts it, which says where nodes meet.
        changed: entries that replace the file's.

    Raises:
        ValueError, UnknownName: it is no mapping, lacks a command, or has a name or value that is none.
        FileNotFoundError: no such file.
    """
    given = load_yaml(file) | changed
    known = [f.name for f in fields(JobFile)]
    for name in given:
        if name not in known:
            raise UnknownName(f"entry of {file}:", str(name), known)
    command = given.get("command")
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:  # a quotation without an end
        raise ValueError(f"{file}: command is {command!r}: {error}") from None
    if not isinstance(words, list) or not words:
        raise ValueError(
            f"{file}: command is {command!r}; expected a line such as 'weft train gpt --parallel ddp', or its words"
        )
    least_of = {
        "processes": 1,
        "retries": 0,
        "nodes": 1,
        "wait_s": 1,
        "min_nodes": 0,
        "gpus": 0,
        "cpus": 0,
        "memory_gb": 0,
    }
    for name, least in least_of.items():
        if type(given.get(name, least)) is not int or given.get(name, least) < least:  # nor a bool
            raise ValueError(f"{file}: {name} is {given[name]!r}; expected a whole number of at least {least}")
    for name in ("logs", "rendezvous", "id"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError(f"{file}: {name} is {given[name]!r}; expected text")
    for name, pattern in TEXTS.items():
        if given.get(name) and (name != "id" or scheduler) and not re.fullmatch(pattern, str(given[name])):
            raise ValueError(f"{file}: {name} is {given[name]!r}; expected text like {EXAMPLES.get(name, 'vision-1')}")
        if name in given:
            given[name] = str(given[name])
    if given.get("kind", "job") not in KINDS:
        raise UnknownName(f"kind in {file}:", str(given["kind"]), KINDS)
    if type(given.get("borrow", False)) is not bool:
        raise ValueError(f"{file}: borrow is {given['borrow']!r}; expected true or false")
    if given.get("min_nodes", 0) > given.get("nodes", 1):
        raise ValueError(
            f"{file}: min_nodes is {given['min_nodes']} of {given.get('nodes', 1)} nodes; expected at most these"
        )
    place, colon, port = str(given.get("rendezvous") or "").rpartition(":")
    if given.get("nodes", 1) > 1 and not scheduler and not (place and colon and port.isdecimal()):
        raise ValueError(
            f"{file}: rendezvous is {given.get('rendezvous')!r}; expected host:port of one of the {given['nodes']} nodes, "
            "such as node0:29400"
        )
    env = given.get("env") or {}
    if not isinstance(env, dict) or not all(re.fullmatch(r"[A-Za-z_]\w*", str(name)) for name in env):
        raise ValueError(f"{file}: env is {env!r}; expected names with values")
    given |= {"command": [str(w) for w in words], "env": {str(k): str(v) for k, v in env.items()}}
    return JobFile(**given)


def launch(job: JobFile) -> Path:
    """Runs the job and returns the folder of its logs. When a rank fails the others are ended (SIGTERM, after 30 s SIGKILL).

    Raises:
        RankFailed: a rank failed, and no retry was left.
        FileNotFoundError: there is no such command.
        ConnectionError: the other nodes did not come to the rendezvous.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    program, *arguments = job.command
    if program == "weft":  # the one that runs now
        program, arguments = sys.executable, ["-m", "weft", *arguments]
    elif program == "python":
        program = sys.executable
    elif not shutil.which(program):
        raise FileNotFoundError(f"command '{program}' is not on the PATH")
    logs = Path(job.logs) if job.nodes == 1 else Path(job.logs, socket.gethostname())
    logs.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0" if job.nodes == 1 else job.rendezvous,
        "rdzv_configs": {"join_timeout": job.wait_s, "read_timeout": job.wait_s},
        "run_id": job.id,
        "monitor_interval": 0.2,
    }
    config = LaunchConfig(
        min_nodes=job.min_nodes or job.nodes, max_nodes=job.nodes, nproc_per_node=job.processes, max_restarts=job.retries,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL, tee={0: Std.ALL}), **settings,
    )  # fmt: skip
    threads = max(1, (os.cpu_count() or 1) // job.processes)
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), **job.environment}
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        elastic_launch(config, program)(*arguments)
    except SignalException:  # the ranks had it too, and have ended
        raise KeyboardInterrupt from None
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        how = (
            f"was ended by signal {-failure.exitcode}"
            if failure.exitcode < 0
            else f"ended with status {failure.exitcode}"
        )
        said = sorted(logs.glob(f"{job.id}_*/attempt_*/{failure.local_rank}/std*.log"), key=lambda p: p.stat().st_mtime)
        lines = "\n".join(line for path in said[-2:] for line in path.read_text(errors="replace").splitlines()[-TAIL:])
        raise RankFailed(
            f"rank {rank} {how}; the other ranks were ended. Logs: {logs}. It said last:\n{lines or 'nothing'}"
        ) from None
    except RendezvousError as error:
        raise ConnectionError(
            f"{job.nodes} nodes did not meet at {job.rendezvous} within {job.wait_s} s ({str(error) or type(error).__name__})"
        ) from None
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return logs
