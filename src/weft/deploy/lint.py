"""``weft deploy lint``: what is valid by every schema and still does not do what its author meant.

Each rule is a function over documents; most traps come from the issue lists of the device plugin, the GPU Operator and Kueue.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.cluster.files.kubernetes import quantity
from weft.cluster.specification import Specification
from weft.deploy.located import Located
from weft.deploy.manifests import POOL, gpu_pools


@dataclass(frozen=True, order=True)
class Finding:
    """Something that does not do what it seems to: where, by which rule, and what to do."""

    path: Path
    line: int
    rule: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.what}; {self.fix}"


Documents = list[Located]
RULES: dict[str, Callable[[Documents, Specification | None], Iterator[Finding]]] = {}


def rule(name: str) -> Callable[..., Callable[..., Iterator[Finding]]]:
    def added(function: Callable[..., Iterator[Finding]]) -> Callable[..., Iterator[Finding]]:
        RULES[name] = function
        return function

    return added


def lint(documents: Documents, made: Specification | None = None) -> list[Finding]:
    """What all rules find, by file and line.

    Args:
        documents: Kubernetes objects, Helm values of the GPU Operator, device plugin and mig-parted files.
        made: the cluster file, for what only the nodes can tell.
    """
    listed = []
    for each in documents:
        kind = each.at("kind")
        items = each.get("items") if isinstance(kind, str) and kind.endswith("List") else None
        listed += list(items) if items is not None else [each]
    return sorted({found for of in RULES.values() for found in of(listed, made)})


def _found(where: Located, name: str, what: str, fix: str, key: str = "") -> Finding:
    return Finding(where.path, where.line_of(key) if key else where.line, name, what, fix)


def _of_kind(documents: Documents, *kinds: str) -> Iterator[Located]:
    return (each for each in documents if each.at("kind") in kinds)


def _values(documents: Documents) -> Iterator[Located]:
    """Helm values of the GPU Operator."""
    for each in documents:
        if (
            isinstance(each.value, dict)
            and "kind" not in each.value
            and {"devicePlugin", "migManager", "dcgmExporter"} & set(each.value)
        ):
            yield each


def _quantity(amount: Located) -> float:
    """NaN, which no comparison holds for, where it is none: the rule ``not-a-quantity`` reports that."""
    try:
        return quantity(amount.value)
    except ValueError:
        return math.nan


def _plugin_configurations(documents: Documents) -> Iterator[tuple[str, Located]]:
    """The device plugin's configurations, by their names: in ConfigMaps, in Helm values, or files of their own."""
    texts: list[tuple[str, Located]] = []
    for each in _of_kind(documents, "ConfigMap"):
        data = each.get("data")
        texts += list(data.items()) if data is not None else []
    for values in _values(documents):
        data = values.get("devicePlugin", "config", "data")
        texts += list(data.items()) if data is not None else []
    for name, text in texts:
        if isinstance(text.value, str) and re.search(r"^(version|flags|sharing):", text.value, re.MULTILINE):
            for inner in text.inner():
                if isinstance(inner.value, dict) and "mig-configs" not in inner.value:
                    yield name, inner
    for each in documents:
        if isinstance(each.value, dict) and "kind" not in each.value and "sharing" in each.value:
            yield each.path.name, each


# ---- sharing ---------------------------------------------------------------------------------------------------------


