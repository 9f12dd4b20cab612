"""The lab on one host with Docker Compose: weft with the host's GPUs, its exporter, Prometheus, Alertmanager, Grafana."""

from typing import Any

from weft.cluster.specification import Specification
from weft.deploy import monitoring
from weft.deploy.manifests import gpu_pools, yaml_text

# Pinned: an image that changes by itself is another lab tomorrow.
PROMETHEUS, ALERTMANAGER, GRAFANA = "prom/prometheus:v3.5.0", "prom/alertmanager:v0.28.1", "grafana/grafana:12.1.1"
LOCAL = "127.0.0.1"  # pages and metrics name users and jobs: they are for this host


def render(made: Specification) -> dict[str, str]:
    """File → text. GPUs are reserved where the cluster has any; ``docker compose up -d`` then."""
    return {
        "compose.yaml": yaml_text([compose(made)]),
        "prometheus/prometheus.yml": yaml_text([prometheus(made)]),
        "prometheus/rules.yml": yaml_text([{"groups": monitoring.rules(made)}]),
        "alertmanager/alertmanager.yml": yaml_text([monitoring.alertmanager(made)]),
        "grafana/datasource.yml": yaml_text([
            {"apiVersion": 1, "datasources": [{"name": "Prometheus", "type": "prometheus", "url": "http://prometheus:9090",
                "isDefault": True}]}
        ]),
        "grafana/dashboards.yml": yaml_text([
            {"apiVersion": 1, "providers": [{"name": "weft", "type": "file",
                "options": {"path": "/var/lib/grafana/dashboards"}}]}
        ]),
        "grafana/dashboards/weft.json": monitoring.dashboard_text(made),
    }  # fmt: skip


def compose(made: Specification) -> dict[str, Any]:
    gpus = bool(gpu_pools(made))
    devices: list[dict[str, Any]] = [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    reserved = {"deploy": {"resources": {"reservations": {"devices": devices}}}} if gpus else {}
    careful = {"restart": "unless-stopped", "security_opt": ["no-new-privileges:true"], "cap_drop": ["ALL"]}
    services: dict[str, Any] = {
        "lab": {
            "image": made.software.image,
            "command": ["learn"],
            "stdin_open": True,
            "tty": True,
            "shm_size": "8gb",  # data loaders and NCCL share memory
            "ulimits": {"memlock": -1},
            "volumes": ["work:/home/weft/work"],
            "working_dir": "/home/weft/work",
            "profiles": ["lab"],
            **reserved,
        },
        "exporter": {
            "image": made.software.exporter,
            "command": ["exporter", "--host", "0.0.0.0", "--port", str(monitoring.PORT)],
            "pid": "host",  # whose processes hold a GPU
            **careful,
            **reserved,
        },
        "prometheus": {
            "image": PROMETHEUS,
            "command": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.retention.time=30d"],
            "volumes": ["./prometheus:/etc/prometheus:ro", "metrics:/prometheus"],
            "ports": [f"{LOCAL}:9090:9090"],
            **careful,
        },
        "alertmanager": {
            "image": ALERTMANAGER,
            "command": ["--config.file=/etc/alertmanager/alertmanager.yml"],
            "volumes": ["./alertmanager:/etc/alertmanager:ro"],
            "ports": [f"{LOCAL}:9093:9093"],
            **careful,
        },
        "grafana": {
            "image": GRAFANA,
            "environment": {"GF_SECURITY_ADMIN_PASSWORD": "${GRAFANA_PASSWORD:?set a password}"},
            "volumes": [
                "./grafana/datasource.yml:/etc/grafana/provisioning/datasources/weft.yml:ro",
                "./grafana/dashboards.yml:/etc/grafana/provisioning/dashboards/weft.yml:ro",
                "./grafana/dashboards:/var/lib/grafana/dashboards:ro",
                "boards:/var/lib/grafana",
            ],
            "ports": [f"{LOCAL}:3000:3000"],
            **careful,
        },
    }
    return {"name": f"weft-{made.name}", "services": services, "volumes": {"work": {}, "metrics": {}, "boards": {}}}


def prometheus(made: Specification) -> dict[str, Any]:
    """Scrapes this host's exporter as the pool of the cluster file's first GPUs."""
    pools = gpu_pools(made)
    labels = {"labels": {"pool": pools[0].name}} if len(pools) == 1 else {}
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": ["alertmanager:9093"]}]}]},
        "scrape_configs": [
            {
                "job_name": monitoring.EXPORTER,
                "honor_labels": True,
                "static_configs": [{"targets": [f"exporter:{monitoring.PORT}"], **labels}],
            }
        ],
    }
