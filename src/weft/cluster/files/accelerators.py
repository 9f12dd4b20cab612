"""Accelerators among the resources of Kubernetes' nodes and pods: whole ones, parts whose size the node says, others.

Time slices, MPS and MIG are those of NVIDIA's device plugin; shares of a GPU's memory and cores those of HAMi, Volcano,
gpushare, Tencent's GPU manager, Koordinator, KAI, Intel's and AWS' device plugins and of FGD's simulator.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from weft.cluster.files.kubernetes import quantity
from weft.cluster.files.shares import gpus_holding, of_mig

PRODUCT = "nvidia.com/gpu.product"  # the label that NVIDIA's feature discovery gives a node, and a pod selects
MODELS = (PRODUCT, "alibabacloud.com/gpu-card-model", "aliyun.accelerator/nvidia_name")  # labels that name the type
MEMORY = "nvidia.com/gpu.memory"  # a label, MiB of each GPU
COUNT = "nvidia.com/gpu.count"  # a label, GPUs of the node
REPLICAS = ".replicas"  # the end of a label: time slices or MPS clients of each of a resource
WHOLE = re.compile(
    r"(?!koordinator\.sh/)[^/]+/(p?gpu|[ntx]pu|fpga|mlu\d*|[gd]cu|gaudi\d?|ascend\w*|neuron(device)?)"
    r"|gpu\.intel\.com/(i915|xe)",
    re.IGNORECASE,
)
SHARED = re.compile(
    r"(nvidia\.com/(?:gpu|mig-.*))\.shared"
)  # a time slice or MPS client, where the plugin renames them
MIG = re.compile(r"nvidia\.com/mig-([1-9])g\..*")  # a slice of so many sevenths of a GPU
SINGLE = re.compile(r".*-MIG-([1-9])g\..*")  # the product of a node whose GPUs are all cut into such slices
PART = re.compile(r"[^/]*/.*(gpu|[ntx]pu|mlu|[gd]cu|vcuda|gaudi|ascend|neuron|mig-|[sdtqc]px_).*", re.IGNORECASE)


@dataclass(frozen=True)
class Part:
    """Of an accelerator.

    Args:
        size: 1 is a whole one.
        apart: several are of different accelerators; otherwise they may be of one.
    """

    size: Fraction
    apart: bool = False


@dataclass(frozen=True)
class Scheme:
    """How a scheduler writes parts of GPUs.

    Args:
        count: the resource that says of how many GPUs a container takes its part; without it, of one.
        amounts: resources of a container → what a whole GPU has of it; 0 where the node says it.
        devices: resources of a node → how many of it a GPU has; 0 where the label :data:`COUNT` says how many GPUs there are.
        mib: of the amounts, the one in MiB, which the label :data:`MEMORY` gives too.
        registers: annotations of a node that list its GPUs.
        several: a container may request as much as several GPUs have.
    """

    count: str
    amounts: Mapping[str, int]
    devices: Mapping[str, int] = field(default_factory=dict)
    mib: str = ""
    registers: tuple[str, ...] = ()
    several: bool = False


HAMI = Scheme(
    "nvidia.com/gpu",
    {"nvidia.com/gpumem": 0, "nvidia.com/gpumem-percentage": 100, "nvidia.com/gpucores": 100},
    {"nvidia.com/gpucores": 100},
    "nvidia.com/gpumem",
    ("hami.io/node-nvidia-register", "4pd.io/node-nvidia-register"),
)
VOLCANO = Scheme(
    "volcano.sh/vgpu-number",
    {"volcano.sh/vgpu-memory": 0, "volcano.sh/vgpu-memory-percentage": 100, "volcano.sh/vgpu-cores": 100},
    {"volcano.sh/vgpu-cores": 100, "volcano.sh/vgpu-number": 0},
    "volcano.sh/vgpu-memory",
    ("volcano.sh/node-vgpu-register",),
)
VOLCANO_SHARE = Scheme("volcano.sh/gpu-number", {"volcano.sh/gpu-memory": 0}, {"volcano.sh/gpu-number": 1})
GPUSHARE = Scheme("aliyun.com/gpu-count", {"aliyun.com/gpu-mem": 0, "aliyun.com/gpu-core.percentage": 100},
                  {"aliyun.com/gpu-count": 1})  # fmt: skip
TENCENT = Scheme("", {"tencent.com/vcuda-core": 100, "tencent.com/vcuda-memory": 0}, {"tencent.com/vcuda-core": 100},
                 several=True)  # fmt: skip
KOORDINATOR = Scheme(
    "koordinator.sh/gpu.shared",
    {"koordinator.sh/gpu": 100, "koordinator.sh/gpu-core": 100, "koordinator.sh/gpu-memory-ratio": 100,
     "koordinator.sh/gpu-memory": 0},
    {"koordinator.sh/gpu-core": 100, "koordinator.sh/gpu": 100},
    several=True,
)  # fmt: skip
INTEL = [
    Scheme(f"gpu.intel.com/{driver}", {"gpu.intel.com/millicores": 1000, "gpu.intel.com/memory.max": 0},
           {"gpu.intel.com/millicores": 1000})
    for driver in ("i915", "xe")
]  # fmt: skip
NEURON = Scheme("", {"aws.amazon.com/neuroncore": 0}, {"aws.amazon.com/neuron": 1, "aws.amazon.com/neurondevice": 1},
                several=True)  # fmt: skip
FGD = Scheme("alibabacloud.com/gpu-count", {"alibabacloud.com/gpu-milli": 1000}, {"alibabacloud.com/gpu-count": 1})
KAI = Scheme("gpu-fraction-num-devices", {"gpu-fraction": 1, "gpu-memory": 0}, mib="gpu-memory")  # annotations of a pod
SCHEMES = (HAMI, VOLCANO, VOLCANO_SHARE, GPUSHARE, TENCENT, KOORDINATOR, *INTEL, NEURON, FGD, KAI)
WHOLE_COUNTS = [scheme.count for scheme in (VOLCANO, VOLCANO_SHARE, GPUSHARE, FGD)]  # alone, they count whole GPUs
NOTES = (KAI.count, *KAI.amounts)


class Unknown(Exception):
    """A part of an accelerator whose size nothing says. The message is the reason to leave out what has it."""


@dataclass(frozen=True)
class Sharing:
    """What a node says of its accelerators.

    Args:
        labels: those that say what its resources count.
        one: resource → what one GPU has of it.
    """

    labels: tuple[tuple[str, str], ...] = ()
    one: tuple[tuple[str, Fraction], ...] = ()


def sharing(node: Mapping[str, Any]) -> Sharing:
    """Of a node's labels, annotations and resources.

    Raises:
        ValueError: a number that is none.
    """
    labels, has = _labels(node), _resources(node)
    said = tuple(
        sorted((name, str(text)) for name, text in labels.items() if name == PRODUCT or name.endswith(REPLICAS))
    )
    one: dict[str, Fraction] = {}
    for scheme in SCHEMES:
        devices = _devices(scheme, node)
        mib = quantity(labels.get(MEMORY, 0)) or next(iter(_registered(scheme, node)), 0.0)
        for name in (name for name, whole in scheme.amounts.items() if not whole):
            if devices and (amount := quantity(has.get(name, 0))):
                one[name] = Fraction(amount) / devices
            elif mib and name == scheme.mib:
                one[name] = Fraction(mib)
    return Sharing(said, tuple(sorted(one.items())))


def gpu_mib(node: Mapping[str, Any]) -> float:
    """MiB of each of its GPUs; 0 where nothing says it."""
    registered = [mib for scheme in SCHEMES for mib in _registered(scheme, node)]
    return quantity(_labels(node).get(MEMORY, 0)) or next(iter(registered), 0.0)


def gpus(node: Mapping[str, Any]) -> tuple[int, str]:
    """How many accelerators a node has, and their type; ``none`` without any.

    Raises:
        Unknown: parts of unknown size, or accelerators of several kinds.
        ValueError: a number that is none.
    """
    labels, has = _labels(node), _resources(node)
    there = {name for name, text in has.items() if quantity(text)}
    kinds = [name for name in has if name in there and WHOLE.fullmatch(name)]
    model = next((str(labels[name]).removesuffix("-SHARED") for name in MODELS if name in labels), "")
    kind = model or next(iter(kinds), "gpu")
    for scheme in SCHEMES:
        if devices := _devices(scheme, node):
            return devices, kind
        if part := next((name for name in (*scheme.amounts, *scheme.devices) if name in there), ""):
            raise Unknown(f"{part}: parts of GPUs, and nothing says of how many GPUs")
    parts = Counter({part.size: count for part, count in requested(has, sharing(node)).items()})
    if len(kinds) > 1:
        raise Unknown("accelerators of several kinds")
    return (gpus_holding(parts), kind) if parts else (0, "none")


def _devices(scheme: Scheme, node: Mapping[str, Any]) -> int:
    """The GPUs of a node by this scheme; 0 where it says nothing of them."""
    if registered := _registered(scheme, node):
        return len(registered)
    for name, each in scheme.devices.items():
        if amount := quantity(_resources(node).get(name, 0)):
            return int(amount // each) if each else int(quantity(_labels(node).get(COUNT, 0)))
    return 0


def _registered(scheme: Scheme, node: Mapping[str, Any]) -> list[float]:
    """MiB of each GPU in a device plugin's annotation: JSON, or text of ``id,slices,MiB,cores,type,numa,health:``."""
    notes = node["metadata"].get("annotations") or {}
    text = next((notes[name] for name in scheme.registers if isinstance(notes.get(name), str)), "")
    if text.lstrip().startswith("["):
        return [float(gpu["devmem"]) for gpu in json.loads(text)]
    cells = [entry.split(",") for entry in text.split(":") if entry.count(",") >= 3]
    return [float(cell[2]) for cell in cells]


