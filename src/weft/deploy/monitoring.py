"""Monitoring: what is scraped, alert rules with tests of their own, Alertmanager's routes, the exporter on every node.

Metrics have dcgm-exporter's names and labels, so that rules and dashboards work with either exporter; XID errors are weft's
counter by code, since dcgm-exporter's gauge keeps its last value and hides a repeat.
"""

import json
import re
from typing import Any

from weft.cluster.specification import Receiver, Specification
from weft.deploy import health
from weft.deploy.dashboard import dashboard
from weft.deploy.manifests import MANAGED, POOL, SYSTEM, Manifest, gpu_pools, manifest, yaml_text
from weft.hardware.health import catalogue

TEMPERATURE, UTILISATION = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_UTIL"
XID = "weft_gpu_xid_errors_total"  # a counter for each code
REMAP_FAILURE = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
EXPORTER, PORT = "weft-exporter", 9400
SLOWED = "hw_slowdown|hw_thermal_slowdown|hw_power_brake_slowdown|sw_thermal_slowdown"
IDLE_PERCENT = 5
HELD = f'{{namespace!~"|{SYSTEM}",pod!=""}}'  # by a pod, not by weft's own
JOBS = '{hpc_job!=""}'  # by a job of Slurm
WAITING = 'sum by (cluster_queue) (kueue_pending_workloads{status="active"}) > 0'


def fatal_xids() -> list[int]:
    """Codes after which a GPU does no more work until it is reset, its node rebooted or a person has looked."""
    return [code for code, action in _xids() if action in catalogue.ACTIONS and catalogue.needs_quarantine(action)]


def dependent_xids() -> list[int]:
    """Codes of which only the details of the kernel's line say how grave they are."""
    return [code for code, action in _xids() if action in catalogue.DEPENDS]


def _xids() -> list[tuple[int, str]]:
    found = ((kind.removeprefix("xid:"), catalogue.find(kind).action) for kind in catalogue.faults())
    return sorted((int(code), action) for code, action in found if code.isdecimal())


def rules(made: Specification) -> list[dict[str, Any]]:
    """Groups of rules, for Prometheus and for the operator alike."""
    alerts = made.alerts

    def held(by: str) -> str:
        return f"avg_over_time({UTILISATION}{by}[{alerts.idle_minutes}m])"

    def happened(codes: list[int]) -> str:
        """A counter that is there for the first time has not increased; the first error of a code counts too."""
        faults = f'{XID}{{xid=~"{"|".join(map(str, codes))}"}}'
        return f"increase({faults}[10m]) > 0 or ({faults} > 0 unless {faults} offset 10m)"

    found = [
        alert("GPUFatalXid", happened(fatal_xids()), "0s", "critical",
              "GPU {{ $labels.gpu }} of {{ $labels.Hostname }}: XID {{ $labels.xid }}",
              "Drain the node; see 'weft health explain {{ $labels.xid }}'."),
        alert("GPUXid", happened(dependent_xids()), "0s", "warning",
              "GPU {{ $labels.gpu }} of {{ $labels.Hostname }}: XID {{ $labels.xid }}",
              "How grave it is only the kernel's log says: 'dmesg | weft health scan -' on the node."),
        alert("GPURowRemapFailed", f"{REMAP_FAILURE} > 0", "0s", "critical",
              "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} has no spare rows left",
                  "Its memory must be replaced: drain the node."),
        alert("GPULost", "weft_gpu_up == 0", "1m", "critical",
              "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} no longer answers", "It fell off the bus: drain the node."),
        alert("DriverDown", "weft_nvml_up == 0", "2m", "critical",
              "the driver of {{ $labels.Hostname }} does not answer",
                  "It hangs or is gone: drain the node, then reboot it."),
        alert("GPUSlowed", f'avg_over_time(weft_gpu_throttled{{reason=~"{SLOWED}"}}[10m]) > 0.5', "5m", "warning",
              "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} is slowed: {{ $labels.reason }}",
              "For more than half of ten minutes; a gang waits for its slowest GPU."),
        alert("GPUHot", f"{TEMPERATURE} > {alerts.temperature_c:g}", "5m", "warning",
              "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} is at {{ $value }} °C",
              "Clocks fall soon; look at fans, airflow and the power cap."),
        alert("GPUExporterDown", f'up{{job="{EXPORTER}"}} == 0', "3m", "warning",
              "no metrics of {{ $labels.instance }}", "The node is down, or its exporter: look at its log."),
        alert("GPUHeldIdle", f"({held(HELD)} or {held(JOBS)}) < {IDLE_PERCENT}", "5m", "info",
              "{{ $labels.pod }}{{ $labels.hpc_job }} holds GPU {{ $labels.gpu }} of {{ $labels.Hostname }} idle",
              f"Below {IDLE_PERCENT} % for {alerts.idle_minutes} minutes."),
        alert("QueueWaits", WAITING, f"{alerts.wait_minutes}m", "info",
              "jobs of {{ $labels.cluster_queue }} have waited all the time",
              f"For {alerts.wait_minutes} minutes at least one."),
    ]  # fmt: skip
    for pool in gpu_pools(made):
        # A GPU that several pods share, or that is cut, has several series.
        counted = f'count by (pool, Hostname) (count by (pool, Hostname, gpu) ({TEMPERATURE}{{pool="{pool.name}"}}))'
        missing = alert("GPUMissing", f"{counted} < {pool.nodes.gpus}", "2m", "critical",
                        "{{ $labels.Hostname }} shows {{ $value }} GPUs" + f" of {pool.nodes.gpus}",
                        "A GPU has fallen off the bus, or was taken out: drain the node.")  # fmt: skip
        missing["labels"]["pool"] = pool.name  # a rule for each pool, and Prometheus wants rules of a name to differ
        found.append(missing)
    recorded = [
        {"record": "weft:gpus:held", "expr": f"count by (namespace) ({UTILISATION}{HELD})"},
        {"record": "weft:gpus:used", "expr": f"sum by (namespace) ({UTILISATION}{HELD}) / 100"},
    ]
    return [
        {"name": "weft-gpus", "interval": "15s", "rules": found},
        {"name": "weft-usage", "interval": "1m", "rules": recorded},
    ]


