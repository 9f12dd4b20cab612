"""How GPUs, NVSwitches, NUMA nodes and network cards hang together: from NVML and sysfs, as a matrix and a picture.

The names of connections are nvidia-smi's: NV18 (so many NVLinks), PIX (one PCIe bridge between), PXB (several), PHB (the
host bridge), NODE (within a NUMA node), SYS (across NUMA nodes).
"""

import contextlib
import importlib
import re
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

INSTALL = "pip install nvidia-ml-py"
SYS = Path("/sys")
ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
READ, WRITE = 0, 1  # NVML's indices of peer capabilities
NO_PEER = {
    1: "the chipset does not allow it",
    2: "the GPU does not support it (GeForce cards)",
    3: "the GPUs are behind different host bridges",
    4: "it is disabled by a registry key of the driver (NVreg_RegistryDwords)",
    5: "the driver does not support it here (virtual machine, or MIG is on)",
    6: "the driver does not say why",
}
# GB/s in one direction per lane of a PCIe generation, after line coding
PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# GB/s of one link and direction by NVML's number of the NVLink version (2.0, 2.2, 3.0, 3.1, 4.0: 25; 5.0: 50)
NVLINK = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
SWITCH = 2  # NVML's type of a remote NVLink device


@dataclass
class Gpu:
    """``pcie``: generation and width now, and what both ends can."""

    index: int
    name: str
    pci: str
    numa: int | None
    pcie_generation: int = 0
    pcie_width: int = 0
    pcie_most_generation: int = 0
    pcie_most_width: int = 0
    nvlinks: int = 0
    nvlink_gb_s: float | None = None  # of one link and direction
    to_switches: int = 0  # NVLinks that end at an NVSwitch

    @property
    def pcie_gb_s(self) -> float | None:
        """The theoretical rate of the slot, one direction."""
        lane = PCIE_LANE.get(self.pcie_most_generation)
        return lane * self.pcie_width if lane else None


@dataclass
class Pair:
    """The connection of two GPUs: ``kind`` NV18, PIX …; ``peer`` whether one reads and writes the other's memory."""

    a: int
    b: int
    kind: str
    gb_s: float | None  # theoretical, one direction
    peer: bool
    why: str = ""


@dataclass
class Nic:
    """A network card: InfiniBand or RoCE device, or an Ethernet interface on PCIe."""

    name: str
    pci: str
    numa: int | None
    gbit_s: float | None
    nearest: dict[int, str] = field(default_factory=dict)  # GPU -> PIX, PXB, NODE, SYS


@dataclass
class Node:
    """A NUMA node."""

    index: int
    cpus: str
    memory_gib: float
    distances: list[int]


@dataclass
class Topology:
    """``notes`` says what is not there and what is not as it should be."""

    gpus: list[Gpu] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    nics: list[Nic] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def pair(self, a: int, b: int) -> Pair | None:
        return next((p for p in self.pairs if {p.a, p.b} == {a, b}), None)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def matrix(self) -> list[list[str]]:
        """Rows of the matrix, with its heading: GPUs and network cards against GPUs, then PCIe and NUMA."""
        heads = [f"GPU{g.index}" for g in self.gpus]
        rows = [["", *heads, "PCIe", "NUMA"]]
        for g in self.gpus:
            cells = ["X" if h.index == g.index else self._cell(g.index, h.index) for h in self.gpus]
            rows.append([f"GPU{g.index}", *cells, _pcie(g), _number(g.numa)])
        for n in self.nics:
            rows.append([n.name, *(n.nearest.get(g.index, "") for g in self.gpus), "", _number(n.numa)])
        return rows

    def _cell(self, a: int, b: int) -> str:
        pair = self.pair(a, b)
        return "?" if pair is None else pair.kind + ("" if pair.peer else " (no peer access)")


