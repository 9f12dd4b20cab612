"""The floor: definition, registry, records, timing, judgement of errors, configurations, ceilings."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from where import ROOT, plain_environment

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import records, registry, timing  # noqa: E402
from weft.bench.errors import judge  # noqa: E402
from weft.definition import Cost, Implementation, Operator, Tolerance, UnknownName, Workload, workload  # noqa: E402
from weft.hardware.ceilings import Ceilings  # noqa: E402
from weft.operators import configs  # noqa: E402
from weft.operators.configs import Configurations, bucket, grid_of  # noqa: E402
from weft.records import Measurement, Store  # noqa: E402
from weft.source import source_hash  # noqa: E402
from weft.timing import ImpossibleTime, Timer, Timing, paired_ratio, quantile  # noqa: E402

# ---- registry --------------------------------------------------------------------------------------------------------


def test_unknown_names_list_what_exists_and_the_nearest():
    softmax = registry.get("softmax")
    attempts = [
        (lambda: registry.get("softmx"), "unknown operator 'softmx'; did you mean 'softmax'?", "vector_add"),
        (lambda: registry.select(["matmul", "sofmax"]), "'sofmax'; did you mean 'softmax'?", "rms_norm"),
        (lambda: softmax.find("tritn"), "implementation of 'softmax' 'tritn'; did you mean 'triton'?", "torch.compile"),
        (lambda: list(softmax.cases("benhc")), "workload set of 'softmax' 'benhc'; did you mean 'bench'?", "verify"),
        (
            lambda: list(softmax.cases("verify", ["bf61"])),
            "unknown dtype of 'softmax' 'bf61'; did you mean 'bf16'?",
            "fp32",
        ),
        (lambda: softmax.parse("M=1,K=2"), "unknown axis of 'softmax' 'K'", "M, N"),
    ]
    for attempt, words, known in attempts:
        with pytest.raises(UnknownName, match=re.escape(words)) as caught:
            attempt()
        assert known in str(caught.value).partition("there are:")[2]
        assert "\n" not in str(caught.value)


def test_a_name_unlike_any_other_gets_no_hint():
    with pytest.raises(UnknownName) as caught:
        registry.get("zzzzzzzz")
    assert "did you mean" not in str(caught.value) and "softmax" in str(caught.value)


def test_ops_says_what_operators_there_are():
    from weft import ops

    with pytest.raises(AttributeError, match=r"no operator 'softmx' \(there are: .*softmax"):
        _ = ops.softmx
    with pytest.raises(UnknownName, match="did you mean 'softmax'"):
        ops.explain("softmx")
    assert set(registry.names()) <= set(dir(ops))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty operators folder in place of weft's."""
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    registry.modules.cache_clear()
    yield tmp_path
    registry.modules.cache_clear()


def operator_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_an_operator_is_found_by_where_it_lies(folder):
    operator_file(folder / "toys" / "double.py", "double = Operator(name='double')\n")
    operator_file(folder / "toys" / "triple" / "__init__.py", "triple: Operator = Operator(\n    name='triple')\n")
    operator_file(folder / "toys" / "kernels.py", "double = Operator(name='double')\n")  # not of its file's name
    operator_file(folder / "toys" / "notes.py", "# notes = Operator(\n")
    operator_file(folder / "halve.py", "halve = Operator(name='halve')\n")  # in no family
    assert registry.modules() == {
        "double": "weft.operators.toys.double",
        "triple": "weft.operators.toys.triple",
    }
    assert registry.family("triple") == "toys"


def test_an_operator_defined_twice_is_an_error_that_names_both(folder):
    operator_file(folder / "a" / "double.py", "double = Operator(name='double')\n")
    operator_file(folder / "b" / "double.py", "double = Operator(name='double')\n")
    with pytest.raises(
        ImportError, match=r"'double' is defined twice: in weft\.operators\.a\.double and in .*b/double"
    ):
        registry.names()


def test_a_missing_triton_is_an_error_with_the_install_line(folder, monkeypatch):
    import weft.operators

    operator_file(folder / "toys" / "double.py", "import triton_of_another_world\ndouble = Operator()\n")
    operator_file(
        folder / "toys" / "triple.py", "raise ModuleNotFoundError('no', name='triton.language')\ntriple = Operator()\n"
    )
    monkeypatch.setattr(weft.operators, "__path__", [str(folder)])
    with pytest.raises(
        ModuleNotFoundError, match=r"need triton.language, which is not installed: pip install 'weft\[gpu\]'"
    ):
        registry.get("triple")
    with pytest.raises(ModuleNotFoundError, match="triton_of_another_world"):  # not PyTorch's absence: as it is
        registry.get("double")


