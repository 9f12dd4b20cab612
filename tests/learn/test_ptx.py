"""The interpreter of PTX: arithmetic against NumPy, what it counts, and the mistakes that it must find and not invent."""

import numpy as np
import pytest
from where import DEVICE

pytest.importorskip("cuda.bindings.nvrtc")

from weft.learn import course, cuda, pictures
from weft.learn.checks import Checks, Rejected

RNG = np.random.default_rng(7)
N = 96
INTS = RNG.integers(-(2**31), 2**31, (2, N)).astype(np.int32)
INTS[1][INTS[1] == 0] = 3
INTS[:, :4] = [[7, -7, 7, -7], [2, 2, -2, -2]]
FLOATS = RNG.normal(0, 3, (2, N)).astype(np.float32)
F32, I32, U32, I64 = np.float32, np.int32, np.uint32, np.int64


def kernel(source, name="k"):
    return cuda.kernel(Checks(sources={".cu": source}), name)


def each(expression, of, out, a, b):
    """The expression of ``a``, ``b`` (and the index ``i``) for every element."""
    names = {
        F32: "float",
        I32: "int",
        U32: "unsigned",
        I64: "long long",
        np.uint8: "unsigned char",
        np.float64: "double",
    }
    source = f"""__global__ void k(const {names[of]}* x, const {names[of]}* y, {names[out]}* z) {{
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        {names[of]} a = x[i], b = y[i];
        z[i] = {expression};
    }}"""
    z = np.zeros(N, out)
    made = kernel(source)
    made.launch((3,), (32,), a.astype(of), b.astype(of), z)
    assert made.problems == []
    return z


A, B = INTS.astype(np.int64)
INTEGER = [
    ("a + b", I32, A + B),
    ("a - b", I32, A - B),
    ("a * b", I32, A * B),
    ("~a ^ b", I32, ~A ^ B),
    ("-a | b", I32, -A | B),
    ("a / b", I32, np.fix(A / B)),
    ("a % b", I32, np.fmod(A, B)),
    ("a >> 3", I32, A >> 3),
    ("a << 5", I32, A << 5),
    ("(long long)a * b", I64, A * B),
    ("__mulhi(a, b)", I32, (A * B) >> 32),
    ("a / 7", I32, np.fix(A / 7)),
    ("a % 10", I32, np.fmod(A, 10)),
    ("min(a, b) + max(a, 5)", I32, np.minimum(A, B) + np.maximum(A, 5)),
    ("a < b ? 1 : b == 3 ? 2 : 3", I32, np.where(A < B, 1, np.where(B == 3, 2, 3))),
    ("__popc(a)", I32, [bin(x & 0xFFFFFFFF).count("1") for x in A.tolist()]),
    ("__clz(a)", I32, [32 - (x & 0xFFFFFFFF).bit_length() for x in A.tolist()]),
    ("(unsigned char)a", I32, A & 255),
    ("(signed char)a", I32, A.astype(np.int8)),
    ("abs(a >> 1)", I32, abs(A >> 1)),
    ("(a > 0 && b > 0) || i == 5", I32, ((A > 0) & (B > 0)) | (np.arange(N) == 5)),
    ("__brev(a)", I32, [int(f"{x & 0xFFFFFFFF:032b}"[::-1], 2) for x in A.tolist()]),
    ("__byte_perm(a, b, 0x7210)", I32, (A & 0xFFFFFF) | (B & 0xFF000000)),
    ("__funnelshift_l(a, b, 8)", I32, (B << 8) | ((A >> 24) & 255)),
]


@pytest.mark.parametrize(("expression", "out", "expected"), INTEGER, ids=[e for e, *_ in INTEGER])
def test_integers(expression, out, expected):
    assert each(expression, I32, out, *INTS).tolist() == np.asarray(expected).astype(np.int64).astype(out).tolist()


