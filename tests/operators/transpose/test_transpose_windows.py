"""Transposes whose rows begin anywhere on the CPU emulator; the banks that lanes access; what is compiled and declined."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from cuda_as_cpp import whole
from cuda_on_cpu import BF16, FP32, FRAME, Launched, Suite, bytes_of, frame_is_whole, framed, job, tensor_of
from emulated import *  # noqa: F403
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import names, parts, sass

from weft import ops
from weft.definition import ARCHITECTURES, Declined
from weft.operators.cuda import CudaPlan, compile_cubin
from weft.operators.launch import compiling_for
from weft.operators.transpose import dispatch
from weft.operators.transpose.dispatch import FORWARD, WINDOWS, TransposeCall, windows_plan


@dataclass(frozen=True)
class Case:
    """A matrix or a batch of them, and the tile that transposes it."""

    m: int
    n: int
    dtype: torch.dtype = BF16
    layout: str = "contiguous"  # or "padded", "off by one", "expanded"
    batch: int = 0
    heads: int = 0
    tile: tuple[int, int, int] = (64, 64, 64)  # R, C, THREADS
    group: int = 2
    y_at: int = 0  # bytes past a sector


CASES = {
    "both odd": Case(131, 199),
    "one more, one less": Case(127, 129),
    "three modulo four": Case(133, 193),
    "even columns": Case(129, 198),
    "even rows": Case(194, 131),
    "multiples of four": Case(132, 196),
    "multiples of tiles": Case(128, 192),
    "a sector more": Case(144, 192),
    "padded": Case(131, 130, layout="padded"),
    "off by one": Case(131, 194, layout="off by one"),
    "one row in memory": Case(145, 67, layout="expanded"),
    "a batch": Case(65, 67, batch=3),
    "a batch of batches": Case(33, 39, batch=2, heads=3),
    "a batch, off by one": Case(35, 66, batch=3, layout="off by one"),
    "one element": Case(1, 1),
    "one row": Case(1, 150),
    "one column": Case(150, 1),
    "bands of one": Case(331, 67, group=1),
    "bands that do not fill": Case(260, 67, group=4),  # five tile rows in two bands of three
    "one band": Case(331, 67, group=64),
    "as chosen": Case(259, 387, tile=(128, 128, 256)),
    "more rows than threads": Case(300, 131, tile=(128, 64, 128)),
    "fp16": Case(131, 199, torch.float16),
    "y begins within a sector": Case(131, 199, y_at=18),
    "fp32, both odd": Case(67, 99, FP32, tile=(32, 32, 64)),
    "fp32, one modulo four": Case(65, 97, FP32, tile=(32, 32, 64)),
    "fp32, even": Case(66, 98, FP32, tile=(32, 32, 64)),
    "fp32, padded": Case(70, 65, FP32, "padded", tile=(32, 32, 64)),
    "fp32, a batch": Case(35, 37, FP32, batch=3, tile=(32, 32, 64)),
    "fp32, as chosen": Case(263, 133, FP32, tile=(128, 64, 256)),
}

MISTAKES = {
    "windows begin with tiles": ("both odd", "const int before = int(u32(y_row) % 32);", "const int before = 0;"),
    "the row above": ("both odd", "(SECTOR<T> - 1 + v * K<T>) * PITCH", "(SECTOR<T> - 2 + v * K<T>) * PITCH"),
    "the last word left out": ("both odd", "= last[i];", "= 0;"),
    "half words not guarded": ("both odd", "if (n >= 0 && n + PAIR <= N)", "if (true)"),
    "the first half word left out": ("off by one", "else if (PAIR == 2 && n == -1)", "else if (false)"),
    "the last half word left out": ("both odd", "else if (PAIR == 2 && n >= 0 && n < N)", "else if (false)"),
    "rows beyond the matrix read": ("both odd", "if (m >= 0 && m < M) {", "{"),
    "a column before the matrix": ("one row in memory", "n_all >= PAIR - 1", "n_all >= 0"),
    "inside one row too many": ("both odd", "m_all + R <= M &&", "m_all <= M &&"),
    "halves exchanged": ("both odd", "0x5410", "0x1054"),
    "edges not written": ("both odd", "reinterpret_cast<Bits *>(to)[j] = column[j * PITCH];", ";"),
    "edges not guarded": ("both odd", "if (m >= 0 && m + K<T> <= M) return", "if (m + K<T> <= M) return"),
    "columns beyond the matrix": ("both odd", "if (n_all + c >= N) return;", ""),
    "the barrier left out": ("both odd", "__syncthreads();", ""),
    "the first matrix for all": ("a batch", "x_all += i64(b / u32(B1)) * x_b0 + i64(b % u32(B1)) * x_b1, ", ""),
    "batch strides exchanged": ("a batch of batches", "u32(B1)) * x_b0 +", "u32(B1)) * x_b1 +"),
    "pairs assumed on words": ("off by one", "const int odd = origin / SIZE % PAIR;", "const int odd = 0;"),
}  # fmt: skip

BOUNDS = """static u64 low, high;
inline void read(u64 p, int bytes) {
  if (p < low || p + bytes > high || p % bytes) fail("a read outside x, or misaligned");
}
"""


class Tensors(Launched):
    cpp = """
