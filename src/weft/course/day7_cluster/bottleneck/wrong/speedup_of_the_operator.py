# rejected at: right
# The speed-up of the operator alone, not of the step.
def limit(record, machine):
    return max(
        (record["flops"] / machine["flop_s"], "compute"),
        (record["bytes"] / machine["byte_s"], "memory"),
        (record["calls"] * machine["launch_s"], "launch"),
    )


def do_first(records, machine):
    first = max(records, key=lambda r: r["seconds"] - limit(r, machine)[0])
    return first["name"], first["seconds"] / limit(first, machine)[0]
