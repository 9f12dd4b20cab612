"""A Kubernetes node: condition, taint, cordon, and eviction of its pods within a budget.

Every change of the node is one patch with the ``resourceVersion`` that was read, so that nothing which happened in
between is overwritten. The annotation ``weft.dev/quarantine`` says which quarantine the node has and whether weft itself
cordoned it.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from weft.hardware.health.ledger import Quarantine
from weft.hardware.health.node import Conflict, Mark, Seen, Unreachable

KEY = "weft.dev/quarantine"  # of annotation and taint
CONDITION = "GPUHealthy"
MANAGER = "weft-health"  # as which this writes
DRAINS = "weft-health-drains"  # the ConfigMap of nodes that are being drained
TIMEOUT_S = (3.0, 10.0)  # to connect, to answer
WATCH_S = 60  # after which a watch is asked for anew
MERGE = {"_content_type": "application/merge-patch+json", "field_manager": MANAGER}


def connect() -> Any:
    """The API as a pod or as kubectl has it.

    Raises:
        ImportError: the kubernetes package is missing.
        Unreachable: no configuration.
    """
    try:
        from kubernetes import client, config
    except ModuleNotFoundError as error:
        raise ImportError("the Kubernetes client is missing: pip install 'weft[kubernetes]'") from error
    try:
        config.load_config()
    except config.ConfigException as error:
        raise Unreachable(f"no Kubernetes configuration: run in a pod, or set KUBECONFIG ({error})") from error
    return client.CoreV1Api()


class KubernetesNode:
    """Args:
    api: a ``CoreV1Api``.
    name: the node's.
    budget: how many nodes of the cluster may be drained at once; 0 for any number. Nodes are cordoned regardless.
    namespace: of the ConfigMap that counts them.
    """

    def __init__(self, api: Any, name: str, budget: int = 0, namespace: str = ""):
        self.api, self.name, self.budget = api, name, budget
        inside = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        self.namespace = namespace or (inside.read_text().strip() if inside.exists() else "default")
        self._shown: tuple[str, str] | None = None  # the condition that the node has

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            if error.status == 409:
                raise Conflict(what) from error
            hint = {
                401: "permission refused",
                403: "permission refused: see RBAC in the health README",
                404: "not found",
            }
            why = hint.get(error.status, error.reason or "")
            raise Unreachable(f"Kubernetes, {what}: {error.status} {why}") from error
        except (HTTPError, OSError) as error:
            why = type(getattr(error, "reason", None) or error).__name__
            raise Unreachable(f"Kubernetes, {what}: no answer ({why})") from error

    # ---- the node

    def read(self) -> Seen:
        with self._asking(f"reading node {self.name}"):
            node = self.api.read_node(self.name, _request_timeout=TIMEOUT_S)
        uid = node.metadata.uid or ""
        text = (node.metadata.annotations or {}).get(KEY)
        if not text:
            return Seen(None, uid)
        try:
            written = json.loads(text)
            identity, cordoned = str(written["id"]), bool(written["cordoned"])
        except (ValueError, KeyError, TypeError):
            identity, cordoned = text[:63], False  # not ours, or damaged: never a reason to uncordon
        tainted = any(taint.key == KEY for taint in node.spec.taints or ())
        intact = tainted and (not cordoned or bool(node.spec.unschedulable))
        return Seen(Mark(identity, intact, (node, cordoned)), uid)

    def _patch(self, node: Any, what: str, annotation: str | None, taints: list[Any], **spec: Any) -> None:
        as_dict = self.api.api_client.sanitize_for_serialization
        body = {
            "metadata": {"resourceVersion": node.metadata.resource_version, "annotations": {KEY: annotation}},
            "spec": {"taints": [as_dict(taint) for taint in taints] or None, **spec},
        }
        with self._asking(what):
            self.api.patch_node(self.name, body, _request_timeout=TIMEOUT_S, **MERGE)

    def quarantine(self, quarantine: Quarantine, over: Mark | None) -> str:
        if over and over.id == quarantine.id:
            self._condition(quarantine)
            return ""
        with self._asking(f"reading node {self.name}"):
            node = over.raw[0] if over else self.api.read_node(self.name, _request_timeout=TIMEOUT_S)
        # Cordoned already by a person: theirs, and stays so afterwards.
        cordoned = (over is not None and over.raw[1]) or not node.spec.unschedulable
        taints = [t for t in node.spec.taints or () if t.key != KEY]
        taints.append({"key": KEY, "value": quarantine.id, "effect": "NoSchedule"})
        annotation = json.dumps({"id": quarantine.id, "cordoned": cordoned})
        self._patch(node, f"cordoning node {self.name}", annotation, taints, unschedulable=True)
        self._condition(quarantine)
        return ""

    def release(self, mark: Mark) -> None:
        node, cordoned = mark.raw
        taints = [t for t in node.spec.taints or () if t.key != KEY]
        spec = {"unschedulable": None} if cordoned and not _cordoned_by_another(node) else {}
        self._patch(node, f"uncordoning node {self.name}", None, taints, **spec)
        self._give_back_slot()

    def forget(self, mark: Mark) -> None:
        node, _ = mark.raw
        taints = [t for t in node.spec.taints or () if t.key != KEY]
        self._patch(node, f"removing the mark of node {self.name}", None, taints)
        self._give_back_slot()

    def healthy(self) -> None:
        self._set_condition("True", "NoFault", "no fault that needs the node out of service")

    def _condition(self, quarantine: Quarantine) -> None:
        worst = quarantine.reason()
        listed = "; ".join(i.words() for i in quarantine.incidents if i.state == "open")
        reason = "".join(c for c in worst.partition(": ")[2].partition(" on ")[0].title() if c.isalnum()) or "Fault"
        self._set_condition("False", reason, f"{quarantine.id}: {listed}"[:1000])

    def _set_condition(self, status: str, reason: str, message: str) -> None:
        if self._shown == (status, message):
            return
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {
            "type": CONDITION, "status": status, "reason": reason, "message": message,
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        }  # fmt: skip
        options = {"_content_type": "application/strategic-merge-patch+json", "field_manager": MANAGER}
        with self._asking(f"setting the condition of node {self.name}"):
            self.api.patch_node_status(
                self.name, {"status": {"conditions": [condition]}}, _request_timeout=TIMEOUT_S, **options
            )
        self._shown = (status, message)

    # ---- its pods

    def drain(self, quarantine: Quarantine) -> tuple[bool, str]:
        """Evicts what ``kubectl drain`` does: all but pods of DaemonSets and static ones. Pods that no controller would
        start again are left to a person."""
        from kubernetes.client.exceptions import ApiException

        with self._asking(f"listing pods of node {self.name}"):
            listed = self.api.list_pod_for_all_namespaces(
                field_selector=f"spec.nodeName={self.name}", _request_timeout=TIMEOUT_S
            )
        pods = [pod for pod in listed.items if _moves(pod)]
        if not pods:
            self._give_back_slot()
            return True, ""
        if not self._take_slot(quarantine.id):
            return False, f"{self.budget} nodes are drained at once already"
        waiting: list[str] = []
        for pod in pods:
            name, space = pod.metadata.name, pod.metadata.namespace
            if pod.metadata.deletion_timestamp:
                waiting.append(f"{space}/{name} ends")
            elif not pod.metadata.owner_references:
                waiting.append(f"{space}/{name} has no controller: a person deletes it")
            else:
                body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": space}}
                try:
                    self.api.create_namespaced_pod_eviction(name, space, body, _request_timeout=TIMEOUT_S)
                    waiting.append(f"{space}/{name} ends")
                except ApiException as error:
                    if error.status == 404:  # it has ended
                        continue
                    if error.status != 429:
                        raise Unreachable(
                            f"Kubernetes, evicting {space}/{name}: {error.status} {error.reason}"
                        ) from error
                    waiting.append(f"{space}/{name}: its PodDisruptionBudget allows no eviction now")
                except Exception as error:  # urllib3's own
                    raise Unreachable(
                        f"Kubernetes, evicting {space}/{name}: no answer ({type(error).__name__})"
                    ) from error
        return False, "; ".join(waiting)[:1000]

    # ---- the budget: one ConfigMap, changed only at the version that was read

    def _take_slot(self, identity: str) -> bool:
        if not self.budget:
            return True
        from kubernetes.client.exceptions import ApiException

        empty = {"metadata": {"name": DRAINS}, "data": {}}
        try:
            with self._asking("reading the drain budget"):
                try:
                    slots = self.api.read_namespaced_config_map(DRAINS, self.namespace, _request_timeout=TIMEOUT_S)
                except ApiException as error:
                    if error.status != 404:
                        raise
                    slots = self.api.create_namespaced_config_map(self.namespace, empty, _request_timeout=TIMEOUT_S)
        except Conflict:  # another node created it first
            return False
        data = dict(slots.data or {})
        if data.get(self.name) == identity:
            return True
        if len(data) >= self.budget:  # of nodes that are gone or back
            with self._asking("listing nodes"):
                nodes = self.api.list_node(_request_timeout=TIMEOUT_S).items
            drained = {n.metadata.name for n in nodes if KEY in (n.metadata.annotations or {})}
            data = {name: q for name, q in data.items() if name in drained}
        data.pop(self.name, None)
        if len(data) >= self.budget:
            return False
        slots.data = {**data, self.name: identity}
        with self._asking("taking a slot of the drain budget"):
            self.api.replace_namespaced_config_map(DRAINS, self.namespace, slots, _request_timeout=TIMEOUT_S)
        return True

    def _give_back_slot(self) -> None:
        if not self.budget:
            return
        from kubernetes.client.exceptions import ApiException

        with self._asking("giving back a slot of the drain budget"):
            try:
                self.api.patch_namespaced_config_map(
                    DRAINS, self.namespace, {"data": {self.name: None}}, _request_timeout=TIMEOUT_S, **MERGE
                )
            except ApiException as error:
                if error.status != 404:
                    raise

    # ---- changes by others

    def watch(self, changed: Callable[[], None], stop: threading.Event) -> None:
        """Calls ``changed`` at each change of the node, until ``stop``. A watch that expired (410) or broke begins anew."""
        from kubernetes import watch

        version: str | None = None
        pause = 1.0
        while not stop.is_set():
            try:
                selector = f"metadata.name={self.name}"
                if version is None:
                    listed = self.api.list_node(field_selector=selector, _request_timeout=TIMEOUT_S)
                    version = listed.metadata.resource_version
                    changed()
                stream = watch.Watch().stream(
                    self.api.list_node, field_selector=selector, resource_version=version, timeout_seconds=WATCH_S,
                    _request_timeout=(TIMEOUT_S[0], WATCH_S + 15),
                )  # fmt: skip
                for event in stream:
                    version = event["object"].metadata.resource_version
                    pause = 1.0
                    changed()
                    if stop.is_set():
                        return
            except Exception:  # 410, a time-out, a connection that broke: read the present state and watch from there
                version = None
                stop.wait(pause)
                pause = min(pause * 2, 60.0)


def _moves(pod: Any) -> bool:
    if pod.status and pod.status.phase in ("Succeeded", "Failed"):
        return False
    if "kubernetes.io/config.mirror" in (pod.metadata.annotations or {}):
        return False
    return not any(owner.kind == "DaemonSet" for owner in pod.metadata.owner_references or ())


def _cordoned_by_another(node: Any) -> bool:
    """Whether another than weft wrote ``spec.unschedulable`` last: a person who uncordoned and cordoned again."""
    for entry in node.metadata.managed_fields or ():
        fields = entry.fields_v1 or {}
        if "f:unschedulable" in fields.get("f:spec", {}) and entry.manager != MANAGER:
            return True
    return False
