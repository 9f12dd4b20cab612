"""One reading of every GPU through NVML (nvidia-ml-py). Each field degrades by itself: None, with the reason in ``missing``.

NVML can hang or crash with the driver, so programs read through ``reader.Reader``, which does this in another process.
Calls and units: NVIDIA's NVML API reference, docs.nvidia.com/deploy/nvml-api.
"""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

INSTALL = "pip install 'weft[telemetry]' (or nvidia-ml-py)"

# Bits of nvmlDeviceGetCurrentClocksEventReasons, with nvidia-smi's names
THROTTLE = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
CHOSEN = {"gpu_idle", "applications_clocks_setting", "display_clock_setting"}  # reasons that are no loss of speed
RECOVERY = (
    "none",
    "reset",
    "reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "reboot_system",
)
ALL_LINKS = 0xFFFFFFFF  # NVML's scope for the sum over NVLinks
NOT_OF_AN_INSTANCE = 0xFFFFFFFF
XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError

# NVML's GPM metrics (Hopper and later): percentages over the time between two readings
GPM = {
    "graphics_active": 1,
    "sm_active": 2,
    "sm_occupancy": 3,
    "tensor_active": 5,
    "dram_active": 10,
    "fp64_active": 11,
    "fp32_active": 12,
    "fp16_active": 13,
}
FIELDS: dict[str, int | tuple[int, int]] = {  # NVML's field ids (and scopes), read in one call
    "memory_temperature_c": 82,
    "pcie_tx_bytes": 197,
    "pcie_rx_bytes": 198,
    "nvlink_tx_kib": (138, ALL_LINKS),
    "nvlink_rx_kib": (139, ALL_LINKS),
    "nvlink_crc_flit_errors": 38,
    "nvlink_crc_data_errors": 45,
    "nvlink_replay_errors": 52,
    "nvlink_recovery_errors": 59,
    "throttled_power_ns": 74,
    "throttled_thermal_ns": 75,
    "recovery_action": 230,
}


@dataclass
class Process:
    """A process on a GPU: ``kind`` C (compute) or G (graphics)."""

    pid: int
    kind: str = "C"
    memory_bytes: int | None = None
    gpu_instance: int | None = None
    sm_util_percent: int | None = None


@dataclass
class Activity:
    """Shares of time or of a maximum, 0 to 1, between this reading and the last one: None at the first, and before Hopper."""

    graphics_active: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    fp64_active: float | None = None
    fp32_active: float | None = None
    fp16_active: float | None = None


@dataclass
class Mig(Activity):
    """A MIG device: ``profile`` as in ``1g.10gb``."""

    uuid: str = ""
    profile: str = ""
    gpu_instance: int | None = None
    compute_instance: int | None = None
    multiprocessors: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None


@dataclass
class Gpu(Activity):
    """One GPU. A field that this card, driver or user may not read is None, and ``missing`` says why.

    ``problem`` is set where the GPU itself does not answer (fallen off the bus). Counters of errors count since the driver
    was loaded (``…_volatile``) or since ever (``…_aggregate``).
    """

    index: int = 0
    uuid: str = ""
    name: str = ""
    pci: str = ""
    minor: int | None = None
    serial: str | None = None
    vbios: str | None = None
    compute_capability: str | None = None
    cores: int | None = None
    memory_bus_bits: int | None = None
    max_sm_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    temperature_slowdown_c: int | None = None
    temperature_shutdown_c: int | None = None
    max_pcie_generation: int | None = None
    max_pcie_width: int | None = None

    gpu_util_percent: int | None = None
    memory_util_percent: int | None = None
    encoder_util_percent: int | None = None
    decoder_util_percent: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_mj: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_bits: int | None = None
    throttled_power_ns: int | None = None
    throttled_thermal_ns: int | None = None
    ecc_enabled: bool | None = None
    ecc_corrected_volatile: int | None = None
    ecc_uncorrected_volatile: int | None = None
    ecc_corrected_aggregate: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    rows_corrected: int | None = None
    rows_uncorrected: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    recovery_action: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_replays: int | None = None
    pcie_tx_bytes: int | None = None
    pcie_rx_bytes: int | None = None
    nvlinks_active: int | None = None
    nvlink_tx_kib: int | None = None
    nvlink_rx_kib: int | None = None
    nvlink_crc_flit_errors: int | None = None
    nvlink_crc_data_errors: int | None = None
    nvlink_replay_errors: int | None = None
    nvlink_recovery_errors: int | None = None
    mig_enabled: bool | None = None
    mig: list[Mig] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def throttle_reasons(self) -> list[str]:
        """Why the clocks are below their maximum now."""
        return [name for bit, name in THROTTLE.items() if (self.throttle_bits or 0) & bit]

    @property
    def slowed(self) -> list[str]:
        """The throttle reasons that cost speed: power, heat, hardware; not idleness or a setting."""
        return [name for name in self.throttle_reasons if name not in CHOSEN]


