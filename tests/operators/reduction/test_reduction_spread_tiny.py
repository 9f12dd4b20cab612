"""The gradient of norms of rows of 3 to 7 elements in CUDA C++, without a GPU: run on a CPU that plays its PTX
(``ptx_on_cpu.hpp``) with the launch that Python computes; what it compiles to; what is left to Triton."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from cuda_as_cpp import whole
from cuda_on_cpu import FRAME, bytes_of, frame_is_whole, framed, job, player_of_rows, tensor_of
from sass import names, parts, sass

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.definition import ARCHITECTURES  # noqa: E402
from weft.operators.cuda import CudaPlan, compile_cubin  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.reduction import kept_tiny, spread_tiny  # noqa: E402
from weft.operators.reduction import reduction as module  # noqa: E402
from weft.operators.reduction.norm import reduction  # noqa: E402
from weft.operators.reduction.plans import SpreadPlan  # noqa: E402
from weft.operators.reduction.tiny import EXTENTS  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# (order, dtype, extent); each with several numbers of rows
KERNELS = [*((2.0, BF16, n) for n in EXTENTS), (2.0, FP16, 3), (2.0, FP16, 6), (1.0, BF16, 5), (1.0, FP16, 7)]
KERNELS += [*((2.0, FP32, n) for n in EXTENTS), (1.0, FP32, 3)]
ROWS = (1, 255, 256, 257, 1030)

# Mistakes: a kernel, what stands in spread_tiny.cu, what is written instead.
MISTAKES = {
    "the last element left as it is": (0, "n < N; n++) f[", "n < N - 1; n++) f["),
    "rows of another lane": (0, "*const mine = own + lane", "*const mine = own + (lane ^ 1)"),
    "vectors exchanged": (0, "T, E>(own + (i * 32 + lane) * E, held", "T, E>(own + (i * 32 + (lane ^ 1)) * E, held"),
    "dx's vectors exchanged": (0, "store<T, E>(dx + (i * 32 + lane)", "store<T, E>(dx + (i * 32 + (lane ^ 1))"),
    "warps share memory": (0, "+ warp * ROWS * N,", ","),
    "nobody waits for x": (0, "}\n  __syncwarp();", "}"),
    "nobody waits for dx": (0, "// where only this thread has read\n  __syncwarp();", ""),
    "the tail as if whole": (0, "if (left >= ROWS) {\n    Words", "if (true) {\n    Words"),
    "dx's tail as if whole": (0, "if (left >= ROWS) {\n#pragma", "if (true) {\n#pragma"),
    "the norm of another row": (0, "of_row<T>(row[r])", "of_row<T>(row[r ^ 1])"),
    "the gradient of another row": (0, "one, g[r])", "one, g[r ^ 1])"),
    "0 / 0": (0, "y == 0.f ? 0.f : r", "r"),
    "not divided": (0, "x * row * dy", "x * dy"),
    "a sign for 0": (6, "(x > 0.f ?", "(x >= 0.f ?"),
}  # fmt: skip

LAUNCH = """
const Any x{job.buffers[0]}, y{job.buffers[1]}, dy{job.buffers[2]}, dx{static_cast<char *>(job.buffers[4]) + job.scales[0]};
job.run([&] { KERNEL(x, y, dy, dx, job.shape[0]); });
"""


class Case:
    """The tensors of a case, and its plan."""

    def __init__(self, order: float, dtype: torch.dtype, n: int, rows: int, seed: int = 0):
        self.seed = seed
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, n, generator=g).to(dtype)
        self.x[rows // 2] = 0  # a norm of 0
        self.x[rows // 3, 0] = 0
        for at, value in ((2, torch.nan), (5, torch.inf), (7, -torch.inf)):
            if rows > 200:
                self.x[at * 9 % rows, at % n] = value
        self.dy = torch.randn(rows, generator=g).to(dtype)
        self.y = torch.linalg.vector_norm(self.x.float(), order, 1).to(dtype)
        x, dy = self.x.double(), self.dy.double()[:, None]
        scale = torch.where(self.y == 0, 0.0, 1 / self.y.double())[:, None]
        # a NaN is neither above nor below 0: its sign is 0, as Triton's kernel has it
        self.want = x * scale * dy if order == 2 else ((x > 0).double() - (x < 0).double()) * dy
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(kept_tiny, "THREADS", 64)
            patch.setattr(spread_tiny, "THREADS", 64)
            self.plan = reduction._tiny_backward_plan(self.x, self.dy, 1, False, order)
        self.launch = LAUNCH.replace("KERNEL", self.plan.expression)

    def job(self) -> bytes:
        buffers = {0: bytes_of(self.x), 1: bytes_of(self.y), 2: bytes_of(self.dy), 4: framed(self.x.nbytes)}
        return job(self.plan, self.seed, buffers, shape=[s.value for s in self.plan.scalars], scales=(FRAME,))

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or which element is further off than one rounding may be."""
        if not frame_is_whole(found):
            return "something beside the result was written"
        got = tensor_of(found[FRAME:-FRAME], self.x.dtype).double().view(self.want.shape)
        allowed = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-22}[self.x.dtype] * 1.01 * self.want.abs() + 2.0**-25
        same = (got == self.want) | (got.isnan() & self.want.isnan()) | ((got - self.want).abs() <= allowed)
        far = (~same).nonzero()
        return f"{far[0].tolist()} is {got[tuple(far[0])]}, not {self.want[tuple(far[0])]}" if len(far) else ""


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    folder, text = tmp_path_factory.mktemp("played"), whole(spread_tiny.SOURCE)
    return player_of_rows(folder, text, Case, KERNELS, MISTAKES)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=[f"{p} {d} {n}" for p, d, n in KERNELS])