def test_the_ladder_is_left_out_unless_it_is_asked_for():
    softmax = registry.get("softmax")
    usual, all_of_them = registry.implementations(softmax), registry.implementations(softmax, ladder=True)
    assert all(i.rung is None for i in usual) and len(all_of_them) - len(usual) == 8
    assert [i.name for i in registry.implementations(softmax, ["torch"])] == ["torch"]


# ---- definition ------------------------------------------------------------------------------------------------------


def toy(**changed) -> Operator:
    return Operator(
        **{
            "name": "toy",
            "axes": {"M": "rows", "N": "columns"},
            "inputs": lambda w, g, device: {},
            "reference": lambda: None,
            "cost": lambda w, direction: Cost(1, 1),
            "options": {"layout": ("sliced", "strided"), "dim": range(-2, 2), "weight": (True, False)},
            "workloads": {
                "verify": [workload(M=1, N=2), workload("bf16", M=3, N=4)],
                "bench": [workload(M=1, N=2, layout="sliced", dim=0, weight=True)],
            },
            **changed,
        }
    )


@pytest.mark.parametrize(
    ("text", "axes", "options"),
    [
        ("M=4096,N=5000", {"M": 4096, "N": 5000}, {}),
        ("N=5, M=4", {"M": 4, "N": 5}, {}),
        ("M=4k,N=2**20", {"M": 4096, "N": 2**20}, {}),
        ("M=1m,N=2G", {"M": 2**20, "N": 2**31}, {}),
        ("M=0,N=0", {"M": 0, "N": 0}, {}),
        (
            "M=1,N=2,layout=sliced,dim=-1,weight=False",
            {"M": 1, "N": 2},
            {"layout": "sliced", "dim": -1, "weight": False},
        ),
    ],
)
def test_parse_reads_what_is_written(text, axes, options):
    parsed = toy().parse(text, "fp16")
    assert (dict(parsed.axes), dict(parsed.options), parsed.dtype) == (axes, options, "fp16")
    assert toy().parse(str(parsed), "fp16") == parsed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("M=1", "lacks N: write M=4096,N=4096"),
        ("", "lacks M, N"),
        ("M", "part 'M' of 'toy' should read NAME=VALUE"),
        ("M=x,N=1", "size of axis M is 'x'; expected a whole number"),
        ("M=1.5,N=1", "size of axis M is '1.5'"),
        ("M=-1,N=1", "size of axis M is -1; expected 0"),
        ("M=,N=1", "size of axis M is ''"),
        ("M=2**64,N=1", "expected 0 or more, and under 2**62"),
        ("M=2**,N=1", "size of axis M is '2**'"),
        ("M=1,N=1,Q=3", "unknown axis of 'toy' 'Q'"),
        ("M=1,N=1,M=2", "says M twice"),
        ("M=1,N=1,dim=0,dim=1", "says dim twice"),
        ("M=2**40,N=2**40", "expected under 2**59"),
        ("M=1,N=1,dim=7", "option dim of 'toy' is 7; expected a whole number, -2 … 1"),
        ("M=1,N=1,dim=x", "option dim of 'toy' is x"),
        ("M=1,N=1,dim=True", "option dim of 'toy' is True"),
        ("M=1,N=1,layout=slcied", "unknown layout of 'toy' 'slcied'; did you mean 'sliced'?"),
        ("M=1,N=1,layout=3", "unknown layout of 'toy' '3'"),
        ("M=1,N=1,weight=no", "unknown weight of 'toy' 'no'"),
    ],
)
def test_parse_says_what_is_wrong(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        toy().parse(text)


HUGE = "from weft.definition import _size\ntry: _size('M', '9**999999999')\nexcept ValueError as error: print(error)"


def test_a_huge_exponent_is_refused_before_it_is_computed():
    command = [sys.executable, "-c", HUGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=8, env=plain_environment())
    assert "size of axis M is" in done.stdout and "expected" in done.stdout


def test_cases_give_each_workload_in_each_dtype_and_pinned_ones_once():
    assert [(w["M"], w.dtype) for w in toy().cases("verify")] == [(1, "fp32"), (1, "fp16"), (1, "bf16"), (3, "bf16")]
    assert [(w["M"], w.dtype) for w in toy().cases("verify", ["fp16"])] == [(1, "fp16")]


def test_cost_adds_up():
    cost = Cost(reads=10, writes=6, matrix_flops={"bf16": 100.0, "tf32": 20.0}, vector_flops=3, special_ops=1)
    assert cost.bytes_moved == 16 and cost.flops == 124


def test_an_implementation_says_why_it_cannot_run():
    def made(**declared):
        return Implementation("toy", "one", lambda: None, **{"backend": "triton", **declared})

    assert made(arch=">=sm_90").absent("cuda", 90) == ""
    assert made(arch=">=sm_90").absent("cuda", 86) == "needs >=sm_90, this GPU is sm_86"
    assert made(devices=("cuda",)).absent("cpu") == "runs on cuda only"
    assert "no-such-distribution is not installed" in made(requires="no-such-distribution").absent("cpu")
    assert made(arch=">=sm_90").architectures == [90, 100, 120]
    assert made(backend="torch").architectures == [] and not made(backend="torch").ours


def test_an_implementation_is_registered_once_and_a_direction_is_known():
    operator = toy()
    operator.implementation("triton")(lambda: None)
    with pytest.raises(ValueError, match="'toy' already has an implementation 'triton'"):
        operator.implementation("triton")(lambda: None)
    with pytest.raises(UnknownName, match="unknown direction 'backwards'; did you mean 'backward'"):
        toy(directions=("forward", "backwards"))
    assert operator.folder == Path(__file__).parent


# ---- records ---------------------------------------------------------------------------------------------------------


def measurement(**changed) -> Measurement:
    given = {"operator": "softmax", "implementation": "triton", "direction": "forward", "workload": "M=1,N=2"}
    return Measurement(**{**given, "dtype": "fp32", "time_us": 1.5, "gpu": "NVIDIA H200", **changed})


def test_what_is_appended_is_read(tmp_path):
    store = Store(tmp_path)
    first, second = measurement(details={"a": 1}), measurement(time_us=2.0, versions={"torch": "2.13.0"})
    path = store.append(first.gpu, first.operator, first)
    store.append(second.gpu, second.operator, second)
    store.append("CPU (2 cores)", "softmax", measurement(gpu="CPU (2 cores)"))
    assert path == tmp_path / "nvidia-h200" / "softmax.jsonl"
    assert store.read("NVIDIA H200") == [first, second]
    assert len(store.read(name="softmax")) == 3 and store.read(name="matmul") == []
    assert store.machines() == ["cpu-2-cores", "nvidia-h200"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_store_that_is_not_there_is_empty(tmp_path):
    assert Store(tmp_path / "none").read() == [] and Store(tmp_path / "none").machines() == []


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_cut_line_is_passed_over_and_mended_by_the_next_append(tmp_path, cut):
    store = Store(tmp_path)
    path = store.append("gpu", "softmax", measurement(time_us=1.0))
    store.append("gpu", "softmax", measurement(time_us=2.0))
    whole = path.read_bytes()
    path.write_bytes(whole[: -1 - cut])  # a crash in the middle of the last line
    assert [m.time_us for m in store.read()] == [1.0]
    store.append("gpu", "softmax", measurement(time_us=3.0))
    assert [m.time_us for m in store.read()] == [1.0, 3.0]
    assert path.read_bytes().endswith(b"}\n")


def test_only_the_newline_cut_loses_nothing(tmp_path):
    store = Store(tmp_path)
    path = store.append("gpu", "softmax", measurement(time_us=1.0))
    path.write_bytes(path.read_bytes()[:-1])
    store.append("gpu", "softmax", measurement(time_us=2.0))
    assert [m.time_us for m in store.read()] == [1.0, 2.0]


def test_records_of_another_schema_are_read(tmp_path):
    store = Store(tmp_path)
    """With fields that this one does not know; but what a later weft calls another schema may mean something else."""
    store = Store(tmp_path)
    store.append("gpu", "softmax", {**dataclasses.asdict(measurement()), "from_the_future": 1, "schema": 0})
    store.append("gpu", "softmax", {**dataclasses.asdict(measurement()), "schema": 99})
    store.append("gpu", "softmax", {"operator": "softmax", "note": "no measurement"})
    assert [(m.operator, m.schema) for m in store.read()] == [("softmax", 0)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("time_us", v) for v in (-5, 0, None, "1")] + [("workload", ["a"]), ("machine", None), ("time", 5), ("ours", 1)],
)
def test_what_is_no_measurement_is_passed_over(tmp_path, field, value):
    store = Store(tmp_path)
    store.append("gpu", "softmax", measurement())
    store.append("gpu", "softmax", {**dataclasses.asdict(measurement(time_us=9.0)), field: value})
    store.append("gpu", "softmax", {"implementation": "x"})
    assert [m.time_us for m in store.read()] == [1.5]


def test_what_is_no_file_or_no_record_stops_no_reader(tmp_path):
    store = Store(tmp_path)
    path = store.append("gpu", "softmax", measurement())
    (path.parent / "folder.jsonl").mkdir()
    os.mkfifo(path.parent / "fifo.jsonl")
    (path.parent / "loop.jsonl").symlink_to("loop.jsonl")
    with open(path, "a") as file:
        file.write("[" * 200_000 + "\n" + "9" * 5000 + "\n" + '{"a":' * 100_000 + "\n")
    assert len(store.read()) == 1


def test_a_store_that_cannot_be_written_says_so_before_anything_is_measured(tmp_path):
    (tmp_path / "results").write_text("a file")
    with pytest.raises(OSError, match=r"records cannot be saved in .*WEFT_RESULTS names another place"):
        Store(tmp_path / "results").probe("gpu")


def test_a_number_that_json_does_not_know_is_refused(tmp_path):
    with pytest.raises(ValueError):
        Store(tmp_path).append("gpu", "softmax", measurement(time_us=math.nan))
    assert Store(tmp_path).read() == []


APPENDER = """
import sys
from weft.records import Measurement, Store
from weft.source import source_hash  # noqa: E402
store = Store(sys.argv[1])
n = 0
while True:
    store.append("gpu", "softmax", Measurement("softmax", "triton", "forward", f"N={n}", "fp32", 1.0,
                                                   details={"x": "y" * 20000}))
    n += 1
    print(n, flush=True)
"""


def test_a_kill_in_the_middle_of_appending_leaves_valid_lines(tmp_path):
    store, lost = Store(tmp_path), 0
    for round_number in range(3):
        before = len(store.read())
        with subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=plain_environment()
        ) as process:
            for _ in range(10):
                process.stdout.readline()
            time.sleep(0.003 * round_number)
            process.send_signal(signal.SIGKILL)
            reported = 10 + sum(1 for _ in process.stdout)
        kept = store.read()[before:]
        assert [m.workload for m in kept] == [f"N={n}" for n in range(len(kept))]
        assert len(kept) >= reported  # what append returned from is on disk
        lost += len(kept) < reported
    path = store.path("gpu", "softmax")
    store.append("gpu", "softmax", measurement())
    assert path.read_bytes().endswith(b"}\n") and store.read()[-1] == measurement()
    assert not lost


