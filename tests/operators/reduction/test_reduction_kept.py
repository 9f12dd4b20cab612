"""Extrema that keep bits for their gradient: the CUDA C++ kernels without a GPU, run on a CPU that plays their PTX
(``ptx_on_cpu.hpp``) with the launch that Python computes, and what they compile to; what is saved, overwritten and taken a
gradient of twice; what the public functions do."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from cuda_as_cpp import whole
from cuda_on_cpu import FRAME, bytes_of, frame_is_whole, framed, job, player_of_rows, tensor_of
from sass import names, parts, sass

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.definition import ARCHITECTURES, Declined  # noqa: E402
from weft.operators.cuda import compile_cubin  # noqa: E402
from weft.operators.launch import INTERPRETING, compiling_for  # noqa: E402
from weft.operators.reduction import kept_tiny  # noqa: E402
from weft.operators.reduction import max as of_max  # noqa: E402
from weft.operators.reduction import min as of_min  # noqa: E402
from weft.operators.reduction import norm as of_norm  # noqa: E402
from weft.operators.reduction import sum as of_sum  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's of 0 / 0, which is NaN as it should be

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERATORS = {"max": of_max.max, "min": of_min.min}
MODULES = {"max": of_max, "min": of_min}

# (way, operator, dtype, extent); each with several numbers of rows
KERNELS = [
    *(("keep", "max", BF16, n) for n in kept_tiny.EXTENTS),
    *(("share", "max", BF16, n) for n in kept_tiny.EXTENTS),
    *((way, "min", FP32, n) for way in ("keep", "share") for n in (3, 7)),
    *((way, "min", FP16, 6) for way in ("keep", "share")),
]
ROWS = (1, 127, 128, 255, 256, 257, 1030)
KEEP, SHARE = 0, 4

# Mistakes: a kernel, what stands in kept_tiny.cu, what is written instead.
MISTAKES = {
    "the last element left out": (KEEP, "n = 1; n < N", "n = 1; n < N - 1"),
    "the last bit left out": (KEEP, "for (int n = 0; n < N; n++) equal", "for (int n = 0; n < N - 1; n++) equal"),
    "the first bit for all": (KEEP, "1u << n : 0u", "1u : 0u"),
    "bits of another row": (KEEP, "(equal) << 8 * r", "(equal) << 8 * (r ^ 1)"),
    "rows of another lane": (KEEP, "load_shared<T, E * N>(own + lane", "load_shared<T, E * N>(own + (lane ^ 1)"),
    "NaN passed over": (KEEP, "max.NaN.f32 %0, %1, %2", "max.f32 %0, %1, %2"),
    "the smallest of all": (KEEP, "if constexpr (SMALLEST) {", "if constexpr (true) {"),
    "the tail as if whole": (KEEP, "if (left >= ROWS) {\n    Words", "if (true) {\n    Words"),
    "the tail's results as if whole": (KEEP, "if (left >= ROWS) {\n    store", "if (true) {\n    store"),
    "nobody waits for x": (KEEP, "own[i] = x[i];\n  }\n  __syncwarp();", "own[i] = x[i];\n  }"),
    "nobody waits for dx": (SHARE, "// banks as in keep_tiny\n  __syncwarp();", ""),
    "all to each of equals": (SHARE, "__popc(equal)", "equal ? 1 : 0"),
    "0 where there is NaN": (SHARE, "ties ? g[r] * 0.f : __uint_as_float(0x7fffffffu)", "0.f"),
    "the bits of the first row": (SHARE, "u32(packed >> 8 * r) & 0xff", "u32(packed) & 0xff"),
    "the gradient of the first row": (SHARE, "quotient<T>(g[r], float(ties))", "quotient<T>(g[0], float(ties))"),
    "elements exchanged": (SHARE, "equal >> n & 1 ? share", "equal >> (n ^ 1) & 1 ? share"),
    "gradients of another lane": (SHARE, "store_shared<T, E * N>(own + lane", "store_shared<T, E * N>(own + (lane ^ 1)"),
    "the gradient's tail as if whole": (SHARE, "if (left >= ROWS) {\n    unpack", "if (true) {\n    unpack"),
    "dx's tail as if whole": (SHARE, "if (left >= ROWS) {\n#pragma", "if (true) {\n#pragma"),
}  # fmt: skip

BEGIN = """
static u64 low, high;
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline float __fdividef(float a, float b) { return a / b; }
"""
LAUNCH = """
const Any first{job.buffers[0]}, second{job.buffers[1]};
const Any out{static_cast<char *>(job.buffers[4]) + job.scales[0]}, bits{static_cast<char *>(job.buffers[8]) + job.scales[0]};
job.run([&] { KERNEL(ARGUMENTS, job.shape[0]); });
"""


class Case:
    """The tensors of a case, and its plan."""

    def __init__(self, way: str, name: str, dtype: torch.dtype, n: int, rows: int, seed: int = 0):
        self.way, self.n, self.seed = way, n, seed
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, n, generator=g)
        x[rows // 2 :] = x[rows // 2 :].mul(2).round()  # ties
        for at, value in ((2, torch.nan), (5, torch.inf), (7, -torch.inf)):
            if rows > 100:
                x[at * 9 % rows, at % n] = value
        self.x = x.to(dtype)
        self.dy = torch.randn(rows, generator=g).to(dtype)
        if rows > 100:
            self.dy[rows // 3] = torch.inf
        self.best = OPERATORS[name].reference(self.x, -1)
        self.equal = self.x == self.best[:, None]
        self.bits = (self.equal.long() << torch.arange(n)).sum(1).to(torch.uint8)
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(kept_tiny, "THREADS", 64)
            kept = MODULES[name].reduction._kept_tiny_plan(self.x, 1, False, 2.0).launches
        self.plan = kept.keep if way == "keep" else kept.shared
        arguments = "first, out, bits" if way == "keep" else "first, second, out"
        self.launch = LAUNCH.replace("KERNEL", self.plan.expression).replace("ARGUMENTS", arguments)

    def job(self) -> bytes:
        rows, size = len(self.x), self.x.nbytes
        if self.way == "keep":
            buffers = {0: bytes_of(self.x), 4: framed(size // self.n), 8: framed(rows)}
        else:
            buffers = {0: bytes_of(self.dy), 1: bytes_of(self.bits), 4: framed(size), 8: framed(0)}
        return job(self.plan, self.seed, buffers, shape=[s.value for s in self.plan.scalars], scales=(FRAME,))

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or which result is not PyTorch's bits."""
        long = self.x.nbytes // (self.n if self.way == "keep" else 1) + 2 * FRAME
        out, bits = found[:long], found[long:]
        if not (frame_is_whole(out) and frame_is_whole(bits)):
            return "something beside a result was written"
        got = tensor_of(out[FRAME:-FRAME], self.x.dtype)
        if self.way == "keep":
            return differs(got, self.best) or differs(tensor_of(bits[FRAME:-FRAME], torch.uint8), self.bits)
        ties = self.equal.sum(1, keepdim=True)
        want = (self.dy[:, None].float() * self.equal / ties).to(self.x.dtype)
        return differs(got.view(want.shape), want)


