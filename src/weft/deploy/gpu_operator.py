"""NVIDIA's GPU Operator: Helm values, and the ConfigMaps of its device plugin and MIG manager that they name."""

import shlex
from typing import Any

from weft.cluster.specification import Pool, Specification
from weft.deploy.manifests import JOB, POOL, RACK, Manifest, manifest, nvidia_pools, yaml_text

NAMESPACE = "gpu-operator"
PLUGIN, MIG = "weft-device-plugin", "weft-mig"  # the ConfigMaps: a wrong name is silently no configuration
EXCLUSIVE, DISABLED = "exclusive", "all-disabled"  # their entries for nodes without a label
# Node labels, by which the operator's parts find a node's entry.
PLUGIN_LABEL, MIG_LABEL = "nvidia.com/device-plugin.config", "nvidia.com/mig.config"


def values(made: Specification) -> dict[str, Any]:
    """The chart's values: only what differs from its defaults, or must not change with them."""
    software, dra = made.software, any(pool.dra for pool in made.pools)
    own_exporter = made.monitoring.exporter == "weft"
    return {
        "mig": {"strategy": strategy(made)},
        "driver": {
            "enabled": True,
            **({"version": software.driver} if software.driver else {}),
            # A node at a time, and only when its jobs have ended: a driver cannot be replaced under a process.
            "upgradePolicy": {
                "autoUpgrade": True, "maxParallelUpgrades": 1, "maxUnavailable": "10%",
                "waitForCompletion": {"timeoutSeconds": 0, "podSelector": JOB},
                "drain": {"enable": False},
            },
        },
        "toolkit": {"enabled": True, **({"version": _tag(software.toolkit)} if software.toolkit else {})},
        "cdi": {"enabled": True},
        "devicePlugin": {"enabled": True, "config": {"create": False, "name": PLUGIN, "default": EXCLUSIVE}},
        "gfd": {"enabled": True},
        "migManager": {"enabled": True, "config": {"create": False, "name": MIG, "default": DISABLED}},
        # One exporter of the two: both would count every GPU twice in a sum.
        "dcgmExporter": {
            "enabled": not own_exporter,
            "enablePodLabels": True,
            "serviceMonitor": {
                "enabled": not own_exporter, "interval": "15s", "honorLabels": True,
                "additionalLabels": {"release": made.monitoring.release},
            },
        },
        "gpuCluster": {"deployCR": dra},
        **({"draDriver": {"computeDomains": {"enabled": False}}} if dra else {}),
    }  # fmt: skip


def _tag(version: str) -> str:
    return version if version.startswith("v") else f"v{version}"


def strategy(made: Specification) -> str:
    """``mixed`` names slices by their profile, so that a quota can tell them from whole GPUs."""
    return "mixed" if any(pool.sharing.mode == "mig" for pool in made.pools) else "single"


def device_plugin(made: Specification) -> Manifest:
    """How each pool's GPUs are shared. Shared GPUs are renamed to ``….shared``: a job that asks for a whole one never gets a
    share by mistake. ``renameByDefault`` belongs under the mode; under ``flags`` it is silently ignored."""
    flags = {"migStrategy": strategy(made) if strategy(made) == "mixed" else "none"}
    entries = {EXCLUSIVE: {"version": "v1", "flags": flags}}
    for pool in nvidia_pools(made):
        key = {"time-slicing": "timeSlicing", "mps": "mps"}.get(pool.sharing.mode)
        if not key:
            continue
        shared: dict[str, Any] = {"renameByDefault": True}
        if key == "timeSlicing":  # two slices of one GPU are no more of it than one; MPS refuses that by itself
            shared["failRequestsGreaterThanOne"] = True
        shared["resources"] = [{"name": pool.accelerator.resource, "replicas": pool.sharing.replicas}]
        # MPS does not go with MIG; these nodes have none.
        entries[pool.name] = {"version": "v1", "flags": {"migStrategy": "none"}, "sharing": {key: shared}}
    data = {name: yaml_text([entry]).removeprefix("---\n") for name, entry in entries.items()}
    return manifest("v1", "ConfigMap", PLUGIN, NAMESPACE, data=data)


