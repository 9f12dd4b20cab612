def total(branch, cost):
    return sum(sum(cost[b] for b in set(branch[i : i + 32])) for i in range(0, len(branch), 32))


def check(learner, t):
    for _ in range(6):
        names = ["a", "b", "c", "d", "e"][: int(t.rng.integers(1, 6))]
        cost = {name: int(t.rng.integers(1, 500)) for name in names}
        lanes = [names[int(i)] for i in t.rng.integers(0, len(names), int(t.rng.integers(1, 33)))]
        shown = "".join(lanes)
        t.equal(learner.warp_cycles(lanes, cost), sum(cost[b] for b in set(lanes)), f"warp_cycles({shown}, {cost})")
        branch = [names[int(i)] for i in t.rng.integers(0, len(names), int(t.rng.integers(33, 300)))]
        t.equal(
            learner.total_cycles(branch, cost),
            total(branch, cost),
            f"total_cycles of {len(branch)} threads with {cost}",
        )
        even = [name for name in names for _ in range(32 * int(t.rng.integers(1, 4)))]
        t.rng.shuffle(even)
        even = [str(b) for b in even]
        order = learner.reordered(even)
        t.require(
            isinstance(order, list) and sorted(map(str, order)) == sorted(map(str, range(len(even)))),
            f"reordered must name each of the {len(even)} threads once",
            f"reordered 必须把 {len(even)} 个线程各列出一次",
        )
        best = sum(cost[b] for b in names for _ in range(even.count(b) // 32))
        t.equal(total([even[i] for i in order], cost), best, "the total after reordered")
    numbered = [7, 7, 3] * 11
    t.equal(
        learner.total_cycles(numbered, {7: 10, 3: 1}),
        total(numbered, {7: 10, 3: 1}),
        "total_cycles with branches 7 and 3",
    )
