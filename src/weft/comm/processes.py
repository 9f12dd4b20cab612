"""Starts the ranks of a run on this machine, watches them, and ends them all when one fails."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from weft.comm.checked import CollectiveFailed, last_state
from weft.comm.ranks import STARTED_BY_WEFT
from weft.comm.settings import Settings
from weft.comm.worker import end_with_parent

LOOK_S = 0.05
GRACE_S = 2.0  # for the other ranks to say what they saw
TAIL = 12  # lines of what a failed rank said last


def start(
    settings: Settings,
    names: list[str],
    backend: str,
    ranks: int,
    *,
    port: int = 0,
    on_about: Callable[[dict[str, Any]], None],
    on_record: Callable[[dict[str, Any]], None],
) -> None:
    """Runs ``ranks`` processes and calls ``on_about`` and ``on_record`` with what rank 0 measures, as it comes. When it
    returns or raises, no process of the run is left.

    Raises:
        CollectiveFailed: a rank failed, died or hung: which, and in which collective.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import torch.distributed as dist

    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise CollectiveFailed(
            f"port {port} is taken on this machine: leave --port out, or name a free one"
            if "EADDRINUSE" in str(error)
            else str(error).partition("\n")[0]
        ) from None
    given = {"settings": asdict(settings), "names": names, "backend": backend}
    env = dict(os.environ)
    env |= {
        STARTED_BY_WEFT: json.dumps(given),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), env.get("PYTHONPATH")))),
    }
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine, whose name need not resolve
    with tempfile.TemporaryDirectory(prefix="weft-comm-") as folder:
        logs = [Path(folder) / f"rank-{r}.log" for r in range(1 if backend == "mpi" else ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for r, log in enumerate(logs):
                command, more = _command(backend, ranks, r)
                with log.open("wb") as said:
                    processes.append(
                        subprocess.Popen(
                            command, env=env | more, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                            start_new_session=True,
                            # a rank asks for it itself, mpiexec does not
                            preexec_fn=partial(end_with_parent, signal.SIGTERM) if backend == "mpi" else None,
                        )
                    )  # fmt: skip
            _watch(processes, store, on_about, on_record)
            if any(p.returncode for p in processes):
                raise CollectiveFailed(_why(processes, store, ranks, logs))
        finally:
            _end(processes)
        for log in logs:
            sys.stderr.write(log.read_text(errors="replace"))  # NCCL_DEBUG and the like


def _command(backend: str, ranks: int, rank: int) -> tuple[list[str], dict[str, str]]:
    """The command of a process, and its variables."""
    python = [sys.executable, "-m", "weft.comm.worker"]
    if backend != "mpi":
        return python, {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    from weft.comm import mpi_transport

    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    mpiexec = shutil.which("mpiexec", path=beside)
    if mpiexec is None:
        raise FileNotFoundError(f"the backend mpi needs mpiexec on the PATH: {mpi_transport.INSTALL}")
    # Variables, since Open MPI's flags are errors to MPICH.
    open_mpi = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    if ranks > (os.cpu_count() or 1):
        open_mpi["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else waiting ranks keep working ones from their core
    return [mpiexec, "-n", str(ranks), *python], open_mpi


def _watch(
    processes: list["subprocess.Popen[bytes]"],
    store: Any,
    on_about: Callable[[dict[str, Any]], None],
    on_record: Callable[[dict[str, Any]], None],
) -> None:
    """Until all have ended, or one has failed and the others had time to say what they saw."""
    records, told, failed_at = 0, False, None
    while True:
        running = [p for p in processes if p.poll() is None]
        if not told and store.check(["about"]):
            told = True
            on_about(json.loads(store.get("about")))
        while told and store.check([f"record/{records}"]):
            on_record(json.loads(store.get(f"record/{records}")))
            records += 1
        if failed_at is None and any(p.returncode for p in processes):
            failed_at = time.monotonic()
        if not running or (failed_at is not None and time.monotonic() - failed_at > GRACE_S):
            return
        time.sleep(LOOK_S)


def _why(processes: list["subprocess.Popen[bytes]"], store: Any, ranks: int, logs: list[Path]) -> str:
    """The first cause: a rank that died before what the others saw, then what ranks themselves told."""
    told = {r: store.get(f"failed/{r}").decode() for r in range(ranks) if store.check([f"failed/{r}"])}
    by_mpi = len(logs) < ranks
    died = _died_of_mpi(store, ranks, logs[0]) if by_mpi else {}
    if not by_mpi:
        died = {r: p.returncode for r, p in enumerate(processes) if p.returncode and r not in told}
        if told:  # those that ended because another one told have nothing to tell
            died = {r: status for r, status in died.items() if status < 0}
    lines = []
    for r, status in died.items():
        how = f"was ended by {_signal(-status)}" if status < 0 else f"ended with status {status}"
        lines.append(f"rank {r} {how}; it {last_state(store, r)}")
        if status > 0:
            lines += logs[0 if by_mpi else r].read_text(errors="replace").splitlines()[-TAIL:]
    if not lines:
        lines = list(dict.fromkeys(told.values()))
    if not lines:
        lines = ["the run failed:", *logs[0].read_text(errors="replace").splitlines()[-TAIL:]]
    return "\n".join(lines)


def _died_of_mpi(store: Any, ranks: int, log: Path) -> dict[int, int]:
    """Ranks that mpiexec says a signal ended: Open MPI's and MPICH's words, which name the process."""
    text = log.read_text(errors="replace")
    pids = {int(store.get(f"pid/{r}")): r for r in range(ranks) if store.check([f"pid/{r}"])}
    found = re.findall(r"PID (\d+).{0,200}?(?:signal|EXIT CODE:)\s+(\d+)", text, re.DOTALL)
    return {pids[int(pid)]: -int(number) for pid, number in found if int(pid) in pids}


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def _end(processes: list["subprocess.Popen[bytes]"]) -> None:
    """Ends what still runs: SIGTERM for mpiexec's sake, which ends its ranks, then SIGKILL to each session."""
    for how, patience_s in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0)):
        for p in processes:
            if p.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, how)
        until = time.monotonic() + patience_s
        for p in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(max(until - time.monotonic(), 0.01))
