"""What each accelerator is: what CUDA's deviceQuery says and more, from NVML and the driver API; peak rates derived from it.

Both libraries are asked in processes of their own, since either may hang with the driver. AMD, Ascend and Intel devices are
recognised through their PyTorch back ends.
"""

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.hardware.driver import read_driver
from weft.hardware.probe import Answer, ask_code
from weft.hardware.telemetry.nvml import Gpu, Mig, Snapshot
from weft.hardware.telemetry.reader import read_once
from weft.hardware.topology import PCIE_LANE

# Of the driver API's CUdevice_attribute, by its number in cuda.h: what the text shows, by group. --json has all that answer.
LIMITS = {
    "threads per block": 1,
    "threads per multiprocessor": 39,
    "blocks per multiprocessor": 106,
    "warp size": 10,
    "registers per block": 12,
    "registers per multiprocessor": 82,
}
MEMORY_SIZES = {
    "shared memory per block": 8,
    "shared memory per block, opt-in": 97,
    "shared memory per multiprocessor": 81,
    "shared memory reserved per block": 111,
    "constant memory": 9,
    "L2 cache": 38,
    "L2 cache that can persist": 108,
}
SWITCHES = {
    "ECC": 32,
    "integrated": 18,
    "concurrent kernels": 31,
    "cooperative launch": 95,
    "thread block clusters": 120,
    "tensor maps (TMA)": 127,
    "unified addressing": 41,
    "managed memory": 83,
    "concurrent managed access": 89,
    "pageable memory access": 88,
    "memory pools": 115,
    "virtual memory management": 102,
    "multicast": 132,
    "GPUDirect RDMA": 116,
    "dma-buf": 124,
    "fabric handles": 128,
    "compute preemption": 90,
    "stream priorities": 78,
    "host memory mapping": 19,
    "kernel time limit": 17,
    "MPS": 133,
}
ATTRIBUTES = 160  # numbers asked for; the driver refuses those that it does not know
COMPUTE_MODES = ("default", "exclusive thread", "prohibited", "exclusive process")