def test_latest_keeps_the_newest_of_each_point():
    old, new, other = measurement(time_us=1.0), measurement(time_us=2.0), measurement(dtype="bf16")
    assert records.latest([old, other, new]) == [new, other]


@pytest.mark.parametrize(
    ("text", "folder"),
    [("NVIDIA H200", "nvidia-h200"), ("  A/B (2 cores) ", "a-b-2-cores"), ("", "unknown"), ("../x", "..-x")],
)
def test_slug_is_one_safe_folder_name(text, folder):
    assert records.slug(text) == folder and "/" not in records.slug(text)


def test_source_hash_follows_what_a_measurement_depends_on(tmp_path):
    """The operator's module, what it imports, the CUDA it names, its configurations and the timer; nothing else."""
    toys = tmp_path / "operators" / "toys"
    text = {
        tmp_path / "timing.py": "a",
        tmp_path / "operators" / "launch.py": "a",
        tmp_path / "operators" / "rows.cuh": "a",
        toys / "kernels.py": "from weft.operators.launch import Plan\nc = Configurations(__file__, 'x')\n".replace(
            "'", '"'
        ),
        toys / "cluster.py": 'SOURCE = "cluster.cu"\n',
        toys / "cluster.cu": '#include "rows.cuh"\n#include "stages.cuh"\n',
        toys / "stages.cuh": '#include "beside.cuh"\n',
        toys / "beside.cuh": "a",
        tmp_path / "operators" / "beside.cuh": "a",
        toys
        / "toy.py": "from weft.operators.toys import cluster\nfrom weft.operators.toys.kernels import (\n    plans,\n)\n",
        toys / "configs" / "sm_90.json": '{"x,1": {"BLOCK": 1}, "y,1": {"BLOCK": 1}}',
        toys / "README.md": "a",
        toys / "other.py": "a",
        tmp_path / "operators" / "call.py": "a",
    }
    for path, content in text.items():
        operator_file(path, content)

    def hash_with(path, change):
        path.write_text(change)
        changed = source_hash(toys / "toy.py", tmp_path)
        path.write_text(text[path])
        return changed

    before = source_hash(toys / "toy.py", tmp_path)
    follows = [p for p in text if hash_with(p, text[p] + " ") != before]
    configs = toys / "configs" / "sm_90.json"
    assert {p.name for p in follows} == {
        "timing.py", "launch.py", "rows.cuh", "kernels.py", "cluster.py", "cluster.cu", "toy.py",
        "stages.cuh", "beside.cuh",
    }  # fmt: skip
    assert tmp_path / "operators" / "beside.cuh" not in follows, "the header beside the file that includes it is meant"
    assert hash_with(configs, text[configs].replace('"y,1": {"BLOCK": 1}', '"y,1": {"BLOCK": 2}')) == before
    assert hash_with(configs, text[configs].replace('"x,1": {"BLOCK": 1}', '"x,1": {"BLOCK": 2}')) != before


