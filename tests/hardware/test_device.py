"""``weft device``: what NVML and the driver API say, joined; rates derived from it; other makers' devices; and no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import COMPILER, DRIVER_NOT_LOADED

from weft.hardware import device
from weft.hardware.device import peak, query
from weft.hardware.driver import Driver

CUDA = Path(__file__).with_name("fake_nvml") / "fake_cuda.c"


@pytest.fixture(autouse=True)
def fake_cuda(fake_nvml, tmp_path, monkeypatch):
    """The driver API beside NVML: it fails, unless the test asks for the first fake GPU."""
    monkeypatch.setenv("FAKE_CUDA_INIT", "100")  # no device
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(CUDA)], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{fake_nvml.environment['LD_LIBRARY_PATH']}")


def test_joins_both_libraries_by_pci_address(fake_nvml, monkeypatch, command):
    monkeypatch.setenv("FAKE_CUDA_INIT", "0")
    fake_nvml.mig(1, "3g.40gb", sm=60, mib=40448)
    code, out, _ = command("device", "--json")
    found = json.loads(out)
    assert (code, found["driver"], found["cuda"], found["broken"]) == (0, "580.65.06", "13.0", False)
    first, second, instance = found["devices"]
    assert (first["multiprocessors"], first["compute_capability"], first["attributes"]["97"]) == (132, "9.0", 232448)
    assert (
        first["facts"]["memory"]["L2 cache"] == "50 MiB"
        and first["facts"]["limits"]["grid"] == "2147483647 × 65535 × 65535"
    )
    assert first["facts"]["identity"]["compute mode"] == "exclusive process"
    assert first["bandwidth"] == pytest.approx(3352e9, rel=1e-3)  # the data sheet of the H100 SXM says 3.35 TB/s
    assert second["attributes"] == {} and second["multiprocessors"] == 132 and second["peak"] == first["peak"]
    assert found["notes"] == ["GPU 1: the driver API does not see it (CUDA_VISIBLE_DEVICES?)"]
    assert (instance["kind"], instance["parent"], instance["memory_bytes"]) == ("mig", 1, 40448 * 2**20)
    assert instance["peak"]["bf16"] == pytest.approx(first["peak"]["bf16"] * 60 / 132)
    _, text, _ = command("device")
    assert (
        all(len(line) <= 80 for line in text.splitlines()) and "MIG device 0: NVIDIA H100 80GB HBM3 MIG 3g.40gb" in text
    )


# TFLOP/s of the data sheets, which are dense and at the boost clock that they state
@pytest.mark.parametrize(("capability", "multiprocessors", "mhz", "dtype", "tera"), [
    ("7.0", 80, 1530, "fp16", 125), ("8.0", 108, 1410, "bf16", 312), ("8.0", 108, 1410, "fp64", 9.7),
    ("8.0", 108, 1410, "fp64 tensor", 19.5), ("8.0", 108, 1410, "int8", 624), ("8.6", 84, 1740, "tf32", 74.8),
    ("8.9", 142, 2520, "fp8", 733), ("8.9", 142, 2520, "fp32", 91.6), ("9.0", 132, 1830, "bf16", 989.4),
    ("9.0", 132, 1980, "fp32", 66.9), ("9.0", 132, 1830, "fp8", 1979), ("10.0", 148, 1850, "bf16", 2250),
])  # fmt: skip
def test_derived_rates_are_the_data_sheets(capability, multiprocessors, mhz, dtype, tera):
    assert peak(capability, multiprocessors, mhz)[dtype] / 1e12 == pytest.approx(tera, rel=0.01)


def test_an_unknown_architecture_has_no_derived_rate():
    assert peak("19.0", 100, 2000) == {} == peak("9.0", None, 2000) == peak(None, 132, 2000) == peak("9.0", 132, None)


def test_a_gpu_that_fell_off_is_in_the_notes(fake_nvml):
    fake_nvml.vanish(1)
    found = query()
    assert [d.index for d in found.devices] == [0]
    assert any(note.startswith("GPU 1") and note.endswith("GPU is lost") for note in found.notes)
    assert any("the driver API does not answer (cuInit returns 100)" in note for note in found.notes)


def test_without_a_gpu_the_answer_is_clear(fake_nvml, monkeypatch, command):
    fake_nvml.error(DRIVER_NOT_LOADED, "nvmlInitWithFlags")
    monkeypatch.setattr(device, "_BACK_ENDS", "answer(devices=[], notes=[])")
    monkeypatch.setattr(device, "read_driver", lambda timeout: Driver(None))
    code, out, _ = command("device")
    assert code == 0 and out.startswith("no GPU: no NVIDIA driver, and PyTorch sees no AMD, Ascend or Intel device")
    monkeypatch.setattr(device, "read_driver", lambda timeout: Driver("580.65.06", problem="no devices were found"))
    code, out, _ = command("device")
    assert code == 1 and "the NVIDIA driver 580.65.06 is there, but: no devices were found" in out


FAKE_TORCH = """
class Properties:
    name, total_memory = "a device", 64 << 30
    {properties}
class Module:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_device_properties = staticmethod(lambda i: Properties)
class version:
    hip = {hip!r}
{modules}
"""


@pytest.mark.parametrize(("vendor", "hip", "modules", "properties", "units"), [
    ("AMD", "6.4", "cuda = Module", "multi_processor_count, gcnArchName = 304, 'gfx942'", 304),
    ("Intel", None, "xpu = Module", "max_compute_units = 1024", 1024),
    ("Huawei Ascend", None, "npu = Module", "cube_core_num = 24", 24),
])  # fmt: skip
def test_other_makers_are_recognised_through_pytorch(vendor, hip, modules, properties, units, write, monkeypatch):
    write("packages/torch/__init__.py", FAKE_TORCH.format(hip=hip, modules=modules, properties=properties))
    folder = write("packages/torch_npu/__init__.py", "").parents[1]
    monkeypatch.setenv("PYTHONPATH", str(folder))
    found = device.Devices()
    device._other_back_ends(found, 20)
    expected = [(vendor, i, units, 64 << 30) for i in range(2)]
    assert [(d.vendor, d.index, d.multiprocessors, d.memory_bytes) for d in found.devices] == expected
    if vendor == "AMD":
        assert "gfx942" in "\n".join(device.lines(found))
        assert found.notes == ["Ascend: module 'torch' has no attribute 'npu'"]  # a broken installation is named


def test_imports_no_pytorch():
    code = "import sys, weft.hardware.device, weft.hardware.telemetry.reader; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
