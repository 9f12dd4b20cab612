"""For tests of scans down columns whose kernels are emulated on a CPU: a case's tensors, what is right, the launch that Python
computes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import cuda_as_cpp
import pytest
from cuda_on_cpu import FRAME, bytes_of, emulator_of_cases, frame_is_whole, framed, job, tensor_of
from sass import names, sass
from scan_on_cpu import VALUES

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.bench.compile_check import resource_usage  # noqa: E402
from weft.operators.cuda import CudaPlan, compile_cubin  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.scan import dispatch  # noqa: E402
from weft.operators.scan.dispatch import FORWARD, Scan  # noqa: E402
from weft.operators.scan.kernels import ScanInParts  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """[m, n, k] along n, ``apart`` elements between two rows; ``step``: "TOTALS" or "CARRIED" of parts of n.

    Args:
        scan: the operator's.
        total: of rows along a dimension, in PyTorch.
        further_off: an empty string, or where results are further off than the operator allows.
    """

    scan: Scan
    total: Callable[..., torch.Tensor]
    further_off: Callable[[torch.Tensor, torch.Tensor], str]
    dtype: torch.dtype = BF16
    m: int = 2
    n: int = 150
    k: int = 48
    reverse: bool = False
    exclusive: bool = False
    values: str = "normal"
    apart: int = 0
    step: str = ""
    across: int = 4
    rows: int = 2
    threads: int = 64


LAUNCH = """
const Any x{job.buffers[0]}, carry{job.buffers[1]}, y{static_cast<char *>(job.buffers[4]) + FRAME}, totals{job.buffers[8]};
const i64 *s = job.shape;
job.run([&] { KERNEL(x, carry, y, totals, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]); });
"""


def grows(x: torch.Tensor) -> None:
    """Factors of which a part's product is more than a float holds, behind a 0, a tiny one, one that lets it shrink again."""
    x.div_(64).add_(1.6)
    x[0::4, 3] = 0
    x[1::4, 1] = 1e-30
    x[2::4, 100:] = 0.6


VALUES = {**VALUES, "grows": grows}


class Columns:
    """The tensors of a case, what is right, and the launch that a call computes."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed, scan = case, seed, case.scan
        values = torch.randn(case.m * case.k, case.n, generator=torch.Generator().manual_seed(seed))
        VALUES[case.values](values)
        memory = torch.full((case.m, case.n, case.k + case.apart), 7.0, dtype=case.dtype)
        self.x = memory[:, :, : case.k]
        self.x.copy_(values.view(case.m, case.k, case.n).transpose(1, 2))
        how = {"exclusive": case.exclusive, "reverse": case.reverse}
        config = {"ACROSS": case.across, "ROWS": case.rows, "THREADS": case.threads}
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(scan.columns, "trial", config)
            patch.setattr(dispatch, "multiprocessors", lambda device: 2 if case.step else 0)
            made = FORWARD.kernel("cuda").of((self.x,), scan, 1, case.exclusive, case.reverse, case.dtype)
        parts = made.shape[1]
        assert (parts > 1) == bool(case.step)
        self.plan = made.totals if case.step == "TOTALS" else made.scan
        self.right = scan.reference(self.x.double(), 1, **how)
        x = self.x.double().flip(1) if case.reverse else self.x.double()
        each = self.plan.scalars[2].value
        totals = torch.stack([case.total(x[:, at : at + each], dim=1) for at in range(0, case.n, each)], 1)
        self.totals = totals
        self.carry = scan.reference(totals, 1, exclusive=True).float().contiguous()
        self.beside = self.carry.nbytes * (1 + made.scaled)  # bytes of totals

    @property
    def launch(self) -> str:
        return LAUNCH.replace("KERNEL", self.plan.expression).replace("FRAME", str(FRAME))

    def job(self) -> bytes:
        # y has x's strides
        buffers = {0: bytes_of(self.x), 1: bytes_of(self.carry), 4: framed(self.right.numel() * self.x.itemsize)}
        buffers[8] = bytes([0xA5]) * self.beside
        plan = dataclasses.replace(self.plan, shared_bytes=cuda_as_cpp.STATIC)
        return job(plan, self.seed, buffers, shape=[s.value for s in self.plan.scalars])

    def what_is_wrong(self, found: bytes) -> str:
        y, totals = found[: len(found) - self.beside], found[len(found) - self.beside :]
        if self.case.step == "TOTALS":
            if not frame_is_whole(y, len(y)):
                return "y was written"
            got, *powers = tensor_of(totals, FP32).view(-1, *self.totals.shape)
            return self.case.further_off(got.double() * 2 ** powers[0].double() if powers else got, self.totals)
        if not frame_is_whole(y):
            return "written outside of y"
        return self.case.further_off(tensor_of(y[FRAME:-FRAME], self.case.dtype).view_as(self.right), self.right)


def emulator(folder: Path, cases: Mapping[str, Case], mistakes: Mapping[str, tuple]) -> Callable[..., str]:
    """What runs a case of one formula, or one of the mistakes, and returns what is wrong with its result."""
    text = cuda_as_cpp.whole(dispatch.FOLDER / next(iter(cases.values())).scan.columns_kernel.source)
    return emulator_of_cases(folder, text, Columns, cases, mistakes)


# ---- what kernels compile to -------------------------------------------------------------------------------------------


def plan_of(scan: Scan, x: torch.Tensor, dim: int, sm: int = 90, *, exclusive: bool = False, reverse: bool = False):
    with compiling_for(sm, lambda *kernel: None):
        return FORWARD.kernel("cuda").of((x,), scan, dim, exclusive, reverse, x.dtype)


def loop_of(scan: Scan, dtype: torch.dtype) -> list[str]:
    """The instructions of the loop over steps."""
    return loop_of_launch(plan_of(scan, torch.empty(2**14, 2**14, dtype=dtype, device="meta"), 0).scan)


def loop_of_launch(launch: CudaPlan) -> list[str]:
    """The instructions of a kernel's longest loop."""
    text = re.split(r"^\$\S+:", sass(launch.source, launch.expression), flags=re.M)[0]
    labels = {found[1]: found.start() for found in re.finditer(r"^\.(L_x_\d+):", text, flags=re.M)}
    jumps = [(found.start(), labels[found[1]]) for found in re.finditer(r"BRA [^;]*`\(\.(L_x_\d+)\)", text)]
    end, begin = max((jump for jump in jumps if jump[0] > jump[1]), key=lambda jump: jump[0] - jump[1])
    return names(text[begin:end])


def check_every_kernel(scan: Scan, dtype: torch.dtype, sm: int) -> None:
    """Those of columns that are cut into parts compile for an architecture, and spill nothing."""
    x = torch.empty(2**20, 64, dtype=dtype, device="meta")
    made = plan_of(scan, x, 0, sm, exclusive=True, reverse=True)
    between = made.carries
    carries = [between.scan] if isinstance(between, ScanInParts) else []  # of products Triton's
    assert between is not None and (carries == [] or between.carries is None)
    for kernel in (made.totals, *carries, made.scan):
        assert resource_usage(compile_cubin(kernel.source, kernel.expression, sm)[0])["STACK"] == 0