def differs(got: torch.Tensor, want: torch.Tensor) -> str:
    far = (~((got == want) | ((got != got) & (want != want)))).nonzero()
    return f"{far[0].tolist()} is {got[tuple(far[0])].item()}, not {want[tuple(far[0])].item()}" if len(far) else ""


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    folder, text = tmp_path_factory.mktemp("played"), BEGIN + whole(kept_tiny.SOURCE)
    return player_of_rows(folder, text, Case, KERNELS, MISTAKES)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=[f"{w} {o} {d} {e}" for w, o, d, e in KERNELS])
def test_the_kernels_are_right(play, kernel, rows):
    assert not play(kernel, rows)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    kernel = MISTAKES[mistake][0]
    assert any(play(kernel, rows, mistake, seed) for rows in (257, 1030) for seed in range(4))


# ---- what they cost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "n", "most"),
    [(BF16, 3, (280, 380)), (BF16, 5, (340, 420)), (BF16, 6, (380, 430)), (BF16, 7, (420, 460)),
     (FP32, 3, (170, 280)), (FP32, 5, (220, 300)), (FP32, 6, (230, 310)), (FP32, 7, (260, 320))],
)  # fmt: skip
@pytest.mark.parametrize("way", [0, 1], ids=["keep", "share"])
def test_a_warps_rows_take_few_instructions(dtype, n, most, way):
    """On sm_90, of the 32 rows that 16 bytes hold elements; nothing is spilled, elements are moved 16 bytes at a time."""
    x = torch.empty(2**20, n, dtype=dtype, device="meta")
    with compiling_for(90, lambda *kernel: None):
        kept = of_max.reduction._kept_tiny_plan(x, 1, False, 2.0).launches
    text = sass(kept_tiny.SOURCE, (kept.keep, kept.shared)[way].expression)
    counts = Counter(re.findall(r"\b(LDG\.E\.128|STS\.128|LDS\.128|STG\.E\.128)\b", text))
    assert counts["STS.128"] == counts["LDS.128"] == n
    assert (counts["LDG.E.128"], counts["STG.E.128"]) == ((n, 1), (1, n))[way]
    first, *others = parts(text)
    # but for the function that divides what is out of range: FFMA.RZ is its own
    path_taken = [first, *(p for p in others if re.search(r"\.128\b|MUFU\.RCP", p) and "FFMA.RZ" not in p)]
    assert sum(len(names(p)) for p in path_taken) <= most[way]


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS[8:], ids=[f"{w} {o} {d} {e}" for w, o, d, e in KERNELS[8:]])
def test_every_kernel_compiles(sm, kernel):
    pytest.importorskip("cuda.bindings")
    assert compile_cubin(kept_tiny.SOURCE, Case(*kernel, 1).plan.expression, sm)[0]


