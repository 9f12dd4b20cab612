"""``cluster.yaml``: the one description of a cluster that ``weft simulate`` runs on and ``weft deploy`` renders.

``nodes`` alone is a whole file. The rest says who may use the nodes and how: prices, how GPUs are shared, teams with quotas
in cohorts, priorities, alerts, versions. Quotas are those of Kueue's ClusterQueues: what is *nominal* is a team's own,
    it may
*borrow* of its cohort while that is free, and lends what it does not need.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from weft.cluster.files.text import TraceError
from weft.cluster.files.yaml import items, line, mapping, root, scalar
from weft.cluster.model import NodeGroup
from weft.definition import UnknownName
from weft.words import count

SHARING = ("exclusive", "time-slicing", "mps", "mig")
QUEUEING = ("BestEffortFIFO", "StrictFIFO")
SEVERITIES = ("critical", "warning", "info")
MOST = 1e12  # cores, GiB, nodes, money; far above any cluster, and thousandths of it are still whole numbers of 64 bits
NAME = re.compile(
    r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?"
)  # a label of DNS, with room for what is put before or behind it
WEEK = 7 * 24 * 60  # minutes
RESERVED = re.compile(r"kube-.*|default|kueue-system|gpu-operator|monitoring|weft|weft-.*")  # namespaces of others
CLAIMED = "nvidia.com/claimed-gpu"  # what Kueue counts in place of a device class
MIG = re.compile(r"([1-7])g\.([1-9][0-9]{0,2})gb(\+me|\+gfx|\+me\.all|-me)?")
RESOURCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")
URL = re.compile(r"https?://[^\s\"'\\]+")
PLAIN = re.compile(
    r"[A-Za-z0-9][-A-Za-z0-9_.+:/@]*"
)  # versions, images, labels: nothing that a shell or YAML takes amiss


@dataclass(frozen=True)
class Sharing:
    """How several jobs share one GPU of a pool.

    Args:
        mode: one of SHARING.
        replicas: shares of each GPU: clients that are time-sliced or under MPS, or MIG slices.
        profile: of MIG, such as ``1g.10gb``.
    """

    mode: str = "exclusive"
    replicas: int = 1
    profile: str = ""


@dataclass(frozen=True)
class Accelerator:
    """What is said of a type of accelerator.

    Args:
        gpu_type: as in ``nodes``.
        resource: its name in Kubernetes.
        product: its label nvidia.com/gpu.product.
        cloud_name: its name with SkyPilot; ``gpu_type`` by default.
        price: money for a GPU hour; ``spot_price`` for one that the cloud may take back.
    """

    gpu_type: str
    resource: str = "nvidia.com/gpu"
    product: str = ""
    cloud_name: str = ""
    price: float = 0.0
    spot_price: float = 0.0
    line: int = 0


@dataclass(frozen=True)
class Pool:
    """A group of nodes, with what only a deployment needs of it. Sizes and quotas of a pool count what it offers: GPUs, or
    the shares of them."""

    nodes: NodeGroup
    accelerator: Accelerator
    sharing: Sharing = Sharing()
    price: float = 0.0  # money for a GPU hour
    spot: bool = False
    dra: bool = False  # claimed by Kubernetes' dynamic resource allocation, not counted by a device plugin
    line: int = 0

    @property
    def name(self) -> str:
        return self.nodes.name

    @property
    def gpus(self) -> int:
        return self.nodes.count * self.nodes.gpus

    @property
    def units(self) -> int:
        """What jobs can be given: GPUs, or shares of them."""
        return self.gpus * self.sharing.replicas

    @property
    def resource(self) -> str:
        """The name in Kubernetes of what a job is given."""
        if self.sharing.mode == "mig":
            return f"nvidia.com/mig-{self.sharing.profile.replace('+', '.')}"
        if self.dra:
            return CLAIMED
        shared = self.sharing.mode != "exclusive"
        return self.accelerator.resource + (".shared" if shared else "")


@dataclass(frozen=True)
class PoolQuota:
    """What a team or a cohort has of a pool, in the pool's units."""

    pool: str
    nominal: int
    borrowing_limit: float = math.inf
    lending_limit: float = math.inf
    line: int = 0


@dataclass(frozen=True)
class CohortSpec:
    """Teams, and cohorts, that lend each other what they do not use; with quota that belongs to no team."""

    name: str
    parent: str = ""
    quota: tuple[PoolQuota, ...] = ()
    line: int = 0


