"""Whose process a PID is: user, container and Slurm job, from /proc. What may not be read is empty."""

import pwd
import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CONTAINER = re.compile(r"([0-9a-f]{64})(?:\.scope)?(?:/|$)")  # Docker, containerd, CRI-O and Podman name cgroups so
SLURM_JOB = re.compile(r"(?:^|/)(?:slurm[^/]*/)(?:.*/)?job_(\d+)(?:/|$)")


@dataclass(frozen=True)
class Owner:
    """``container`` is the first twelve digits of its id, as container tools print it."""

    user: str = ""
    container: str = ""
    job: str = ""
    command: str = ""


def owner(pid: int, proc: Path = PROC) -> Owner:
    """Of a process that may end at any time, or be another user's or container's."""
    folder = proc / str(pid)
    try:
        uid = folder.stat().st_uid
    except OSError:  # it has ended, or lies outside this PID namespace
        return Owner()
    cgroup = _text(folder / "cgroup")
    container = next((m[1][:12] for line in cgroup.splitlines() if (m := CONTAINER.search(line))), "")
    job = next((m[1] for line in cgroup.splitlines() if (m := SLURM_JOB.search(line))), "") or _job_in_environment(
        folder
    )
    return Owner(_name(uid), container, job, _text(folder / "comm").strip())


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def _job_in_environment(folder: Path) -> str:
    """SLURM_JOB_ID, where cgroups are not used; root or the user's own processes only."""
    try:
        found = re.search(rb"(?:^|\0)SLURM_JOB_ID=(\d+)(?:\0|$)", (folder / "environ").read_bytes())
    except OSError:
        return ""
    return found[1].decode() if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def owners(pids: set[int], known: dict[int, tuple[float, Owner]], now: float, keep_s: float = 60.0) -> dict[int, Owner]:
    """The owners of these processes; ``known`` saves reading /proc again within ``keep_s`` seconds, and is updated."""
    for pid in list(known):
        if pid not in pids or now - known[pid][0] > keep_s:
            del known[pid]
    for pid in pids - known.keys():
        known[pid] = (now, owner(pid))
    return {pid: who for pid, (_, who) in known.items()}
