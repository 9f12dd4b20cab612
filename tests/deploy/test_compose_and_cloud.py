"""The lab on one host, the Dockerfile, and tasks for rented GPUs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from where import ROOT

from weft.deploy import rendering

EXAMPLE = (ROOT / "examples/cluster.yaml").read_text()


def rendered(tmp_path, target, text=EXAMPLE):
    (tmp_path / "cluster.yaml").write_text(text)
    return rendering.render(rendering.load(tmp_path / "cluster.yaml"), target)


def tool(name):
    """A program that the test extra brings, beside this Python or on the path."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return found or pytest.skip(f"needs {name}")


@pytest.mark.parametrize("text", [EXAMPLE, "nodes: [{name: only, count: 1, gpus: 0}]"])
def test_the_compose_file_is_of_the_specification(tmp_path, text):
    files = rendered(tmp_path, "compose", text)
    rendering.write(files, tmp_path / "out", "compose")
    check = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", tmp_path / "out/compose.yaml"]
    subprocess.run(check, check=True, capture_output=True)
    found = yaml.safe_load(files["compose.yaml"])["services"]
    gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    for name in ("lab", "exporter"):
        reserved = found[name].get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        assert reserved == ([gpus] if "h100" in text else [])
    for service in found.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service.get("volumes", []):  # every file that is mounted is there
            source = volume.split(":")[0]
            assert not source.startswith("./") or any(name.startswith(source[2:]) for name in files)


def test_prometheus_takes_its_configuration(tmp_path):
    if not shutil.which("promtool"):
        pytest.skip("needs promtool: apt-get install prometheus")
    rendering.write(rendered(tmp_path, "compose"), tmp_path / "out", "compose")
    subprocess.run(
        ["promtool", "check", "config", tmp_path / "out/prometheus/prometheus.yml"], check=True, capture_output=True
    )


def test_the_dockerfile():
    done = subprocess.run([tool("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = (ROOT / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    stages = re.findall(r" AS (\S+)$", text, re.MULTILINE)
    assert all(base in stages or re.search(r":\d+\.\d+\.\d+", base) for base in bases)
    assert {"cpu", "cuda"} <= set(stages) and text.rstrip().split("USER")[-1].split()[0] == "1000"
    needed = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    allowed = (ROOT / ".dockerignore").read_text()
    assert all((ROOT / name).exists() and f"!{name}" in allowed for names in needed for name in names.split())


def test_a_cloud_task_keeps_to_the_spot_policy_and_the_price(tmp_path):
    text = EXAMPLE.replace("currency: EUR", "currency: USD").replace("{name: h100,", "{spot: true, name: h100,")
    files = rendered(tmp_path, "cloud", text)
    spot, owned = (yaml.safe_load(files[name]) for name in ("h100.yaml", "a100.yaml"))
    assert spot["resources"]["use_spot"] and spot["resources"]["job_recovery"]["strategy"] == "EAGER_NEXT_REGION"
    assert spot["resources"]["max_hourly_cost"] == pytest.approx(8 * 1.3) and spot["num_nodes"] == 48
    assert owned["resources"]["autostop"] == {"idle_minutes": 60, "down": True} and not owned["resources"]["use_spot"]
    assert owned["resources"]["accelerators"] == {"A100-80GB": 8}
    assert (
        "max_hourly_cost" not in yaml.safe_load(rendered(tmp_path, "cloud")["h100.yaml"])["resources"]
    )  # it is in dollars
    with pytest.raises(ValueError, match="no GPUs to rent"):
        rendered(tmp_path, "cloud", "nodes: [{name: only, count: 1, gpus: 0}]")
