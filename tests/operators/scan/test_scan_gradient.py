"""Gradients of products and of logarithms of sums without a GPU: ``gradient.cu`` run on a CPU that plays its PTX
(``ptx_on_cpu.hpp``) with the launches that Python computes; what it compiles to and declines."""

from __future__ import annotations

import dataclasses
import re

import cuda_as_cpp
import pytest
from cuda_on_cpu import bytes_of, job, player_of_cases, tensor_of
from sass import names, sass
from scan_on_cpu import recurrence

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.bench.compile_check import resource_usage  # noqa: E402
from weft.definition import Declined  # noqa: E402
from weft.operators.call import Choice  # noqa: E402
from weft.operators.configs import Configurations  # noqa: E402
from weft.operators.cuda import compile_cubin  # noqa: E402
from weft.operators.launch import INTERPRETING, Plan, compiling_for  # noqa: E402
from weft.operators.reduction.views import views_of  # noqa: E402
from weft.operators.scan import gradient_vectors, kernels  # noqa: E402
from weft.operators.scan.cumprod import scan as product  # noqa: E402
from weft.operators.scan.gradient_vectors import VectorsGradientPlan  # noqa: E402
from weft.operators.scan.logcumsumexp import scan as logarithm  # noqa: E402
from weft.operators.scan.plans import GradientPlan  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows [m, n]; ``part``: elements of a part, where rows are cut; ``step``: "TOTALS" or "CARRIED" of the parts."""

    log: bool = True
    dtype: torch.dtype = BF16
    m: int = 3
    n: int = 1000
    reverse: bool = False
    exclusive: bool = False
    threads: int = 64
    each: int = 32  # bytes a thread
    part: int = 0
    step: str = ""
    apart: int = 0  # elements between two rows of y and dy


CASES = {
    "two warps": Case(),
    "a product": Case(log=False),
    "exclusive": Case(exclusive=True),
    "an exclusive product": Case(log=False, exclusive=True, dtype=FP16),
    "reversed": Case(reverse=True, dtype=FP16, apart=8),
    "a reversed product": Case(log=False, reverse=True, apart=16),
    "both": Case(reverse=True, exclusive=True),
    "both, a product": Case(log=False, reverse=True, exclusive=True),
    "rows side by side": Case(m=13, n=24),
    "products side by side": Case(log=False, m=9, n=8),
    "fp32 in four blocks": Case(dtype=FP32, n=940, threads=32, each=16),
    "a product in four blocks": Case(log=False, n=2000, threads=32),
    "exclusive fp32": Case(dtype=FP32, n=500, exclusive=True),
    "totals of parts": Case(m=2, n=1304, part=256, step="TOTALS", threads=32, each=16),
    "totals of parts, a product": Case(log=False, m=2, n=2608, part=1024, step="TOTALS", reverse=True),
    "from what is carried": Case(m=2, n=1304, part=512, step="CARRIED", threads=32),
    "from what is carried, a product": Case(log=False, m=2, n=1304, part=256, step="CARRIED", threads=32),
}  # fmt: skip

# Mistakes: a case that shows them, what stands in the kernel, what is written instead.
MISTAKES = {
    "steps in the other order": ("two warps", "second.a * first.b + second.b", "first.a * second.b + first.b"),
    "a lane's own element for its neighbour's": ("two warps", "begins ? previous : up;", "begins ? previous : last;"),
    "nothing before a warp": ("two warps", "at >= 0 && at < N ? to_float(memory[at]) : other", "other"),
    "nothing before a strip": ("two warps", "previous = __shfl_sync(ALL, last, LANES - 1, LANES)", "previous = 0.f"),
    "no second": ("exclusive", "from_before(y_words, 1, y,", "from_before(y_words, 0, y,"),
    "the gradient of the same element": ("exclusive", "from_before(dy_words, 0,", "from_before(y_words, 0,"),
    "nothing behind a warp": ("a product", "? to_float(y[at]) : 1.f", "? 1.f : 1.f"),
    "nothing behind a strip": ("a product", "y_beside[v] = next;", "y_beside[v] = 1.f;"),
    "the next lane is there": ("a product", "const bool last = first(v) + COUNT >= length;", "const bool last = false;"),
    "what is missing counts": ("totals of parts, a product", "there(v) ? s : Step{1.f, 0.f}", "s"),
    "warps forgotten": ("two warps", "if (warp) carried = earlier;", ";"),
    "blocks forgotten": ("four blocks", "carried = then<LOG>(earlier, carried);", ";"),
    "blocks too early": ("four blocks", "barrier_wait(told);", ""),
    "strips forgotten": ("two warps", "begins ? total : then<LOG>(total, other)", "begins ? Step{1.f, 0.f} : other"),
    "parts begin at the row": ("carried", "begin = parts > 1 ? unit % parts * each : 0", "begin = 0"),
    "a part's end is the row's": ("carried", "at < N ? to_float(memory", "at < begin + each ? to_float(memory"),
    "nothing carried": ("carried", "if (unit < units) r = carried.a * carry[unit] + carried.b;", ";"),
    "totals of the first warp": ("totals of parts, a product", "total = shuffled(all, WARPS - 1, 32);", ";"),
    "a row for another": ("rows side by side", "+ team) * SIDE + lane / LANES;", "+ team) * SIDE;"),
    "upwards": ("two warps", "return DOWN ? COUNT - 1 - i : i;", "return i;"),
    "the factor of another": ("a product", "i + 1 < COUNT ? f[turned(i + 1)] : y_beside[v]", "f[turned(i)]"),
}  # fmt: skip
OF_MISTAKE = {"four blocks": "fp32 in four blocks", "carried": "from what is carried"}

LAUNCH = """
const Any x{job.buffers[0]}, y{job.buffers[1]}, dy{job.buffers[2]}, carry{job.buffers[3]}, dx{job.buffers[4]},
    totals{job.buffers[8]}, scales{static_cast<char *>(job.buffers[8]) + job.scales[0]};
