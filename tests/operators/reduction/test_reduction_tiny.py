"""The CUDA C++ kernel of rows of 3 to 7 elements without a GPU: run on a CPU that plays its PTX (``ptx_on_cpu.hpp``) with the
launch that Python computes; which banks its lanes meet; what it compiles to; what it declines."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from cuda_as_cpp import whole
from cuda_on_cpu import FRAME, bytes_of, frame_is_whole, framed, job, player_of_rows, tensor_of
from sass import names, parts, sass

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import ops  # noqa: E402
from weft.definition import ARCHITECTURES, Declined  # noqa: E402
from weft.operators.cuda import compile_cubin  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.reduction import max as of_max  # noqa: E402
from weft.operators.reduction import mean as of_mean  # noqa: E402
from weft.operators.reduction import min as of_min  # noqa: E402
from weft.operators.reduction import norm as of_norm  # noqa: E402
from weft.operators.reduction import reduction as module  # noqa: E402
from weft.operators.reduction import sum as of_sum  # noqa: E402
from weft.operators.reduction import tiny  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODULES = {"sum": of_sum, "mean": of_mean, "max": of_max, "min": of_min, "norm": of_norm}

# (operator, order, dtype, extent); each with several numbers of rows
KERNELS = [
    *(("sum", 2.0, BF16, n) for n in tiny.EXTENTS),
    *(("max", 2.0, FP16, n) for n in tiny.EXTENTS),
    ("mean", 2.0, BF16, 7),
    ("mean", 2.0, FP16, 3),
    ("min", 2.0, BF16, 5),
    *(("norm", p, BF16, 6) for p in (1.0, 2.0, float("inf"))),
]
ROWS = (1, 255, 256, 257, 1030)

# Mistakes: an operator with its extent, what stands in tiny.cu, what is written instead.
MISTAKES = {
    "the last element left out": (0, "n < N; n++", "n < N - 1; n++"),
    "rows of another lane": (0, "own + lane * EACH * N", "own + (lane ^ 1) * EACH * N"),
    "vectors exchanged": (0, "T, 8>(own + (i * 32 + lane) * 8", "T, 8>(own + (i * 32 + (lane ^ 1)) * 8"),
    "warps share memory": (0, "+ warp * ROWS * N;", ";"),
    "nobody waits": (0, "__syncwarp();", ""),
    "the tail as if whole": (0, "if (left >= ROWS) {\n    Words", "if (true) {\n    Words"),
    "the tail's results as if whole": (0, "if (left >= ROWS) {\n    store", "if (true) {\n    store"),
    "halves of a word exchanged": (0, ">> (r % 2 * 16)", ">> (16 - r % 2 * 16)"),
    "divided by one": (8, 'asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(total), "f"(n));', "r = total;"),
    "begun at zero": (4, "return __uint_as_float(0xff800000u);", "return 0.f;"),
    "signs kept": (11, "& 0x7fffffffu", ""),
}  # fmt: skip

LAUNCH = """
low = u64(job.buffers[0]), high = low + job.scales[0];
const Any x{job.buffers[0]}, out{static_cast<char *>(job.buffers[4]) + job.scales[1]};
job.run([&] { KERNEL(x, out, job.shape[0], float(job.factors[0])); });
"""


class Reduced:
    """The tensors of a case, and its plan."""

    def __init__(self, name: str, order: float, dtype: torch.dtype, n: int, rows: int, seed: int = 0):
        self.order, self.operator, self.seed = order, MODULES[name].reduction, seed
        g = torch.Generator().manual_seed(seed)
        self.x = (torch.randn(rows, n, generator=g) - (2 if name == "max" else 0)).to(dtype)
        for at, value in ((2, torch.nan), (5, torch.inf), (7, -torch.inf)):
            if rows > 200:
                self.x[at * 9 % rows, at % n] = value
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(tiny, "THREADS", 64)
            self.plan = self.operator._tiny_plan(self.x, 1, False, order, dtype).plan
        self.launch = LAUNCH.replace("KERNEL", self.plan.expression)

    def job(self) -> bytes:
        x, out = bytes_of(self.x), framed(len(self.x) * 2)
        m, divisor = (s.value for s in self.plan.scalars)
        return job(self.plan, self.seed, {0: x, 4: out}, shape=(m,), scales=(len(x), FRAME), factors=(divisor,))

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or which result is further off than one rounding and fp32 sums may be."""
        if not frame_is_whole(found):
            return "something beside the result was written"
        got = tensor_of(found[FRAME:-FRAME], self.x.dtype).double()
        want = self.operator.reference(self.x.double(), 1, False, self.order)
        size = self.x.double().abs().nan_to_num(0, 0, 0).sum(1)
        allowed = {BF16: 2.0**-8, FP16: 2.0**-11}[self.x.dtype] * want.abs() + 2.0**-20 * size
        same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= allowed)
        far = (~same).nonzero()
        return f"row {far[0].item()} is {got[far[0]].item()}, not {want[far[0]].item()}" if len(far) else ""


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    text = "static u64 low, high;\n" + whole(tiny.SOURCE)
    folder = tmp_path_factory.mktemp("played")
    return player_of_rows(folder, text, Reduced, KERNELS, MISTAKES)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=[f"{n} {p} {d} {e}" for n, p, d, e in KERNELS])
