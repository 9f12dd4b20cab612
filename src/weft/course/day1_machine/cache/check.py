def lru(addresses, lines, line_bytes=64):
    kept, count = [], 0
    for address in addresses:
        line = address // line_bytes
        if line in kept:
            kept.remove(line)
        else:
            count += 1
            if len(kept) == lines:
                kept.pop(0)
        kept.append(line)
    return count


def check(learner, t):
    t.equal(learner.misses([], 4), 0, "misses([], 4)")
    t.equal(learner.misses([0, 63, 64, 0], 2), 2, "misses([0, 63, 64, 0], 2)")
    t.equal(learner.misses([0, 64, 0, 128, 0], 2), 3, "misses([0, 64, 0, 128, 0], 2)")
    for _ in range(6):
        lines, size = int(t.rng.integers(1, 12)), 2 ** int(t.rng.integers(4, 8))
        addresses = [int(a) for a in t.rng.integers(0, size * 20, 120)]
        t.equal(
            learner.misses(addresses, lines, size),
            lru(addresses, lines, size),
            f"misses({addresses[:8]} and {len(addresses) - 8} more, {lines}, {size})",
        )
    rows = [4 * (64 * i + j) for i in range(64) for j in range(64)]
    columns = [4 * (64 * i + j) for j in range(64) for i in range(64)]
    t.equal(learner.misses(rows, 32), lru(rows, 32), "misses of a matrix, row by row, 32 lines")
    t.predict(
        "BY_ROW",
        learner.BY_ROW,
        lru(rows, 32),
        "A line holds 16 floats. How many of 16 neighbours miss?",
        "一行缓存有 16 个 float。16 个相邻元素里有几个未命中？",
    )
    t.predict(
        "BY_COLUMN",
        learner.BY_COLUMN,
        lru(columns, 32),
        "Going down one column touches 64 lines. Is the first of them still there when the next column begins?",
        "沿一列走下来要碰 64 行缓存。开始下一列时，其中第一行还在吗？",
    )
    t.predict(
        "BY_COLUMN_TWICE_THE_CACHE",
        learner.BY_COLUMN_TWICE_THE_CACHE,
        lru(columns, 64),
        "And when all 64 of them fit?",
        "如果这 64 行全都装得下呢？",
    )
    t.note(
        "the same sum, 16 times the traffic, for the order of two loops",
        "同样的求和，只因两层循环的次序，流量相差 16 倍",
    )
