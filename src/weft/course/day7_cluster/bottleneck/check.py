"""Random records on random machines; some are at their limit and long, so that the longest is not the one to mend."""


def expected_limit(r, m):
    return max(
        (r["flops"] / m["flop_s"], "compute"),
        (r["bytes"] / m["byte_s"], "memory"),
        (r["calls"] * m["launch_s"], "launch"),
    )


def check(learner, t):
    for _ in range(5):
        machine = {
            "flop_s": float(t.integers(100, 900)) * 1e12,
            "byte_s": float(t.integers(1, 5)) * 1e12,
            "launch_s": float(t.integers(2, 9)) * 1e-6,
        }
        records = []
        for i, bound in enumerate(("compute", "memory", "launch", "memory", "launch", "compute")):
            seconds = float(t.rng.uniform(1e-4, 3e-3))
            few = {"flops": 0.05, "bytes": 0.05, "calls": 0.05} | {
                {"compute": "flops", "memory": "bytes", "launch": "calls"}[bound]: 1.0
            }
            record = {"name": f"operator {i}", "calls": max(1, round(few["calls"] * seconds / machine["launch_s"]))}
            record["flops"] = few["flops"] * seconds * machine["flop_s"]
            record["bytes"] = few["bytes"] * seconds * machine["byte_s"]
            least = expected_limit(record, machine)[0]
            record["seconds"] = least * float(t.rng.uniform(1.02, 4.0))
            records.append(record)
        longest = dict(records[1], name="at its limit")
        for key in ("flops", "bytes", "calls"):
            longest[key] *= 20
        longest["seconds"] = expected_limit(longest, machine)[0] * 1.0001
        records.insert(t.integers(0, 6), longest)
        for r in records:
            least, bound = expected_limit(r, machine)
            got = learner.limit(r, machine)
            t.close(got[0], least, f"limit({r}, {machine})[0]", rtol=1e-9)
            t.equal(got[1], bound, f"limit({r}, {machine})[1]")
        saved, name = max((r["seconds"] - expected_limit(r, machine)[0], r["name"]) for r in records)
        step = sum(r["seconds"] for r in records)
        got = learner.do_first(records, machine)
        t.equal(got[0], name, "do_first(records, machine)[0]")
        t.close(got[1], step / (step - saved), "do_first(records, machine)[1]", rtol=1e-9)
