"""weft doctor --cluster: a node against the cluster file."""

import pytest
from where import ROOT

from weft.deploy import node_check, rendering
from weft.hardware.driver import Driver, Gpu

MADE = rendering.load(ROOT / "examples/cluster.yaml")
EIGHT = (Gpu("NVIDIA H100 80GB HBM3", 81559, (9, 0)),) * 8


def found(driver, host="h100-3"):
    return {each.name: each for each in node_check.findings(MADE, driver, host)}


@pytest.fixture(autouse=True)
def toolkit(monkeypatch):
    monkeypatch.setattr(node_check, "toolkit_version", lambda: "1.18.0")


@pytest.mark.parametrize(
    ("version", "status", "cuda"),
    [
        ("580.95.05", "pass", "pass"),
        ("580.95.5", "pass", "pass"),
        ("580.65.06", "fail", "pass"),
        ("570.1", "fail", "fail"),
        ("590.1", "warn", "pass"),
    ],
)
def test_driver_and_cuda(version, status, cuda):
    seen = found(Driver(version, EIGHT))
    assert (seen["cluster-driver"].status, seen["cluster-cuda"].status, seen["cluster-gpus"].status) == (
        status,
        cuda,
        "pass",
    )


def test_gpus_of_the_pool():
    assert "7 GPUs; the nodes of pool 'h100' have 8" in found(Driver("580.95.05", EIGHT[:7]))["cluster-gpus"].found
    other = found(Driver("580.95.05", (Gpu("NVIDIA A100-SXM4-80GB", 81920, (8, 0)),) * 8))["cluster-gpus"]
    assert other.status == "warn" and "the cluster file says NVIDIA-H100-80GB-HBM3" in other.found
    for host in ("h100-48", "h100", "login", "h100-x"):
        assert found(Driver("580.95.05", EIGHT), host)["cluster-pool"].status == "warn"
    assert "cluster-pool" not in found(Driver("580.95.05", EIGHT), "h100-0.example.org")
    assert found(Driver(None))["cluster-driver"].status == "fail"


def test_the_toolkit(monkeypatch):
    monkeypatch.setattr(node_check, "toolkit_version", lambda: "1.17.0")
    assert "the cluster file says 1.18.0" in found(Driver("580.95.05", EIGHT))["cluster-toolkit"].found
    monkeypatch.setattr(node_check, "toolkit_version", lambda: "")
    assert found(Driver("580.95.05", EIGHT))["cluster-toolkit"].status == "fail"


def test_the_toolkits_version_is_read(tmp_path, monkeypatch):
    monkeypatch.undo()
    tool = tmp_path / "nvidia-ctk"
    tool.write_text("#!/bin/sh\necho 'NVIDIA Container Toolkit CLI version 1.18.0'\necho 'commit: abc'\n")
    tool.chmod(0o755)
    assert node_check.toolkit_version(str(tool)) == "1.18.0"
    assert node_check.toolkit_version(str(tmp_path / "none")) == ""
