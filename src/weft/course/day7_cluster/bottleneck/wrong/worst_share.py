# rejected at: right
# The operator furthest from its limit, however small a part of the step it is.
def limit(record, machine):
    return max(
        (record["flops"] / machine["flop_s"], "compute"),
        (record["bytes"] / machine["byte_s"], "memory"),
        (record["calls"] * machine["launch_s"], "launch"),
    )


def do_first(records, machine):
    worst = max(records, key=lambda r: r["seconds"] / limit(r, machine)[0])
    step = sum(r["seconds"] for r in records)
    return worst["name"], step / (step - worst["seconds"] + limit(worst, machine)[0])
