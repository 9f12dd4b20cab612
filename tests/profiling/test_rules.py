"""Every rule and table on traces with known answers."""

import pytest
from made_traces import ELEMENTWISE, GEMM, PAGEABLE, PINNED, MadeTrace

from weft.hardware.ceilings import Ceilings

LIMITS = Ceilings("cuda", {(2, 1): 1e12, (1, 1): 1e12}, {"fp32": 50e12, "tf32": 400e12, "bf16": 800e12})


def gain(profile, title: str) -> float | None:
    return next((a.gain_ms for a in profile.advice if title in a.title), None)


def idle(profile) -> dict[str, float]:
    return {i.cause: i.time_us for i in profile.idle}


def test_kernels_belong_to_the_operator_that_launched_them_with_rates_against_the_ceilings():
    t = MadeTrace()
    t.step(1, 0, 1000)
    t.op("aten::linear", 0, 60, [(1024, 512), (256, 512)])
    t.op("aten::mm", 5, 40, [(1024, 512), (512, 256)])
    t.kernel(10, 20, 100)
    t.op("aten::add", 200, 40, [(1024, 256), (1024, 256)])
    t.kernel(205, 220, 50, ELEMENTWISE)
    p = t.profile(LIMITS)
    mm, add = p.rows
    assert (mm.operator, mm.phase, mm.dtype, mm.calls, mm.time_us) == ("aten::mm", "forward", "fp32", 1, 100.0)
    assert mm.flops_per_s == pytest.approx(2 * 1024 * 512 * 256 / 100e-6)
    assert mm.share_of_ceiling == pytest.approx(2 * 1024 * 512 * 256 / 50e12 / 100e-6)
    assert mm.limit_name == "fp32 matrix"
    assert add.kernels == ["at::native::vectorized_elementwise_kernel"]
    assert add.bytes_per_s == pytest.approx(3 * 1024 * 256 * 4 / 50e-6)
    assert add.share_of_ceiling == pytest.approx(3 * 1024 * 256 * 4 / 1e12 / 50e-6)
    assert mm.share + add.share == pytest.approx(1)
    assert p.steps[0].kernels == p.steps[0].launches == p.launches == 2


def test_rates_of_our_operators_forward_and_backward():
    """A backward's work is that of the shapes of its forward call; a cast before it has the same number."""
    big, bf16 = 8 * 1024 * 512, "c10::BFloat16"
    t = MadeTrace()
    for at, (name, dims, number) in enumerate(
        (
            ("NormFunction", [(8, 1024, 512), (512,)], 3),
            ("Map", [(), (8, 1024, 512), (8, 1024, 512)], 4),
            ("Attention", [(), (8, 4, 1024, 128), (8, 2, 1024, 128), (8, 2, 1024, 128)], 5),
        )
    ):
        t.op("aten::to", 300 * at, 1, [(9,)], **{"Sequence number": number})
        t.op(name, 300 * at + 5, 20, dims, bf16, **{"Sequence number": number})
        t.kernel(300 * at + 10, 300 * at + 20, 100)
        t.op(f"{name}Backward", 300 * at + 150, 20, [(8, 1024, 512)], bf16, **{"Sequence number": number})
        t.kernel(300 * at + 155, 300 * at + 165, 100)
    rows = {(r.operator, r.phase): r for r in t.profile(LIMITS).rows}
    moved = {  # of bf16 tensors of that size
        ("NormFunction", "forward"): 2, ("NormFunctionBackward", "backward"): 3,
        ("Map", "forward"): 3, ("MapBackward", "backward"): 5,
    }  # fmt: skip
    for key, tensors in moved.items():
        assert rows[key].bytes_per_s == pytest.approx(tensors * 2 * big / 100e-6, rel=1e-3), key
        assert rows[key].dtype == "bf16"
    scores = 2 * 2 * 8 * 4 * 1024 * 1024 * 128
    assert rows["Attention", "forward"].flops_per_s == pytest.approx(scores / 100e-6)
    assert rows["AttentionBackward", "backward"].flops_per_s == pytest.approx(2.5 * scores / 100e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("name", "heads_first", "at", "value"),
    [
        ("_efficient_attention_forward", False, 9, "1"),
        ("_efficient_attention_backward", False, 14, "1"),
        ("_flash_attention_backward", False, 11, "True"),
        ("_cudnn_attention_forward", True, 10, "True"),
    ],
)
def test_flops_of_pytorchs_attention(name, heads_first, at, value, causal):
    q, k = ((2, 8, 256, 64), (2, 4, 256, 64)) if heads_first else ((2, 256, 8, 64), (2, 256, 4, 64))
    backward = name.endswith("backward")
    concrete = [""] * 20
    concrete[at] = value if causal else "0"
    t = MadeTrace()
    t.op(f"aten::{name}", 0, 20, [*([q] if backward else []), q, k, k], **{"Concrete Inputs": concrete})
    t.kernel(5, 10, 100)
    whole = 2 * 2 * 2 * 8 * 256 * 256 * 64 * (2.5 if backward else 1)
    (row,) = t.profile(LIMITS).rows
    assert row.flops_per_s == pytest.approx((whole / 2 if causal else whole) / 100e-6)


