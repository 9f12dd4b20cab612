"""The ladder of the matrix product without a GPU: its kernels, out of the very files that NVRTC compiles, run on a CPU where
every instruction that C++ has no word for is emulated (``gpu_on_cpu.hpp``); what they compile to; how they are launched."""

import ctypes
import re
import runpy
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import turns
from cuda_on_cpu import compiled
from where import DEVICE, ROOT

from weft import registry
from weft.bench import instructions
from weft.course.ladders import matmul as ladder
from weft.definition import Declined, UnknownName
from weft.operators import cuda
from weft.operators.launch import compiling_for, multiprocessors

CUDA_RUNGS = list(ladder.KERNELS)
LOW, HIGH = [n for n in CUDA_RUNGS if n <= 8], [n for n in CUDA_RUNGS if n > 8]


def plan_of(number: int, m: int, n: int, k: int, sm: int = 90) -> cuda.CudaPlan:
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((m, k), (k, n)))
    with compiling_for(sm, lambda *kernel: None):
        plan = ladder._plan(number, a, b)
    return plan.plan if isinstance(plan, ladder.MappedPlan) else plan


def source(text: str) -> str:
    """A ladder file as C++ for ``gpu_on_cpu.hpp``, which brings what the section "instructions" and the prelude have."""
    text = re.sub(r'^#include "prelude.cuh"\n', "", text, flags=re.M)
    text = re.sub(r"^// ---- instructions:.*?(?=^// ---- )", "", text, flags=re.M | re.S)
    text = re.sub(r"^struct alignas\(64\) TensorMap.*\n", "", text, flags=re.M)
    dynamic = "bf16 *const shared = static_cast<bf16 *>(dynamic_memory());"
    return re.sub(r"extern __shared__ __align__\(\d+\) bf16 shared\[\];", dynamic, text)


