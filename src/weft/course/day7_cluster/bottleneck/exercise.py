"""
[en
Bottleneck analysis: what limits each operator of a step, and which one to work on first.

A record has the name of an operator, how often a step calls it, its time in seconds (of all calls), and the FLOPs and bytes
that all calls together must do and move. A machine has flop_s, byte_s and launch_s: measured ceilings, and the least time of a call.
en]
[zh
瓶颈分析：每个算子受什么限制，应当先做哪一个。

一条记录有算子名 name、一步中的调用次数 calls、全部调用合计的秒数 seconds，以及全部调用必须完成的 FLOP 和必须搬动的字节 bytes。
machine 有 flop_s、byte_s 和 launch_s：实测上限，以及一次调用的最短时间。
zh]
"""


# TODO(en): Return the least seconds that this machine needs for the record, and what sets them: "compute", "memory" or
#   "launch". Arithmetic and memory traffic overlap, so the larger time counts, not their sum; each call takes launch_s at least.
# TODO(zh): 返回这台机器完成该记录至少需要的秒数，以及由什么决定："compute"、"memory" 或 "launch"。
#   运算和访存会重叠，所以取较大者，而不是相加；每次调用至少要 launch_s。
def limit(record: dict, machine: dict) -> tuple[float, str]:
    # [skeleton
    #: return record["flops"] / machine["flop_s"] + record["bytes"] / machine["byte_s"], "compute"
    # skeleton]
    # [solution
    return max(
        (record["flops"] / machine["flop_s"], "compute"),
        (record["bytes"] / machine["byte_s"], "memory"),
        (record["calls"] * machine["launch_s"], "launch"),
    )
    # solution]


# TODO(en): Return the name of the operator that could save most seconds if it reached its limit, and by how much the whole step
#   would then be faster: the old time of the step over its new time.
# TODO(zh): 返回“若达到自身极限则能省下最多秒数”的算子名，以及那时整个一步快多少倍：一步的旧时间除以新时间。
def do_first(records: list[dict], machine: dict) -> tuple[str, float]:
    # [skeleton
    #: longest = max(records, key=lambda r: r["seconds"])
    #: return longest["name"], 2.0
    # skeleton]
    # [solution
    saved, name = max((r["seconds"] - limit(r, machine)[0], r["name"]) for r in records)
    step = sum(r["seconds"] for r in records)
    return name, step / (step - saved)
    # solution]


# I AM NOT DONE
