"""The machine around the GPU: system, tools, room on disk and in memory. Standard library alone."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from weft.hardware.findings import Finding, guarded

GIB = 2**30


def system_findings(has_gpu: bool) -> list[Finding]:
    """``operating-system``, ``python``, ``disk-*``, ``memory``, ``shared-memory``, ``locked-memory``, ``compiler``."""
    checks: dict[str, Callable[[], Finding]] = {
        "operating-system": operating_system,
        "python": python_version,
        "disk-home": lambda: disk("disk-home", Path.home()),
        "disk-here": lambda: disk("disk-here", Path.cwd()),
        "memory": memory,
        "shared-memory": lambda: shared_memory(has_gpu),
        "locked-memory": locked_memory,
        "compiler": compiler,
    }
    return [finding for name, check in checks.items() for finding in guarded(name, "System", check)]


def is_wsl2() -> bool:
    """Whether this Linux is Windows Subsystem for Linux 2, whose driver is Windows' own."""
    release = platform.release().lower()
    return "microsoft" in release and "wsl1" not in release


def operating_system() -> Finding:
    """``operating-system``: Linux (and WSL2) is weft's home."""
    name, group = "operating-system", "System"
    found = f"{platform.system()} {platform.release()} on {platform.machine()}, {os.cpu_count()} CPUs"
    if is_wsl2():
        found += ", WSL2: the driver is Windows' own; timings vary more than on Linux"
    if platform.system() != "Linux":
        fix = "for kernels use Linux or WSL2 (wsl --install); weft cluster, deploy and reports work here"
        return Finding(name, "warn", found, fix, group)
    return Finding(name, "pass", found, "", group)


def python_version() -> Finding:
    """``python``: 3.10 or later."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < (3, 10):  # noqa: UP036  (the doctor itself also runs on 3.8)
        fix = "sudo apt-get install python3.12 python3.12-venv, then: make setup PYTHON=python3.12"
        return Finding("python", "fail", f"{found}: weft needs 3.10", fix, "System")
    return Finding("python", "pass", found, "", "System")


def disk(name: str, folder: Path) -> Finding:
    """Free room on the file system of a folder: a CUDA build of PyTorch with its caches takes about 10 GB."""
    free = shutil.disk_usage(folder).free / 1e9
    found = f"{free:.0f} GB free at {folder}"
    fix = "free some room (pip cache purge; docker system prune) or move the caches: scripts/remote_setup.sh --local"
    if free < 2:
        return Finding(name, "fail", found, fix, "System")
    return Finding(name, "warn" if free < 20 else "pass", found, fix if free < 20 else "", "System")


def memory_limit() -> int | None:
    """The cgroup's memory limit in bytes, version 2 or 1; None without one."""
    own = Path("/proc/self/cgroup").read_text() if Path("/proc/self/cgroup").exists() else ""
    paths = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    for line in own.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths.append(Path("/sys/fs/cgroup" + path) / "memory.max")
        elif "memory" in controllers.split(","):
            paths.append(Path("/sys/fs/cgroup/memory" + path) / "memory.limit_in_bytes")
    limits = []
    for file in paths:
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    smallest = min(limits, default=2**62)
    return smallest if smallest < 2**60 else None  # version 1 writes "no limit" as a huge number


def memory() -> Finding:
    """``memory``: the machine's, or the cgroup's limit where that is less."""
    name, group = "memory", "System"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    usable, found = total, f"{total / GIB:.0f} GiB"
    if limit is not None and limit < total:
        usable, found = limit, f"{limit / GIB:.1f} GiB (limit of this container or cgroup; the machine has {found})"
    if usable >= 8 * GIB:
        return Finding(name, "pass", found, "", group)
    fix = (
        "give the container or machine more: docker run --memory 16g …; or fewer workers: make test PYTEST_ARGS='-n 1'"
    )
    return Finding(name, "fail" if usable < 2 * GIB else "warn", found, fix, group)


def shared_memory(has_gpu: bool) -> Finding:
    """``shared-memory``: /dev/shm carries data loaders and NCCL; Docker gives 64 MiB."""
    name, group, path = "shared-memory", "System", Path("/dev/shm")
    if not path.is_dir():
        found, size = "no /dev/shm", 0
    else:
        size = shutil.disk_usage(path).total
        found = f"/dev/shm is {size / GIB:.1f} GiB"
    if size < GIB:
        fix = "docker run --ipc=host … (or --shm-size=16g); outside containers: sudo mount -o remount,size=16G /dev/shm"
        needs = "NCCL and data loaders need more" if has_gpu else "data loaders need more"
        return Finding(name, "warn", f"{found}: {needs}", fix, group)
    return Finding(name, "pass", found, "", group)


