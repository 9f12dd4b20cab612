"""A Grafana dashboard: the panels and variables of dcgm-exporter's own (12239), then who holds what and what waits."""

from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTED = 'instance=~"$instance", gpu=~"$gpu"'
# title, expression, legend, unit of Grafana
PANELS = [
    ("GPU temperature", f"DCGM_FI_DEV_GPU_TEMP{{{SELECTED}}}", "{{Hostname}} GPU {{gpu}}", "celsius"),
    ("GPU power", f"DCGM_FI_DEV_POWER_USAGE{{{SELECTED}}}", "{{Hostname}} GPU {{gpu}}", "watt"),
    ("GPU utilisation", f"DCGM_FI_DEV_GPU_UTIL{{{SELECTED}}}", "{{Hostname}} GPU {{gpu}}", "percent"),
    ("SM clock", f"DCGM_FI_DEV_SM_CLOCK{{{SELECTED}}} * 1000000", "{{Hostname}} GPU {{gpu}}", "hertz"),
    ("Memory used", f"DCGM_FI_DEV_FB_USED{{{SELECTED}}}", "{{Hostname}} GPU {{gpu}}", "decmbytes"),
    ("Tensor cores active", f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{SELECTED}}}", "{{Hostname}} GPU {{gpu}}", "percentunit"),
    ("GPUs held by team", 'weft:gpus:held{namespace=~"$team"}', "{{namespace}}", "short"),
    ("GPUs used by team", 'weft:gpus:used{namespace=~"$team"}', "{{namespace}}", "short"),
    ("Held and not used", "sum(weft:gpus:held) - sum(weft:gpus:used)", "GPUs", "short"),
    ("XID errors in an hour", "sum by (Hostname, gpu, xid) (increase(weft_gpu_xid_errors_total[1h])) > 0",
     "{{Hostname}} GPU {{gpu}} XID {{xid}}", "short"),
    ("Jobs waiting", 'sum by (cluster_queue) (kueue_pending_workloads{cluster_queue=~"$team"})', "{{cluster_queue}}",
     "short"),
    ("Nodes without metrics", 'count(up{job="weft-exporter"} == 0)', "nodes", "short"),
]  # fmt: skip


def dashboard(name: str, teams: list[str]) -> dict[str, Any]:
    """Grafana's JSON model. Two panels a row, on its grid of 24 columns."""
    panels = [
        {
            "id": k + 1,
            "type": "timeseries",
            "title": title,
            "datasource": SOURCE,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (k % 2), "y": 8 * (k // 2)},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "datasource": SOURCE, "expr": expression, "legendFormat": legend}],
        }
        for k, (title, expression, legend, unit) in enumerate(PANELS)
    ]
    among = f'{{namespace=~"{"|".join(teams)}"}}' if teams else ""
    return {
        "uid": "weft-gpus",
        "title": f"GPUs of {name}",
        "schemaVersion": 39,
        "tags": ["weft", "gpu"],
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
            _variable("instance", "label_values(DCGM_FI_DEV_GPU_TEMP, instance)"),
            _variable("gpu", 'label_values(DCGM_FI_DEV_GPU_TEMP{instance=~"$instance"}, gpu)'),
            _variable("team", f"label_values(DCGM_FI_DEV_GPU_UTIL{among}, namespace)"),
        ]},
        "panels": panels,
    }  # fmt: skip


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "type": "query", "datasource": SOURCE, "query": query, "definition": query, "refresh": 2,
        "includeAll": True, "multi": True, "allValue": ".*", "current": {"selected": True, "text": ["All"],
            "value": ["$__all"]},
    }  # fmt: skip