low = u64(job.buffers[0]) + job.scales[0], high = low + u64(job.factors[0]);
const Any x{reinterpret_cast<void *>(low)}, y{static_cast<char *>(job.buffers[4]) + u64(job.factors[1])};
job.run([&] { KERNEL(x, y, SCALARS); });
"""

    def planned(self, case: Case, g: torch.Generator, patch) -> CudaPlan:
        m, n, b, h = case.m, case.n, case.batch or 1, case.heads or 1
        bits = torch.int16 if case.dtype.itemsize == 2 else torch.int32
        memory = torch.randint(-(2**14), 2**14, (b * h * m * (n + 3) + 1,), generator=g).to(bits)
        self.bits = {
            "contiguous": memory[: b * h * m * n].view(b, m, h, n).transpose(1, 2),
            "padded": memory[: b * h * m * (n + 3)].view(b, m, h, n + 3).transpose(1, 2)[..., :n],
            "off by one": memory[1 : 1 + b * h * m * n].view(b, m, h, n).transpose(1, 2),
            "expanded": memory[1 : 1 + n].expand(b, h, m, n),
        }[case.layout]
        if not case.heads:
            self.bits = self.bits.squeeze(1)
        self.x = self.bits.view(case.dtype)
        r, c, threads = case.tile
        trial = {"R": r, "C": c, "THREADS": threads, "GROUP": case.group}
        patch.setattr(dispatch.windows_configuration, "trial", trial)
        return windows_plan(TransposeCall(self.x))

    def job(self) -> bytes:
        size = self.case.dtype.itemsize
        begin = self.x.storage_offset() * size
        span = (sum((n - 1) * s for n, s in zip(self.x.shape, self.x.stride(), strict=True)) + 1) * size
        memory = bytes_of(self.x)[: begin + span]  # behind the last element lies a page that may not be touched
        buffers = {0: memory, 4: framed(self.x.numel() * size + 32)}
        return job(self.plan, self.seed, buffers, scales=(begin,), factors=(span, FRAME + self.case.y_at))

    def what_is_wrong(self, found: bytes) -> str:
        want = self.bits.transpose(-1, -2).contiguous()
        begin, end = FRAME + self.case.y_at, FRAME + self.case.y_at + want.nbytes
        if not frame_is_whole(found, begin, end):
            return "something beside y was written"
        got = tensor_of(found[begin:end], want.dtype).view(want.shape)
        far = (got != want).nonzero()
        return f"y{far[0].tolist()} and {len(far) - 1} others of {want.numel()} are wrong" if len(far) else ""


def checked() -> str:
    """The kernel's text, whose reads ask whether they lie in x."""
    text = BOUNDS + whole(WINDOWS)
    one, two = ("u32 word;\n  asm", "read(p, 4);\n  u32 word;\n  asm"), ("{ return *", "{ read(p, 2); return *")
    for access, checked in (one, two):
        assert text.count(access) == 1
        text = text.replace(access, checked)
    return text


SUITES = {"windows.cu": Suite(checked(), Tensors, CASES, MISTAKES)}


