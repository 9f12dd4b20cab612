# rejected at: right
# The longest operator, even if it is at its limit.
def limit(record, machine):
    return max(
        (record["flops"] / machine["flop_s"], "compute"),
        (record["bytes"] / machine["byte_s"], "memory"),
        (record["calls"] * machine["launch_s"], "launch"),
    )


def do_first(records, machine):
    saved, name = max((r["seconds"], r["name"]) for r in records)
    step = sum(r["seconds"] for r in records)
    return name, step / (step - saved)