def alert(name: str, expression: str, hold: str, severity: str, summary: str, description: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        **({"for": hold} if hold != "0s" else {}),
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description},
    }


def rule_tests(made: Specification) -> dict[str, Any]:
    """Tests for ``promtool test rules``: every alert fires on what it is for, and on nothing else."""
    alerts = made.alerts
    gpu = 'gpu="0",Hostname="n0"'
    hot, cool = alerts.temperature_c + 1, alerts.temperature_c - 10
    idle, wait = alerts.idle_minutes, alerts.wait_minutes
    held = f'{gpu},namespace="a",pod="p"'
    tests = [
        _test(f'{XID}{{{gpu},xid="79"}}', "_x20 1+0x40", 21, "GPUFatalXid", {"gpu": "0", "Hostname": "n0", "xid": "79"},
            True),
        _test(f'{XID}{{{gpu},xid="79"}}', "1+0x20 2+0x40", 22, "GPUFatalXid", {"gpu": "0", "Hostname": "n0", "xid": "79"},
            True),
        _test(f'{XID}{{{gpu},xid="79"}}', "1+0x60", 40, "GPUFatalXid", {}, False),  # long ago
        _test(f'{XID}{{{gpu},xid="79"}}', "_x20 0+0x40", 25, "GPUFatalXid", {}, False),  # the exporter has just started
        _test(f'{XID}{{{gpu},xid="43"}}', "1+1x60", 40, "GPUFatalXid", {}, False),  # an application's error
        _test(f'{XID}{{{gpu},xid="149"}}', "0+0x10 1+0x40", 12, "GPUXid", {"gpu": "0", "Hostname": "n0", "xid": "149"}, True),
        _test(f"{REMAP_FAILURE}{{{gpu}}}", "0+0x5 1+0x20", 8, "GPURowRemapFailed", {"gpu": "0", "Hostname": "n0"}, True),
        _test(f"weft_gpu_up{{{gpu}}}", "1+0x3 0+0x20", 8, "GPULost", {"gpu": "0", "Hostname": "n0"}, True),
        _test('weft_nvml_up{Hostname="n0"}', "1+0x3 0+0x20", 8, "DriverDown", {"Hostname": "n0"}, True),
        _test(f'weft_gpu_throttled{{{gpu},reason="hw_slowdown"}}', "1+0x60", 20, "GPUSlowed",
              {"gpu": "0", "Hostname": "n0", "reason": "hw_slowdown"}, True),
        _test(f'weft_gpu_throttled{{{gpu},reason="sw_power_cap"}}', "1+0x60", 20, "GPUSlowed", {}, False),
        _test(f"{TEMPERATURE}{{{gpu}}}", f"{hot:g}+0x30", 10, "GPUHot", {"gpu": "0", "Hostname": "n0"}, True),
        _test(f"{TEMPERATURE}{{{gpu}}}", f"{cool:g}+0x30", 10, "GPUHot", {}, False),
        _test(f'up{{job="{EXPORTER}",instance="n0:9400"}}', "1 0+0x20", 10, "GPUExporterDown", {"job": EXPORTER,
            "instance": "n0:9400"}, True),
        _test(f"{UTILISATION}{{{held}}}", f"1+0x{idle + 60}", idle + 30, "GPUHeldIdle",
              {"gpu": "0", "Hostname": "n0", "namespace": "a", "pod": "p"}, True),
        _test(f'{UTILISATION}{{{gpu},hpc_job="7"}}', f"1+0x{idle + 60}", idle + 30, "GPUHeldIdle",
              {"gpu": "0", "Hostname": "n0", "hpc_job": "7"}, True),
        _test(f"{UTILISATION}{{{held}}}", f"90+0x{idle + 60}", idle + 30, "GPUHeldIdle", {}, False),
        _test('kueue_pending_workloads{status="active",cluster_queue="a"}', f"3+0x{wait + 30}", wait + 10, "QueueWaits",
            {"cluster_queue": "a"}, True),
        _test('kueue_pending_workloads{status="active",cluster_queue="a"}', f"3+0x{wait // 2} 0+0x{wait + 30}", wait + 10,
            "QueueWaits", {}, False),
    ]  # fmt: skip
    for pool in gpu_pools(made):
        series = [f'{TEMPERATURE}{{gpu="{k}",Hostname="n0",pool="{pool.name}"}}' for k in range(pool.nodes.gpus)]
        labels = {"pool": pool.name, "Hostname": "n0"}
        if len(series) > 1:  # of a single GPU nothing is left to count: the exporter or the node is down
            tests.append(_test(series[1:], "40+0x30", 10, "GPUMissing", labels, True))
        tests.append(_test(series, "40+0x30", 10, "GPUMissing", {}, False))
    alert_of = {(each["alert"], each["labels"].get("pool")): each for each in rules(made)[0]["rules"]}
    for each in tests:
        (at,) = each["alert_rule_test"]
        for fires in at["exp_alerts"]:
            labels = fires["exp_labels"]
            rule = alert_of[at["alertname"], labels.get("pool")]
            fires["exp_labels"] = labels | rule["labels"]
            value = f"{hot:g}" if at["alertname"] == "GPUHot" else str(len(each["input_series"]))
            fires["exp_annotations"] = {key: _filled(text, labels, value) for key, text in rule["annotations"].items()}
    return {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}


