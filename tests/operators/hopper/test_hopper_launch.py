"""What a launch of Hopper's main loop asks for: shared memory, tensor maps of its own addresses, flags of its stream; which
products are streamed, and what is declined; what it compiles to: products alone in the inner loop, registers that fit."""

import itertools
import re

import pytest
import torch
from hopper_on_cpu import BF16, INT8, OnGpu, operands, plan
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import assembly, check_inner_loop

from weft.definition import Declined
from weft.operators.hopper import gemm, padded, tensor_maps, tile_sizes
from weft.operators.launch import compiling_for


@pytest.mark.parametrize("m, n, k", [(1, 8, 8), (100, 24, 8), (130, 256, 72), (4096, 4096, 4096), (16384, 28672, 8192)])
def test_what_a_launch_asks_for_fits(m, n, k):
    a, b = operands("NN", m, n, k)
    keys = [(90, "16-bit", layout, False, 4, m, n, k, 1) for layout in ("NN", "NNG")]
    for gated, config in [(g, c) for g in (False, True) for c in (*tile_sizes.candidates(*keys[g]), None)]:
        tile_sizes.configuration.trial = config
        try:
            with compiling_for(90, lambda *kernel: None):
                made = gemm.HopperPlan(a, b, torch.float32, up=b if gated else None)
        finally:
            tile_sizes.configuration.trial = None
        assert made.launch.shared_bytes <= tile_sizes.SHARED
        assert made.launch.grid[0] % made.launch.cluster == 0 and made.launch.grid[0] >= made.launch.cluster
        for of in made.maps:
            assert max(of.box) <= 256 and of.box[0] * 2 <= tile_sizes.LINE
            assert all(step > 0 and step % 16 == 0 for step in of.steps)


def test_each_set_of_addresses_gets_maps_of_its_own(launched):
    a, b, up, c, r = (torch.empty(64, 64, dtype=BF16).as_subclass(OnGpu) for _ in range(5))
    bias, amax = torch.empty(128, dtype=BF16), torch.zeros(1)
    made = gemm.HopperPlan(a, b, None, gemm.Epilogue(biased=True, activation="SILU", amax=True), residual=r, up=up)
    assert made.launch.expression.endswith("false, true, SILU, true, true, true, false>")
    for beta in (1.0, 2.0, 1.0):
        made(a, b, c, bias=bias, residual=r, up=up, amax=amax, beta=beta)
    plain = gemm.HopperPlan(a, b)
    plain(a, b, c)
    addresses = [[m.opaque[0] for m in plan.scalars[:5]] for plan, _ in launched]
    assert addresses[0] == [t.data_ptr() for t in (a, b, up, r, c)]
    assert addresses[3] == [t.data_ptr() for t in (a, b, b, c, c)]
    assert launched[0][0] is launched[2][0] and launched[1][0].scalars[6].beta == 2.0
    assert [t.data_ptr() for t in launched[0][1]] == [t.data_ptr() for t in (c, c, bias, amax, c, c, c, c)]
    plain(a[:0], b, c[:0])  # nothing to map
    assert launched[4][0] is plain.launch


