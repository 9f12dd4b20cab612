"""The kernels over symmetric memory on the CPU emulator: each rank is some of the blocks of one launch, with a memory of its
own, and makes several calls, whose ends its blocks wait for as kernels of a stream do. Values are integers: sums are exact."""

import functools
import struct
from dataclasses import dataclass

import cuda_as_cpp
import pytest
import torch
import turns
from cuda_on_cpu import BF16, FP32, FRAME, Emulated, Suite, difference, frame_is_whole, framed, job, tensor_of

from weft.comm.symmetric import expert_launches
from weft.comm.symmetric.expert_launches import Form
from weft.comm.symmetric.launches import FLAGS_END, SOURCE, buffer_bytes
from weft.operators.cuda import CTYPES, CudaPlan

SHARE_OF_MISTAKES = 4  # a run has one in so many
# of a rank instead of the launch; a rank's kernel ends when all its blocks have come
RANKS = """
#define blockIdx rank_block()
#define gridDim rank_grid()
#define blockDim rank_threads()
#define __syncthreads() block_meets()
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline u32 RANK_BLOCKS;
inline u32 rank_now() { return machine.now->block->index.x / RANK_BLOCKS; }
inline Index rank_block() { return {machine.now->block->index.x % RANK_BLOCKS}; }
inline Index rank_grid() { return {RANK_BLOCKS}; }
inline Index rank_threads() { return {machine.block_threads}; }
inline void block_meets() {
  Block *block = machine.now->block;
  append(block->arriving[0], machine.now->unreleased);
  meet(block->meetings[0], machine.block_threads, [=] { append(block->met[0], block->arriving[0]); });
}
inline Meeting ENDS[8];
inline void kernel_ends() {
  show(machine.now->unreleased);
  for (auto &meeting : machine.now->block->met) show(meeting.second);
  meet(ENDS[rank_now()], RANK_BLOCKS * machine.block_threads);
}
"""


def text_of(source):
    return RANKS + cuda_as_cpp.whole(source)


class Job:
    """What the two below share: a plan with the number of blocks of all ranks."""

    def plan_of(self, name, blocks):
        self.plan = CudaPlan(SOURCE, name, (self.case.n * blocks, 1), 64, ())
        self.blocks = blocks


# ---- all-reduces -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Calls of so many units of 16 bytes, one after another, on ranks of so many blocks; of the fused kernel one block has a
    row."""

    algorithm: str
    n: int = 2
    dtype: torch.dtype = BF16
    units: tuple[int, ...] = (100, 12, 70)
    blocks: int = 2
    each: int = 1
    flagged: bool = False

    @property
    def kernel(self) -> str:
        flags = f", {self.each}, {str(self.flagged).lower()}" if self.algorithm == "add_rms_norm" else ""
        return f"{self.algorithm}<{CTYPES[self.dtype]}, {self.n}{flags}>"


MOST = 128 * 16


class AllReduces(Job):
    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        self.plan_of(case.kernel, case.blocks)
        g = torch.Generator().manual_seed(seed)
        self.fused = case.algorithm == "add_rms_norm"
        count = 16 // case.dtype.itemsize  # elements of a unit
        self.counts = [u * count * (case.blocks if self.fused else 1) for u in case.units]
        calls = [torch.randint(-8, 9, (case.n, c), generator=g).to(case.dtype) for c in self.counts]
        self.x = torch.cat([x.reshape(-1) for x in calls])  # [calls][ranks][elements]
        rest, self.sums = [], []
        for x in calls:
            rest.append(torch.randint(-8, 9, x[:1].shape, generator=g).to(case.dtype))
            self.sums.append(x.double().sum(0) + (rest[-1][0].double() if self.fused else 0))
        self.rest = torch.cat([r.reshape(-1) for r in rest])
        self.weight = torch.randint(1, 4, (max(self.counts),), generator=g).to(case.dtype)

    @property
    def launch(self) -> str:
        c, t = self.case, CTYPES[self.case.dtype]
        call = f"{c.kernel}(x, out, mine, peers, at, units);"
        if self.fused:
            call = (
                f"{c.kernel}(x, {t}_of(job.buffers[1]) + before / {c.n}, {t}_of(job.buffers[2]), normed, out, mine, "
                "peers, at, units, 0.f);"
            )
        rows = f"{c.blocks} * " if self.fused else ""
        return f"""