def _test(
    series: str | list[str], values: str, minute: int, name: str, labels: dict[str, str], fires: bool
) -> dict[str, Any]:
    listed = [series] if isinstance(series, str) else series
    return {
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each in listed],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": [{"exp_labels": labels}] if fires else []}
        ],
    }


def _filled(text: str, labels: dict[str, str], value: str) -> str:
    """An annotation as Prometheus fills it in."""
    for key, of in labels.items():
        text = text.replace(f"{{{{ $labels.{key} }}}}", of)
    return re.sub(r"{{ \$labels\.\w+ }}", "", text.replace("{{ $value }}", value))


def alertmanager(made: Specification) -> dict[str, Any]:
    """Routes: by severity to the receivers, and what concerns a team's pods to the team as well.

    Of one GPU only the gravest is sent (a hot GPU that has fallen off the bus is off the bus)."""
    everyone = Receiver("none", "")
    routes: list[dict[str, Any]] = [
        {"receiver": f"team-{team.name}", "matchers": [f'namespace="{team.name}"'], "continue": True}
        for team in made.teams if team.webhook
    ]  # fmt: skip
    routes += [
        {
            "receiver": each.name,
            **({"matchers": [f'severity="{each.severity}"']} if each.severity else {}),
            "continue": True,
        }
        for each in made.alerts.receivers
    ]
    receivers = [
        {"name": each.name, "webhook_configs": [{"url": each.webhook, "send_resolved": True}]}
        for each in made.alerts.receivers
    ]
    receivers += [
        {"name": f"team-{team.name}", "webhook_configs": [{"url": team.webhook, "send_resolved": True}]}
        for team in made.teams if team.webhook
    ]  # fmt: skip
    return {
        "route": {
            "receiver": everyone.name, "group_by": ["alertname", "Hostname"], "group_wait": "10s", "group_interval": "2m",
            "repeat_interval": "4h", **({"routes": routes} if routes else {}),
        },
        "inhibit_rules": [
            {"source_matchers": ['severity="critical"'], "target_matchers": ['severity="warning"'], "equal": ["Hostname",
                "gpu"]}
        ],
        "receivers": [{"name": everyone.name}, *receivers],
    }  # fmt: skip


