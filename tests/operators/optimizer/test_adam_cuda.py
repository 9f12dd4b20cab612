"""Adam, AdamW and AdamW in 8 bits on the CPU emulator; what they compile to and decline."""

import dataclasses
import functools

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import Suite, job
from emulated import *  # noqa: F403
from sass import rounds, sass

from weft import ops
from weft.bench import cases, verify
from weft.definition import Declined
from weft.operators.cuda import CudaPlan
from weft.operators.launch import compiling_for
from weft.operators.optimizer import dynamic_map, multi_tensor
from weft.operators.optimizer.adam import adam
from weft.operators.optimizer.adamw import adamw
from weft.operators.optimizer.adamw_8bit import adamw_8bit
from weft.operators.optimizer.multi_tensor import CudaTable

OPERATORS = {op.name: op for op in (adam, adamw, adamw_8bit)}


BESIDE = 0xA5  # what lies between tensors
BUFFERS = (0, 1, 2, 3, 8, 5)  # of the kernel's pointers, one after the other

LAUNCH = """
i64 *const table = job.buffer(1), *const gradients = job.buffer(0);
const i64 *s = job.shape, shift = reinterpret_cast<i64>(job.buffers[4]) - s[0];
for (i64 row = 0; row < s[1]; row++) {
  if (gradients[row]) gradients[row] += shift;
  for (int word : {0, 1, 2, 6, 7, 13, 14})
    if (table[row * 16 + word]) table[row * 16 + word] += shift;
}
const auto at = [&](int i) { return reinterpret_cast<float *>(s[i] ? s[i] + shift : 0); };
job.run([&] { KERNEL(gradients, table, POINTERS, s[2], s[3]); });
"""


