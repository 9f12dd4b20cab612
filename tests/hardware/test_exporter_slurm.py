"""The exporter's Slurm jobs against a real Slurm, with the prolog and epilog that the README gives."""

import os
import re
import stat
from pathlib import Path

import pytest
from cluster import slurm_cluster
from cluster.slurm_cluster import missing
from slurm_daemons import wait

from weft.hardware.telemetry import slurm as mapping
from weft.hardware.telemetry.attribution import Attributor
from weft.hardware.telemetry.reader import read_once

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(missing()), reason=missing())]
README = Path(mapping.__file__).with_name("README.md")


def job_process(number: str) -> int:
    """The PID of the job's sleep."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            if f"SLURM_JOB_ID={number}".encode() in variables and (entry / "comm").read_text().strip() == "sleep":
                return int(entry.name)
        except OSError:
            continue
    return 0


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """One node of two GPUs whose prolog and epilog are the README's; the folder of jobs is ``tmp_path / "gpu-jobs"``."""
    (tmp_path / "gpu-jobs").mkdir()
    configure = slurm_cluster.configure

    def with_devices(folder: Path, nodes: int, gpus: int, scheduler: str) -> None:
        configure(folder, nodes, gpus, scheduler)
        for g in range(gpus):  # Slurm names GPUs to a prolog only where their files are devices
            (folder / f"gpu{g}").unlink()
            try:
                os.mknod(folder / f"gpu{g}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
            except PermissionError:
                pytest.skip("needs the right to make a device file")

    lines = slurm_cluster.CONFIGURATION
    for body, name in re.findall(r"^(for gpu in .*?) *# (prolog|epilog)$", README.read_text(), re.MULTILINE):
        script = tmp_path / name
        script.write_text(f"#!/bin/bash\n{body.replace('/run/gpu-jobs', str(tmp_path / 'gpu-jobs'))}\n")
        script.chmod(0o755)
        lines = f"{name.capitalize()}={script}\n{lines}"
    monkeypatch.setattr(slurm_cluster, "configure", with_devices)
    monkeypatch.setattr(slurm_cluster, "CONFIGURATION", lines)
    with slurm_cluster.slurm(nodes=1, gpus=2, scheduler="backfill", rate=20.0) as running:
        yield running


def test_a_job_is_named_while_it_has_its_gpus(cluster, fake_nvml, tmp_path):
    jobs = tmp_path / "gpu-jobs"
    number = cluster.submit(120, nodes=1, gpus=1, limit_minutes=10)  # 6 s of this machine
    wait(lambda: bool(mapping.jobs(jobs) and job_process(number)), 20, lambda: f"{cluster.jobs()}")
    assert mapping.jobs(jobs) == {0: [number]}
    fake_nvml.process(0, job_process(number))
    snapshot = read_once()
    first = snapshot.gpus[0].uuid
    for attributor in (Attributor(jobs=jobs), Attributor()):  # by the folder, and by the process on the GPU
        assert attributor.read(snapshot).labels == {first: [{"hpc_job": number}]}
    wait(lambda: not mapping.jobs(jobs), 30, lambda: f"{mapping.jobs(jobs)}")
