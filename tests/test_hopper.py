"""The main loop of matrix products on Hopper, as far as it can be looked at without one: what it compiles to, its layouts."""

import re
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

from weft.definition import Declined  # noqa: E402
from weft.operators.configs import bucket  # noqa: E402
from weft.operators.cuda import compile_cubin  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.matmul import hopper  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def operands(layout: str, m: int, n: int, k: int, dtype=torch.bfloat16):
    a = torch.empty((m, k) if layout[0] == "N" else (k, m), dtype=dtype, device="meta")
    b = torch.empty((k, n) if layout[1] == "N" else (n, k), dtype=dtype, device="meta")
    return a if layout[0] == "N" else a.t(), b if layout[1] == "N" else b.t()


def plan(a, b) -> hopper.HopperPlan:
    with compiling_for(90, lambda *kernel: None):
        return hopper.HopperPlan(a, b)


def assembly(expression: str, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(compile_cubin(hopper.SOURCE, expression, 90)[0])
    return subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_it_multiplies_by_wgmma_fed_by_tma_and_spills_nothing(layout, tmp_path):
    text = assembly(plan(*operands(layout, 4096, 4096, 4096)).launch.expression, tmp_path)
    assert "HGMMA.64x256x16.F32.BF16" in text
    assert "UTMALDG" in text and "MULTICAST" in text and "UTMASTG" in text
    assert not re.search(r"\b(STL|LDL)\b", text)


@pytest.mark.parametrize(
    "types, instruction",
    [("fp16, fp16", "HGMMA.64x128x16.F32"), ("float, float", "HGMMA.64x128x8.F32.TF32"),
     ("e4m3, bf16", "QGMMA.64x128x32.F32.E4M3"), ("s8, bf16", "IGMMA.64x128x32.S8")],
)  # fmt: skip
def test_every_type_takes_its_instruction(types, instruction, tmp_path):
    text = assembly(f"matmul_hopper<{types}, 128, 6, 1, false, false, true, true, SILU>", tmp_path)
    assert instruction in text
    assert not re.search(r"\b(STL|LDL)\b", text)


@pytest.mark.parametrize("m, n, k", [(1, 8, 8), (100, 24, 8), (130, 256, 72), (4096, 4096, 4096), (16384, 28672, 8192)])
def test_what_a_launch_asks_for_fits(m, n, k):
    a, b = operands("NN", m, n, k)
    for config in (*hopper.candidates(90, a.dtype, "NN", bucket(m), bucket(n), bucket(k)), None):
        hopper.configuration.trial = config
        try:
            made = plan(a, b)
        finally:
            hopper.configuration.trial = None
        assert made.launch.shared_bytes <= hopper.SHARED
        assert made.launch.grid[0] % made.launch.cluster == 0 and made.launch.grid[0] >= made.launch.cluster
        for of in made.maps:
            assert max(of.box) <= 256 and of.box[0] * 2 <= hopper.LINE
            assert all(step > 0 and step % 16 == 0 for step in of.steps)


@pytest.mark.parametrize(
    "a, b, words",
    [
        (torch.empty(64, 60), torch.empty(60, 64), "dtype"),
        (torch.empty(64, 60, dtype=torch.bfloat16), torch.empty(60, 64, dtype=torch.bfloat16), "begin on 16 bytes"),
        (torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, 60, dtype=torch.bfloat16), "begin on 16 bytes"),
        (torch.empty(64, 128, dtype=torch.bfloat16)[:, ::2], torch.empty(64, 64, dtype=torch.bfloat16), "contiguous"),
        (torch.empty(1, 64, dtype=torch.bfloat16).expand(64, 64), torch.empty(64, 64, dtype=torch.bfloat16), "strides"),
        (torch.empty(4097, dtype=torch.bfloat16)[1:].view(64, 64), torch.empty(64, 64, dtype=torch.bfloat16), "16 bytes"),
    ],
)  # fmt: skip
def test_what_tma_cannot_take_is_declined_in_words(a, b, words):
    with pytest.raises(Declined, match=words):
        plan(a, b)
