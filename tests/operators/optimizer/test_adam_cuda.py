"""Adam and AdamW without a GPU: ``adam.cu`` on the CPU emulator with the launches that Python computes; what it compiles to and
declines."""

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
from weft.operators.optimizer import multi_tensor  # noqa: E402
from weft.operators.optimizer.adam import adam  # noqa: E402
from weft.operators.optimizer.adamw import adamw  # noqa: E402

OPERATORS = {"adam": adam, "adamw": adamw}


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload in a dtype, on so many multiprocessors of two blocks of 64 threads, which take chunks of 256 elements."""

    workload: str
    dtype: str = "bf16"
    sms: int = 1
    operator: str = "adamw"
    changed: tuple[tuple[str, object], ...] = ()  # arguments
    factors: Factors | None = None


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

# Mistakes: a case that shows them, what stands in the kernel or its headers, what is written instead.
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


class Step(TableStep):
    """A case's tensors and the launch that a call computes."""

    def __init__(self, case: Case, seed: int = 0):
        operator = OPERATORS[case.operator]
        draw = verify.Draw(operator, operator.parse(case.workload, case.dtype), "forward", "cpu", seed)
        draw.arguments |= dict(case.changed)
        changed = [
            (multi_tensor, "ADAM_THREADS", 64),
            (multi_tensor, "multiprocessors", lambda device: case.sms),
            (multi_tensor.configurations, "trial", {"BLOCK": 256, "num_warps": 8}),
        ]
        super().__init__(operator, draw, changed, seed, case.factors)


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    text = cuda_as_cpp.whole(multi_tensor.ADAM_SOURCE)
    return emulator_of_cases(tmp_path_factory.mktemp("emulated"), text, Step, CASES, MISTAKES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(emulate, name):
    assert [emulate(name, seed=seed) for seed in range(2)] == [""] * 2


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(emulate, mistake):
    assert any(emulate(MISTAKES[mistake][0], mistake, seed) for seed in range(4))


@pytest.mark.parametrize(
    ("kernel", "dtype", "most"),
    [("adam", "bf16", 21), ("adam", "fp16", 21), ("adam", "float", 29), ("adam_scaled", "bf16", 21)],
)
def test_an_element_takes_few_instructions(kernel, dtype, most):
    """From memory to memory, of whole chunks, spilling nothing; copies are begun before those of a pass before are awaited."""
    found = rounds(
        sass(multi_tensor.ADAM_SOURCE, f"{kernel}<{dtype}, {multi_tensor.ADAM_THREADS}, {multi_tensor.ADAM_STAGES}>")
    )
    way = min((way for way in found if "DEPBAR.LE" in way), key=len)
    begun, awaited = max(i for i, n in enumerate(way) if "LDGSTS" in n), way.index("DEPBAR.LE")
    assert len(way) / (4 if dtype == "float" else 8) <= most and begun < awaited


def test_it_declines_what_it_cannot_take():
    def why(text: str, dtype: str = "bf16", **changed) -> str:
        drawn = adamw.inputs(adamw.parse(text, dtype), torch.Generator().manual_seed(0), "cpu")
        with pytest.raises(Declined) as declined, compiling_for(90, lambda *kernel: None):
            adamw.find("cuda").function(**{**drawn, **changed})
        return str(declined.value)

    assert "several dtypes" in why("T=2,P=600,states=fp32")
    assert "several dtypes" in why("T=2,P=600", grads=[torch.ones(600), torch.ones(600)])
    assert why("T=2,P=600,amsgrad=True") == "AMSGrad"


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_the_public_function_takes_it_for_many_elements_of_16_bits(operator):
    def chosen(text: str, dtype: str) -> str:
        drawn = operator.inputs(operator.parse(text, dtype), None, "meta")
        with compiling_for(90, lambda *kernel: None):
            return str(ops.explain(operator.name, **drawn).implementation)

    assert chosen("T=2,P=2097152", "bf16") == chosen("T=64,P=65536", "fp16") == "cuda"
    assert chosen("T=2,P=2097151", "bf16") == chosen("T=2,P=2097152", "fp32") == "triton"
    assert chosen("T=2,P=2097152,states=fp32", "bf16") == chosen("T=2,P=2097152,amsgrad=True", "bf16") == "triton"
