"""Readings of NVML: right, each field by itself, and never stuck with the driver."""

import os
import queue
import random
import re
import subprocess
import time

import pytest
from fake_nvml import FUNCTION_NOT_FOUND, NO_PERMISSION, NOT_SUPPORTED, SOURCE, VERSION_MISMATCH

from weft.hardware.telemetry.reader import Reader, read_once

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")


@pytest.fixture
def reader():
    with Reader(timeout_s=10.0) as reader:
        yield reader


def test_reads_what_the_gpus_say(fake_nvml):
    fake_nvml.set(
        1, temperature_c=91, power_mw=699_500, throttle=0x44, rows_pending=1, ecc_uncorrected=3, recovery_action=1
    )
    fake_nvml.set(nvlink_tx_kib=2**40, pcie_tx_bytes=2**50)
    fake_nvml.process(1, os.getpid(), mib=1234)
    fake_nvml.mig(0, "1g.10gb", 16, 9856)
    fake_nvml.mig(0, "3g.40gb", 60, 40448)
    fake_nvml.process(0, 4321, mib=100, instance=1)
    found = read_once(pause_s=0.01)
    assert (found.driver, found.cuda, found.problem) == ("580.65.06", "13.0", "")
    first, second = found.gpus
    assert (first.index, first.uuid[-3:], first.name, first.pci) == (
        0,
        "000",
        "NVIDIA H100 80GB HBM3",
        "00000000:10:00.0",
    )
    assert (second.temperature_c, second.power_w, second.power_limit_w) == (91, 699.5, 700.0)
    assert second.throttle_reasons == ["sw_power_cap", "hw_thermal_slowdown"] == second.slowed
    assert (first.throttle_reasons, first.slowed) == (["gpu_idle"], [])
    assert (second.rows_pending, second.rows_failed, second.ecc_uncorrected_volatile) == (True, False, 3)
    assert (second.recovery_action, first.recovery_action) == ("reset", "none")
    assert (second.nvlink_tx_kib, second.pcie_tx_bytes, second.nvlinks_active) == (2**40, 2**50, 18)
    assert second.memory_used_bytes == 1234 * 2**20 and second.memory_reserved_bytes == 512 * 2**20
    assert [(p.pid, p.memory_bytes, p.gpu_instance) for p in second.processes] == [(os.getpid(), 1234 * 2**20, None)]
    assert (second.compute_capability, second.max_sm_clock_mhz, second.memory_bus_bits) == ("9.0", 1980, 5120)
    assert (second.tensor_active, second.graphics_active) == (0.5, 0.1)
    assert [(m.profile, m.gpu_instance, m.multiprocessors) for m in first.mig] == [
        ("1g.10gb", 0, 16),
        ("3g.40gb", 1, 60),
    ]
    assert first.mig[1].memory_used_bytes == 100 * 2**20 and first.mig[1].tensor_active == 0.5
    assert first.processes[0].gpu_instance == 1 and second.mig == [] and second.missing == {}


@pytest.mark.parametrize(("function", "code", "fields", "said"), [
    ("nvmlDeviceGetPowerUsage", NOT_SUPPORTED, ["power_w"], "Not Supported"),
    ("nvmlDeviceGetFieldValues", FUNCTION_NOT_FOUND, ["nvlink_tx_kib", "memory_temperature_c"], "Function Not Found"),
    ("nvmlDeviceGetTotalEccErrors", NO_PERMISSION, ["ecc_corrected_volatile"], "Insufficient Permissions"),
    ("nvmlDeviceGetComputeRunningProcesses_v3", NO_PERMISSION, ["processes"], "Insufficient Permissions"),
    ("nvmlDeviceGetSerial", NOT_SUPPORTED, ["serial"], "Not Supported"),
    ("nvmlDeviceGetRemappedRows", NOT_SUPPORTED, ["rows"], "Not Supported"),
])  # fmt: skip
def test_a_field_that_fails_costs_no_other(fake_nvml, function, code, fields, said):
    fake_nvml.error(code, function, gpu=1)
    first, second = read_once().gpus
    assert all(second.missing[name] == said and not getattr(second, name, None) for name in fields)
    assert first.missing == {} and second.problem == "" and second.temperature_c == 41


