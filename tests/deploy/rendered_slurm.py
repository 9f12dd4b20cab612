"""A real Slurm on this machine that takes rendered files; only what one machine without GPUs cannot have is replaced."""

import os
import pwd
import re
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from slurm_daemons import PATH, daemons_folder, free_ports, start, wait

# Keys of slurm.conf that name this site's users, folders, control groups and database.
HERE = {
    "SlurmctldHost": "localhost(127.0.0.1)", "SlurmUser": "{user}", "StateSaveLocation": "{folder}/state",
    "SlurmdSpoolDir": "{folder}/%n", "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none", "Prolog": "{folder}/prolog.sh", "Epilog": "{folder}/epilog.sh",
    "AccountingStorageType": "accounting_storage/none", "AccountingStorageEnforce": None, "AccountingStorageHost": None,
    "PreemptType": "preempt/none", "PreemptMode": "OFF",
    "SchedulerParameters": "nohold_on_prolog_fail,batch_sched_delay=0,sched_min_interval=0",  # at once
}  # fmt: skip
MORE = """\
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
"""


class Running:
    def __init__(self, folder: Path, environment: dict[str, str], logs):
        self.folder, self.environment, self.logs = folder, environment, logs

    def command(self, *arguments: str, **options) -> str:
        done = subprocess.run(arguments, env=self.environment, capture_output=True, text=True, timeout=60, **options)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, node: str) -> str:
        return self.command("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T").split()[0]

    def job(self, number: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "--oneliner", "show", "job", number)))

    def ended(self, number: str) -> dict[str, str]:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait(lambda: self.job(number)["JobState"] in over, 40, lambda: f"{self.job(number)}\n{self.logs()}", pause=0.2)
        return self.job(number)


@contextmanager
def slurm(files: dict[str, str]) -> Iterator[Running]:
    """Brings up slurmctld and a slurmd for each node of the files, and ends every process of them."""
    with daemons_folder() as (folder, environment, ending):
        names = _configure(folder, files)
        environment["PATH"] = os.pathsep.join([f"{folder}/bin", PATH])
        logs = start(ending, folder, environment, names, 40)
        yield Running(folder, environment, logs)


def _configure(folder: Path, files: dict[str, str]) -> list[str]:
    for name in ("bin", "jobs"):
        (folder / name).mkdir()
    user = pwd.getpwuid(os.getuid()).pw_name
    names: list[str] = []
    lines = []
    for line in files["slurm.conf"].splitlines():
        key = line.partition("=")[0]
        if key in HERE:
            line = f"{key}={HERE[key].format(folder=folder, user=user)}" if HERE[key] else "#"
        if key == "NodeName":
            base, first, last = re.match(r"NodeName=(\S+?)-\[?(\d+)(?:-(\d+)\])?", line).groups()
            hosts = [f"{base}-{k}" for k in range(int(first), int(last or first) + 1)]
            names += hosts
            ports = sorted(free_ports(len(hosts)))
            listed = f"[{','.join(map(str, ports))}]" if len(ports) > 1 else str(ports[0])
            line += f" NodeAddr=127.0.0.1 Port={listed}"
        lines.append(line)
    more = MORE.format(folder=folder, user=user, port=free_ports(1)[0])
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n" + more)
    for name, text in files.items():
        if name != "slurm.conf" and name != "cgroup.conf":
            text = text.replace("/dev/nvidia", f"{folder}/nvidia").replace("/run/weft/jobs", f"{folder}/jobs")
            text = text.replace("/opt/weft/bin", f"{folder}/bin")
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
    for k in range(8):
        try:
            os.mknod(folder / f"nvidia{k}", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null: Slurm wants devices
        except PermissionError:
            pytest.skip("not verifiable here: this container may not make device files")
    return names
