"""Who has each GPU: labels of pods and Slurm jobs for each UUID, and how much memory each owner's processes hold."""

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from weft.hardware.telemetry import slurm
from weft.hardware.telemetry.nvml import Snapshot
from weft.hardware.telemetry.pods import DeviceId, Kubelet, MappingFile
from weft.hardware.telemetry.processes import Owner, owners

Labels = dict[str, str]


class Holder(NamedTuple):
    """Processes are summed by this: a PID would make a new series for each process."""

    uuid: str
    user: str
    container: str
    job: str


@dataclass
class Attribution:
    """``labels``: UUID of a GPU or MIG device → one set for each pod or job that has it. ``up``: which sources answered."""

    labels: dict[str, list[Labels]] = field(default_factory=dict)
    memory: Counter[Holder] = field(default_factory=Counter)
    owners: dict[int, Owner] = field(default_factory=dict)
    up: dict[str, bool] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Attributor:
    """Reads the sources for a snapshot. A source that fails costs its labels, and is named in ``problems``."""

    def __init__(self, pods: Kubelet | MappingFile | None = None, jobs: Path | None = None) -> None:
        self.pods, self.jobs = pods, jobs
        self.known: dict[int, tuple[float, Owner]] = {}

    def read(self, snapshot: Snapshot) -> Attribution:
        found = Attribution()
        pids = {p.pid for gpu in snapshot.gpus for p in gpu.processes}
        found.owners = owners(pids, self.known, time.monotonic())
        for gpu in snapshot.gpus:
            instances = {mig.gpu_instance: mig.uuid for mig in gpu.mig}
            for p in gpu.processes:
                who = found.owners[p.pid]
                uuid = instances.get(p.gpu_instance, gpu.uuid)
                found.memory[Holder(uuid, who.user, who.container, who.job)] += p.memory_bytes or 0
        self._pods(found, snapshot)
        self._jobs(found, snapshot)
        return found

    def _pods(self, found: Attribution, snapshot: Snapshot) -> None:
        if self.pods is None:
            return
        try:
            held = self.pods.read()
            found.up["pods"] = True
        except (OSError, ValueError) as error:
            found.up["pods"] = False
            found.problems.append(str(error))
            return
        for gpu in snapshot.gpus:
            for uuid, index, instance in [
                (gpu.uuid, gpu.index, None),
                *((m.uuid, gpu.index, m.gpu_instance) for m in gpu.mig),
            ]:
                pods = [pod for device, pods in held.items() if _is(device, uuid, index, instance) for pod in pods]
                if pods:
                    found.labels[uuid] = [pod.labels() for pod in dict.fromkeys(pods)]

    def _jobs(self, found: Attribution, snapshot: Snapshot) -> None:
        by_uuid: dict[str, list[str]] = {}
        if self.jobs is not None:
            try:
                written = slurm.jobs(self.jobs)
                found.up["jobs"] = True
                by_uuid = {gpu.uuid: written[gpu.index] for gpu in snapshot.gpus if gpu.index in written}
            except OSError as error:
                found.up["jobs"] = False
                found.problems.append(f"the folder of Slurm jobs cannot be read: {error}")
        else:
            for holder in found.memory:
                if holder.job and holder.job not in by_uuid.setdefault(holder.uuid, []):
                    by_uuid[holder.uuid].append(holder.job)
        for uuid, ids in by_uuid.items():
            before = found.labels.get(uuid, [{}])
            found.labels[uuid] = [{**labels, "hpc_job": job} for labels in before for job in ids]


def _is(device: DeviceId, uuid: str, index: int, instance: int | None) -> bool:
    if device.uuid:
        return device.uuid == uuid
    return device.index == index and device.instance == instance