@dataclasses.dataclass(frozen=True)
class Factors:
    """What a step scales, clips and skips by (None: it does not). Powers of two, by which gradients are divided beforehand, so
    that the result is the same."""

    clip: float | None = None
    scale: float | None = None
    found: float | None = None

    @property
    def factor(self) -> float:
        return (self.clip or 1.0) / (self.scale or 1.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload in a dtype, on so many multiprocessors, in blocks of so many threads; Adam's take chunks of 256 elements."""

    workload: str
    dtype: str = "bf16"
    sms: int = 1
    operator: str = "adamw"
    threads: int = 64
    gradient: float | None = None  # of the first tensor's first 40 elements, whose moments are 0
    scale: float = 1.0  # of gradients and first moments
    changed: tuple[tuple[str, object], ...] = ()  # arguments
    factors: Factors | None = None


class Step:
    """What a call launches from its table of pointers, with all of a case's tensors side by side in one stretch of memory."""

    def __init__(self, case: Case, seed: int = 0):
        operator = OPERATORS[case.operator]
        draw = verify.Draw(operator, operator.parse(case.workload, case.dtype), "forward", "cpu", seed)
        draw.arguments |= dict(case.changed)
        for name, scale in (("grads", 1), ("exp_avg_scales", 1), ("exp_avg_sq_scales", 2)):
            for t in draw.arguments[name] if case.scale != 1 else ():
                t.mul_(case.scale**scale)
        if case.gradient is not None:
            zero = dynamic_map.ZERO * ("fp8" not in case.workload)
            for name, value in (("grads", case.gradient), ("exp_avg_codes", zero), ("exp_avg_sq_codes", 0)):
                draw.arguments[name][0][:40] = value
        changed = [(multi_tensor, "multiprocessors", lambda device: case.sms)]
        changed += [(multi_tensor, name, case.threads) for name in ("ADAM_THREADS", "ADAMW_8BIT_THREADS")]
        trial = {"BLOCK": 256, "num_warps": 8}
        changed += [(c, "trial", trial) for c in (multi_tensor.configurations, multi_tensor.configurations_8bit)]
        self.draw, self.seed, self.factors = draw, seed, case.factors
        self.places: list[tuple[int, int]] = []
        sizes = [t.nbytes for t in cases.tensors(draw.arguments)]
        self.memory = torch.full((sum(n + 128 for n in sizes) + 576,), BESIDE, dtype=torch.uint8)
        self.memory = self.memory[-self.memory.data_ptr() % 64 :]
        self.memory = self.memory[: len(self.memory) // 16 * 16]
        self.end = 0
        placed = cases.map_tensors(self.place, draw.arguments)
        self.drawn = len(self.places)
        if case.factors:
            changed.append((CudaTable, "launch", self.launch_with_factors))
            for g in placed["grads"]:
                g.div_(case.factors.factor)
        launches = []
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            for change in changed:
                patch.setattr(*change)
            patch.setattr(CudaPlan, "__call__", lambda plan, *tensors: launches.append((plan, tensors)))
            operator.find("cuda").function(**placed)
        ((self.plan, self.tensors),) = launches

    @property
    def launch_with_factors(self):
        """``CudaTable.launch`` of a step with factors, where the norm has been computed."""
        factors, launch = self.factors, CudaTable.launch

        def launched(table: CudaTable) -> None:
            values = {n: getattr(factors, n) for n in ("scale", "found")}
            given = {n: self.place(torch.tensor([v])) for n, v in values.items() if v is not None}
            self.control = table.control = self.place(torch.tensor([factors.clip or 7.0, 7.0, 7.0, 7.0]))
            launch(table, max_norm=factors.clip, measured=True, **given)

        return launched

    def place(self, t: torch.Tensor) -> torch.Tensor:
        """A copy in ``memory`` that is as far from a multiple of 16 bytes as the tensor is."""
        begin = -(-self.end // 16) * 16 + 32 + t.data_ptr() % 16
        self.end = begin + t.nbytes
        self.places.append((begin, self.end))
        there = self.memory[begin : self.end].view(t.dtype) if t.numel() else t.clone()
        return there.as_strided(t.shape, t.stride()).copy_(t) if t.numel() else there

    @property
    def launch(self) -> str:
        buffers = BUFFERS[2 : len(self.tensors) - 4 * bool(self.factors)]
        more = [f"at({i})" for i in range(4, 8) if self.factors]
        pointers = ", ".join([*(f"job.buffer({i})" for i in buffers), *more])
        return LAUNCH.replace("KERNEL", self.plan.expression).replace("POINTERS", pointers)

    def job(self) -> bytes:
        own = self.tensors[:-4] if self.factors else self.tensors
        besides = [t.data_ptr() for t in self.tensors[len(own) :]]
        buffers = {i: t.clone() for i, t in zip(BUFFERS, own, strict=False)}
        buffers |= {4: self.memory.clone(), 10: bytes(8)}  # so that all blocks run together
        shape = (self.memory.data_ptr(), len(self.tensors[1]), *(s.value for s in self.plan.scalars), *besides)
        return job(self.plan, self.seed, buffers, shape=shape)

    def what_is_wrong(self, found: bytes) -> str:
        memory = torch.frombuffer(bytearray(found[: len(self.memory)]), dtype=torch.uint8)
        if any(found[len(self.memory) : -8]):
            return "arrivals are counted on"
        if self.factors and self.factors.found:
            self.control[3] += 1
            return "" if memory.equal(self.memory) else "a step that is skipped is not counted alone"
        beside = torch.ones(len(memory), dtype=torch.bool)
        for begin, end in self.places:
            beside[begin:end] = False
        if bool((memory[beside] != BESIDE).any()):
            return "written beside a tensor"

        def step(**arguments) -> None:
            for t, (begin, end) in zip(cases.tensors(arguments), self.places[: self.drawn], strict=True):
                if t.numel():
                    t.copy_(memory[begin:end].clone().view(t.dtype).as_strided(t.shape, t.stride()))
            if self.factors:
                for g in arguments["grads"]:
                    g.mul_(self.factors.factor)

        return self.draw.judge(step).reason


CASES = {
    "many passes": Case("T=2,P=5003"),
    "several blocks a tensor": Case("T=3,P=1353", "fp32", 3),
    "uneven ends": Case("T=5,P=700,shapes=uneven", "fp16"),
    "short tensors": Case("T=9,P=300", "fp32"),
    "element by element": Case("T=2,P=1100,layout=unaligned"),
    "not finite": Case("T=2,P=1000,values=nonfinite", "fp32"),
    "added decay": Case("T=2,P=1353,maximize=True", "fp32", operator="adam"),
    "upwards": Case("T=2,P=700,maximize=True", "fp16", changed=(("betas", (0.0, 0.5)), ("lr", torch.tensor(0.1)))),
    "no step": Case("T=1,P=300", changed=(("lr", 0.0),)),
    "clipped": Case("T=2,P=1353", "bf16", 3, factors=Factors(clip=0.25)),
    "clipped, unscaled, added decay": Case("T=2,P=700,maximize=True", "fp16", operator="adam", factors=Factors(0.5, 4.0, 0.0)),
    "a huge factor": Case("T=2,P=300", "fp32", factors=Factors(scale=2.0**-100)),
    "a tiny factor, not finite": Case("T=2,P=1000,values=nonfinite", "fp32", factors=Factors(0.5, 2.0**99)),
    "skipped": Case("T=3,P=1353", "bf16", 3, factors=Factors(scale=4.0, found=float("nan"))),
}  # fmt: skip

MISTAKES = {
    "no wait for the last copy": ("many passes", '::"n"(STAGES - 1) : "memory"', '::"n"(STAGES) : "memory"'),
    "a stage too far": ("many passes", "from == last ? mine", "from + STAGE == last ? mine"),
    "all is aligned": ("element by element", "const bool aligned = (", "const bool aligned = true || ("),
    "arrivals are left": ("several blocks a tensor", "before + 1, arrivals[row] = 0;", "before + 1;"),
    "one count for two tensors": ("short tensors", "slot ^= 1", "slot ^= 0"),
    "decay of the other sign": ("added decay", "s.l2 = n[SIGN] * n[L2];", "s.l2 = n[L2];"),
    "decay is scaled": ("clipped, unscaled, added decay", "float(root * n[L2])", "float(root * n[L2] * *factors.clip)"),
    "multiplied by the scale": ("clipped, unscaled, added decay", "1.f) / (factors.scale", "1.f) * (factors.scale"),
    "down a scaled gradient": ("clipped, unscaled, added decay", "root * n[SIGN] * factor_of", "root * factor_of"),
    "a skipped step is made": ("skipped", "  return skip;", "  return false;"),
    "each block counts": ("skipped", "factors.skipped && blockIdx.x == 0 && ", "factors.skipped && "),
}  # fmt: skip


EightBit = functools.partial(Case, operator="adamw_8bit", sms=3)
CASES_8BIT = {
    "several spans": EightBit("T=2,P=5003"),
    "uneven ends": EightBit("T=5,P=700,shapes=uneven", "fp32"),
    "short tensors": EightBit("T=8,P=300", "fp32", sms=1),
    "element by element": EightBit("T=2,P=1100,layout=unaligned", "fp16", sms=2),
    "two teams": EightBit("T=1,P=9003", threads=512),
    "blocks of 128": EightBit("T=2,P=1353,block=128"),
    "blocks of two warps": EightBit("T=2,P=1700,block=512", sms=2, threads=128),
    "blocks of eight warps": EightBit("T=1,P=5003,block=2048", "fp32", threads=256),
    "e4m3": EightBit("T=2,P=1353,format=fp8", "fp32"),
    "not finite": EightBit("T=2,P=1000,values=nonfinite,maximize=True", "fp32"),
    "e4m3, not finite": EightBit("T=2,P=700,format=fp8,values=nonfinite", "fp32"),
    "no step": EightBit("T=1,P=300", sms=1, gradient=0.0, changed=(("lr", 0.0),)),
    "hardly a gradient": EightBit("T=2,P=300", "fp32", gradient=1e-6, changed=(("lr", torch.tensor(0.1)),)),
    "e4m3, hardly a gradient": EightBit("T=2,P=300,format=fp8", "fp32", gradient=1e-6),
    "huge": EightBit("T=2,P=300", "fp32", scale=6e18),
    "e4m3, tiny": EightBit("T=2,P=300,format=fp8", "fp32", scale=1e-17),
    "upwards": EightBit("T=2,P=300,maximize=True", "fp32", changed=(("weight_decay", 0.0), ("betas", (0.0, 0.5)))),
    "clipped, unscaled": EightBit("T=2,P=1353,maximize=True", factors=Factors(0.5, 4.0)),
    "e4m3, a huge factor": EightBit("T=2,P=700,format=fp8", "fp32", factors=Factors(scale=2.0**-100, found=0.0)),
    "skipped": EightBit("T=3,P=1353", factors=Factors(clip=1.0, found=1.0)),
}  # fmt: skip

MISTAKES_8BIT = {
    "the other map's numbers": ("several spans", "+ DECODER + (SIGNED ? 0 : 128)", "+ DECODER"),
    "a line of another cell": ("several spans", "tables[512 + index * 4 + ", "tables[512 + (index ^ 1) * 4 + "),
    "another tensor's scales": ("several spans", "at.scales1 + offset / Q + b", "at.scales1 + b"),
    "a lost block is not seen": ("not finite", "if (!(largest >= SMALLEST && largest < __uint", "if (!(true || __uint"),
    "no inverse of what is huge": ("huge", ">= HIGH ? 0x1p-64f :", ">= HIGH ? 1.f :"),
    "0 is divided by": ("no step", "const bool moves = size > 0x1p-100;", "const bool moves = true;"),
    "a second moment becomes 0": ("e4m3, hardly a gradient", "if (!SIGNED && above[i] > 0.f)", "if (false)"),
    "a pass twice": ("several spans", "offset + PASS == whole ? offset : offset + PASS", "offset"),
    "no decay": ("uneven ends", "fmaf(-s.decay, p[i], p[i])", "p[i]"),
    "down the gradient": ("upwards", "s.root = n[SIGN] * root;", "s.root = root;"),
    "codes past the end are read": ("uneven ends", "(i < left ? p[i] : zero)", "p[i]"),
    "codes past the end are written": ("uneven ends", "if (i < left) p[i] = (unsigned char)", "p[i] = (unsigned char)"),
    "all is aligned": ("element by element", "const bool aligned = (", "const bool aligned = true || ("),
    "the step is not counted": ("several spans", "*step = before + 1,", "*step = before,"),
    "arrivals are left": ("several spans", "before + 1, arrivals[row] = 0;", "before + 1;"),
    "a count of the tensor before": ("short tensors", "__syncthreads();  // the next tensor's count may come", ";"),
    "warps do not meet": ("blocks of two warps", '"bar.sync %0, %1;" ::"r"(team + 1)', '"" ::"r"(team + 1)'),
    "warps wait for those that are done": ("several spans", "offset < of_all", "true"),
    "no factor": ("clipped, unscaled", "s.root *= factor_of(factors);", ";"),
    "a skipped step is made": ("skipped", "if (is_skipped(factors)) return;", "is_skipped(factors);"),
    "a warp's own part": ("blocks of eight warps", "maxima[team * WARPS + lane % WARPS][0]", "maxima[warp][0]"),
}  # fmt: skip

SUITES = {
    "adam": Suite(cuda_as_cpp.whole(multi_tensor.ADAM_SOURCE), Step, CASES, MISTAKES),
    "adamw_8bit": Suite(cuda_as_cpp.whole(multi_tensor.ADAMW_8BIT_SOURCE), Step, CASES_8BIT, MISTAKES_8BIT),
}


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("kernel", "dtype", "most"),
    [("adam", "bf16", 21), ("adam", "fp16", 21), ("adam", "float", 29), ("adam_scaled", "bf16", 21)],
)
def test_an_element_of_adam_takes_few_instructions(kernel, dtype, most):
    """From memory to memory, of whole chunks, spilling nothing; copies are begun before those of a pass before are awaited."""
    launched = f"{kernel}<{dtype}, {multi_tensor.ADAM_THREADS}, {multi_tensor.ADAM_STAGES}>"
    found = rounds(sass(multi_tensor.ADAM_SOURCE, launched))
    way = min((way for way in found if "DEPBAR.LE" in way), key=len)
    begun, awaited = max(i for i, n in enumerate(way) if "LDGSTS" in n), way.index("DEPBAR.LE")
    assert len(way) / (4 if dtype == "float" else 8) <= most and begun < awaited


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("dtype", "format", "block", "most"),
    [("bf16", "DYNAMIC", 256, 37), ("bf16", "E4M3", 256, 33), ("fp16", "DYNAMIC", 128, 42), ("float", "DYNAMIC", 2048, 48)],
)  # fmt: skip
def test_an_element_of_8_bits_takes_few_instructions(dtype, format, block, most):
    """From memory to memory, of whole blocks, spilling nothing. At 80 % of the ceiling there is time for 83 of a bf16 element
    and for 133 of an fp32 one."""
    kernel = f"adamw_8bit<{dtype}, {format}, {block}, {multi_tensor.ADAMW_8BIT_THREADS}>"
    found = rounds(sass(multi_tensor.ADAMW_8BIT_SOURCE, kernel))
    ways = [way for way in found if any("LDG.E.64" in n or "LDG.E.128" in n for n in way)]
    assert min(map(len, ways)) / 8 <= most


@pytest.mark.share(2)
@pytest.mark.parametrize("format", ["DYNAMIC", "E4M3"])
def test_a_factor_costs_an_element_nothing(format):
    """A pass of eight elements, of whole blocks, may have two instructions more."""

    def length(kernel: str) -> int:
        text = sass(multi_tensor.ADAMW_8BIT_SOURCE, f"{kernel}<bf16, {format}, 256, {multi_tensor.ADAMW_8BIT_THREADS}>")
        return min(len(way) for way in rounds(text) if {"REDUX.MAX", "LDG.E.64", "STG.E.64"} <= {*way})

    assert length("adamw_8bit_scaled") <= length("adamw_8bit") + 2


def drawn(operator, text: str, dtype: str, device: str = "cpu") -> dict:
    return operator.inputs(operator.parse(text, dtype), torch.Generator().manual_seed(0), device)


@pytest.mark.parametrize(("operator", "text", "changed", "reason"), [
    (adamw, "T=2,P=600,states=fp32", {}, "several dtypes"),
    (adamw, "T=2,P=600", {"grads": [torch.ones(600), torch.ones(600)]}, "several dtypes"),
    (adamw, "T=2,P=600,amsgrad=True", {}, "^AMSGrad$"),
    (adamw_8bit, "T=2,P=600", {"seed": 3}, "stochastically"),
    (adamw_8bit, "T=2,P=600", {"grads": [torch.ones(600).bfloat16(), torch.ones(600).half()]}, "several dtypes"),
    (adamw_8bit, "T=2,P=600", {"params": [torch.ones(600, 2, dtype=torch.bfloat16)[:, 0]] * 2}, "gaps"),
])  # fmt: skip
def test_what_it_cannot_take_is_declined(operator, text, changed, reason):
    with pytest.raises(Declined, match=reason), compiling_for(90, lambda *kernel: None):
        operator.find("cuda").function(**{**drawn(operator, text, "bf16"), **changed})


@pytest.mark.parametrize(
    ("name", "text", "dtype", "kernel"),
    [
        *((name, *rest) for name in ("adam", "adamw") for rest in (
            ("T=2,P=2097152", "bf16", "cuda"), ("T=64,P=65536", "fp16", "cuda"), ("T=2,P=2097151", "bf16", "triton"),
            ("T=2,P=2097152", "fp32", "triton"), ("T=2,P=2097152,states=fp32", "bf16", "triton"),
            ("T=2,P=2097152,amsgrad=True", "bf16", "triton"))),
        ("adamw_8bit", "T=2,P=2097152", "bf16", "cuda"), ("adamw_8bit", "T=2,P=2000", "bf16", "triton"),
        ("adamw_8bit", "T=2,P=2097152,stochastic=True", "bf16", "triton"),
    ],
)  # fmt: skip
def test_the_public_functions_take_them_for_many_elements_of_16_bits(name, text, dtype, kernel):
    arguments = drawn(OPERATORS[name], text, dtype, "cpu" if name == "adamw_8bit" else "meta")
    with compiling_for(90, lambda *kernel: None):
        assert ops.explain(name, **arguments).implementation == kernel


@pytest.mark.parametrize("signed", [True, False])
def test_a_cells_line_counts_as_the_dynamic_map_does(signed):
    """Everywhere, and close to the ends of cells and to powers of ten; at the end of an interval rounding decides."""
    g = torch.Generator().manual_seed(0)
    ends = torch.tensor([dynamic_map.cell_ends(cell) for cell in range(1, 128)], dtype=torch.float64).flatten()
    special = torch.cat([ends, 10.0 ** -torch.arange(8.0, dtype=torch.float64)])
    near = special[:, None] * (1 + 2e-3 * (torch.rand(special.numel(), 100, generator=g) - 0.5))
    spread = 10 ** (-torch.rand(200000, generator=g) * 9)
    y = torch.cat([near.flatten(), spread, torch.tensor([0.0, 1.0, 1e-44])]).float()
    y = y[y <= 1].unique()
    y = torch.cat([y, -y]) if signed else y
    x = (y * (1 + 2.0**-20)).mul(dynamic_map.CELL_SCALE)
    cells = x.half().view(torch.int16).int().bitwise_and(0xFFFF) >> 8
    tables = dynamic_map.lookup_tables(torch.device("cpu"))[512:].view(256, 2, 2)
    slope, at_0 = tables[cells, 0 if signed else 1].double().unbind(1)
    off = torch.addcmul(at_0, slope, x.double()).ceil().int() - dynamic_map.encode(y.double(), signed).int()
    assert int(off.abs().max()) <= 1 and float(off.ne(0).float().mean()) < 2e-4
    assert bool((off[(y == 0) | (y == 1) | (y == -1)] == 0).all())
