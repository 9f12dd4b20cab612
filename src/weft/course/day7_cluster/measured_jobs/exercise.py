"""
[en
Your own measurements as jobs of a cluster: durations from a measured step and a measured link, as a trace for `weft simulate`.

A job has name, gpus, steps, submit (seconds), and of one step on ONE GPU with the whole batch: step_s (measured seconds) and gradient_bytes.
Its batch is divided over its GPUs; all of the gradients are summed by a ring after the computation, with nothing hidden.
en]
[zh
把自己的测量变成集群的作业：由测得的一步和测得的链路算出时长，写成 `weft simulate` 的轨迹。

作业有 name、gpus、steps、submit（秒），以及整个批次在一块 GPU 上跑一步的 step_s（实测秒数）和 gradient_bytes。
批次平均分给它的各块 GPU；计算结束后用环把全部梯度求和，没有任何重叠。
zh]
"""


# TODO(en): Seconds that the job runs: steps × (step_s / gpus + the ring's time), where a ring of n ranks takes
#   2 (n - 1) (alpha + gradient_bytes / n · beta): nothing for one GPU.
# TODO(zh): 作业运行的秒数：steps ×（step_s / gpus + 环的时间），n 个 rank 的环用时
#   2 (n - 1) (alpha + gradient_bytes / n · beta)；一块 GPU 时为零。
def duration_s(job: dict, alpha: float, beta: float) -> float:
    # [skeleton
    #: return job["steps"] * job["step_s"] / job["gpus"]
    # skeleton]
    # [solution
    n = job["gpus"]
    ring = 2 * (n - 1) * (alpha + job["gradient_bytes"] / n * beta)
    return job["steps"] * (job["step_s"] / n + ring)
    # solution]


# TODO(en): The trace as text: the header submit,duration,gpus,id and a line for each job, the first submitted first.
# TODO(zh): 轨迹文本：表头 submit,duration,gpus,id，每个作业一行，先提交的在前。
def trace(jobs: list[dict], alpha: float, beta: float) -> str:
    # [skeleton
    #: return "submit,duration,gpus,id\n"
    # skeleton]
    # [solution
    lines = ["submit,duration,gpus,id"]
    for job in sorted(jobs, key=lambda job: job["submit"]):
        lines.append(f"{job['submit']},{duration_s(job, alpha, beta)},{job['gpus']},{job['name']}")
    return "\n".join(lines) + "\n"
    # solution]


# TODO(en): The load that these jobs are for a cluster: GPU seconds that they need over the GPU seconds that ``gpus`` GPUs give
#   between the first and the last submission. Above 1 the queue grows as long as jobs arrive, under every policy.
# TODO(zh): 这些作业给集群的负载：它们需要的 GPU 秒，除以 ``gpus`` 块 GPU 在第一次和最后一次提交之间能提供的 GPU 秒。
#   大于 1 时，只要还有作业到达，队列就会一直增长，任何策略都一样。
def load(jobs: list[dict], gpus: int, alpha: float, beta: float) -> float:
    # [skeleton
    #: return 0.0
    # skeleton]
    # [solution
    needed = sum(job["gpus"] * duration_s(job, alpha, beta) for job in jobs)
    submits = [job["submit"] for job in jobs]
    return needed / (gpus * (max(submits) - min(submits)))
    # solution]


# TODO(en): The number of GPUs, one of ``choices``, that uses the least GPU seconds (price) for a job while it ends within
#   ``deadline_s``; None if no choice does.
# TODO(zh): 在 ``choices`` 中选一个 GPU 数，使作业在 ``deadline_s`` 之内结束，并且用的 GPU 秒（价钱）最少；都不行时返回 None。
def cheapest(job: dict, choices: list[int], deadline_s: float, alpha: float, beta: float) -> int | None:
    # [skeleton
    #: return max(choices)
    # skeleton]
    # [solution
    times = {n: duration_s({**job, "gpus": n}, alpha, beta) for n in choices}
    return min((n for n in choices if times[n] <= deadline_s), key=lambda n: n * times[n], default=None)
    # solution]


# I AM NOT DONE