@dataclass(frozen=True)
class Team:
    """A tenant: its namespace, queue and account have its name."""

    name: str
    quota: tuple[PoolQuota, ...] = ()
    cohort: str = ""
    users: tuple[str, ...] = ()
    weight: float = 1.0  # of fair sharing
    queueing: str = QUEUEING[0]
    webhook: str = ""  # where alerts of its jobs go
    line: int = 0

    def of(self, pool: str) -> PoolQuota | None:
        return next((q for q in self.quota if q.pool == pool), None)


@dataclass(frozen=True)
class Priority:
    name: str
    value: int
    default: bool = False
    max_hours: float = 0.0  # how long a job may run; 0: as long as it takes
    line: int = 0


@dataclass(frozen=True)
class Receiver:
    """Where alerts go, over HTTP."""

    name: str
    webhook: str
    severity: str = ""  # that it takes; all where it is empty
    line: int = 0


@dataclass(frozen=True)
class Alerts:
    """Receivers, and the limits of the rules."""

    receivers: tuple[Receiver, ...] = ()
    temperature_c: float = 87.0
    idle_minutes: int = 60  # of a GPU that a job holds
    wait_minutes: int = 120  # of a job in a queue


@dataclass(frozen=True)
class Software:
    """Versions, for what is installed and for ``weft doctor`` to hold a node against; empty: the installer's own.

    Args:
        driver: of NVIDIA's, ``580.95.05``.
        toolkit: of NVIDIA's container toolkit, ``1.18.0``.
        cuda: the least that the driver must load, ``13.0``.
        image: the container that jobs run in by default, and ``exporter``, weft's own.
    """

    driver: str = ""
    toolkit: str = ""
    cuda: str = ""
    image: str = "weft:latest"
    exporter: str = "weft:latest"


@dataclass(frozen=True)
class Slurm:
    controller: str = "localhost"
    accounting: str = ""  # the host of slurmdbd; without one there are no accounts and limits


@dataclass(frozen=True)
class Monitoring:
    """``release`` is the label by which the Prometheus operator finds rules and monitors; ``exporter`` serves the metrics of
    GPUs: weft's, or NVIDIA's dcgm-exporter (without XID errors by code)."""

    release: str = "kube-prometheus-stack"
    namespace: str = "monitoring"
    exporter: str = "weft"


@dataclass(frozen=True)
class Specification:
    """A cluster file, read and checked."""

    path: Path
    pools: tuple[Pool, ...]
    name: str = "cluster"
    currency: str = "USD"
    accelerators: tuple[Accelerator, ...] = ()
    cohorts: tuple[CohortSpec, ...] = ()
    teams: tuple[Team, ...] = ()
    priorities: tuple[Priority, ...] = ()
    alerts: Alerts = Alerts()
    software: Software = Software()
    slurm: Slurm = Slurm()
    monitoring: Monitoring = Monitoring()
    lines: Mapping[str, int] = field(default_factory=dict)  # of the sections

    def pool(self, name: str) -> Pool:
        """Raises UnknownName: there is none of this name."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise UnknownName("pool", name, [pool.name for pool in self.pools])

    def root_of(self, cohort: str) -> str:
        """The cohort at the top of a cohort's tree."""
        parents = {each.name: each.parent for each in self.cohorts}
        while parents.get(cohort):
            cohort = parents[cohort]
        return cohort


# ---- reading ---------------------------------------------------------------------------------------------------------

Read = Callable[[Path, str, Any], Any]  # (file, key, node) -> value
T = TypeVar("T")


def _whole(least: int, most: float = MOST) -> Read:
    def of(path: Path, key: str, node: Any) -> int:
        expected = f"a whole number of {least} or more" + (f", at most {most:,.0f}" if most < MOST else "")
        value = scalar(path, node, key, expected)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise TraceError(f"{path}:{line(node)}: {key} is {value!r}; expected {expected}")
        return value

    return of


def _number(path: Path, key: str, node: Any) -> float:
    value = scalar(path, node, key, "a number of 0 or more")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < MOST:
        raise TraceError(f"{path}:{line(node)}: {key} is {value!r}; expected a number of 0 or more")
    return value


def _flag(path: Path, key: str, node: Any) -> bool:
    value = scalar(path, node, key, "true or false")
    if not isinstance(value, bool):
        raise TraceError(f"{path}:{line(node)}: {key} is {value!r}; expected true or false")
    return value


