"""Quotas in Kueue (v1beta2): a flavor for each pool, a cluster queue for each team, cohorts that lend and borrow."""

import math
from typing import Any

from weft.cluster.specification import CLAIMED, PoolQuota, Specification
from weft.deploy.manifests import POOL, RACK, TAINT, TEAM, Manifest, gpu_pools, manifest, of_team

API = "kueue.x-k8s.io/v1beta2"
TOPOLOGY = "racks"
QUEUE = "default"  # the local queue in each team's namespace
FRAMEWORKS = (
    "batch/job",
    "jobset.x-k8s.io/jobset",
    "trainer.kubeflow.org/trainjob",
    "ray.io/raycluster",
    "ray.io/rayjob",
)


def flavors(made: Specification) -> list[Manifest]:
    """A pool is a flavor: its nodes have the label weft.dev/pool. Where pools state racks, jobs can ask to be within one."""
    racked = any(_racks(pool) for pool in made.pools)
    levels = [{"nodeLabel": POOL}, {"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]
    found = [manifest(API, "Topology", TOPOLOGY, spec={"levels": levels})] if racked else []
    for pool in gpu_pools(made):
        spec: dict[str, Any] = {"nodeLabels": {POOL: pool.name}, "tolerations": [TAINT]}
        if racked and _racks(pool):
            spec["topologyName"] = TOPOLOGY
        found.append(manifest(API, "ResourceFlavor", pool.name, spec=spec))
    return found


def _racks(pool: Any) -> bool:
    return bool(pool.nodes.rack or pool.nodes.rack_nodes)


def cohorts(made: Specification) -> list[Manifest]:
    """The tree of cohorts. A cohort's own quota comes on top of its teams' (and is checked with theirs against the pools)."""
    found = []
    for each in made.cohorts:
        spec: dict[str, Any] = {"parentName": each.parent} if each.parent else {}
        if each.quota:
            spec["resourceGroups"] = resource_groups(made, each.quota, lends=bool(each.parent))
        found.append(manifest(API, "Cohort", each.name, spec=spec))
    return found


def cluster_queues(made: Specification) -> list[Manifest]:
    """A cluster queue and a local queue for each team.

    What is nominal is guaranteed: it is reclaimed from borrowers of any priority. Within a team, a job preempts only less
    important ones. Borrowers do not preempt (``borrowWithinCohort`` does not go with fair sharing)."""
    found = []
    for team in made.teams:
        if not team.quota:
            continue
        spec: dict[str, Any] = {"cohortName": team.cohort} if team.cohort else {}
        spec |= {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": team.name}},
            "queueingStrategy": team.queueing,
            "flavorFungibility": {"whenCanBorrow": "MayStopSearch", "whenCanPreempt": "TryNextFlavor"},
            "preemption": {"reclaimWithinCohort": "Any", "withinClusterQueue": "LowerPriority"},
            "fairSharing": {"weight": amount(team.weight)},
            "resourceGroups": resource_groups(made, team.quota, lends=bool(team.cohort)),
        }
        found += [
            manifest(API, "ClusterQueue", team.name, labels={TEAM: team.name}, spec=spec),
            of_team(team, API, "LocalQueue", QUEUE, spec={"clusterQueue": team.name}),
        ]
    return found


def resource_groups(made: Specification, quotas: tuple[PoolQuota, ...], lends: bool) -> list[dict[str, Any]]:
    """One group: a flavor is in one group only, and cores and memory belong to the flavor of the GPUs. Of cores and memory
    a team has what goes with its GPUs, where every pool states them; otherwise Kueue leaves them out."""
    pools = [made.pool(quota.pool) for quota in quotas]
    covered = list(dict.fromkeys(pool.resource for pool in pools))
    hosts = ["cpu", "memory"] if counts_hosts(made) else []
    flavors = []
    for quota, pool in zip(quotas, pools, strict=True):
        whole = {"cpu": pool.nodes.cpu * pool.nodes.count, "memory": pool.nodes.memory_gb * pool.nodes.count}
        resources = [
            _resource(name, quota, whole[name] / pool.units, "Gi" if name == "memory" else "", lends) for name in hosts
        ]
        nothing = PoolQuota(quota.pool, 0)
        resources += [_resource(name, quota if name == pool.resource else nothing, 1, "", lends) for name in covered]
        flavors.append({"name": quota.pool, "resources": resources})
    return [{"coveredResources": [*hosts, *covered], "flavors": flavors}]


def _resource(name: str, quota: PoolQuota, each: float, unit: str, lends: bool) -> dict[str, Any]:
    """A quota of a resource of which every GPU, or share of one, comes with ``each``."""
    found = {"name": name, "nominalQuota": f"{math.floor(quota.nominal * each)}{unit}"}
    for key, limit in (("borrowingLimit", quota.borrowing_limit), ("lendingLimit", quota.lending_limit)):
        if lends and limit < math.inf:
            found[key] = f"{math.floor(limit * each)}{unit}"
    return found


def counts_hosts(made: Specification) -> bool:
    """Whether every pool states its cores and memory."""
    return all(pool.nodes.cpu and pool.nodes.memory_gb for pool in gpu_pools(made))


def amount(value: float) -> str:
    """A quantity of thousandths: 1.5 → ``1500m``."""
    return f"{value:g}" if value == int(value) else f"{round(value * 1000)}m"


def configuration(made: Specification) -> list[Manifest]:
    """Kueue's own configuration, as its Helm chart's ConfigMap has it."""
    from weft.deploy.manifests import yaml_text

    settings: dict[str, Any] = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "manageJobsWithoutQueueName": True,  # else a job without the label goes around every quota
        "managedJobsNamespaceSelector": {"matchExpressions": [{"key": TEAM, "operator": "Exists"}]},
        "integrations": {"frameworks": list(FRAMEWORKS)},
        "fairSharing": {"preemptionStrategies": ["LessThanOrEqualToFinalShare", "LessThanInitialShare"]},
        # All pods of a gang within ten minutes, or its GPUs go to the next one.
        "waitForPodsReady": {
            "timeout": "10m", "recoveryTimeout": "5m",
            "requeuingStrategy": {"timestamp": "Eviction", "backoffLimitCount": 5, "backoffBaseSeconds": 60,
                "backoffMaxSeconds": 1800},
        },
        "metrics": {"bindAddress": ":8443", "enableClusterQueueResources": True},
    }  # fmt: skip
    resources: dict[str, Any] = {}
    if not counts_hosts(made):
        resources["excludeResourcePrefixes"] = ["cpu", "memory"]
    if any(pool.dra for pool in made.pools):
        resources["deviceClassMappings"] = [{"name": CLAIMED, "deviceClassNames": ["gpu.nvidia.com"]}]
    if resources:
        settings["resources"] = resources
    data = {"controller_manager_config.yaml": yaml_text([settings])}
    return [manifest("v1", "ConfigMap", "kueue-manager-config", "kueue-system", data=data)]


def manifests(made: Specification) -> dict[str, list[Manifest]]:
    files = {
        "configuration": configuration(made),
        "flavors": flavors(made),
        "cohorts": cohorts(made),
        "queues": cluster_queues(made),
    }
    return {f"kueue/{name}.yaml": found for name, found in files.items() if found}
