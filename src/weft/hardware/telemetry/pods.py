"""Which pod has which GPU: from the kubelet's pod-resources socket, or from a mapping file where gRPC is not installed.

The messages are k8s.io/kubelet/pkg/apis/podresources/v1; of them only names and device ids are read.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
INSTALL = "pip install 'weft[kubernetes]' (or grpcio)"
TIMEOUT_S = 2.0
LONGEST_ANSWER = 16 * 2**20  # as the kubelet's own client has it
DRA_DRIVER = "gpu.nvidia.com"


@dataclass(frozen=True)
class Pod:
    """A container of a pod; ``replica`` is its share of a GPU that is shared by time-slicing or MPS."""

    namespace: str
    pod: str
    container: str
    replica: str = ""

    def labels(self) -> dict[str, str]:
        labels = {"namespace": self.namespace, "pod": self.pod, "container": self.container}
        return {**labels, "vgpu": self.replica} if self.replica else labels


@dataclass(frozen=True)
class DeviceId:
    """A device as its plugin names it: by ``uuid``, or by the GPU's ``index`` and the MIG ``instance`` on it."""

    uuid: str = ""
    index: int | None = None
    instance: int | None = None
    replica: str = ""

    @staticmethod
    def parse(text: str) -> "DeviceId":
        """NVIDIA's plugin (``GPU-…``, ``MIG-…``, shared ``GPU-…::2``), GKE's (``nvidia0/gi1/vgpu2``), DRA (``gpu-0``)."""
        found = re.fullmatch(r"(?:nvidia|gpu-)(\d+)(?:/gi(\d+))?(?:/vgpu(\d+))?", text)
        if found:
            index, instance, replica = found.groups()
            return DeviceId("", int(index), int(instance) if instance else None, replica or "")
        uuid, _, replica = text.partition("::")
        return DeviceId(uuid, replica=replica)


class Kubelet:
    """The kubelet's socket. Raises ImportError without grpcio."""

    def __init__(self, socket: Path = SOCKET) -> None:
        try:
            import grpc
        except ModuleNotFoundError:
            raise ImportError(
                f"the kubelet's socket {socket} is read over gRPC: {INSTALL}, or give a mapping file"
            ) from None
        self.socket, self.error = socket, grpc.RpcError
        self.channel = grpc.insecure_channel(f"unix:{socket}", [("grpc.max_receive_message_length", LONGEST_ANSWER)])
        self.list = self.channel.unary_unary(
            "/v1.PodResourcesLister/List", request_serializer=bytes, response_deserializer=bytes
        )

    def read(self) -> dict[DeviceId, list[Pod]]:
        """Raises ConnectionError where the kubelet does not answer, ValueError where its answer cannot be read."""
        try:
            answer = self.list(b"", timeout=TIMEOUT_S)
        except self.error as error:
            raise ConnectionError(f"the kubelet at {self.socket} does not answer: {error.code().name}") from None
        found: dict[DeviceId, list[Pod]] = {}
        for name, namespace, container, device in allocations(answer):
            parsed = DeviceId.parse(device)
            found.setdefault(parsed, []).append(Pod(namespace, name, container, parsed.replica))
        return found

    def close(self) -> None:
        self.channel.close()


class MappingFile:
    """A JSON list of ``{"namespace", "pod", "container", "devices": [ids as the kubelet has them]}``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[DeviceId, list[Pod]]:
        """Raises OSError and ValueError where the file cannot be read."""
        entries = json.loads(self.path.read_text(encoding="utf-8"))
        found: dict[DeviceId, list[Pod]] = {}
        try:
            for entry in entries:
                for device in entry["devices"]:
                    parsed = DeviceId.parse(device)
                    pod = Pod(entry["namespace"], entry["pod"], entry.get("container", ""), parsed.replica)
                    found.setdefault(parsed, []).append(pod)
        except (KeyError, TypeError, AttributeError):
            wanted = '[{"namespace": …, "pod": …, "container": …, "devices": ["GPU-…"]}, …]'
            raise ValueError(f"{self.path}: not a list of pods; expected {wanted}") from None
        return found

    def close(self) -> None:
        pass


def default(say: Callable[[str], None]) -> Path | None:
    """The kubelet's socket where this machine has one that can be read; ``say`` receives why it cannot."""
    if not SOCKET.is_socket():
        return None
    if importlib.util.find_spec("grpc") is None:
        say(f"GPUs' pods are not named: the kubelet's socket is read over gRPC: {INSTALL}")
        return None
    return SOCKET


def source(path: Path) -> Kubelet | MappingFile:
    """A socket is the kubelet's, any other file a mapping."""
    return Kubelet(path) if path.is_socket() else MappingFile(path)


# ---- the wire format of protocol buffers, of which this needs three messages


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, bytes or integer) of a message's fields. Raises ValueError where it ends within one."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(message) or shift > 63:
                raise ValueError("the kubelet's answer is cut short")
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None:
            if kind != 2:
                raise ValueError(f"the kubelet's answer has a field of type {kind}")
            length = varint()
        if at + length > len(message):
            raise ValueError("the kubelet's answer is cut short")
        yield key >> 3, message[at : at + length]
        at += length


def several(message: bytes, number: int) -> list[bytes]:
    return [value for n, value in fields(message) if n == number and isinstance(value, bytes)]


def text(message: bytes, number: int) -> str:
    return b"".join(several(message, number)[-1:]).decode(errors="replace")


def allocations(answer: bytes) -> Iterator[tuple[str, str, str, str]]:
    """(pod, namespace, container, device id) of a ListPodResourcesResponse."""
    for pod in several(answer, 1):
        for container in several(pod, 3):
            who = text(pod, 1), text(pod, 2), text(container, 1)
            for devices in several(container, 2):
                if text(devices, 1).startswith("nvidia.com/"):
                    for device in several(devices, 2):
                        yield (*who, device.decode(errors="replace"))
            for resource in several(container, 5):  # dynamic resource allocation
                for claimed in several(resource, 4):
                    if text(claimed, 2) == DRA_DRIVER:
                        yield (*who, text(claimed, 4))