def test_it_is_right(play, kernel, rows):
    assert not play(kernel, rows)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    kernel = MISTAKES[mistake][0]
    assert any(play(kernel, rows, mistake, seed) for rows in (257, 1030) for seed in range(4))


# ---- what it costs, how it is launched ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", tiny.EXTENTS)
def test_vectors_of_neighbouring_threads_lie_in_different_banks(n):
    """Eight lanes at a time read 16 bytes each, n vectors apart."""
    for i in range(n):
        groups = Counter((lane * n + i) % 8 for lane in range(8))
        assert max(groups.values()) == (2 if n == 6 else 1)


@pytest.mark.parametrize(("n", "most"), [(3, 230), (5, 280), (6, 300), (7, 325)])
@pytest.mark.parametrize("name", ["sum", "max"])
def test_256_rows_take_few_instructions(name, n, most):
    """Of a warp on sm_90; nothing is spilled, every access is of 16 bytes."""
    x = torch.empty(2**20, n, dtype=BF16, device="meta")
    with compiling_for(90, lambda *kernel: None):
        plan = MODULES[name].reduction._tiny_plan(x, 1, False, 2.0, BF16).plan
    text = sass(tiny.SOURCE, plan.expression)
    counts = Counter(re.findall(r"\b(LDG\.E\.128|STS\.128|LDS\.128|STG\.E\.128)\b", text))
    assert counts == {"LDG.E.128": n, "STS.128": n, "LDS.128": n, "STG.E.128": 1}
    first, *others = parts(text)
    path_taken = [first, *(p for p in others if re.search(r"\.128\b", p))]
    assert sum(len(names(p)) for p in path_taken) <= most


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS[8:])
def test_every_formula_compiles(sm, kernel):
    pytest.importorskip("cuda.bindings")
    with compiling_for(sm, lambda *kernel: None):
        assert compile_cubin(tiny.SOURCE, Reduced(*kernel, 1).plan.expression, sm)[0]


def test_it_declines_what_it_leaves_out():
    def why(x, dim=1, name="sum", order=2.0, dtype=None):
        with pytest.raises(Declined) as declined:
            MODULES[name].reduction._tiny_plan(x, dim, False, order, dtype or x.dtype)
        return str(declined.value)

    rows = torch.ones(64, 7, dtype=BF16)
    assert "float32" in why(rows.float()) and "float32" in why(rows, dtype=FP32)
    assert "dense rows" in why(torch.ones(64, 8, dtype=BF16)) and "dense rows" in why(rows, dim=0)
    assert "dense rows" in why(torch.ones(64, 14, dtype=BF16)[:, :7])
    assert "16 bytes" in why(torch.ones(64 * 7 + 1, dtype=BF16)[1:].view(64, 7))
    assert "everything" in why(torch.ones(64, 14, dtype=BF16)[:, :7], dim=None)
    assert "norms of order" in why(rows, name="norm", order=3.0)


def test_public_functions_take_it_for_large_tensors(monkeypatch):
    monkeypatch.setattr(module, "INTERPRETING", False)
    x = torch.empty(2**18, 7, dtype=BF16, device="meta")
    with compiling_for(90, lambda *kernel: None):
        assert all(ops.explain(name, x, dim=1).implementation == "cuda" for name in MODULES)
        assert ops.explain("sum", x, dim=0).implementation == "triton"
        assert ops.explain("sum", x.float(), dim=1).implementation == "triton"
        assert ops.explain("sum", x[:1000], dim=1).implementation == "triton", "too few elements"
        assert ops.explain("argmax", x, dim=1).implementation == "cuda"
        for slower in (x.float(), x.view(-1, 14)[:, :6].contiguous()):
            assert ops.explain("argmax", slower.repeat(2, 1), dim=1).implementation == "triton"