def test_without_launches_the_external_id_leads_to_the_operator():
    t = MadeTrace()
    t.op("aten::mm", 0, 10, [(8, 8), (8, 8)], **{"External id": 41})
    t.span("kernel", GEMM, 20, 5, 7, device=0, stream=7, **{"External id": 41})
    t.span("kernel", "alone<int>(float)", 40, 5, 7, device=0, stream=7)
    p = t.profile()
    assert {r.operator for r in p.rows} == {"aten::mm", "alone"}
    assert idle(p) == {"unknown": 35}  # 20 before the first kernel, since there is no step, and 15 between


def test_phases_and_modules_of_forward_backward_and_optimizer():
    t = MadeTrace()
    t.span("python_function", "nn.Module: Linear_0", 0, 50)
    t.op("aten::addmm", 5, 30, [(4,), (4, 4), (4, 4)], **{"Sequence number": 3})
    t.kernel(10, 20, 10)
    t.op("autograd::engine::evaluate_function: AddmmBackward0", 100, 50, tid=2, **{"Sequence number": 3})
    t.op("aten::mm", 105, 30, [(4, 4), (4, 4)], tid=2)
    t.kernel(110, 120, 10, tid=2)
    t.span("user_annotation", "Optimizer.step#AdamW.step", 200, 50)
    t.op("aten::_foreach_add_", 205, 30)
    t.kernel(210, 220, 10, ELEMENTWISE)
    assert {(r.operator, r.phase, r.module) for r in t.profile().rows} == {
        ("aten::addmm", "forward", "Linear"),
        ("aten::mm", "backward", "Linear"),
        ("aten::_foreach_add_", "optimizer", ""),
    }


def late_launch(t: MadeTrace) -> None:
    t.kernel(0, 10, 10)  # in each of these the window begins with this launch, 10 µs before its kernel
    t.kernel(35, 50, 10)  # idle 30 µs: launched after the GPU ran dry


def queued(t: MadeTrace) -> None:
    t.kernel(0, 10, 20)
    t.kernel(6, 32, 20)  # 2 µs, launched long before


def waited(t: MadeTrace) -> None:
    t.kernel(0, 10, 100)
    t.op("aten::item", 20, 110)
    t.span("cuda_runtime", "cudaStreamSynchronize", 25, 100)
    t.kernel(140, 160, 10)