@dataclass
class Snapshot:
    """All GPUs at ``time`` (seconds since 1970). ``problem`` says why there are none to read."""

    time: float = 0.0
    driver: str = ""
    cuda: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    problem: str = ""

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Snapshot":
        gpus = [
            Gpu(**{**g, "mig": [Mig(**m) for m in g["mig"]], "processes": [Process(**p) for p in g["processes"]]})
            for g in values["gpus"]
        ]
        return Snapshot(**{**values, "gpus": gpus})


@dataclass(frozen=True)
class Xid:
    """An XID error as NVML reports it. ``uuid`` is empty where the GPU no longer says what it is."""

    code: int
    uuid: str
    pci: str
    time: float


class Nvml:
    """NVML, initialised. Raises ImportError without nvidia-ml-py and ``pynvml.NVMLError`` without a driver."""

    def __init__(self) -> None:
        try:
            self.nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            raise ImportError(f"NVML's module is missing: {INSTALL}") from None
        self.nvml.nvmlInit()
        self.constant: dict[int, dict[str, Any]] = {}  # GPU → what never changes while the driver is loaded
        self.samples: dict[str, Any] = {}  # UUID → last GPM sample
        self.identity: dict[int, tuple[str, str]] = {}  # handle → UUID and PCI address, also of GPUs that are lost
        self.present: set[str] = set()  # UUIDs that answer
        self.changed = threading.Event()  # GPUs came or went: event sets must be made anew

    def snapshot(self) -> Snapshot:
        """Reads everything. Raises nothing that one GPU or field causes."""
        nvml, found = self.nvml, Snapshot(time.time())
        with contextlib.suppress(nvml.NVMLError):
            found.driver = nvml.nvmlSystemGetDriverVersion()
            version = nvml.nvmlSystemGetCudaDriverVersion()
            found.cuda = f"{version // 1000}.{version % 1000 // 10}"
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            found.problem = f"NVML does not count the GPUs: {error}"
            return found
        found.gpus = [self._whole(index) for index in range(count)]
        before, self.present = self.present, {gpu.uuid for gpu in found.gpus if not gpu.problem}
        if before and before != self.present:
            self.changed.set()
        return found

    def _whole(self, index: int) -> Gpu:
        try:
            return self.gpu(index)
        except Exception as error:  # an answer that nvidia-ml-py cannot decode costs this GPU, not the others
            return Gpu(index=index, problem=f"{type(error).__name__}: {error}")

    def gpu(self, index: int) -> Gpu:
        nvml, gpu = self.nvml, Gpu(index=index)
        known = self.constant.get(index, {})
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu.uuid = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:  # what it was goes on naming it
            for name in ("uuid", "name", "pci", "minor"):
                setattr(gpu, name, known.get(name, getattr(gpu, name)))
            gpu.problem = str(error)
            return gpu
        if known.get("uuid") != gpu.uuid:
            known = self.constant[index] = {"uuid": gpu.uuid}
        for name, call in CONSTANT.items():
            if name not in known:
                self.field(gpu, name, lambda call=call: call(nvml, handle), known)  # type: ignore[misc]
        for name in CONSTANT:
            setattr(gpu, name, known.get(name, getattr(gpu, name)))
        self.identity[handle_number(handle)] = (gpu.uuid, gpu.pci)
        for name, call in READINGS.items():
            self.field(gpu, name, lambda call=call: call(nvml, handle))  # type: ignore[misc]
            if gpu.problem:
                return gpu
        self.fields(gpu, handle)
        self.memory(gpu, handle)
        self.field(gpu, "rows", lambda: self.rows(gpu, handle))
        self.field(gpu, "processes", lambda: list(self.processes(handle)))
        self.field(gpu, "mig", lambda: list(self.mig(handle)) if gpu.mig_enabled else [])
        self.activity(gpu, handle, None)
        for mig in gpu.mig:
            self.activity(mig, handle, mig.gpu_instance)
        return gpu

    def field(self, gpu: Gpu, name: str, call: Callable[[], Any], into: dict[str, Any] | None = None) -> None:
        """Sets a field to what the call returns, or notes why not; an error that says the GPU is gone ends the reading."""
        try:
            value = call()
        except self.nvml.NVMLError as error:
            gpu.missing[name] = str(error)
            if error.value in (self.nvml.NVML_ERROR_GPU_IS_LOST, self.nvml.NVML_ERROR_RESET_REQUIRED):
                gpu.problem = str(error)
        except (
            ValueError,
            TypeError,
            AttributeError,
        ) as error:  # an answer that nvidia-ml-py cannot decode; an old one
            gpu.missing[name] = f"{type(error).__name__}: {error}"
        else:
            if into is not None:
                into[name] = value
            elif name != "rows":
                setattr(gpu, name, value)

    def fields(self, gpu: Gpu, handle: Any) -> None:
        try:
            values = self.nvml.nvmlDeviceGetFieldValues(handle, list(FIELDS.values()))
        except self.nvml.NVMLError as error:
            gpu.missing |= dict.fromkeys(FIELDS, str(error))
            return
        for name, value in zip(FIELDS, values, strict=True):
            if value.nvmlReturn:
                gpu.missing[name] = str(self.nvml.NVMLError(value.nvmlReturn))
                continue
            union = value.value
            number = {0: union.dVal, 1: union.uiVal, 2: union.ulVal, 4: union.sllVal, 5: union.uiVal}
            got = int(number.get(value.valueType, union.ullVal))
            setattr(gpu, name, RECOVERY[got] if name == "recovery_action" and got < len(RECOVERY) else got)

    def memory(self, gpu: Gpu | Mig, handle: Any) -> None:
        nvml = self.nvml
        try:
            try:
                memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
                if isinstance(gpu, Gpu):
                    gpu.memory_reserved_bytes = memory.reserved
            except nvml.NVMLError:  # a driver before 510
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            if isinstance(gpu, Gpu):
                gpu.missing["memory"] = str(error)
            return
        gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.memory_free_bytes = memory.total, memory.used, memory.free

    def rows(self, gpu: Gpu, handle: Any) -> None:
        corrected, uncorrected, pending, failed = self.nvml.nvmlDeviceGetRemappedRows(handle)
        gpu.rows_corrected, gpu.rows_uncorrected = corrected, uncorrected
        gpu.rows_pending, gpu.rows_failed = bool(pending), bool(failed)

    def processes(self, handle: Any) -> Iterator[Process]:
        nvml, use = self.nvml, {}
        with contextlib.suppress(nvml.NVMLError):
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, 0)  # several of a process: the newest counts
            use = {s.pid: s.smUtil for s in sorted(samples, key=lambda s: s.timeStamp)}
        for kind, list_processes in (
            ("C", nvml.nvmlDeviceGetComputeRunningProcesses),
            ("G", nvml.nvmlDeviceGetGraphicsRunningProcesses),
        ):
            try:
                found = list_processes(handle)
            except nvml.NVMLError:
                if kind == "C":
                    raise
                continue
            for p in found:
                instance = None if p.gpuInstanceId in (None, NOT_OF_AN_INSTANCE) else p.gpuInstanceId
                yield Process(p.pid, kind, p.usedGpuMemory, instance, use.get(p.pid))

    def mig(self, handle: Any) -> Iterator[Mig]:
        nvml = self.nvml
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                found = Mig(uuid=nvml.nvmlDeviceGetUUID(device))
            except nvml.NVMLError:  # no device has this place
                continue
            with contextlib.suppress(nvml.NVMLError):
                found.profile = nvml.nvmlDeviceGetName(device).partition("MIG ")[2]
            with contextlib.suppress(nvml.NVMLError):
                found.gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(device)
            with contextlib.suppress(nvml.NVMLError):
                found.compute_instance = nvml.nvmlDeviceGetComputeInstanceId(device)
            with contextlib.suppress(nvml.NVMLError):
                found.multiprocessors = nvml.nvmlDeviceGetAttributes(device).multiprocessorCount
            self.memory(found, device)
            yield found

    def activity(self, target: Gpu | Mig, handle: Any, instance: int | None) -> None:
        """GPM: the difference between the last sample of this device and a new one."""
        nvml = self.nvml
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return
            sample = nvml.nvmlGpmSampleAlloc()
            if instance is None:
                nvml.nvmlGpmSampleGet(handle, sample)
            else:
                nvml.nvmlGpmMigSampleGet(handle, instance, sample)
        except nvml.NVMLError as error:
            if isinstance(target, Gpu):
                target.missing["activity"] = str(error)
            return
        last = self.samples.get(target.uuid)
        self.samples[target.uuid] = sample
        if last is None:
            return
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM)
        asked.sample1, asked.sample2 = last, sample
        for place, number in enumerate(GPM.values()):
            asked.metrics[place].metricId = number
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlGpmMetricsGet(asked)
            for place, name in enumerate(GPM):
                metric = asked.metrics[place]
                if not metric.nvmlReturn and metric.value == metric.value:  # not NaN
                    setattr(target, name, metric.value / 100)
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlGpmSampleFree(last)

    def xids(self) -> Iterator[Xid]:
        """XID errors as they come, for ever. What happens while GPUs come or go, or before this call, may be missed."""
        nvml = self.nvml
        while True:
            self.changed.clear()
            events = None
            try:
                events = nvml.nvmlEventSetCreate()
                for index in range(nvml.nvmlDeviceGetCount()):
                    with contextlib.suppress(nvml.NVMLError):  # a GPU that has fallen off, or a driver under WSL2
                        nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(index), XID_EVENT, events)
                while not self.changed.is_set():
                    try:
                        event = nvml.nvmlEventSetWait(events, 1000)
                    except nvml.NVMLError as error:
                        if error.value == nvml.NVML_ERROR_TIMEOUT:
                            continue
                        raise
                    if event.eventType & XID_EVENT:
                        uuid, pci = self.identity.get(handle_number(event.device), ("", ""))
                        yield Xid(int(event.eventData), uuid, pci, time.time())
            except nvml.NVMLError:
                time.sleep(1)
            finally:
                if events is not None:
                    with contextlib.suppress(nvml.NVMLError):
                        nvml.nvmlEventSetFree(events)


