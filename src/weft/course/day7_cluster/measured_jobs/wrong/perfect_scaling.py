# rejected at: right
# No communication: twice the GPUs are half the time.
def duration_s(job, alpha, beta):
    n = job["gpus"]
    ring = 2 * (n - 1) * (alpha + job["gradient_bytes"] / n * beta)
    return job["steps"] * (job["step_s"] / n)


def trace(jobs, alpha, beta):
    lines = ["submit,duration,gpus,id"]
    for job in sorted(jobs, key=lambda job: job["submit"]):
        lines.append(f"{job['submit']},{duration_s(job, alpha, beta)},{job['gpus']},{job['name']}")
    return "\n".join(lines) + "\n"


def load(jobs, gpus, alpha, beta):
    needed = sum(job["gpus"] * duration_s(job, alpha, beta) for job in jobs)
    submits = [job["submit"] for job in jobs]
    return needed / (gpus * (max(submits) - min(submits)))


def cheapest(job, choices, deadline_s, alpha, beta):
    times = {n: duration_s({**job, "gpus": n}, alpha, beta) for n in choices}
    return min((n for n in choices if times[n] <= deadline_s), key=lambda n: n * times[n], default=None)