const auto {t}_of = [](void *p) {{ return static_cast<{t} *>(p); }};
RANK_BLOCKS = {c.blocks}, machine.late_stores = true;
char *const memories = static_cast<char *>(job.buffers[8]) + {FRAME};
job.run([&] {{
  const u32 rank = rank_now();
  Peers peers;
  for (int r = 0; r < {c.n}; r++) peers.base[r] = reinterpret_cast<u64>(memories + r * job.shape[0]);
  char *const mine = memories + rank * job.shape[0];
  const Layout at = {{job.shape[1], job.shape[2], job.shape[3], job.shape[4], rank, 0}};
  i64 before = 0;
  for (int call = 0; call < {len(c.units)}; call++) {{
    const i64 units = job.shape[5 + call], count = {rows}units * 16 / sizeof({t});
    {t} *const x = {t}_of(job.buffers[0]) + before + rank * count;
    {t} *const out = {t}_of(static_cast<char *>(job.buffers[4]) + {FRAME}) + before + rank * count;
    {t} *const normed = {t}_of(job.buffers[10]) + before + rank * count;
    {call}
    kernel_ends();
    before += count * {c.n};
  }}
}});
"""

    def job(self) -> bytes:
        n = self.case.n
        size = buffer_bytes(n, MOST, MOST)
        shape = [size, FLAGS_END, MOST, FLAGS_END + 4 * n * MOST, MOST, *self.case.units]
        memory = bytes([0xA5]) * FRAME + bytes(n * size) + bytes([0xA5]) * FRAME
        buffers = {
            0: self.x,
            1: self.rest,
            2: self.weight,
            4: framed(self.x.nbytes),
            8: memory,
            10: bytes(self.x.nbytes),
        }
        return job(self.plan, self.seed, buffers, shape=shape, factors=(), static=True)

    def what_is_wrong(self, found: bytes) -> str:
        size, memory = self.x.nbytes + 2 * FRAME, self.case.n * buffer_bytes(self.case.n, MOST, MOST) + 2 * FRAME
        if not (frame_is_whole(found[:size]) and frame_is_whole(found[size : size + memory])):
            return "something is written beside the results or the memories"
        got = tensor_of(found[FRAME : size - FRAME], self.case.dtype)
        normed = tensor_of(found[size + memory :], self.case.dtype)
        first = 0
        for call, (count, want) in enumerate(zip(self.counts, self.sums, strict=True)):
            for rank in range(self.case.n):
                here = slice(first, first + count)
                if wrong := difference(f"call {call}, rank {rank}: ", got[here], want.to(self.case.dtype)):
                    return wrong
                if self.fused:
                    rows = want.view(self.case.blocks, -1)
                    right = rows * rows.square().mean(1, keepdim=True).rsqrt() * self.weight[: rows.shape[1]].double()
                    if wrong := difference(
                        f"norm {call}, {rank}: ", normed[here], right.view(-1), 2**-7 * right.abs().max()
                    ):
                        return wrong
                first += count
        return ""


ALL_REDUCES = {
    "flags in the data": Case("one_shot_flagged"),
    "flags in the data, three ranks, fp32": Case("one_shot_flagged", 3, FP32, (60, 5, 60, 60)),
    "one-shot": Case("one_shot", units=(100, 12, 70, 100)),
    "one-shot, four ranks, fp32": Case("one_shot", 4, FP32, (70, 3, 128), blocks=3),
    "two-shot": Case("two_shot", units=(100, 12, 70, 100)),
    "two-shot, three ranks": Case("two_shot", 3, units=(99, 3, 72, 99)),
    "rows, flags in the data": Case("add_rms_norm", units=(50, 60, 7), flagged=True),
    "rows": Case("add_rms_norm", 3, units=(34, 40, 7), blocks=3),
    "rows of several units a thread": Case("add_rms_norm", units=(64, 60), each=2),
}
# what follows the second meeting of a kernel
SUMS = "  for (i64 u = from + threadIdx.x; u < to; u += blockDim.x) {\n    float sum[C] = {};\n#pragma unroll\n"
ONE_SHOT = SUMS + "    for (int r = 0; r < N; r++)\n      add(sum, load<T, C>((r == at.rank"
MEET, MEET_BEFORE = (
    f"  tell<N>(peers, at.rank, 0, {c});\n  await<N>(mine, at.rank, 0, {c});\n" for c in ("call", "call - 1")
)
HALF = "const i64 half = at.flagged{};\n  const i64 first"
TELL = "tell(const Peers &peers, u32 rank, int kind, u32 call) {"
PART = "store(there + u * C, load<T, C>(x + ({} * part + u) * C));"
ALL_REDUCE_MISTAKES = {
    "one-shot does not wait": ("one-shot", "  await<N>(mine, at.rank, 0, call);\n" + ONE_SHOT, ONE_SHOT),
    "one-shot waits for the call before": ("one-shot", MEET + ONE_SHOT, MEET_BEFORE + ONE_SHOT),
    "one half of the flagged buffers": (
        "flags in the data",
        HALF.format(" + (call & 1) * N * at.flagged_most * 2"),
        HALF.format(""),
    ),
    "only the first flag": ("flags in the data", "(first != flag || second != flag)", "(first != flag)"),
    "any flag": ("flags in the data", "(first != flag || second != flag)", "(!first || !second)"),
    "two-shot's sums are not waited for": ("two-shot", "  await<N>(mine, at.rank, 1, call);\n", ""),
    "sums over the parts": (
        "two-shot, three ranks",
        "+ at.rank * at.most + at.most / 2) + u * C, w);",
        "+ at.rank * at.most) + u * C, w);",
    ),
    "ranks' parts in another's place": ("two-shot, three ranks", PART.format("r"), PART.format("at.rank")),
    "rows do not wait": ("rows", "  if constexpr (!FLAGGED) await<N>(mine, at.rank, 0, call);\n", ""),
    "no residual": ("rows, flags in the data", "      add(h, rest[k]);\n", ""),
    "a warp's squares": (
        "rows of several units a thread",
        "warp_sum(threadIdx.x % 32 < blockDim.x / 32 ?",
        "(threadIdx.x % 32 < 0 ?",
    ),
    "the call is not counted": ("one-shot", "      state[0] = call;\n", ""),
    "flags before the data": ("one-shot", f"{TELL}\n  __syncthreads();", TELL),
}


# ---- the experts' exchange -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """Rounds of so many tokens on each rank."""

    rounds: tuple[tuple[int, ...], ...]
    k: int = 2
    experts: int = 6
    width: int = 24
    tokens: int = 5
    blocks: int = 2

    @property
    def n(self) -> int:
        return len(self.rounds[0])

    @property
    def form(self) -> Form:
        return Form(self.n, self.tokens, self.width, self.k, self.experts, FP32)


class Exchanges(Job):
    def __init__(self, case: Exchange, seed: int = 0):
        self.case, self.seed = case, seed
        self.plan_of("dispatch", case.blocks)
        g = torch.Generator().manual_seed(seed)
        shape = (len(case.rounds), case.n, case.tokens)
        self.x = torch.randint(-8, 9, (*shape, case.width), generator=g).float()
        self.experts = torch.rand((*shape, case.experts), generator=g).topk(case.k).indices.int()
        self.experts[:, :, 1::3, 0] = -1
        self.weights = torch.randint(1, 4, self.experts.shape, generator=g).float()

    @property
    def launch(self) -> str:
        c, f = self.case, self.case.form
        names = ("experts", "weights", "rows", "returned", "end")
        places = ", ".join(f"{name} = {offset}" for name, offset in zip(names, f.offsets, strict=True))
        return f"""