def test_unsigned():
    a, b = INTS.view(U32)
    wide = a.astype(np.uint64), b.astype(np.uint64)
    assert (each("a / b + a % b", U32, U32, a, b) == wide[0] // wide[1] + wide[0] % wide[1]).all()
    high = wide[0] * wide[1] >> np.uint64(32)
    assert (each("a < b ? a >> 2 : __umulhi(a, b)", U32, U32, a, b) == np.where(a < b, a >> 2, high)).all()


X, Y = FLOATS.astype(np.float64)
FLOAT = [
    ("a + b", X + Y),
    ("a * b - a", X * Y - X),
    ("fmaf(a, b, 1.5f)", X * Y + 1.5),
    ("a / b", X / Y),
    ("sqrtf(a * a)", abs(X)),
    ("fabsf(a)", abs(X)),
    ("fminf(a, b)", np.fmin(X, Y)),
    ("fmaxf(a, b)", np.fmax(X, Y)),
    ("expf(a)", np.exp(X)),
    ("logf(fabsf(a) + 1.f)", np.log(abs(X) + 1)),
    ("rsqrtf(a * a + 1)", 1 / np.sqrt(X * X + 1)),
    ("(float)(int)(a * 10)", np.trunc((FLOATS[0] * F32(10)).astype(np.float64))),
    ("floorf(a) + ceilf(b)", np.floor(X) + np.ceil(Y)),
    ("rintf(a)", np.rint(X)),
    ("__expf(a)", np.exp(X)),
    ("a > b ? a : -b", np.where(X > Y, X, -Y)),
    ("tanhf(a)", np.tanh(X)),
    ("(float)((double)a * b)", X * Y),
    ("__saturatef(a)", np.clip(X, 0, 1)),
    ("__int_as_float(__float_as_int(a) & 0x7fffffff)", abs(X)),
    ("a * i", X * np.arange(N)),
]


@pytest.mark.parametrize(("expression", "expected"), FLOAT, ids=[e for e, _ in FLOAT])
def test_floats(expression, expected):
    np.testing.assert_allclose(each(expression, F32, F32, *FLOATS), expected.astype(F32), rtol=1e-5, atol=1e-6)


REDUCE = """__global__ void k(const float* x, float* y, int n) {
    __shared__ float part[4];
    float s = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
    for (int o = 16; o; o /= 2) s += __shfl_xor_sync(0xffffffffu, s, o);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    if (threadIdx.x == 0) { for (int w = 1; w < 4; w++) s += part[w]; atomicAdd(y, s); }
}"""


def test_a_reduction_with_shuffles_shared_memory_and_atomics():
    x, y = RNG.integers(0, 9, 5000).astype(F32), np.zeros(1, F32)
    made = kernel(REDUCE)
    counts = made.launch((3,), (128,), x, y, 5000)
    assert (y[0], made.problems) == (x.sum(), [])
    assert (counts.bytes_read, counts.sectors_read, counts.atomics_global, counts.barriers) == (20000, 625, 3, 3)


def test_votes_and_dynamic_shared_memory_and_vectors():
    made = kernel("""__global__ void k(const float4* x, unsigned* votes, float* y) {
        extern __shared__ float row[];
        float4 v = x[threadIdx.x];
        row[threadIdx.x] = v.x + v.y + v.z + v.w;
        __syncthreads();
        y[threadIdx.x] = row[63 - threadIdx.x];
        unsigned b = __ballot_sync(0xffffffffu, v.x > 0);
        if (threadIdx.x % 32 == 0) votes[threadIdx.x / 32] = b;
    }""")
    x, votes, y = RNG.integers(-5, 5, (64, 4)).astype(F32), np.zeros(2, U32), np.zeros(64, F32)
    counts = made.launch((1,), (64,), x.reshape(-1), votes, y, shared_bytes=256)
    assert made.problems == [] and counts.sectors_read == 32
    assert y.tolist() == x.sum(1)[::-1].tolist()
    assert [f"{v:032b}"[::-1] for v in votes] == ["".join("01"[int(v > 0)] for v in x[w : w + 32, 0]) for w in (0, 32)]


def test_bank_conflicts_and_sectors():
    source = """__global__ void k(float* x, float* y, int stride) {{
        __shared__ float tile[32 * {width}];
        tile[threadIdx.x * {width}] = x[threadIdx.x * stride];
        __syncwarp();
        y[threadIdx.x] = tile[threadIdx.x * {width}];
    }}"""
    for width, conflicts in ((32, 62), (33, 0), (2, 2), (8, 14)):
        made = kernel(source.format(width=width))
        for stride, sectors in ((1, 4), (2, 8), (8, 32)):
            counts = made.launch((1,), (32,), np.ones(32 * 8, F32), np.zeros(32, F32), stride)
            assert (counts.conflicts, counts.sectors_read) == (conflicts, sectors)
        assert made.problems == []


def test_printf():
    t = Checks(
        sources={
            ".cu": """__global__ void k(const float* x, int n) {
        int i = threadIdx.x;
        if (i % 2) printf("%d of %u: %.2f %5s %x %lld %c%%\\n", -i, n, x[i], "a b", 255, 1LL << 40, 'z');
    }"""
        }
    )
    cuda.kernel(t, "k").launch((1,), (4,), np.arange(4, dtype=F32) / 2, 7)
    assert "".join(t.printed) == "".join(f"{-i} of 7: {i / 2:.2f}   a b ff {1 << 40} z%\n" for i in (1, 3))


HEAD = """__global__ void k(float* x, int n) { __shared__ float s[64]; int t = threadIdx.x, i = blockIdx.x * 64 + t; """
MISTAKES = [  # the body, a part of what is said
    ("if (i <= n) x[i] = 1; }", "x[100]; x has 100 elements"),
    ("if (i < n) x[i - 1] = 1; }", "x[-1]; x has 100 elements"),
    ("s[t] = 1; if (i < n) x[i] = s[63 - t]; }", "a race"),  # no barrier
    ("x[t % 32] = t; }", "a race"),  # several warps
    ("if (t == 0) x[0] = i; }", "a race"),  # several blocks
    ("x[0] += 1; }", "a race"),
    ("float v = s[0]; if (t == 63) s[0] = v + 1; if (i < n) x[i] = v; }", "a race"),  # all read it, the last one writes
    ("atomicAdd(x, 1.f); if (i < n) x[i] = x[0]; }", "a race"),
    ("if (i >= n) return; s[t] = i; __syncthreads(); x[i] = s[t]; }", "has ended"),
    (
        "if (t < 32) { s[t] = 1; __syncthreads(); } else { s[t] = 2; __syncthreads(); s[t] = 3; __syncthreads(); } "
        "if (i < n) x[i] = s[t]; }",
        "barrier",
    ),
    (
        "if (t < 16) { float v = __shfl_down_sync(0xffffffffu, (float)t, 1); x[t % 16] = 0; if (v == 99) x[0] = 1; } }",
        "lanes that the mask names",
    ),
    ("s[t + 1] = 1; __syncthreads(); if (i < n) x[i] = s[t]; }", "byte 256 of shared memory, which has 256"),
    ("if (i < 40) *(float*)((char*)x + 4 * i + 2) = 1; }", "misaligned"),
]


@pytest.mark.parametrize(("body", "said"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_found(body, said):
    made = kernel(HEAD + body)
    made.launch((2,), (64,), np.zeros(100, F32), 100)
    assert any(said in problem.en for problem in made.problems), made.problems
    assert all("line 1" in problem.en or "lines 1" in problem.en for problem in made.problems)
    with pytest.raises(Rejected) as rejected:
        made.safe()
    assert rejected.value.stage == "safe"


RIGHT = [
    "if (i < n) x[i] = i; }",
    "s[t] = t; __syncthreads(); float v = s[63 - t]; __syncthreads(); s[t] = v; __syncthreads(); if (i < n) x[i] = s[t]; }",
    "s[t] = t; __syncwarp(); float v = s[t ^ 1]; if (i < n) x[i] = v; }",  # within a warp
    "atomicAdd(x + t % 8, 1.f); }",
    "if (t < 32) { for (int r = 0; r < t; r++) s[t] = r; } __syncthreads(); if (i < n) x[i] = s[0] ; }",
    "for (int o = 32; o; o /= 2) { if (t < o) s[t] = o; __syncthreads(); } if (i < n) x[i] = 1; }",
]


@pytest.mark.parametrize("body", RIGHT)
def test_nothing_is_found_in_what_is_right(body):
    made = kernel(HEAD + body)
    made.launch((2,), (64,), np.zeros(128, F32), 128)
    assert made.problems == []


def test_what_does_not_compile_or_end():
    with pytest.raises(Rejected, match=r"line 1.*expected") as rejected:
        kernel("__global__ void k(float* x) { x[0] = ; }")
    assert rejected.value.stage == "parse"
    with pytest.raises(Rejected, match="no kernel k"):
        kernel("__global__ void other(float* x) { x[0] = 1; }")
    made = kernel("__global__ void k(volatile float* x) {\n  while (x[0] == 0) { }\n}")
    with pytest.raises(Rejected, match=r"did not end within 0\.2 s; it was at line 2"):
        made.launch((1,), (1,), np.zeros(1, F32), time_limit_s=0.2)
    with pytest.raises(TypeError, match="1 parameters, and 2"):
        made.launch((1,), (1,), np.zeros(1, F32), 5)


def scaled(n=1 << 10):
    source = """__global__ void k(const float* x, float* y, int n) {
        int i = blockIdx.x * 64 + threadIdx.x;
        if (i < n) y[i] = 2 * x[i];
    }"""
    t = Checks(sources={".cu": source})
    t.limit, t.machine = {"bytes": "8 * n"}, {"dram_gb_s": 1.0, "fp32_gflop_s": 1.0}
    return t, cuda.kernel(t, "k"), [np.arange(n, dtype=F32), np.zeros(n, F32), n]


def test_a_time_on_a_gpu_is_a_share_of_the_limit(monkeypatch):
    t, made, (x, y, n) = scaled()
    monkeypatch.setattr(
        cuda.Kernel, "_on_gpu", lambda *_: ([x, 2 * x, n], 16.384)
    )  # 8 bytes an element at 1 GB/s: 8.192 µs
    made.timed(t, (n // 64,), (64,), [x, y, n], {1: 2 * x}, at_least=0.5, n=n)
    assert t.notes[0].en == "k on the GPU: 16.4 µs, 50% of the limit (8.2 µs, memory)" and t.notes[0].zh
    with pytest.raises(Rejected, match="50% of the limit") as rejected:
        made.timed(t, (n // 64,), (64,), [x, y, n], {1: 2 * x}, at_least=0.6, n=n)
    assert rejected.value.stage == "fast"
    with pytest.raises(Rejected, match=r"y after k on the GPU: 1,023 of 1,024"):
        made.timed(t, (n // 64,), (64,), [x, y, n], {1: 3 * x}, at_least=0.1, n=n)


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU to time on")
def test_where_a_kernel_cannot_be_timed_that_is_said():
    t, made, (x, y, n) = scaled()
    made.timed(t, (n // 64,), (64,), [x, y, n], {1: 2 * x}, at_least=0.5, n=n)
    assert t.notes[0].en.startswith("not timed on the GPU: ") and t.notes[0].zh.startswith("未能在 GPU 上计时")


@pytest.mark.gpu
def test_a_kernel_on_a_gpu():
    t, made, (x, y, n) = scaled(1 << 20)
    t.machine["dram_gb_s"] = 1e-3
    made.timed(t, (n // 64,), (64,), [x, y, n], {1: 2 * x}, at_least=0.5, n=n)
    with pytest.raises(Rejected, match="failed on the GPU: CUDA error: an illegal memory access"):
        made.timed(t, (1 << 20,), (64,), [x[:64], y[:64], 1 << 26], {}, at_least=0.0, n=n)


def test_warps_are_drawn():
    t, made, (x, y, n) = scaled(128)
    t.traced = 3
    made.launch((2,), (64,), x, y, n)
    (launch,) = t.kernels
    drawn = "\n".join(line for line, _ in pictures.terminal(launch, "en", 80))
    assert "k: 2 blocks" in drawn and "A is warp 0, B warp 1" in drawn and "0 more for bank conflicts" in drawn
    rows = [line.split()[1:] for line in drawn.splitlines()[3:] if line.split()[:1] in (["0"], ["32"], ["64"], ["96"])]
    assert rows == [[letter] * 32 for letter in "ABC."] * 2
    assert 'title="元素 33: warp 1"' in pictures.page(launch, course.find("day5/transpose"), "zh")
