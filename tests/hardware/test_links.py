"""The topology of machines that are made up: NVML and sysfs as they answer there."""

import json
from types import SimpleNamespace

import pytest

from weft.hardware import topology
from weft.hardware.topology_picture import draw


class Nvml:
    """Four GPUs in two sockets: 0 and 1 with 18 links to a switch, 2 and 3 directly with 4; 3 in a slot of x8."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    PCI = ("00000000:1A:00.0", "00000000:1B:00.0", "00000000:8A:00.0", "00000000:8B:00.0")

    class NVMLError(Exception):
        pass

    def __init__(self, error="", speed=26562):
        self.error, self.speed = error, speed

    def nvmlInit(self):
        if self.error:
            raise self.NVMLError(self.error)

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return 4

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetName(self, h):
        return b"Made Up 9000"

    def nvmlDeviceGetPciInfo(self, h):
        return SimpleNamespace(busId=self.PCI[h])

    def nvmlDeviceGetCurrPcieLinkGeneration(self, h):
        return 5

    nvmlDeviceGetMaxPcieLinkGeneration = nvmlDeviceGetCurrPcieLinkGeneration

    def nvmlDeviceGetCurrPcieLinkWidth(self, h):
        return 8 if h == 3 else 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, h):
        return 16

    def nvmlDeviceGetNvLinkState(self, h, link):
        if h > 1 and link >= 4:
            raise self.NVMLError("no such link")
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, h, link):
        return 0 if h > 1 else 2

    def nvmlDeviceGetNvLinkRemotePciInfo(self, h, link):
        return SimpleNamespace(busId=self.PCI[5 - h] if h > 1 else "00000000:05:00.0")

    def nvmlDeviceGetFieldValues(self, h, fields):
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.speed))]

    def nvmlDeviceGetNvLinkVersion(self, h, link):
        return 6

    def nvmlDeviceGetTopologyCommonAncestor(self, a, b):
        return 50 if (a < 2) != (b < 2) else 30

    def nvmlDeviceGetP2PStatus(self, a, b, what):
        return 3 if (a < 2) != (b < 2) else 0


@pytest.fixture
def sysfs(tmp_path):
    """Two NUMA nodes; a card beside GPU 0 and 1's bridges, another in the other socket."""

    def device(path, numa):
        folder = tmp_path / "devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        link = tmp_path / "bus/pci/devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder

    device("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:1a:00.0", 0)
    device("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:1b:00.0", 0)
    device("pci0000:85/0000:85:01.0/0000:8a:00.0", 1)
    device("pci0000:85/0000:85:02.0/0000:8b:00.0", 1)
    for name, path, numa in (
        ("mlx5_0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:19:00.0", 0),
        ("mlx5_1", "pci0000:90/0000:90:01.0/0000:91:00.0", 1),
    ):
        card = tmp_path / "class/infiniband" / name
        (card / "ports/1").mkdir(parents=True)
        (card / "ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
        (card / "device").symlink_to(device(path, numa))
    for i in range(2):
        node = tmp_path / f"devices/system/node/node{i}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{32 * i}-{32 * i + 31}\n")
        (node / "distance").write_text("10 21\n" if i == 0 else "21 10\n")
        (node / "meminfo").write_text(f"Node {i} MemTotal:       1048576 kB\n")
    return tmp_path


def test_links_peers_cards_and_what_is_wrong(sysfs, tmp_path):
    found = topology.read(Nvml(), sysfs)
    switched, direct, across = found.pair(0, 1), found.pair(3, 2), found.pair(0, 2)
    assert (switched.kind, switched.peer) == ("NV18", True) and switched.gb_s == pytest.approx(18 * 26.562)
    assert (direct.kind, direct.gb_s) == ("NV4", pytest.approx(4 * 26.562))
    assert (across.kind, across.peer) == ("SYS", False) and across.gb_s == pytest.approx(63, rel=0.01)
    assert [(g.pci, g.numa, g.pcie_width) for g in found.gpus][3] == ("0000:8b:00.0", 1, 8)
    first, second = found.nics
    assert (first.gbit_s, first.nearest) == (400, {0: "PIX", 1: "PIX", 2: "SYS", 3: "SYS"})
    assert second.nearest == {0: "SYS", 1: "SYS", 2: "NODE", 3: "NODE"}
    assert "GPU3 runs at x8, it can x16" in " ".join(found.notes)
    assert "GPU0 and GPU2 do not reach each other's memory: the GPUs are behind different host bridges" in found.notes
    assert (
        topology.read(Nvml(speed=0), sysfs).pair(0, 1).gb_s == 18 * 25
    )  # a driver that does not say, in a virtual machine
    matrix = found.matrix()
    assert matrix[1] == ["GPU0", "X", "NV18", "SYS (no peer access)", "SYS (no peer access)", "gen 5 x16", "0"]
    assert found.nodes[1].distances == [21, 10] and found.nodes[0].memory_gib == 1.0
    json.dumps(found.to_dict())
    assert draw(found, str(tmp_path / "picture.svg")).read_text().count("GPU2") >= 1


def test_machine_without_gpus_says_so(sysfs, tmp_path):
    found = topology.read(Nvml("Driver Not Loaded"), sysfs)
    assert found.gpus == [] and len(found.nodes) == 2 and any("no GPU: NVML answers" in n for n in found.notes)
    assert draw(found, str(tmp_path / "picture.svg")).exists()
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        draw(found, "picture.pdf")


def test_bandwidth_of_a_cpu(command, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, out, _ = command("bandwidth", "--size", "4M", "--json")
    found = json.loads(out)
    assert code == 0 and found["records"][0]["value"] > 0.1
    assert any("no GPU that PyTorch sees" in note for note in found["notes"])


def test_processor_lists():
    from weft.hardware.bandwidth import _cpus

    assert _cpus("0-2,8") == {0, 1, 2, 8} and _cpus("") == set()
