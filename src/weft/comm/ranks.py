"""Who this process is in a run, whatever started it: torchrun, mpirun, srun, or ``weft comm`` itself."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from weft.comm.checked import CollectiveFailed

PORT = 29500  # PyTorch's usual one
STARTED_BY_WEFT = "WEFT_COMM_STARTED"


@dataclass(frozen=True)
class Ranks:
    """``rank`` of ``size``; ``local_rank`` on this host; ``by``: what started it."""

    rank: int
    size: int
    local_rank: int
    by: str


def started(env: Mapping[str, str] | None = None) -> Ranks | None:
    """This process's place in a run that a launcher started, or None."""
    env = os.environ if env is None else env
    # an allocation's own shell has SLURM_PROCID too, a step's tasks have SLURM_STEP_NUM_TASKS
    for by, rank, size, local, needs in (
        ("weft" if STARTED_BY_WEFT in env else "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "RANK"),
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ""),
        ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ""),
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID"),
    ):
        if rank in env and size in env and (not needs or needs in env):
            return Ranks(_number(env, rank), _number(env, size), _number(env, local if local in env else rank), by)
    return None


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"the variable {name} is '{env[name]}'; expected a number, as a launcher sets it") from None


def rendezvous(ranks: Ranks, deadline_s: float, mpi: Any = None) -> Any:
    """The store that all ranks share: torchrun's, that of the ``weft comm`` which started them, or rank 0's.

    Args:
        mpi: MPI's communicator, through which rank 0 then tells its address.

    Raises:
        CollectiveFailed: the address cannot be reached, the port is taken, or a rank does not come.
    """
    import torch.distributed as dist

    serves = ranks.rank == 0
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ and os.environ.get("MASTER_PORT"):
        serves = os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True" and serves
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number(os.environ, "MASTER_PORT")
    elif mpi is not None:
        if serves:
            store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            mpi.bcast((socket.gethostname() if _several_hosts(ranks) else "127.0.0.1", store.port))
            return _all_here(store, ranks, deadline_s, "this run's store")
        serves = False
        host, port = mpi.bcast(None)
    else:
        host = _master(ranks)
        port = _number(os.environ, "MASTER_PORT") if os.environ.get("MASTER_PORT") else PORT
    where = f"{host}:{port}"
    if not serves:
        _reach(host, port, deadline_s, ranks)
    try:
        store = dist.TCPStore(
            host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=deadline_s)
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise CollectiveFailed(
                f"port {port} of the rendezvous is taken on {socket.gethostname()}: another run has it; "
                "set MASTER_PORT to a free one on every rank"
            ) from None
        raise CollectiveFailed(
            f"rank {ranks.rank} cannot open the rendezvous at {where}: {_first_line(error)}"
        ) from None
    return _all_here(store, ranks, deadline_s, where)


def _several_hosts(ranks: Ranks) -> bool:
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS")
    return local is not None and int(local) < ranks.size


def _master(ranks: Ranks) -> str:
    """The host of rank 0."""
    if given := os.environ.get("MASTER_ADDR"):
        return given
    nodes = os.environ.get("SLURM_STEP_NODELIST")
    if ranks.by == "srun" and nodes and int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) > 1:
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            raise CollectiveFailed(f"no host for the rendezvous: {' '.join(command)} failed; set MASTER_ADDR") from None
    if _several_hosts(ranks):
        raise CollectiveFailed(
            "ranks are on several hosts: set MASTER_ADDR to the host of rank 0 (mpirun -x MASTER_ADDR)"
        )
    return "127.0.0.1"


def _reach(host: str, port: int, deadline_s: float, ranks: Ranks) -> None:
    """Waits until something listens there: PyTorch's own client says what failed in a page."""
    until, why = time.monotonic() + deadline_s, ""
    while time.monotonic() < until:
        try:
            with socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.1)):
                return
        except socket.gaierror as error:
            why = f"no host of that name ({error.strerror})"
            break
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(0.1)
    raise CollectiveFailed(
        f"rank {ranks.rank} cannot reach the rendezvous at {host}:{port}: {why}; "
        "is rank 0 there, does MASTER_ADDR name its host, does a firewall close the port?"
    )


def _all_here(store: Any, ranks: Ranks, deadline_s: float, where: str) -> Any:
    """Waits until every rank has come.

    Raises:
        CollectiveFailed: a rank did not come; names it.
    """
    store.set_timeout(timedelta(seconds=deadline_s))
    store.set(f"here/{ranks.rank}", socket.gethostname())
    keys = [f"here/{r}" for r in range(ranks.size)]
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=deadline_s))
        return store
    try:
        missing = [str(r) for r, key in enumerate(keys) if not store.check([key])]
    except RuntimeError as error:
        raise CollectiveFailed(f"rank {ranks.rank}: {where} is no rendezvous: {_first_line(error)}") from None
    raise CollectiveFailed(
        f"rank(s) {', '.join(missing)} of {ranks.size} did not come to the rendezvous at {where} within {deadline_s:g} s"
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
