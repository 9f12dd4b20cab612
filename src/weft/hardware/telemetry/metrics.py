"""The exporter's metrics: dcgm-exporter's names, labels and units, so that its dashboards and rules work, and weft's own.

dcgm-exporter: github.com/NVIDIA/dcgm-exporter, etc/default-counters.csv; DCGM's field identifiers say what each value is.
Values come from NVML alone: the profiling fields (``DCGM_FI_PROF_…``) from its GPM metrics, which Hopper and later have.
The text format is written here: prometheus_client takes 45 ms for 8 GPUs, and gives DCGM's counters a suffix that they lack.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from weft.hardware.telemetry.attribution import Attribution
from weft.hardware.telemetry.nvml import THROTTLE, Gpu, Mig, Snapshot, Xid
from weft.hardware.telemetry.quarantines import Quarantines

MIB = 2**20
LONGEST_LABEL = 256
XID_WINDOW_S = 300.0  # of dcgm-exporter's windowed metrics
# Series of these codes are there from the start with 0, so that increase() sees the first error: those that NVIDIA's
# catalogue has for GPUs and NVLink (docs.nvidia.com/deploy/xid-errors). Any other code gets its series when it happens.
USUAL_XIDS = (
    *(
        13,
        31,
        32,
        38,
        43,
        44,
        45,
        46,
        48,
        61,
        62,
        63,
        64,
        68,
        69,
        74,
        79,
        92,
        94,
        95,
        109,
        110,
        119,
        120,
        121,
        123,
        136,
    ),
    *(140, 143, 144, 145, 146, 147, 148, 149, 150, 154),
)


@dataclass(frozen=True)
class Reading:
    """A metric with one value for each GPU; ``counter`` where the value only grows."""

    name: str
    help: str
    value: Callable[[Any], float | None]
    counter: bool = False


def _mib(name: str) -> Callable[[Any], float | None]:
    return lambda g: None if getattr(g, name) is None else getattr(g, name) // MIB


def _of(name: str, factor: float = 1) -> Callable[[Any], float | None]:
    return lambda g: None if getattr(g, name) is None else getattr(g, name) * factor


def _graphics(g: Any) -> float | None:
    """Before Hopper nvidia-smi's utilisation takes its place: also the share of time in which a kernel ran."""
    if g.graphics_active is not None or isinstance(g, Mig) or g.gpu_util_percent is None:
        return g.graphics_active
    return g.gpu_util_percent / 100


