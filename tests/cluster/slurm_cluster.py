"""A real Slurm in a temporary folder, on a clock that runs faster than the wall's: what the simulator is held to.

All daemons, the nodes too, run on this machine, on the loopback interface and on free ports; a node's GPUs are empty files.
"""

import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_daemons import PATH, daemons_folder, end, free_ports, start, wait

if TYPE_CHECKING:
    from weft.cluster import Jobs

NEEDED = {
    "faketime": "faketime", "munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm",
    "sbatch": "slurm-client", "scontrol": "slurm-client",
}  # fmt: skip  # command → Debian's package
BEFORE_OTHERS = ("nice", "-n", "-10")  # where that is allowed: it needs little, but on a fast clock a hiccup is long
START_OF_TIME = datetime(2026, 1, 1, tzinfo=timezone.utc)

# Timeouts are long since they run on the fast clock too: 60 s of it are one of the wall's at a rate of 60.
CONFIGURATION = """\
ClusterName=weft
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,ttl=3600
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmctldTimeout=3600
SlurmdTimeout=0
MessageTimeout=600
TCPTimeout=120
BatchStartTimeout=3600
KillWait=30
MinJobAge=10000000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PriorityType=priority/basic
SchedulerType=sched/{scheduler}
SchedulerParameters={parameters}
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


# As exact as it goes: by default Slurm looks at the whole queue once a minute, plans every half minute with a resolution of a
# minute, and takes together the ends of jobs that lie ever farther apart. How long a plan may take is by the fast clock.
PARAMETERS = (
    "sched_interval=1", "batch_sched_delay=0", "bf_interval=1", "bf_resolution=1", "bf_window_linear=1", "bf_window=10080",
    "bf_max_time=3600", "bf_yield_interval=10000000",
)  # fmt: skip


def missing() -> str:
    """Why no Slurm can be brought up here; empty where one can."""
    lacking = sorted({package for command, package in NEEDED.items() if not shutil.which(command, path=PATH)})
    return f"needs Slurm: apt-get install --no-install-recommends {' '.join(lacking)}" if lacking else ""


class Slurm:
    """A running cluster; :func:`slurm` makes one.

    Args:
        environment: in which commands talk to it, on its clock.
        rate: seconds of its clock in one of the wall's.
        zero: when its clock began, by the wall's (``time.monotonic``).
    """

    def __init__(self, environment: dict[str, str], rate: float, zero: float):
        self.environment, self.rate, self.zero = environment, rate, zero
        self.begin = 0.0

    def now(self) -> float:
        """Seconds by its clock."""
        return (time.monotonic() - self.zero) * self.rate - self.begin

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, (moment - self.now()) / self.rate))

    def command(self, *arguments: str) -> str:
        options = {"capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run([*BEFORE_OTHERS, *arguments], env=self.environment, **options)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, seconds: float, nodes: int, gpus: int, limit_minutes: int) -> str:
        """A job that sleeps, on so many GPUs of each of so many nodes; its number."""
        return self.command(
            "sbatch", "--parsable", "--output=/dev/null", f"--nodes={nodes}", "--ntasks-per-node=1",
            f"--gres=gpu:{gpus}", f"--time={limit_minutes}", f"--wrap=exec sleep {seconds:g}",
        ).strip()  # fmt: skip

    def jobs(self) -> dict[str, dict[str, str]]:
        """What ``scontrol`` says of each job, by its number."""
        lines = self.command("scontrol", "--oneliner", "show", "job").splitlines()
        jobs = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines if "JobId=" in line]
        return {job["JobId"]: job for job in jobs}

    def start(self, job: dict[str, str]) -> float:
        """When a job began, in seconds since the first moment at which jobs could be submitted."""
        if job["JobState"] != "COMPLETED":
            raise RuntimeError(f"job {job['JobId']} is {job['JobState']}, for {job['Reason']}; expected COMPLETED")
        at = datetime.fromisoformat(job["StartTime"]).replace(tzinfo=timezone.utc)
        return (at - START_OF_TIME).total_seconds() - self.begin


def run(jobs: "Jobs", nodes: int, gpus: int, scheduler: str, rate: float) -> list[float]:
    """Submits jobs when they arrive, waits for the last one, and says when each started.

    Args:
        jobs: ``Jobs`` of whole GPUs, larger ones than a node in multiples of it; ``estimate`` is their time limit.
        nodes, gpus: the cluster: nodes, and GPUs of each.
        scheduler: Slurm's ``backfill`` or ``builtin``.
        rate: seconds of the cluster's clock in one of the wall's.
    """
    with slurm(nodes, gpus, scheduler, rate) as cluster:
        numbers = []
        for submit, duration, size, limit in zip(jobs.submit, jobs.duration, jobs.gpus, jobs.estimate, strict=True):
            cluster.sleep_until(submit)
            wide = -(-int(size) // gpus)
            numbers.append(cluster.submit(float(duration), wide, int(size) // wide, round(limit / 60)))
        cluster.sleep_until(float((jobs.submit + jobs.duration).max()))
        over = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        wait(
            lambda: all(job["JobState"] in over for job in cluster.jobs().values()),
            120, lambda: f"Slurm has not completed all jobs:\n{cluster.command('squeue')}", pause=0.5,
        )  # fmt: skip
        seen = cluster.jobs()
        return [cluster.start(seen[number]) for number in numbers]


@contextmanager
def slurm(nodes: int, gpus: int, scheduler: str, rate: float) -> Iterator[Slurm]:
    """Brings up a cluster, and ends every process of it."""
    with daemons_folder() as (folder, variables, ending):
        environment, zero = clock(ending, rate, variables)
        configure(folder, nodes, gpus, scheduler)
        start(ending, folder, environment, [f"n{n}" for n in range(nodes)], 60, BEFORE_OTHERS)
        cluster = Slurm(environment, rate, zero)
        cluster.begin = cluster.now() // 60 * 60 + 60
        cluster.sleep_until(0)
        yield cluster


def configure(folder: Path, nodes: int, gpus: int, scheduler: str) -> None:
    """Slurm's files. Each node weighs more than the one before it: of fitting nodes Slurm takes the first."""
    for g in range(gpus):
        (folder / f"gpu{g}").touch()
    ports = free_ports(nodes + 1)
    line = "NodeName=n{0} NodeAddr=127.0.0.1 Port={1} CPUs={2} Gres=gpu:{2} Weight={3} State=UNKNOWN"
    lines = [line.format(n, port, gpus, n + 1) for n, port in enumerate(ports[1:])]
    user = pwd.getpwuid(os.getuid()).pw_name
    options = {"port": ports[0], "scheduler": scheduler, "parameters": ",".join(PARAMETERS)}
    head, partition = CONFIGURATION.format(folder=folder, user=user, **options).rsplit("PartitionName", 1)
    (folder / "slurm.conf").write_text(head + "\n".join(lines) + "\nPartitionName" + partition)
    (folder / "gres.conf").write_text(f"NodeName=n[0-{nodes - 1}] Name=gpu File={folder}/gpu[0-{gpus - 1}]\n")


def clock(ending: ExitStack, rate: float, environment: dict[str, str]) -> tuple[dict[str, str], float]:
    """A fast clock: the environment that puts a process on it, and when it began.

    Every process would begin its own; those below one ``faketime`` share its beginning, as long as that one runs.
    """
    faked = ["faketime", "-m", "-f", f"@{START_OF_TIME:%Y-%m-%d %H:%M:%S} x{rate:g}"]
    environment = {**environment, "NO_FAKE_STAT": "1", "FAKETIME_DONT_RESET": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([*faked, "sh", "-c", "env -0; date +%s.%N; cat"], env=environment, **pipes)
    ending.callback(end, process)
    assert process.stdout
    *variables, now = process.stdout.readline().decode().split("\0")
    zero = time.monotonic() - (float(now) - START_OF_TIME.timestamp()) / rate
    return dict(v.split("=", 1) for v in variables), zero