const i64 *s = job.shape;
job.run([&] { KERNEL(x, y, dy, carry, totals, scales, dx, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]); });
"""


class Gradients:
    """The tensors of a case, what is right, and the launch that a call computes."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        g = torch.Generator().manual_seed(seed)
        scan = logarithm if case.log else product
        how = {"exclusive": case.exclusive, "reverse": case.reverse}
        x = torch.randn(case.m, case.n, generator=g)
        self.x = (x * 2 if case.log else 1 + x / 16).to(case.dtype)
        self.y, self.dy = (torch.empty(case.m, case.n + case.apart, dtype=case.dtype)[:, : case.n] for _ in range(2))
        self.y.copy_(scan.reference(self.x.double(), -1, **how))
        self.dy.copy_(torch.randn(case.m, case.n, generator=g))
        tensors = self.x, self.y, self.dy, torch.empty_like(self.x)
        configured = Configurations(gradient_vectors.__file__, "played", lambda *key: None, lambda *key: ())
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(configured, "trial", {"BYTES": case.each, "THREADS": case.threads})
            if case.part:
                patch.setattr(gradient_vectors, "PART", case.part)
                patch.setattr(gradient_vectors, "MAX_CLUSTER", 1)  # which holds a part, but not a row
            views = views_of(self.x, 1, *tensors[1:])
            made = gradient_vectors.VectorsGradientPlan(views, tensors, configured, log=case.log, **how)
        assert (made.parts > 1) == bool(case.part)
        self.parts, self.each = made.parts, case.part or case.n
        self.plan = made.totals if case.step == "TOTALS" else made.gradient
        self._right()

    def _right(self) -> None:
        """The recurrence in float64, element by element, with the y that the kernel sees."""
        case = self.case
        how = {"log": case.log, "exclusive": case.exclusive, "reverse": case.reverse}
        spans = [(at, min(at + self.each, case.n)) for at in range(0, case.n, self.each)]  # in memory
        spans = spans if case.reverse else [(case.n - end, case.n - begin) for begin, end in spans]
        self.dx, self.carry, self.scales, self.totals = recurrence(self.x, self.y, self.dy, spans, **how)

    @property
    def launch(self) -> str:
        return LAUNCH.replace("KERNEL", self.plan.expression)

    def job(self) -> bytes:
        carry = self.carry.to(FP32).contiguous()
        read = {0: self.x, 1: self.y, 2: self.dy, 3: carry}
        buffers = {i: bytes_of(t) for i, t in read.items()}
        buffers |= {4: bytes([0xA5]) * self.x.nbytes, 8: bytes([0xA5]) * (2 * carry.nbytes)}
        plan = dataclasses.replace(self.plan, shared_bytes=cuda_as_cpp.STATIC)
        return job(plan, self.seed, buffers, shape=[s.value for s in self.plan.scalars], scales=(carry.nbytes,))

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or what is further off than rounding allows."""
        case, size, sums = self.case, self.x.nbytes, self.carry.numel()
        rounding = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}[case.dtype]
        got = {"dx": tensor_of(found[:size], case.dtype).view(case.m, case.n)}
        want = {"dx": self.dx}
        if case.step == "TOTALS":
            both = tensor_of(found[size:], FP32).view(2, *self.carry.shape)
            got, want, rounding = (
                {"total": both[0], "scale": both[1]},
                {"total": self.totals, "scale": self.scales},
                2e-6,
            )
        for name, right in want.items():
            far = ~((got[name].double() - right).abs() <= rounding * right.abs() + 2e-6 * (1e-3 + right.abs().amax()))
            if far.any():
                at = tuple(far.nonzero()[0].tolist())
                return (
                    f"{name}{list(at)} is {got[name][at].item()}, not {right[at].item()} ({int(far.sum())} of {sums})"
                )
        return ""


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    text = cuda_as_cpp.whole(gradient_vectors.SOURCE)
    mistakes = {name: (OF_MISTAKE.get(of, of), *change) for name, (of, *change) in MISTAKES.items()}
    return player_of_cases(tmp_path_factory.mktemp("played"), text, Gradients, CASES, mistakes)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    assert [play(name, seed=seed) for seed in range(3)] == [""] * 3


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    of = MISTAKES[mistake][0]
    assert any(play(OF_MISTAKE.get(of, of), mistake, seed) for seed in range(8))


# ---- what it holds, costs and declines -----------------------------------------------------------------------------------


def plan_of(scan, m: int, n: int, dtype: torch.dtype, sm: int = 90):
    x = torch.empty(m, n, dtype=dtype, device="meta")
    with compiling_for(sm, lambda *kernel: None):
        return scan._vector_backward_plan(x, x, x, -1, False, False)


@pytest.mark.parametrize(("dtype", "most"), [(BF16, (55, 62)), (FP32, (90, 122))])
@pytest.mark.parametrize("scan", [logarithm, product], ids=["logarithm", "product"])
@pytest.mark.parametrize("n", [256, 4096, 65536, 2**28])
def test_nothing_is_spilled_and_an_element_takes_few_instructions(scan, n, dtype, most):
    """Of products and of logarithms, from memory to memory, the exchange between lanes, warps and blocks included; at the
    ceiling there is time for 55 of a 16-bit element and for 110 of a 32-bit one."""
    plan = plan_of(scan, 2**28 // n, n, dtype)
    assert (plan.parts > 1) == (n == 2**28)
    cubin, _ = compile_cubin(plan.gradient.source, plan.gradient.expression, 90)
    assert resource_usage(cubin)["STACK"] == 0
    held = int(re.findall(r", (\d+)", plan.gradient.expression)[1]) * 16 // dtype.itemsize
    assert len(names(sass(plan.gradient.source, plan.gradient.expression))) / held <= most[scan is logarithm]


@pytest.mark.parametrize("name", ["cumprod", "logcumsumexp"])
@pytest.mark.parametrize("sm", [90, 100, 120])
def test_every_configuration_compiles(name, sm):
    scan = {"cumprod": product, "logcumsumexp": logarithm}[name]
    for n in (512, 2**15):
        found = list(gradient_vectors.candidates(sm, BF16, n))
        assert gradient_vectors.heuristic(sm, BF16, n) in found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan.configured.gradient_vectors, "trial", found[-1])
        assert compile_cubin(gradient_vectors.SOURCE, plan_of(scan, 64, 2**15, BF16, sm).gradient.expression, sm)[0]


def test_it_declines_what_it_cannot_take():
    def why(x, sm=90):
        with pytest.raises(Declined) as declined, compiling_for(sm, lambda *kernel: None):
            product._vector_backward_plan(x, x, x, -1, False, False)
        return str(declined.value)

    assert "16 bytes" in why(torch.ones(3, 12, dtype=BF16)) and "side by side" in why(torch.ones(8, 16)[:, ::2].T)
    assert "16 bytes" in why(torch.ones(2 * 64 + 1, dtype=BF16)[1:].view(2, 64)) and "sm_90" in why(
        torch.ones(2, 8), 80
    )


@pytest.mark.skipif(not INTERPRETING, reason="on a GPU `weft verify` runs it")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the overflow, from the interpreter
def test_what_parts_carry_is_finite_where_factors_overflow():
    totals, scales = torch.tensor([0.0, 0.0, 5.0, 7.0]), torch.tensor([3.4e38, -3.4e38, 2.0, 1.0])
    carry = torch.empty(4)
    Plan(kernels.carry_parts, (1,), (1, 4), {"REVERSE": False, "BLOCK": 4}, 4)(totals, scales, carry)
    assert carry.tolist() == [0.0, 0.0, 0.0, 5.0]


def test_the_public_functions_take_it_for_many_elements(monkeypatch):
    taken = []
    for scan in (product, logarithm):
        monkeypatch.setattr(scan, "gradient", lambda *of: taken.append(of[-1]) or of[2])
        for function in (scan.triton, scan.cuda, lambda x, dim, scan=scan: scan(x, dim, False, False)):
            x = torch.ones(4, 64, requires_grad=True)
            monkeypatch.setattr(scan, "run", lambda x, *of: x * 1)
            monkeypatch.setattr(scan, "choose", lambda *of, scan=scan: Choice("triton", "", scan.triton_plans))
            function(x, -1).sum().backward()
        assert taken[-3:] == [scan.backward_plans, scan.vector_backward_plans, scan.public_backward_plans]
    monkeypatch.setattr("weft.operators.scan.scan.INTERPRETING", False)
    for shape, kind in (
        ((64, 2**14), VectorsGradientPlan),
        ((64, 2**13), GradientPlan),
        ((2**7, 2**13 + 1), GradientPlan),
    ):
        x = torch.empty(*shape, dtype=BF16, device="meta")
        with compiling_for(90, lambda *kernel: None):
            assert type(product._public_backward_plan(x, x, x, -1, False, False)) is kind