@rule("time-slicing-with-mps")
def _both_modes(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    for name, config in _plugin_configurations(documents):
        sharing = config.get("sharing")
        if sharing is not None and sharing.at("timeSlicing") and sharing.at("mps"):
            yield _found(
                sharing,
                "time-slicing-with-mps",
                f"'{name}' has timeSlicing and mps, of which the plugin takes only mps",
                "keep one; give other nodes a configuration of their own",
                "mps",
            )


@rule("mig-with-mps")
def _mig_and_mps(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    for name, config in _plugin_configurations(documents):
        mps = config.get("sharing", "mps")
        if mps is None:
            continue
        strategy = config.at("flags", "migStrategy")
        slices = any("mig-" in str(each.at("name")) for each in mps.get("resources") or ())
        if slices or strategy in ("single", "mixed"):
            what = "slices of MIG" if slices else f"migStrategy {strategy}"
            yield _found(
                mps,
                "mig-with-mps",
                f"'{name}' shares {what} by MPS, which the plugin does not support",
                "cut these GPUs or share them",
            )


PLUGIN_KEYS = {
    (): {"version", "flags", "resources", "sharing", "imex"},
    ("flags",): {
        "migStrategy",
        "failOnInitError",
        "mpsRoot",
        "nvidiaDriverRoot",
        "nvidiaDevRoot",
        "gdrcopyEnabled",
        "gdsEnabled",
        "mofedEnabled",
        "useNodeFeatureAPI",
        "deviceDiscoveryStrategy",
        "plugin",
        "gfd",
    },
    ("sharing",): {"timeSlicing", "mps"},
    ("sharing", "timeSlicing"): {"strategy", "renameByDefault", "failRequestsGreaterThanOne", "resources"},
    ("sharing", "mps"): {"renameByDefault", "failRequestsGreaterThanOne", "resources"},
}
RIGHT_PLACE = {
    "renameByDefault": "sharing.timeSlicing or sharing.mps",
    "failRequestsGreaterThanOne": "sharing.timeSlicing or sharing.mps",
    "migStrategy": "flags",
    "timeSlicing": "sharing",
    "mps": "sharing",
    "replicas": "sharing.….resources[]",
}
VALUES_KEYS = {
    ("devicePlugin", "config"): {"create", "name", "default", "data"},
    ("migManager", "config"): {"create", "name", "default", "data"},
    ("mig",): {"strategy"},
    ("dcgmExporter", "serviceMonitor"): {
        "enabled",
        "interval",
        "scrapeTimeout",
        "honorLabels",
        "additionalLabels",
        "relabelings",
        "metricRelabelings",
    },
}


@rule("ignored-key")
def _ignored_keys(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    known = [(config, name, PLUGIN_KEYS) for name, config in _plugin_configurations(documents)]
    known += [(values, "Helm values", VALUES_KEYS) for values in _values(documents)]
    for config, name, places in known:
        for place, keys in places.items():
            part = config.get(*place)
            if part is None or not isinstance(part.value, dict):
                continue
            for key in part.value:
                if key not in keys:
                    right = f"; it belongs under {RIGHT_PLACE[key]}" if key in RIGHT_PLACE else ""
                    where = ".".join(place) or "the top"
                    yield _found(
                        part,
                        "ignored-key",
                        f"'{name}': {key} under {where} is silently ignored{right}",
                        "move or remove it",
                        key,
                    )


@rule("configmap-name")
def _configmap_names(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    maps = {str(each.at("metadata", "name")): each for each in _of_kind(documents, "ConfigMap")}
    for values in _values(documents):
        for part in ("devicePlugin", "migManager"):
            config = values.get(part, "config")
            if config is None or not config.at("name") or config.at("create"):
                continue
            name, default = str(config.at("name")), config.at("default")
            if name not in maps:
                if maps:
                    near = ", ".join(sorted(maps))
                    yield _found(
                        config,
                        "configmap-name",
                        f"{part} reads ConfigMap '{name}', which is not here (there are: {near})",
                        "without it there is no configuration, and no error",
                        "name",
                    )
                continue
            data = maps[name].get("data")
            keys = [key for key, _ in data.items()] if data is not None else []
            if part == "migManager":
                if "config.yaml" not in keys:
                    yield _found(
                        maps[name],
                        "configmap-name",
                        f"ConfigMap '{name}' has no key config.yaml, the only one the MIG manager reads",
                        "rename the key",
                    )
                    continue
                text = data.get("config.yaml") if data is not None else None
                keys = [
                    key
                    for inner in (text.inner() if text is not None else [])
                    for key in (inner.at("mig-configs") or {})
                ]
            if default and default not in keys:
                yield _found(
                    config,
                    "configmap-name",
                    f"{part}'s default '{default}' is not in ConfigMap '{name}' (it has: {', '.join(keys)})",
                    "nodes without a label get no configuration",
                    "default",
                )


@rule("memory-not-limited")
def _memory(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    """Time slices have no memory of their own; a request of several of them is no more memory than of one."""
    for each in documents:
        for pod in _pods(each):
            for container in pod.get("containers") or ():
                limits = container.get("resources", "limits")
                for name, amount in limits.items() if limits is not None else ():
                    if name.endswith(".shared") and _quantity(amount) > 1:
                        yield _found(
                            amount,
                            "memory-not-limited",
                            f"{amount.value} of {name} are not {amount.value} times the memory or time of one",
                            "ask for one share, or for MIG slices, which have memory of their own",
                        )
    for pool in made.pools if made else ():
        users = [team.name for team in made.teams if team.of(pool.name)] if made else []
        if pool.sharing.mode == "time-slicing" and len(users) > 1 and made:
            what = f"pool '{pool.name}' is time-sliced among {', '.join(users)}: each client can take all memory of the GPU"
            yield Finding(
                made.path, pool.line, "memory-not-limited", what, "cut it by MIG, share by MPS, or give it to one team"
            )


def _pods(document: Located) -> Iterator[Located]:
    """The pod specifications in a document, however deep."""
    if isinstance(document.value, dict):
        if isinstance(document.value.get("containers"), list):
            yield document
        for _, part in document.items():
            yield from _pods(part)
    elif isinstance(document.value, list):
        for part in document:
            yield from _pods(part)


# ---- quotas ----------------------------------------------------------------------------------------------------------


def _cohort(queue: Located) -> str:
    """Of v1beta2, or v1beta1."""
    return str(queue.at("spec", "cohortName") or queue.at("spec", "cohort") or "")


def _quotas(of: Located) -> Iterator[tuple[str, Located]]:
    """Flavor and resource of a ClusterQueue or Cohort."""
    for group in of.get("spec", "resourceGroups") or ():
        for flavor in group.get("flavors") or ():
            for resource in flavor.get("resources") or ():
                yield str(flavor.at("name")), resource


def _nominal(resource: Located) -> float:
    amount = resource.get("nominalQuota")
    return 0.0 if amount is None else _quantity(amount)


@rule("borrowing-without-cohort")
def _borrowing(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    for queue in _of_kind(documents, "ClusterQueue"):
        for flavor, resource in _quotas(queue) if not _cohort(queue) else ():
            for key in ("borrowingLimit", "lendingLimit"):
                if resource.at(key) is not None:
                    yield _found(
                        resource,
                        "borrowing-without-cohort",
                        f"ClusterQueue '{queue.at('metadata', 'name')}' has a {key} of {flavor} and no cohort",
                        "name its cohort, or remove the limit",
                        key,
                    )


@rule("quota-counted-twice")
def _twice(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    queues = list(_of_kind(documents, "ClusterQueue"))
    per_cohort: dict[tuple[str, str, str], float] = defaultdict(float)
    total: dict[tuple[str, str], float] = defaultdict(float)
    for queue in queues:
        for flavor, resource in _quotas(queue):
            per_cohort[_cohort(queue), flavor, str(resource.at("name"))] += _nominal(resource)
            total[flavor, str(resource.at("name"))] += _nominal(resource)
    for cohort in _of_kind(documents, "Cohort"):
        name = str(cohort.at("metadata", "name"))
        for flavor, resource in _quotas(cohort):
            own, of_queues = _nominal(resource), per_cohort[name, flavor, str(resource.at("name"))]
            total[flavor, str(resource.at("name"))] += own
            if own and own == of_queues:
                yield _found(
                    resource,
                    "quota-counted-twice",
                    f"cohort '{name}' has {own:g} of "
                    f"{flavor}/{resource.at('name')} on top of the same {of_queues:g} of its queues",
                    "a cohort's quota is added to its queues': give it only what belongs to none of them",
                    "nominalQuota",
                )
    units = {(pool.name, pool.resource): pool for pool in gpu_pools(made)} if made else {}
    for queue in queues:
        for flavor, resource in _quotas(queue):
            pool = units.get((flavor, str(resource.at("name"))))
            if pool and total[flavor, pool.resource] > pool.units:
                yield _found(
                    resource,
                    "quota-counted-twice",
                    "queues and cohorts guarantee "
                    f"{total[flavor, pool.resource]:g} of {flavor}, which has {pool.units}",
                    "what is nominal must be there",
                    "nominalQuota",
                )
    yield from _resource_quotas(documents, queues)


def _resource_quotas(documents: Documents, queues: Documents) -> Iterator[Finding]:
    """A ResourceQuota below what Kueue admits: pods of admitted jobs are refused."""
    most: dict[tuple[str, str], float] = defaultdict(float)
    namespaces = {
        str(q.at("spec", "clusterQueue")): str(q.at("metadata", "namespace")) for q in _of_kind(documents, "LocalQueue")
    }
    for queue in queues:
        namespace = namespaces.get(str(queue.at("metadata", "name")), "")
        for _, resource in _quotas(queue):
            most[namespace, str(resource.at("name"))] += _nominal(resource)
    for quota in _of_kind(documents, "ResourceQuota"):
        hard = quota.get("spec", "hard")
        for key, amount in hard.items() if hard is not None else ():
            name = key.removeprefix("requests.")
            admitted = most.get((str(quota.at("metadata", "namespace")), name), 0.0)
            if "/" in name and _quantity(amount) < admitted:
                yield _found(
                    amount,
                    "quota-counted-twice",
                    f"the ResourceQuota allows {amount.value} {name} where the team's queue guarantees {admitted:g}",
                    "let Kueue alone share GPUs: pods of admitted jobs would be refused",
                )


@rule("strict-fifo-in-cohort")
def _strict(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    what = "StrictFIFO in a cohort: a head that waits for quota to come back blocks what others would borrow"
    fix = "use BestEffortFIFO, or leave the queue out of the cohort"
    for queue in _of_kind(documents, "ClusterQueue"):
        spec = queue.get("spec")
        if spec is not None and spec.at("queueingStrategy") == "StrictFIFO" and _cohort(queue):
            yield _found(
                spec, "strict-fifo-in-cohort", f"'{queue.at('metadata', 'name')}': {what}", fix, "queueingStrategy"
            )
    for team in made.teams if made else ():
        if team.queueing == "StrictFIFO" and team.cohort and made:
            yield Finding(made.path, team.line, "strict-fifo-in-cohort", f"team '{team.name}': {what}", fix)


@rule("flavor-never-fits")
def _never_fits(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    flavors = {str(each.at("metadata", "name")): each for each in _of_kind(documents, "ResourceFlavor")}
    for queue in _of_kind(documents, "ClusterQueue"):
        name = queue.at("metadata", "name")
        gpus: dict[str, list[Located]] = defaultdict(list)
        for flavor, resource in _quotas(queue):
            if "/" in str(resource.at("name")):
                gpus[flavor].append(resource)
            if flavors and flavor not in flavors:
                yield _found(
                    resource,
                    "flavor-never-fits",
                    f"ClusterQueue '{name}' names flavor '{flavor}', which is "
                    f"not here (there are: {', '.join(flavors)})",
                    "jobs wait for it without end",
                )
        for flavor, resources in gpus.items():
            borrows = _cohort(queue) and any(str(each.at("borrowingLimit")) not in ("0",) for each in resources)
            if not borrows and all(_nominal(each) == 0 for each in resources):
                yield _found(
                    resources[0],
                    "flavor-never-fits",
                    f"ClusterQueue '{name}' has 0 of flavor '{flavor}' and cannot borrow any",
                    "give it quota, or take the flavor out",
                    "nominalQuota",
                )
    pools = {pool.name: pool for pool in made.pools} if made else {}
    for name, defined in flavors.items() if made else ():
        labels = defined.at("spec", "nodeLabels") or {}
        if POOL in labels and labels[POOL] not in pools:
            yield _found(
                defined,
                "flavor-never-fits",
                f"flavor '{name}' is of nodes with {POOL}={labels[POOL]}, and the "
                f"cluster has no such pool (there are: {', '.join(pools)})",
                "its jobs would never find a node",
            )
    largest = (
        {
            pool.resource: max(
                p.nodes.gpus * p.sharing.replicas for p in gpu_pools(made) if p.resource == pool.resource
            )
            for pool in gpu_pools(made)
        }
        if made
        else {}
    )
    for each in documents:
        for pod in _pods(each) if largest else ():
            for container in pod.get("containers") or ():
                limits = container.get("resources", "limits")
                for name, amount in limits.items() if limits is not None else ():
                    if name in largest and _quantity(amount) > largest[name]:
                        yield _found(
                            amount,
                            "flavor-never-fits",
                            f"a pod asks for {amount.value} {name}, and the largest node has {largest[name]}",
                            "spread the job over nodes",
                        )


# ---- quantities ------------------------------------------------------------------------------------------------------


def _amounts(documents: Documents) -> Iterator[tuple[str, str, Located]]:
    """Every quantity with the resource that it is of and its name: quotas, limits of namespaces, what containers ask for."""
    for of in _of_kind(documents, "ClusterQueue", "Cohort"):
        for _, resource in _quotas(of):
            for key in ("nominalQuota", "borrowingLimit", "lendingLimit"):
                amount = resource.get(key)
                if amount is not None and (amount.value is not None or key == "nominalQuota"):
                    yield str(resource.at("name")), f"{key} of {resource.at('name')}", amount
    for _, section in _sections(documents):
        for name, amount in section.items():
            yield name.removeprefix("requests."), name, amount


def _sections(documents: Documents) -> Iterator[tuple[str, Located]]:
    """Every mapping of resources to quantities, or what is in its place, with its key: of namespaces and of containers."""
    found = [("hard", each.get("spec", "hard")) for each in _of_kind(documents, "ResourceQuota")]
    for each in documents:
        for pod in _pods(each):
            for containers in ("containers", "initContainers"):
                for container in pod.get(containers) or ():
                    resources = container.get("resources")
                    if resources is not None and not isinstance(resources.value, dict):
                        found.append(("resources", resources))
                    found += [(key, container.get("resources", key)) for key in ("requests", "limits")]
    yield from ((key, section) for key, section in found if section is not None and section.value is not None)


@rule("not-a-quantity")
def _not_quantities(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    for kind, name, amount in _amounts(documents):
        number = _quantity(amount)
        if math.isnan(number):
            what = f"{name} is {_shown(amount.value)}, which Kubernetes refuses"
            yield _found(amount, "not-a-quantity", what, "write a quantity of 0 or more, such as 8, 500m or 64Gi")
        elif number % 1 and "/" in kind and "kubernetes.io/" not in kind:  # an extended resource
            what = f"{name} is {_shown(amount.value)}, and Kubernetes gives only whole ones"
            yield _found(amount, "not-a-quantity", what, "write a whole number; MIG, MPS and time slices share a GPU")
    for key, section in _sections(documents):
        if not isinstance(section.value, dict):
            what = f"{key} is {_shown(section.value)}, which Kubernetes refuses"
            yield _found(section, "not-a-quantity", what, "write a mapping, such as {nvidia.com/gpu: 8}")
    for name, config in _plugin_configurations(documents):
        for mode in ("timeSlicing", "mps"):
            for resource in config.get("sharing", mode, "resources") or ():
                if not isinstance(resource.value, dict):
                    what = f"'{name}': a resource of {mode} is {_shown(resource.value)}, which the plugin refuses"
                    yield _found(resource, "not-a-quantity", what, "write {name: nvidia.com/gpu, replicas: 4}")
                    continue
                value = resource.at("replicas")
                if type(value) is not int or value < 2:
                    what = f"'{name}': replicas of {resource.at('name')} is {_shown(value)}, which the plugin refuses"
                    yield _found(resource, "not-a-quantity", what, "write a whole number of 2 or more", "replicas")


def _shown(value: object) -> str:
    return (
        "missing" if value is None else f"a {type(value).__name__}" if isinstance(value, dict | list) else repr(value)
    )


# ---- versions --------------------------------------------------------------------------------------------------------

# Group/version (and kind, where only some are gone) → what to use.
REMOVED = {
    "extensions/v1beta1": "apps/v1 or networking.k8s.io/v1",
    "apps/v1beta1": "apps/v1",
    "apps/v1beta2": "apps/v1",
    "batch/v1beta1": "batch/v1",
    "batch/v2alpha1": "batch/v1",
    "policy/v1beta1": "policy/v1 (PodSecurityPolicy: pod security standards)",
    "rbac.authorization.k8s.io/v1beta1": "rbac.authorization.k8s.io/v1",
    "scheduling.k8s.io/v1beta1": "scheduling.k8s.io/v1",
    "networking.k8s.io/v1beta1": "networking.k8s.io/v1",
    "autoscaling/v2beta1": "autoscaling/v2",
    "autoscaling/v2beta2": "autoscaling/v2",
    "resource.k8s.io/v1alpha1": "resource.k8s.io/v1",
    "resource.k8s.io/v1alpha2": "resource.k8s.io/v1",
    "resource.k8s.io/v1alpha3": "resource.k8s.io/v1",
    "kueue.x-k8s.io/v1alpha1": "kueue.x-k8s.io/v1beta2",
    "kueue.x-k8s.io/v1alpha2": "kueue.x-k8s.io/v1beta2",
    "kueue.x-k8s.io/v1beta1": "kueue.x-k8s.io/v1beta2",
    "jobset.x-k8s.io/v1alpha1": "jobset.x-k8s.io/v1alpha2",
    "ray.io/v1alpha1": "ray.io/v1",
    "kubeflow.org/v1": "trainer.kubeflow.org/v1alpha1, TrainJob",
    "trainer.kubeflow.org/v2alpha1": "trainer.kubeflow.org/v1alpha1",
}


@rule("removed-api")
def _removed(documents: Documents, made: Specification | None) -> Iterator[Finding]:
    for each in documents:
        version = each.at("apiVersion")
        if version in REMOVED:
            yield _found(
                each,
                "removed-api",
                f"{version} {each.at('kind')} is removed or no longer developed",
                f"use {REMOVED[version]}",
                "apiVersion",
            )
