"""The daemons of a Slurm in a temporary folder: munged, slurmctld, and a slurmd for each node, all on this machine."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

# Debian keeps daemons in sbin, which is not on everyone's PATH.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@contextmanager
def daemons_folder() -> Iterator[tuple[Path, dict[str, str], ExitStack]]:
    """A folder for ``slurm.conf`` with a key for munge, the environment of its commands, and what is called at the end, when
    every process of the cluster is ended and the folder removed."""
    folder = Path(tempfile.mkdtemp(prefix="weft-slurm-"))  # not pytest's: a socket's path has at most 107 letters
    configuration = f"{folder}/slurm.conf"
    with ExitStack() as ending:
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        ending.callback(end_all, f"SLURM_CONF={configuration}")
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(64))
        (folder / "munge.key").chmod(0o600)
        yield folder, {**os.environ, "PATH": PATH, "TZ": "UTC", "SLURM_CONF": configuration}, ending


def start(
    ending: ExitStack, folder: Path, environment: dict[str, str], nodes: list[str], seconds: float,
    before: Sequence[str] = (),
) -> Callable[[], str]:  # fmt: skip
    """Starts the daemons and waits until every node is idle; returns a function that gives the ends of their logs.

    Args:
        before: words before each command, such as ``nice``.

    Raises:
        TimeoutError: not idle within so many seconds, with the logs.
    """

    def daemon(name: str, *arguments: str) -> None:
        log = ending.enter_context((folder / f"{name}.log").open("w"))
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        ending.callback(end, subprocess.Popen([*before, *arguments], env=environment, **streams))

    def logs() -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log")))

    def idle() -> bool:
        command = [*before, "sinfo", "--noheader", "--Node", "--format=%N %T"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        states = {" ".join(line.split()) for line in done.stdout.splitlines()}
        return done.returncode == 0 and states == {f"{name} idle" for name in nodes}  # 1: slurmctld does not listen yet

    daemon(
        "munged", "munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
        f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munge.seed",
    )  # fmt: skip
    wait((folder / "munge.socket").exists, 10, logs)
    daemon("slurmctld", "slurmctld", "-D")
    for name in nodes:
        daemon(name, "slurmd", "-D", "-N", name)
    wait(idle, seconds, logs, pause=0.2)
    return logs


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
