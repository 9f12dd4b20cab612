"""Holds this node against the cluster file: driver, CUDA, container toolkit, GPUs."""

import re
import shutil
import socket
import subprocess
from pathlib import Path

from weft.cluster.specification import Pool, Specification
from weft.hardware.driver import Driver, loads, read_driver, version_tuple
from weft.hardware.findings import Finding

CDI = (Path("/etc/cdi"), Path("/var/run/cdi"))
RUNTIMES = (Path("/etc/docker/daemon.json"), Path("/etc/containerd/config.toml"), Path("/etc/crio/crio.conf.d"))


def findings(made: Specification, driver: Driver | None = None, host: str = "") -> list[Finding]:
    """What differs from the cluster file. A node is of the pool whose name its host name begins with (``h100-17``).

    Args:
        driver: what is there; read by default.
        host: this node's name; by default the host's.
    """
    host = host or socket.gethostname()
    pool = pool_of(made, host)
    if pool is not None and not pool.gpus:
        return [Finding("cluster-pool", "pass", f"{host} is of pool '{pool.name}', without GPUs", "", "Fit")]
    driver = driver or read_driver()
    found = [_driver(made, driver), *_cuda(made, driver), *_toolkit(made)]
    if pool is None:
        names = ", ".join(each.name for each in made.pools)
        what = f"{host} is of no pool of {made.path} ({names})"
        return [*found, Finding("cluster-pool", "warn", what, "name nodes POOL-NUMBER, or add the pool", "Fit")]
    return [*found, *_gpus(pool, driver)]


def pool_of(made: Specification, host: str) -> Pool | None:
    name, _, number = host.partition(".")[0].rpartition("-")
    return next(
        (pool for pool in made.pools if pool.name == name and number.isdecimal() and int(number) < pool.nodes.count),
        None,
    )


def _driver(made: Specification, driver: Driver) -> Finding:
    wanted = made.software.driver
    if not driver.version:
        return Finding(
            "cluster-driver",
            "fail",
            driver.problem or "there is no NVIDIA driver",
            f"install driver {wanted}".strip(),
            "Fit",
        )
    if not wanted or version_tuple(driver.version) == version_tuple(wanted):
        return Finding("cluster-driver", "pass", f"driver {driver.version}, as the cluster file says", "", "Fit")
    newer = version_tuple(driver.version) > version_tuple(wanted)
    fix = f"set software.driver in {made.path}" if newer else f"install driver {wanted}"
    return Finding(
        "cluster-driver",
        "warn" if newer else "fail",
        f"driver {driver.version}; the cluster file says {wanted}",
        fix,
        "Fit",
    )


def _cuda(made: Specification, driver: Driver) -> list[Finding]:
    wanted = made.software.cuda
    if not wanted or not driver.version:
        return []
    if loads(driver.version, wanted):
        return [Finding("cluster-cuda", "pass", f"driver {driver.version} loads CUDA {wanted}", "", "Fit")]
    return [
        Finding(
            "cluster-cuda",
            "fail",
            f"driver {driver.version} does not load CUDA {wanted}",
            "install a newer driver",
            "Fit",
        )
    ]


def toolkit_version(command: str = "nvidia-ctk") -> str:
    """The container toolkit's version; empty where there is none."""
    if not shutil.which(command):
        return ""
    try:
        done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=10, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"version:?\s+v?(\d+(?:\.\d+)+)", done.stdout)
    return found[1] if found else ""


def _toolkit(made: Specification) -> list[Finding]:
    wanted, there = made.software.toolkit, toolkit_version()
    if not there:
        fix = "install nvidia-container-toolkit" + (f" {wanted}" if wanted else "") + ", or let the GPU Operator do so"
        return [
            Finding(
                "cluster-toolkit",
                "fail" if wanted else "warn",
                "nvidia-ctk is not there: containers get no GPU",
                fix,
                "Container",
            )
        ]
    same = not wanted or version_tuple(there) == version_tuple(wanted)
    status, more = ("pass", "") if same else ("warn", f"; the cluster file says {wanted}")
    fix = "" if same else f"install nvidia-container-toolkit {wanted}"
    found = [Finding("cluster-toolkit", status, f"container toolkit {there}{more}", fix, "Container")]
    configured = any(folder.is_dir() and list(folder.glob("nvidia*.y*ml")) for folder in CDI) or any(
        map(_names_nvidia, RUNTIMES)
    )
    if not configured:
        what = "no container runtime is configured for NVIDIA's, and there is no CDI specification"
        found.append(
            Finding(
                "cluster-runtime",
                "fail",
                what,
                "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
                "Container",
            )
        )
    return found


def _names_nvidia(path: Path) -> bool:
    try:
        files = list(path.iterdir()) if path.is_dir() else [path]
        return any("nvidia" in file.read_text(errors="replace") for file in files)
    except OSError:
        return False


def _gpus(pool: Pool, driver: Driver) -> list[Finding]:
    there, wanted = len(driver.gpus), pool.nodes.gpus
    if there != wanted:
        what = f"{there} GPUs; the nodes of pool '{pool.name}' have {wanted}"
        return [Finding("cluster-gpus", "fail", what, "look for XID 79 in the kernel's log: weft health scan", "GPU")]
    product = pool.accelerator.product.replace("-", " ").casefold()
    others = sorted({gpu.name for gpu in driver.gpus if product and gpu.name.replace("-", " ").casefold() != product})
    if others:
        what = f"{', '.join(others)}; the cluster file says {pool.accelerator.product}"
        return [
            Finding(
                "cluster-gpus", "warn", what, "set product in the cluster file, or move the node to its pool", "GPU"
            )
        ]
    return [Finding("cluster-gpus", "pass", f"{there} GPUs, as pool '{pool.name}' has", "", "GPU")]
