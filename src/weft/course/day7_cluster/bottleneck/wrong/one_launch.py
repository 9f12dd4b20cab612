# rejected at: right
# A launch is counted once, not for each call.
def limit(record, machine):
    return max(
        (record["flops"] / machine["flop_s"], "compute"),
        (record["bytes"] / machine["byte_s"], "memory"),
        (machine["launch_s"], "launch"),
    )


def do_first(records, machine):
    saved, name = max((r["seconds"] - limit(r, machine)[0], r["name"]) for r in records)
    step = sum(r["seconds"] for r in records)
    return name, step / (step - saved)