def handle_number(handle: Any) -> int:
    """The address in a ctypes pointer, which is what two handles of one GPU share."""
    import ctypes

    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


Call = Callable[[Any, Any], Any]

CONSTANT: dict[str, Call] = {
    "name": lambda nvml, h: nvml.nvmlDeviceGetName(h),
    "pci": lambda nvml, h: text(nvml.nvmlDeviceGetPciInfo(h).busId),
    "minor": lambda nvml, h: nvml.nvmlDeviceGetMinorNumber(h),
    "serial": lambda nvml, h: nvml.nvmlDeviceGetSerial(h),
    "vbios": lambda nvml, h: nvml.nvmlDeviceGetVbiosVersion(h),
    "compute_capability": lambda nvml, h: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(h)),
    "cores": lambda nvml, h: nvml.nvmlDeviceGetNumGpuCores(h),
    "memory_bus_bits": lambda nvml, h: nvml.nvmlDeviceGetMemoryBusWidth(h),
    "max_sm_clock_mhz": lambda nvml, h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM),
    "max_memory_clock_mhz": lambda nvml, h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_MEM),
    "temperature_shutdown_c": lambda nvml, h: nvml.nvmlDeviceGetTemperatureThreshold(h, 0),
    "temperature_slowdown_c": lambda nvml, h: nvml.nvmlDeviceGetTemperatureThreshold(h, 1),
    "max_pcie_generation": lambda nvml, h: nvml.nvmlDeviceGetMaxPcieLinkGeneration(h),
    "max_pcie_width": lambda nvml, h: nvml.nvmlDeviceGetMaxPcieLinkWidth(h),
}


