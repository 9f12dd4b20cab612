"""The NVIDIA driver and what it can load. Standard library alone: set-up uses it before anything is installed."""

import csv
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from weft.hardware.findings import Finding, one_line
from weft.hardware.probe import ask_code

# The least Linux driver that loads programs of a CUDA major release ("minor version compatibility"):
# CUDA Toolkit Release Notes, and docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html.
LEAST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}

# PyTorch's own builds for drivers that cannot load its default one (CUDA 13 since 2.11). The upper bounds are the
# last release line of each: cu126 ends before 2.15 and has no Blackwell, cu128 ends before 2.12 (pytorch/pytorch
# issues 178665 and 190385). They also keep pip from preferring a newer CUDA 13 build on another index.
TORCH_SITE = "https://download.pytorch.org/whl/"
CU126 = (TORCH_SITE + "cu126", "torch>=2.10,<2.15")
CU128 = (TORCH_SITE + "cu128", "torch>=2.10,<2.12")

LEAST_CAPABILITY = (8, 0)  # weft's kernels declare sm_80 and up


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it; ``capability`` is (9, 0) for sm_90, or None where the tool is too old to say."""

    name: str
    memory_mib: int
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class Driver:
    """``version`` is None without a driver; ``problem`` says in words why a driver that is there gives no GPU."""

    version: str | None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    module_only: bool = False  # the host's kernel module shows through /proc, this container was given no GPU


def version_tuple(version: str) -> tuple[int, ...]:
    """``"580.65.06"`` → ``(580, 65, 6)``; what follows the first non-number is dropped."""
    head = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(part) for part in head.group().split(".")) if head else ()


def least_driver(cuda: str) -> str | None:
    """The least driver for a CUDA version such as ``"13.0"``; None for a major release that is not in the table."""
    return LEAST_DRIVER.get(version_tuple(cuda)[0]) if version_tuple(cuda) else None


def loads(driver: str, cuda: str) -> bool:
    """Whether this driver loads programs built with this CUDA. A CUDA newer than the table counts as its last row."""
    least = least_driver(cuda) or LEAST_DRIVER[max(LEAST_DRIVER)]
    return version_tuple(driver) >= version_tuple(least)


def fitting_build(driver: str, capability: tuple[int, int] | None) -> tuple[str | None, str] | None:
    """The newest PyTorch that a driver loads and a GPU runs: (index, requirement).

    The index is None for the default one. None altogether when the driver is too old for any PyTorch that weft
    supports (2.10 and later, CUDA 12.6 and later).
    """
    if not loads(driver, "12"):
        return None
    if capability is not None and capability < (7, 5):  # CUDA 13 dropped Maxwell, Pascal and Volta
        return CU126
    if loads(driver, "13"):
        return None, "torch>=2.10"
    if capability is not None and capability >= (10, 0):  # cu126 has no Blackwell
        return CU128
    return CU126


def find_nvidia_smi() -> str | None:
    """The path of nvidia-smi; under WSL2 it is outside PATH."""
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")


def module_version(text: str) -> str | None:
    """The version in the text of ``/proc/driver/nvidia/version``, of the open or the proprietary module."""
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d{3,}\.\d+(?:\.\d+)?)", text)
    return found.group(1) if found else None


def parse_gpus(text: str) -> tuple[str | None, tuple[Gpu, ...]]:
    """Driver version and GPUs from nvidia-smi's CSV (driver_version, name, memory.total[, compute_cap])."""
    version, gpus = None, []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) < 3 or not version_tuple(row[0]):
            continue
        version = row[0].strip()
        capability = version_tuple(row[3]) if len(row) > 3 else ()
        memory = row[2].strip()
        pair = (capability[0], capability[1]) if len(capability) == 2 else None
        gpus.append(Gpu(row[1].strip(), int(memory) if memory.isdigit() else 0, pair))
    return version, tuple(gpus)


def read_driver(timeout_s: float = 15.0) -> Driver:
    """Queries nvidia-smi, else ``/proc/driver/nvidia/version``. Never raises, never hangs."""
    proc = Path("/proc/driver/nvidia/version")
    try:
        module = module_version(proc.read_text(errors="replace"))
    except OSError:
        module = None
    smi = find_nvidia_smi()
    if smi is None:
        if module is None:
            return Driver(None)
        nodes = any(Path("/dev").glob("nvidia[0-9]*"))
        problem = "the kernel module is loaded, but nvidia-smi is not on PATH"
        return Driver(module, problem=problem, module_only=not nodes)
    problem = ""
    for fields in ("driver_version,name,memory.total,compute_cap", "driver_version,name,memory.total"):
        command = [smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, errors="replace"
            )
        except subprocess.TimeoutExpired:
            return Driver(module, problem=f"nvidia-smi did not answer within {timeout_s:.0f} s")
        except OSError as error:
            return Driver(module, problem=f"nvidia-smi does not run: {error}")
        if done.returncode == 0:
            version, gpus = parse_gpus(done.stdout)
            return Driver(version or module, gpus, "" if gpus else "nvidia-smi lists no GPU")
        problem = one_line(done.stdout + " " + done.stderr)
    return Driver(module, problem=problem or "nvidia-smi failed without a word")


