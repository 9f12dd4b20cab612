"""Teams in Kubernetes: namespaces, rights, quotas of objects, priorities, network policies."""

import math

from weft.cluster.specification import Specification, Team
from weft.deploy.manifests import SYSTEM, TEAM, Manifest, manifest, of_team

RIGHTS = "weft-team"  # the ClusterRole that every team has in its own namespace
WRITE = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
READ = ["get", "list", "watch"]
# By default a container that states nothing; GPUs are never a default.
DEFAULT_REQUEST, DEFAULT_LIMIT = {"cpu": "1", "memory": "4Gi"}, {"memory": "16Gi"}


def namespaces(made: Specification) -> list[Manifest]:
    """One for each team, under the baseline pod security standard, and weft's own, whose daemons read devices of the host."""
    system = manifest("v1", "Namespace", SYSTEM, labels={"pod-security.kubernetes.io/enforce": "privileged"})
    secure = {"pod-security.kubernetes.io/enforce": "baseline", "pod-security.kubernetes.io/warn": "restricted"}
    return [
        system,
        *(manifest("v1", "Namespace", team.name, labels={TEAM: team.name, **secure}) for team in made.teams),
    ]


def rights(made: Specification) -> list[Manifest]:
    """What a team may do in its namespace: run and watch jobs. It may not change its quota, its queue or its network policy."""
    rules = [
        {"apiGroups": [""], "resources": ["pods", "pods/log", "services", "configmaps", "secrets",
            "persistentvolumeclaims"], "verbs": WRITE},
        {"apiGroups": [""], "resources": ["pods/exec", "pods/portforward"], "verbs": ["create", "get"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": WRITE},
        {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": WRITE},
        {"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs"], "verbs": WRITE},
        {"apiGroups": ["ray.io"], "resources": ["rayclusters", "rayjobs"], "verbs": WRITE},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims", "resourceclaimtemplates"], "verbs": WRITE},
        {"apiGroups": [""], "resources": ["events", "resourcequotas", "limitranges"], "verbs": READ},
        {"apiGroups": ["kueue.x-k8s.io"], "resources": ["localqueues", "workloads"], "verbs": READ},
        {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": READ},
    ]  # fmt: skip
    api = "rbac.authorization.k8s.io/v1"
    bindings = [
        of_team(
            team, api, "RoleBinding", RIGHTS,
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": RIGHTS},
            subjects=[{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user} for user in team.users],
        )
        for team in made.teams if team.users
    ]  # fmt: skip
    return [manifest(api, "ClusterRole", RIGHTS, rules=rules), *bindings]


def quotas(made: Specification) -> list[Manifest]:
    """Kueue alone shares GPUs: a ResourceQuota of the nominal quota would forbid what the team may borrow. So it holds the
    most that a team can ever have, against pods that go around the queue, and counts objects."""
    found = []
    for team in made.teams:
        hard = {"pods": "2000", "services": "200", "persistentvolumeclaims": "200", **_most(made, team)}
        found += [
            of_team(team, "v1", "ResourceQuota", "objects", spec={"hard": hard}),
            of_team(
                team, "v1", "LimitRange", "defaults",
                spec={"limits": [{"type": "Container", "default": DEFAULT_LIMIT, "defaultRequest": DEFAULT_REQUEST}]},
            ),
        ]  # fmt: skip
    return found


def _most(made: Specification, team: Team) -> dict[str, str]:
    """What a team can hold of each kind of GPU, with all that it may borrow; 0 of kinds that it has no quota of."""
    most: dict[str, float] = {}
    for pool in made.pools:
        if not pool.gpus or pool.dra:  # claims are counted by their device class
            continue
        quota = team.of(pool.name)
        limit = 0.0
        if quota:
            alone = not team.cohort
            limit = min(quota.nominal + (0 if alone else quota.borrowing_limit), float(pool.units))
        most[pool.resource] = most.get(pool.resource, 0) + limit
    return {f"requests.{resource}": str(int(limit)) for resource, limit in sorted(most.items()) if limit < math.inf}


def priorities(made: Specification) -> list[Manifest]:
    """A pod's PriorityClass and, of the same name and value, the priority in Kueue's queues. Kueue preempts; the kubelet's
    scheduler does not, since it would break a gang."""
    found = []
    for each in made.priorities:
        about = f"jobs of priority {each.name}" + (f", at most {each.max_hours:g} h" if each.max_hours else "")
        found += [
            manifest(
                "scheduling.k8s.io/v1", "PriorityClass", each.name,
                value=each.value, globalDefault=False, preemptionPolicy="Never", description=about,
            ),
            manifest("kueue.x-k8s.io/v1beta2", "WorkloadPriorityClass", each.name, value=each.value, description=about),
        ]  # fmt: skip
    return found


def network(made: Specification) -> list[Manifest]:
    """Pods of a team talk to each other and to the outside; only monitoring reaches them from other namespaces."""
    metrics = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": made.monitoring.namespace}}}
    return [
        of_team(
            team, "networking.k8s.io/v1", "NetworkPolicy", "within-team",
            spec={
                "podSelector": {}, "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {}}]}, {"from": [metrics]}],
            },
        )
        for team in made.teams
    ]  # fmt: skip
