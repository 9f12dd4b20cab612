"""Kernels of rows of 2 to 8 elements on the CPU emulator; what they compile to, decline, and are chosen for."""

import re
from collections import Counter

import pytest
import torch
from cuda_as_cpp import whole
from cuda_on_cpu import BF16, FP16, FP32, FRAME, Suite, difference, frame_is_whole, framed, job, tensor_of
from emulated import *  # noqa: F403
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import names, parts, sass

from weft import ops, registry
from weft.definition import ARCHITECTURES, Declined
from weft.operators.cuda import CudaPlan, compile_cubin
from weft.operators.launch import INTERPRETING, compiling_for
from weft.operators.reduction import argmax, dispatch, max, mean, min, norm, sum
from weft.operators.reduction.dispatch import BACKWARD, EXTENTS, FORWARD

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's of 0 / 0, which is NaN as it should be

INF = float("inf")
MODULES = {"sum": sum, "mean": mean, "max": max, "min": min, "norm": norm, "argmax": argmax}


def forward(
    kernel: str, name: str, x: torch.Tensor, order: float = 2.0, dim: int | None = 1, into: torch.dtype | None = None
):
    with compiling_for(90, lambda *kernel: None):
        mask = kernel.endswith("-mask")
        return FORWARD.kernel(kernel).of((x,), MODULES[name].reduction, dim, False, order, into, mask)


def backward(x: torch.Tensor, dy: torch.Tensor, order: float = 2.0, dim: int | None = 1):
    with compiling_for(90, lambda *kernel: None):
        return BACKWARD.kernel("cuda").of((x, dy), norm.reduction, dim, False, order)


ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-22}


class Case:
    """The tensors of a case, its plan, the job that launches it, and what is right.

    Args:
        given: what the kernel's arguments are named in ``kernels``, then the number of rows.
    """

    special = ((2, torch.nan), (5, torch.inf), (7, -torch.inf))
    arguments = "a, out"

    def __init__(self, given: tuple, seed: int = 0):
        *self.kind, self.dtype, self.n, rows = given
        self.seed, self.g = seed, torch.Generator().manual_seed(seed)
        self.x = self.draw(rows).to(self.dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "THREADS", 64)
            self.plan = self.planned()

    def draw(self, rows: int) -> torch.Tensor:
        return self.with_special(torch.randn(rows, self.n, generator=self.g))

    def with_special(self, x: torch.Tensor) -> torch.Tensor:
        for at, value in self.special:
            if len(x) > 200:
                x[at * 9 % len(x), at % self.n] = value
        return x

    @property
    def launch(self) -> str:
        scalars = "job.shape[0], float(job.factors[0])" if len(self.plan.scalars) > 1 else "job.shape[0]"
        return (
            "const Any a{job.buffers[0]}, b{job.buffers[1]}, c{job.buffers[2]};\n"
            "const Any out{static_cast<char *>(job.buffers[4]) + job.scales[1]},\n"
            "    mask{static_cast<char *>(job.buffers[8]) + job.scales[1]};\n"
            "low = u64(job.buffers[0]), high = low + job.scales[0];\n"
            f"job.run([&] {{ {self.plan.expression}({self.arguments}, {scalars}); }});\n"
        )

    def job_of(self, *read: torch.Tensor, out: int, mask: int = 0) -> bytes:
        buffers = {**dict(enumerate(read)), 4: framed(out)} | ({8: framed(mask)} if mask else {})
        return job(self.plan, self.seed, buffers, scales=(read[0].nbytes, FRAME))

    def what_is_wrong(self, found: bytes) -> str:
        return self.compare(found) if frame_is_whole(found) else "something beside the result was written"

    def compare(self, found: bytes) -> str:
        got = tensor_of(found[FRAME:-FRAME], self.want.dtype if self.want.dtype == torch.int64 else self.dtype)
        return difference("", got.view(self.want.shape), self.want, self.allowed)


class Reduced(Case):
    """One rounding and fp32 sums are allowed."""

    def draw(self, rows: int) -> torch.Tensor:
        return super().draw(rows) - (2 if self.kind[0] == "max" else 0)

    def planned(self):
        name, order = self.kind
        self.want = MODULES[name].reduction.reference(self.x.double(), 1, False, order)
        size = self.x.double().abs().nan_to_num(0, 0, 0).sum(1)
        self.allowed = ROUNDING[self.dtype] * self.want.abs() + 2.0**-20 * size
        return forward("cuda", name, self.x, order).launch

    def job(self) -> bytes:
        return self.job_of(self.x, out=len(self.x) * 2)


