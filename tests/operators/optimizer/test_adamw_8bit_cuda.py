"""AdamW in 8 bits without a GPU: ``adamw_8bit.cu`` on the CPU emulator with the launches that Python computes; what it compiles
to and declines."""

from __future__ import annotations

import dataclasses

import cuda_as_cpp
import pytest
from cuda_on_cpu import emulator_of_cases
from sass import rounds, sass
from table_on_cpu import Factors, TableStep

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import ops  # noqa: E402
from weft.bench import verify  # noqa: E402
from weft.definition import Declined  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.optimizer import dynamic_map, multi_tensor  # noqa: E402
from weft.operators.optimizer.adamw_8bit import adamw_8bit  # noqa: E402

ZERO_CODE = dynamic_map.ZERO


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload in a dtype, on so many multiprocessors, in blocks of so many threads."""

    workload: str
    dtype: str = "bf16"
    sms: int = 3
    threads: int = 64
    gradient: float | None = None  # of the first tensor's first 40 elements, whose moments are 0
    scale: float = 1.0  # of gradients and first moments
    changed: tuple[tuple[str, float], ...] = ()  # arguments
    factors: Factors | None = None


CASES = {
    "several spans": Case("T=2,P=5003"),
    "uneven ends": Case("T=5,P=700,shapes=uneven", "fp32"),
    "short tensors": Case("T=8,P=300", "fp32", 1),
    "element by element": Case("T=2,P=1100,layout=unaligned", "fp16", 2),
    "two teams": Case("T=1,P=9003", threads=512),
    "blocks of 128": Case("T=2,P=1353,block=128"),
    "blocks of two warps": Case("T=2,P=1700,block=512", sms=2, threads=128),
    "blocks of eight warps": Case("T=1,P=5003,block=2048", "fp32", threads=256),
    "e4m3": Case("T=2,P=1353,format=fp8", "fp32"),
    "not finite": Case("T=2,P=1000,values=nonfinite,maximize=True", "fp32"),
    "e4m3, not finite": Case("T=2,P=700,format=fp8,values=nonfinite", "fp32"),
    "no step": Case("T=1,P=300", sms=1, gradient=0.0, changed=(("lr", 0.0),)),
    "hardly a gradient": Case("T=2,P=300", "fp32", gradient=1e-6, changed=(("lr", torch.tensor(0.1)),)),
    "e4m3, hardly a gradient": Case("T=2,P=300,format=fp8", "fp32", gradient=1e-6),
    "huge": Case("T=2,P=300", "fp32", scale=6e18),
    "e4m3, tiny": Case("T=2,P=300,format=fp8", "fp32", scale=1e-17),
    "upwards": Case("T=2,P=300,maximize=True", "fp32", changed=(("weight_decay", 0.0), ("betas", (0.0, 0.5)))),
    "clipped, unscaled": Case("T=2,P=1353,maximize=True", factors=Factors(0.5, 4.0)),
    "e4m3, a huge factor": Case("T=2,P=700,format=fp8", "fp32", factors=Factors(scale=2.0**-100, found=0.0)),
    "skipped": Case("T=3,P=1353", factors=Factors(clip=1.0, found=1.0)),
}  # fmt: skip

# Mistakes: a case that shows them, what stands in the kernel or its header, what is written instead.
MISTAKES = {
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


class Step(TableStep):
    """A case's tensors and the launch that a call computes."""

    def __init__(self, case: Case, seed: int = 0):
        draw = verify.Draw(adamw_8bit, adamw_8bit.parse(case.workload, case.dtype), "forward", "cpu", seed)
        draw.arguments |= dict(case.changed)
        for name, scale in (("grads", 1), ("exp_avg_scales", 1), ("exp_avg_sq_scales", 2)):
            for t in draw.arguments[name]:
                t.mul_(case.scale**scale)
        if case.gradient is not None:
            for name, value in (
                ("grads", case.gradient),
                ("exp_avg_codes", ZERO_CODE * ("fp8" not in case.workload)),
                ("exp_avg_sq_codes", 0),
            ):
                draw.arguments[name][0][:40] = value
        changed = [
            (multi_tensor, "ADAMW_8BIT_THREADS", case.threads),
            (multi_tensor, "multiprocessors", lambda device: case.sms),
            (multi_tensor.configurations_8bit, "trial", {"BLOCK": 256, "num_warps": 8}),
        ]
        super().__init__(adamw_8bit, draw, changed, seed, case.factors)


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    text = cuda_as_cpp.whole(multi_tensor.ADAMW_8BIT_SOURCE)
    return emulator_of_cases(tmp_path_factory.mktemp("emulated"), text, Step, CASES, MISTAKES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(emulate, name):
    assert [emulate(name, seed=seed) for seed in range(2)] == [""] * 2


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(emulate, mistake):
    assert any(emulate(MISTAKES[mistake][0], mistake, seed) for seed in range(4))


# ---- the look-ups ------------------------------------------------------------------------------------------------------


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
    slope, at_0 = (
        dynamic_map.lookup_tables(torch.device("cpu"))[512:]
        .view(256, 2, 2)[cells, 0 if signed else 1]
        .double()
        .unbind(1)
    )
    off = torch.addcmul(at_0, slope, x.double()).ceil().int() - dynamic_map.encode(y.double(), signed).int()
    assert int(off.abs().max()) <= 1 and float(off.ne(0).float().mean()) < 2e-4
    assert bool((off[(y == 0) | (y == 1) | (y == -1)] == 0).all())


# ---- what it costs, and declines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "format", "block", "most"),
    [("bf16", "DYNAMIC", 256, 37), ("bf16", "E4M3", 256, 33), ("fp16", "DYNAMIC", 128, 42), ("float", "DYNAMIC", 2048, 48)],
)  # fmt: skip
def test_an_element_takes_few_instructions(dtype, format, block, most):
    """From memory to memory, of whole blocks, spilling nothing. At 80 % of the ceiling there is time for 83 of a bf16 element
    and for 133 of an fp32 one."""
    kernel = f"adamw_8bit<{dtype}, {format}, {block}, {multi_tensor.ADAMW_8BIT_THREADS}>"
    ways = [
        way
        for way in rounds(sass(multi_tensor.ADAMW_8BIT_SOURCE, kernel))
        if any("LDG.E.64" in n or "LDG.E.128" in n for n in way)
    ]
    assert min(map(len, ways)) / 8 <= most