def test_they_decline_what_they_leave_out():
    def why(x, dim=1, reduction=of_max.reduction, plan="_kept_tiny_plan"):
        with pytest.raises(Declined) as declined:
            getattr(reduction, plan)(x, dim, False, 2.0)
        return str(declined.value)

    rows = torch.ones(64, 7)
    assert "dense rows" in why(torch.ones(64, 8)) and "dense rows" in why(rows, dim=0)
    assert "dense rows" in why(torch.ones(64, 14)[:, :7])
    assert "16 bytes" in why(torch.ones(64 * 7 + 1)[1:].view(64, 7))
    assert "not dense" in why(torch.ones(64, 14)[:, :7], dim=None)
    assert "more than which" in why(rows, reduction=of_norm.reduction, plan="_kept_plan")
    assert "more than which" in why(rows, reduction=of_sum.reduction, plan="_kept_plan")


# ---- what a user sees --------------------------------------------------------------------------------------------------------

KEPT = ((37, 5), 1), ((9, 3, 20), 1), ((40, 21), 0), ((4, 100), -1), ((7, 6), None), ((3, 50, 4), 1), ((6, 1), 1)


@pytest.fixture
def keeping():
    if not INTERPRETING and not torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter or a GPU")
    return "cuda" if torch.cuda.is_available() else "cpu"