def _word(path: Path, key: str, node: Any) -> str:
    value = scalar(path, node, key, "a word")
    if not isinstance(value, str):
        raise TraceError(f"{path}:{line(node)}: {key} is {value!r}; expected a word")
    return value


def _like(pattern: re.Pattern[str], expected: str) -> Read:
    def of(path: Path, key: str, node: Any) -> str:
        if node.id != "scalar":
            raise TraceError(f"{path}:{line(node)}: {key} is a {node.id}; expected {expected}")
        text = str(node.value)  # as it is written: a version 13.0 is no number
        if not pattern.fullmatch(text):
            raise TraceError(f"{path}:{line(node)}: {key} is {text!r:.80}; expected {expected}")
        return text

    return of


def _one_of(names: Iterable[str]) -> Read:
    def of(path: Path, key: str, node: Any) -> str:
        text = str(scalar(path, node, key, "one of " + ", ".join(names)))
        if text not in names:
            raise TraceError(f"{path}:{line(node)}: {UnknownName(key, text, names)}")
        return text

    return of


def _values(path: Path, what: str, node: Any, keys: Mapping[str, Read], needed: Iterable[str] = ()) -> dict[str, Any]:
    found = {key: keys[key](path, key, value) for key, value in mapping(path, node, keys, what).items()}
    for key in needed:
        if key not in found:
            raise TraceError(f"{path}:{line(node)}: {key} is missing")
    return found


def _one(cls: Callable[..., T], keys: Mapping[str, Read]) -> Read:
    return lambda path, key, node: cls(**_values(path, key, node, keys))


def _list(cls: Callable[..., T], what: str, keys: Mapping[str, Read], needed: Iterable[str]) -> Read:
    def of(path: Path, key: str, node: Any) -> tuple[T, ...]:
        return tuple(cls(**_values(path, what, each, keys, needed), line=line(each)) for each in items(path, node, key))

    return of


def _users(path: Path, key: str, node: Any) -> tuple[str, ...]:
    return tuple(user(path, "a user", each) for each in items(path, node, key))


def _sharing(path: Path, key: str, node: Any) -> Sharing:
    if node.id == "scalar":
        mode, found = _one_of(SHARING)(path, key, node), {}
    else:
        keys = {"mode": _one_of(SHARING), "replicas": _whole(1), "profile": _like(MIG, "a MIG profile such as 1g.10gb")}
        found = _values(path, key, node, keys, ("mode",))
        mode = found.pop("mode")
    needed = {"exclusive": (), "mig": ("profile", "replicas")}.get(mode, ("replicas",))
    for name in ("replicas", "profile"):
        if (name in found) != (name in needed):
            expected = ", ".join(needed) or "nothing else"
            raise TraceError(f"{path}:{line(node)}: sharing by {mode} goes with {expected}")
    if mode in ("time-slicing", "mps") and found["replicas"] < 2:
        raise TraceError(
            f"{path}:{line(node)}: replicas is {found['replicas']}; expected 2 or more: {mode} with 1 shares nothing"
        )
    return Sharing(mode, **found)


name = _like(NAME, "lower-case letters, digits and dashes, at most 50, as names in Kubernetes are")
user = _like(re.compile(r"[A-Za-z0-9_][-A-Za-z0-9_.@]{0,62}"), "a user's name")
plain = _like(PLAIN, "a word of letters, digits and -_.+:/@")
version = _like(re.compile(r"v?\d+(\.\d+){0,3}([-+.][A-Za-z0-9.]+)?"), "a version such as 580.95.05")
url = _like(URL, "an address that begins with http:// or https://")
signed = re.compile(r"-?\d{1,9}")

