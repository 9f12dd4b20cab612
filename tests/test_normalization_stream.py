"""The gradients of long rows by groups of blocks without a GPU: ``stream.cu`` run on a CPU that plays its PTX
(``ptx_on_cpu.hpp``) with the launches that Python computes, all blocks at once; who does what; what it compiles to."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import cuda_as_cpp
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from weft.definition import SHARED_LIMIT, Declined  # noqa: E402
from weft.operators.cuda import compile_cubin  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.normalization import norm, resident, stream  # noqa: E402
from weft.operators.normalization.kind import Kind  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
EPS = 1e-5
CONFIG = {"SLICE": 64, "ROWS": 2, "ADDERS": 8, "WRITERS": 16, "KIB": 1, "RELAYED": 0}


@dataclass(frozen=True)
class Case:
    """Rows [m, n] on so many multiprocessors, with a ring of so many places."""

    dtype: torch.dtype = BF16
    m: int = 23
    n: int = 1424
    centered: bool = True
    weight: torch.dtype | None = BF16
    more: bool = False
    apart: int = 0  # elements between two rows of x, dy and more
    zeros: bool = False  # rows of dy that are 0, so that a block's sums are
    sms: int = 6
    places: int = 5
    config: tuple[tuple[str, int], ...] = ()


CASES = {
    "two groups of three blocks": Case(m=71, places=4),
    "two words a lane": Case(FP16, 5, 1648, weight=FP16, sms=34, places=4, config=(("SLICE", 8),)),
    "four rows, joined by one block": Case(FP16, 30, 520, False, FP16, config=(("ROWS", 4), ("RELAYED", 1))),
    "fp32": Case(FP32, 11, 268, True, FP32, config=(("ROWS", 1),)),
    "fp32, a third tensor, no weight": Case(FP32, 9, 128, False, None, True, 8, config=(("SLICE", 16),)),
    "a float32 weight": Case(BF16, 13, 368, True, FP32, True, 24, config=(("SLICE", 16), ("RELAYED", 1))),
    "one group, two vectors a lane": Case(
        BF16, 14, 1400, False, sms=3, config=(("SLICE", 64), ("ADDERS", 1), ("WRITERS", 1))
    ),
    "a row": Case(m=1, n=256),
    "zeros": Case(FP16, 12, 320, True, FP16, zeros=True, sms=4, places=4, config=(("SLICE", 20),)),
}  # fmt: skip

# Mistakes: a case that shows them, what stands in stream.cu, what is written instead.
MISTAKES = {
    "a place taken too early": ("a row's", "phase_wait(&empty[place], (turn / PLACES - 1) & 1);", ";"),
    "sums of a copy under way": ("a row's", "    phase_wait(&full[place], turn / PLACES & 1);\n      float", "float"),
    "factors that are not there": ("a row's", "phase_wait(&known[place], turn / PLACES & 1);", ""),
    "one warp's sums are enough": ("a row's", "barrier_init(&added[p], ADDERS);", "barrier_init(&added[p], 1);"),
    "one writer frees a place": ("a row's", "barrier_init(&empty[p], WRITERS);", "barrier_init(&empty[p], 1);"),
    "this block's sums alone": ("a row's", "* 32 + lane < members ?", "* 32 + lane == member ?"),
    "a warp's sums left out": ("a row's", "a < ADDERS; a++", "a < ADDERS - 1; a++"),
    "two zeros are no word": ("zeros", "return word ? word : 0x80000000ull;", "return word;"),
    "rows past the last": ("a row's", "if (ROWS > 1 && row + r >= M) break;", ""),
    "no zeros behind a slice": ("a row's", "ring[r * SLICE + i] = T{};", ";"),
    "another group's rows": ("a row's", "i64(turn) * groups + group", "i64(turn) * groups"),
    "statistics of the place before": ("a row's", "statistics[place * ROWS + lane] = now;", "statistics[place * ROWS + lane] = next;"),
    "rstd forgotten once": ("a row's", "f.along = -sums.y * f.scale * inverse * f.scale;", "f.along = -sums.y * inverse * f.scale;"),
    "sums exchanged between rows": ("a row's", "if (lane == r) sums = total;", "if (lane == ROWS - 1 - r) sums = total;"),
    "halves exchanged": ("a row's", "(upper ? high : low)", "(upper ? low : high)"),
    "nobody told": ("joined", "if (RELAYED && lane < ROWS) publish(joined + row + lane, sums);", ""),
    "told to the wrong row": ("joined", "publish(joined + row + lane, sums)", "publish(joined + row + (lane ^ 1), sums)"),
}  # fmt: skip
OF_MISTAKE = {"a row's": "two groups of three blocks", "zeros": "zeros", "joined": "four rows, joined by one block"}  # fmt: skip

LAUNCH = """
const Any x{job.buffers[0]}, dy{job.buffers[1]}, more{job.buffers[2]}, w{job.buffers[3]}, dx{job.buffers[4]}, mean{job.buffers[5]},
    rstd{job.buffers[6]}, dw{job.buffers[8]}, db{static_cast<char *>(job.buffers[8]) + job.scales[0]}, words{job.buffers[10]};