constexpr i64 N = {c.n}, K = {c.k}, MOST = {c.tokens}, WIDTH = {c.width}, SLOTS = N * MOST, {places};
RANK_BLOCKS = {c.blocks}, machine.late_stores = true;
char *const memories = static_cast<char *>(job.buffers[8]) + {FRAME};
job.run([&] {{
  const u32 rank = rank_now();
  Peers peers;
  for (int r = 0; r < N; r++) peers.base[r] = reinterpret_cast<u64>(memories + r * end);
  char *const mine = memories + rank * end;
  const Places at = {{experts, weights, rows, returned, MOST, WIDTH / 4, rank, int(K), {f.each}, 0}};
  float *const y = static_cast<float *>(job.buffers[10]) + rank * SLOTS * WIDTH;
  for (int round = 0; round < {len(c.rounds)}; round++) {{
    const i64 *const counts = static_cast<i64 *>(job.buffers[3]) + round * N, tokens = counts[rank];
    const i64 first = (round * N + rank) * MOST;
    const float *const x = static_cast<float *>(job.buffers[0]) + first * WIDTH;
    const int *const chosen = static_cast<int *>(job.buffers[1]) + first * K;
    const float *const scale = static_cast<float *>(job.buffers[2]) + first * K;
    float *const out = reinterpret_cast<float *>(static_cast<char *>(job.buffers[4]) + {FRAME}) + first * WIDTH;
    dispatch<N>(x, chosen, scale, mine, peers, at, tokens);
    kernel_ends();
    for (i64 slot = rank_block().x; slot < SLOTS; slot += RANK_BLOCKS) {{  // expert e multiplies by e + 1
      float factor = NAN;  // of rows that hold nothing
      for (i64 j = slot * K; j < slot * K + K; j++) {{
        const int e = reinterpret_cast<int *>(mine + experts)[j];
        const float weight = reinterpret_cast<float *>(mine + weights)[j];
        if ((e >= 0) != (weight != 0)) fail("an expert of another rank, or one without its weight");
        if (e >= 0 && slot % MOST >= counts[slot / MOST]) fail("an expert of a token that is not there");
        if (e >= 0) factor = (std::isnan(factor) ? 0 : factor) + weight * (rank * at.each + e + 1);
      }}
      for (i64 i = slot * WIDTH + threadIdx.x; i < slot * WIDTH + WIDTH; i += machine.block_threads)
        y[i] = reinterpret_cast<float *>(mine + rows)[i] * factor;
    }}
    kernel_ends();
    combine<float, N>(y, chosen, out, mine, peers, at, tokens);
    kernel_ends();
  }}
}});
"""

    def job(self) -> bytes:
        c = self.case
        counts = struct.pack(f"<{len(c.rounds) * c.n}q", *(t for each in c.rounds for t in each))
        frame = bytes([0xA5]) * FRAME
        memory = frame + bytes(c.n * c.form.offsets[-1]) + frame
        y = bytes(c.n * c.form.slots * c.width * 4)
        buffers = {0: self.x, 1: self.experts, 2: self.weights, 3: counts, 4: framed(self.x.nbytes), 8: memory, 10: y}
        return job(self.plan, self.seed, buffers, shape=(), factors=(), static=True)

    def what_is_wrong(self, found: bytes) -> str:
        c, size = self.case, self.x.nbytes + 2 * FRAME
        memory = c.n * c.form.offsets[-1] + 2 * FRAME
        if not (frame_is_whole(found[:size]) and frame_is_whole(found[size : size + memory])):
            return "something is written beside the results or the memories"
        got = tensor_of(found[FRAME : size - FRAME], FP32).view(self.x.shape)
        want = self.x.double() * (self.weights * (self.experts + 1)).sum(-1, keepdim=True)
        for number, each in enumerate(c.rounds):
            for rank, tokens in enumerate(each):
                if wrong := difference(
                    f"round {number}, rank {rank}: ", got[number, rank, :tokens], want[number, rank, :tokens]
                ):
                    return wrong
                if set(got[number, rank, tokens:].contiguous().view(torch.uint8).view(-1).tolist()) - {0xA5}:
                    return "something is written behind the tokens"
        return ""


EXCHANGES = {
    "two ranks": Exchange(((5, 5), (2, 0), (1, 5))),
    "three ranks": Exchange(((5, 3, 4), (0, 5, 1)), k=3),
}
EXCHANGE_MISTAKES = {
    "dispatch does not wait": ("two ranks", "  await<N>(mine, at.rank, 0, call);\n", ""),
    "combine does not wait": ("two ranks", "  await<N>(mine, at.rank, 1, call);\n", ""),
    "all ranks' experts": ("two ranks", "there ? e % at.each : -1;", "e % at.each;"),
    "experts of the round before": (
        "two ranks",
        "e = t < tokens ? experts[t * at.k + j] : -1;",
        "e = experts[t * at.k + j];",
    ),
    "slots of the first rank": ("two ranks", "const i64 slot = at.rank * at.most + t;", "const i64 slot = t;"),
    "rows to the first expert's rank": ("two ranks", "found |= 1u <<", "found = found ? found : 1u <<"),
    "returned as from its owner": ("three ranks", "at.returned) + (at.rank *", "at.returned) + (r *"),
    "the own row as returned": ("two ranks", "r == at.rank ? y : ", ""),
}
SUITES = {
    "all-reduces": Suite(text_of(SOURCE), AllReduces, ALL_REDUCES, ALL_REDUCE_MISTAKES),
    "exchanges": Suite(text_of(expert_launches.SOURCE), Exchanges, EXCHANGES, EXCHANGE_MISTAKES),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    def made(suite):
        return Emulated(tmp_path_factory.mktemp("emulated"), SUITES[suite], lambda m: in_turn(suite, m))

    return functools.cache(made)


def in_turn(suite, mistake):
    return turns.has(f"{suite} {mistake}", SHARE_OF_MISTAKES)


@pytest.mark.parametrize(("suite", "case"), [(s, c) for s in SUITES for c in SUITES[s].cases])
def test_ranks_are_right(emulated, suite, case):
    for seed in range(3):
        assert emulated(suite).what_is_wrong(SUITES[suite].cases[case], seed) == ""


@pytest.mark.parametrize(("suite", "mistake"), [(s, m) for s in SUITES for m in SUITES[s].mistakes])
def test_a_mistake_is_noticed(emulated, suite, mistake):
    if not in_turn(suite, mistake):
        pytest.skip("not of this run: make test-all has it")
    case = SUITES[suite].of_mistake(mistake)
    assert any(emulated(suite).what_is_wrong(case, seed, mistake) for seed in range(40))
