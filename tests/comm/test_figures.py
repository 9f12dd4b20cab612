"""Sizes, exact values, the alpha-beta model, verdicts, comparisons and the command's own errors."""

import json
import random
from itertools import accumulate

import pytest
import torch
from rich.console import Console

from weft.alpha_beta import AlphaBeta, fit
from weft.comm import environment, measure, terminal, verdict
from weft.comm.collectives import COLLECTIVES, Collective, find, uneven
from weft.comm.settings import EXACT, ITEM_BYTES, Settings, sizes
from weft.comm.values import DTYPES, REDUCED, fill, reduced, wrong
from weft.definition import UnknownName
from weft.words import byte_count


def test_sizes():
    assert sizes(byte_count("1K"), byte_count("8K"), 2) == [1024, 2048, 4096, 8192]
    assert sizes(4, 4, 2) == [4] and sizes(1000, 3000, 1.5) == [1000, 1500, 2250]
    assert (byte_count("1.5MiB"), byte_count("2GB"), byte_count("7")) == (3 << 19, 2 << 30, 7)
    for text in ("0", "-4", "4X", "0.3", "", "1.0001K"):
        with pytest.raises(ValueError, match="expected bytes above 0"):
            byte_count(text)
    with pytest.raises(ValueError, match="factor is 1"):
        sizes(1, 2, 1)
    with pytest.raises(ValueError, match="below min"):
        sizes(4, 2, 2)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_parts_and_uneven_counts_add_up(n):
    s = Settings(bytes=[1, 100, 1024, 1025], dtype="fp32")
    for collective in COLLECTIVES.values():
        for size in measure.plan(collective, s, n):
            count, part, reported = measure.counts(collective, size, "fp32", n)
            assert reported in (0, count * 4) and (not collective.split or count == part * n)
    table = uneven(40, n)
    assert all(sum(row) == 40 * n for row in table) and all(
        sum(column) == 40 * n for column in zip(*table, strict=True)
    )
    assert all(row[r] < 40 and min(row) > 0 for r, row in enumerate(table))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
@pytest.mark.parametrize("n", [2, 4, 9])
def test_reductions_are_exact_in_any_order(dtype, op, n):
    """In the dtype itself, with the ranks in a random order, and different from each rank's own input."""
    floating = dtype not in ("int64", "int32", "int8", "uint8")
    if op == "avg" and (not floating or n == 9 or dtype.startswith("fp8")):
        return
    if n * 2 > EXACT[dtype] and op in ("sum", "avg"):
        return  # so few integers that some ranks are zero
    inputs = [torch.empty(3000, dtype=DTYPES[dtype]) for _ in range(n)]
    for r, x in enumerate(inputs):
        fill(x, r, dtype, op, n)
    random.Random(n).shuffle(inputs)
    compute = torch.float32 if dtype.startswith("fp8") else DTYPES[dtype]
    total = inputs[0].to(compute)
    for x in inputs[1:]:
        y = x.to(compute)
        total = {"prod": total * y, "min": torch.minimum(total, y), "max": torch.maximum(total, y)}.get(op, total + y)
        total = total.to(DTYPES[dtype]).to(compute)  # rounds after each step, as a ring does
    if op == "avg":
        total = total / n
    assert torch.equal(total.double(), reduced(torch.arange(3000), dtype, op, n))
    assert total.double().unique().numel() > 1 and not torch.equal(total.double(), inputs[0].double())


def test_wrong_counts_every_element_that_differs():
    x = torch.empty(5000)
    fill(x, 2, "fp32", "sum", 4)
    assert wrong(x, lambda j: (2, j), "fp32", "sum", 4) == 0
    x[17] += 1
    x[4999] = float("nan")
    assert wrong(x, lambda j: (2, j), "fp32", "sum", 4) == 2
    assert wrong(x, lambda j: (1, j), "fp32", "sum", 4) > 4500  # of another rank
    assert wrong(x, lambda j: (REDUCED, j), "fp32", "sum", 4) > 4500


# ---- the model


def protocols(size):
    """Three protocols, as NCCL's."""
    return 8 + size * 2e-4 if size <= 1 << 16 else 20 + size * 2e-5 if size <= 1 << 20 else 60 + size * 3e-6