const i64 *s = job.shape;
job.run([&] { KERNEL(x, dy, more, w, mean, rstd, words, dx, dw, db, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], job.factors[0]); });
"""


def raw(t: torch.Tensor) -> bytes:
    return t.contiguous().view(torch.uint8).numpy().tobytes()


class Gradients:
    """The tensors of a case, and its plan."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        g = torch.Generator().manual_seed(seed)

        def rows(offset: float = 0) -> torch.Tensor:
            whole = torch.randn(case.m, case.n + case.apart, generator=g) + offset
            return whole.to(case.dtype)[:, : case.n]

        self.x, self.dy, self.more = rows(1), rows(), rows()
        if case.zeros:
            self.dy[2], self.dy[5:8] = 0, 0
        self.weight = None if case.weight is None else torch.randn(case.n, generator=g).to(case.weight)
        wide = self.x.double()
        self.mean = wide.mean(1).float() if case.centered else torch.zeros(case.m)
        middle = self.mean.double()[:, None]
        self.rstd = ((wide - middle).square().mean(1) + EPS).rsqrt().float()
        kind = Kind(case.centered, self.weight is not None, False, False)
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            for module in (stream, resident):
                patch.setattr(module, "multiprocessors", lambda device: case.sms)
            patch.setattr(stream, "MOST_PLACES", case.places)
            patch.setattr(stream, "SHORTEST", 1)
            patch.setattr(stream.configuration, "trial", {**CONFIG, **dict(case.config)})
            given = self.x if self.weight is None else self.weight
            self.plan = stream.StreamPlan(self.x, self.dy, self.more, given, EPS, kind, case.more)
        direct = self.plan.groups == 1 and self.weight is not None
        self.written = self.weight.dtype if direct else FP32

    def job(self, kernel: int) -> bytes:
        """What ``Job`` of ptx_on_cpu.hpp reads."""
        plan, x = self.plan.rows, self.x
        sums = bytes([0xA5]) * (2 * self.plan.groups * self.case.n * self.written.itemsize)
        spans = [raw(torch.as_strided(t, (t.untyped_storage().nbytes() // t.itemsize,), (1,))) for t in (x, self.dy, self.more)]
        weight = b"" if self.weight is None else raw(self.weight)
        dx = bytes([0xA5]) * (x.numel() * x.itemsize)
        buffers = [*spans, weight, dx, raw(self.mean), raw(self.rstd), b"", sums, b"", bytes(8 * self.plan.words)]
        *longs, eps = (s.value for s in plan.scalars)
        head = (kernel, plan.grid[0], plan.block, 1, plan.shared_bytes, self.seed, *map(len, buffers))
        rest = struct.pack("<10q3d", *longs, len(sums) // 2, 0, eps, 0.0, 0.0)
        return struct.pack(f"<{len(head)}q", *head) + bytes(5 * 17 * 8) + rest + b"".join(buffers)

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or what is further off than rounding allows."""
        case, size = self.case, self.x.numel() * self.x.itemsize
        dx = torch.frombuffer(bytearray(found[:size]), dtype=case.dtype).view(case.m, case.n).double()
        count = 2 * self.plan.groups * case.n
        sums = torch.frombuffer(bytearray(found[size : size + count * self.written.itemsize]), dtype=self.written)
        dw, db = sums.view(2, self.plan.groups, case.n).double().sum(1)
        x, dy = self.x.double(), self.dy.double()
        mean, rstd = self.mean.double()[:, None], self.rstd.double()[:, None]
        xhat = (x - mean) * rstd
        g = dy if self.weight is None else dy * self.weight.double()
        want = g - xhat * (g * xhat).mean(1, keepdim=True) - (g.mean(1, keepdim=True) if case.centered else 0)
        want = want * rstd + (self.more.double() if case.more else 0)
        rounding = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-22}
        pairs = [("dx", dx, want, case.dtype)]
        if self.weight is not None:
            pairs.append(("dw", dw, (dy * xhat).sum(0), self.written))
            pairs += [("db", db, dy.sum(0), self.written)] if case.centered else []
        for name, got, right, dtype in pairs:
            top = 1 + right.abs().amax()
            if not ((got - right).abs() <= rounding[dtype] * right.abs() + 2.0**-20 * top).all():
                far = (got - right).abs().nan_to_num(1e30).flatten().argmax().item()
                return f"{name}: element {far} is {got.flatten()[far].item()}, not {right.flatten()[far].item()}"
        return ""


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler (g++) to run the kernel with")
    folder = tmp_path_factory.mktemp("played")
    right = stream.SOURCE.read_text()

    def text(good: str = "", bad: str = "") -> str:
        assert not good or right.count(good) == 1, f"stream.cu has no single '{good}'"
        return cuda_as_cpp.as_cpp(cuda_as_cpp.preprocessed(right.replace(good, bad) if good else right))

    def launch(case: Case) -> str:
        return LAUNCH.replace("KERNEL", Gradients(case).plan.rows.expression)

    wrong = {
        f"wrong{i}": (text(good, bad), [launch(CASES[OF_MISTAKE[of]])])
        for i, (of, good, bad) in enumerate(MISTAKES.values())
    }
    programs = [wrong, {"right": (text(), [launch(case) for case in CASES.values()])}]
    started = [cuda_as_cpp.start_compiling(folder / f"program{i}", spaces) for i, spaces in enumerate(programs)]
    for compiler in started:
        errors = compiler.communicate()[1]
        assert compiler.returncode == 0, errors

    def run(name: str, mistake: str = "", seed: int = 0) -> str:
        made = Gradients(CASES[name], seed)
        program, number = (0, list(MISTAKES).index(mistake)) if mistake else (1, list(CASES).index(name))
        done = subprocess.run([folder / f"program{program}"], input=made.job(number), capture_output=True, timeout=120)
        if done.returncode:
            assert done.stdout.startswith(b"failed: ") or done.returncode == -11, done
            return done.stdout.decode() or "an access outside memory"
        return made.what_is_wrong(done.stdout)

    return run


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    assert not any(play(name, seed=seed) for seed in range(3))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    assert any(play(OF_MISTAKE[MISTAKES[mistake][0]], mistake, seed) for seed in range(6))
