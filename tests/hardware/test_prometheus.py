"""From a fault to a page: fake NVML, the exporter, a real Prometheus with a rule, a real Alertmanager, and a webhook."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from dashboard_12239 import PANELS, VARIABLES, asked

from weft.hardware.health.event import Event
from weft.hardware.health.ledger import Ledger

PROMETHEUS, ALERTMANAGER = (shutil.which(name) for name in ("prometheus", "prometheus-alertmanager"))
pytestmark = pytest.mark.skipif(
    not (PROMETHEUS and ALERTMANAGER), reason="apt-get install prometheus prometheus-alertmanager"
)
PATIENCE_S = 40.0  # of a machine that is busy; else it takes seconds

RULES = """\
groups:
- name: gpus
  rules:
  - alert: GpuXid
    expr: increase(weft_gpu_xid_errors_total{xid=~"48|79|95"}[1m]) > 0
    annotations: {summary: "GPU {{ $labels.gpu }} of {{ $labels.Hostname }}: XID {{ $labels.xid }}"}
  - alert: GpuLost
    expr: weft_gpu_up == 0
  - alert: DriverGone
    expr: weft_nvml_up == 0
  - alert: NodeQuarantined
    expr: weft_node_quarantined == 1 and on (Hostname) weft_gpu_open_incidents{fault="xid:79"}
"""
CONFIGURATION = """\
global: {{scrape_interval: 400ms, scrape_timeout: 400ms, evaluation_interval: 400ms}}
rule_files: [rules.yml]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["127.0.0.1:{alertmanager}"]}}]}}]}}
scrape_configs:
- {{job_name: gpus, static_configs: [{{targets: ["127.0.0.1:{exporter}"]}}]}}
"""
ROUTE = """\
route: {{receiver: page, group_by: [alertname, gpu], group_wait: 100ms, group_interval: 1s, repeat_interval: 1h}}
receivers: [{{name: page, webhook_configs: [{{url: "http://127.0.0.1:{webhook}/", send_resolved: true}}]}}]
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def fetch(url: str):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


