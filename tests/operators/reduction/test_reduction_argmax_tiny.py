"""``argmax`` of rows of 2 to 8 elements in CUDA C++, without a GPU: run on a CPU that plays its PTX (``ptx_on_cpu.hpp``) with
the launch that Python computes; what it compiles to and declines."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from cuda_as_cpp import whole
from cuda_on_cpu import FRAME, bytes_of, frame_is_whole, framed, job, player_of_rows, tensor_of
from sass import names, sass

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.definition import ARCHITECTURES, Declined  # noqa: E402
from weft.operators.cuda import compile_cubin  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.reduction import argmax, argmax_tiny  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [*((BF16, n) for n in range(2, 9)), (FP16, 3), (FP16, 8), *((FP32, n) for n in (2, 3, 4, 6))]
ROWS = (1, 255, 256, 257, 1030)

UNROLLED = " {\n#pragma unroll\n    for (int i = 0; i < "
# Mistakes: a kernel, what stands in argmax_tiny.cu, what is written instead.
MISTAKES = {
    "the last element left out": (3, "n < N; n++", "n < N - 1; n++"),
    "the last of equals": (3, "!(f[n] <= best)", "!(f[n] < best)"),
    "NaN passed over": (3, "!(f[n] <= best)", "f[n] > best"),
    "the last NaN": (3, " && best == best", ""),
    "rows of another lane": (3, ": lane * N + i) * E)", ": (lane ^ 1) * N + i) * E)"),
    "vectors exchanged": (3, "T, E>(own + (i * 32 + lane) * E, held", "T, E>(own + (i * 32 + (lane ^ 1)) * E, held"),
    "warps share memory": (3, "+ warp * ROWS * N;", ";"),
    "nobody waits for elements": (3, "}\n  __syncwarp();\n  if (!WHOLE", "}\n  if (!WHOLE"),
    "places over elements": (3, "__syncwarp();  // places", "// places"),
    "nobody waits for places": (3, "}\n  __syncwarp();\n\n", "}\n\n"),
    "the tail as if whole": (3, f"if (left >= ROWS){UNROLLED}N", f"if (true){UNROLLED}N"),
    "the tail's places as if whole": (3, f"if (left >= ROWS){UNROLLED}E", f"if (true){UNROLLED}E"),
    "two rows exchanged": (3, "two & 0xff, 0, two >> 8, 0", "two >> 8, 0, two & 0xff, 0"),
    "rows of whole vectors in a lane's order": (0, "(r / OF_VECTOR * 32 + lane) * OF_VECTOR + r % OF_VECTOR", "lane * E + r"),
    "a tail of whole vectors not fetched": (0, "if (!WHOLE || left < ROWS)", "if (!WHOLE)"),
}  # fmt: skip

LAUNCH = """
const Any x{job.buffers[0]}, out{static_cast<char *>(job.buffers[4]) + job.scales[0]};
job.run([&] { KERNEL(x, out, job.shape[0]); });
"""


def launched(x: torch.Tensor, dim: int | None = 1):
    with compiling_for(90, lambda *kernel: None):
        return argmax.reduction._tiny_plan(x, dim, False, 0.0, torch.int64).plan


class Searched:
    """Rows with equals, zeros of both signs, infinities and NaN, and their plan."""

    def __init__(self, dtype: torch.dtype, n: int, rows: int, seed: int = 0):
        self.seed = seed
        g = torch.Generator().manual_seed(seed)
        values = torch.tensor([-2.0, -1.5, -0.0, 0.0, 1.0, 3.0, -torch.inf, torch.inf, torch.nan])
        drawn = torch.randint(len(values) + 40, (rows, n), generator=g)
        self.x = torch.where(drawn < len(values), values[drawn % len(values)], torch.randn(rows, n, generator=g)).to(
            dtype
        )
        self.x[rows // 2] = -torch.inf
        self.want = torch.argmax(self.x, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(argmax_tiny, "THREADS", 64)
            self.plan = launched(self.x)
        self.launch = LAUNCH.replace("KERNEL", self.plan.expression)

    def job(self) -> bytes:
        buffers = {0: bytes_of(self.x), 4: framed(self.want.nbytes)}
        return job(self.plan, self.seed, buffers, shape=[s.value for s in self.plan.scalars], scales=(FRAME,))

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or which place is another."""
        if not frame_is_whole(found):
            return "something beside the result was written"
        got = tensor_of(found[FRAME:-FRAME], torch.int64)
        far = (got != self.want).nonzero()
        return f"row {far[0].item()} has {got[far[0]].item()}, not {self.want[far[0]].item()}" if len(far) else ""


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    folder, text = tmp_path_factory.mktemp("played"), whole(argmax_tiny.SOURCE)
    return player_of_rows(folder, text, Searched, KERNELS, MISTAKES)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=[f"{d} {n}" for d, n in KERNELS])
def test_it_is_right(play, kernel, rows):
    assert not play(kernel, rows)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    kernel = MISTAKES[mistake][0]
    assert any(play(kernel, rows, mistake, seed) for rows in (257, 1030) for seed in range(4))


@pytest.mark.parametrize(("n", "most"), [(2, 200), (3, 265), (4, 295), (5, 355), (6, 400), (7, 445), (8, 485)])
def test_256_rows_take_few_instructions(n, most):
    """Of a warp on sm_90, those of the tail included; nothing is spilled, every access of whole warps is of 16 bytes."""
    found = names(sass(argmax_tiny.SOURCE, launched(torch.empty(2**20, n, dtype=BF16)).expression))
    counts = Counter(name for name in found if re.match(r"(LDG|STG).*\.128", name))
    assert counts == {"LDG.E.EL.128": n, "STG.E.128": 4} and len([name for name in found if name != "NOP"]) <= most


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_it_compiles_for_every_architecture(sm):
    pytest.importorskip("cuda.bindings")
    assert compile_cubin(argmax_tiny.SOURCE, launched(torch.empty(64, 5, dtype=BF16)).expression, sm)[0]


def test_what_it_does_not_take_it_declines():
    rows = torch.ones(64, 14, dtype=BF16)
    assert launched(rows[:, :7].contiguous()).grid == (1, 1) and launched(torch.ones(4, 16, 7), 2).grid == (1, 1)
    for x, dim in ((rows, 1), (rows[:, :7], 1), (rows[:, :1].contiguous(), 1), (rows[:7].contiguous(), 0),
                   (torch.ones(64, 8), 1), (torch.ones(64 * 7 + 1)[1:].view(64, 7), 1), (rows, None)):  # fmt: skip
        with pytest.raises(Declined):
            launched(x, dim)