# Dense FLOP (integers: operations) that one multiprocessor issues in a clock cycle, by compute capability; a fused
# multiply-add counts two. fp64 to fp32 from the table of arithmetic throughput in the CUDA C++ Programming Guide, the others
# (tensor cores) from the white papers of Volta, Turing, A100, GA102, Ada, H100, Blackwell and RTX Blackwell.
PER_CLOCK: dict[str, dict[str, int]] = {
    "7.0": {"fp64": 64, "fp32": 128, "fp16": 1024},
    "7.5": {"fp64": 4, "fp32": 128, "fp16": 1024, "int8": 2048},
    "8.0": {"fp64": 64, "fp64 tensor": 128, "fp32": 128, "tf32": 1024, "bf16": 2048, "fp16": 2048, "int8": 4096},
    "8.6": {"fp64": 4, "fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024, "int8": 2048},
    "8.9": {"fp64": 4, "fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024, "fp8": 2048, "int8": 2048},
    "9.0": {
        **{"fp64": 128, "fp64 tensor": 256, "fp32": 256, "tf32": 2048},
        **{"bf16": 4096, "fp16": 4096, "fp8": 8192, "int8": 8192},
    },
    "10.0": {
        **{"fp64": 128, "fp32": 256, "tf32": 4096},
        **{"bf16": 8192, "fp16": 8192, "fp8": 16384, "fp4": 32768, "int8": 16384},
    },
    "12.0": {"fp64": 4, "fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024, "fp8": 2048, "fp4": 4096, "int8": 2048},
}
HALVED = ("7.5", "8.6", "8.9", "12.0")  # GeForce cards accumulate in fp32 at half this rate
CORES_PER_MULTIPROCESSOR = {7: 64, 8: 128, 9: 128, 10: 128, 12: 128}  # compute capability 8.0 apart

_DRIVER_API = """
import ctypes
lib = ctypes.CDLL("libcuda.so.1")
version, count = ctypes.c_int(), ctypes.c_int()
lib.cuDriverGetVersion(ctypes.byref(version))
code = lib.cuInit(0)
devices = []
if code == 0:
    lib.cuDeviceGetCount(ctypes.byref(count))
for i in range(count.value):
    device, size = ctypes.c_int(), ctypes.c_size_t()
    name, bus, uuid = (ctypes.create_string_buffer(n) for n in (256, 32, 16))
    lib.cuDeviceGet(ctypes.byref(device), i)
    lib.cuDeviceGetName(name, 256, device)
    lib.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    lib.cuDeviceGetPCIBusId(bus, 32, device)
    getattr(lib, "cuDeviceGetUuid_v2", lib.cuDeviceGetUuid)(uuid, device)
    attributes = {}
    for number in range(1, ATTRIBUTES):
        value = ctypes.c_int()
        if lib.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:
            attributes[number] = value.value
    devices.append({"name": name.value.decode(), "memory_bytes": size.value, "pci": bus.value.decode(),
                    "uuid": uuid.raw.hex(), "attributes": attributes})
answer(version=version.value, code=code, devices=devices)
"""

_BACK_ENDS = """
found, notes = [], []
def add(vendor, back_end, module, units):
    for i in range(module.device_count()):
        p = module.get_device_properties(i)
        found.append({"vendor": vendor, "back_end": back_end, "index": i, "name": str(getattr(p, "name", "")),
                      "memory_bytes": int(getattr(p, "total_memory", 0)), "units": getattr(p, units, None),
                      "architecture": str(getattr(p, "gcnArchName", "") or getattr(p, "architecture", ""))})
def attempt(what, call):
    try:
        call()
    except Exception as error:
        notes.append(f"{what}: {error}")
import torch
if getattr(torch.version, "hip", None) and torch.cuda.is_available():
    attempt("AMD", lambda: add("AMD", "ROCm " + torch.version.hip, torch.cuda, "multi_processor_count"))
if getattr(torch, "xpu", None) and torch.xpu.is_available():
    attempt("Intel", lambda: add("Intel", "XPU", torch.xpu, "max_compute_units"))
def ascend():
    import importlib.util
    if importlib.util.find_spec("torch_npu"):
        import torch_npu
        if torch.npu.is_available():
            add("Huawei Ascend", "torch_npu", torch.npu, "cube_core_num")
attempt("Ascend", ascend)
answer(devices=found, notes=notes)
"""


@dataclass
class Device:
    """One accelerator, or one MIG instance of it (``kind`` "mig", with the ``parent``'s index).

    ``facts`` are the groups that the text shows, ``attributes`` the driver API's values by cuda.h's numbers, ``peak`` rates in
    FLOP/s by dtype and ``bandwidth`` bytes/s: derived from clocks and widths, not measured (``weft ceilings`` measures).
    """

    vendor: str
    index: int
    name: str
    kind: str = "gpu"
    uuid: str = ""
    parent: int | None = None
    compute_capability: str | None = None
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    bandwidth: float | None = None
    attributes: dict[str, int] = field(default_factory=dict)


@dataclass
class Devices:
    """``notes`` says what could not be read and why; ``broken`` that there is a driver, and that it does not answer."""

    devices: list[Device] = field(default_factory=list)
    driver: str = ""
    cuda: str = ""
    notes: list[str] = field(default_factory=list)
    broken: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def query(timeout_s: float = 20.0) -> Devices:
    """Every accelerator of this machine. Raises nothing: what does not answer is in the notes."""
    snapshot = read_once(timeout_s)
    cuda = ask_code(_DRIVER_API.replace("ATTRIBUTES", str(ATTRIBUTES)), timeout_s)
    found = Devices(driver=snapshot.driver, cuda=snapshot.cuda)
    _nvidia(found, snapshot, cuda)
    if not found.devices:
        driver = read_driver(timeout_s)
        found.driver = found.driver or driver.version or ""
        found.broken = driver.version is not None
        _other_back_ends(found, timeout_s)
        if not found.devices:
            driver_says = (
                f"the NVIDIA driver {driver.version} is there, but: {driver.problem or snapshot.problem}; weft doctor"
            )
            none = "no GPU: no NVIDIA driver, and PyTorch sees no AMD, Ascend or Intel device"
            found.notes.insert(0, driver_says if found.broken else none)
    return found


def _nvidia(found: Devices, snapshot: Snapshot, cuda: Answer) -> None:
    by_pci = {_address(d["pci"]): d for d in cuda.value.get("devices", [])}
    if snapshot.problem and (by_pci or not snapshot.problem.endswith("Not Found")):
        found.notes.append(f"NVML: {snapshot.problem}")
    if snapshot.gpus and not by_pci:
        why = cuda.problem or f"cuInit returns {cuda.value.get('code')}"
        found.notes.append(f"the driver API does not answer ({why}): caches, shared memory and limits are not known")
    for gpu in snapshot.gpus:
        if gpu.problem:
            found.notes.append(f"GPU {gpu.index}, {gpu.uuid or '?'}: {gpu.problem}")
            continue
        known = by_pci.pop(_address(gpu.pci), {})
        if cuda.value.get("devices") and not known:
            found.notes.append(f"GPU {gpu.index}: the driver API does not see it (CUDA_VISIBLE_DEVICES?)")
        device = _gpu(gpu, known)
        found.devices += [device, *(_instance(device, place, mig, gpu) for place, mig in enumerate(gpu.mig))]
    for known in by_pci.values():  # NVML does not see it, or does not answer
        version = cuda.value["version"]
        found.cuda = found.cuda or f"{version // 1000}.{version % 1000 // 10}"
        found.devices.append(_gpu(Gpu(index=len(found.devices), name=known["name"], pci=known["pci"]), known))


def _gpu(gpu: Gpu, cuda: dict[str, Any]) -> Device:
    values = {int(number): value for number, value in cuda.get("attributes", {}).items()}

    def attribute(number: int) -> int | None:
        return values.get(number)

    capability = gpu.compute_capability or (f"{values[75]}.{values[76]}" if 75 in values and 76 in values else None)
    cores = _multiprocessors(gpu.cores, capability)
    multiprocessors = (
        (cores or attribute(16)) if gpu.mig_enabled else (attribute(16) or cores)
    )  # CUDA sees one instance
    width = gpu.memory_bus_bits or attribute(37)
    memory_mhz = gpu.max_memory_clock_mhz or (values[36] / 1000 if 36 in values else None)
    sm_mhz = gpu.max_sm_clock_mhz or (values[13] / 1000 if 13 in values else None)
    device = Device(
        vendor="NVIDIA",
        index=gpu.index,
        name=gpu.name,
        uuid=gpu.uuid,
        compute_capability=capability,
        multiprocessors=multiprocessors,
        memory_bytes=gpu.memory_total_bytes or cuda.get("memory_bytes"),
        peak=peak(capability, multiprocessors, sm_mhz),
        bandwidth=width / 8 * memory_mhz * 1e6 * 2 if width and memory_mhz else None,  # double data rate
        attributes={str(number): value for number, value in values.items()},
    )
    lane = PCIE_LANE.get(gpu.max_pcie_generation or 0)
    ecc = None if gpu.ecc_enabled is None else "on" if gpu.ecc_enabled else "off"
    device.facts = {
        "identity": {
            "UUID": gpu.uuid,
            "PCI address": gpu.pci,
            "serial number": gpu.serial,
            "VBIOS": gpu.vbios,
            "compute mode": COMPUTE_MODES[values[20]] if 20 in values and values[20] < len(COMPUTE_MODES) else None,
        },
        "clocks": {
            "SM clock": _with_most(gpu.sm_clock_mhz, sm_mhz, "MHz"),
            "memory clock": _with_most(gpu.memory_clock_mhz, memory_mhz, "MHz"),
            "power": _with_most(gpu.power_w, gpu.power_limit_w, "W"),
        },
        "memory": {
            "size": _bytes(device.memory_bytes),
            "type": None if not width else _memory_type(width, bool(attribute(18))),
            "bus width": f"{width} bits" if width else None,
            "ECC": ecc or (None if 32 not in values else "on" if values[32] else "off"),
            **{name: _bytes(attribute(number)) for name, number in MEMORY_SIZES.items()},
        },
        "limits": {
            **{name: attribute(number) for name, number in LIMITS.items()},
            "block": _times(values, 2, 3, 4),
            "grid": _times(values, 5, 6, 7),
            "copy engines": attribute(40),
            "texture 1D": attribute(21),
            "texture 2D": _times(values, 22, 23),
            "texture 3D": _times(values, 24, 25, 26),
            "layered texture 2D": _times(values, 27, 28, 29),
            "texture alignment": _bytes(attribute(14)),
            "memory pitch": _bytes(attribute(11)),
        },
        "links": {
            "PCIe": _pcie(gpu),
            "PCIe, one direction": f"{lane * gpu.max_pcie_width:.1f} GB/s" if lane and gpu.max_pcie_width else None,
            "NVLinks active": gpu.nvlinks_active,
        },
        "features": {
            "MIG": None if gpu.mig_enabled is None else f"on, {len(gpu.mig)} instances" if gpu.mig_enabled else "off",
            **{name: bool(values[number]) for name, number in SWITCHES.items() if number in values and name != "ECC"},
        },
    }
    return device


def _instance(parent: Device, place: int, mig: Mig, gpu: Gpu) -> Device:
    return Device(
        vendor="NVIDIA",
        index=place,
        name=f"{parent.name} MIG {mig.profile}",
        kind="mig",
        uuid=mig.uuid,
        parent=parent.index,
        compute_capability=parent.compute_capability,
        multiprocessors=mig.multiprocessors,
        memory_bytes=mig.memory_total_bytes,
        facts={
            "identity": {
                "UUID": mig.uuid,
                "GPU": parent.index,
                "GPU instance": mig.gpu_instance,
                "compute instance": mig.compute_instance,
            },
            "memory": {"size": _bytes(mig.memory_total_bytes)},
        },
        peak=peak(parent.compute_capability, mig.multiprocessors, gpu.max_sm_clock_mhz),
    )


def peak(capability: str | None, multiprocessors: int | None, clock_mhz: float | None) -> dict[str, float]:
    """Dense FLOP/s (int8: operations) by dtype at a clock; empty where the architecture or a factor is not known."""
    if not (capability and multiprocessors and clock_mhz):
        return {}
    return {name: per * multiprocessors * clock_mhz * 1e6 for name, per in PER_CLOCK.get(capability, {}).items()}


def _multiprocessors(cores: int | None, capability: str | None) -> int | None:
    """From NVML's number of CUDA cores, where the driver API does not answer."""
    if not cores or not capability:
        return None
    per = 64 if capability == "8.0" else CORES_PER_MULTIPROCESSOR.get(int(capability.split(".")[0]))
    return cores // per if per else None


def _other_back_ends(found: Devices, timeout_s: float) -> None:
    reply = ask_code(_BACK_ENDS, max(timeout_s, 60.0))
    if reply.problem:
        if "No module named 'torch'" not in reply.problem:
            found.notes.append(f"PyTorch: {reply.problem}")
        return
    found.notes += reply.value["notes"]
    for d in reply.value["devices"]:
        facts = {
            "identity": {"back end": d["back_end"], "architecture": d["architecture"] or None},
            "memory": {"size": _bytes(d["memory_bytes"])},
        }
        found.devices.append(
            Device(
                d["vendor"],
                d["index"],
                d["name"],
                multiprocessors=d["units"],
                memory_bytes=d["memory_bytes"],
                facts=facts,
            )
        )


def lines(found: Devices) -> list[str]:
    """The text of ``weft device``, at most 80 columns wide but for names."""
    out = []
    if found.driver or found.cuda:
        out.append(f"driver {found.driver or '?'}, CUDA {found.cuda or '?'}")
    for d in found.devices:
        out += ["", f"{d.vendor} {'GPU' if d.kind == 'gpu' else f'GPU {d.parent}, MIG device'} {d.index}: {d.name}"]
        what = [f"compute capability {d.compute_capability}"] if d.compute_capability else []
        out.append("  " + ", ".join([*what, *([f"{d.multiprocessors} multiprocessors"] if d.multiprocessors else [])]))
        for group, facts in d.facts.items():
            if group == "features":
                features = {name: value for name, value in facts.items() if value is not None}
                words = [
                    name if value is True else f"{name} {value}"
                    for name, value in features.items()
                    if value is not False
                ]
                lacks = [name for name, value in features.items() if value is False]
                out += _wrapped("features", words) + _wrapped("without", lacks)
                continue
            out += [f"  {name:<36}{value}" for name, value in facts.items() if value not in (None, "")]
        if d.bandwidth:
            out.append(f"  {'memory bandwidth, derived':<36}{d.bandwidth / 1e9:,.0f} GB/s")
        if d.peak:
            rates = [f"{name} {rate / 1e12:,.4g}" for name, rate in d.peak.items()]
            out += _wrapped("peak TFLOP/s, derived", rates)
            if d.compute_capability in HALVED:
                out.append(f"  {'':<36}(GeForce: half on tensor cores, with fp32 sums)")
    if any(d.peak for d in found.devices):
        out += [
            "",
            "Derived: multiprocessors × highest clock × FLOP a cycle, dense.",
            "What the card gives: weft ceilings",
        ]
    notes = [line for note in found.notes for line in textwrap.wrap(note, 80, break_on_hyphens=False)]
    return [*out, *([""] if out and notes else []), *notes]


def _wrapped(head: str, words: list[str]) -> list[str]:
    if not words:
        return []
    return textwrap.wrap(
        ", ".join(words), 80, initial_indent=f"  {head:<36}", subsequent_indent=" " * 38, break_on_hyphens=False
    )


def _address(bus: str) -> str:
    """``00000000:3B:00.0`` (NVML) and ``0000:3b:00.0`` (the driver API) are one address."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _memory_type(width: int, integrated: bool) -> str:
    """By the width of the bus: neither library names the type."""
    return "the processor's" if integrated else "HBM" if width >= 1024 else "GDDR"


def _bytes(value: int | None) -> str | None:
    if value is None:
        return None
    if value == 2**31 - 1:  # the most that an attribute can say
        return "2 GiB"
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value} B"


def _with_most(now: float | None, most: float | None, unit: str) -> str | None:
    if now is None and most is None:
        return None
    return ", ".join(
        [
            *([f"{now:.0f} {unit} now"] if now is not None else []),
            *([f"at most {most:.0f} {unit}"] if most is not None else []),
        ]
    )


def _pcie(gpu: Gpu) -> str | None:
    now = f"generation {gpu.pcie_generation} x{gpu.pcie_width} now" if gpu.pcie_width else ""
    most = f"at most {gpu.max_pcie_generation} x{gpu.max_pcie_width}" if gpu.max_pcie_width else ""
    return ", ".join(filter(None, [now, most])) or None


def _times(values: dict[int, int], *numbers: int) -> str | None:
    found = [values[n] for n in numbers if n in values]
    return " × ".join(map(str, found)) if len(found) == len(numbers) else None
