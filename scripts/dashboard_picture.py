"""Draws docs/pictures/dashboard.png: the panels of the dashboard that ``weft deploy render`` writes, with the data that a real
Prometheus gives for them, of a minute of eight GPUs of the tests' fake NVML under ``weft exporter``.

    PYTHONPATH=src:tests/hardware python scripts/dashboard_picture.py docs/pictures/dashboard.png
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from fake_nvml import FakeNvml, build
from matplotlib import pyplot
from PIL import Image

from weft.deploy import dashboard, rendering

SECONDS = 75
CLUSTER = """\
name: lab
nodes: [{name: h100, count: 1, gpus: 8, gpu_type: H100, gpu_memory_gb: 80}]
teams:
  - {name: vision, quota: [{pool: h100, nominal: 4}]}
  - {name: language, quota: [{pool: h100, nominal: 4}]}
"""
SHOWN = ("GPU temperature", "GPU power", "GPU utilisation", "SM clock", "Memory used", "Tensor cores active")
SHOWN += ("GPUs held by team", "GPUs used by team", "XID errors in an hour")
UNITS = {
    "short": "",
    "hertz": "Hz",
    "decmbytes": "MB",
    "percentunit": "share",
    "celsius": "°C",
    "watt": "W",
    "percent": "%",
}


def uuid(gpu: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{gpu:012d}"


def run_load(fake: FakeNvml) -> None:
    """A training run on four GPUs, one of which gets hot; serving on three; one GPU that is lost after an error."""
    started = time.monotonic()
    while (now := time.monotonic() - started) < SECONDS:
        fake.lines["set"] = []
        for gpu in range(8):
            training = 0.97 - 0.03 * gpu if now > 12 and int(now) % 25 > 3 else 0.05  # it stops to write checkpoints
            serving = 0.45 + 0.35 * math.sin(now / 9 + gpu)
            load = training if gpu < 4 else serving if gpu < 7 else 0.0
            hot = gpu == 2 and now > 35
            fake.lines["set"] += [
                f"set {gpu} {name} {value}"
                for name, value in {
                    "gpu_util": round(load * 100),
                    "tensor": load * 62,
                    "power_mw": 90_000 + load * 590_000,
                    "temperature_c": 34 + load * 38 + 12 * hot,
                    "sm_clock_mhz": 1410 if hot else 1980 if load > 0.1 else 345,
                    "throttle": 0x20 if hot else 0 if load else 1,
                }.items()
            ]
        fake.gpus(8)  # writes
        if now > 55 and "xid" not in fake.lines:
            fake.xid(6, 79)
            fake.vanish(6)
        time.sleep(0.5)


def series(address: str, expression: str, end: float) -> list[dict]:
    query = {"query": re.sub(r'"\$\w+"', '".*"', expression), "start": end - SECONDS, "end": end, "step": 1}
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{urllib.parse.urlencode(query)}") as answer:
        return json.load(answer)["data"]["result"]


def draw(address: str, path: str) -> None:
    end = time.time()
    figure, axes = pyplot.subplots(3, 3, figsize=(12, 8), constrained_layout=True)
    panels = {title: rest for title, *rest in dashboard.PANELS}
    for axis, title in zip(axes.flat, SHOWN, strict=True):
        expression, legend, unit = panels[title]
        for one in series(address, expression, end):
            name = re.sub(r"\{\{(\w+)\}\}", lambda m, one=one: one["metric"].get(m[1], ""), legend)
            axis.plot(
                [t - end for t, _ in one["values"]], [float(v) for _, v in one["values"]], label=name, linewidth=1.2
            )
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylabel(UNITS.get(unit, unit), fontsize=8)
        axis.set_xlim(-SECONDS, 0)
        axis.set_ylim(0, 1.1 * axis.dataLim.y1)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if "team" in title or "XID" in title:
            axis.legend(fontsize=7)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncol=8, fontsize=8, loc="outside lower center")
    figure.savefig(path, dpi=72)
    Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)  # a third of the size


def main(path: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fake = FakeNvml(build(folder), folder / "control", gpus=8)
        for gpu in range(7):
            fake.process(gpu, 2**22 + gpu, mib=70_000 if gpu < 4 else 31_000)
        pods = [("vision", "train-0", range(4)), ("language", "serve-0", range(4, 7))]
        held = [
            {"namespace": space, "pod": pod, "container": "main", "devices": [uuid(g) for g in gpus]}
            for space, pod, gpus in pods
        ]
        (folder / "pods.json").write_text(json.dumps(held))
        (folder / "cluster.yaml").write_text(CLUSTER)
        rules = rendering.render(rendering.load(folder / "cluster.yaml"), "kubernetes")["monitoring/plain/rules.yml"]
        (folder / "rules.yml").write_text(re.sub(r"interval: \S+", "interval: 1s", rules))  # of a minute, not of hours
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yml]\nscrape_configs:\n"
            "- {job_name: weft-exporter, static_configs: [{targets: ['127.0.0.1:9478']}]}\n"
        )
        environment = {**os.environ, **fake.environment, "NODE_NAME": "h100-0"}
        exporter = [
            sys.executable,
            "-m",
            "weft",
            "exporter",
            "--port",
            "9478",
            "--interval",
            "0.5",
            "--pods",
            "pods.json",
        ]
        prometheus = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=tsdb", "--log.level=error"]
        prometheus.append("--web.listen-address=127.0.0.1:9479")
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, environment["PYTHONPATH"].split(os.pathsep)))
        programs = [subprocess.Popen(command, cwd=folder, env=environment) for command in (exporter, prometheus)]
        try:
            run_load(fake)
            draw("http://127.0.0.1:9479", path)
        finally:
            for program in programs:
                program.terminate()
                program.wait(20)


main(sys.argv[1])