def test_the_commit_is_what_the_variable_says(monkeypatch):
    monkeypatch.setenv("WEFT_COMMIT", "abc123")
    assert records.commit() == "abc123"


# ---- timing ----------------------------------------------------------------------------------------------------------


def test_quantiles_are_linear_between_sorted_values():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.2) == 2.0
    assert (quantile([5.0], 0.8), quantile([1.0, 2.0], 0.0), quantile([1.0, 2.0], 1.0)) == (5.0, 1.0, 2.0)


def test_ratios_are_taken_pair_by_pair():
    """The machine slows down threefold; the ratio does not notice, one of medians taken apart would."""
    ours, peer = Timing([1.0, 1.0, 3.0, 3.0]), Timing([2.0, 2.0, 6.0, 6.0])
    assert paired_ratio(peer, ours) == (2.0, 2.0, 2.0)
    assert paired_ratio(Timing([1.0, 2.0, 9.0]), Timing([1.0, 1.0, 3.0]))[0] == 2.0
    with pytest.raises(ValueError):
        paired_ratio(Timing([1.0]), Timing([1.0, 2.0]))


def test_calls_are_interleaved_rotated_and_take_turns_at_going_first():
    order: list[str] = []
    calls = {name: [functools.partial(order.append, f"{name}{i}") for i in range(2)] for name in "abc"}
    timings = Timer("cpu", budget_s=0.0, least=4, most=9).measure(calls)
    measured = order[-12:]
    assert measured == ["a0", "b0", "c0", "b1", "c1", "a1", "c0", "a0", "b0", "a1", "b1", "c1"]
    assert all(order.count(f"{name}{i}") >= 2 for name in "abc" for i in range(2))  # every set was warmed up
    assert all(len(t.times_us) == len(t.host_times_us) == 4 for t in timings.values())


