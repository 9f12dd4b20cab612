"""weft's health daemon on every node with GPUs, and what it may do: ``weft health run --on kubernetes``."""

from typing import Any

from weft.cluster.specification import Specification
from weft.deploy.manifests import MANAGED, POOL, SYSTEM, Manifest, gpu_pools, manifest

NAME = "weft-health"
STATE = "/var/lib/weft/health"
SHARE = 0.05  # of the nodes with GPUs may be drained at once: more at once is a fault of something else


def manifests(made: Specification) -> list[Manifest]:
    rbac = "rbac.authorization.k8s.io/v1"
    cluster_rules = [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
    ]
    own_rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "create", "update", "patch"]}]
    subject = [{"kind": "ServiceAccount", "name": NAME, "namespace": SYSTEM}]

    def role(kind: str) -> dict[str, str]:
        return {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": NAME}

    return [
        manifest("v1", "ServiceAccount", NAME, SYSTEM),
        manifest(rbac, "ClusterRole", NAME, rules=cluster_rules),
        manifest(rbac, "ClusterRoleBinding", NAME, roleRef=role("ClusterRole"), subjects=subject),
        manifest(rbac, "Role", NAME, SYSTEM, rules=own_rules),
        manifest(rbac, "RoleBinding", NAME, SYSTEM, roleRef=role("Role"), subjects=subject),
        manifest("apps/v1", "DaemonSet", NAME, SYSTEM, {"app.kubernetes.io/name": NAME}, spec=_daemon(made)),
    ]


def _daemon(made: Specification) -> dict[str, Any]:
    about = {"app.kubernetes.io/name": NAME}
    nodes = sum(pool.nodes.count for pool in gpu_pools(made))
    container = {
        "name": "health",
        "image": made.software.exporter,
        "args": ["health", "run", "--on", "kubernetes", "--state", STATE, "--budget", str(max(1, int(nodes * SHARE)))],
        "env": [
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"},
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "200Mi"}},  # no limit: a check copies through main memory
        "securityContext": {"privileged": True, "runAsUser": 0},  # the kernel's log, and every GPU
        "volumeMounts": [
            {"name": "state", "mountPath": STATE},
            {"name": "kmsg", "mountPath": "/dev/kmsg", "readOnly": True},
        ],
    }
    pools = [{"key": POOL, "operator": "In", "values": [pool.name for pool in gpu_pools(made)]}]
    return {
        "selector": {"matchLabels": about},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "20%"}},
        "template": {
            "metadata": {"labels": MANAGED | about},
            "spec": {
                "serviceAccountName": NAME,
                "priorityClassName": "system-node-critical",
                "runtimeClassName": "nvidia",
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": pools}]}}},
                "tolerations": [{"operator": "Exists"}],  # its own taint too
                "containers": [container],
                "volumes": [
                    {"name": "state", "hostPath": {"path": STATE, "type": "DirectoryOrCreate"}},
                    {"name": "kmsg", "hostPath": {"path": "/dev/kmsg", "type": "CharDevice"}},
                ],
            },
        },
    }  # fmt: skip
