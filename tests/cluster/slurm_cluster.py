"""A real Slurm in a temporary folder, on a clock that runs faster than the wall's: what the simulator is held to.

All daemons, the nodes too, run on this machine, on the loopback interface and on free ports; a node's GPUs are empty files.
"""

import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.cluster import Jobs

# Debian keeps daemons in sbin, which is not on everyone's PATH.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
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
    folder = Path(tempfile.mkdtemp(prefix="weft-slurm-"))  # not pytest's: a socket's path has at most 107 letters
    configuration = folder / "slurm.conf"
    with ExitStack() as ending:
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        ending.callback(end_all, f"SLURM_CONF={configuration}")
        variables = {**os.environ, "PATH": PATH, "TZ": "UTC", "SLURM_CONF": f"{configuration}"}
        environment, zero = clock(ending, rate, variables)
        configure(folder, nodes, gpus, scheduler)

        def start(name: str, *arguments: str) -> None:
            log = ending.enter_context((folder / f"{name}.log").open("w"))
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            ending.callback(end, subprocess.Popen([*BEFORE_OTHERS, *arguments], env=environment, **streams))

        def logs() -> str:
            return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log")))

        start(
            "munged", "munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        wait((folder / "munge.socket").exists, 10, logs)
        start("slurmctld", "slurmctld", "-D")
        for n in range(nodes):
            start(f"n{n}", "slurmd", "-D", "-N", f"n{n}")
        cluster = Slurm(environment, rate, zero)

        def idle() -> bool:
            try:
                return cluster.command("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * nodes
            except RuntimeError:  # slurmctld does not listen yet
                return False

        wait(idle, 60, logs)
        cluster.begin = cluster.now() // 60 * 60 + 60
        cluster.sleep_until(0)
        yield cluster


def configure(folder: Path, nodes: int, gpus: int, scheduler: str) -> None:
    """Slurm's files. Each node weighs more than the one before it: of fitting nodes Slurm takes the first."""
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(64))
    (folder / "munge.key").chmod(0o600)
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


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def wait(condition: Callable[[], bool], seconds: float, why: Callable[[], str], pause: float = 0.05) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(why())
        time.sleep(pause)


def end(process: subprocess.Popen[bytes]) -> None:
    if not process.stdin:  # the clock ends with its input instead: terminated, it would leave its shared memory behind
        process.terminate()
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def end_all(mark: str) -> None:
    """Ends processes that carry this variable: steps and jobs, which outlive the daemon that started them."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:  # it has ended, or is another user's
            continue