def test_model_finds_protocols_and_predicts_unseen_sizes():
    noise = random.Random(1)
    measured = [1 << k for k in range(10, 29)]
    found = fit(measured, [protocols(s) * noise.uniform(0.98, 1.02) for s in measured])
    assert len(found.stretches) == 3
    assert found.alpha_us == pytest.approx(8, rel=0.1) and found.gb_s == pytest.approx(1e-3 / 3e-6, rel=0.03)
    for size in [3 << k for k in range(10, 26)]:  # between the measured ones
        if size == 3 << 19:  # the protocol changes between 1 and 2 MiB, where nothing says where
            assert protocols(1 << 20) < found.predict(size) < protocols(1 << 21)
            continue
        assert found.predict(size) == pytest.approx(protocols(size), rel=0.1)
    assert found.unseen_median < 0.05 and AlphaBeta.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    first = found.stretches[0]
    assert abs(first.alpha_us - 8) < first.alpha_error < 1 and abs(first.beta_us - 2e-4) < first.beta_error


def test_half_of_the_bandwidth():
    measured = [1 << k for k in range(10, 27)]
    found = fit(measured, [10 + s / 1e5 for s in measured])  # 100 GB/s
    assert len(found.stretches) == 1 and found.bandwidth_from == pytest.approx(1e6, rel=0.1)  # alpha / beta
    flat = fit(measured[:4], [5.0] * 4)
    assert flat.alpha_us == pytest.approx(5) and flat.gb_s == float("inf")
    with pytest.raises(ValueError, match="2 sizes"):
        fit([1, 2], [1.0, 2.0])


# ---- verdicts


def record(**more):
    base = {
        "collective": "all_reduce", "bytes": 64 << 20, "dtype": "fp32", "time_us": 300.0, "algbw": 200.0, "busbw": 200.0,
        "backend": "nccl", "op": "sum", "root": None, "in_place": True, "mode": "stream", "registered": False, "ranks": 2,
        "subgroups": None, "p20_us": 290.0, "p50_us": 300.0, "p80_us": 310.0, "spikes": [], "straggler": None, "late_us": [],
        "spike_count": 0, "iterations": 20,
    }  # fmt: skip
    return base | more


def test_link_is_judged_by_its_own_peak():
    peak = {"gb_s": 250.0, "what": "copy", "theoretical_gb_s": 450.0}
    assert "80%" in (text := verdict.judge([record()], peak)) and "normal" in text and "44% of the links' 450" in text
    low = verdict.judge([record(busbw=100.0)], peak)
    assert "LOW (expected at least 50%)" in low and "weft topology" in low
    assert "too small to judge" in verdict.judge([record(bytes=4 << 20)], peak)
    assert verdict.judge([record(bytes=0)], peak) == verdict.judge([record()], {}) == ""


def test_stragglers_and_spikes_are_named():
    settings = Settings(bytes=[4096])
    point = type("P", (), {"settings": settings, "bytes": 4096, "count": 1024, "in_place": True})()
    point.collective = COLLECTIVES["all_reduce"]
    point.group = type("G", (), {"size": 3, "backend": "gloo"})()

    def rank(late, spike=0.0):
        stamps = [late + 100.0 * i for i in range(21)]
        return {
            "stamps_us": [s + spike * (i > 7) for i, s in enumerate(stamps)],
            "base_us": 0.0,
            "host": "a",
            "wrong": 0,
            "per_stamp": 1,
        }

    found = measure.record(point, (rank(0), rank(70), rank(0)))
    assert found["straggler"] == 1 and found["spikes"] == [] and found["time_us"] == pytest.approx(100)
    assert found["busbw"] == pytest.approx(4096 / 100 / 1e3 * 4 / 3)
    spiky = measure.record(point, (rank(0), rank(0), rank(0, 900)))
    assert spiky["straggler"] is None or spiky["straggler"] == 2
    assert [(s["iteration"], s["slowest_rank"]) for s in spiky["spikes"]] == [(7, 2)]
    assert any("slowest on rank 2" in text for text in verdict.oddities(spiky))


def test_only_the_worst_spikes_are_listed():
    point = type("P", (), {"settings": Settings(bytes=[4096]), "bytes": 4096, "count": 1024, "in_place": True})()
    point.collective, point.group = COLLECTIVES["all_reduce"], type("G", (), {"size": 1, "backend": "gloo"})()
    slow = {2 * i: 1000.0 + 10 * i for i in range(12)}  # the later, the worse
    stamps = [0.0, *accumulate(slow.get(i, 100.0) for i in range(40))]
    one = {"stamps_us": stamps, "base_us": 0.0, "host": "a", "wrong": 0, "per_stamp": 1}
    found = measure.record(point, (one,))
    assert found["spike_count"] == 12 and [s["iteration"] for s in found["spikes"]] == list(range(8, 24, 2))
    assert "12 of 40 iterations" in verdict.oddities(found)[0]


