"""What the machine is: names, driver, clocks, theoretical bandwidth, versions. Missing parts are left out, not guessed.

What the numbers mean, by generation of GPUs: docs/notes/learn/architecture.en.md.
"""

import functools
import importlib.metadata
import os
import platform
import subprocess
from typing import Any

from weft import records

PACKAGES = ("torch", "triton", "numpy", "liger-kernel", "quack-kernels", "cuda-bindings")


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what a measurement depends on."""
    import weft

    found = {"weft": weft.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" in found:
        import torch

        if torch.version.cuda:
            found["cuda"] = torch.version.cuda
    return found


def has_gpu() -> bool:
    """Whether PyTorch is installed and sees a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def choose_device() -> str:
    """``cuda`` when PyTorch sees a GPU; else ``cpu``, with Triton's interpreter switched on before kernels are imported."""
    if has_gpu() and not os.environ.get("TRITON_INTERPRET"):
        return "cuda"
    os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"


def context(device: str, run: str = "") -> dict[str, Any]:
    """The fields of a record that name machine, versions, commit, run and time."""
    return {
        "device": device,
        "gpu": name(device),
        "machine": state(device),
        "versions": versions(),
        "commit": records.commit(),
        "run": run,
        "time": records.now(),
    }


@functools.cache
def name(device: str) -> str:
    """The GPU's name, or the processor's with its cores."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return f"{_processor()} ({os.cpu_count()} cores)"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


SMI = {
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "throttle_reasons": "clocks_event_reasons.active",
    "ecc": "ecc.mode.current",
}


def state(device: str) -> dict[str, Any]:
    """Driver, clocks, power and throttle reasons as they are now (empty where nvidia-smi does not answer)."""
    if device != "cuda":
        return {"system": platform.platform()}
    import torch

    index = torch.cuda.current_device()
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI.values())}", "--format=csv,noheader,nounits", f"--id={index}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [v.strip() for v in answer.stdout.strip().split(",")]
    return dict(zip(SMI, values, strict=True)) if len(values) == len(SMI) else {}


@functools.cache
def theoretical_bandwidth() -> float:
    """Bytes per second of the memory bus: width × clock × 2 (double data rate). 0 where the driver does not say."""
    import torch

    try:
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute
        device = torch.cuda.current_device()
        values = []
        for wanted in (
            attribute.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,  # kHz
            attribute.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,  # bits
        ):
            code, value = driver.cuDeviceGetAttribute(wanted, device)
            if int(code):
                return 0.0
            values.append(value)
    except ImportError:
        return 0.0
    return values[0] * 1e3 * 2 * values[1] / 8


def machine(device: str) -> dict[str, Any]:
    """The machine in words, for the report."""
    about: dict[str, Any] = {"name": name(device), "device": device, "processor": name("cpu"), **state(device)}
    about["versions"] = versions()
    if device == "cuda":
        import torch

        p = torch.cuda.get_device_properties(torch.cuda.current_device())
        about |= {
            "compute_capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "memory_gib": round(p.total_memory / 2**30, 1),
            "l2_mib": round(p.L2_cache_size / 2**20, 1),
            "theoretical_bandwidth_tb_s": round(theoretical_bandwidth() / 1e12, 2) or None,
        }
    return about
