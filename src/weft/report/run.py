"""``weft report``: verifies, measures quickly, trains a first model, and renders all of it."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from weft import registry
from weft.bench.terminal import progress
from weft.hardware import doctor, query
from weft.records import Store, check_writable, commit
from weft.report import collectives, comparison, headlines, page, serving
from weft.train import digits

VERIFY_S = {"cuda": 35.0, "cpu": 75.0}
MOST_PROCESSES = 8  # that verify side by side: each holds a CUDA context of about half a GiB


def run(device: str, note: Console, folder: Path) -> Path:
    """Verifies, measures the headline operators, trains a first model and renders ``folder/index.html``."""
    from weft.bench import verify

    for module, needed in (("bokeh", "pip install weft"), ("sklearn", digits.INSTALL)):
        if importlib.util.find_spec(module) is None:  # before minutes of measuring, not after
            raise ModuleNotFoundError(f"weft report needs {module}: {needed}", name=module)
    check_writable(folder, f"the page cannot be written in {folder} (--output names another folder)")

    def stage(text: str) -> None:
        note.print(f"[{time.perf_counter() - begin:6.1f} s] {text}")

    begin = time.perf_counter()
    stage("doctor")
    findings = [asdict(f) for f in doctor.examine("quick")]
    stage("verify: every kernel of ours against float64" + ("" if device == "cuda" else ", in Triton's interpreter"))
    with comparison.beside(longest_s=20.0 if device == "cuda" else 90.0) as simulated:
        with progress(note, "verify") as step:
            found = verify.verify_in_processes(
                registry.select(),
                device,
                min(os.cpu_count() or 2, MOST_PROCESSES),
                budget_s=VERIFY_S[device],
                on_result=lambda r: step(f"{r.operator} {r.workload}"),
            )
        compiled: list[dict[str, Any]] = []
        if device == "cpu":  # nothing else runs while a CPU is measured
            stage("simulate: scheduling policies on a small cluster, started with the verification")
            schedules = simulated()
            stage("compile: a sample of the kernels for real architectures, in fp32 and bf16")
            compiled = _compile_elsewhere()
        stage(
            "measure: ceilings, then headline operators beside PyTorch"
            + (" and torch.compile" if device == "cuda" else "")
        )
        measured = headlines.measure(device, note)
        stage("train: a small convolutional network on real digits")
        trained = digits.train(device=device)
        if device == "cuda":
            stage("simulate: scheduling policies on a small cluster, started with the verification")
            schedules = simulated()
    contents = page.Contents(
        machine=query.machine(device),
        ceilings=[m for m in measured if m.operator == "ceiling"],
        verification=found,
        measurements=[m for m in measured if m.operator != "ceiling"],
        compiled=compiled,
        training=asdict(trained),
        findings=findings,
        scheduling=schedules,
        communication=list(Store().lines(name=collectives.FILE)),
        serving=list(Store().lines(name=serving.FILE)),
    )
    path = page.render(contents, folder / "index.html")
    stage("rendered")
    return path


def _compile_elsewhere() -> list[dict[str, Any]]:
    """Compiles one kernel in ten, others at each commit, in another process, since this one interprets. fp16 is left out: it
    compiles as bf16 does."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryFile("w+") as file:
        command = [sys.executable, "-m", "weft", "compile-check", "--json", "--arch", "sm_80", "--arch", "sm_90"]
        command += ["--dtype", "fp32", "--dtype", "bf16", "--share", "10", "--seed", commit()]
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, env=env, timeout=120)
            file.seek(0)
            return json.load(file)["results"]
        except (subprocess.TimeoutExpired, json.JSONDecodeError, KeyError):
            return []
