"""Cross entropy's CUDA C++ on the CPU emulator, against float64; what its loops compile to."""

from dataclasses import dataclass, field

import cuda_as_cpp
import torch
from cuda_on_cpu import BF16, FP16, FP32, FRAME, Launched, Suite, difference, frame_is_whole, framed, job, tensor_of
from emulated import *  # noqa: F403
from sass import names, parts, sass

from weft.operators.cuda import CudaPlan
from weft.operators.launch import compiling_for
from weft.operators.loss import dispatch, reference
from weft.operators.loss.dispatch import LossCall
from weft.operators.loss.reference import Options

KERNELS = ("cluster", "shared", "loss", "gradient")  # loss and gradient together, with shared memory, and apart


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

MISTAKES = {
    "the label's logit of another row": ("a block, loss", "read_bits(x + at_label)", "read_bits(x + at_label + x_row)"),
    "a block's maximum for the row's": ("a cluster, cluster", "(s.x == top ? s.y :", "(true ? s.y :"),
    "columns past the row": ("everything, cluster", "CAP && !there(v) ? 0.f : e", "e"),
    "the label's element twice": ("a block, gradient", "if (here - v * STEP == i) f[i] -= at_label;", ";"),
    "the factor of the loss left out": ("a block, gradient", "factor = from_bits<D>(of_loss)", "factor = 1.f"),
    "a vector in shared memory too early": ("a cluster, shared", "if constexpr (SHARED) copies_wait();", ""),
    "the other blocks' elements in the sum": ("fp32, loss", "min(V - first, each)", "V - first"),
}

LAUNCH = """
char *const out = static_cast<char *>(job.buffers[4]) + FRAME;
const Any given{job.scales[0] ? out : job.buffers[0]}, label{job.buffers[1]}, weight{job.buffers[2]}, sums{job.buffers[3]},
    dloss{job.buffers[5]}, stats{job.buffers[6]}, dx{out}, loss{job.buffers[8]},
    new_stats{static_cast<float *>(job.buffers[8]) + 5};
job.run([&] { KERNEL(given, label, weight, sums, RESULTS, dx, SCALARS); });
"""