# Mistakes: rung, what stands there, what is written instead. Each must be noticed with some seed.
MISTAKES = {
    "the copies not waited for": (7, "wait_copies<1>();", ""),
    "one stage too few waited for": (8, "wait_copies<STAGES - 2>();", "wait_copies<STAGES - 1>();"),
    "a stage overwritten while it is read": (8, "fetch(step + STAGES - 1);", "fetch(step + STAGES);"),
    "A read unswizzled": (8, "at + swizzled<BK>(y + i * 16 + lane % 16, k + ", "at + ((y + i * 16 + lane % 16) * BK + k + "),
    "the products not waited for": (9, "wgmma_wait<0>();\n    __syncthreads();", "__syncthreads();"),
    "64 columns of B for all": (9, "descriptor(b + k * 16 * 128, BOX, 1024)", "descriptor(b + k * 16 * 128, 0, 1024)"),
    "A advanced by 64 bytes": (9, "descriptor(a + k * 32, 0, 1024)", "descriptor(a + k * 64, 0, 1024)"),
    "the wrong parity": (10, "~(step / STAGES) & 1", "step / STAGES & 1"),
    "a stage released too early": (10, "if (k > 0) release(step - 1);", "release(step);"),
    "a stage never released": (11, "wgmma_wait<0>();\n      release(step - 1);", "wgmma_wait<0>();"),
    "a buffer written while TMA reads it": (11, "if (threadIdx.x % 128 == 0) wait_stores<1>();", ""),
    "tiles in groups of the wrong height": (11, "height = min(GROUP, down - first)", "height = GROUP"),
    "the other block's release not counted": (12, "BLOCKS * CONSUMERS * 4", "CONSUMERS * 4"),
    "a block's rank in its descriptors": (12, "(address & 0x3ffff) >> 4", "address >> 4"),
    "the other block left out": (12, "k * BK, barrier, 3);", "k * BK, barrier, 1 << rank);"),
}  # fmt: skip
WRONG = [name for name in MISTAKES if turns.has(f"ladder {name}", 5)]  # of this run: each is compiled


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Runs ``kernel M N K grid threads cluster shared_bytes seed banks`` and returns what is printed."""
    texts, programs = {}, {}
    for program, numbers, file in (("low", LOW, ladder.SOURCE), ("high", HIGH, ladder.HOPPER)):
        right = file.read_text()
        spaces = [f"namespace right {{\n{source(right)}}}"]
        calls = {f"rung {n}": f"right::{ladder.KERNELS[n].expression}" for n in numbers}
        for i, (name, (number, good, bad)) in enumerate(MISTAKES.items()):
            if number in numbers:
                assert right.count(good) == 1, f"{name}: the ladder has no single '{good}'"
            if number in numbers and name in WRONG:
                spaces.append(f"namespace wrong{i} {{\n{source(right.replace(good, bad))}}}")
                calls[name] = f"wrong{i}::{ladder.KERNELS[number].expression}"
        call = 'if (!std::strcmp(words[1], "{}")) return check({}, words + 2);'
        lines = [call.format(name, kernel) for name, kernel in calls.items()]
        main = ["int main(int, char **words) {", *lines, "return 2;", "}"]
        texts[program] = "\n".join(['#include "gpu_on_cpu.hpp"', *spaces, *main])
        programs |= dict.fromkeys(numbers, program)
    made = compiled(tmp_path_factory.mktemp("machine"), texts)

    def run(
        number: int, sizes: tuple[int, int, int], seed: int = 0, *, kernel: str = "", grid: int = 0, banks: bool = False
    ) -> str:
        plan = plan_of(number, *sizes)
        words = (*sizes, grid or plan.grid[0], plan.block, plan.cluster, plan.shared_bytes, seed, int(banks))
        words = kernel or f"rung {number}", *map(str, words)
        done = subprocess.run([made[programs[number]], *words], capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 1, -11), done
        return done.stdout or "an access outside memory"

    return run


SIZES = ((8, 8, 8), (40, 72, 136), (136, 264, 328), (264, 520, 72))


@pytest.mark.parametrize("number", CUDA_RUNGS)
@pytest.mark.share(3)
def test_a_rung_is_right_at_sizes_that_are_no_multiples_of_its_tile(machine, number):
    """A, B and C lie before pages that may not be touched, and threads and copies take turns at random."""
    for seed, sizes in enumerate(SIZES):
        assert machine(number, sizes, seed) == "right\n"
    if number <= 5:
        assert machine(number, (33, 65, 17)) == "right\n"


@pytest.mark.share(2)
@pytest.mark.parametrize("number", [11, 12])
def test_a_persistent_rung_is_right_with_any_number_of_blocks(machine, number):
    cluster = ladder.KERNELS[number].cluster
    for blocks in (1, 2, 3, 5):
        assert machine(number, (1160, 520, 136), blocks, grid=blocks * cluster) == "right\n"


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_noticed(machine, mistake):
    number = MISTAKES[mistake][0]
    sizes = (136, 264, 456) if number <= 8 else (392, 776, 456)
    grid = 2 if number > 10 else 0
    assert any(machine(number, sizes, seed, kernel=mistake, grid=grid) != "right\n" for seed in range(6))


def banks(machine, number):
    lines = machine(number, (128, 256, 128), banks=True).splitlines()[1:]
    return {" ".join(line.split()[:2]): tuple(map(int, line.split()[2:])) for line in lines}


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7, 8, 11, 12])
def test_conflicts_of_banks_are_those_that_the_readme_counts(machine, number):
    """Passes that each kind of access takes, against the fewest that its bytes need."""
    for kind, (passes, fewest) in banks(machine, number).items():
        twice = number == 5 and kind == "load 2"
        assert passes == (2 if twice else 1) * fewest, f"{kind}: {passes} passes for at least {fewest}"


def test_reads_of_shared_memory_for_a_multiply_add_are_those_that_the_readme_counts(machine):
    """A pass each, so as many as instructions: of a warp, for 32 multiply-adds."""
    products = 128 * 256 * 128 / 32
    loads = {
        number: [p for kind, (p, _) in banks(machine, number).items() if "load" in kind] for number in (3, 4, 5, 6)
    }
    reads = {number: sum(passes) for number, passes in loads.items()}
    assert reads[3] / products == 2 and reads[4] / products == 9 / 8
    assert reads[5] / products == 2 * 16 / 64  # 16 instructions, two passes each
    assert reads[6] / products == 4 * 2 / 64  # 2 instructions, four passes of eight lanes each


@pytest.fixture(scope="module")
def sass():
    """Rung → matrix instructions and what brings their operands, on sm_90."""
    pytest.importorskip("cuda.bindings")
    op = registry.get("matmul")
    rungs = {made.name: made for made in op.implementations.values() if made.rung in (7, 8, *HIGH)}
    only = SimpleNamespace(cases=op.cases, inputs=op.inputs, implementations=rungs)
    return {rungs[name].rung: counts for name, counts in instructions.kernels(only, 90)}


def test_rungs_use_the_instructions_that_they_are_about(sass):
    def beginning(number, name):
        return sum(count for sass_name, count in sass[number].items() if sass_name.startswith(name))

    assert beginning(7, "LDGSTS") and not beginning(7, "HMMA")
    assert sass[8]["HMMA.16816.F32.BF16"] == 4 * 4 * 8 and beginning(8, "LDSM") == 32  # four steps of 16
    assert sass[9]["HGMMA.64x128x16.F32.BF16"] == 4
    for number in HIGH:
        assert beginning(number, "UTMALDG") and not beginning(number, "LDSM") and not beginning(number, "HMMA")
    for number in (10, 11, 12):
        assert sass[number]["HGMMA.64x256x16.F32.BF16"] == 4
        assert bool(beginning(number, "UTMASTG")) == (number >= 11)
        assert bool(beginning(number, "UTMALDG.2D.MULTICAST")) == (number == 12)
    for number in sass:
        assert not beginning(number, "STL") and not beginning(number, "LDL"), f"rung {number} spills registers"


def test_what_an_instruction_becomes_on_an_architecture():
    by_type = {(i.name, i.operands): i for i in instructions.INSTRUCTIONS}
    bf16, fp8, int4 = (by_type["mma.sync", operands] for operands in ("bf16", "e4m3", "s4"))
    found = [instructions.becomes(bf16, "m16n8k16", sm) for sm in (80, 90)]
    assert found == ["HMMA.16816.F32.BF16"] * 2
    assert instructions.becomes(fp8, "m16n8k32", 80) == ""
    assert instructions.becomes(fp8, "m16n8k32", 89).startswith("QMMA.16832")
    assert instructions.becomes(fp8, "m16n8k32", 90) == "2 × HMMA.16816.F32"  # no QMMA on Hopper: converted to fp16
    assert instructions.becomes(int4, "m16n8k64", 90) == "a subroutine"
    wgmma = by_type["wgmma", "bf16"]
    assert instructions.becomes(wgmma, "m64n256k16", 90) == "HGMMA.64x256x16.F32.BF16"
    assert instructions.becomes(wgmma, "m64n256k16", 80) == instructions.becomes(wgmma, "m64n256k16", 120) == ""


def test_the_tables_are_printed(monkeypatch, capsys):
    (bf16,) = (i for i in instructions.INSTRUCTIONS if (i.name, i.operands) == ("mma.sync", "bf16"))
    monkeypatch.setattr(instructions, "INSTRUCTIONS", (bf16,))
    monkeypatch.setattr(instructions, "kernels", lambda op, sm: [(f"{op.name} {sm}", Counter({"HMMA.1688.F32": 2}))])
    monkeypatch.setattr(instructions, "INTERPRETING", True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set"):
        instructions.main([])
    monkeypatch.setattr(instructions, "INTERPRETING", False)
    instructions.main(["vector_add", "sm_80", "sm_90"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| PTX | operands | sums | shape | sm_80 | sm_90 |"
    assert lines[3] == "| `mma.sync` | bf16 | f32 | m16n8k16 | HMMA.16816.F32.BF16 | HMMA.16816.F32.BF16 |"
    assert "| vector_add 90 | 2 × `HMMA.1688.F32` |" in lines
    with pytest.raises(UnknownName, match="did you mean 'sm_90'"):
        instructions.main(["sm_91"])
    with pytest.raises(ValueError, match="2 operators, matmul, linear; expected one at a time"):
        instructions.main(["matmul", "linear"])


def test_a_workload_is_one_that_the_implementation_takes():
    """Hopper's loop declines rows to gather, of which the first workload of grouped_matmul is."""
    pytest.importorskip("cuda.bindings")
    op = registry.get("grouped_matmul")
    only = SimpleNamespace(cases=op.cases, inputs=op.inputs, implementations={"cuda": op.find("cuda")})
    ((name, counts),) = instructions.kernels(only, 90)
    assert name == "cuda" and any(sass.startswith("HGMMA.64x256x16") for sass in counts)


