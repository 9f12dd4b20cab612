import os

NAMES = (
    "nvidia-driver",
    "pytorch",
    "triton",
    "driver-fits-pytorch",
    "disk-home",
    "memory",
    "compiler",
    "shared-memory",
)


def check(learner, t):
    for _ in range(6):
        findings = []
        for name in NAMES[: int(t.rng.integers(3, 9))]:
            status = ("pass", "warn", "fail")[int(t.rng.integers(3))]
            fix = f"mend {name} {int(t.rng.integers(99))}" if t.rng.integers(4) else ""
            findings.append({"name": name, "status": status, "found": "…", "fix": fix, "group": "System"})
        findings.insert(1, {"name": "gpus", "status": "warn", "found": "…", "fix": "first a warning", "group": "GPU"})
        findings.append({"name": "python", "status": "fail", "found": "…", "fix": "last a failure", "group": "System"})
        findings.append(
            {"name": "gcc", "status": "pass", "found": "…", "fix": "nothing is wrong here", "group": "System"}
        )
        expected = [f["fix"] for s in ("fail", "warn") for f in findings if f["status"] == s and f["fix"]]
        shown = ", ".join(f"{f['name']}: {f['status']}" for f in findings)
        t.equal(learner.to_do({"findings": findings}), expected, f"to_do of a report with {shown}")
    cpus = t.value(learner.CPUS)
    t.require(cpus is not None, "CPUS is not filled in: run `weft doctor`", "CPUS 尚未填写：请运行 `weft doctor`")
    t.require(
        cpus == os.cpu_count(),
        f"CPUS = {cpus}: `weft doctor` shows another number in the line operating-system",
        f"CPUS = {cpus}：`weft doctor` 的 operating-system 一行显示的是另一个数",
    )