@pytest.mark.parametrize("columns, cells", [(80, 10), (113, 10), (114, 12), (200, 12)])
def test_the_table_fits_the_terminal(columns, cells, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "out", Console(width=columns, force_terminal=True))
    monkeypatch.setattr(terminal, "print_line", print)
    terminal.Table(as_json=False).add(
        record(dtype="fp8_e4m3", count=64 << 20, p99_us=9e6, time_us=123456.78, wrong=123456, algbw=0.01234)
    )
    lines = capsys.readouterr().out.splitlines()[1:4]
    assert [len(line.lstrip("# ").split()) for line in (lines[0], lines[2])] == [cells, cells]
    assert max(map(len, lines)) <= columns and ("p99" in lines[0]) == (cells == 12)


def test_comparison_with_an_earlier_run(tmp_path):
    file = tmp_path / "before.json"
    before = [record(), record(bytes=1024, p20_us=10.0, p50_us=11.0, p80_us=12.0)]
    file.write_text(json.dumps({"records": before}))
    now = [
        record(p20_us=390.0, p50_us=400.0, p80_us=410.0),
        record(bytes=1024, p20_us=11.0, p50_us=13.0, p80_us=15.0),
        record(ranks=4),
    ]
    found = verdict.changes(now, verdict.read(file))
    assert [(c["bytes"], c["changed"]) for c in found] == [(64 << 20, True), (1024, False)]
    assert found[0]["ratio"] == pytest.approx(4 / 3)
    file.write_text("{}")
    with pytest.raises(ValueError, match="holds no records"):
        verdict.read(file)
    with pytest.raises(FileNotFoundError):
        verdict.read(tmp_path / "none.json")


def test_environment(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_SECRET_KEY", "x")
    found = environment.describe("gloo")
    assert found["environment"]["NCCL_ALGO"] == "Ring" and "NCCL_SECRET_KEY" not in found["environment"]
    assert "64 MiB free, 4 ranks" in environment.shm_warning(4, free=64 << 20)
    assert environment.shm_warning(4, free=1 << 30) == "" and environment.shm_free("/nowhere") is None


# ---- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("all_reduce", "--ranks", 1), "1 rank has no other to communicate with"),
        (("all_reduc",), "did you mean 'all_reduce'"),
        (("--ranks", 2, "--backend", "nvshmem"), "unknown backend"),
        (("--ranks", 2, "--gpus", 3), "gpus is 3 and ranks 2"),
        (("--gpus", 2, "--backend", "gloo"), "expected --ranks 2"),
        (("--ranks", 2, "--op", "avg"), "op is 'avg', which gloo does not have"),
        (("--ranks", 2, "--mode", "graph"), "mode graph is NCCL's"),
        (("--ranks", 2, "--dtype", "fp7"), "dtype is 'fp7'"),
        (("--ranks", 4, "--subgroups", 3), "expected a divisor of the 4 ranks"),
        (("--ranks", 2, "--root", 2), "expected a rank from 0 to 1"),
        (("--ranks", 2, "--min", "1K", "--max", "512"), "below min"),
        (("--ranks", 2, "--compare", "none.json"), "no file 'none.json'"),
        (("--ranks", 2, "--port", 65536), "port is 65536; expected 1 to 65535"),
        (("--ranks", 2, "--plot", "none/x.svg"), "there is no folder 'none'"),
        (("--ranks", 2, "--plot", "x.pdf"), "ends in .png or .svg"),
        (("none.py", "--ranks", 2), "no file 'none.py'"),
    ],
)
def test_mistakes_are_one_line(command, monkeypatch, words, message):
    monkeypatch.setattr("weft.hardware.query.has_gpu", lambda: False)
    backend = () if "--backend" in words or ("--gpus" in words and "--ranks" not in words) else ("--backend", "gloo")
    code, out, err = command("comm", *words, *backend)
    assert (code, out) == (2, "") and message in " ".join(err.split())


def test_more_ranks_than_gpus(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    code, _, err = command("comm", "all_reduce", "--gpus", "4")
    assert code == 2 and "4 ranks want a GPU each; PyTorch sees 2: --gpus 2" in err


def test_port_taken_by_another_program(command):
    import socket

    with socket.socket() as s:
        s.bind(("0.0.0.0", 0))
        s.listen()
        code, _, err = command("comm", "barrier", "--ranks", 2, "--backend", "gloo", "--port", s.getsockname()[1])
    assert code == 1 and "is taken on this machine" in err


def test_collective_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from weft.comm import COLLECTIVES\nmine = COLLECTIVES['broadcast']\n")
    assert [c.name for c in find([str(file), "barrier"])] == ["broadcast", "barrier"]
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match="assigns no"):
        find([str(file)])
    with pytest.raises(UnknownName):
        find(["allreduce_"])
    assert all(isinstance(c, Collective) for c in find([])) and set(ITEM_BYTES) == set(DTYPES)
