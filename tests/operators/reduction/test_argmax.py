"""``argmax`` where the index is in doubt: equals in and across groups, tiles, steps and parts, zeros of both signs, NaN,
all -inf; and what its kernel costs an element."""

from __future__ import annotations

import json

import pytest
from where import DEVICE, python

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import ops  # noqa: E402

# rows that are one tile, one step, several steps with and without a rest, several parts; columns; rows that begin anywhere
SHAPES = [
    ((5, 3), 1), ((9, 8), 1), ((5, 40), 1), ((7, 136), 1), ((3, 256), 1), ((3, 333), 1), ((2, 1500), 1), ((1, 5000), 1),
    ((1, 2304), None), ((4, 70), 0), ((700, 5), 0), ((1300, 16), 0), ((2, 90, 6), 1), ((3, 7, 8), 1),
]  # fmt: skip


def few_values(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=g).float()


def zeros_of_both_signs(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(shape, generator=g) < 0.5, 0.0, -0.0)


def nothing_but_minus_infinity(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.full(shape, -torch.inf)


def some_nan(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=g)
    return x.masked_fill(torch.rand(shape, generator=g) < 0.02, torch.nan).masked_fill(x > 2, torch.inf)


def one_equal_late(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Two equal largest elements next to each other, at the end of x."""
    x = torch.rand(shape, generator=g)
    x.view(-1)[-2:] = 3
    return x


@pytest.mark.device
@pytest.mark.parametrize(
    "values", [few_values, zeros_of_both_signs, nothing_but_minus_infinity, some_nan, one_equal_late]
)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_first_of_equals_is_found(values, shape, dim, dtype):
    x = values(shape, torch.Generator().manual_seed(3)).to(dtype)
    # PyTorch's choice among equals is not documented: NaN first, then the largest, then the lowest index
    along = x.flatten() if dim is None else x.movedim(dim, -1)
    best = along.amax(-1, keepdim=True)
    hits = (along == best) | (along.isnan() & best.isnan())
    want = torch.where(hits, torch.arange(along.shape[-1]), 2**62).amin(-1)
    assert torch.equal(ops.argmax(x.to(DEVICE), dim).cpu(), want)


# Compiles what a process that interprets cannot: instructions and 16-byte loads between the labels of each kernel.
COUNTED = """
import json, re, sys
from weft import registry
from weft.bench.instructions import _disassemble
from weft.operators.launch import compiling_for

op, found = registry.get("argmax"), []
for workload, dtype in json.loads(sys.argv[1]):
    with compiling_for(90, lambda name, cubin, *_: found.append(_disassemble(cubin))):
        op.implementations["triton"].function(**op.inputs(op.parse(workload, dtype), None, "meta"))
count = lambda words, text: len(re.findall(words, text))
parts = [re.split(r"^\\.L_x_\\d+:", text, flags=re.M) for text in found]
instructions = r"/\\*[0-9a-f]{4,5}\\*/ +(?!NOP)\\S"
wanted = (instructions, r"LDG\\.E\\.128", r"\\b(STL|LDL)\\b")
print(json.dumps([[[count(words, part) for words in wanted] for part in kernel] for kernel in parts]))
"""

# workload, dtype, elements of a thread, the most instructions an element
COSTS = [
    ("M=1048576,N=256", "bf16", 32, 5.2),
    ("M=65536,N=4096", "bf16", 128, 4.2),
    ("M=4096,N=65536", "bf16", 256, 3.6),
    ("M=65536,N=4096", "fp32", 128, 5.7),
]


def test_an_element_takes_few_instructions():
    """On sm_90, of a thread. Memory leaves time for 12 an element of 16 bits, and most are of units that do half as many."""
    done = python("-c", COUNTED, json.dumps([cost[:2] for cost in COSTS]))
    assert done.returncode == 0, done.stderr
    for (workload, dtype, elements, most), kernel in zip(COSTS, json.loads(done.stdout), strict=True):
        assert not any(spilled for _, _, spilled in kernel)
        vector = 8 if dtype == "bf16" else 4
        if "N=256" in workload:
            count = kernel[0][0]
        else:  # all is done once but for the loop, and for the masked step behind it, which whole rows skip
            loop, masked = [part for part in kernel if part[1] > 1]
            assert loop[1] == masked[1]
            count = loop[0] * elements / vector / loop[1] + sum(part[0] for part in kernel if part[1] <= 1)
        assert count / elements <= most, (workload, dtype)