def test_launches_share_flags_of_their_stream_alone(monkeypatch, launched):
    state = {"stream": 1, "capturing": False}
    monkeypatch.setattr(gemm, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(gemm, "_flags", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state["stream"], raising=False)
    config = {"COLUMNS": 64, "STAGES": 8, "CLUSTER": 1, "GROUP": 4, "STREAM": 1}
    monkeypatch.setattr(tile_sizes.configuration, "trial", config)
    a, b, c = (torch.empty(shape, dtype=BF16).as_subclass(OnGpu) for shape in ((128, 1024), (1024, 64), (128, 64)))
    made = gemm.HopperPlan(a, b)
    assert made.launch.grid[0] == 2 and made.launch.expression.endswith("true>"), "shares of 8 stages"
    for stream, capturing in ((1, False), (1, False), (2, False), (2, True), (2, True)):
        state.update(stream=stream, capturing=capturing)
        made(a, b, c)
    given = [tensors[4:6] for _, tensors in launched]
    flags = [f.data_ptr() for _, f in given]
    assert flags[0] == flags[1] and len(set(flags)) == 4
    assert all(w.numel() == 2 * 2 * 64 * 64 and f.numel() >= 4 and not f.any() for w, f in given)


@pytest.mark.parametrize(
    "m, n, k, stream",
    [
        (512, 11264, 8192, 1),
        (512, 6144, 4096, 0),
        (4096, 4096, 4096, 0),
        (8192, 8192, 8192, 0),
        (512, 256, 512, 0),
        (512, 264, 16392, 1),
    ],
)
def test_streaming_is_chosen_where_a_wave_is_left_over(m, n, k, stream):
    assert tile_sizes.heuristic(90, "16-bit", "NT", False, 2, m, n, k, 1)["STREAM"] == stream


@pytest.mark.parametrize("layout, m, n, k, columns", [
    ("NN", 4104, 4104, 4104, 256), ("NN", 2056, 3080, 4096, 256), ("NN", 5176, 1920, 2744, 256), ("TN", 4816, 1376, 5680, 256),
    ("NT", 6008, 3000, 5000, 256), ("NN", 6008, 3008, 5008, 192), ("NT", 2311, 4873, 3329, 192), ("NN", 1025, 1027, 1029, 128),
])  # fmt: skip
def test_rows_that_do_not_begin_on_lines_want_wide_tiles(layout, m, n, k, columns):
    """The fastest that were measured on an H200; none was streamed."""
    made = tile_sizes.heuristic(90, "16-bit", layout, False, 2, m, n, k, 1)
    assert (made["COLUMNS"], made["STREAM"]) == (columns, 0)


def test_lines_that_rows_lie_in():
    assert [tile_sizes.lines(row) for row in (256, 192, 160, 144, 130)] == [1, 1.5, 1.75, 1.875, 2 - 2 / 128]


def test_a_copy_on_lines_takes_the_tile_of_such_rows():
    """Whatever its sizes are."""
    a, b = operands("NN", 6007, 3001, 5003)
    wanted = plan(*operands("NN", 6016, 3008, 5056)).launch.expression
    assert not gemm.on_lines(a, b)
    with compiling_for(90, lambda *kernel: None):
        made = padded.LoopPlan(a, b).launch.launch.expression
    assert made.split(", ")[2:5] == wanted.split(", ")[2:5]


@pytest.mark.parametrize("columns, named", [(4096, "256B"), (4104, "128B")])
def test_what_l2_fetches_at_a_time(monkeypatch, columns, named):
    seen = []
    monkeypatch.setattr(tensor_maps, "_encode_tiled", lambda: lambda *given: seen.append(given[-2]) or 0)
    gemm.Maps(torch.empty(64, columns, dtype=BF16), False, (64, 64))(torch.empty(64, columns, dtype=BF16))
    kinds = tensor_maps.driver().CUtensorMapL2promotion
    assert seen == [int(getattr(kinds, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{named}"))]


def test_160_columns_are_chosen_where_they_fill_two_waves_and_can_be():
    at = (False, 2, 512, 10240, 8192, 1)
    assert tile_sizes.heuristic(90, "16-bit", "NT", *at)["COLUMNS"] == 160
    assert all(tile_sizes.heuristic(90, "16-bit", layout, *at)["COLUMNS"] != 160 for layout in ("NN", "NTG"))
    assert not {160, 192} & set(tile_sizes.widths("NT", 1, True)), "slabs of codes have 128"


def of(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype)


A, B = operands("NT", 64, 64, 64)
CODES = torch.empty(64, 64, dtype=INT8, device="meta")
REFUSED = [
    bad(gemm.HopperPlan, Declined, "unlike b", A, B, up=operands("NN", 64, 64, 64)[1]),
    bad(gemm.HopperPlan, Declined, "a residual", A, B, residual=of(64, 72).to("meta")),
    bad(gemm.HopperPlan, Declined, "'residual' has no contiguous", A, B, residual=of(64, 128).to("meta")[:, ::2]),
    bad(gemm.HopperPlan, Declined, "int32 from int8", A, B, out_dtype=torch.int32),
    bad(gemm.HopperPlan, Declined, "sums alone", CODES, CODES.t(), torch.int32, gemm.Epilogue(biased=True)),
    bad(plan, Declined, "dtypes", of(64, 60, dtype=torch.int64), of(60, 64, dtype=torch.int64)),
    bad(
        plan, Declined, "not the contiguous dimension", of(64, 64, dtype=torch.float32), of(64, 64, dtype=torch.float32)
    ),
    bad(plan, Declined, "begin on 16 bytes", of(64, 60), of(60, 64)),
    bad(plan, Declined, "begin on 16 bytes", of(64, 64), of(64, 60)),
    bad(plan, Declined, "contiguous", of(64, 128)[:, ::2], of(64, 64)),
    bad(plan, Declined, "strides", of(1, 64).expand(64, 64), of(64, 64)),
    bad(plan, Declined, "16 bytes", of(4097)[1:].view(64, 64), of(64, 64)),
]


@pytest.mark.share(4)
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_its_inner_loop_is_products_alone(layout):
    made = plan(*operands(layout, 4096, 4096, 4096)).launch
    text = assembly(made.expression)
    assert made.expression.startswith("matmul_hopper<bf16, bf16, 256, 4, 2,")
    check_inner_loop(text, "HGMMA.64x256x16.F32.BF16", (1 if layout[0] == "N" else 2) + (1 if layout[1] == "T" else 2))
    assert "UTMALDG.3D.MULTICAST" in text and "UTMASTG.3D" in text


@pytest.mark.share(3)
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


@pytest.mark.share(9)
@pytest.mark.parametrize("shape, layout", [
    *itertools.product(("256, 4, 2", "192, 5, 2", "128, 6, 2", "64, 8, 1"), ("false, false", "true, true")),
    ("160, 5, 2", "false, false"),
])  # fmt: skip
def test_streaming_does_not_disturb_it(shape, layout):
    options = "UNSCALED, false, false, NONE, false, false, false, true"
    text = assembly(f"matmul_hopper<bf16, bf16, {shape}, {layout}, {options}>")
    check_inner_loop(text, f"HGMMA.64x{shape.split(',')[0]}x16.F32.BF16", 1, streamed=True)
    assert "LDG.E.STRONG.GPU" in text and text.count("STG.E.128") == int(shape.split(",")[0]) // 8


@pytest.mark.share(3)
@pytest.mark.parametrize("parts", ["true, false, false", "false, true, false", "true, true, true"])
def test_no_part_of_the_way_out_disturbs_it(parts):
    text = assembly(f"matmul_hopper<bf16, bf16, 256, 4, 2, false, false, SCALED, false, true, SILU, {parts}>")
    check_inner_loop(text, "HGMMA.64x256x16.F32.BF16", 2)


@pytest.mark.share(3)
@pytest.mark.parametrize("shape, gate", [("256, 4, 2", False), ("256, 4, 2", True), ("128, 6, 2", False)])
def test_codes_disturb_it_no_more(shape, gate):
    text = assembly(
        f"matmul_hopper<bf16, e4m3, {shape}, false, false, UNSCALED, false, true, GELU, false, {str(gate).lower()}, true, "
        "false, false, false, bf16>"
    )
    check_inner_loop(text, f"HGMMA.64x{shape.split(',')[0]}x16.F32.BF16", 2)
    assert "STL" not in text and text.count("STS.U16") == int(shape.split(",")[0]) // (8 if gate else 4)


@pytest.mark.share(4)
@pytest.mark.parametrize("activation, most", [("RELU", 3), ("SILU_FAST", 6), ("GELU_TANH", 8), ("GELU", 15)])
def test_activations_take_few_instructions(activation, most):
    """Of 16-bit results, beyond what storing takes; a thread has 128."""
    call = "matmul_hopper<bf16, bf16, 256, 4, 2, false, false, UNSCALED, false, true, {}>"
    lines = [len(assembly(call.format(act)).split(";")) for act in ("NONE", activation)]
    assert lines[1] - lines[0] <= most * 128


def test_registers_of_all_warpgroups_fit():
    """What the producer gives back is what the consumers take."""
    text = gemm.SOURCE.read_text()
    less, more = (int(re.search(rf"setmaxnreg\.{word}\.sync\.aligned\.u32 (\d+)", text)[1]) for word in ("dec", "inc"))
    assert less % 8 == more % 8 == 0
    at_first = 65536 // tile_sizes.THREADS // 8 * 8
    assert less + 2 * more <= 3 * at_first


@pytest.mark.share(3)
@pytest.mark.parametrize("scales", ["SCALED", "SCALED_BY_BLOCK"])
@pytest.mark.parametrize("columns, stages", [(256, 4), (192, 5), (128, 6)])
def test_two_levels_of_sums_stay_in_registers(scales, columns, stages):
    text = assembly(f"matmul_hopper<e4m3, bf16, {columns}, {stages}, 2, false, false, {scales}, true, false, NONE>")
    assert f"QGMMA.64x{64 if columns == 192 else 128}x32.F32.E4M3" in text