def test_repetitions_stay_between_least_and_most():
    def count(**limits) -> int:
        return len(Timer("cpu", **limits).measure({"a": [lambda: None]})["a"].times_us)

    assert count(budget_s=60.0, least=1, most=7) == 7
    assert count(budget_s=0.0, least=3, most=7) == 3


def test_a_longer_call_takes_longer():
    timings = Timer("cpu", budget_s=0.0, least=3).measure(
        {"short": [lambda: time.sleep(0.001)], "long": [lambda: time.sleep(0.03)]}
    )
    ratio, low, high = paired_ratio(timings["long"], timings["short"])
    assert timings["short"].median_us >= 1000 and timings["long"].median_us >= 30000
    assert 1 < low <= ratio <= high


def test_a_time_under_the_theoretical_bandwidth_is_an_error(monkeypatch):
    def measure(microseconds: float, **options) -> dict[str, Timing]:
        timer = Timer("cuda", budget_s=0.0, least=3, **options)
        monkeypatch.setattr(timer, "_once_cuda", lambda call, expected: (microseconds, 1.0))
        return timer.measure({"too good": [lambda: None]}, least_us=2.0)

    with pytest.raises(ImpossibleTime, match=r"too good: 1\.00 us, under the 2\.00 us"):
        measure(1.0)
    assert measure(2.1)["too good"].median_us == 2.1
    assert measure(1.0, cold=False)["too good"].median_us == 1.0  # a warm cache may beat the memory


