"""``masked_rows.cu`` on the CPU emulator, against float64; what it compiles to, when it is chosen and what it declines."""

import dataclasses
import functools

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import BF16, FP16, FP32, FRAME, Launched, Suite, difference, frame_is_whole, framed, job, tensor_of
from emulated import *  # noqa: F403
from sass import spills_nothing
from tensors import meta

from weft import ops
from weft.definition import Declined
from weft.operators.cuda import CudaPlan
from weft.operators.launch import compiling_for
from weft.operators.softmax import dispatch
from weft.operators.softmax.causal_softmax import hidden
from weft.operators.softmax.dispatch import ADDITIVE, BOOLEAN, CAUSAL, MASKED_BACKWARD, MASKED_FORWARD, NONE

INF = float("inf")
FORWARD, BACKWARD = MASKED_FORWARD.kernel("cuda"), MASKED_BACKWARD.kernel("cuda")
SOURCE = dispatch.FOLDER / "masked_rows.cu"
CONFIGURATIONS = dispatch.masked_rows_configuration, dispatch.masked_rows_backward_configuration


@dataclasses.dataclass(frozen=True)
class Case:
    """x [B, H, S, T] and a mask of a shape that broadcasts; ``backward`` of a causal mask."""

    dtype: torch.dtype = BF16
    shape: tuple[int, int, int, int] = (1, 1, 9, 264)
    kind: str = CAUSAL
    mask: tuple[int, ...] = ()
    added: torch.dtype | None = None  # an additive mask's, where it is not x's
    threads: int = 32
    each: int = 16
    share: int = 1
    scale: float = 0.5
    wild: bool = False  # rows with NaN and infinities
    apart: int = 0  # elements between two rows
    backward: bool = False


HEADS, KEYS, FULL = (2, 1, 3, 520), (2, 1, 1, 520), (2, 4, 3, 520)
CASES = {
    "causal, a warp": Case(shape=(1, 1, 300, 264)),
    "causal, two warps": Case(FP32, (2, 1, 37, 500), threads=64, each=8),
    "causal, more rows than columns": Case(FP16, (1, 2, 31, 16), each=8, wild=True, apart=8),
    "causal, wild": Case(FP32, (1, 1, 136, 136), threads=64, each=4, wild=True, scale=-0.5),
    "boolean": Case(shape=FULL, kind=BOOLEAN, mask=FULL, threads=64, wild=True),
    "boolean, heads": Case(shape=FULL, kind=BOOLEAN, mask=HEADS, threads=64, share=4),
    "boolean, keys": Case(FP32, FULL, BOOLEAN, KEYS, threads=128, each=8),
    "additive, heads": Case(shape=FULL, kind=ADDITIVE, mask=HEADS, threads=64, share=4, wild=True),
    "additive, a warp": Case(FP32, (1, 6, 3, 120), ADDITIVE, (3, 120), each=8, share=2),
    "additive, five heads": Case(FP32, (1, 10, 2, 16), ADDITIVE, (2, 16), each=4, share=8),
    "additive, of another dtype": Case(FP16, (1, 6, 3, 264), ADDITIVE, (3, 264), FP32, each=16, share=2),
    "no mask": Case(shape=(1, 1, 3, 264), kind=NONE, apart=16),
    "backward, a warp": Case(shape=(1, 1, 300, 264), backward=True),
    "backward, two warps": Case(FP32, (2, 1, 37, 500), threads=64, each=8, backward=True, apart=4),
    "backward, wild": Case(FP16, (1, 2, 30, 16), each=8, wild=True, backward=True),
}

MISTAKES = {
    "sees one more": ("causal, a warp", "int(row % S) + 1 +", "int(row % S) + 2 +"),
    "the row of all matrices": ("causal, two warps", "int(row % S)", "int(row)"),
    "counted from the first row": ("causal, more rows than columns", "+ 1 + (N - int(S))", "+ 1"),
    "the diagonal's access is whole": ("causal, a warp", "if (left >= COUNT) return;", "if (left > 0) return;"),
    "hidden as zeros": ("causal, a warp", "r.cut(f[v], v, sees, -infinity());", "r.cut(f[v], v, sees, 0.f);"),
    "zeros after NaN": ("causal, wild", "none[i] = factor * 0.f;", "none[i] = 0.f;"),
    "nothing after the diagonal": (
        "causal, a warp",
        "store<T, COUNT>(out + r.at(v), pack<T, COUNT>(none));\n",
        ";\n",
    ),
    "scale left out": ("causal, a warp", "__fmul_rn(f[v][i], scale)", "f[v][i]"),
    "boolean mask inverted": ("boolean, heads", "? 0.f : -infinity()", "? -infinity() : 0.f"),
    "bytes exchanged": ("boolean, heads", "0xffu << i % 4 * 8", "0xffu << (3 - i % 4) * 8"),
    "the mask of the next row": ("boolean, keys", "+ i1 * s1 + i2 * s2;", "+ i1 * s1 + i2 * s2 + COUNT;"),
    "the next matrix's mask": ("additive, heads", "mask += i0 * s0", "mask += (1 - i0) * s0"),
    "consecutive rows": ("boolean, heads", "k++, row += m2)", "k++, row++)"),
    "the same row again": ("additive, heads", "i64(row + m2) * x_row", "i64(row) * x_row"),
    "columns past the row": ("additive, a warp", "if (r.at(v) >= N) continue;\n      if", "if"),
    "one warp's maximum": ("causal, two warps", "return warp_max(shared.highest", "return x; return (shared.highest"),
    "one warp's sum": ("causal, two warps", "return warp_sum(thread % 32 < THREADS / 32 ?", "return x; return (0 ?"),
    "no barrier": ("causal, two warps", "total[thread / 32] = x;\n    __syncthreads();", "total[thread / 32] = x;"),
    "rows past the last": ("causal, more rows than columns", "if (GROUPS<THREADS> > 1 && r.unit >= rows / SHARE) return;", ""),
    "hidden y counts": ("backward, wild", "f[i] *= g[i];\n    r.cut(f, v, sees, 0.f);", "f[i] *= g[i];"),
    "hidden dx": ("backward, a warp", "(g[i] - sum);\n      r.cut(f, v, sees, 0.f);", "(g[i] - sum);"),
    "the gradient's scale": ("backward, two warps", "f[i] = scale * f[i]", "f[i] = f[i]"),
    "the sum left out": ("backward, two warps", "(g[i] - sum);", "g[i];"),
}  # fmt: skip