# ---- findings


def driver_findings(driver: Driver) -> list[Finding]:
    """``nvidia-driver`` and ``gpus``."""
    return [_driver_finding(driver), _gpus_finding(driver)]


def _driver_finding(driver: Driver) -> Finding:
    name, group = "nvidia-driver", "GPU"
    if driver.version is None and not driver.problem:
        fix = (
            "nothing to do for work without a GPU; on a machine with one (Ubuntu): "
            "sudo apt-get install nvidia-driver-580-server && sudo reboot"
        )
        found = "no GPU: weft verifies in the interpreter, compiles, and measures the CPU"
        return Finding(name, "warn", found, fix, group)
    if driver.module_only:
        found = f"{driver.version} on the host, but this container was given no GPU"
        return Finding(name, "warn", found, "start the container with: docker run --gpus all …", group)
    if driver.problem and not driver.gpus:
        if "version mismatch" in driver.problem:
            fix = "sudo reboot: the driver was upgraded while its old kernel module was loaded"
        elif "PATH" in driver.problem:
            fix = 'put nvidia-smi on PATH, or in a container start it with NVIDIA_DRIVER_CAPABILITIES="compute,utility"'
        else:
            fix = "sudo modprobe nvidia && nvidia-smi; if that fails: sudo dmesg | grep -i -E 'nvrm|xid', then reboot"
        return Finding(name, "fail", f"{driver.version or 'installed'}: {driver.problem}", fix, group)
    return Finding(name, "pass", str(driver.version), "", group)


def _gpus_finding(driver: Driver) -> Finding:
    if not driver.gpus:
        if driver.version is None and not driver.problem:  # one warning about it is enough
            return Finding("gpus", "pass", "none", "", "GPU")
        return Finding("gpus", "warn", "none", "mend nvidia-driver above, then: nvidia-smi -L", "GPU")
    kinds: dict[Gpu, int] = {}
    for gpu in driver.gpus:
        kinds[gpu] = kinds.get(gpu, 0) + 1
    parts = []
    for gpu, number in kinds.items():
        arch = "unknown architecture" if gpu.capability is None else f"sm_{gpu.capability[0]}{gpu.capability[1]}"
        parts.append(f"{number} × {gpu.name}, {gpu.memory_mib / 1024:.0f} GiB, {arch}")
    found = "; ".join(parts)
    if all(g.capability is not None and g.capability < LEAST_CAPABILITY for g in driver.gpus):
        fix = "use a GPU of sm_80 or later (A100, RTX 3090 and newer); on this one weft hands over to PyTorch"
        return Finding("gpus", "warn", f"{found}: older than weft's kernels", fix, "GPU")
    return Finding("gpus", "pass", found, "", "GPU")


# cuInit can hang or crash on a broken driver, so it is called in a separate process.
_CUDA_DRIVER_PROBE = """
import ctypes
lib = ctypes.CDLL("libcuda.so.1")
version, count = ctypes.c_int(), ctypes.c_int()
lib.cuDriverGetVersion(ctypes.byref(version))
code = lib.cuInit(0)
if code == 0:
    lib.cuDeviceGetCount(ctypes.byref(count))
answer(version=version.value, code=code, count=count.value)
"""


def cuda_driver_finding(driver: Driver, timeout_s: float) -> Finding:
    """``cuda-driver-api``: whether libcuda loads, which CUDA it speaks, and whether ``cuInit`` succeeds."""
    name, group = "cuda-driver-api", "GPU"
    reply = ask_code(_CUDA_DRIVER_PROBE, timeout_s)
    if reply.problem:
        missing = "libcuda.so.1" in reply.problem
        if missing and not driver.gpus:
            return Finding(name, "pass", "libcuda is not installed (no GPU)", "", group)
        fix = "sudo dmesg | grep -i -E 'nvrm|xid'; a GPU that hangs or crashes in cuInit needs a reboot"
        if missing:
            fix = "sudo ldconfig; in a container start it with: docker run --gpus all …"
        return Finding(name, "fail" if driver.gpus else "warn", f"libcuda: {reply.problem}", fix, group)
    version, code, count = (reply.value[key] for key in ("version", "code", "count"))
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if code == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = len(driver.gpus) - count
        note = f", {hidden} hidden by CUDA_VISIBLE_DEVICES={visible}" if hidden > 0 and visible is not None else ""
        return Finding(name, "pass", f"{cuda}, GPUs visible: {count}{note}", "", group)
    if code == 100 and os.environ.get("CUDA_VISIBLE_DEVICES") is not None:  # CUDA_ERROR_NO_DEVICE
        found = f"{cuda}, but CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides every GPU"
        return Finding(name, "warn", found, "unset CUDA_VISIBLE_DEVICES", group)
    fix = "sudo modprobe nvidia_uvm; on an NVSwitch server also: sudo systemctl start nvidia-fabricmanager"
    return Finding(name, "fail" if driver.gpus else "warn", f"{cuda}, but cuInit returns {code}", fix, group)