def test_a_comparison_leaves_out_what_cannot_have_moved_its_bytes(monkeypatch):
    from weft.bench.compare import Bench
    from weft.hardware import query

    op, said = registry.get("vector_add"), []
    bench = Bench("cpu", Ceilings("cpu"), budget_s=0.0, say=said.append)
    times = {"torch": 2.1, "numpy": 1.9}
    real = bench.timer.measure

    def measure(calls, **options):
        timed = {name: [lambda us=times[name]: us] for name in calls}
        monkeypatch.setattr(bench.timer, "_once_cpu", lambda call, expected: (call(), 1.0))
        return real(timed, **options)

    monkeypatch.setattr(bench.timer, "cold", True)
    monkeypatch.setattr(bench.timer, "measure", measure)
    monkeypatch.setattr(query, "theoretical_bandwidth", lambda: 6e6)  # 12 bytes in 2 us
    peers = [dataclasses.replace(op.find("torch"), name=name) for name in times]
    measured = bench.compare(op, workload("fp32", N=1), "forward", peers)
    assert [m.implementation for m in measured] == ["torch"]
    assert len(said) == 1 and said[0].startswith(
        "left out of vector_add forward at N=1 fp32: numpy: 1.90 us, under the 2.00 us"
    )


def test_a_timer_on_the_cpu_says_warm():
    assert (Timer("cpu").cache, Timer("cuda").cache, Timer("cuda", cold=False).cache) == ("warm", "cold", "warm")


@pytest.mark.gpu
def test_cold_times_on_the_gpu_are_possible_and_include_the_memory():
    from weft.hardware.query import theoretical_bandwidth

    x = torch.randn(2**24, device="cuda")
    least_us = 2 * x.numel() * 4 / theoretical_bandwidth() * 1e6
    t = Timer("cuda").measure({"clone": [x.clone]}, least_us=least_us)["clone"]
    assert least_us < t.median_us < 4 * least_us
    assert timing.host_time_us(x.clone) < t.median_us


# ---- judgement -------------------------------------------------------------------------------------------------------

RELATIVE = Tolerance(scale="element")