class Rows(Launched):
    cpp = """
const Any x{job.buffers[0]}, second{job.buffers[1]}, out{static_cast<char *>(job.buffers[4]) + 64};
job.run([&] { KERNEL(x, second, out, SCALARS); });
"""

    def planned(self, case: Case, g: torch.Generator, patch) -> CudaPlan:
        *front, s, t = case.shape

        def rows(times: float = 1.0) -> torch.Tensor:
            return (torch.randn(*front, s, t + case.apart, generator=g) * times).to(case.dtype)[..., :t]

        self.x, self.mask = rows(3.0), None
        if case.wild and not case.backward:
            at = self.x.view(-1, t) if not case.apart else self.x.flatten(0, 2)
            at[0, 0], at[-1, t // 2], at[1], at[-2, 1] = INF, torch.nan, -INF, -INF
        if case.kind == BOOLEAN:
            self.mask = torch.randn(case.mask, generator=g) > 0
            self.mask[..., 0] = True
            if case.wild:
                self.mask[0, 0, 0] = False
        elif case.kind == ADDITIVE:
            self.mask = torch.randn(case.mask, generator=g).to(case.added or case.dtype)
            if case.wild:
                self.mask[0, 0, 0] = -INF
        if case.backward:
            self.dy, self.x = rows(), self.softmax(self.x).to(case.dtype)
            if case.wild:
                self.dy[..., -1, -1], self.dy[..., 2, 0] = torch.nan, INF
        config = {"THREADS": case.threads, "EACH": case.each, "SHARE": case.share}
        self.second = self.dy if case.backward else self.x if self.mask is None else self.mask
        result = torch.empty_like(self.x)
        self.result = result.as_strided(result.shape, result.stride())
        patch.setattr(dispatch, "BLOCKS_PER_SM", 1)
        patch.setattr(dispatch, "multiprocessors", lambda device: 1)
        for configuration in CONFIGURATIONS:
            patch.setattr(configuration, "trial", config)
        if case.backward:
            return BACKWARD.of((self.x, self.dy), case.scale, True)
        return FORWARD.of((self.x, self.second), case.scale, case.kind)

    def job(self) -> bytes:
        buffers = {0: self.x, 1: self.second, 4: framed(self.result.untyped_storage().nbytes())}
        return job(self.plan, self.seed, buffers, static=True)

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        scores = x.double() * self.case.scale
        if self.case.kind == CAUSAL:
            scores = scores.masked_fill(hidden(x), -INF)
        elif self.case.kind == BOOLEAN:
            scores = scores + torch.zeros(self.mask.shape).double().masked_fill(~self.mask, -INF)
        elif self.case.kind == ADDITIVE:
            scores = scores + self.mask.double()
        return torch.softmax(scores, -1)

    def what_is_wrong(self, found: bytes) -> str:
        if not frame_is_whole(found):
            return "something is written beside the result"
        stored = tensor_of(found[FRAME:-FRAME], self.x.dtype)
        got = stored.as_strided(self.result.shape, self.result.stride()).double()
        rounding = {BF16: 2.0**-8, FP16: 2.0**-10, FP32: 2e-6}[self.x.dtype]
        if self.case.backward:
            y = self.x.double().masked_fill(hidden(self.x), 0)
            dy = self.dy.double().masked_fill(hidden(self.x), 0)
            want = self.case.scale * y * (dy - (y * dy).sum(-1, keepdim=True))
            want = want.masked_fill(hidden(self.x), 0)
            near = rounding * torch.nan_to_num(want, 0, 0, 0).abs().amax(-1, keepdim=True)
        else:
            want, near = self.softmax(self.x), torch.tensor(1e-7 if self.x.dtype == FP16 else 1e-30)
        return difference("result", got, want, rounding * want.abs() + near)


SUITES = {"masked_rows.cu": Suite(cuda_as_cpp.whole(SOURCE), Rows, CASES, MISTAKES)}


def plan_of(x: torch.Tensor, kind: str, mask: tuple[int, ...] = ()) -> CudaPlan:
    """Of a forward with a mask of that shape, or ``backward``."""
    if kind == "backward":
        return BACKWARD.of((x, x), 1.0, True)
    dtype = torch.bool if kind == BOOLEAN else x.dtype
    return FORWARD.of((x, meta(*mask, dtype=dtype) if mask else x), 1.0, kind)


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_nothing_is_spilled(dtype):
    with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
        for kind, n in ((CAUSAL, 8192), (BOOLEAN, 1024), (ADDITIVE, 16384), ("backward", 8192)):
            backward, mask = kind == "backward", kind in (BOOLEAN, ADDITIVE)
            configuration = CONFIGURATIONS[backward]
            for c in configuration.candidates(90, dtype, n, *(() if backward else (kind, mask))):
                if c.get("SHARE") in (2, 4, 8):
                    continue  # as sixteen
                patch.setattr(configuration, "trial", c)
                plan = plan_of(meta(1, 2**14, 2, n, dtype=dtype), kind, (2, n) if mask else ())
                assert backward or plan.expression.endswith(f", {c['SHARE']}>")
                assert spills_nothing(plan), c


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_every_row_fits_its_threads(dtype, sm):
    with compiling_for(sm, lambda *kernel: None):
        for kind, shape in (
            *((kind, ()) for kind in (CAUSAL, NONE, "backward")),
            *((kind, shape) for kind in (BOOLEAN, ADDITIVE) for shape in ((12, 1), (1, 12), (12, 12))),
        ):
            backward = kind == "backward"
            for n in (8, 16, 120, 264, 1000, 4096, 8192, 16384, 32768):
                if n > 1024 * dispatch.most_each(dtype, 1 + (backward or kind == ADDITIVE)):
                    continue
                x = meta(12, 12, 16, n, dtype=dtype)
                plan = plan_of(x, kind, (*shape, 16, n) if shape else ())
                numbers = map(int, plan.expression[:-1].split(", ")[-2 if backward else -3 :])
                threads, each, share = (*numbers, 1)[:3]
                assert threads * each >= n and 32 <= threads <= 1024
                assert plan.block == max(threads, 128 * (threads == 32))
                assert plan.grid[0] * (plan.block // threads) * share >= 12 * 12 * 16
                assert 12 % share == 0 and (share == 1 or shape in ((12, 1), (1, 12)))
                assert share == 1 or plan.grid[0] >= dispatch.BLOCKS_PER_SM * dispatch.multiprocessors(x.device)


def test_when_it_is_chosen():
    with compiling_for(90, lambda *kernel: None):
        causal, masked = (functools.partial(ops.explain, name) for name in ("causal_softmax", "masked_softmax"))
        for x, kernel in (
            (meta(4, 1024, 1024), "cuda"),
            (meta(1, 512, 1024), "triton"),  # few elements
            (meta(2**14, 64, 128), "triton"),  # short rows
            (meta(64, 32, 40000), "triton"),
            (meta(64, 40, 1000, dtype=FP32), "cuda"),
            (meta(64, 40, 1002, dtype=FP32), "triton"),
        ):
            assert causal(x).implementation == causal(x, direction="backward").implementation == kernel
        x = meta(2, 16, 64, 1024)
        booleans = [meta(*shape, dtype=torch.bool) for shape in ((64, 1024), (2, 1, 64, 1024))]
        for mask, kernel in ((None, "cuda"), *((b, "cuda") for b in booleans), (meta(64, 1028)[:, :1024], "triton")):
            assert masked(x, mask).implementation == kernel
            assert masked(x, mask, direction="backward").implementation == "triton"
    with compiling_for(80, lambda *kernel: None):
        assert causal(meta(4, 1024, 1024)).implementation == "triton"


def test_what_is_declined():
    with compiling_for(90, lambda *kernel: None):
        copied = meta(4, 6, 64, 8).transpose(1, 2)[:, ::2]
        off = ("16 bytes", meta(2, 3, 20)), ("16 bytes", meta(64, 64).mT)
        for reason, x in (*off, ("columns", meta(2, 3, 2**15 + 8)), ("a copy", copied)):
            with pytest.raises(Declined, match=reason):
                plan_of(x, CAUSAL)
        x = meta(2, 2, 64, 64, dtype=FP32)
        for mask in (meta(64, 1, dtype=FP32), meta(64, 66, dtype=FP32)[:, :64]):
            with pytest.raises(Declined, match="a mask that"):
                FORWARD.of((x, mask), 1.0, ADDITIVE)
        with pytest.raises(Declined, match="no causal mask"):
            BACKWARD.of((x, x), 1.0, False)
