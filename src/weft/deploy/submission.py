"""Submits a job to Slurm or Kubernetes with their own commands, and follows its logs until it ends."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from weft.deploy.manifests import JOB, Manifest, yaml_text
from weft.train.launch import JobFile

POLL_S = 2.0
PATIENCE_S = 300.0  # for which a scheduler may not answer, while a job is followed
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "REVOKED")
# Conditions of Job, JobSet and TrainJob with which they are over.
SUCCEEDED, FAILED = ("Complete", "Completed", "SuccessCriteriaMet"), ("Failed", "FailureTarget")
Say = Callable[[str], None]


class JobFailed(OSError):
    """The job ended badly: how, by the scheduler."""


def _command(*words: str, text: str = "") -> str:
    """Runs a scheduler's command.

    Raises:
        FileNotFoundError: it is not installed.
        OSError: it failed, with what it said.
    """
    if not shutil.which(words[0]):
        raise FileNotFoundError(f"{words[0]} is not on the PATH; submit from a machine that has it")
    done = subprocess.run(words, input=text or None, capture_output=True, text=True, timeout=120, errors="replace")
    if done.returncode:
        raise OSError(f"{' '.join(words[:3])} failed: {(done.stderr or done.stdout).strip()[:2000]}")
    return done.stdout


# ---- Slurm


def submit_slurm(script: str) -> str:
    """The job's number."""
    return _command("sbatch", "--parsable", text=script).strip().partition(";")[0]


def follow_slurm(number: str, say: Say, out: TextIO | None = None) -> None:
    """Prints the job's log as it grows, also over restarts, until Slurm says that it is over. Ctrl-C leaves the job running.

    Raises:
        JobFailed: any state but COMPLETED.
    """
    out, seen, at, silent = out or sys.stdout, "", 0, 0.0
    while True:
        try:
            job = dict(re.findall(r"(\w+)=(\S*)", _command("scontrol", "--oneliner", "show", "job", number)))
            silent = 0.0
        except (OSError, subprocess.TimeoutExpired) as error:
            silent += POLL_S
            if silent >= PATIENCE_S or "Invalid job id" in str(error):  # Slurm forgets a job after MinJobAge
                raise
            time.sleep(POLL_S)
            continue
        state = job.get("JobState", "UNKNOWN")
        if state != seen:
            nodes = job.get("NodeList", "")
            say(f"job {number}: {state}" + (f" on {nodes}" if state == "RUNNING" else f" ({job.get('Reason')})"))
            seen = state
        at = _grown(Path(job.get("StdOut", "")), at, out)
        if state in OVER:
            if state != "COMPLETED":
                raise JobFailed(
                    f"job {number} ended as {state}, exit code {job.get('ExitCode')}; its log is {job.get('StdOut')}"
                )
            return
        time.sleep(POLL_S)


def _grown(path: Path, at: int, out: TextIO) -> int:
    """Prints what is new in a file since ``at``; returns its end. A file that is not there yet is empty."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            new = file.read()
    except (FileNotFoundError, IsADirectoryError):
        return at
    out.write(new.decode(errors="replace"))
    out.flush()
    return at + len(new)


# ---- Kubernetes


def submit_kubernetes(objects: list[Manifest]) -> str:
    """What ``kubectl apply`` says."""
    return _command("kubectl", "apply", "-f", "-", text=yaml_text(objects)).strip()


def follow_kubernetes(job: JobFile, followed: Manifest, say: Say) -> None:
    """Prints the logs of every pod of the job, those of restarts too, until its object is complete. Ctrl-C leaves it running.

    Args:
        followed: the object whose status decides.

    Raises:
        JobFailed: it failed, with the reason.
    """
    kind, name = followed["kind"].lower(), followed["metadata"]["name"]
    readers: dict[str, subprocess.Popen[bytes]] = {}
    waiting, silent = "", 0.0
    try:
        while True:
            try:
                status = (
                    json.loads(_command("kubectl", "get", kind, name, "-n", job.team, "-o", "json")).get("status") or {}
                )
                pods = json.loads(
                    _command("kubectl", "get", "pods", "-n", job.team, "-l", f"{JOB}={job.id}", "-o", "json")
                )
                silent = 0.0
            except (OSError, ValueError, subprocess.TimeoutExpired) as error:
                silent += POLL_S
                if silent >= PATIENCE_S or "NotFound" in str(error):
                    raise
                time.sleep(POLL_S)
                continue
            _read_new(job, pods.get("items", []), readers)
            ended = _ended(status)
            if ended:
                for reader in readers.values():
                    reader.wait(timeout=60)
                if ended[0] in FAILED:
                    raise JobFailed(f"{kind} {name} failed: {ended[1]}")
                return
            if not readers and waiting != (why := _waits(status, pods.get("items", []))):
                say(f"{kind} {name}: {why}")
                waiting = why
            time.sleep(POLL_S)
    finally:
        for reader in readers.values():
            if reader.poll() is None:
                reader.terminate()


def _read_new(job: JobFile, pods: list[dict[str, Any]], readers: dict[str, "subprocess.Popen[bytes]"]) -> None:
    """Starts a ``kubectl logs`` for each pod that has begun and has none, by its identity: a pod of a restart is another."""
    for pod in pods:
        uid, phase = pod["metadata"]["uid"], (pod.get("status") or {}).get("phase")
        if uid not in readers and phase in ("Running", "Succeeded", "Failed"):
            words = ["kubectl", "logs", "--follow", "--prefix", "-n", job.team, pod["metadata"]["name"]]
            readers[uid] = subprocess.Popen(words, stdin=subprocess.DEVNULL)


def _ended(status: dict[str, Any]) -> tuple[str, str] | None:
    """The condition with which the object is over, and why; None while it is not."""
    for each in status.get("conditions") or []:
        if each.get("status") == "True" and each.get("type") in (*SUCCEEDED, *FAILED):
            return each["type"], f"{each.get('reason', '')} {each.get('message', '')}".strip()
    return None


def _waits(status: dict[str, Any], pods: list[dict[str, Any]]) -> str:
    if pods:
        return "its pods start"
    suspended = any(
        each.get("type") == "Suspended" and each.get("status") == "True" for each in status.get("conditions") or []
    )
    return "waits for quota" if suspended or not status else "is being started"