def exporter(made: Specification) -> list[Manifest]:
    """weft's exporter on every node with GPUs, and its service. It reads devices and the kubelet's list of who holds which."""
    about = {"app.kubernetes.io/name": EXPORTER}
    kubelet = "/var/lib/kubelet/pod-resources"
    container = {
        "name": "exporter",
        "image": made.software.exporter,
        "args": ["exporter", "--host", "0.0.0.0", "--port", str(PORT), "--health", health.STATE],
        "ports": [{"name": "metrics", "containerPort": PORT}],
        "env": [
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "100Mi"}, "limits": {"memory": "200Mi"}},
        "readinessProbe": {
            "httpGet": {"path": "/metrics", "port": "metrics"},
            "periodSeconds": 30,
            "timeoutSeconds": 10,
        },
        # MIG devices are seen by privileged pods only, the kubelet's socket by root.
        "securityContext": {"privileged": True, "runAsUser": 0, "readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "pod-resources", "mountPath": kubelet, "readOnly": True},
            {"name": "health", "mountPath": health.STATE},  # writable: SQLite's readers keep an index beside the file
        ],
    }
    spec = {
        "selector": {"matchLabels": about},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "20%"}},
        "template": {
            "metadata": {"labels": MANAGED | about},
            "spec": {
                "priorityClassName": "system-node-critical",
                "runtimeClassName": "nvidia",
                "automountServiceAccountToken": False,
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [
                        {"key": POOL, "operator": "In", "values": [pool.name for pool in gpu_pools(made)]}]}]}}},
                "tolerations": [{"operator": "Exists"}],
                "containers": [container],
                "volumes": [
                    {"name": "pod-resources", "hostPath": {"path": kubelet, "type": "Directory"}},
                    {"name": "health", "hostPath": {"path": health.STATE, "type": "DirectoryOrCreate"}},
                ],
            },
        },
    }  # fmt: skip
    ports = [{"name": "metrics", "port": PORT, "targetPort": "metrics"}]
    return [
        manifest("apps/v1", "DaemonSet", EXPORTER, SYSTEM, about, spec=spec),
        manifest(
            "v1", "Service", EXPORTER, SYSTEM, about, spec={"clusterIP": "None", "selector": about, "ports": ports}
        ),
    ]


def monitor(made: Specification) -> Manifest:
    """What the Prometheus operator scrapes. The pool is a label of the node; ``honorLabels``, since the labels ``pod`` and
    ``namespace`` are of the pod that holds the GPU, not of the exporter's."""
    endpoint = {
        "port": "metrics", "interval": "15s", "scrapeTimeout": "10s", "honorLabels": True,
        "relabelings": [
            {"sourceLabels": ["__meta_kubernetes_node_label_weft_dev_pool"], "targetLabel": "pool", "action": "replace"},
            {"targetLabel": "job", "replacement": EXPORTER, "action": "replace"},
        ],
    }  # fmt: skip
    spec = {
        "selector": {"matchLabels": {"app.kubernetes.io/name": EXPORTER}},
        "namespaceSelector": {"matchNames": [SYSTEM]},
        "attachMetadata": {"node": True},
        "endpoints": [endpoint],
    }
    return manifest(
        "monitoring.coreos.com/v1", "ServiceMonitor", EXPORTER, SYSTEM, {"release": made.monitoring.release}, spec=spec
    )


def manifests(made: Specification) -> dict[str, list[Manifest]]:
    release = {"release": made.monitoring.release}
    rule = manifest("monitoring.coreos.com/v1", "PrometheusRule", "weft", SYSTEM, release, spec={"groups": rules(made)})
    board = manifest(
        "v1", "ConfigMap", "weft-dashboard", made.monitoring.namespace, {"grafana_dashboard": "1"},
        data={"weft.json": dashboard_text(made)},
    )  # fmt: skip
    found = {"monitoring/rules.yaml": [rule], "monitoring/dashboard.yaml": [board]}
    if made.monitoring.exporter == "weft" and gpu_pools(made):
        found["monitoring/exporter.yaml"] = [*exporter(made), monitor(made)]
    return found


def dashboard_text(made: Specification) -> str:
    return json.dumps(dashboard(made.name, [team.name for team in made.teams]), indent=1) + "\n"


def files(made: Specification) -> dict[str, str]:
    """What Prometheus and Alertmanager read themselves, without the operator, and ``promtool test rules``."""
    return {
        "monitoring/plain/rules.yml": yaml_text([{"groups": rules(made)}]),
        "monitoring/plain/rules_test.yml": yaml_text([rule_tests(made)]),
        "monitoring/plain/alertmanager.yml": yaml_text([alertmanager(made)]),
    }
