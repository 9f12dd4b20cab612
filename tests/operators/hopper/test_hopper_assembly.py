"""What the main loop of matrix products on Hopper compiles to: products alone in the inner loop, registers that fit."""

import itertools
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

from hopper_assembly import assembly, check_inner_loop  # noqa: E402
from hopper_on_cpu import operands, plan  # noqa: E402

from weft.operators.hopper import gemm, tile_sizes  # noqa: E402


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_its_inner_loop_is_products_alone(layout):
    made = plan(*operands(layout, 4096, 4096, 4096)).launch
    text = assembly(made.expression)
    assert made.expression.startswith("matmul_hopper<bf16, bf16, 256, 4, 2,")
    check_inner_loop(text, "HGMMA.64x256x16.F32.BF16", (1 if layout[0] == "N" else 2) + (1 if layout[1] == "T" else 2))
    assert "UTMALDG.3D.MULTICAST" in text and "UTMASTG.3D" in text


@pytest.mark.parametrize(
    "types, instruction",
    [("fp16, fp16", "HGMMA.64x256x16.F32"), ("bf16, bf16", "HGMMA.64x192x16.F32.BF16"),
     ("float, float", "HGMMA.64x256x8.F32.TF32"),
     ("e4m3, bf16", "QGMMA.64x256x32.F32.E4M3.E4M3"), ("s8, bf16", "IGMMA.64x256x32.S8.S8")],
)  # fmt: skip
def test_every_type_takes_its_instruction(types, instruction):
    columns, stages = (192, 5) if "x192x" in instruction else (256, 4)
    text = assembly(f"matmul_hopper<{types}, {columns}, {stages}, 2, false, false, SCALED, false, true, GELU>")
    check_inner_loop(text, instruction, 2)


@pytest.mark.parametrize(
    "shape, layout",
    [
        *itertools.product(("256, 4, 2", "192, 5, 2", "128, 6, 2", "64, 8, 1"), ("false, false", "true, true")),
        ("160, 5, 2", "false, false"),
    ],
)
def test_streaming_does_not_disturb_it(shape, layout):
    text = assembly(
        f"matmul_hopper<bf16, bf16, {shape}, {layout}, UNSCALED, false, false, NONE, false, false, false, true>"
    )
    check_inner_loop(text, f"HGMMA.64x{shape.split(',')[0]}x16.F32.BF16", 1, streamed=True)
    assert "LDG.E.STRONG.GPU" in text and text.count("STG.E.128") == int(shape.split(",")[0]) // 8


@pytest.mark.parametrize("parts", ["true, false, false", "false, true, false", "true, true, true"])
def test_no_part_of_the_way_out_disturbs_it(parts):
    text = assembly(f"matmul_hopper<bf16, bf16, 256, 4, 2, false, false, SCALED, false, true, SILU, {parts}>")
    check_inner_loop(text, "HGMMA.64x256x16.F32.BF16", 2)


@pytest.mark.parametrize("shape, gate", [("256, 4, 2", False), ("256, 4, 2", True), ("128, 6, 2", False)])
def test_codes_disturb_it_no_more(shape, gate):
    text = assembly(
        f"matmul_hopper<bf16, e4m3, {shape}, false, false, UNSCALED, false, true, GELU, false, {str(gate).lower()}, true, "
        "false, false, false, bf16>"
    )
    check_inner_loop(text, f"HGMMA.64x{shape.split(',')[0]}x16.F32.BF16", 2)
    assert "STL" not in text and text.count("STS.U16") == int(shape.split(",")[0]) // (8 if gate else 4)


@pytest.mark.parametrize("activation, most", [("RELU", 3), ("SILU_FAST", 6), ("GELU_TANH", 8), ("GELU", 15)])
def test_activations_take_few_instructions(activation, most):
    """Of 16-bit results, beyond what storing takes; a thread has 128."""
    lines = [
        len(assembly(f"matmul_hopper<bf16, bf16, 256, 4, 2, false, false, UNSCALED, false, true, {act}>").split(";"))
        for act in ("NONE", activation)
    ]
    assert lines[1] - lines[0] <= most * 128


def test_registers_of_all_warpgroups_fit():
    """What the producer gives back is what the consumers take."""
    text = gemm.SOURCE.read_text()
    less, more = (int(re.search(rf"setmaxnreg\.{word}\.sync\.aligned\.u32 (\d+)", text)[1]) for word in ("dec", "inc"))
    assert less % 8 == more % 8 == 0
    at_first = 65536 // tile_sizes.THREADS // 8 * 8
    assert less + 2 * more <= 3 * at_first


@pytest.mark.parametrize("scales", ["SCALED", "SCALED_BY_BLOCK"])
@pytest.mark.parametrize("columns, stages", [(256, 4), (192, 5), (128, 6)])
def test_two_levels_of_sums_stay_in_registers(scales, columns, stages):
    text = assembly(f"matmul_hopper<e4m3, bf16, {columns}, {stages}, 2, false, false, {scales}, true, false, NONE>")
    assert f"QGMMA.64x{64 if columns == 192 else 128}x32.F32.E4M3" in text
