"""Tables of ``weft comm`` in nccl-tests' columns, a line a point, as it comes."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from weft.comm import verdict
from weft.console import out, print_line, told

COLUMNS = (
    ("size", 12), ("count", 12), ("type", 9), ("redop", 6), ("root", 5), ("place", 6), ("time", 11), ("algbw", 12),
    ("busbw", 12), ("#wrong", 7), ("p50", 11), ("p99", 11),
)  # fmt: skip
NARROW = (10, 10, 8, 5, 4, 5, 9, 7, 7, 6)  # and a space between: 80 columns, without the percentiles
UNITS = (
    "(B)", "(elements)", "", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)",
)  # fmt: skip


class Table:
    """Prints records as they come; a collective's fit and verdict after its last one."""

    def __init__(self, as_json: bool):
        self.silent = as_json
        self.about: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []

    def begin(self, about: dict[str, Any]) -> None:
        self.about = about

    def add(self, r: dict[str, Any]) -> None:
        before = self.records[-1]["collective"] if self.records else None
        if before not in (None, r["collective"]):
            self._foot(str(before))
        if before != r["collective"]:
            self._head(r)
        self.records.append(r)
        if not self.silent:
            print_line(_row(r))
            for text in verdict.oddities(r):
                print_line(f"#   {text}")
        if r["wrong"]:
            self._say(f"#   {r['wrong']:,} WRONG elements")

    def finish(self) -> None:
        if self.records:
            self._foot(self.records[-1]["collective"])
            rated = [r["busbw"] for r in self.records if r["bytes"]]
            if rated:
                self._say(f"# average bus bandwidth {sum(rated) / len(rated):.4g} GB/s")

    def _say(self, text: str) -> None:
        """Beside a table on standard output, on standard error beside JSON."""
        (told if self.silent else print_line)(text)

    def _head(self, r: dict[str, Any]) -> None:
        if self.silent:
            return
        groups = f", groups of {r['subgroups']} at once" if r["subgroups"] else ""
        registered = ", registered memory" if r["registered"] else ""
        print_line(f"# {r['collective']}: {r['backend']}, {r['ranks']} ranks{groups}, mode {r['mode']}{registered}")
        print_line("#" + _line([name for name, _ in COLUMNS])[1:])
        print_line("#" + _line(UNITS)[1:])

    def _foot(self, collective: str) -> None:
        mine = [r for r in self.records if r["collective"] == collective]
        found = verdict.model(mine)
        if found:
            self._say(f"# {verdict.model_line(found)}")
        if text := verdict.judge(mine, self.about.get("peak", {})):
            self._say(f"# {text}")


def _row(r: dict[str, Any]) -> str:
    cells = (
        f"{r['bytes']}", f"{r['count']}", r["dtype"], r["op"] or "none", "-1" if r["root"] is None else f"{r['root']}",
        "in" if r["in_place"] else "out", f"{r['time_us']:.2f}", f"{r['algbw']:.4g}", f"{r['busbw']:.4g}", f"{r['wrong']}",
        f"{r['p50_us']:.2f}", f"{r['p99_us']:.2f}",
    )  # fmt: skip
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    """The cells in their columns; without the last two, the percentiles, in a terminal that is too narrow."""
    if not out.is_terminal or out.width >= sum(width for _, width in COLUMNS):
        return "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, NARROW, strict=False))


def print_changes(found: Sequence[dict[str, Any]], say: Callable[[str], None]) -> None:
    """The comparison with an earlier run."""
    if not found:
        say("# no point of this run is in the earlier one (collective, size, dtype, backend, ranks, mode)")
        return
    for collective, rows in groupby(found, key=lambda c: c["collective"]):
        for c in rows:
            if c["changed"]:
                how = "slower" if c["ratio"] > 1 else "faster"
                say(
                    f"# {collective} {verdict.size_text(c['bytes'])}: {c['before_us']:.1f} us before, {c['now_us']:.1f} now: "
                    f"{max(c['ratio'], 1 / c['ratio']):.2f} times {how}"
                )
    ratios = sorted(c["ratio"] for c in found)
    say(
        f"# against the earlier run: {len(found)} points, {sum(c['changed'] for c in found)} changed beyond 10 % and "
        f"spread; median time ratio {ratios[len(ratios) // 2]:.2f}"
    )