def mig_manager(made: Specification) -> Manifest:
    """mig-parted's file: an entry for each pool that is cut. The MIG manager reads only the key ``config.yaml``."""
    configs: dict[str, Any] = {DISABLED: [{"devices": "all", "mig-enabled": False}]}
    for pool in nvidia_pools(made):
        if pool.sharing.mode == "mig":
            slices = {pool.sharing.profile: pool.sharing.replicas}
            configs[pool.name] = [{"devices": "all", "mig-enabled": True, "mig-devices": slices}]
    text = yaml_text([{"version": "v1", "mig-configs": configs}]).removeprefix("---\n")
    return manifest("v1", "ConfigMap", MIG, NAMESPACE, data={"config.yaml": text})


def node_labels(made: Specification) -> str:
    """A script that labels the nodes of each pool, which are called POOL-0, POOL-1 …, and keeps pods without GPUs off them.

    Labels are set on nodes that exist: applying Node objects would make nodes that are none."""
    lines = [
        "#!/bin/sh",
        f"# Labels and taints of cluster {made.name}'s nodes. Run it again after nodes have joined.",
        "set -eu",
        "",
    ]
    for pool in (pool for pool in made.pools if pool.nodes.count):
        for rack, first, last in racks(pool):
            labels = {POOL: pool.name, **({RACK: rack} if rack else {}), **_operator_labels(pool)}
            pairs = " ".join(shlex.quote(f"{key}={value}") for key, value in labels.items())
            lines.append(
                f'for n in $(seq {first} {last}); do kubectl label --overwrite node "{pool.name}-$n" {pairs}; done'
            )
        if pool.gpus:
            lines.append(f"kubectl taint --overwrite node -l {POOL}={pool.name} nvidia.com/gpu=present:NoSchedule")
    return "\n".join(lines) + "\n"


def _operator_labels(pool: Pool) -> dict[str, str]:
    found = {}
    if pool.sharing.mode in ("time-slicing", "mps"):
        found[PLUGIN_LABEL] = pool.name
    if pool.sharing.mode == "mig":
        found[MIG_LABEL] = pool.name
    if pool.dra:  # else a device plugin and the DRA driver would give the same GPU away
        found["nvidia.com/gpu.deploy.device-plugin"] = "false"
    return found


def racks(pool: Pool) -> list[tuple[str, int, int]]:
    """The racks of a pool's nodes: name, first and last node."""
    nodes = pool.nodes
    if not nodes.rack_nodes:
        return [(nodes.rack, 0, nodes.count - 1)]
    return [
        (f"{pool.name}-rack-{k}", first, min(first + nodes.rack_nodes, nodes.count) - 1)
        for k, first in enumerate(range(0, nodes.count, nodes.rack_nodes))
    ]


def claim_templates(made: Specification) -> list[Manifest]:
    """Templates of resource claims (dynamic resource allocation) in the namespaces of teams that have a quota of such pools:
    one GPU of the pool's kind."""
    from weft.deploy.manifests import of_team

    found = []
    for team in made.teams:
        for quota in team.quota:
            pool = made.pool(quota.pool)
            if not pool.dra:
                continue
            product = pool.accelerator.product
            exactly: dict[str, Any] = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 1}
            if product:
                attribute = "device.attributes['gpu.nvidia.com'].productName"
                expression = f"{attribute} == '{product.replace('-', ' ')}'"
                exactly["selectors"] = [{"cel": {"expression": expression}}]
            request = {"name": "gpu", "exactly": exactly}
            found.append(
                of_team(
                    team,
                    "resource.k8s.io/v1",
                    "ResourceClaimTemplate",
                    pool.name,
                    spec={"spec": {"devices": {"requests": [request]}}},
                )
            )
    return found