def logits_and_labels(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[5, V] and [5]; one row is ignored, and labels are the first and the last class too."""
    g = torch.Generator().manual_seed(4 + seed)
    x, v = torch.randn(5, case.v, generator=g) * 3, case.v
    label = torch.randint(0, v, (5,), generator=g)
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


class Rows(Launched):
    """A case for one of the kernels."""

    def planned(self, given: tuple[Case, str], g: torch.Generator, patch) -> CudaPlan:
        self.case, self.kernel = case, kernel = given
        o = case.options
        self.x, self.label = logits_and_labels(case, self.seed)
        weight = torch.rand(case.v, generator=g).to(case.dtype)
        weight = weight if case.weight else None
        self.weight = self.x if weight is None else weight
        one = () if o.reduction != "none" else (5,)
        self.dloss = torch.full(one, -0.75 if kernel == "gradient" else 1.0, dtype=case.dtype)
        in_place = case.in_place and kernel != "loss"
        dx = self.x if in_place else torch.empty_like(self.x)
        each = 32 if case.dtype == FP32 else 64
        patch.setattr(dispatch, "SHARED_FROM", 0 if kernel == "shared" else 2**60)
        for name in ("with_gradient", "gradient", "loss"):
            patch.setattr(getattr(dispatch, f"{name}_configuration"), "trial", {"THREADS": 64, "EACH": each})
        patch.setattr(dispatch.shared_configuration, "trial", {"THREADS": 64, "EACH": 2 * each})
        if kernel == "gradient":
            tensors = (self.x, self.label, self.weight, self.dloss, dx)
            plan = dispatch.launch_cuda_gradient(dispatch.GradientCall.of(*tensors, o, case.weight))
        else:
            both = kernel != "loss"
            plan = dispatch.launch_cluster(LossCall(self.x, self.label, weight, o, both, both, in_place))
        self.cpp = LAUNCH.replace("RESULTS", "stats, dloss" if kernel == "gradient" else "loss, new_stats")
        self.in_place = in_place
        self._right(None if weight is None else weight.double())
        return plan

    def _right(self, weight: torch.Tensor | None) -> None:
        """Losses, scaled as the kernels scale them, what is known of each row, and the gradient."""
        o, v, x = self.case.options, self.case.v, self.x.double()
        self.counts, known = self.label != -100, (self.label >= 0) & (self.label < v)
        self.wrong = self.counts & ~known
        of_label = torch.ones(5).double() if weight is None else weight[self.label.clamp(0, v - 1)]
        self.sums = torch.tensor([float(of_label[self.counts].sum()), float(self.counts.sum()), 0.0])
        values = o.soft_cap * torch.tanh(x / o.soft_cap) if o.soft_cap else x
        top = values.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)
        total = (values - top.masked_fill(top == -torch.inf, 0)[:, None]).exp().sum(1)
        self.stats = torch.stack([top, total])
        named = {"ignore_index": -100, "label_smoothing": o.label_smoothing, "z_loss": o.z_loss, "soft_cap": o.soft_cap}
        given = x, torch.where(self.wrong, 0, self.label)
        self.loss = reference.reference(*given, **named, weight=weight, reduction=o.reduction)
        (self.dx,) = reference.gradient(self.dloss.double(), *given, **named, weight=weight, reduction=o.reduction)
        self.dx[self.wrong] = torch.nan
        if self.loss.ndim:
            self.loss[self.wrong] = torch.nan

    def job(self) -> bytes:
        mine = self.x.flatten().view(torch.uint8).numpy().tobytes()
        inside = mine if self.in_place else bytes([0xA5]) * self.x.nbytes
        frame = framed(0)[:FRAME]
        read = {0: self.x, 1: self.label, 2: self.weight, 3: self.sums, 5: self.dloss.clone(), 6: self.stats.float()}
        buffers = {**read, 4: frame + inside + frame, 8: torch.full((15,), torch.nan)}
        return job(self.plan, self.seed, buffers, scales=(self.in_place,), static=True)

    def what_is_wrong(self, found: bytes) -> str:
        end = FRAME + self.x.nbytes
        if not frame_is_whole(found[: end + FRAME]):
            return "something beside the gradient was written"
        dx = tensor_of(found[FRAME:end], self.case.dtype).view(self.dx.shape)
        rows = tensor_of(found[end + FRAME :], FP32)
        loss, stats = rows[:5].double(), rows[5:].view(2, 5)
        wrong = ""
        if self.kernel != "gradient":
            got = loss if self.loss.ndim else loss.sum()
            wrong = difference("loss", got, self.loss, 2e-6 * (1 + self.loss.abs()))
            wrong = wrong or difference("loss of what is ignored", loss[~self.counts], torch.zeros(1))
            total = self.stats[:, self.counts]
            near = {BF16: 2e-3, FP16: 2e-3, FP32: 2e-6}[self.case.dtype] if self.case.options.soft_cap else 2e-6
            wrong = wrong or difference("statistics", stats[:, self.counts], total, near * (1 + total.abs()))
        if self.kernel != "loss" and not wrong:
            wrong = difference("gradient of what is ignored", dx[~self.counts], torch.zeros(1))
            top = self.dx.masked_fill(~self.dx.isfinite(), 0).abs().amax(1, keepdim=True).clamp_min(1e-30)
            limit = {BF16: 5e-3, FP16: 1e-3, FP32: 2e-6}[self.case.dtype]
            wrong = wrong or difference("dx", dx.double() / top, self.dx / top, limit)
        return wrong


TEXT = cuda_as_cpp.whole(dispatch.SOURCE, "rows.cuh")
SHARED = "__shared__ typename Slice::Shared shared;"
EVERY = {f"{name}, {kernel}": (case, kernel) for name, case in CASES.items() for kernel in KERNELS}
SUITES = {
    "cluster.cu": Suite(
        "inline float __int_as_float(int x) { return __uint_as_float(x); }\n"
        "inline float __fdividef(float a, float b) { return a / b; }\n"
        + TEXT.replace(SHARED, "auto &shared = static_memory<typename Slice::Shared>(0);"),
        Rows,
        EVERY,
        MISTAKES,
    )
}


def test_clusters_of_one_and_of_several_blocks_are_emulated():
    for kernel in ("cluster", "shared", "loss"):
        blocks = {Rows((case, kernel)).plan.cluster for case in CASES.values()}
        assert 1 in blocks and max(blocks) >= 2, kernel


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
