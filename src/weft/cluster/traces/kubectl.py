"""Kubernetes: ``kubectl get pods -A -o json``, or a list of nodes and pods."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.files import accelerators, kubernetes
from weft.cluster.files.claims import Claims
from weft.cluster.files.columns import seconds
from weft.cluster.files.text import TraceError
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, accepted, earliest, names

RUN = ("state", "lastState")


def load(path: Path) -> Jobs:
    """A pod is a job of one pod; a namespace is a tenant. That pods belong together (a Job of several) is ignored.

    Submitted at ``creationTimestamp``, counted from the first. It holds its GPUs from when it was scheduled, images are pulled
    and restarts included, to the last end of its containers. Requests are those of its containers together, or of the largest
    that initialises where that is more, and its resource claims where the file has them. Slices of MIG, time slices, MPS and
    shares of a GPU's memory or cores (HAMi, Volcano, gpushare …; the larger of both) are shares of a GPU; how much one has is
    said by its node, where the file has nodes too. The type it accepts is that of its ``nodeSelector``
    (nvidia.com/gpu.product); affinities are ignored. Left out and counted: pods without an accelerator, with parts of unknown
    or several sizes, that have not finished, and that finished without having run.
    """
    nodes = _sharing(path)
    alike = set(nodes.values())
    common = alike.pop() if len(alike) == 1 else accelerators.Sharing()
    pods = kubernetes.objects(path, "Pod")
    try:
        claims = Claims(path, pods)
    except (KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: resource claims: {type(error).__name__}: {error}") from None
    rows: list[tuple[Any, ...]] = []
    dropped = Counter[str]()
    for pod in pods:
        about = pod.get("metadata")
        about = about if isinstance(about, dict) else {}
        space = str(about.get("namespace", "default"))
        name = f"{space}/{about.get('name', '')}"
        try:
            row = _row(pod, nodes.get(str(pod["spec"].get("nodeName", "")), common), claims)
            if isinstance(row, str):
                dropped[row] += 1
            else:
                created = seconds(about["creationTimestamp"])
                if math.isnan(created):
                    raise ValueError("creationTimestamp is empty; expected a date and time")
                rows.append((name, space, created, *row))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TraceError(f"{path}: pod {name}: {type(error).__name__}: {error}") from None
    id, tenant, submit, duration, gpus, milli, cpu, memory, types, priority = (
        zip(*rows, strict=True) if rows else [()] * 10
    )
    tenant_index, tenants = names(tenant)
    types_index, type_sets = accepted(types)
    first = earliest(np.array(submit))
    return Jobs(
        np.array(submit) - (first if submit else 0.0), np.array(duration), np.array(gpus, np.int64),
        id=id, milli=np.array(milli), pods=np.ones(len(id), np.int64),
        cpu=np.array(cpu), memory=np.array(memory), types=types_index, type_sets=type_sets, tenant=tenant_index,
        tenants=tenants, priority=np.array(priority), dropped=dict(dropped), epoch=first,
    )  # fmt: skip


def _sharing(path: Path) -> dict[str, accelerators.Sharing]:
    """What each node says of its accelerators."""
    found = {}
    for node in kubernetes.objects(path, "Node"):
        about = node.get("metadata")
        name = str(about.get("name", "")) if isinstance(about, dict) else ""
        try:
            found[name] = accelerators.sharing(node)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TraceError(f"{path}: node '{name}': {type(error).__name__}: {error}") from None
    return found


def _row(
    pod: dict[str, Any], node: accelerators.Sharing, claims: Claims
) -> str | tuple[float, int, int, int, int, str, float]:
    """Seconds that it held its accelerators, how many, thousandths of each, thousandths of cores, MiB, accepted type, priority;
    or why it is left out. ``node`` is what its node says."""
    spec, status = pod["spec"], pod.get("status", {})
    containers = [_requests(c) for c in spec["containers"]]
    before = [_requests(c) for c in spec.get("initContainers", [])]
    notes = pod["metadata"].get("annotations") or {}
    try:
        together = claims.parts(pod)
        for each in (*containers, {name: notes[name] for name in accelerators.NOTES if name in notes}):
            together.update(accelerators.requested(each, node))
        first = [accelerators.requested(each, node) for each in before]
    except accelerators.Unknown as why:
        return str(why)
    parts = max([together, *first], key=lambda of: sum(of.values()))
    if not parts:
        return "no GPU"
    if len(parts) > 1:
        return "parts of GPUs of several sizes"
    ((part, gpus),) = parts.items()
    size = part.size
    if size < 1 and size * gpus <= 1 and not part.apart:  # several slices may lie on one GPU
        size, gpus = size * gpus, 1
    if status.get("phase") not in ("Succeeded", "Failed"):
        return "not finished"
    states = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    runs = [state[run]["terminated"] for state in states for run in RUN if state.get(run, {}).get("terminated")]
    starts = [seconds(run.get("startedAt") or "") for run in runs]
    ends = [seconds(run.get("finishedAt") or "") for run in runs]
    if not runs or any(map(math.isnan, [*starts, *ends])):
        return "finished without having run"
    bound = [c.get("lastTransitionTime") for c in status.get("conditions", []) if c.get("type") == "PodScheduled"]
    scheduled = [seconds(text) for text in (*bound, status.get("startTime")) if text]
    starts = [min(starts), *scheduled[:1]] if scheduled and scheduled[0] <= min(starts) else starts
    if max(ends) < min(starts):
        raise ValueError(
            f"it ends at {max(ends):.0f} s and starts at {min(starts):.0f} s; expected a start before the end"
        )

    def total(name: str) -> float:
        requested = [[kubernetes.quantity(requests.get(name, 0)) for requests in part] for part in (containers, before)]
        return max(sum(requested[0]), *requested[1], 0.0)

    selected = spec.get("nodeSelector") or {}
    return (
        max(ends) - min(starts),
        gpus,
        max(int(1000 * size), 1),
        round(total("cpu") * 1000),
        round(total("memory") / 2**20),
        next((str(selected[name]).removesuffix("-SHARED") for name in accelerators.MODELS if name in selected), ""),
        float(spec.get("priority") or 0),
    )


def _requests(container: dict[str, Any]) -> dict[str, Any]:
    """A container's requests, and its limits where there is no request."""
    resources = container.get("resources", {})
    return {**resources.get("limits", {}), **resources.get("requests", {})}


FORMAT = Format("kubectl", load, "kubectl get pods,nodes -A -o json: finished pods; nodes say what shares of GPUs are")