def draw(*shape: int, seed: int = 0, offset: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset


@pytest.mark.parametrize("scale", ["element", "row", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_rounded_reference_passes_and_zeros_do_not(scale, dtype):
    want = draw(7, 33, offset=0.0)
    right = want.to(dtype)
    assert judge([right], [want], [right], Tolerance(scale=scale)).ok
    verdict = judge([torch.zeros_like(right)], [want], [right], Tolerance(scale=scale))
    assert not verdict.ok and verdict.share > 10


def test_one_wrong_element_is_named():
    want = draw(4, 100)
    got = want.float().clone()
    got[2, 17] += 0.01
    verdict = judge([got], [want], [want.float()], RELATIVE)
    assert not verdict.ok and "1 of 400 elements, first at (2, 17)" in verdict.reason


def test_the_maximum_and_the_mean_may_be_multiples_of_pytorchs_own():
    want = draw(1000).abs() + 1
    baseline = (want * 1.01).float()  # PyTorch itself is off by 1 % everywhere
    everywhere = {
        error: judge([(want * (1 + error)).float()], [want], [baseline], RELATIVE) for error in (0.019, 0.021)
    }
    assert everywhere[0.019].ok and everywhere[0.019].share == pytest.approx(0.95, rel=1e-3)
    assert not everywhere[0.021].ok and "root mean square" in everywhere[0.021].reason
    for error, ok in ((0.07, True), (0.09, False)):  # twice four root mean squares
        got = want.clone()
        got[5] *= 1 + error
        assert judge([got.float()], [want], [baseline], RELATIVE).ok == ok
    assert judge([(want * 1.025).float()], [want], [baseline], Tolerance(scale="element", multiple=3.0)).ok


def test_the_floor_is_counted_in_units_of_last_place():
    want = torch.ones(1, dtype=torch.float64)
    off = want.float() * (1 + 2**-22)  # two units of last place where PyTorch makes no error at all
    assert not judge([off], [want], [want.float()], Tolerance(scale="element", ulps=1.0)).ok
    assert judge([off], [want], [want.float()], Tolerance(scale="element", ulps=4.0)).ok
    assert judge([off], [want], [want.float()], Tolerance(scale="element", ulps=1.0), terms=16).ok


def test_errors_are_relative_to_the_scale():
    want = torch.tensor([[1e-6, 1.0, 1.0, 1.0], [1e-6, 1e-6, 1e-6, 1e-6]], dtype=torch.float64)
    first, second = want.float().clone(), want.float().clone()
    first[0, 0] += 1e-8  # small against its row
    second[1, 0] += 1e-8  # large against its row, small against the tensor
    verdicts = {
        scale: [judge([got], [want], [want.float()], Tolerance(scale=scale)).ok for got in (first, second)]
        for scale in ("element", "row", "tensor")
    }
    assert verdicts == {"element": [False, False], "row": [True, False], "tensor": [True, True]}
    given = judge([second], [want], [want.float()], RELATIVE, scales=[torch.ones(2, 1, dtype=torch.float64)])
    assert given.ok


@pytest.mark.parametrize(
    ("got", "ok"),
    [
        ([1.0, math.nan, math.inf, -math.inf], True),
        ([math.nan, math.nan, math.inf, -math.inf], False),
        ([1.0, 2.0, math.inf, -math.inf], False),
        ([1.0, math.nan, math.nan, -math.inf], False),
        ([1.0, math.nan, -math.inf, -math.inf], False),
        ([1.0, math.nan, math.inf, -3e38], False),
        ([math.inf, math.nan, math.inf, -math.inf], False),
    ],
)
def test_nan_and_infinities_must_be_where_pytorch_puts_them(got, ok):
    want = torch.tensor([1.0, math.nan, math.inf, -math.inf], dtype=torch.float64)
    for tolerance in (RELATIVE, Tolerance(exact=True)):
        verdict = judge([torch.tensor(got)], [want], [want.float()], tolerance)
        assert verdict.ok == ok, tolerance
        assert ok or "PyTorch has" in verdict.reason


def test_exact_means_bit_for_bit():
    want = draw(100)
    right = want.float()
    off = right.clone()
    off[3] = torch.nextafter(off[3], torch.tensor(9.0))
    assert judge([right.clone()], [want], [right], Tolerance(exact=True)).ok
    verdict = judge([off], [want], [right], Tolerance(exact=True))
    assert not verdict.ok and "1 of 100 elements, first at (3,)" in verdict.reason


def test_integers_are_compared_exactly():
    want = torch.arange(10)
    assert judge([want.clone()], [want], [want], Tolerance()).ok
    assert not judge([want + (want == 4).long()], [want], [want], Tolerance()).ok


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([torch.ones(2, 3)], "shape is torch.Size([2, 3]); expected torch.Size([3, 2])"),
        ([torch.ones(3, 2, dtype=torch.float64)], "dtype is torch.float64; expected torch.float32"),
        ([torch.ones(3, 2, device="meta")], "device is meta; expected cpu"),
        ([], "0 results; expected 1"),
        ([torch.ones(3, 2)] * 2, "2 results; expected 1"),
    ],
)
def test_another_form_is_wrong(got, words):
    want = torch.ones(3, 2)
    verdict = judge(got, [want.double()], [want], Tolerance())
    assert not verdict.ok and verdict.reason == words


def test_the_wrong_one_of_several_results_is_named():
    want = [draw(5, seed=1), draw(5, seed=2)]
    right = [w.float() for w in want]
    verdict = judge([right[0], right[0]], want, right, Tolerance())
    assert not verdict.ok and verdict.reason.startswith("result 1: ")


def test_empty_results_pass_if_their_form_is_right():
    empty = torch.empty(0, 7)
    assert judge([empty.clone()], [empty.double()], [empty], Tolerance()).ok
    assert not judge([torch.empty(7, 0)], [empty.double()], [empty], Tolerance()).ok


def test_scalars_are_judged():
    want = torch.tensor(2.0, dtype=torch.float64)
    assert judge([want.float()], [want], [want.float()], Tolerance()).ok
    assert not judge([want.float() * 1.1], [want], [want.float()], Tolerance()).ok


# ---- configurations --------------------------------------------------------------------------------------------------


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(Configurations, "all", [])
    monkeypatch.setattr(configs, "target_sm", lambda device: 90)
    return Configurations(str(tmp_path / "kernels.py"), "forward", lambda sm, dtype, n: {"BLOCK": sm * n})


def test_measured_configurations_come_before_the_heuristic(configuration, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sm_90.json").write_text('{"forward,16-bit,64": {"BLOCK": 7}}')
    assert configuration(torch.device("cpu"), torch.bfloat16, 64) == {"BLOCK": 7}
    assert configuration(torch.device("cpu"), torch.float16, 64) == {"BLOCK": 7}  # the same bytes
    assert configuration(torch.device("cpu"), torch.float32, 64) == {"BLOCK": 90 * 64}
    assert configuration(torch.device("cpu"), torch.bfloat16, 65) == {"BLOCK": 90 * 65}


def test_a_trial_comes_before_everything_and_keys_are_noted(configuration):
    configuration.asked = []
    configuration.trial = {"BLOCK": 1}
    assert configuration(torch.device("cpu"), torch.float32, 64) == {"BLOCK": 1}
    assert configuration.asked == [(90, torch.float32, 64)]


def test_written_configurations_are_read_and_earlier_ones_stay(configuration, tmp_path):
    at = torch.device("cpu")
    assert configuration(at, torch.float32, 64) == {"BLOCK": 90 * 64}
    configuration.write(90, {"forward,fp32,64": {"BLOCK": 3}, "forward,fp32,1024": {"BLOCK": 4}})
    path = configuration.write(90, {"forward,fp32,128": {"BLOCK": 5}})
    assert [configuration(at, torch.float32, n)["BLOCK"] for n in (64, 128, 1024)] == [3, 5, 4]
    assert list(json.loads(path.read_text())) == ["forward,fp32,64", "forward,fp32,128", "forward,fp32,1024"]
    assert path == tmp_path / "configs" / "sm_90.json"


def test_buckets_are_powers_of_two_and_grids_are_complete():
    assert [bucket(n) for n in (0, 1, 2, 3, 1024, 1025)] == [1, 1, 2, 4, 1024, 2048]
    assert bucket(3, 16) == 16
    assert list(grid_of({"A": (1, 2), "B": (3,)})) == [{"A": 1, "B": 3}, {"A": 2, "B": 3}]


def test_committed_configurations_name_kernels_that_exist():
    registry.select()
    known = {(c.folder, c.name) for c in Configurations.all}
    switches = {"DIAGONAL", "SHARED", "WALK"}  # off is 0; all others are sizes
    for path in (ROOT / "src" / "weft" / "operators").rglob("configs/sm_*.json"):
        for key, config in json.loads(path.read_text()).items():
            assert (path.parent, key.split(",")[0]) in known, f"{path}: {key}"
            assert config and all(type(v) is int for v in config.values()), f"{path}: {key}"
            assert all(v > 0 or (v == 0 and k in switches) for k, v in config.items()), f"{path}: {key}"


# ---- ceilings --------------------------------------------------------------------------------------------------------


def test_the_limit_is_taken_at_the_nearest_mix_of_reads_and_writes():
    ceilings = Ceilings("cuda", {(1, 0): 100.0, (0, 1): 50.0, (1, 1): 80.0, (2, 1): 90.0})
    for reads, writes, mix in ((9, 0, (1, 0)), (0, 9, (0, 1)), (5, 5, (1, 1)), (66, 34, (2, 1)), (97, 3, (1, 0))):
        cost = Cost(reads=reads, writes=writes)
        microseconds, name = ceilings.limit(cost)
        assert name == f"memory {mix[0]}:{mix[1]}"
        assert microseconds == pytest.approx((reads + writes) / ceilings.bandwidth[mix] * 1e6)


def test_the_slower_of_memory_and_matrix_unit_binds():
    ceilings = Ceilings("cuda", {(1, 1): 1e12}, {"bf16": 1e15})
    assert ceilings.limit(Cost(10**6, 10**6, {"bf16": 1e6}))[1] == "memory 1:1"
    assert ceilings.limit(Cost(10**6, 10**6, {"bf16": 1e13})) == (pytest.approx(1e4), "bf16 matrix")
    assert ceilings.limit(Cost(10**6, 10**6, {"fp8": 1e13}))[1] == "memory 1:1"  # a rate that was not measured
    assert ceilings.limit(Cost()) == (0.0, "")
    assert ("bf16 matrix", "matrix rate", 1e15, "FLOP/s") in list(ceilings.rows())


def test_workloads_read_like_dictionaries_of_sizes():
    w = Workload({"M": 3}, "bf16", {"layout": "sliced"})
    assert (w["M"], w.option("layout"), w.option("dim", -1), w.bytes_per_element) == (3, "sliced", -1, 2)
    assert w.at("fp32").dtype == "fp32" and str(w) == "M=3,layout=sliced"
    assert workload("bf16", M=3, layout="sliced") == w