@pytest.fixture
def pages():
    """What a webhook is sent: (port, list of alerts)."""
    alerts: list[dict] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            alerts.extend(body["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, alerts
    server.shutdown()
    server.server_close()


@pytest.fixture
def monitored(fake_nvml, pages, tmp_path, monkeypatch):
    """Starts everything with these rules and this configuration of Alertmanager; gives Prometheus' address."""
    monkeypatch.setenv("NODE_NAME", "node-7")
    ports = {"webhook": pages[0], **{name: free_port() for name in ("exporter", "prometheus", "alertmanager")}}
    listen = "--web.listen-address=127.0.0.1:{}".format
    commands = [
        [
            sys.executable,
            "-m",
            "weft",
            "exporter",
            "--port",
            str(ports["exporter"]),
            "--interval",
            "0.3",
            "--health",
            ".",
        ],
        [
            *(ALERTMANAGER, "--config.file=alertmanager.yml", "--storage.path=alerts", "--cluster.listen-address="),
            listen(ports["alertmanager"]),
        ],
        [
            *(PROMETHEUS, "--config.file=prometheus.yml", "--storage.tsdb.path=series", "--log.level=warn"),
            listen(ports["prometheus"]),
        ],
    ]
    with ExitStack() as stack, (tmp_path / "log").open("w") as log:

        def start(rules: str, route: str) -> str:
            (tmp_path / "rules.yml").write_text(rules)
            (tmp_path / "alertmanager.yml").write_text(route)
            (tmp_path / "prometheus.yml").write_text(CONFIGURATION.format(**ports))
            for command in commands:
                process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
                stack.callback(process.wait, 20)
                stack.callback(process.terminate)
            return f"http://127.0.0.1:{ports['prometheus']}"

        yield start


def wait_for(what, log, seconds: float = PATIENCE_S):
    """The first true value of ``what()``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            found = what()
        except OSError:  # it does not listen yet
            found = None
        if found:
            return found
        time.sleep(0.1)
    pytest.fail(f"nothing within {seconds:g} s; the programs said: {log.read_text()[-3000:]}")


def result(prometheus: str, query: str) -> list[dict]:
    return fetch(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}")["data"]["result"]


def page(alerts: list[dict], log, name: str, status: str, **labels: str) -> dict:
    """The alert of this name and status, when it has come."""

    def fits(alert) -> bool:
        found = alert["labels"]
        return (found["alertname"], alert["status"]) == (name, status) and labels.items() <= found.items()

    return wait_for(lambda: next(filter(fits, list(alerts)), None), log)


def test_a_fault_reaches_the_webhook_and_its_end_too(monitored, fake_nvml, pages, tmp_path):
    log, (webhook, alerts) = tmp_path / "log", pages
    fake_nvml.mig(0)
    prometheus = monitored(RULES, ROUTE.format(webhook=webhook))

    # a healthy machine: the dashboard has its data, and no rule fires
    wait_for(lambda: result(prometheus, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"), log)
    wait_for(lambda: len(result(prometheus, "count_over_time(weft_gpu_up[1m]) >= 3")) == 2, log)
    for title, query in PANELS.items():
        found = result(prometheus, asked(query))
        gpus = {series["metric"]["gpu"] for series in found if "gpu" in series["metric"]}
        assert found and gpus == (set() if query.startswith(("avg", "sum")) else {"0", "1"}), title
    for series, label in VARIABLES.values():
        match = urllib.parse.urlencode({"match[]": asked(series)})
        values = {found[label] for found in fetch(f"{prometheus}/api/v1/series?{match}")["data"]}
        assert len(values) == 1 if label == "instance" else values == {"Hostname": {"node-7"}, "gpu": {"0", "1"}}[label]
    assert fetch(f"{prometheus}/api/v1/alerts")["data"]["alerts"] == []

    fake_nvml.listened()
    fake_nvml.xid(1, 79)
    fake_nvml.vanish(1)
    alert = page(alerts, log, "GpuXid", "firing", gpu="1")
    assert alert["annotations"]["summary"] == "GPU 1 of node-7: XID 79"
    assert page(alerts, log, "GpuLost", "firing", gpu="1", UUID="GPU-00000000-0000-0000-0000-000000000001")
    assert {s["metric"]["gpu"] for s in result(prometheus, "DCGM_FI_DEV_GPU_TEMP")} == {"0"}

    fake_nvml.heal()
    assert page(alerts, log, "GpuLost", "resolved", gpu="1")

    with contextlib.closing(Ledger(tmp_path / "state.db")) as ledger:
        ledger.take([Event("xid:79", "0000:0a:00", time.time(), "kernel-log")])
        assert page(alerts, log, "NodeQuarantined", "firing", Hostname="node-7")
        ledger.release("by a test")
        assert page(alerts, log, "NodeQuarantined", "resolved")
        assert [s["value"][1] for s in result(prometheus, "weft_node_quarantines_total")] == ["1"]

    fake_nvml.error(999, "nvmlDeviceGetCount_v2")
    assert page(alerts, log, "DriverGone", "firing")


CLUSTER = """\
name: lab
nodes: [{{name: h100, count: 1, gpus: 2, gpu_type: H100, gpu_memory_gb: 80}}]
alerts: {{receivers: [{{name: on-call, webhook: "http://127.0.0.1:{webhook}/", severity: critical}}]}}
"""


@pytest.mark.long
def test_what_deploy_renders_from_a_cluster_file_fires(monitored, fake_nvml, pages, tmp_path):
    from weft.deploy import rendering

    log, (webhook, alerts) = tmp_path / "log", pages
    (tmp_path / "cluster.yaml").write_text(CLUSTER.format(webhook=webhook))
    files = rendering.render(rendering.load(tmp_path / "cluster.yaml"), "kubernetes")
    plain = "monitoring/plain/"
    prometheus = monitored(files[plain + "rules.yml"], files[plain + "alertmanager.yml"])
    wait_for(lambda: result(prometheus, "weft_gpu_up"), log)
    seen = datetime.now(timezone.utc)

    def evaluated() -> bool:
        groups = fetch(f"{prometheus}/api/v1/rules")["data"]["groups"]
        return bool(groups) and all(
            datetime.fromisoformat(group["lastEvaluation"][:19] + "+00:00") > seen for group in groups[:1]
        )

    wait_for(evaluated, log)
    assert fetch(f"{prometheus}/api/v1/alerts")["data"]["alerts"] == []  # a machine that has just started is healthy
    fake_nvml.xid(1, 79)
    alert = page(alerts, log, "GPUFatalXid", "firing", gpu="1", Hostname="node-7", xid="79")
    assert alert["annotations"]["summary"] == "GPU 1 of node-7: XID 79"
