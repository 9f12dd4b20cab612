"""What to do first: a rule for each common cause of lost time, with the gain that it expects.

A rule looks at one profile and returns what it would change, the evidence, and a gain in milliseconds a step with its
estimate. Gains of different rules may count the same time, so they do not add up.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from weft.profiling import cost, idle
from weft.profiling.attribution import Work, short
from weft.profiling.tables import Profile

LEAST = 0.01  # share of the time that a gain must reach to be listed
KERNEL_GAP_NS = 1_000  # between kernels of a CUDA graph
CHAIN = 3  # elementwise kernels in a row that are worth fusing
VOCABULARY = 4096  # classes above which logits are worth not storing
MATRIX = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")


@dataclass
class Advice:
    title: str
    why: str
    how: str
    gain_ms: float  # a step, or the whole window where there are no steps
    rule: str  # how the gain is estimated


@dataclass
class Case:
    """What rules look at."""

    profile: Profile
    gaps: list[idle.Gap]
    limits: Any

    @property
    def work(self) -> list[Work]:
        return self.profile.work

    def ms(self, ns: float) -> float:
        """Nanoseconds of the window as milliseconds a step."""
        return max(0.0, ns) / 1e6 / self.profile.repeats

    def gaps_of(self, cause: str) -> list[idle.Gap]:
        return [g for g in self.gaps if g.cause == cause]

    def names(self, gaps: list[idle.Gap]) -> str:
        parts: dict[str, int] = defaultdict(int)
        for g in gaps:
            parts[g.what] += g.ns
        return ", ".join(sorted(filter(None, parts), key=lambda name: -parts[name])[:3])

    @property
    def per(self) -> str:
        return "a step" if self.profile.steps else "in all"


Rule = Callable[[Case], Iterator[Advice]]


def ranked(profile: Profile, gaps: list[idle.Gap], limits: Any) -> list[Advice]:
    """The advice of all rules whose gain is at least 1 % of the time, the largest gain first."""
    case = Case(profile, gaps, limits)
    least = LEAST * profile.window_us / 1e3 / profile.repeats
    found = [advice for rule in RULES for advice in rule(case) if advice.gain_ms >= least and advice.gain_ms > 0]
    return sorted(found, key=lambda a: -a.gain_ms)


def launch_gaps(case: Case) -> Iterator[Advice]:
    gaps = case.gaps_of("launch")
    gain = sum(max(0, g.ns - KERNEL_GAP_NS) for g in gaps)
    launches = case.profile.launches / case.profile.repeats
    yield Advice(
        "Launch fewer, or record the launches",
        f"the GPU waited {case.ms(sum(g.ns for g in gaps)):.2f} ms {case.per} for launches ({launches:,.0f} launches)",
        'torch.compile(mode="reduce-overhead"), or capture the step with torch.cuda.graph; larger batches also help',
        case.ms(gain),
        "idle time before launches, less 1 µs for each gap, which a CUDA graph leaves",
    )


def host_stretches(case: Case) -> Iterator[Advice]:
    gaps = case.gaps_of("host")
    yield Advice(
        "Take work of the host out of the step",
        f"the GPU was idle in {len(gaps)} stretches in which the host launched nothing: {case.names(gaps)}",
        "move it before the loop, to the GPU, or to another thread; compile the Python around it",
        case.ms(sum(g.ns for g in gaps)),
        "all idle time in these stretches",
    )


def synchronisation(case: Case) -> Iterator[Advice]:
    gaps = case.gaps_of("synchronisation")
    yield Advice(
        "Do not wait for the GPU inside the step",
        f"the host waited until the GPU had run dry {len(gaps)} times: {case.names(gaps)}",
        "keep losses and metrics on the GPU and read them every so many steps; copy with non_blocking=True from pinned memory",
        case.ms(sum(g.ns for g in gaps)),
        "all idle time after such waits",
    )


def data_loader(case: Case) -> Iterator[Advice]:
    if case.profile.device == "cuda":
        ns = float(sum(g.ns for g in case.gaps_of("data loader")))
    else:
        ns = sum(s.data_loader_us for s in case.profile.steps) * 1e3
    yield Advice(
        "Load the next batch while this one is computed",
        f"{case.ms(ns):.2f} ms {case.per} passed waiting for the DataLoader",
        "num_workers > 0 with persistent_workers=True and prefetch_factor; decode and augment ahead, or on the GPU",
        case.ms(ns),
        "all time in which nothing ran but the loader",
    )


def allocation(case: Case) -> Iterator[Advice]:
    gaps = case.gaps_of("allocation")
    yield Advice(
        "Stop allocating device memory in the step",
        f"the GPU was idle during cudaMalloc and cudaFree {len(gaps)} times",
        "drop torch.cuda.empty_cache(); fix the shapes, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        case.ms(sum(g.ns for g in gaps)),
        "all idle time during these calls",
    )


def pageable_copies(case: Case) -> Iterator[Advice]:
    slow = [c for c in case.profile.copies if c.host_memory == "pageable"]
    yield Advice(
        "Copy from pinned memory",
        f"{sum(c.bytes for c in slow) / 1e6 / case.profile.repeats:,.1f} MB {case.per} were copied from or to pageable memory, "
        f"{case.ms(sum(c.exposed_us for c in slow) * 1e3):.2f} ms of it with no kernel beside",
        "DataLoader(pin_memory=True) and .to(device, non_blocking=True), one batch ahead",
        case.ms(sum(c.exposed_us for c in slow) * 1e3),
        "the time of pageable copies under which no kernel ran: a pinned copy made ahead runs beside kernels",
    )


def fp32_products(case: Case) -> Iterator[Advice]:
    slow = [w for w in case.work if w.span.kind == "kernel" and _fp32_product(w)]
    ns = sum(w.ns for w in slow)
    matrix = case.limits.matrix if case.limits is not None else {}
    fp32, fast = matrix.get("fp32"), matrix.get("tf32")
    left = fp32 / fast if fp32 and fast else 0.5
    says = (
        f"the measured fp32 and TF32 ceilings, whose ratio is {left:.2f}"
        if fp32 and fast
        else "half their time (no ceilings)"
    )
    yield Advice(
        "Multiply in TF32 or bf16",
        f"{len(slow)} matrix products ran in fp32, {case.ms(ns):.2f} ms {case.per}",
        'torch.set_float32_matmul_precision("high"), or torch.autocast("cuda", dtype=torch.bfloat16)',
        case.ms(ns * (1 - left)),
        f"time of fp32 products scaled by {says}",
    )


def _fp32_product(w: Work) -> bool:
    if w.op is None or w.op.name.removeprefix("aten::") not in (*MATRIX, *cost.CONVOLUTIONS):
        return False
    name = w.span.name.lower()
    faster = ("tf32", "bf16", "f16", "half", "1688", "16816", "elementwise", "memset", "copy")
    return cost.dtype(w.op.args) == "fp32" and not any(mark in name for mark in faster)


def optimizer_launches(case: Case) -> Iterator[Advice]:
    work = [w for w in case.work if w.phase == "optimizer" and w.span.kind == "kernel"]
    if len(work) / case.profile.repeats < 20:
        return
    starts = {w.span.start for w in work}
    after = sum(g.ns for g in case.gaps if g.end in starts)
    passes = [w for w in work if "multi_tensor" in w.span.name or "elementwise" in w.span.name]
    many = sum(w.ns for w in passes)
    yield Advice(
        "Use a fused optimizer",
        f"the optimizer launched {len(work) / case.profile.repeats:,.0f} kernels {case.per}, "
        f"{case.ms(sum(w.ns for w in work)):.2f} ms, and the GPU waited {case.ms(after):.2f} ms for them",
        "weft.optim.AdamW (one launch for all parameters), or fused=True of torch.optim",
        case.ms(after + many / 2),
        "the gaps before its kernels, and half the time of its elementwise kernels, which make several passes",
    )


def elementwise_chains(case: Case) -> Iterator[Advice]:
    gain, chains, longest = 0, 0, 0
    for chain in _chains(case.work):
        gain += sum(w.ns for w in chain) - max(w.ns for w in chain)
        chains, longest = chains + 1, max(longest, len(chain))
    yield Advice(
        "Fuse elementwise operators",
        f"{chains} chains of {CHAIN} or more elementwise kernels (the longest has {longest}) each read and write all of memory",
        "torch.compile the module, or weft.ops (swiglu, geglu, add_rms_norm, dropout_add_rms_norm …)",
        case.ms(gain),
        "each chain takes as long as its longest kernel",
    )


def _chains(work: list[Work]) -> Iterator[list[Work]]:
    streams: dict[Any, list[Work]] = defaultdict(list)
    for w in work:
        if w.span.kind == "kernel":
            streams[w.span.thread].append(w)
    for those in streams.values():
        chain: list[Work] = []
        for w in those:
            if "elementwise_kernel" in w.span.name and w.phase != "optimizer":
                chain.append(w)
                continue
            if len(chain) >= CHAIN:
                yield chain
            chain = []
        if len(chain) >= CHAIN:
            yield chain


def unfused_loss(case: Case) -> Iterator[Advice]:
    names = ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward")
    work = [
        w
        for w in case.work
        if w.op is not None and w.op.name.removeprefix("aten::") in names and _classes(w) >= VOCABULARY
    ]
    if not work:
        return
    logits = max(_elements(w) for w in work)
    yield Advice(
        "Fuse the loss with the last linear layer",
        f"the logits ({logits:,} numbers over {max(map(_classes, work)):,} classes) are stored, and read by softmax and loss: "
        f"{case.ms(sum(w.ns for w in work)):.2f} ms {case.per}",
        "weft.ops.linear_cross_entropy, which never stores them",
        case.ms(sum(w.ns for w in work)),
        "the time of the log-softmax and the loss, forward and backward",
    )


def _shape(w: Work) -> list[int]:
    dims = w.op.args.get("Input Dims") if w.op is not None else None
    shapes = [d for d in dims if isinstance(d, list) and len(d) == 2] if isinstance(dims, list) else []
    return [n for n in shapes[0] if isinstance(n, int)] if shapes else []


def _classes(w: Work) -> int:
    return _shape(w)[-1] if len(_shape(w)) == 2 else 0


def _elements(w: Work) -> int:
    shape = _shape(w)
    return shape[0] * shape[1] if len(shape) == 2 else 0


def stored_scores(case: Case) -> Iterator[Advice]:
    """Softmax over [B, H, S, S] scores: attention that is not fused."""
    names = ("_softmax", "_softmax_backward_data", "_safe_softmax")
    work = [w for w in case.work if w.op is not None and w.op.name.removeprefix("aten::") in names and _scores(w)]
    if work:
        yield Advice(
            "Fuse attention",
            f"scores of up to {max(map(_scores, work)):,} numbers are stored between two products and a softmax",
            "weft.ops.attention, or torch.nn.functional.scaled_dot_product_attention with a mask that its fused kernels take",
            case.ms(sum(w.ns for w in work)),
            "the time of the softmax, forward and backward; masks, scaling and the scores' traffic in the products come on top",
        )


def _scores(w: Work) -> int:
    dims = w.op.args.get("Input Dims") if w.op is not None else None
    shape = dims[0] if isinstance(dims, list) and dims and isinstance(dims[0], list) else []
    fits = len(shape) == 4 and all(isinstance(n, int) and n > 0 for n in shape) and min(shape[2:]) >= 128
    return shape[0] * shape[1] * shape[2] * shape[3] if fits else 0


def layouts(case: Case) -> Iterator[Advice]:
    work = [w for w in case.work if "nchwToNhwc" in short(w.span.name) or "nhwcToNchw" in short(w.span.name)]
    yield Advice(
        "Keep images channels-last",
        f"cuDNN converted layouts {len(work) / case.profile.repeats:,.0f} times {case.per}",
        "model.to(memory_format=torch.channels_last), and the images too",
        case.ms(sum(w.ns for w in work)),
        "all time of these conversions",
    )


def host_only(case: Case) -> Iterator[Advice]:
    """On a CPU: time of a step outside of any operator."""
    if case.profile.device == "cuda" or not case.profile.steps:
        return
    outside = sum(max(0.0, s.idle_us - s.data_loader_us) for s in case.profile.steps) * 1e3
    called = sum(1 for w in case.work if not any(s.kind == "op" for s in w.span.within())) / case.profile.repeats
    yield Advice(
        "Spend less time in Python between operators",
        f"{case.ms(outside):.2f} ms {case.per} passed between the {called:,.0f} operators that Python and autograd call",
        "torch.compile the model and the optimizer's step; larger batches; fused=True or foreach=True in the optimizer",
        case.ms(outside),
        "all time outside of operators and the data loader",
    )


RULES: tuple[Rule, ...] = (
    launch_gaps,
    host_stretches,
    synchronisation,
    data_loader,
    allocation,
    pageable_copies,
    fp32_products,
    optimizer_launches,
    elementwise_chains,
    unfused_loss,
    stored_scores,
    layouts,
    host_only,
)
