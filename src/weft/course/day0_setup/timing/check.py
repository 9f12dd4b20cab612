import statistics


def check(learner, t):
    for repeats in (1, 2, 5, 8, 21):
        usual = [float(d) for d in t.rng.uniform(80, 120, repeats + 3)]
        durations = [50_000.0, *usual]
        if repeats > 4:
            durations[int(t.rng.integers(2, repeats))] = 9_000.0  # one call is disturbed
        overhead = float(t.rng.uniform(5, 9))  # of what lies between two calls
        got, calls, reads = t.probe("measured", durations, repeats, overhead)
        what = f"median_us(call, clock, {repeats})"
        t.equal(calls, repeats + 1, f"the number of calls that {what} makes")
        t.require(
            reads >= 2 * repeats,
            f"{what} read the clock {reads} times: each call is timed alone",
            f"{what} 读了 {reads} 次时钟：每次调用要单独计时",
        )
        t.close(got, statistics.median(durations[1 : repeats + 1]), what, rtol=1e-6)
