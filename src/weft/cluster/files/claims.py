"""Kubernetes' resource claims (dynamic resource allocation, ``resource.k8s.io``): the accelerators that a pod claims."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from weft.cluster.files.accelerators import Part, Unknown
from weft.cluster.files.kubernetes import objects
from weft.cluster.files.shares import of_mig

Key = tuple[str, str, str]  # kind, namespace, name
GPU = re.compile(r"(?:.*[.-])?(?:p?gpu|[ntx]pu|mlu|[gd]cu|gaudi|neuron|accelerator)s?(?:[.-].*)?")  # a device class
CUT = re.compile(r"(?:.*[.-])?mig(?:[.-].*)?")  # a device class of MIG slices
PROFILE = re.compile(
    r"(?:mig-|\b)([1-9])g\.?\d+gb"
)  # in the name of an allocated device, or an expression that selects it


class Claims:
    """The claims of a file, and which of them several of its pods use."""

    def __init__(self, path: Path, pods: Iterable[Mapping[str, Any]]):
        self.specs: dict[Key, Any] = {}
        for kind in ("ResourceClaim", "ResourceClaimTemplate"):
            for found in objects(path, kind):
                about = found.get("metadata") or {}
                self.specs[kind, str(about.get("namespace", "default")), str(about.get("name", ""))] = found
        used = [key for pod in pods for key in self._of(pod)]
        self.users = Counter(key for key in used if key[0] == "ResourceClaim")

    def parts(self, pod: Mapping[str, Any]) -> Counter[Part]:
        """What a pod claims.

        Raises:
            Unknown: a claim that is not in the file, that pods share, or of devices that are no known accelerators.
        """
        found = Counter[Part]()
        for key in self._of(pod):
            if key not in self.specs:
                raise Unknown("a resource claim that is not in the file: kubectl get pods,resourceclaims")
            claim = self.specs[key]
            if self.users[key] > 1 or len((claim.get("status") or {}).get("reservedFor") or []) > 1:
                raise Unknown("a resource claim that several pods share")
            found += _devices(
                claim["spec"] if key[0] == "ResourceClaim" else claim["spec"]["spec"], claim.get("status") or {}
            )
        return found

    def _of(self, pod: Mapping[str, Any]) -> list[Key]:
        """The claims of a pod; of one that was made from a template and is gone, the template."""
        spec, status = pod.get("spec"), pod.get("status")
        wanted = spec.get("resourceClaims") if isinstance(spec, dict) else None
        made = status.get("resourceClaimStatuses") if isinstance(status, dict) else None
        name_of = {each["name"]: each.get("resourceClaimName") for each in made or []}
        space, keys = str((pod.get("metadata") or {}).get("namespace", "default")), []
        for each in wanted or []:
            key = ("ResourceClaim", space, str(each.get("resourceClaimName") or name_of.get(each["name"]) or ""))
            template = ("ResourceClaimTemplate", space, str(each.get("resourceClaimTemplateName", "")))
            keys.append(template if key not in self.specs and template in self.specs else key)
        return keys


def _devices(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Counter[Part]:
    """The accelerators of a claim: those that are allocated, or where they are no longer, those that it requests."""
    devices = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
    found = Counter[Part]()
    for request in (spec.get("devices") or {}).get("requests") or []:
        exact = request.get("exactly") or request
        if exact.get("adminAccess"):
            continue
        given = [str(each.get("device", "")) for each in devices if each["request"].split("/")[0] == request["name"]]
        if "firstAvailable" in request:
            raise Unknown("a resource claim of the first available of several device classes")
        if exact.get("capacity"):
            raise Unknown("a resource claim of a part of a device's capacity")
        name = str(exact.get("deviceClassName", ""))
        if not given and exact.get("allocationMode", "ExactCount") != "ExactCount":
            raise Unknown("a resource claim of all devices, which does not say how many")
        count = len(given) or int(exact.get("count") or 1)
        if CUT.fullmatch(name):
            found += _slices(given or [str(exact.get("selectors"))] * count)
        elif GPU.fullmatch(name):
            found[Part(Fraction(1))] += count
        else:
            raise Unknown(f"a resource claim of device class '{name[:80]}', which is no known accelerator")
    return found


def _slices(texts: Iterable[str]) -> Counter[Part]:
    """MIG slices by the profiles in texts."""
    found = Counter[Part]()
    for text in texts:
        sizes = set(PROFILE.findall(text))
        if len(sizes) != 1:
            raise Unknown("a resource claim of MIG slices of unknown size")
        found[Part(of_mig(sizes.pop()))] += 1
    return found