class Searched(Case):
    """Rows with equals, zeros of both signs, infinities and NaN."""

    allowed = 0.0

    def draw(self, rows: int) -> torch.Tensor:
        values = torch.tensor([-2.0, -1.5, -0.0, 0.0, 1.0, 3.0, -torch.inf, torch.inf, torch.nan])
        drawn = torch.randint(len(values) + 40, (rows, self.n), generator=self.g)
        normal = torch.randn(rows, self.n, generator=self.g)
        x = torch.where(drawn < len(values), values[drawn % len(values)], normal)
        x[rows // 2] = -torch.inf
        return x

    def planned(self):
        self.want = torch.argmax(self.x, 1)
        return forward("cuda", "argmax", self.x, 0.0).launch

    def job(self) -> bytes:
        return self.job_of(self.x, out=self.want.nbytes)


class NormGradient(Case):
    """One rounding is allowed."""

    arguments = "a, b, c, out"

    def draw(self, rows: int) -> torch.Tensor:
        x = torch.randn(rows, self.n, generator=self.g)
        x[rows // 2] = 0  # a norm of 0
        x[rows // 3, 0] = 0
        self.dy = torch.randn(rows, generator=self.g).to(self.dtype)
        return self.with_special(x)

    def planned(self):
        (order,) = self.kind
        self.y = torch.linalg.vector_norm(self.x.float(), order, 1).to(self.dtype)
        x, dy = self.x.double(), self.dy.double()[:, None]
        scale = torch.where(self.y == 0, 0.0, 1 / self.y.double())[:, None]
        # a NaN is neither above nor below 0: its sign is 0, as in Triton's kernel
        self.want = x * scale * dy if order == 2 else ((x > 0).double() - (x < 0).double()) * dy
        self.allowed = ROUNDING[self.dtype] * 1.01 * self.want.abs() + 2.0**-25
        return backward(self.x, self.dy, order)

    def job(self) -> bytes:
        return self.job_of(self.x, self.y, self.dy, out=self.x.nbytes)


class Masked(Case):
    """An extremum that saves its mask (``way`` 0), or the gradient of the mask (1): PyTorch's bits."""

    def draw(self, rows: int) -> torch.Tensor:
        x = torch.randn(rows, self.n, generator=self.g)
        x[rows // 2 :] = x[rows // 2 :].mul(2).round()  # ties
        self.dy = torch.randn(rows, generator=self.g).to(self.dtype)
        if rows > 100:
            self.dy[rows // 3] = torch.inf
        return self.with_special(x)

    def planned(self):
        self.way, name = self.kind
        self.arguments = ("a, out, mask", "a, b, out")[self.way]
        self.best = MODULES[name].reduction.reference(self.x, -1)
        self.equal = self.x == self.best[:, None]
        self.mask = (self.equal.long() << torch.arange(self.n)).sum(1).to(torch.uint8)
        plan = forward("cuda-mask", name, self.x)
        return (plan.forward, plan.backward)[self.way]

    def job(self) -> bytes:
        if self.way == 0:
            return self.job_of(self.x, out=self.best.nbytes, mask=len(self.x))
        return self.job_of(self.dy, self.mask, out=self.x.nbytes)

    def what_is_wrong(self, found: bytes) -> str:
        end = (self.x if self.way else self.best).nbytes + 2 * FRAME
        whole = frame_is_whole(found[:end]) and (self.way or frame_is_whole(found[end:]))
        if not whole:
            return "something beside a result was written"
        got = tensor_of(found[FRAME : end - FRAME], self.dtype)
        if self.way == 0:
            mask = tensor_of(found[end + FRAME : -FRAME], torch.uint8)
            return difference("result", got, self.best) or difference("mask", mask, self.mask)
        want = (self.dy[:, None].float() * self.equal / self.equal.sum(1, keepdim=True)).to(self.dtype)
        return difference("dx", got.view(want.shape), want)


ROWS = (257, 1030)  # of whole warps and a rest, in a block and in several
MORE_ROWS = (1, 127, 128, 255, 256)


def suite(source: str, case: type[Case], kernels: list[tuple], mistakes: dict[str, tuple], text: str = "") -> Suite:
    """Each kernel on some rows; a mistake's kernel is counted in the list."""
    cases = {f"{kernel}, {rows} rows": (*kernel, rows) for kernel in kernels for rows in (*ROWS, *MORE_ROWS)}
    return Suite(
        f"static u64 low, high;\n{text}{whole(dispatch.FOLDER / source)}",
        case,
        cases,
        {name: ((*kernels[number], 257), *change) for name, (number, *change) in mistakes.items()},
        long=[name for name, (*_, rows) in cases.items() if rows in MORE_ROWS],
    )


TAIL, TAIL_OF_RESULTS = "if (left >= ROWS) {\n    Words", "if (left >= ROWS) {\n    store"
UNROLLED = " {\n#pragma unroll\n    for (int i = 0; i < "
COUNTED = """
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline float __fdividef(float a, float b) { return a / b; }
"""

REDUCE = suite(
    "short_rows.cu", Reduced,
    [  # operator, order, dtype, extent
        *(("sum", 2.0, BF16, n) for n in EXTENTS),
        *(("max", 2.0, FP16, n) for n in EXTENTS),
        ("mean", 2.0, BF16, 7), ("mean", 2.0, FP16, 3), ("min", 2.0, BF16, 5),
        *(("norm", p, BF16, 6) for p in (1.0, 2.0, INF)),
    ],
    {
        "the last element left out": (0, "n < N; n++", "n < N - 1; n++"),
        "rows of another lane": (0, "own + lane * EACH * N", "own + (lane ^ 1) * EACH * N"),
        "vectors exchanged": (0, "T, 8>(own + (i * 32 + lane) * 8", "T, 8>(own + (i * 32 + (lane ^ 1)) * 8"),
        "warps share memory": (0, "+ warp * ROWS * N;", ";"),
        "no barrier": (0, "__syncwarp();", ""),
        "the tail as if whole": (0, TAIL, TAIL.replace("left >= ROWS", "true")),
        "the tail's results as if whole": (0, TAIL_OF_RESULTS, TAIL_OF_RESULTS.replace("left >= ROWS", "true")),
        "halves of a word exchanged": (0, ">> (r % 2 * 16)", ">> (16 - r % 2 * 16)"),
        "divided by one": (8, 'asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(total), "f"(n));', "r = total;"),
        "begun at zero": (4, "return __uint_as_float(0xff800000u);", "return 0.f;"),
        "signs kept": (11, "& 0x7fffffffu", ""),
    },
)  # fmt: skip
ARGMAX = suite(
    "short_rows_argmax.cu", Searched,
    [*((BF16, n) for n in range(2, 9)), (FP16, 3), (FP16, 8), *((FP32, n) for n in (2, 3, 4, 6))],
    {
        "the last element left out": (3, "n < N; n++", "n < N - 1; n++"),
        "the last of equals": (3, "!(f[n] <= best)", "!(f[n] < best)"),
        "NaN ignored": (3, "!(f[n] <= best)", "f[n] > best"),
        "the last NaN": (3, " && best == best", ""),
        "rows of another lane": (3, ": lane * N + i) * E)", ": (lane ^ 1) * N + i) * E)"),
        "vectors exchanged": (3, "T, E>(own + (i * 32 + lane) * E, held", "T, E>(own + (i * 32 + (lane ^ 1)) * E, held"),
        "warps share memory": (3, "+ warp * ROWS * N;", ";"),
        "no barrier before elements": (3, "}\n  __syncwarp();\n  if (!WHOLE", "}\n  if (!WHOLE"),
        "indices over elements": (3, "__syncwarp();  // indices", "// indices"),
        "no barrier before indices": (3, "}\n  __syncwarp();\n\n", "}\n\n"),
        "the tail as if whole": (3, f"if (left >= ROWS){UNROLLED}N", f"if (true){UNROLLED}N"),
        "the tail's indices as if whole": (3, f"if (left >= ROWS){UNROLLED}E", f"if (true){UNROLLED}E"),
        "two rows exchanged": (3, "two & 0xff, 0, two >> 8, 0", "two >> 8, 0, two & 0xff, 0"),
        "rows in a lane's order": (0, "(r / OF_VECTOR * 32 + lane) * OF_VECTOR + r % OF_VECTOR", "lane * E + r"),
        "a tail of whole vectors not fetched": (0, "if (!WHOLE || left < ROWS)", "if (!WHOLE)"),
    },
)  # fmt: skip
GRADIENT = suite(
    "short_rows_gradient.cu", NormGradient,
    [  # order, dtype, extent
        *((2.0, BF16, n) for n in EXTENTS), (2.0, FP16, 3), (2.0, FP16, 6), (1.0, BF16, 5), (1.0, FP16, 7),
        *((2.0, FP32, n) for n in EXTENTS), (1.0, FP32, 3),
    ],
    {
        "the last element left as it is": (0, "n < N; n++) f[", "n < N - 1; n++) f["),
        "rows of another lane": (0, "*const mine = own + lane", "*const mine = own + (lane ^ 1)"),
        "vectors exchanged": (0, "T, E>(own + (i * 32 + lane) * E, held", "T, E>(own + (i * 32 + (lane ^ 1)) * E, held"),
        "dx's vectors exchanged": (0, "store<T, E>(dx + (i * 32 + lane)", "store<T, E>(dx + (i * 32 + (lane ^ 1))"),
        "warps share memory": (0, "+ warp * ROWS * N,", ","),
        "no barrier before x": (0, "}\n  __syncwarp();", "}"),
        "no barrier before dx": (0, "// where only this thread has read\n  __syncwarp();", ""),
        "the tail as if whole": (0, TAIL, TAIL.replace("left >= ROWS", "true")),
        "dx's tail as if whole": (0, "if (left >= ROWS) {\n#pragma", "if (true) {\n#pragma"),
        "the norm of another row": (0, "of_row<T>(row[r])", "of_row<T>(row[r ^ 1])"),
        "the gradient of another row": (0, "one, g[r])", "one, g[r ^ 1])"),
        "0 / 0": (0, "y == 0.f ? 0.f : r", "r"),
        "not divided": (0, "x * row * dy", "x * dy"),
        "a sign for 0": (6, "(x > 0.f ?", "(x >= 0.f ?"),
    },
)  # fmt: skip
MASK = suite(
    "short_rows_mask.cu", Masked,
    [  # 0: mask, 1: gradient; operator, dtype, extent
        *((way, "max", BF16, n) for way in (0, 1) for n in EXTENTS),
        *((way, "min", FP32, n) for way in (0, 1) for n in (3, 7)),
        *((way, "min", FP16, 6) for way in (0, 1)),
    ],
    {
        "the last element left out": (0, "n = 1; n < N", "n = 1; n < N - 1"),
        "the last bit left out": (0, "for (int n = 0; n < N; n++) equal", "for (int n = 0; n < N - 1; n++) equal"),
        "the first bit for all": (0, "1u << n : 0u", "1u : 0u"),
        "the mask of another row": (0, "(equal) << 8 * r", "(equal) << 8 * (r ^ 1)"),
        "rows of another lane": (0, "load_shared<T, E * N>(own + lane", "load_shared<T, E * N>(own + (lane ^ 1)"),
        "NaN ignored": (0, "max.NaN.f32 %0, %1, %2", "max.f32 %0, %1, %2"),
        "the smallest of all": (0, "if constexpr (SMALLEST) {", "if constexpr (true) {"),
        "the tail as if whole": (0, TAIL, TAIL.replace("left >= ROWS", "true")),
        "the tail's results as if whole": (0, TAIL_OF_RESULTS, TAIL_OF_RESULTS.replace("left >= ROWS", "true")),
        "no barrier before x": (0, "own[i] = x[i];\n  }\n  __syncwarp();", "own[i] = x[i];\n  }"),
        "no barrier before dx": (4, "// banks as in mask_short_rows\n  __syncwarp();", ""),
        "all to each of equals": (4, "__popc(equal)", "equal ? 1 : 0"),
        "0 instead of NaN": (4, "ties ? g[r] * 0.f : __uint_as_float(0x7fffffffu)", "0.f"),
        "the mask of the first row": (4, "u32(packed >> 8 * r) & 0xff", "u32(packed) & 0xff"),
        "the gradient of the first row": (4, "quotient<T>(g[r], float(ties))", "quotient<T>(g[0], float(ties))"),
        "elements exchanged": (4, "equal >> n & 1 ? share", "equal >> (n ^ 1) & 1 ? share"),
        "gradients of another lane": (4, "store_shared<T, E * N>(own + lane", "store_shared<T, E * N>(own + (lane ^ 1)"),
        "the gradient's tail as if whole": (4, "if (left >= ROWS) {\n    unpack", "if (true) {\n    unpack"),
        "dx's tail as if whole": (4, "if (left >= ROWS) {\n#pragma", "if (true) {\n#pragma"),
    },
    text=COUNTED,
)  # fmt: skip
SUITES = {"reduce": REDUCE, "argmax": ARGMAX, "gradient": GRADIENT, "mask": MASK}


@pytest.mark.share(6)
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_kernel_compiles(suite, sm):
    pytest.importorskip("cuda.bindings")
    made = (suite.made(case).plan for case in suite.cases.values() if case[-1] == 1)
    plans = {plan.expression: plan for plan in made}
    for plan in list(plans.values())[-8:]:
        assert compile_cubin(plan.source, plan.expression, sm)[0]


def cost_of(plan: CudaPlan, *others_taken: str, but: str = "") -> tuple[Counter, int]:
    """16-byte accesses, and the instructions on the path of whole warps."""
    text = sass(plan.source, plan.expression)
    counts = Counter(re.findall(r"\b(LDG\.E\.128|STS\.128|LDS\.128|STG\.E\.128)\b", text))
    first, *others = parts(text)
    words = "|".join((r"\.128\b", *others_taken))
    path = [first, *(p for p in others if re.search(words, p) and not (but and but in p))]
    return counts, len([name for p in path for name in names(p)])


@pytest.mark.share(6)
@pytest.mark.parametrize(("n", "most"), [(3, 230), (5, 280), (6, 300), (7, 325)])
@pytest.mark.parametrize("name", ["sum", "max"])
def test_256_rows_take_few_instructions(name, n, most):
    """Of a warp on sm_90; nothing is spilled, every access is of 16 bytes."""
    plan = forward("cuda", name, torch.empty(2**20, n, dtype=BF16, device="meta")).launch
    counts, taken = cost_of(plan)
    assert counts == {"LDG.E.128": n, "STS.128": n, "LDS.128": n, "STG.E.128": 1} and taken <= most


@pytest.mark.share(4)
@pytest.mark.parametrize(("n", "most"), [(3, 345), (5, 440), (6, 490), (7, 535)])
def test_256_rows_of_a_gradient_take_few_instructions(n, most):
    x, dy = torch.empty(2**20, n, dtype=BF16, device="meta"), torch.empty(2**20, dtype=BF16, device="meta")
    counts, taken = cost_of(backward(x, dy), r"MUFU\.RCP")
    assert counts == {"LDG.E.128": n + 2, "STS.128": 2 * n, "LDS.128": 2 * n, "STG.E.128": n} and taken <= most


@pytest.mark.share(8)
@pytest.mark.parametrize(
    ("dtype", "n", "most"),
    [(BF16, 3, (280, 380)), (BF16, 5, (340, 420)), (BF16, 6, (380, 430)), (BF16, 7, (420, 460)),
     (FP32, 3, (170, 280)), (FP32, 5, (220, 300)), (FP32, 6, (230, 310)), (FP32, 7, (260, 320))],
)  # fmt: skip
def test_a_warps_rows_of_a_mask_take_few_instructions(dtype, n, most):
    """Of the 32 rows of a vector's elements, forward and backward."""
    plan = forward("cuda-mask", "max", torch.empty(2**20, n, dtype=dtype, device="meta"))
    for way, launch in enumerate((plan.forward, plan.backward)):
        # FFMA.RZ is of the function that divides what is out of range
        counts, taken = cost_of(launch, r"MUFU\.RCP", but="FFMA.RZ")
        assert counts["STS.128"] == counts["LDS.128"] == n and taken <= most[way]
        assert (counts["LDG.E.128"], counts["STG.E.128"]) == ((n, 1), (1, n))[way]


@pytest.mark.share(6)
@pytest.mark.parametrize(("n", "most"), [(2, 200), (3, 265), (4, 295), (5, 355), (6, 400), (7, 445), (8, 485)])
def test_256_rows_of_argmax_take_few_instructions(n, most):
    """Those of the tail included."""
    plan = forward("cuda", "argmax", torch.empty(2**20, n, dtype=BF16, device="meta"), 0.0).launch
    found = names(sass(plan.source, plan.expression))
    counts = Counter(name for name in found if re.match(r"(LDG|STG).*\.128", name))
    assert counts == {"LDG.E.EL.128": n, "STG.E.128": 4} and len([name for name in found if name != "NOP"]) <= most


SEVEN = torch.ones(64, 7, dtype=BF16)
SLICED, SHIFTED = torch.ones(64, 14, dtype=BF16)[:, :7], torch.ones(64 * 7 + 1, dtype=BF16)[1:].view(64, 7)


REFUSED = [
    bad(forward, Declined, "float32", "cuda", "sum", SEVEN.float()),
    bad(forward, Declined, "norms of order", "cuda", "norm", SEVEN, order=3.0),
    *(bad(forward, Declined, "dense rows", *kernel, x, dim=d) for kernel in (("cuda", "sum"), ("cuda-mask", "max"))
      for x, d in ((torch.ones(64, 8, dtype=BF16), 1), (SEVEN, 0), (SLICED, 1))),
    *(bad(forward, Declined, "16 bytes", *kernel, SHIFTED) for kernel in (("cuda", "sum"), ("cuda-mask", "max"))),
    bad(forward, Declined, "all elements", "cuda", "sum", SLICED, dim=None),
    bad(forward, Declined, "not dense", "cuda-mask", "max", SLICED, dim=None),
    *(bad(forward, Declined, words, "cuda", "argmax", x, dim=d, order=0.0) for x, d, words in (
        (torch.ones(64, 14, dtype=BF16), 1, "dense rows"), (SLICED, 1, "dense rows"),
        (SLICED[:, :1].contiguous(), 1, "dense rows"), (SEVEN[:7], 0, "dense rows"), (torch.ones(64, 8), 1, "dense rows"),
        (SHIFTED, 1, "16 bytes"), (SLICED, None, "all"))),
    *(bad(forward, Declined, "more than which", "triton-mask", name, SEVEN) for name in ("norm", "sum")),
]  # fmt: skip


def test_what_the_gradient_of_norms_does_not_take_it_declines():
    def takes(x, dy=None, dim=1, order=2.0):
        try:
            return bool(backward(x, torch.ones_like(x.sum(dim)) if dy is None else dy, order, dim))
        except Declined:
            return False

    assert takes(SEVEN) and takes(SEVEN, order=1.0) and takes(torch.ones(4, 16, 5, dtype=FP16), dim=2)
    assert takes(SEVEN.float()) and not takes(SEVEN, order=INF) and not takes(SEVEN, dim=0)
    assert not takes(torch.ones(64, 8, dtype=BF16)) and not takes(SLICED) and not takes(SHIFTED)
    assert not takes(SEVEN, torch.ones(1, dtype=BF16).expand(64)) and not takes(SEVEN, torch.ones(64))
    assert not takes(SEVEN, torch.ones(65, dtype=BF16)[1:])


def test_public_functions_take_them_for_large_tensors(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETING", False)
    x = torch.empty(2**18, 7, dtype=BF16, device="meta")
    wanted = x.clone().requires_grad_()
    with compiling_for(90, lambda *kernel: None):

        def chosen(name, x, dim=1, **how):
            return ops.explain(name, x, dim=dim, **how).implementation

        assert all(chosen(name, x) == "cuda" for name in MODULES)
        assert chosen("sum", x, 0) == chosen("sum", x.float()) == "triton"
        assert chosen("sum", x[:1000]) == "triton", "too few elements"
        for slower in (x.float(), x.view(-1, 14)[:, :6].contiguous()):
            assert chosen("argmax", slower.repeat(2, 1)) == "triton"
        assert chosen("max", wanted) == "cuda-mask" and chosen("max", wanted[:1000]) == "triton-mask"
        for name, kernels in (("norm", ("cuda", "triton")), ("max", ("cuda-mask", "triton-mask"))):
            assert (chosen(name, x, direction="backward"), chosen(name, x[:1000], direction="backward")) == kernels
        assert chosen("norm", x, direction="backward", p=3.0) == "torch"
        assert "spans" in ops.explain("min", torch.empty(8, 2**20, device="meta"), dim=1, direction="backward").reason


@pytest.mark.skipif(not INTERPRETING, reason="on a GPU `weft verify` runs it")
def test_a_gradient_of_fp32_follows_tritons_forward():
    """Triton's forward reaches the rate of the memory in fp32; the kernel of the gradient takes fp32."""
    x = torch.ones(8, 7, requires_grad=True)
    cuda = registry.get("norm").find("cuda").function
    torch.testing.assert_close(cuda(x, dim=1), torch.linalg.vector_norm(x, dim=1))
    with pytest.raises(Declined, match="float32"):
        cuda(x.detach(), dim=1)