def requested(resources: Mapping[str, Any], node: Sharing) -> Counter[Part]:
    """The accelerators, and parts of them, among resources.

    Args:
        resources: of a container, or of a node.
        node: what the container's node says.

    Raises:
        Unknown: parts of unknown size.
        ValueError: a number that is none.
    """
    left = {name: amount for name, text in resources.items() if (amount := quantity(text))}
    found = Counter[Part]()
    for scheme in SCHEMES:
        if wanted := {name: left[name] for name in scheme.amounts if name in left}:
            size, count = _share(scheme, wanted, dict(node.one)), round(left.get(scheme.count, 1))
            if size > 1:
                size, count = Fraction(1), int(size)
            found[Part(size, apart=count > 1 and size < 1)] += count
            left = {name: amount for name, amount in left.items() if name not in (*wanted, scheme.count)}
    for name, amount in left.items():
        if size := _size(name, dict(node.labels)):
            found[Part(size)] += round(amount)
    return +found


def _share(scheme: Scheme, wanted: Mapping[str, float], one: Mapping[str, Fraction]) -> Fraction:
    """Of each GPU: the largest of the shares of its memory and of its cores that are wanted."""
    sizes: dict[str, Fraction] = {}
    for name, amount in wanted.items():
        whole = Fraction(scheme.amounts[name]) or one.get(name)
        if not whole:
            raise Unknown(f"{name}: shares of a GPU of unknown size, which its node would say")
        sizes[name] = (Fraction(amount) / whole).limit_denominator(10**6)
    most = max(sizes, key=lambda name: sizes[name])
    if sizes[most] > 1 and not (scheme.several and sizes[most].denominator == 1):
        raise Unknown(f"{most}: more than one GPU has")
    return max(sizes[most], Fraction(1, 1000))