def leaf(shape, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(2).round().to(device)  # ties
    return x.requires_grad_()


@pytest.mark.device
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dim"), KEPT)
@pytest.mark.parametrize("name", OPERATORS)
def test_x_may_be_overwritten_before_the_gradient(keeping, name, shape, dim, keepdim):
    op = OPERATORS[name]
    x = leaf(shape, keeping)
    want = op.reference(x, dim, keepdim)
    dy = torch.randn_like(want)
    (dx,) = torch.autograd.grad(want, x, dy)
    values = x.detach().clone().requires_grad_()
    inner = values * 1
    got = op.public(inner, dim, keepdim)
    assert got.grad_fn.name() == "FunctionBackward" and len(got.grad_fn.saved_tensors) == 1
    assert got.grad_fn.saved_tensors[0].dtype == torch.uint8
    assert got.grad_fn.saved_tensors[0].numel() <= -(-x.numel() // 8) + 8 * got.numel()
    with torch.no_grad():
        inner.fill_(7)
        got.detach().fill_(7)
    assert torch.equal(torch.autograd.grad(got, values, dy)[0], dx)


@pytest.mark.device
@pytest.mark.parametrize(("shape", "dim"), KEPT)
def test_the_gradient_has_a_gradient(keeping, shape, dim):
    x = leaf(shape, keeping)
    weight = torch.randn_like(x)
    found = []
    for function in (OPERATORS["max"].public, OPERATORS["max"].reference):
        y = function(x, dim)
        dy = torch.ones_like(y).requires_grad_()
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        found.append((dx.detach(), *torch.autograd.grad((dx * weight).sum(), dy)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.device
def test_a_gradient_of_any_strides_is_taken(keeping):
    """An expanded one comes out of a sum of the result; rows that lie side by side in memory become columns."""
    for shape, dims, dim in (((4, 6, 5), (0, 1, 2), 1), ((9, 6), (1, 0), 1), ((4, 6, 5), (2, 0, 1), 0)):
        x = leaf(shape, keeping)
        for weight in (1.0, torch.randn([n for i, n in enumerate(x.permute(dims).shape) if i != dim], device=keeping)):
            for turned in (False, True):
                by = (
                    weight.t().contiguous().t()
                    if turned and isinstance(weight, torch.Tensor) and weight.ndim == 2
                    else weight
                )
                found = [
                    torch.autograd.grad((function(x.permute(dims), dim) * by).sum(), x)[0]
                    for function in (OPERATORS["min"].public, OPERATORS["min"].reference)
                ]
                torch.testing.assert_close(*found)


@pytest.mark.device
def test_bits_are_kept_for_a_gradient_alone(keeping):
    x = leaf((5, 6), keeping)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_max.reduction, "_kept_plan", None)
        with torch.no_grad():
            OPERATORS["max"].public(x, 1)
        OPERATORS["max"].public(x.detach(), 1)
    long = torch.ones(2, 2**14, device=keeping).requires_grad_()
    assert len(OPERATORS["max"].public(long, 1).grad_fn.saved_tensors) == 3, "x, the result and the extrema of spans"


@pytest.mark.device
@pytest.mark.parametrize(("shape", "dim"), [((2, 20000), 1), ((20000, 3), 0), ((1, 40000), None), ((3, 9000, 2), 1)])
@pytest.mark.parametrize("name", OPERATORS)
def test_of_long_extents_x_is_read_where_the_extremum_is(keeping, name, shape, dim):
    op = OPERATORS[name]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(2)).to(keeping)
    along = x.movedim(dim, 0) if dim is not None else x.view(-1)
    along[:3] = 5 if name == "max" else -5  # three ties, all in the first span
    x.requires_grad_()
    want = op.reference(x, dim)
    dy = torch.randn_like(want)
    (dx,) = torch.autograd.grad(want, x, dy)
    got = op.public(x, dim)
    assert torch.equal(got, want)
    late = x.detach().movedim(dim, 0) if dim is not None else x.detach().view(-1)
    late.data[along.shape[0] // 2 :] = torch.nan  # unseen by autograd, and by the gradient
    x_as_saved = got.grad_fn.saved_tensors[0]
    assert x_as_saved.isnan().any()
    assert torch.equal(torch.autograd.grad(got, x, dy)[0], dx)


@pytest.mark.device
def test_of_long_extents_an_overwritten_x_is_noticed(keeping):
    x = torch.rand(2, 20000, device=keeping).requires_grad_()
    inner = x * 1
    y = OPERATORS["max"].public(inner, 1)
    inner.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)