def loaded(t: MadeTrace) -> None:
    t.kernel(0, 10, 10)
    t.span("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 8, 500)
    t.kernel(520, 540, 10)


def allocated(t: MadeTrace) -> None:
    t.kernel(0, 10, 10)
    t.span("cuda_runtime", "cudaMalloc", 15, 300)
    t.kernel(320, 330, 10)


def computed_on_the_host(t: MadeTrace) -> None:
    t.kernel(0, 10, 10)
    t.op("aten::sort", 15, 800)
    t.kernel(820, 830, 10)


@pytest.mark.parametrize(
    ("made", "cause", "us", "what", "title", "gain_us"),
    [
        (late_launch, "launch", 10 + 30, GEMM, "Launch fewer", 9 + 29),
        (queued, "queued", 2, GEMM, "", None),
        (waited, "synchronisation", 50, "aten::item", "Do not wait", 50),
        (loaded, "data loader", 520, "enumerate(DataLoader)", "Load the next batch", 520),
        (allocated, "allocation", 310, GEMM, "Stop allocating", 310),
        (computed_on_the_host, "host", 810, "aten::sort", "Take work of the host", 810),
    ],
)
def test_the_cause_of_a_gap_and_its_advice(made, cause, us, what, title, gain_us):
    t = MadeTrace()
    made(t)
    p = t.profile()
    found = next(i for i in p.idle if i.cause == cause and i.what[0][0] == what)
    assert found.time_us == us
    if title:
        assert gain(p, title) == pytest.approx(gain_us / 1e3)
    assert p.busy_us + sum(idle(p).values()) == pytest.approx(p.window_us)


@pytest.mark.parametrize(("name", "kind", "expected"), [(PAGEABLE, "pageable", 0.15), (PINNED, "pinned", None)])
def test_a_copy_costs_what_no_kernel_hides(name, kind, expected):
    t = MadeTrace()
    t.step(1, 0, 400)
    t.kernel(0, 10, 100)
    t.copy(20, 60, 200, name)  # 50 µs beside the kernel, 150 alone
    p = t.profile()
    (c,) = p.copies
    assert (c.kind, c.host_memory, c.count, c.bytes, c.time_us, c.exposed_us) == ("HtoD", kind, 1, 1_000_000, 200, 150)
    assert c.bytes_per_s == pytest.approx(5e9)
    assert gain(p, "pinned memory") == (expected and pytest.approx(expected))


@pytest.mark.parametrize(
    ("kernel", "kind", "expected"),
    [
        (GEMM, "float", 0.7 * (1 - 50 / 400)),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32", "float", None),
        (GEMM, "c10::BFloat16", None),
    ],
)
def test_fp32_products_are_told_to_use_tf32(kernel, kind, expected):
    t = MadeTrace()
    t.step(1, 0, 800)
    t.op("aten::mm", 0, 20, [(64, 64), (64, 64)], kind)
    t.kernel(5, 20, 700, kernel)
    assert gain(t.profile(LIMITS), "TF32") == (expected and pytest.approx(expected))


def test_many_small_optimizer_kernels_ask_for_a_fused_one():
    t = MadeTrace()
    t.span("user_annotation", "Optimizer.step#AdamW.step", 0, 900)
    for i in range(30):
        t.kernel(20 * i, 20 * i + 8, 10, ELEMENTWISE)  # 30 kernels of 10 µs, 10 µs between them
    p = t.profile()
    assert gain(p, "fused optimizer") == pytest.approx((8 + 29 * 10 + 30 * 10 / 2) / 1e3)
    assert gain(p, "Fuse elementwise") is None  # the optimizer's are counted once


def test_a_chain_of_elementwise_kernels_takes_as_long_as_its_longest():
    t = MadeTrace()
    t.step(1, 0, 200)
    for i, dur in enumerate((10, 20, 30)):
        t.kernel(2 * i, 10 + 30 * i, dur, ELEMENTWISE)
    t.kernel(8, 110, 20)
    t.kernel(12, 130, 20, ELEMENTWISE)
    t.kernel(14, 150, 20, ELEMENTWISE)  # two are no chain
    assert gain(t.profile(), "Fuse elementwise") == pytest.approx(0.030)


@pytest.mark.parametrize(("classes", "expected"), [(32000, 0.3), (10, None)])
def test_a_loss_over_many_classes_is_worth_fusing(classes, expected):
    t = MadeTrace()
    t.step(1, 0, 1000)
    t.op("aten::_log_softmax", 0, 20, [(128, classes)])
    t.kernel(5, 20, 300, "cunn_SoftMaxForward")
    assert gain(t.profile(), "Fuse the loss") == (expected and pytest.approx(expected))


@pytest.mark.parametrize(("length", "expected"), [(512, 0.3), (16, None)])
def test_scores_that_are_stored_ask_for_fused_attention(length, expected):
    t = MadeTrace()
    t.step(1, 0, 1000)
    t.op("aten::_softmax", 0, 20, [(2, 4, length, length)])
    t.kernel(5, 20, 300, "softmax_warp_forward")
    assert gain(t.profile(), "Fuse attention") == (expected and pytest.approx(expected))


def test_layout_conversions_ask_for_channels_last():
    t = MadeTrace()
    t.kernel(0, 10, 50, "void cudnn::ops::nchwToNhwcKernel<float, float>(cudnn::Tensor)")
    assert gain(t.profile(), "channels-last") == pytest.approx(0.05)


def test_gains_are_a_step_and_ranked():
    t = MadeTrace()
    for i in range(4):
        t.step(i, 1000 * i, 1000)
        t.kernel(1000 * i, 1000 * i + 10, 300)
        t.copy(1000 * i + 20, 1000 * i + 400, 100)
    p = t.profile()
    gains = [a.gain_ms for a in p.advice]
    assert gains == sorted(gains, reverse=True)
    assert gain(p, "pinned") == pytest.approx(0.1)
    assert [s.name for s in p.steps] == [f"ProfilerStep#{i}" for i in range(4)]
    assert all(s.wall_us == 1000 and s.busy_us == pytest.approx(400) and s.copy_us == 100 for s in p.steps)


def test_a_step_that_begins_inside_the_optimizer_is_not_the_optimizers():
    t = MadeTrace()
    t.span("user_annotation", "Optimizer.step#AdamW.step", 0, 100)
    t.step(1, 95, 1000)
    t.op("aten::mm", 200, 20, [(8, 8), (8, 8)])
    t.kernel(205, 220, 10)
    assert [(r.operator, r.phase) for r in t.profile().rows] == [("aten::mm", "forward")]


def test_the_peak_of_memory_and_what_was_alive_at_it():
    t = MadeTrace()
    t.op("aten::mm", 0, 20, [(8, 8), (8, 8)])
    t.op("aten::empty", 5, 5)
    t.memory(6, 4096, 100, 10_096)
    t.op("aten::add", 30, 20, [(8, 8), (8, 8)])
    t.memory(35, 8192, 200, 18_288)
    t.memory(60, -4096, 100, 14_192)
    t.memory(70, 2048, 300, 16_240)
    t.memory(80, 1 << 40, 1, 1 << 40, kind=0)  # the host's memory is another matter
    m = t.profile().memory
    assert (m.device, m.peak, m.peak_at, m.before) == ("cuda:0", 18_288, 35_000, 6_000)
    assert [(o["operator"], o["bytes"], o["count"]) for o in m.top] == [("aten::add", 8192, 1), ("aten::mm", 4096, 1)]


@pytest.mark.parametrize(
    ("backward", "peak_in", "expected"),
    [
        (False, "forward", {"no_grad": 6000, "autocast": 2000}),
        (True, "forward", {"zero_grad": 800, "autocast": 2000, "half the batch": 3000}),
        (True, "backward", {"autocast": 2000, "half the batch": 3000}),
    ],
)
def test_what_would_lower_the_peak(backward, peak_in, expected):
    t = MadeTrace()
    if backward:
        t.op("autograd::engine::evaluate_function: MulBackward0", 0, 10)
        t.op("aten::mul", 1, 8, [(8, 8)])
        t.memory(2, 800, 1, 800)
    t.op("aten::mm", 20, 10, [(8, 8), (8, 8)])
    t.memory(22, 4000, 2, 4800)
    t.op("aten::mm", 40, 10, [(8, 8), (8, 8)], "c10::BFloat16")
    t.memory(42, 2000, 3, 6800)
    if peak_in == "backward":
        t.op("autograd::engine::evaluate_function: MulBackward0", 60, 10)
        t.memory(62, 8, 4, 6808)
    found = {r.what: r.saves for r in t.profile().memory.remedies}
    assert {next(k for k in expected if k in what): saves for what, saves in found.items()} == expected


def test_two_profiles_compared():
    from weft.profiling import comparison

    def made(mm: float, other: str, gap: float):
        t = MadeTrace()
        t.step(1, 0, 1000)
        t.op("aten::mm", 0, 20)
        t.kernel(2, 10, mm)
        t.op(other, 500, 20)
        t.kernel(505, 500 + gap, 50)
        return t.profile()

    found = comparison.compare(made(200, "aten::relu", 20), made(100, "aten::gelu", 20))
    assert {(c.operator, c.verdict, round(c.change_ms, 6)) for c in found.changes} == {
        ("aten::mm", "faster", -0.1),
        ("aten::relu", "gone", -0.05),
        ("aten::gelu", "new", 0.05),
    }
    for before, after, verdict in ((100, 102, "same"), (1, 5, "same"), (1, 7, "slower"), (7, 1, "faster")):
        changes = comparison.compare(made(before, "a", 20), made(after, "a", 20)).changes
        assert {c.operator: c.verdict for c in changes} == {"aten::mm": verdict, "a": "same"}
    with pytest.raises(ValueError, match="no steps"):
        t = MadeTrace()
        t.kernel(0, 10, 5)
        comparison.compare(t.profile(), made(1, "a", 1))