GROUP: dict[str, Read] = {
    "count": _whole(0), "gpus": _whole(0), "gpu_type": _word, "gpu_memory_gb": _number, "cpu": _number,
    "memory_gb": _number, "rack": _word, "rack_nodes": _whole(1), "nvlink_domain": _word,
    "nvlink_domain_nodes": _whole(1), "name": _word,
}  # fmt: skip
POOL: dict[str, Read] = {"sharing": _sharing, "price": _number, "spot": _flag, "dra": _flag}
QUOTA = _list(
    PoolQuota, "a quota",
    {"pool": name, "nominal": _whole(0), "borrowing_limit": _whole(0), "lending_limit": _whole(0)}, ("pool", "nominal"),
)  # fmt: skip
SECTIONS: dict[str, Read] = {
    "name": name,
    "currency": _like(re.compile(r"[A-Z]{3}"), "three letters, such as EUR"),
    "accelerators": _list(
        Accelerator, "an accelerator",
        {"gpu_type": _word, "resource": _like(RESOURCE, "a resource such as nvidia.com/gpu"), "product": plain,
         "cloud_name": plain, "price": _number, "spot_price": _number}, ("gpu_type",),
    ),
    "cohorts": _list(CohortSpec, "a cohort", {"name": name, "parent": name, "quota": QUOTA}, ("name",)),
    "teams": _list(
        Team, "a team",
        {"name": name, "cohort": name, "quota": QUOTA, "users": _users, "weight": _number, "queueing": _one_of(QUEUEING),
         "webhook": url}, ("name",),
    ),
    "priorities": _list(
        Priority, "a priority",
        {"name": name, "value": lambda path, key, node: int(_like(signed, "a whole number, at most 9 digits")(path, key,
            node)),
         "default": _flag, "max_hours": _number}, ("name", "value"),
    ),
    "alerts": _one(Alerts, {
        "receivers": _list(Receiver, "a receiver", {"name": name, "webhook": url, "severity": _one_of(SEVERITIES)}, ("name",
            "webhook")),
        "temperature_c": _number, "idle_minutes": _whole(1, WEEK), "wait_minutes": _whole(1, WEEK),
    }),
    "software": _one(Software, {"driver": version, "toolkit": version, "cuda": version, "image": plain, "exporter": plain}),
    "slurm": _one(Slurm, {"controller": plain, "accounting": plain}),
    "monitoring": _one(Monitoring, {"release": plain, "namespace": name, "exporter": _one_of(("weft", "dcgm"))}),
}  # fmt: skip


def read(path: Path) -> Specification:
    """A cluster file. Every mistake is named with its line.

    Raises:
        TraceError: no YAML, an unknown key (with the nearest one), a value of another kind, a name that comes twice or that
            nothing has, a cohort below itself, a quota that the nodes cannot hold.
        ImportError: PyYAML is missing.
    """
    node = root(path, "groups of nodes under 'nodes:'")
    top = mapping(path, node, ("nodes", *SECTIONS), "the file")
    if "nodes" not in top:
        raise TraceError(f"{path}:{line(node)}: 'nodes' is missing")
    found = {key: SECTIONS[key](path, key, value) for key, value in top.items() if key != "nodes"}
    _unique(path, "accelerator", [(each.gpu_type, each.line) for each in found.get("accelerators", ())])
    known = {each.gpu_type: each for each in found.get("accelerators", ())}
    pools = tuple(_pool(path, each, known) for each in items(path, top["nodes"], "nodes"))
    types = {pool.nodes.gpu_type for pool in pools}
    for gpu_type, each in known.items():
        if gpu_type not in types:
            raise TraceError(f"{path}:{each.line}: {UnknownName('gpu_type', gpu_type, types)}")
    made = Specification(path, pools, **found, lines={key: line(value) for key, value in top.items()})
    _check_names(made)
    _check_cohorts(made)
    _check_quotas(made)
    return made


def _pool(path: Path, node: Any, accelerators: Mapping[str, Accelerator]) -> Pool:
    values = _values(path, "a group of nodes", node, GROUP | POOL)
    if "count" not in values:
        raise TraceError(f"{path}:{line(node)}: count is missing: how many such nodes there are")
    own = {key: values.pop(key) for key in POOL if key in values}
    try:
        group = NodeGroup(**values)
    except ValueError as error:  # what does not go together
        raise TraceError(f"{path}:{line(node)}: {error}") from None
    of = accelerators.get(group.gpu_type, Accelerator(group.gpu_type))
    sharing = own.get("sharing", Sharing())
    if sharing.mode != "exclusive" and (not group.gpus or not of.resource.startswith("nvidia.com/")):
        raise TraceError(f"{path}:{line(node)}: sharing by {sharing.mode} is of NVIDIA's GPUs; this group has none")
    if own.get("dra") and (sharing.mode != "exclusive" or not of.resource.startswith("nvidia.com/")):
        raise TraceError(f"{path}:{line(node)}: dra is of whole NVIDIA GPUs here; expected no sharing with it")
    if match := MIG.fullmatch(sharing.profile):
        cut, memory = int(match[1]) * sharing.replicas, int(match[2]) * sharing.replicas
        if cut > 7 or memory > (group.gpu_memory_gb or memory):
            raise TraceError(
                f"{path}:{line(node)}: {sharing.replicas} slices {sharing.profile} are {cut} of the 7 parts of a GPU and "
                f"{memory} GB of its {group.gpu_memory_gb:g}; expected fewer slices"
            )
    price = (of.spot_price or of.price) if own.get("spot") else of.price
    return Pool(group, of, sharing, own.get("price", price), own.get("spot", False), own.get("dra", False), line(node))