GPU_READINGS = (
    Reading("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", _of("sm_clock_mhz")),
    Reading("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", _of("memory_clock_mhz")),
    Reading("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", _of("temperature_c")),
    Reading("DCGM_FI_DEV_MEMORY_TEMP", "Memory temperature (in C).", _of("memory_temperature_c")),
    Reading("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", _of("power_w")),
    Reading("DCGM_FI_DEV_POWER_MGMT_LIMIT", "Power limit in force (in W).", _of("power_limit_w")),
    Reading("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Energy since the driver was loaded (in mJ).", _of("energy_mj"), True),
    Reading("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", _of("gpu_util_percent")),
    Reading("DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %).", _of("memory_util_percent")),
    Reading("DCGM_FI_DEV_ENC_UTIL", "Encoder utilization (in %).", _of("encoder_util_percent")),
    Reading("DCGM_FI_DEV_DEC_UTIL", "Decoder utilization (in %).", _of("decoder_util_percent")),
    Reading("DCGM_FI_DEV_FB_RESERVED", "Memory that the driver reserves (in MiB).", _mib("memory_reserved_bytes")),
    Reading("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "Why clocks are lowered (bits of NVML).", _of("throttle_bits")),
    Reading("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "The same, as DCGM 3 names it.", _of("throttle_bits")),
    Reading("DCGM_FI_DEV_PCIE_LINK_GEN", "PCIe generation in use.", _of("pcie_generation")),
    Reading("DCGM_FI_DEV_PCIE_LINK_WIDTH", "PCIe lanes in use.", _of("pcie_width")),
    Reading("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "PCIe retries.", _of("pcie_replays"), True),
    Reading("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "Corrected ECC errors since load.", _of("ecc_corrected_volatile"), True),
    Reading("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "Uncorrected ECC errors since load.", _of("ecc_uncorrected_volatile"), True),
    Reading("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", "Corrected ECC errors since ever.", _of("ecc_corrected_aggregate"), True),
    Reading("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", "Uncorrected ECC errors since ever.", _of("ecc_uncorrected_aggregate"), True),
    Reading("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "Rows remapped, correctable.", _of("rows_corrected"), True),
    Reading("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "Rows remapped, uncorrectable.", _of("rows_uncorrected"), True),
    Reading("DCGM_FI_DEV_ROW_REMAP_PENDING", "Whether a reset is needed to remap a row.", _of("rows_pending")),
    Reading("DCGM_FI_DEV_ROW_REMAP_FAILURE", "Whether remapping of rows has failed.", _of("rows_failed")),
    Reading("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVLink flit CRC errors.", _of("nvlink_crc_flit_errors"), True),
    Reading("DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "NVLink data CRC errors.", _of("nvlink_crc_data_errors"), True),
    Reading("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "NVLink retries.", _of("nvlink_replay_errors"), True),
    Reading("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "NVLink recoveries.", _of("nvlink_recovery_errors"), True),
    Reading("weft_gpu_throttled_power_seconds_total", "Time slowed for power.", _of("throttled_power_ns", 1e-9), True),
    Reading("weft_gpu_throttled_thermal_seconds_total", "Time slowed for heat.", _of("throttled_thermal_ns", 1e-9), True),
    Reading("weft_gpu_pcie_transmitted_bytes_total", "Bytes sent over PCIe.", _of("pcie_tx_bytes"), True),
    Reading("weft_gpu_pcie_received_bytes_total", "Bytes received over PCIe.", _of("pcie_rx_bytes"), True),
    Reading("weft_gpu_nvlink_transmitted_bytes_total", "Bytes sent over all NVLinks.", _of("nvlink_tx_kib", 1024), True),
    Reading("weft_gpu_nvlink_received_bytes_total", "Bytes received over all NVLinks.", _of("nvlink_rx_kib", 1024), True),
    Reading("weft_gpu_nvlinks_active", "NVLinks that are up.", _of("nvlinks_active")),
)  # fmt: skip
DEVICE_READINGS = (  # of GPUs and of MIG devices
    Reading("DCGM_FI_DEV_FB_TOTAL", "Memory (in MiB).", _mib("memory_total_bytes")),
    Reading("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", _mib("memory_free_bytes")),
    Reading("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", _mib("memory_used_bytes")),
    Reading("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "Ratio of time in which a kernel ran.", _graphics),
    Reading("DCGM_FI_PROF_SM_ACTIVE", "Ratio of cycles in which an SM has a warp.", _of("sm_active")),
    Reading("DCGM_FI_PROF_SM_OCCUPANCY", "Ratio of resident warps to the most.", _of("sm_occupancy")),
    Reading("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles in which tensor cores work.", _of("tensor_active")),
    Reading("DCGM_FI_PROF_DRAM_ACTIVE", "Ratio of the memory's cycles with data.", _of("dram_active")),
    Reading("DCGM_FI_PROF_PIPE_FP64_ACTIVE", "Ratio of cycles with fp64 work.", _of("fp64_active")),
    Reading("DCGM_FI_PROF_PIPE_FP32_ACTIVE", "Ratio of cycles with fp32 work.", _of("fp32_active")),
    Reading("DCGM_FI_PROF_PIPE_FP16_ACTIVE", "Ratio of cycles with fp16 work.", _of("fp16_active")),
)


@dataclass
class XidCounts:
    """XID errors since the exporter started, by GPU and code: repeats count, and no code hides another."""

    totals: Counter[tuple[str, int]] = field(default_factory=Counter)
    recent: "deque[Xid]" = field(default_factory=lambda: deque(maxlen=10_000))

    def add(self, xid: Xid) -> None:
        self.totals[xid.uuid, xid.code] += 1
        self.recent.append(xid)

    def within(self, now: float) -> Counter[tuple[str, int]]:
        """Of the last five minutes."""
        return Counter((x.uuid, x.code) for x in list(self.recent) if x.time > now - XID_WINDOW_S)

    def last(self, uuid: str, now: float) -> int:
        """The newest code of the last five minutes, else 0: DCGM's own goes on saying it until it is restarted."""
        return next((x.code for x in reversed(list(self.recent)) if x.uuid == uuid and x.time > now - XID_WINDOW_S), 0)


@dataclass
class State:
    """What the metrics are made of. ``seen``: every GPU since the start by UUID (by index, if it never said it), so that one
    that vanished is missed."""

    hostname: str
    snapshot: Snapshot = field(default_factory=Snapshot)
    attribution: Attribution = field(default_factory=Attribution)
    seen: dict[str, Gpu] = field(default_factory=dict)
    xids: XidCounts = field(default_factory=XidCounts)
    quarantines: Quarantines | None = None  # None: not asked for, or not readable


@dataclass
class Family:
    """A metric and its samples: labels as text, and value."""

    name: str
    help: str
    kind: str = "gauge"
    samples: list[tuple[str, float]] = field(default_factory=list)

    def text(self) -> str:
        """Prometheus' text format (prometheus.io/docs/instrumenting/exposition_formats)."""
        lines = [f"# HELP {self.name} {self.help}\n# TYPE {self.name} {self.kind}\n"]
        lines += [f"{self.name}{{{labels}}} {value + 0}\n" for labels, value in self.samples]  # + 0: a bool is a number
        return "".join(lines)


def render(state: State, now: float) -> str:
    """The page that Prometheus scrapes."""
    return "".join(family.text() for family in families(state, now) if family.samples)


def label(value: object) -> str:
    """A label's value: valid UTF-8 without control characters, of bounded length, quotes and backslashes escaped."""
    text = str(value)[:LONGEST_LABEL].encode("utf-8", "replace").decode("utf-8")
    text = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", "?", text)
    return text.replace("\\", r"\\").replace('"', r"\"")


def labels(**values: object) -> str:
    return ",".join(f'{name}="{label(value)}"' for name, value in values.items())


def gpu_labels(state: State, gpu: Gpu) -> str:
    """dcgm-exporter's labels of a GPU."""
    return labels(
        gpu=gpu.index,
        UUID=gpu.uuid,
        pci_bus_id=gpu.pci,
        device=f"nvidia{gpu.index if gpu.minor is None else gpu.minor}",
        modelName=gpu.name,
        Hostname=state.hostname,
        DCGM_FI_DRIVER_VERSION=state.snapshot.driver,
    )


def mig_labels(base: str, mig: Mig) -> str:
    instance = "" if mig.gpu_instance is None else mig.gpu_instance
    return f"{base},{labels(GPU_I_PROFILE=mig.profile, GPU_I_ID=instance)}"


Targets = list[tuple[Any, list[str]]]  # a GPU or MIG device, and its labels once for each pod or job that has it


def families(state: State, now: float) -> Iterator[Family]:
    """Every metric of a state."""
    gpus: Targets = []
    devices: Targets = []
    for gpu in state.snapshot.gpus:
        if not gpu.problem:
            base = gpu_labels(state, gpu)
            gpus.append((gpu, _each(base, state.attribution, gpu.uuid)))
            devices.append(gpus[-1])
            devices += [(mig, _each(mig_labels(base, mig), state.attribution, mig.uuid)) for mig in gpu.mig]
    yield from (_family(reading, gpus) for reading in GPU_READINGS)
    yield from (_family(reading, devices) for reading in DEVICE_READINGS)
    yield _throttling(gpus)
    yield from _errors(state, now)
    yield _holders(state)
    if state.quarantines is not None:
        yield from _quarantines(state, state.quarantines)
    yield from _own(state)


def _each(base: str, attribution: Attribution, uuid: str) -> list[str]:
    held = attribution.labels.get(uuid)
    return [f"{base},{labels(**holder)}" for holder in held] if held else [base]


def _family(reading: Reading, targets: Targets) -> Family:
    family = Family(reading.name, reading.help, "counter" if reading.counter else "gauge")
    for target, each in targets:
        value = reading.value(target)
        if value is not None:
            family.samples += [(of, value) for of in each]
    return family


def _throttling(targets: Targets) -> Family:
    family = Family("weft_gpu_throttled", "Whether clocks are lowered for this reason now (nvidia-smi's names).")
    for gpu, each in targets:
        if gpu.throttle_bits is not None:
            now = set(gpu.throttle_reasons)
            family.samples += [(f'{of},reason="{r}"', r in now) for of in each for r in THROTTLE.values()]
    return family


def _errors(state: State, now: float) -> Iterator[Family]:
    """Of every GPU ever seen: also of one that no longer answers."""
    up = Family("weft_gpu_up", "Whether a GPU that was seen since the start still answers.")
    total = Family("weft_gpu_xid_errors_total", "XID errors since the start, by code.", "counter")
    last = Family("DCGM_FI_DEV_XID_ERRORS", "The last XID error within five minutes, else 0.")
    window = Family("DCGM_EXP_XID_ERRORS_COUNT", "XID errors within the window, by code.")
    action = Family("weft_gpu_recovery_action", "1 for the recovery that the driver asks for; action none is 0.")
    answering = {gpu.uuid: gpu for gpu in state.snapshot.gpus if not gpu.problem}
    recent = state.xids.within(now)
    codes: dict[str, set[int]] = {}
    for uuid, code in list(state.xids.totals):
        codes.setdefault(uuid, set()).add(code)
    for uuid, gpu in list(state.seen.items()):  # the reading thread may add one
        base = gpu_labels(state, gpu)
        if not state.snapshot.problem:
            up.samples.append((base, uuid in answering))
        for code in sorted({*USUAL_XIDS, *codes.get(uuid, ())}):
            total.samples.append((f'{base},xid="{code}"', state.xids.totals[uuid, code]))
        newest = state.xids.last(uuid, now)
        last.samples.append((f'{base},err_code="{newest}"' if newest else base, newest))
        for code in sorted(codes.get(uuid, ())):
            more = labels(xid=code, window_size_in_ms=int(XID_WINDOW_S * 1000))
            window.samples.append((f"{base},{more}", recent[uuid, code]))
        found = answering.get(uuid)
        if found and found.recovery_action is not None:
            wanted = found.recovery_action
            action.samples.append((f"{base},{labels(action=wanted)}", wanted != "none"))
    for code in sorted(codes.get("", ())):  # of a GPU that could no longer say which one it is
        unknown = labels(gpu="", UUID="", Hostname=state.hostname, xid=code)
        total.samples.append((unknown, state.xids.totals["", code]))
    yield from (up, total, last, window, action)


def _holders(state: State) -> Family:
    family = Family("weft_gpu_process_memory_bytes", "Memory that processes hold, by user, container and job.")
    names: dict[str, str] = {}
    for gpu in state.snapshot.gpus:
        names[gpu.uuid] = base = labels(gpu=gpu.index, UUID=gpu.uuid, Hostname=state.hostname)
        names |= {mig.uuid: mig_labels(base, mig) for mig in gpu.mig}
    for holder, value in state.attribution.memory.items():
        if holder.uuid in names:
            who = labels(user=holder.user, container_id=holder.container, hpc_job=holder.job)
            family.samples.append((f"{names[holder.uuid]},{who}", value))
    return family


def _quarantines(state: State, found: Quarantines) -> Iterator[Family]:
    host = labels(Hostname=state.hostname)
    holds = found.opened is not None
    yield Family("weft_node_quarantined", "Whether weft health keeps the node out of service.", samples=[(host, holds)])
    if holds:
        since = [(host, found.opened or 0.0)]
        yield Family("weft_node_quarantine_start_timestamp_seconds", "When the quarantine began.", samples=since)
        yield Family("weft_node_quarantine_drained", "Whether the node is empty.", samples=[(host, found.drained)])
    begun = [(host, float(found.begun))]
    yield Family("weft_node_quarantines_total", "Quarantines since weft health first ran here.", "counter", begun)
    incidents = Family("weft_gpu_open_incidents", "Faults that are not repaired yet, by what they need.")
    by_address = {
        gpu.pci.lower().partition(".")[0][-len("0000:9b:00") :]: gpu for gpu in list(state.seen.values()) if gpu.pci
    }
    for (address, fault, action), number in found.incidents.items():
        gpu = by_address.get(address)
        base = gpu_labels(state, gpu) if gpu else labels(gpu="", UUID="", pci_bus_id=address, Hostname=state.hostname)
        incidents.samples.append((f"{base},{labels(fault=fault, action=action)}", number))
    yield incidents


def _own(state: State) -> Iterator[Family]:
    host = labels(Hostname=state.hostname)
    yield Family("weft_nvml_up", "Whether the driver answers.", samples=[(host, not state.snapshot.problem)])
    read = [(host, state.snapshot.time)]
    yield Family("weft_exporter_reading_timestamp_seconds", "When the GPUs were last read.", samples=read)
    sources: list[tuple[str, float]] = [
        (f"{host},{labels(source=source)}", ok) for source, ok in state.attribution.up.items()
    ]
    yield Family("weft_exporter_source_up", "Whether a source of pods or jobs answers.", samples=sources)
