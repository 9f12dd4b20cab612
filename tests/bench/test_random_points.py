"""``weft bench --random``: what is drawn, when a point is timed again, and what is said of it."""

import collections
import random
import re

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from weft import cli, registry  # noqa: E402
from weft.bench import random_points, run  # noqa: E402
from weft.definition import PUBLIC  # noqa: E402
from weft.records import RANDOM, Measurement, Store  # noqa: E402
from weft.report.random_table import random_table  # noqa: E402

NAMES = ("add", "rms_norm", "matmul", "cross_entropy", "softmax", "group_norm")


def operators():
    return [op for op in registry.select() if op.name in NAMES]


def test_the_seed_decides_and_operators_have_equal_weight():
    points = random_points.draw(operators(), 60, 7)
    assert list(map(str, (p[1] for p in points))) == [str(p[1]) for p in random_points.draw(operators(), 60, 7)]
    assert {str(p[1]) for p in points} != {str(p[1]) for p in random_points.draw(operators(), 60, 8)}
    assert collections.Counter(p[0].name for p in points) == dict.fromkeys(NAMES, 10)
    assert {w.dtype for _, w, _ in points} == {"fp32", "fp16", "bf16"}
    assert {d for op, _, d in points if "backward" in op.directions} == {"forward", "backward"}
    assert 5 < sum("layout" in w.options for _, w, _ in points) < 25


def test_sizes_are_of_the_whole_range_half_of_them_multiples_of_8():
    points = random_points.draw([op for op in operators() if op.name in ("rms_norm", "matmul")], 200, 1)
    widths = [w["N"] for op, w, _ in points if op.name == "rms_norm"]
    assert min(widths) < 300 and max(widths) > 20_000 and all(120 <= n <= 60_000 for n in widths)
    assert 35 < sum(n % 8 == 0 for n in widths) < 80
    products = [w for op, w, _ in points if op.name == "matmul"]
    assert all(w["M"] <= 9000 and w["N"] <= 9000 and w["K"] <= 9000 for w in products)
    for op, w, _ in points:
        assert op.cost(w, "forward").bytes_moved <= random_points.BYTES


def test_every_operator_that_takes_part_has_such_points():
    g = random.Random(3)
    for op in filter(random_points.takes_part, registry.select()):
        w = random_points.point_of(op, "fp32", g)
        assert op.inputs(w, None, "meta") and op.parse(str(w), "fp32") == w


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="no operator with a public function"):
        random_points.draw(registry.select(["memory_access"])[-1:], 3, 0, directions=["backward"])


def test_the_seed_of_a_published_run_is_its_commits(monkeypatch):
    monkeypatch.setattr(run, "commit", lambda: "1a2b3c4d5e6f+")
    assert [run.seed_of(text) for text in ("", "0xff", "12")] == [0x1A2B3C4D, 255, 12]
    monkeypatch.setattr(run, "commit", lambda: "")
    for text, words in (("", "no commit to take a seed from"), ("x", "--seed is 'x'; expected a whole number")):
        with pytest.raises(ValueError, match=words):
            run.seed_of(text)


def measured(operator: str, ratio: float, workload: str = "M=3,N=5", **more) -> Measurement:
    return Measurement(
        operator, PUBLIC, "forward", workload, "bf16", 10.0, ours=True, ratio_to_best_peer=ratio, best_peer="torch",
        host_us=4.0, **more,
    )  # fmt: skip


def test_a_point_behind_is_timed_twice_more_and_its_median_counts():
    points = random_points.draw(operators(), 2, 7)
    ratios = {0: iter([0.9, 1.1, 0.95]), 1: iter([0.98])}
    timed: list[int] = []
    stops: list[int] = []

    def time(some):
        for point in some:
            if len(timed) in stops:
                raise KeyboardInterrupt
            timed.append(at := points.index(point))
            op, w, direction = point
            yield [Measurement(op.name, PUBLIC, direction, str(w), w.dtype, 1.0, ratio_to_best_peer=next(ratios[at]))]

    found = random_points.measure(points, 7, time)
    assert timed == [0, 1, 0, 0]
    assert [(m.ratio_to_best_peer, m.details["times"], m.metric) for m in found] == [
        (0.95, 3, RANDOM),
        (0.98, 1, RANDOM),
    ]
    ratios, stops = {0: iter([0.9, 1.1]), 1: iter([0.98])}, [7]
    found = random_points.measure(points, 7, time)
    assert [m.ratio_to_best_peer for m in found] == [1.1, 0.98], "Ctrl-C keeps what was measured"


def test_the_table_has_a_line_a_family_and_the_worst(tmp_path):
    details = {"seed": 0x1A2B3C4D, "count": 3}
    more = {"metric": RANDOM, "details": details, "gpu": "NVIDIA H100", "run": "b", "time": "2026-01-02"}
    points = [
        measured("softmax", 0.5, **more), measured("softmax", 2.0, "M=4,N=5", **more), measured("add", 1.0, **more),
    ]  # fmt: skip
    old = measured("add", 0.1, "M=9,N=9", **more | {"run": "a", "time": "2026-01-01"})
    store = Store(tmp_path)
    for m in (old, *points):
        store.append(m.gpu, m.operator, m)
    store.compact("NVIDIA H100")
    kept = [m for m in store.read("NVIDIA H100") if m.metric == RANDOM]
    assert sorted(m.ratio_to_best_peer for m in kept) == [0.5, 1.0, 2.0]  # the earlier run is gone
    text = random_table(kept)
    assert "weft bench --random 3 --seed 0x1a2b3c4d" in text
    assert re.search(r"softmax \| 2 \| 50.0\W%\D+1.00×", text) and re.search(r"all\W+\| 3 \|", text)
    assert text.index("`M=3,N=5` | 0.50×") < text.index("`M=4,N=5` | 2.00×")


def test_without_a_gpu_the_command_says_so(monkeypatch):
    monkeypatch.setattr("weft.hardware.query.choose_device", lambda: "cpu")
    done = CliRunner().invoke(cli.app, ["bench", "--random", "3", "--seed", "1"])
    assert isinstance(done.exception, ValueError) and "PyTorch sees none here" in str(done.exception)
