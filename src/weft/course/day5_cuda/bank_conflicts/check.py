"""Conflicts of random and regular accesses; padding and swizzle by counting them."""

from weft.learn.memory_model import bank_conflicts


def check(learner, t):
    cases = [[4 * stride * lane for lane in range(32)] for stride in (1, 2, 3, 4, 8, 16, 32, 33, 48)]
    cases += [[128] * 32, [4 * (lane % 4) for lane in range(32)], [0, 128, 256] + [4] * 29]
    cases += [(4 * t.rng.integers(0, 256, 32)).tolist() for _ in range(12)]
    for addresses in cases:
        t.equal(learner.conflicts(addresses), bank_conflicts(addresses), f"conflicts({addresses})")
    for columns in (32, 33, 64, 8, 16, 17, t.integers(2, 200), t.integers(2, 200)):
        best = next(w for w in range(columns, columns + 33) if bank_conflicts(4 * w * r for r in range(32)) == 0)
        t.equal(learner.padded(columns), best, f"padded({columns})")
    places = [[learner.swizzled(row, column) for column in range(32)] for row in range(32)]
    for row in range(32):
        t.require(
            sorted(map(int, places[row])) == list(range(32)),
            f"swizzled({row}, 0 … 31) must be the numbers 0 to 31 in some order: elements share a place or leave the row",
            f"swizzled({row}, 0 … 31) 应是 0 到 31 的某个排列：现在有元素占了同一位置或超出了该行",
        )
    for column in range(32):
        more = bank_conflicts(4 * (32 * row + places[row][column]) for row in range(32))
        t.at_most(
            more,
            0,
            f"extra passes to read column {column} of the swizzled tile",
            f"读 swizzle 后第 {column} 列多出的趟数",
        )
    t.notes.clear()
