"""Readings of a real card against nvidia-smi's."""

import csv
import subprocess

import pytest

from weft.hardware.device import query
from weft.hardware.telemetry.reader import read_once

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
pytestmark = pytest.mark.gpu

SAME = {  # what does not change between two readings: field → nvidia-smi's
    "index": "index", "uuid": "uuid", "name": "name", "pci": "pci.bus_id", "vbios": "vbios_version",
    "compute_capability": "compute_cap", "max_sm_clock_mhz": "clocks.max.sm", "max_memory_clock_mhz": "clocks.max.memory",
    "power_limit_w": "enforced.power.limit", "max_pcie_width": "pcie.link.width.max",
    "ecc_uncorrected_volatile": "ecc.errors.uncorrected.volatile.total",
}  # fmt: skip
NEAR = {  # field → nvidia-smi's, and how far apart two readings a moment apart may be
    "temperature_c": ("temperature.gpu", 5), "power_w": ("power.draw", 150), "sm_clock_mhz": ("clocks.sm", 1000),
    "memory_clock_mhz": ("clocks.mem", 200),
}  # fmt: skip


def smi(*names: str) -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    rows = csv.reader(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    return [dict(zip(names, map(str.strip, row), strict=True)) for row in rows]


def test_readings_are_nvidia_smis():
    found = read_once(pause_s=0.2)
    rows = smi(*SAME.values(), *(theirs for theirs, _ in NEAR.values()), "memory.total", "memory.used")
    assert found.problem == "" and len(found.gpus) == len(rows) > 0
    for gpu, row in zip(found.gpus, rows, strict=True):
        for name, theirs in SAME.items():
            ours = getattr(gpu, name)
            if ours is not None and "N/A" not in row[theirs]:
                assert str(ours) == row[theirs] or float(ours) == float(row[theirs]), name
        for name, (theirs, most) in NEAR.items():
            if "N/A" not in row[theirs]:
                assert abs(getattr(gpu, name) - float(row[theirs])) <= most, name
        assert abs(gpu.memory_total_bytes / 2**20 - float(row["memory.total"])) <= 1
        assert (
            abs(gpu.memory_used_bytes / 2**20 - float(row["memory.used"])) <= 2048
        )  # of other programs, a moment later


def test_the_device_is_what_pytorch_says():
    import torch

    expected = torch.cuda.get_device_properties(0)
    devices = [d for d in query().devices if d.kind == "gpu" and d.attributes]
    assert any(
        (d.multiprocessors, d.attributes["38"], d.compute_capability)
        == (expected.multi_processor_count, expected.L2_cache_size, f"{expected.major}.{expected.minor}")
        and all(rate > 0 for rate in d.peak.values())
        for d in devices
    )
