"""Cross entropy's CUDA C++ without a GPU: emulated on the CPU (``rows_on_cpu.hpp``) with the launches that Python computes,
against float64; what its loops compile to."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sass import names, parts, sass
from where import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.loss import dispatch, reference  # noqa: E402
from weft.operators.loss.dispatch import LossCall  # noqa: E402
from weft.operators.loss.reference import Options  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERATORS = ROOT / "src/weft/operators"
COMPILE = ("g++", "-std=c++20", "-O1", "-w", "-mf16c", "-fPIC", "-shared", "-pthread", f"-I{ROOT / 'tests/emulator'}")
CONFIGURATIONS = (
    dispatch.with_gradient_configuration,
    dispatch.shared_configuration,
    dispatch.loss_configuration,
    dispatch.gradient_configuration,
)
KERNELS = ("cluster", "shared", "alone")  # loss and gradient together, with shared memory, and apart


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = BF16
    v: int = 10000
    values: str = "normal"
    weight: bool = False
    in_place: bool = False
    options: Options = field(default_factory=Options)


CASES = {
    "a block": Case(v=2056),
    "a cluster": Case(options=Options(label_smoothing=0.1, z_loss=0.01)),
    "fp32": Case(FP32, options=Options(z_loss=0.01)),
    "everything": Case(
        options=Options(soft_cap=3.0, z_loss=0.01, label_smoothing=0.1, reduction="none"), in_place=True
    ),
    "everything, fp32": Case(FP32, 5000, options=Options(soft_cap=3.0, label_smoothing=0.1)),
    "weights": Case(FP16, weight=True, options=Options(reduction="sum")),
    "not finite": Case(FP16, values="nonfinite", options=Options(reduction="none")),
    "not finite, capped": Case(FP32, 5000, values="nonfinite", options=Options(reduction="none", soft_cap=2.0)),
    "minus infinity": Case(FP32, 5000, values="minus", options=Options(reduction="none")),
    "minus infinity, capped": Case(v=5000, values="minus", options=Options(reduction="none", soft_cap=4.0)),
    "labels out of range": Case(values="labels", options=Options(reduction="none", label_smoothing=0.1)),
    "large": Case(FP32, 5000, values="large", options=Options(reduction="none")),
}


def as_cpp() -> str:
    """cluster.cu as C++ for ``rows_on_cpu.hpp``: its few instructions in inline PTX become calls."""
    text = (OPERATORS / "loss/cluster.cu").read_text()
    rows = (OPERATORS / "rows.cuh").read_text().replace("#pragma once", "")
    text = text.replace('#include "rows.cuh"', rows.replace('#include "prelude.cuh"', '#include "rows_on_cpu.hpp"'))
    for pattern, made in (
        (r'asm\("ex2\.approx\.ftz\.f32 %0, %1;".*?;', "e = exp2f(x);"),
        (r'asm volatile\("" .*?;', ";"),  # it only holds the compiler back
        (r"extern __shared__ __align__\(16\) unsigned char dynamic\[\];", "unsigned char *dynamic = block->dynamic;"),
        (r"__shared__ (typename Slice::Shared) shared;", r"\1 &shared = *reinterpret_cast<\1 *>(block->shared);"),
    ):
        text, found = re.subn(pattern, made, text, flags=re.DOTALL)
        assert found, pattern
    assert "asm" not in text and "__shared__" not in text
    return text


def logits_and_labels(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """[5, V] and [5]; one row is ignored, and labels are the first and the last class too."""
    torch.manual_seed(4)
    x, v = torch.randn(5, case.v) * 3, case.v
    label = torch.randint(0, v, (5,))
    label[0], label[4] = v - 1, 0
    label[1 if case.values != "nonfinite" else 4] = -100
    if case.values == "nonfinite":
        x[0, 5], x[1, v - 3], x[2, 7], x[3, ::2] = torch.nan, torch.inf, -torch.inf, -torch.inf
    elif case.values == "minus":
        x[0], x[2, : v // 2], x[3, 1:] = -torch.inf, -torch.inf, -torch.inf
    elif case.values == "labels":
        label[2], label[3] = v, -7
    elif case.values == "large":
        x *= torch.finfo(case.dtype).max / 48
    return x.to(case.dtype), label


class Run:
    """One case by one of the kernels: its launches, and afterwards losses [M] and the gradient."""

    def __init__(self, case: Case, kernel: str):
        self.case, self.o = case, case.options
        self.x, self.label = logits_and_labels(case)
        self.weight = torch.rand(case.v).to(case.dtype) if case.weight else None
        self.given = self.x.clone()
        self.dx = self.given if case.in_place else torch.full_like(self.x, 7)
        self.dloss = torch.ones(5 if self.o.reduction == "none" else (), dtype=case.dtype)
        if kernel == "alone":
            self.dloss = self.dloss * -0.75
        call = (self.given, self.label, self.given if self.weight is None else self.weight)
        weighted = case.weight
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *_: None):
            patch.setattr(dispatch, "SHARED_FROM", 0 if kernel == "shared" else 2**60)
            if kernel == "alone":
                tensors = (*call, self.dloss, self.dx)
                last = dispatch.launch_cuda_gradient(dispatch.GradientCall.of(*tensors, self.o, weighted))
                first = LossCall(*call[:2], self.weight, self.o)
                self.plans = [dispatch.launch_cluster(first), last]
            else:
                self.plans = [
                    dispatch.launch_cluster(LossCall(*call[:2], self.weight, self.o, True, True, case.in_place))
                ]
        counts, known = self.label != -100, (self.label >= 0) & (self.label < case.v)
        of_label = call[2][self.label.clamp(0, case.v - 1)].double() if case.weight else torch.ones(5).double()
        self.counts, self.wrong = counts, counts & ~known
        sums = torch.tensor([float(of_label[counts].sum()), float(counts.sum()), 0.0])
        self.loss, self.stats = torch.full((5,), torch.nan), torch.full((2, 5), torch.nan)
        self.tensors = [(*call, sums, self.loss, self.stats, self.dx), (*call, sums, self.stats, self.dloss, self.dx)]

    def emulate(self, library: ctypes.CDLL, expressions: list[str]) -> None:
        for plan, tensors in zip(self.plans, self.tensors, strict=False):
            values = [*(ctypes.c_void_p(t.data_ptr()) for t in tensors), *plan.scalars]
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            run = getattr(library, f"run{expressions.index(plan.expression)}")
            run(pointers, plan.grid[0], plan.block, plan.cluster)

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses, scaled as the kernels scale them, and the gradient, in float64."""
        o, label = self.o, torch.where(self.wrong, 0, self.label)
        named = {"ignore_index": -100, "label_smoothing": o.label_smoothing, "z_loss": o.z_loss, "soft_cap": o.soft_cap}
        named["weight"] = None if self.weight is None else self.weight.double()
        x = self.x.double()
        rows = reference.reference(x, label, **named, reduction="none")
        whole = reference.reference(x, label, **named, reduction=o.reduction) if o.reduction != "none" else rows
        (dx,) = reference.gradient(self.dloss.double(), x, label, **named, reduction=o.reduction)
        dx[self.wrong] = torch.nan
        return whole.masked_fill(self.wrong, torch.nan) if whole.ndim else whole, dx


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> dict[tuple[str, str], Run]:
    if shutil.which("g++") is None or "f16c" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs g++ and an x86 processor")
    trial = {BF16: 64, FP16: 64, FP32: 32}
    runs = {}
    for name, case in CASES.items():
        dispatch.with_gradient_configuration.trial = {"THREADS": 64, "EACH": trial[case.dtype]}
        dispatch.gradient_configuration.trial = dispatch.with_gradient_configuration.trial
        dispatch.loss_configuration.trial = {"THREADS": 64}
        dispatch.shared_configuration.trial = {"THREADS": 64, "EACH": 2 * trial[case.dtype]}
        runs |= {(name, kernel): Run(case, kernel) for kernel in KERNELS}
    for configuration in CONFIGURATIONS:
        configuration.trial = None
    expressions = list(dict.fromkeys(plan.expression for run in runs.values() for plan in run.plans))
    made = [
        as_cpp(),
        "template <typename... A> void emulate(void (*kernel)(A...), void **a, int grid, int threads, int blocks) {",
        "  const auto body = [&]<size_t... I>(std::index_sequence<I...>) { kernel(*static_cast<A *>(a[I])...); };",
        "  launch(grid, threads, blocks, [&] { body(std::index_sequence_for<A...>{}); });\n}",
    ]
    for i, expression in enumerate(expressions):
        signature = f'extern "C" void run{i}(void **a, int grid, int threads, int blocks)'
        made.append(f"{signature} {{ emulate(&{expression}, a, grid, threads, blocks); }}")
    folder = tmp_path_factory.mktemp("loss")
    (folder / "rows.cpp").write_text("\n".join(made))
    subprocess.run([*COMPILE, "-o", folder / "rows.so", folder / "rows.cpp"], check=True)
    library = ctypes.CDLL(str(folder / "rows.so"))
    for run in runs.values():
        run.emulate(library, expressions)
    return runs


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_float64(emulated, name, kernel):
    run = emulated[name, kernel]
    loss, dx = run.wanted()
    got = run.loss.double() if loss.ndim else run.loss.double().sum()
    torch.testing.assert_close(got, loss, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert (run.loss[~run.counts] == 0).all() and (run.dx[~run.counts] == 0).all()
    top = dx.masked_fill(~dx.isfinite(), 0).abs().amax(1, keepdim=True).clamp_min(1e-30)
    limit = {BF16: 5e-3, FP16: 1e-3, FP32: 2e-6}[run.case.dtype]
    torch.testing.assert_close(run.dx.double() / top, dx / top, rtol=0, atol=limit, equal_nan=True)
    assert run.case.in_place or torch.equal(run.given.nan_to_num(3), run.x.nan_to_num(3)), "the logits were changed"


def test_clusters_of_one_and_of_several_blocks_are_emulated(emulated):
    found = {kernel: {run.plans[0].cluster for (_, k), run in emulated.items() if k == kernel} for kernel in KERNELS}
    assert all(1 in blocks and max(blocks) >= 2 for blocks in found.values()), found


def test_the_loss_alone_asks_for_eight_vectors_before_it_uses_one():
    """And in its loop issues less than half of what there is time for while memory brings an element."""
    x, label = torch.empty(8192, 32000, dtype=BF16, device="meta"), torch.empty(8192, dtype=torch.int64, device="meta")
    with compiling_for(90, lambda *_: None):
        plan = dispatch.launch_cluster(LossCall(x, label, None, Options()))
    loop = max(parts(sass(plan.source, plan.expression)), key=lambda part: part.count("MUFU.EX2"))
    instructions = names(loop.partition("BRA")[0])
    loads = [i for i, name in enumerate(instructions) if name.startswith("LDG.E.128")]
    assert len(loads) == 8 and not any(name.startswith("MUFU") for name in instructions[: loads[-1]])
    assert len(instructions) / 64 < 6.5