def clocks_event_reasons(nvml: Any, handle: Any) -> int:
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError_FunctionNotFound:  # a driver before 535
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)


def active_nvlinks(nvml: Any, handle: Any) -> int:
    """0 where the GPU has none."""
    active = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            active += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except (nvml.NVMLError_InvalidArgument, nvml.NVMLError_NotSupported):
            break
    return active


READINGS: dict[str, Call] = {
    "gpu_util_percent": lambda nvml, h: nvml.nvmlDeviceGetUtilizationRates(h).gpu,
    "memory_util_percent": lambda nvml, h: nvml.nvmlDeviceGetUtilizationRates(h).memory,
    "encoder_util_percent": lambda nvml, h: nvml.nvmlDeviceGetEncoderUtilization(h)[0],
    "decoder_util_percent": lambda nvml, h: nvml.nvmlDeviceGetDecoderUtilization(h)[0],
    "temperature_c": lambda nvml, h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
    "power_w": lambda nvml, h: nvml.nvmlDeviceGetPowerUsage(h) / 1000,
    "power_limit_w": lambda nvml, h: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
    "energy_mj": lambda nvml, h: nvml.nvmlDeviceGetTotalEnergyConsumption(h),
    "sm_clock_mhz": lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM),
    "throttle_bits": clocks_event_reasons,
    "ecc_enabled": lambda nvml, h: bool(nvml.nvmlDeviceGetEccMode(h)[0]),
    "ecc_corrected_volatile": lambda nvml, h: nvml.nvmlDeviceGetTotalEccErrors(h, 0, 0),
    "ecc_uncorrected_volatile": lambda nvml, h: nvml.nvmlDeviceGetTotalEccErrors(h, 1, 0),
    "ecc_corrected_aggregate": lambda nvml, h: nvml.nvmlDeviceGetTotalEccErrors(h, 0, 1),
    "ecc_uncorrected_aggregate": lambda nvml, h: nvml.nvmlDeviceGetTotalEccErrors(h, 1, 1),
    "pcie_generation": lambda nvml, h: nvml.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_width": lambda nvml, h: nvml.nvmlDeviceGetCurrPcieLinkWidth(h),
    "pcie_replays": lambda nvml, h: nvml.nvmlDeviceGetPcieReplayCounter(h),
    "nvlinks_active": active_nvlinks,
    "mig_enabled": lambda nvml, h: bool(nvml.nvmlDeviceGetMigMode(h)[0]),
}