def passes(words: list[int]) -> int:
    """How often 32 banks of 4 bytes must be asked for these words."""
    return max(Counter(word % 32 for word in set(words)).values())


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("x_row", range(129, 137))
@pytest.mark.parametrize("m", range(129, 137))
def test_columns_of_a_tile_lie_in_different_banks(dtype, m, x_row):
    """What a warp reads from shared memory at once: of each of 4 columns, a row of each of 8 vectors of y."""
    size, c = dtype.itemsize, 256 // dtype.itemsize
    k, sector = 16 // size, 32 // size
    pitch, step = dispatch.pitch_and_step(dtype, c, m, x_row)
    assert pitch >= c + 4 // size - 1 and (pitch - x_row) % (4 // size) == 0
    best = 1 if (x_row if size == 2 else m + 1) % 2 else 2
    for odd in range(4 // size):
        for i in range(k):
            first = [sector - 1 - (j * step * m + 3) % sector + i for j in range(4)]
            lanes = [((first[j] + v * k) * pitch + odd + j * step) * size // 4 for v in range(8) for j in range(4)]
            assert passes(lanes) == best


@pytest.mark.parametrize(("dtype", "loads", "most"), [(BF16, 36, 700), (FP32, 34, 620)])
def test_a_block_inside_takes_few_instructions(dtype, loads, most):
    """Of a warp on sm_90, where neither the matrix ends nor a batch goes on: what README.md counts. Nothing is spilled, and all
    of its loads but one are two batches that nothing waits between."""
    with compiling_for(90, lambda *kernel: None):
        plan = windows_plan(TransposeCall(torch.empty(16383, 16385, dtype=dtype, device="meta")))
    text = sass(WINDOWS, plan.expression)
    counts = [Counter(name.partition(".")[0] for name in names(part)) for part in parts(text)]
    fetch = next(part for part in counts if part["LDG"] >= loads)
    drain = next(part for part in counts if part["STG"] == 8)
    start = sum(sum(part.values()) for part in counts[:2])
    assert drain["LDS"] == 8 * 16 // dtype.itemsize and fetch["STS"] >= loads
    assert sum(fetch.values()) + sum(drain.values()) + start <= most


@pytest.mark.share(4)
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_candidate_compiles(sm, dtype):
    pytest.importorskip("cuda.bindings")
    found = list(dispatch.windows_candidates(sm, dtype, 2**28))
    assert dispatch.windows_heuristic(sm, dtype, 2**28) in found and len(found) > 20
    tiles = {(c["R"], c["C"], c["THREADS"]): c for c in found}
    x = torch.empty(1001, 1003, dtype=dtype, device="meta")
    for config in tiles.values() if sm == 90 else [dispatch.windows_heuristic(sm, dtype, 2**28)]:
        with pytest.MonkeyPatch.context() as patch, compiling_for(sm, lambda *kernel: None):
            patch.setattr(dispatch.windows_configuration, "trial", config)
            plan = windows_plan(TransposeCall(x))
        assert plan.shared_bytes <= dispatch.SHARED_BYTES
        assert compile_cubin(WINDOWS, plan.expression, sm)[0]


REFUSED = [
    bad(FORWARD.kernel("cuda").of, Declined, "columns 2 elements apart", (torch.empty(8, 20)[:, ::2],)),
    bad(FORWARD.kernel("cuda").of, Declined, "collapse", (torch.empty(2, 2, 20, 2, 8).transpose(1, 3)[:, :, ::2],)),
]


def test_rows_on_16_bytes_go_by_vectors():
    with compiling_for(90, lambda *kernel: None):
        assert FORWARD.kernel("cuda").of((torch.empty(16, 24),)).source.name == "vectors.cu"
        assert FORWARD.kernel("cuda").of((torch.empty(15, 24),)).source.name == "windows.cu"


def test_the_public_function_takes_it_for_large_matrices(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETING", False)
    x = torch.empty(1025, 1027, device="meta")
    with compiling_for(90, lambda *kernel: None):
        assert ops.explain("transpose", x).implementation == "cuda"
        assert ops.explain("transpose", x[:, ::2]).implementation == "triton"
        assert ops.explain("transpose", x[:1000, :1001]).implementation == "triton", "too few elements"