def read(nvml: Any = None, sys: Path = SYS) -> Topology:
    """This machine's topology; what is missing stands in ``notes``.

    Args:
        nvml: NVML's module; by default ``pynvml``.
        sys: where sysfs is.
    """
    found = Topology(nodes=read_nodes(sys), nics=_nics(sys))
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            found.notes.append(f"GPUs and NVLinks are not listed: NVML's module is missing ({INSTALL})")
            return _finished(found, sys)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        found.notes.append(f"no GPU: NVML answers '{error}' (is the NVIDIA driver installed? weft doctor)")
        return _finished(found, sys)
    try:
        _gpus(found, nvml, sys)
    finally:
        nvml.nvmlShutdown()
    return _finished(found, sys)


def link_gb_s(a: int, b: int) -> float | None:
    """The theoretical rate between two GPUs, one direction; None where it is not known."""
    pair = read().pair(a, b)
    return pair.gb_s if pair else None


def _gpus(found: Topology, nvml: Any, sys: Path) -> None:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    remotes: list[list[tuple[int, str]]] = []  # of each GPU's active links: type and PCI address of the other end
    for i, handle in enumerate(handles):
        name = nvml.nvmlDeviceGetName(handle)
        pci = _address(nvml.nvmlDeviceGetPciInfo(handle).busId)
        gpu = Gpu(i, name.decode() if isinstance(name, bytes) else name, pci, _numa(sys / "bus/pci/devices" / pci))
        for field_name, call in (
            ("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
            ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
            ("pcie_most_generation", "nvmlDeviceGetMaxPcieLinkGeneration"),
            ("pcie_most_width", "nvmlDeviceGetMaxPcieLinkWidth"),
        ):
            with contextlib.suppress(nvml.NVMLError):
                setattr(gpu, field_name, getattr(nvml, call)(handle))
        remotes.append(_links(gpu, handle, nvml))
        found.gpus.append(gpu)
    for a in range(len(handles)):
        for b in range(a + 1, len(handles)):
            found.pairs.append(_pair(found.gpus[a], found.gpus[b], remotes, handles, nvml))


def _links(gpu: Gpu, handle: Any, nvml: Any) -> list[tuple[int, str]]:
    found = []
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            found.append((kind, _address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)))
        except nvml.NVMLError:  # no such link
            continue
    gpu.nvlinks, gpu.to_switches = len(found), sum(kind == SWITCH for kind, _ in found)
    if found:
        gpu.nvlink_gb_s = _link_speed(handle, nvml)
    return found


def _link_speed(handle: Any, nvml: Any) -> float | None:
    """GB/s of one NVLink and direction: what the driver says, else what its version of NVLink gives."""
    for name in ("NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON", "NVML_FI_DEV_NVLINK_SPEED_MBPS_L0"):
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            (speed,) = nvml.nvmlDeviceGetFieldValues(handle, [getattr(nvml, name)])
            if not speed.nvmlReturn and speed.value.uiVal:
                return speed.value.uiVal / 1000
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        return NVLINK.get(nvml.nvmlDeviceGetNvLinkVersion(handle, 0))
    return None


def _pair(a: Gpu, b: Gpu, remotes: list[list[tuple[int, str]]], handles: list[Any], nvml: Any) -> Pair:
    direct = sum(address == b.pci for kind, address in remotes[a.index] if kind != SWITCH)
    links = direct or min(a.to_switches, b.to_switches)
    try:
        kind = ANCESTORS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(handles[a.index], handles[b.index]), "?")
    except nvml.NVMLError:
        kind = "?"
    rate = a.pcie_gb_s and b.pcie_gb_s and min(a.pcie_gb_s, b.pcie_gb_s)
    if links:
        kind, rate = f"NV{links}", links * a.nvlink_gb_s if a.nvlink_gb_s else None
    states = []
    for what in (READ, WRITE):
        try:
            states.append(nvml.nvmlDeviceGetP2PStatus(handles[a.index], handles[b.index], what))
        except nvml.NVMLError:
            states.append(6)
    why = next((NO_PEER.get(s, NO_PEER[6]) for s in states if s), "")
    return Pair(a.index, b.index, kind, rate, not why, why)


