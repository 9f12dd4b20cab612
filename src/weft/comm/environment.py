"""What a run's figures depend on beside its arguments: NCCL's and the transports' variables, /dev/shm, versions."""

import os
import shutil
import socket
from typing import Any

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMPI_MCA_", "PRTE_MCA_", "UCX_", "MPICH_", "FI_")
PASSWORDS = ("TOKEN", "SECRET", "PASSWORD", "KEY")
SHM = "/dev/shm"
SHM_PER_RANK = 64 << 20  # bytes: NCCL's and MPI's shared-memory buffers of a rank, with room


def variables() -> dict[str, str]:
    """The environment that changes how collectives run."""
    return {
        k: v
        for k, v in sorted(os.environ.items())
        if k.startswith(PREFIXES) and not any(word in k for word in PASSWORDS)
    }


def shm_free(path: str = SHM) -> int | None:
    """Free bytes of shared memory; None where there is none."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def shm_warning(ranks: int, free: int | None = None, path: str = SHM) -> str:
    """What to do where shared memory is too small for so many ranks; empty where it is not."""
    free = shm_free(path) if free is None else free
    if free is None or free >= ranks * SHM_PER_RANK:
        return ""
    return (
        f"{path} has {free >> 20} MiB free, {ranks} ranks may need {ranks * SHM_PER_RANK >> 20}: NCCL and MPI fail or fall "
        "back to sockets; start the container with --ipc=host or --shm-size=1g"
    )


def describe(backend: str) -> dict[str, Any]:
    """Recorded with each run."""
    import torch

    about: dict[str, Any] = {
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "environment": variables(),
        "shm_free_bytes": shm_free(),
    }
    if backend == "nccl":
        about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        about["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if backend == "mpi":
        from mpi4py import MPI

        about["mpi"] = MPI.Get_library_version().partition("\n")[0].partition("\0")[0][:80]
    return about
