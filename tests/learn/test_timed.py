"""Timing by the checker's clock. It takes a GPU for a time that means something; that cheats are rejected shows anywhere."""

import pytest

from weft.learn import dev, process
from weft.learn.judge import judge

NUMBERS = {"dram_gb_s": 1.0, "fp32_gflop_s": 1.0}
PRODUCT = "x @ torch.ones(x.shape[1], device=x.device)"


@pytest.fixture(scope="module")
def gpu():
    with process.Server("gpu") as server:
        yield server


@pytest.fixture
def timed(sums, servers, gpu, tmp_path):
    """The verdict on a function whose timed calls have more than 100 rows."""

    def verdict(rows):
        source = dev.by_suffix(sums.solution("en"))[".py"]
        file = tmp_path / "01_sums.py"
        file.write_text(source[: source.index("def rows")] + rows + "\n")
        return judge(sums, {".py": file}, servers.of(sums), gpu=gpu, machine=NUMBERS)

    return verdict


def test_a_time_is_a_share_of_the_limit(timed):
    verdict = timed(f"def rows(x):\n    return {PRODUCT}")
    assert verdict.passed and "fast" in verdict.reached
    (note,) = verdict.notes
    assert "rows(x): " in note.en and "% of the limit (133.1 µs, memory)" in note.en


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(
            "KEPT = {}\ndef rows(x):\n    k = x.data_ptr()\n    if len(x) < 100 or k not in KEPT:\n"
            f"        KEPT[k] = {PRODUCT}\n    return KEPT[k]",
            id="remembers by address",
        ),
        pytest.param(
            "CALLS = [0, None]\ndef rows(x):\n    CALLS[0] += 1\n    if len(x) < 100 or CALLS[0] % 2:\n"
            f"        CALLS[1] = {PRODUCT}\n    return CALLS[1]",
            id="leaves out every second call",
        ),
        pytest.param(
            f"def rows(x):\n    return {PRODUCT} if len(x) < 100 else torch.empty(len(x), device=x.device)",
            id="right for the tests' shapes alone",
        ),
        pytest.param(
            f"class Later(torch.Tensor):\n    pass\n\n\ndef rows(x):\n    y = {PRODUCT}\n"
            "    return y.as_subclass(Later) if len(x) > 100 else y",
            id="computed when it is looked at",
        ),
    ],
)
def test_outputs_of_the_timed_rounds_must_be_right(timed, rows):
    verdict = timed(rows)
    assert verdict.failed == "right" and "in the timed rounds" in verdict.why.en


def test_the_clock_is_the_checker_s(timed):
    slow = f"    if len(x) > 100:\n        time.sleep(0.02)\n    return {PRODUCT}"
    (note,) = timed(f"import time\n\n\ndef rows(x):\n{slow}").notes
    assert float(note.en.split(": ")[1].split(" µs")[0].replace(",", "")) > 15_000
    patched = timed(f"import time\n\ntime.perf_counter = lambda: 0.0\n\n\ndef rows(x):\n{slow}")
    assert patched.failed == "parse" and "replaces `time.perf_counter`" in patched.why.en


def test_too_slow_fails_the_stage_fast(timed, monkeypatch):
    monkeypatch.setitem(NUMBERS, "dram_gb_s", 1e12)
    verdict = timed(f"def rows(x):\n    return {PRODUCT}")
    assert verdict.failed == "fast" and "at least" in verdict.more[0].en


def test_inputs_are_changed_in_a_way_that_shows_in_what_ignores_a_constant():
    import torch

    from weft.learn import timed

    x = torch.randn(8, 64)
    y = x.clone()
    timed.changed([y, 3], 5 / 1024)
    assert (torch.softmax(x, 1) - torch.softmax(y, 1)).abs().max() > 1e-4
    assert (x - x.mean(1, keepdim=True) - y + y.mean(1, keepdim=True)).abs().max() > 1e-3