@pytest.mark.parametrize("format", ["DYNAMIC", "E4M3"])
def test_a_factor_costs_an_element_nothing(format):
    """A pass of eight elements, of whole blocks, may have two instructions more."""

    def length(kernel: str) -> int:
        text = sass(multi_tensor.ADAMW_8BIT_SOURCE, f"{kernel}<bf16, {format}, 256, {multi_tensor.ADAMW_8BIT_THREADS}>")
        return min(len(way) for way in rounds(text) if {"REDUX.MAX", "LDG.E.64", "STG.E.64"} <= {*way})

    assert length("adamw_8bit_scaled") <= length("adamw_8bit") + 2


def arguments(**changed):
    drawn = adamw_8bit.inputs(adamw_8bit.parse("T=2,P=600", "fp32"), torch.Generator().manual_seed(0), "cpu")
    return {**drawn, **changed}


def test_it_declines_what_it_cannot_take():
    def why(**changed) -> str:
        with pytest.raises(Declined) as declined, compiling_for(90, lambda *kernel: None):
            adamw_8bit.find("cuda").function(**arguments(**changed))
        return str(declined.value)

    grads = arguments()["grads"]
    assert "stochastically" in why(seed=3)
    assert "several dtypes" in why(grads=[grads[0], grads[1].half()])
    assert "gaps" in why(params=[torch.ones(1200)[::2], torch.ones(600)])


def test_the_public_function_takes_it_for_many_elements():
    def chosen(text: str, dtype: str) -> str:
        drawn = adamw_8bit.inputs(adamw_8bit.parse(text, dtype), torch.Generator().manual_seed(0), "cpu")
        with compiling_for(90, lambda *kernel: None):
            return str(ops.explain("adamw_8bit", **drawn).implementation)

    assert chosen("T=2,P=2097152", "bf16") == "cuda"
    assert chosen("T=2,P=2000", "bf16") == chosen("T=2,P=2097152,stochastic=True", "bf16") == "triton"