def test_it_is_right(play, kernel, rows):
    assert not play(kernel, rows)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    kernel = MISTAKES[mistake][0]
    assert any(play(kernel, rows, mistake, seed) for rows in (257, 1030) for seed in range(4))


# ---- what it costs, how it is launched ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "most"), [(3, 345), (5, 440), (6, 490), (7, 535)])
def test_256_rows_take_few_instructions(n, most):
    """Of a warp on sm_90; nothing is spilled, every access is of 16 bytes."""
    x, dy = torch.empty(2**20, n, dtype=BF16, device="meta"), torch.empty(2**20, dtype=BF16, device="meta")
    with compiling_for(90, lambda *kernel: None):
        plan = reduction._tiny_backward_plan(x, dy, 1, False, 2.0)
    text = sass(spread_tiny.SOURCE, plan.expression)
    counts = Counter(re.findall(r"\b(LDG\.E\.128|STS\.128|LDS\.128|STG\.E\.128)\b", text))
    assert counts == {"LDG.E.128": n + 2, "STS.128": 2 * n, "LDS.128": 2 * n, "STG.E.128": n}
    first, *others = parts(text)
    path_taken = [first, *(p for p in others if re.search(r"\.128\b|MUFU\.RCP", p))]
    assert sum(len(names(p)) for p in path_taken) <= most


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS[4:])
def test_every_formula_compiles(sm, kernel):
    pytest.importorskip("cuda.bindings")
    assert compile_cubin(spread_tiny.SOURCE, Case(*kernel, 1).plan.expression, sm)[0]


def test_what_it_leaves_out_is_triton_s():
    def takes(x, dy=None, dim=1, order=2.0):
        dy = torch.ones_like(x.sum(dim)) if dy is None else dy
        with compiling_for(90, lambda *kernel: None):
            return isinstance(reduction._tiny_backward_plan(x, dy, dim, False, order), CudaPlan)

    rows = torch.ones(64, 7, dtype=BF16)
    assert takes(rows) and takes(rows, order=1.0) and takes(torch.ones(4, 16, 5, dtype=FP16), dim=2)
    assert takes(rows.float()) and not takes(rows, order=float("inf")) and not takes(rows, dim=0)
    assert not takes(torch.ones(64, 8, dtype=BF16)) and not takes(torch.ones(64, 14, dtype=BF16)[:, :7])
    assert not takes(torch.ones(64 * 7 + 1, dtype=BF16)[1:].view(64, 7))
    assert not takes(rows, torch.ones(1, dtype=BF16).expand(64)) and not takes(rows, torch.ones(64))
    assert not takes(rows, torch.ones(65, dtype=BF16)[1:])


def test_public_functions_take_it_for_large_tensors(monkeypatch):
    monkeypatch.setattr(module, "INTERPRETING", False)
    x = torch.empty(2**18, 7, dtype=BF16, device="meta")
    with compiling_for(90, lambda *kernel: None):
        for rows, kind in ((x, CudaPlan), (x[:1000], SpreadPlan)):
            dy = torch.empty(len(rows), dtype=BF16, device="meta")
            assert isinstance(reduction.public_backward_plans.of((rows, dy), 1, False, 2.0), kind)


def test_of_fp32_the_gradient_alone_is_in_cuda():
    """Forward is Triton's then, where it reaches the rate of the memory."""
    x = torch.ones(64, 7, requires_grad=True)
    with compiling_for(90, lambda *kernel: None):
        assert reduction._gradient_alone(x, 1, 2.0) and not reduction._gradient_alone(x, 0, 2.0)
        assert not reduction._gradient_alone(x, 1, float("inf")) and not reduction._gradient_alone(x, None, 2.0)
        assert not reduction._gradient_alone(x.detach(), 1, 2.0)
        assert not reduction._gradient_alone(x.detach().bfloat16().requires_grad_(), 1, 2.0), "forward is in CUDA too"