def _unique(path: Path, what: str, names: Iterable[tuple[str, int]]) -> None:
    seen: dict[str, int] = {}
    for text, at in names:
        if text in seen:
            raise TraceError(f"{path}:{at}: {what} '{text}' already exists (line {seen[text]})")
        seen[text] = at


def _check_names(made: Specification) -> None:
    path = made.path
    for what, each in (
        ("team", made.teams), ("cohort", made.cohorts), ("priority", made.priorities), ("receiver", made.alerts.receivers),
    ):  # fmt: skip
        _unique(path, what, [(one.name, one.line) for one in each])
    pools = Counter(pool.name for pool in made.pools)
    for team in made.teams:
        if RESERVED.fullmatch(team.name):
            raise TraceError(
                f"{path}:{team.line}: team '{team.name}' would be a namespace of the system; expected another name"
            )
    owners: list[Team | CohortSpec] = [*made.teams, *made.cohorts]
    for owner in owners:
        _unique(path, f"the quota of '{owner.name}' of pool", [(quota.pool, quota.line) for quota in owner.quota])
        for quota in owner.quota:
            if quota.pool not in pools:
                raise TraceError(f"{path}:{quota.line}: {UnknownName('pool', quota.pool, pools)}")
            if pools[quota.pool] > 1:
                raise TraceError(
                    f"{path}:{quota.line}: {pools[quota.pool]} groups are called '{quota.pool}'; expected a name each"
                )
    defaults = [each for each in made.priorities if each.default]
    if len(defaults) > 1:
        raise TraceError(
            f"{path}:{defaults[1].line}: a second default priority (line {defaults[0].line}); expected one"
        )


def _check_cohorts(made: Specification) -> None:
    path, parents = made.path, {each.name: each.parent for each in made.cohorts}
    for each in made.cohorts:
        if each.parent and each.parent not in parents:
            raise TraceError(f"{path}:{each.line}: {UnknownName('cohort', each.parent, parents)}")
    for team in made.teams:
        if team.cohort and team.cohort not in parents:
            raise TraceError(f"{path}:{team.line}: {UnknownName('cohort', team.cohort, parents)}")
    for each in made.cohorts:
        way = [each.name]
        while parents[way[-1]]:
            way.append(parents[way[-1]])
            if way[-1] == each.name:
                raise TraceError(f"{path}:{each.line}: cohort '{each.name}' is below itself: {' → '.join(way)}")
            if len(way) > len(parents):  # a circle above it: told of the cohorts in it
                break


def _check_quotas(made: Specification) -> None:
    path, total = made.path, dict.fromkeys((pool.name for pool in made.pools), 0)
    owners: list[Team | CohortSpec] = [*made.cohorts, *made.teams]
    for owner in owners:
        alone = not owner.cohort if isinstance(owner, Team) else not owner.parent
        for quota in owner.quota:
            if quota.lending_limit != math.inf and quota.lending_limit > quota.nominal:
                raise TraceError(
                    f"{path}:{quota.line}: lending_limit is {quota.lending_limit} of {quota.nominal} nominal; expected no more"
                )
            limits = [key for key in ("borrowing_limit", "lending_limit") if getattr(quota, key) != math.inf]
            if alone and limits and (limits != ["borrowing_limit"] or quota.borrowing_limit):
                of = "a team without a cohort" if isinstance(owner, Team) else "a cohort without a parent"
                raise TraceError(f"{path}:{quota.line}: {limits[0]} of {of}, which neither borrows nor lends")
            pool = made.pool(quota.pool)
            total[quota.pool] += quota.nominal
            if total[quota.pool] > pool.units:
                what = {"exclusive": "GPU", "mig": "MIG slice"}.get(pool.sharing.mode, "share")
                raise TraceError(
                    f"{path}:{quota.line}: with '{owner.name}' {total[quota.pool]:,} of pool '{quota.pool}' are guaranteed, "
                    f"which has {count(pool.units, what)}; expected nominal quotas that fit"
                )
