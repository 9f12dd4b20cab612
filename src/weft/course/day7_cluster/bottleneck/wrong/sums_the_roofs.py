# rejected at: right
# Adds arithmetic and memory: they overlap.
def limit(record, machine):
    times = {
        "compute": record["flops"] / machine["flop_s"],
        "memory": record["bytes"] / machine["byte_s"],
        "launch": record["calls"] * machine["launch_s"],
    }
    return times["compute"] + times["memory"], max(times, key=times.get)


def do_first(records, machine):
    saved, name = max((r["seconds"] - limit(r, machine)[0], r["name"]) for r in records)
    step = sum(r["seconds"] for r in records)
    return name, step / (step - saved)
