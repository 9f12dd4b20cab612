"""All-reduces over symmetric memory. Two ranks of one process, each on its stream of one GPU, write into each other's buffers
as two GPUs would; without a GPU the kernels are compiled and what they refuse is checked."""

import pytest
import torch

from weft.comm.symmetric import expert_launches
from weft.comm.symmetric.expert_launches import ExpertLaunches, Form
from weft.comm.symmetric.launches import ALGORITHMS, FLAGS_END, SOURCE, Launches, buffer_bytes
from weft.operators.cuda import CTYPES, compile_cubin

MOST, FLAGGED = 1 << 20, 1 << 18


def two_ranks(size, made):
    """A call of both ranks' launches, ``made(buffer, bases, rank)``: ``pair(lambda launches, rank: …)``."""
    buffers = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    bases = [b.data_ptr() for b in buffers]
    launches = [made(b, bases, r) for r, b in enumerate(buffers)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def pair(call):
        torch.cuda.synchronize()
        for r in range(2):
            with torch.cuda.stream(streams[r]):
                call(launches[r], r)
        torch.cuda.synchronize()

    return pair


@pytest.fixture
def ranks():
    return two_ranks(buffer_bytes(2, MOST, FLAGGED), lambda buffer, bases, r: Launches(buffer, bases, r, MOST, FLAGGED))


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", CTYPES)
def test_sums_on_two_ranks(ranks, algorithm, dtype):
    """Sizes up and down, so that buffers hold other calls' data; the same bits on both ranks."""
    for n in (4096, 8, 64 * 1024, 1000, 24, 40_000, 4096):
        n -= n % 32
        inputs = [torch.randn(max(n, 32), device="cuda").to(dtype) for _ in range(2)]
        outs = [torch.full_like(x, float("nan")) for x in inputs]
        if any(x.numel() * x.element_size() > FLAGGED for x in inputs) and algorithm == "one_shot_flagged":
            continue
        expected = (inputs[0].double() + inputs[1].double()).to(dtype)
        for blocks in (0, 16):
            ranks(lambda launches, r: launches(algorithm, inputs[r], outs[r], blocks))  # noqa: B023
            assert torch.equal(outs[0], outs[1])
            torch.testing.assert_close(outs[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("flagged", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (7, 8192), (3, 2056), (2, 16384)])
def test_add_rms_norm_on_two_ranks(ranks, rows, width, flagged):
    g = torch.Generator("cuda").manual_seed(rows)
    make = lambda *shape: torch.randn(*shape, generator=g, device="cuda").bfloat16()  # noqa: E731
    x, residual, weight = [make(rows, width), make(rows, width)], make(rows, width), make(width)
    outs, hidden = ([torch.empty_like(residual) for _ in range(2)] for _ in range(2))
    for _ in range(3):
        ranks(lambda launches, r: launches.add_rms_norm(x[r], residual, weight, 1e-6, outs[r], hidden[r], flagged))
    expected = (x[0].double() + x[1].double() + residual.double()).bfloat16()
    assert torch.equal(hidden[0], hidden[1]) and torch.equal(outs[0], outs[1])
    torch.testing.assert_close(hidden[0], expected)
    h = hidden[0].double()
    norm = h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    torch.testing.assert_close(outs[0].double(), norm, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_graphs_replay(ranks):
    """The call's number is on the device: a replayed graph is a new call each time."""
    x = [torch.ones(4096, device="cuda") * (r + 1) for r in range(2)]
    outs = [torch.zeros_like(t) for t in x]
    graphs = {}

    def capture(launches, r):
        launches("one_shot", x[r], outs[r])  # compiles, and brings both ranks together

    ranks(capture)

    def record(launches, r):
        graphs[r] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[r]):
            for algorithm in ALGORITHMS:
                launches(algorithm, x[r], outs[r])

    ranks(record)
    for k in range(1, 5):
        for r in range(2):
            x[r].fill_(k * (r + 1))
        ranks(lambda launches, r: graphs[r].replay())
        assert torch.equal(outs[0], torch.full_like(outs[0], 3.0 * k)) and torch.equal(outs[0], outs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CTYPES)
@pytest.mark.parametrize(("tokens", "width", "k", "experts"), [(5, 64, 2, 4), (300, 2056, 8, 16)])
def test_experts_on_two_ranks(dtype, tokens, width, k, experts):
    """Other token counts on each rank and in each call; expert e multiplies by e + 1, exactly by integers."""
    form = Form(2, tokens, width, k, experts, dtype)
    pair = two_ranks(form.offsets[-1], lambda buffer, bases, r: ExpertLaunches(form, buffer, bases, r))
    g = torch.Generator("cuda").manual_seed(0)
    for counts in ((tokens, tokens), (tokens // 2, 0), (1, tokens)):
        x = [torch.randint(-2, 3, (t, width), generator=g, device="cuda").to(dtype) for t in counts]
        chosen = [torch.rand((t, experts), generator=g, device="cuda").topk(k).indices.int() for t in counts]
        for c in chosen:
            c[::3, 0] = -1
        weights = [torch.randint(0, 2, c.shape, generator=g, device="cuda").float() for c in chosen]
        outs = [torch.full_like(t, float("nan")) for t in x]
        made = {}

        def dispatch(launches, r):
            launches.dispatch(x[r], chosen[r], weights[r])  # noqa: B023

        def expert(launches, r):
            filled = launches.experts >= 0
            factor = torch.where(filled, launches.weights * (launches.experts + 1 + r * form.each), 0.0).sum(1)
            y = launches.rows.float() * factor[:, None]
            y[~filled.any(1)] = float("nan")  # what holds nothing is not read
            made[r] = y.to(dtype)  # noqa: B023

        def combine(launches, r):
            launches.combine(made[r], chosen[r], outs[r])  # noqa: B023

        for step in (dispatch, expert, combine):
            pair(step)
        for r in range(2):
            assert torch.equal(outs[r], (x[r].float() * (weights[r] * (chosen[r] + 1)).sum(1, keepdim=True)).to(dtype))


def test_forms_of_exchanges_that_are_refused():
    good = {"ranks": 2, "tokens": 4, "width": 64, "k": 2, "experts": 8, "dtype": torch.bfloat16}
    assert Form(**good).offsets[-1] == FLAGS_END + 2 * 64 + 2 * 8 * 128
    for change, message in (
        ({"ranks": 9}, "expected 2 to 8"),
        ({"dtype": torch.int8}, "fp32, fp16 or bf16"),
        ({"tokens": 0}, "tokens is 0"),
        ({"k": 9}, "k 9 of 8 experts"),
        ({"experts": 9}, "a multiple of 2 ranks"),
        ({"width": 65}, "130 bytes; expected a multiple of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            Form(**(good | change))


def launches(n=2):
    buffer = torch.zeros(buffer_bytes(n, MOST, FLAGGED), dtype=torch.uint8)
    return Launches(buffer, [buffer.data_ptr()] * n, 0, MOST, FLAGGED)


def test_what_is_refused():
    take = launches(3)
    assert "fp32, fp16 or bf16" in take.refused("one_shot", torch.zeros(16, dtype=torch.int32))
    assert "16 bytes" in take.refused("one_shot", torch.zeros(7))
    assert "16 bytes" in take.refused("one_shot", torch.zeros(64)[1:-3])
    assert "contiguous" in take.refused("one_shot", torch.zeros(64, 2)[:, 0])
    assert "takes up to 262,144" in take.refused("one_shot_flagged", torch.zeros(1 << 17))
    assert "3 parts" in take.refused("two_shot", torch.zeros(16)) and take.refused("two_shot", torch.zeros(12)) == ""
    assert "a row of 20 bytes" in take.rows_refused(torch.zeros(2, 5), True)
    assert (
        "300 rows" in take.rows_refused(torch.zeros(300, 4), False)
        and take.rows_refused(torch.zeros(300, 4), True) == ""
    )
    with pytest.raises(ValueError, match=r"two_shot: .* 3 parts"):
        take("two_shot", torch.zeros(16), torch.zeros(16))
    with pytest.raises(ValueError, match="expected 2 to 8"):
        launches(9)


def test_buffers_hold_what_calls_write():
    """The last byte that any rank of a full call writes is inside, and 16-byte accesses are aligned."""
    for n in (2, 3, 8):
        at = launches(n)._layout
        assert at.flagged == FLAGS_END and at.flagged % 16 == at.data % 16 == 0
        assert at.flagged + 2 * n * 2 * FLAGGED == at.data
        assert at.data + 2 * n * MOST == buffer_bytes(n, MOST, FLAGGED)


@pytest.mark.parametrize("sm", [80, 90])
def test_kernels_compile(sm):
    for kernel in (*(f"{a}<bf16, 2>" for a in ALGORITHMS), "two_shot<float, 8>", "add_rms_norm<fp16, 4, 2, true>"):
        assert compile_cubin(SOURCE, kernel, sm)[0]
    for kernel in ("dispatch<2>", "combine<float, 8>", "combine<fp16, 2>"):
        assert compile_cubin(expert_launches.SOURCE, kernel, sm)[0]
