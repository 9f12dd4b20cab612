"""A cluster file as a folder for Kubernetes: what ``kubectl apply -k`` takes, and the Helm values beside it."""

from collections.abc import Iterable

from weft.cluster.specification import Specification
from weft.deploy import gpu_operator, health, kueue, monitoring, tenancy
from weft.deploy.manifests import Manifest, nvidia_pools, yaml_text

README = """\
Cluster {name} on Kubernetes. In this order:
  helm repo add nvidia https://helm.ngc.nvidia.com/nvidia
  helm upgrade --install gpu-operator nvidia/gpu-operator -n gpu-operator --create-namespace -f gpu-operator/values.yaml
  kubectl apply -f gpu-operator/device-plugin.yaml -f gpu-operator/mig.yaml
  sh nodes/label.sh
  Kueue, JobSet and the Prometheus operator, each from its own release
  kubectl apply -k .        # namespaces, rights, quotas, queues, rules; nodes pull the image {image}
"""


def render(made: Specification) -> dict[str, str]:
    """File → text."""
    applied: dict[str, Iterable[Manifest]] = {
        "tenancy/namespaces.yaml": tenancy.namespaces(made),
        "tenancy/rights.yaml": tenancy.rights(made),
        "tenancy/quotas.yaml": tenancy.quotas(made),
        "tenancy/network.yaml": tenancy.network(made),
        "tenancy/priorities.yaml": tenancy.priorities(made),
        "tenancy/claims.yaml": gpu_operator.claim_templates(made),
        **kueue.manifests(made),
        **monitoring.manifests(made),
        "health/health.yaml": health.manifests(made) if nvidia_pools(made) else [],
    }
    texts = {name: yaml_text(found) for name, found in applied.items() if found}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(texts),
    }
    texts["kustomization.yaml"] = yaml_text([kustomization])
    if nvidia_pools(made):
        texts["gpu-operator/values.yaml"] = yaml_text([gpu_operator.values(made)])
        texts["gpu-operator/device-plugin.yaml"] = yaml_text([gpu_operator.device_plugin(made)])
        texts["gpu-operator/mig.yaml"] = yaml_text([gpu_operator.mig_manager(made)])
    texts["nodes/label.sh"] = gpu_operator.node_labels(made)
    texts |= monitoring.files(made)
    texts["README"] = README.format(name=made.name, image=made.software.exporter)
    return texts