def _finished(found: Topology, sys: Path) -> Topology:
    """Fills in how near network cards are, and the notes."""
    devices = sys / "bus/pci/devices"
    for nic in found.nics:
        nic.nearest = {g.index: _nearness(devices / nic.pci, devices / g.pci, nic.numa, g.numa) for g in found.gpus}
    for g in found.gpus:
        if g.pcie_most_width and g.pcie_width < g.pcie_most_width:
            found.notes.append(
                f"GPU{g.index} runs at x{g.pcie_width}, it can x{g.pcie_most_width}: reseat it, or use another slot"
            )
    for p in found.pairs:
        if not p.peer:
            found.notes.append(f"GPU{p.a} and GPU{p.b} do not reach each other's memory: {p.why}")
        elif p.kind in ("SYS", "NODE", "PHB"):
            found.notes.append(
                f"GPU{p.a} and GPU{p.b} talk through the processor ({p.kind}): expect less than the slot's rate"
                + ("" if p.kind != "SYS" else ", and more latency, across NUMA nodes")
            )
    if found.pairs and any((sys / "class/iommu").glob("*")) and any(not p.kind.startswith("NV") for p in found.pairs):
        found.notes.append(
            "an IOMMU is on: PCIe peer traffic then goes through the root complex; on bare metal try iommu=pt, and "
            "disable ACS on the bridges"
        )
    if not found.nics:
        found.notes.append("no network card on PCIe is visible (sysfs)")
    return found


def read_nodes(sys: Path = SYS) -> list[Node]:
    """The NUMA nodes."""
    found = []
    for folder in sorted((sys / "devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(folder / "meminfo"))
        distances = [int(d) for d in _text(folder / "distance").split()]
        memory = int(total[1]) / 2**20 if total else 0.0
        found.append(Node(int(folder.name[4:]), _text(folder / "cpulist"), round(memory, 1), distances))
    return found


def _nics(sys: Path) -> list[Nic]:
    found = []
    for folder in sorted((sys / "class/infiniband").glob("*")):
        rate = re.match(r"([\d.]+)", _text(folder / "ports/1/rate"))
        found.append(_nic(folder, float(rate[1]) if rate else None))
    known = {nic.pci for nic in found}
    for folder in sorted((sys / "class/net").glob("*")):
        if (folder / "device").exists():
            with contextlib.suppress(ValueError):
                nic = _nic(folder, max(int(_text(folder / "speed") or -1), 0) / 1000 or None)
                if nic.pci not in known:  # the Ethernet side of a RoCE card
                    found.append(nic)
    return [nic for nic in found if re.match(r"[0-9a-f]{4}:", nic.pci)]


def _nic(folder: Path, gbit_s: float | None) -> Nic:
    device = (folder / "device").resolve()
    return Nic(folder.name, device.name, _numa(device), gbit_s)


def _nearness(a: Path, b: Path, numa_a: int | None, numa_b: int | None) -> str:
    """By the bridges that two devices' sysfs paths share."""
    first, second = a.resolve().parts, b.resolve().parts
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    bridges = [part for part in first[:shared] if re.match(r"[0-9a-f]{4}:[0-9a-f]{2}:", part)]
    if bridges:
        return "PIX" if len(first) - shared <= 2 else "PXB"
    if any(part.startswith("pci") for part in first[:shared]):
        return "PHB"
    return "NODE" if numa_a == numa_b else "SYS"


def _address(bus: str | bytes) -> str:
    """sysfs's form of NVML's PCI address: a domain of four digits, small letters."""
    text = (bus.decode() if isinstance(bus, bytes) else bus).lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}"


def _numa(device: Path) -> int | None:
    text = _text(device / "numa_node")
    return int(text) if text.lstrip("-").isdigit() and int(text) >= 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _pcie(g: Gpu) -> str:
    if not g.pcie_width:
        return "?"
    idle = f", gen {g.pcie_generation} now" if g.pcie_generation < g.pcie_most_generation else ""
    return f"gen {g.pcie_most_generation} x{g.pcie_width}{idle}"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
