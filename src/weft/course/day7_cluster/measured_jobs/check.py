"""Durations, the trace as the simulator reads it, the load; then the jobs run under two orders."""

import csv
import io

from weft.cluster import Simulator


def seconds(job, alpha, beta):
    n = job["gpus"]
    return job["steps"] * (job["step_s"] / n + 2 * (n - 1) * (alpha + job["gradient_bytes"] / n * beta))


def mean_completion(rows, order):
    simulator = Simulator(order=order, placement="best")
    for i in range(2):
        simulator.add_node(f"node-{i}", gpus=8)
    submit = {}
    for row in rows:
        submit[row["id"]] = float(row["submit"])
        simulator.add_job(row["id"], gpus=int(row["gpus"]), duration=float(row["duration"]), submit=submit[row["id"]])
    total = 0.0
    while events := simulator.step():
        total += sum(simulator.now - submit[name] for _, what, name in events if what == "completed")
    return total / len(rows)


def check(learner, t):
    alpha, beta = float(t.rng.uniform(5e-6, 50e-6)), 1 / float(t.rng.uniform(5e9, 300e9))
    jobs = [
        {
            "name": f"job-{i}",
            "gpus": int(t.rng.choice([1, 2, 4, 8])),
            "steps": t.integers(100, 3000),
            "submit": t.integers(0, 3000),
            "step_s": float(t.rng.uniform(0.05, 3.0)),
            "gradient_bytes": t.integers(10**7, 10**10),
        }
        for i in range(24)
    ]
    for job in jobs:
        t.close(learner.duration_s(job, alpha, beta), seconds(job, alpha, beta), f"duration_s({job}, …)", rtol=1e-9)
    text = learner.trace(jobs, alpha, beta)
    t.require(isinstance(text, str), "trace(…) must return text", "trace(…) 应返回文本")
    lines = text.splitlines()
    t.equal(lines[0] if lines else "", "submit,duration,gpus,id", "the header of trace(…)")
    rows = list(csv.DictReader(io.StringIO(text)))
    t.equal(len(rows), len(jobs), "the number of jobs in trace(…)")
    t.equal([float(r["submit"]) for r in rows], sorted(float(j["submit"]) for j in jobs), "submit, in order")
    named = {r["id"]: r for r in rows}
    for job in jobs:
        row = named.get(job["name"])
        t.require(row is not None, f"{job['name']} is not in the trace", f"轨迹里没有 {job['name']}")
        t.close(float(row["duration"]), seconds(job, alpha, beta), f"the duration of {job['name']}", rtol=1e-6)
        t.equal(int(row["gpus"]), job["gpus"], f"the GPUs of {job['name']}")
        t.equal(float(row["submit"]), float(job["submit"]), f"the submission of {job['name']}")
    submits = [j["submit"] for j in jobs]
    needed = sum(j["gpus"] * seconds(j, alpha, beta) for j in jobs)
    t.close(
        learner.load(jobs, 16, alpha, beta), needed / (16 * (max(submits) - min(submits))), "load(jobs, 16, …)", 1e-9
    )
    for job in jobs[:8]:
        times = {n: seconds({**job, "gpus": n}, alpha, beta) for n in (1, 2, 4, 8)}
        for deadline in (2 * max(times.values()), times[2], times[4] * 1.0001, 0.5 * min(times.values())):
            fits = [n for n in times if times[n] <= deadline]
            best = min(fits, key=lambda n: n * times[n], default=None)
            what = f"cheapest({job}, [8, 4, 2, 1], {deadline}, …)"
            t.equal(learner.cheapest(job, [8, 4, 2, 1], deadline, alpha, beta), best, what)
    fifo, sjf = mean_completion(rows, "fifo"), mean_completion(rows, "sjf-skip")
    t.note(
        f"your 24 jobs on 2 nodes of 8 GPUs: mean completion {fifo:,.0f} s under fifo, {sjf:,.0f} s under sjf-skip",
        f"你的 24 个作业在 2 个 8 卡节点上：平均完成时间 fifo 为 {fifo:,.0f} 秒，sjf-skip 为 {sjf:,.0f} 秒",
    )