def test_rungs_decline_what_they_leave_out():
    def why(number, m, n, k, sm=90):
        with pytest.raises(Declined) as declined:
            plan_of(number, m, n, k, sm)
        return str(declined.value)

    assert "begin on 16 bytes" in why(6, 16, 16, 12) and "begin on 16 bytes" in why(14, 16, 12, 16)
    assert "terms" in why(8, 16, 16, 2**18 + 8) and "terms" in why(13, 16, 16, 2**18 + 8)
    assert "Hopper" in why(9, 16, 16, 16, 100) and "Hopper" in why(12, 16, 16, 16, 80)
    assert "32 bits" in why(1, 2**31, 8, 8)
    transposed = torch.empty(16, 16, dtype=torch.bfloat16, device="meta").t()
    with pytest.raises(Declined, match="row-major"):
        ladder._plan(1, transposed, transposed)


def test_grids_cover_c_and_persistent_ones_fill_the_machine():
    sms = multiprocessors(torch.device("meta"))
    assert plan_of(10, 8192, 8192, 64).grid == (64 * 32, 1)
    assert plan_of(11, 8192, 8192, 64).grid == (sms, 1)
    assert plan_of(12, 8192, 8192, 64).grid == (sms // 2 * 2, 1) and plan_of(12, 8, 8, 64).grid == (2, 1)
    assert plan_of(12, 8, 8, 64).cluster == 2


def test_an_empty_sum_is_zero():
    a, b = torch.empty(3, 0, dtype=torch.bfloat16), torch.empty(0, 5, dtype=torch.bfloat16)
    for number in ladder.RUNGS:
        assert torch.equal(ladder.rung(number)(a, b), torch.zeros(3, 5, dtype=torch.bfloat16))


def test_each_triple_of_addresses_gets_tensor_maps_of_its_own(monkeypatch):
    launched = []
    monkeypatch.setattr(ladder, "encode", lambda address, rows, columns, box: ctypes.c_uint64(address))
    monkeypatch.setattr(ladder.CudaPlan, "__call__", lambda plan, *tensors: launched.append(plan))
    mapped = ladder.MappedPlan(ladder.CudaPlan(ladder.HOPPER, "k", (1, 1), 256), 128)
    a, b, c = (torch.empty(8, 8, dtype=torch.bfloat16) for _ in range(3))
    for operands in ((a, b, c), (b, a, c), (a, b, c)):
        mapped(*operands)
    addresses = [tuple(s.value for s in plan.scalars[:3]) for plan in launched]
    x, y, z = (t.data_ptr() for t in (a, b, c))
    assert addresses == [(x, y, z), (y, x, z), (x, y, z)] and launched[0] is launched[2]
    assert [s.value for s in launched[0].scalars[3:]] == [8, 8, 8]


def test_a_tensor_map_is_encoded_where_the_driver_wants_it(monkeypatch):
    pytest.importorskip("cuda.bindings")
    asked = []

    def encoded(*arguments):
        names = ("map", "dtype", "rank", "address", "sizes", "strides", "box")
        asked.append(SimpleNamespace(**dict(zip(names, arguments, strict=False))))
        return 0 if len(asked) == 1 else 1

    monkeypatch.setattr(ladder.tensor_maps, "_encode_tiled", lambda: encoded)
    made = ladder.encode(4096, 300, 200, 128)
    (call,) = asked
    assert call.map == ctypes.addressof(made) and call.map % 64 == 0 and ctypes.sizeof(made) == 128
    assert (call.rank, call.address) == (2, 4096)
    assert [list(of) for of in (call.sizes, call.strides, call.box)] == [[200, 300], [400], [64, 128]]
    with pytest.raises(cuda.CudaError, match=r"300 × 200 matrix: CUDA_ERROR_INVALID_VALUE"):
        ladder.encode(4096, 300, 200, 128)


def test_the_ladder_stands_in_the_registry_in_order():
    rungs = [made for made in registry.get("matmul").implementations.values() if made.rung is not None]
    assert [made.rung for made in rungs] == list(range(1, 15)) == list(ladder.RUNGS)
    assert all(made.idea and made.directions == ("forward",) for made in rungs)


def test_the_example_from_scratch_says_plainly_that_there_is_no_gpu(monkeypatch, capsys):
    pytest.importorskip("cuda.bindings")

    def printed(size: str) -> tuple[bool, str]:
        monkeypatch.setattr(sys, "argv", ["gemm_from_scratch.py", size])
        try:
            runpy.run_path(str(ROOT / "examples/gemm_from_scratch.py"), run_name="__main__")
        except SystemExit as exit:
            return False, str(exit.code)
        return True, capsys.readouterr().out

    ran, text = printed("512")
    if DEVICE == "cuda":
        assert ran and "right" in text and "the same result: yes" in text
    else:
        assert not ran and text.startswith("gemm_from_scratch: ")
    assert "expected a multiple of 8" in printed("12")[1]