def _size(name: str, labels: Mapping[str, str]) -> Fraction:
    """Of what a resource counts; 0 for one that counts no accelerators."""
    shared = SHARED.fullmatch(name)
    plain = shared[1] if shared else name
    nvidia = plain.startswith("nvidia.com/")
    clients = max(int(quantity(labels.get(plain + REPLICAS, 1))), 1) if nvidia else 1
    if shared and clients == 1:
        raise Unknown(f"time slices of a GPU, of unknown size: the label {plain}{REPLICAS} of its node says it")
    if match := MIG.fullmatch(plain):
        return of_mig(match[1]) / clients
    if WHOLE.fullmatch(plain):
        single = SINGLE.fullmatch(labels.get(PRODUCT, "")) if nvidia else None
        return (of_mig(single[1]) if single else Fraction(1)) / clients
    if name in WHOLE_COUNTS:
        return Fraction(1)
    if PART.fullmatch(name) and not name.endswith("_monitoring"):  # Intel's, to watch all GPUs of a node
        raise Unknown(f"{name}: parts of an accelerator of unknown size")
    return Fraction(0)


def _labels(node: Mapping[str, Any]) -> dict[str, Any]:
    return node["metadata"].get("labels") or {}


def _resources(node: Mapping[str, Any]) -> dict[str, Any]:
    return node["status"].get("allocatable") or node["status"]["capacity"]
