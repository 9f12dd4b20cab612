"""What this process may do: containers, device files, cache folders, profiling counters. Standard library alone."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from weft.hardware.findings import Finding, guarded
from weft.hardware.machine import is_wsl2, version_of

CAP_SYS_ADMIN = 21  # bit in CapEff


def container_findings(has_gpu: bool) -> list[Finding]:
    """``container``, ``container-engine`` and ``nvidia-container-toolkit``."""
    inside = container_kind()
    where = Finding("container", "pass", f"inside {inside}" if inside else "none", "", "Container")
    engines = [(engine, path) for engine in ("docker", "podman") if (path := shutil.which(engine))]
    found = "; ".join(f"{engine} {version_of(path)}" for engine, path in engines) or "not installed"
    return [where, Finding("container-engine", "pass", found, "", "Container"), _toolkit(has_gpu, bool(engines))]


def container_kind() -> str | None:
    """The kind of container that this process runs in, as far as it can be detected; None outside."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "a Kubernetes pod"
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "Apptainer"
    if Path("/run/.containerenv").exists():
        return "podman"
    if Path("/.dockerenv").exists():
        return "docker"
    try:
        control = Path("/proc/1/cgroup").read_text()
    except OSError:
        return None
    match = re.search(r"docker|kubepods|lxc|containerd", control)
    return f"a container ({match.group()})" if match else None


def _toolkit(has_gpu: bool, engine: bool) -> Finding:
    name, group = "nvidia-container-toolkit", "Container"
    path = shutil.which("nvidia-ctk")
    if path:
        return Finding(name, "pass", version_of(path), "", group)
    if has_gpu and engine and container_kind() is None:
        fix = (
            "sudo apt-get install nvidia-container-toolkit (NVIDIA's repository), then: "
            "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
        )
        return Finding(name, "warn", "not installed: containers get no GPU", fix, group)
    return Finding(name, "pass", "not installed", "", group)


# ---- permissions


def permission_findings(has_gpu: bool) -> list[Finding]:
    """``device-files``, ``triton-cache``, ``user-cache`` and ``profiling-counters``."""
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    checks: dict[str, Callable[[], Finding]] = {
        "device-files": lambda: device_files(has_gpu),
        "triton-cache": lambda: writable("triton-cache", triton, "TRITON_CACHE_DIR"),
        "user-cache": lambda: writable("user-cache", cache, "XDG_CACHE_HOME"),
        "profiling-counters": lambda: profiling_counters(has_gpu),
    }
    return [finding for name, check in checks.items() for finding in guarded(name, "Permissions", check)]


def device_files(has_gpu: bool) -> Finding:
    """``device-files``: /dev/nvidia* (or WSL2's /dev/dxg) must be readable and writable by this user."""
    name, group = "device-files", "Permissions"
    pattern = "dxg" if is_wsl2() else "nvidia[0-9]*"
    nodes = sorted(Path("/dev").glob(pattern))
    nodes += [path for path in (Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm")) if path.exists()]
    if not nodes:
        if has_gpu:
            fix = "sudo nvidia-modprobe -u -c=0; in a container start it with: docker run --gpus all …"
            return Finding(name, "warn", f"no /dev/{pattern}", fix, group)
        return Finding(name, "pass", "none (no GPU)", "", group)
    closed = [str(path) for path in nodes if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        fix = "sudo usermod -aG video,render $USER, then log in again; or sudo chmod 666 /dev/nvidia*"
        return Finding(name, "fail", f"not open to this user: {', '.join(closed)}", fix, group)
    return Finding(name, "pass", f"{len(nodes)} open to this user", "", group)


def writable(name: str, folder: Path, variable: str) -> Finding:
    """Whether a file can be made in a folder, or in the nearest one above it that exists (nothing is left behind)."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        fix = f"sudo chown -R $USER {folder}; or choose another folder: export {variable}=/path/with/room"
        return Finding(name, "fail", f"{folder} cannot be written: {error.strerror}", fix, "Permissions")
    return Finding(name, "pass", str(folder), "", "Permissions")


def profiling_counters(has_gpu: bool) -> Finding:
    """``profiling-counters``: Nsight Compute needs hardware counters, which many drivers keep for administrators."""
    name, group = "profiling-counters", "Permissions"
    try:
        params = Path("/proc/driver/nvidia/params").read_text()
    except OSError:
        found = "unknown: the driver does not say" if has_gpu else "no NVIDIA driver"
        return Finding(name, "pass", found, "", group)
    if not restricted(params):
        return Finding(name, "pass", "open to every user", "", group)
    if may_administer(Path("/proc/self/status").read_text()):
        return Finding(name, "pass", "for administrators, which this process is", "", group)
    fix = (
        "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf, "
        "then sudo update-initramfs -u && sudo reboot; in a container: docker run --cap-add=SYS_ADMIN …"
    )
    found = "for administrators only: Nsight Compute will say ERR_NVGPUCTRPERM"
    return Finding(name, "warn" if has_gpu else "pass", found, fix if has_gpu else "", group)


def restricted(params: str) -> bool:
    """Whether the text of /proc/driver/nvidia/params keeps the counters for administrators."""
    found = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", params, re.MULTILINE)
    return found is not None and found.group(1) != "0"


def may_administer(status: str) -> bool:
    """Whether the text of /proc/self/status shows CAP_SYS_ADMIN; root in a container often lacks it."""
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.MULTILINE)
    return found is not None and bool(int(found.group(1), 16) >> CAP_SYS_ADMIN & 1)