def locked_memory() -> Finding:
    """``locked-memory``: RDMA pins memory under ``ulimit -l``; without an RDMA card the limit does not matter."""
    import resource  # not on Windows

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.0f} MiB"
    rdma = any(Path("/sys/class/infiniband").glob("*"))
    if rdma and limit != resource.RLIM_INFINITY:
        fix = "docker run --ulimit memlock=-1 …; or put '* - memlock unlimited' in /etc/security/limits.conf"
        return Finding("locked-memory", "warn", f"{found}: RDMA needs unlimited", fix, "System")
    return Finding("locked-memory", "pass", found if rdma else f"{found} (no RDMA card)", "", "System")


# ---- tools


def tool_findings(has_gpu: bool) -> list[Finding]:
    """``cuda-toolkit``, ``compute-sanitizer`` and ``nsight-compute``."""
    return [
        *guarded("cuda-toolkit", "GPU", cuda_toolkit),
        *guarded("compute-sanitizer", "GPU", lambda: gpu_tool("compute-sanitizer", "compute-sanitizer", has_gpu)),
        *guarded("nsight-compute", "GPU", lambda: gpu_tool("nsight-compute", "ncu", has_gpu)),
    ]


def version_of(path: str) -> str:
    """What ``path --version`` calls itself, or the reason why it says nothing."""
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return "no answer to --version within 10 s"
    except OSError as error:
        return f"does not run: {error.strerror}"
    numbers = re.findall(r"\d+\.\d+(?:\.\d+)*", done.stdout + done.stderr)
    release = re.search(r"release (\d+\.\d+)", done.stdout)
    return release.group(1) if release else (numbers[0] if numbers else "version unknown")


def find_cuda_tool(tool: str) -> str | None:
    """A tool of the CUDA toolkit: on PATH, below CUDA_HOME, or below /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which(tool) or next(
        (found for home in homes if home and (found := shutil.which(tool, path=str(Path(home, "bin"))))), None
    )


def compiler() -> Finding:
    """``compiler``: Triton builds its launcher with a C compiler, torch.compile its CPU code with a C++ one."""
    c = next(filter(None, map(shutil.which, [os.environ.get("CC") or "cc", "gcc", "clang"])), None)
    cxx = next(filter(None, map(shutil.which, [os.environ.get("CXX") or "c++", "g++", "clang++"])), None)
    found = "; ".join(f"{Path(path).name} {version_of(path)}" for path in (c, cxx) if path)
    if c and cxx:
        return Finding("compiler", "pass", found, "", "System")
    missing = "no C++ compiler" if c else "no C compiler"
    fix = "sudo apt-get install build-essential (or conda install -c conda-forge gxx)"
    return Finding("compiler", "warn", f"{found + ', ' if found else ''}{missing}", fix, "System")


def cuda_toolkit() -> Finding:
    """``cuda-toolkit``: not required, since CUDA C++ is compiled with NVRTC."""
    nvcc = find_cuda_tool("nvcc")
    if nvcc is None:
        return Finding("cuda-toolkit", "pass", "not installed; weft compiles CUDA C++ with NVRTC", "", "GPU")
    return Finding("cuda-toolkit", "pass", f"nvcc {version_of(nvcc)} at {nvcc}", "", "GPU")


def gpu_tool(name: str, program: str, has_gpu: bool) -> Finding:
    """A tool that only matters where there is a GPU."""
    path = find_cuda_tool(program)
    if path:
        return Finding(name, "pass", f"{version_of(path)} at {path}", "", "GPU")
    if not has_gpu:
        return Finding(name, "pass", "not installed (needs a GPU to be of use)", "", "GPU")
    package, purpose = {
        "compute-sanitizer": ("cuda-sanitizer-13-0", "make gpu-test SANITIZE=memcheck needs it"),
        "ncu": ("cuda-nsight-compute-13-0", "a kernel's hardware counters need it"),
    }[program]
    fix = f"sudo apt-get install {package} (NVIDIA's CUDA repository), or put its folder on PATH"
    return Finding(name, "warn", f"not found: {purpose}", fix, "GPU")
