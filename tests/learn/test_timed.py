"""Timing by the checker's clock. It takes a GPU for a time that means something; that cheats are rejected shows anywhere."""

import pytest

from weft.learn import course, dev, machine, process
from weft.learn.judge import Servers, judge

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
            f"def rows(x):\n    return {PRODUCT} if len(x) < 100 else torch.zeros(len(x), device=x.device)",
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


KERNEL = "    softmax_kernel[(m,)](x, out, n, BLOCK=triton.next_power_of_2(n))\n"
ELSEWHERE = """    with torch.cuda.stream(torch.cuda.Stream()) if m > 100 else torch.no_grad():
        softmax_kernel[(m,)](x, out, n, BLOCK=triton.next_power_of_2(n))
"""


@pytest.mark.gpu
def test_a_kernel_is_timed_on_the_gpu_and_no_trick_makes_it_faster(tmp_path):
    """Work on another stream is waited for like any other, so it gains nothing."""
    exercise = course.find("softmax")
    solution = dev.by_suffix(exercise.solution("en"))[".py"]
    assert KERNEL in solution
    numbers = machine.numbers(tmp_path)
    file = tmp_path / "06_softmax.py"

    def verdict(source):
        file.write_text(source)
        return judge(exercise, {".py": file}, servers.of(exercise), gpu=servers.gpu(exercise), machine=numbers)

    def us(found):
        said = [found.why.en, *(note.en for note in found.notes)]
        return float(next(s for s in said if " µs, " in s).split(": ")[1].split(" µs")[0].replace(",", ""))

    with Servers() as servers:
        honest = verdict(solution)
        assert honest.failed in (None, "fast"), honest.why.en
        assert us(verdict(solution.replace(KERNEL, ELSEWHERE))) > 0.8 * us(honest)
        never = solution.replace(KERNEL, "    if m < 100:\n    " + KERNEL)
        assert verdict(never).failed == "right"
        kept = "    if m > 100 and x.data_ptr() in KEPT:\n        return KEPT[x.data_ptr()]\n"
        remembered = solution.replace(KERNEL, kept + KERNEL + "    KEPT[x.data_ptr()] = out\n")
        assert verdict(remembered.replace("@triton.jit", "KEPT = {}\n\n\n@triton.jit", 1)).failed == "right"
        for patch in ("torch.cuda.Event.elapsed_time = lambda a, b: 1e-9", "torch.cuda.synchronize = lambda: None"):
            assert verdict(solution.replace("@triton.jit", f"{patch}\n\n\n@triton.jit", 1)).failed == "parse"


def test_inputs_are_changed_in_a_way_that_shows_in_what_ignores_a_constant():
    import torch

    from weft.learn import timed

    x = torch.randn(8, 64)
    y = x.clone()
    timed.changed([y, 3], 5 / 1024)
    assert (torch.softmax(x, 1) - torch.softmax(y, 1)).abs().max() > 1e-4
    assert (x - x.mean(1, keepdim=True) - y + y.mean(1, keepdim=True)).abs().max() > 1e-3