def test_whatever_fails_the_other_gpu_is_whole(fake_nvml, reader):
    functions = re.findall(r"\bnvmlDevice\w+|\bnvmlGpm\w+", SOURCE.read_text())
    whole = reader.read().gpus[1].temperature_c
    for seed in range(40):
        draw = random.Random(seed)
        fake_nvml.heal()
        for function in draw.sample(functions, draw.randint(1, 12)):
            if function != "nvmlDeviceGetCount_v2":
                fake_nvml.error(draw.choice([1, 2, 3, 4, 6, 7, 13, 15, 16, 17, 25, 999]), function, gpu=0)
        found = reader.read()
        assert found.problem == "" and len(found.gpus) == 2, seed
        assert found.gpus[1].temperature_c == whole and found.gpus[1].missing == {}
        assert found.gpus[0].problem or found.gpus[0].uuid


@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons"])
def test_an_older_driver_is_asked_in_its_own_way(fake_nvml, function):
    fake_nvml.error(FUNCTION_NOT_FOUND, function)
    gpu = read_once().gpus[0]
    assert gpu.missing == {} and gpu.memory_total_bytes == 80 * 2**30 and gpu.throttle_bits == 1


def test_a_gpu_that_vanishes_is_named_and_the_others_are_read(fake_nvml, reader):
    before = reader.read().gpus[1]
    fake_nvml.vanish(1)
    first, second = reader.read().gpus
    assert (second.problem, second.uuid, second.pci) == ("GPU is lost", before.uuid, before.pci)
    assert first.problem == "" and first.temperature_c == 40
    fake_nvml.heal()
    assert reader.read().gpus[1].temperature_c == 41
    fake_nvml.gpus(1)
    assert [g.index for g in reader.read().gpus] == [0]


def test_a_driver_that_hangs_costs_one_reading(fake_nvml, reader):
    assert reader.read().gpus
    reader.timeout_s = 1.0
    fake_nvml.hang("nvmlDeviceGetTemperature", gpu=1)
    started = time.monotonic()
    assert reader.read().problem == "NVML did not answer within 1 s: the driver hangs"
    assert time.monotonic() - started < 10
    started = time.monotonic()
    assert "hangs" in reader.read().problem and time.monotonic() - started < 0.9  # no second wait at once
    fake_nvml.heal()
    reader.failed_at = 0  # the time before the next try has passed
    assert [g.temperature_c for g in reader.read().gpus] == [40, 41] and reader.failures == 0


def test_a_driver_that_crashes_costs_one_reading(fake_nvml, reader):
    fake_nvml.crash("nvmlDeviceGetTemperature")
    assert reader.read().problem == "the process that reads NVML ended with signal SIGSEGV"
    fake_nvml.heal()
    reader.failed_at = 0
    assert len(reader.read().gpus) == 2


def test_a_process_that_cannot_be_ended_is_the_only_one(fake_nvml, reader):
    reader.stuck = subprocess.Popen(["sleep", "30"], stdin=subprocess.PIPE)  # as one within the driver's code
    try:
        found = reader.read()
        assert f"process {reader.stuck.pid}" in found.problem and "needs a reboot" in found.problem
    finally:
        reader.stuck.kill()
        reader.stuck.communicate()
    reader.failed_at = 0
    assert len(reader.read().gpus) == 2 and reader.stuck is None


def test_without_a_driver_it_says_why(fake_nvml, monkeypatch):
    fake_nvml.error(VERSION_MISMATCH, "nvmlInitWithFlags")
    assert read_once().problem == "NVML does not start: RM has detected an NVML/RM version mismatch."
    monkeypatch.delenv("LD_LIBRARY_PATH")
    if not os.path.exists("/proc/driver/nvidia"):
        assert read_once().problem == "NVML does not start: NVML Shared Library Not Found"


def test_xid_errors_come_as_they_happen_and_none_twice(fake_nvml):
    seen: queue.Queue = queue.Queue()
    with Reader(timeout_s=10, on_xid=seen.put) as reader:
        uuid = reader.read().gpus[1].uuid
        fake_nvml.listened()
        for code in (45, 45, 62):
            fake_nvml.xid(1, code)
        assert [(x.code, x.uuid) for x in (seen.get(timeout=10) for _ in range(3))] == [
            (45, uuid),
            (45, uuid),
            (62, uuid),
        ]
        assert seen.empty()


def test_the_process_ends_with_the_reader(fake_nvml):
    reader = Reader()
    reader.read()
    process = reader.process
    fake_nvml.hang()
    assert process is not None and process.stdin is not None
    process.stdin.close()  # as when this program ends
    assert process.wait(timeout=3) == 0
    reader.close()
