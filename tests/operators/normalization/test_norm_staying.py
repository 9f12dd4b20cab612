"""Norms by clusters that stay without a GPU: ``staying.cu`` run on a CPU that plays its PTX (``ptx_on_cpu.hpp``) with the
launches that Python computes; which configurations there are, and that none spills."""

from __future__ import annotations

import pytest
from cuda_on_cpu import player_of_cases

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from norms_on_cpu import ADDED, FAR, FP16, FP32, LAYER, RMS, Case, Norms, with_headers  # noqa: E402

from weft.bench.compile_check import resource_usage  # noqa: E402
from weft.definition import SHARED_LIMIT  # noqa: E402
from weft.operators.cuda import compile_cubin  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.normalization import cluster, staying  # noqa: E402
from weft.operators.normalization.kind import Given, Kind  # noqa: E402

ADDED_RMS = Kind(False, True, False, True)
CASES = {
    "fp32": Case(FP32, LAYER, stays=2),
    "fp32 far": Case(FP32, LAYER, FAR, stays=2),
    "fp32 wild": Case(FP32, LAYER, wild=5.0, stays=3),
    "fp32 huge": Case(FP32, LAYER, times=1.5e17, stays=2),
    "fp32 added": Case(FP32, ADDED, FAR, stays=2),
    "three blocks": Case(FP32, LAYER, columns=6144, stays=2),
    "one row": Case(FP32, LAYER, stays=4, rows=1),
    "two rows of one cluster": Case(FP16, LAYER, stays=1, rows=2),
    "fp16": Case(FP16, LAYER, stays=2),
    "fp16 far": Case(FP16, LAYER, FAR, stays=2),
    "fp16 added": Case(FP16, ADDED, FAR, stays=2),
    "rms": Case(FP32, RMS, stays=2),
    "rms added": Case(FP16, ADDED_RMS, stays=2),
}
MISTAKES = {
    "squares about 0": ("fp32 far", "const float d = CENTERED ? f[i] - around : f[i];", "const float d = f[i];"),
    "squares about the first vector's mean": (
        "fp32",
        "squares - fminf(off * (off / EACH), 3.402823466e38f)",
        "squares",
    ),
    "a thread's sum about that mean": ("fp32 far", "off + EACH * around", "off"),
    "means that are not joined": ("fp32", "warp_sum(of.y + count * off * off)", "warp_sum(of.y)"),
    "squares of lanes about lane 0's mean": (
        "fp32",
        "squares - fminf(sum * (sum * inverse_of_all), 3.402823466e38f)",
        "squares",
    ),
    "a product that overflows": (
        "fp32 huge",
        "fminf(sum * (sum * inverse_of_all), 3.402823466e38f)",
        "sum * sum * inverse_of_all",
    ),
    "more blocks than there are": ("three blocks", "const bool there = lane < lanes;", "const bool there = lane < 16;"),
    "the first row's place for all": ("fp32", "ring + turn % PLACES * TENSORS * SLICE", "ring"),
    "a place is not waited for": ("fp32", "phase_wait(&full[place], turn / PLACES & 1);", ""),
    "the parity of the first round": ("fp32", "turn / PLACES & 1", "0"),
    "an exchange is not waited for": ("fp32", "phase_wait(&told[turn % AHEAD], turn / AHEAD & 1);", ""),
    "the exchange's first parity": ("fp32", "turn / AHEAD & 1", "0"),
    "a residual of another row": ("fp16 added", "r + row * r_row + first", "r + first"),
    "the residual is not rounded": ("fp16 added", "unpack(words, f);\n    }\n    return", "}\n    return"),
    "the next row's statistics": ("fp32", "turn % AHEAD][lane % MAX", "(turn + 1) % AHEAD][lane % MAX"),
}


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    return player_of_cases(tmp_path_factory.mktemp("played"), with_headers(staying.SOURCE), Norms, CASES, MISTAKES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    assert play(name) == ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    assert any(play(MISTAKES[mistake][0], mistake, seed) for seed in range(4))


# ---- what it holds and declines -------------------------------------------------------------------------------------------


def given_of(n: int, dtype: torch.dtype, kind: Kind) -> Given:
    x, weight = torch.empty(64, n, dtype=dtype, device="meta"), torch.empty(n, dtype=dtype, device="meta")
    return Given.of(x, x if kind.added else None, weight, weight if kind.biased else None)


def plan_of(n: int, dtype: torch.dtype, kind: Kind, config: dict[str, int]):
    with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
        patch.setattr(staying.configuration, "trial", config)
        return staying.plan(given_of(n, dtype, kind), 1e-5, kind, False)


@pytest.mark.parametrize("kind", [LAYER, RMS, ADDED], ids=["layer norm", "rms norm", "with a residual"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32], ids=["bf16", "fp32"])
def test_every_configuration_fits_and_spills_nothing(dtype, kind):
    for n in (2**16, 2**18):
        for c in staying.candidates(90, dtype, n, kind.centered, kind.added):
            plan = plan_of(n, dtype, kind, c)
            if not c:
                assert plan is None
                continue
            used = resource_usage(compile_cubin(plan.source, plan.expression, 90)[0])
            assert used["STACK"] == 0 and used["SHARED"] <= staying.OWN
            assert (used["SHARED"] + plan.shared_bytes) * c["PER_SM"] <= SHARED_LIMIT[90] + staying.SYSTEM
            assert used["REG"] * plan.block * c["PER_SM"] <= staying.REGISTERS


@pytest.mark.parametrize(
    ("n", "dtype", "kind"), [(2**18, FP32, ADDED), (2**18 - 8, FP16, LAYER), (2**14, FP32, LAYER), (2**19, FP32, LAYER)]
)
def test_what_no_ring_or_cluster_holds_is_taken_by_a_cluster_a_row(n, dtype, kind):
    """Too much shared memory, a slice that is not whole, one block a row, 32 of them."""
    config = {"THREADS": 512, "EACH": 32, "PER_SM": 1}
    assert plan_of(n, dtype, kind, config) is None
    with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
        patch.setattr(staying.configuration, "trial", config)
        given = given_of(n, dtype, kind)
        if n < 2**19:
            assert cluster.plan(*given.key(kind), 1e-5, kind, False).expression.startswith("norm_cluster<")
