"""Quantisation where what is asked of every operator does not reach: every code of every format, what is documented of odd
numbers, unbiased stochastic rounding, and what schemes lose."""

import functools
import math

import pytest
import torch
import triton
import triton.language as tl
from refused import EITHER, bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE

from weft import ops
from weft.operators.quantization import dispatch, formats
from weft.operators.quantization.dequantize import round_trip_error
from weft.operators.quantization.formats import FORMATS, GRANULARITIES, packed, rounded, unpacked
from weft.operators.quantization.kernels import divided

pytestmark = pytest.mark.device

FP8 = ("fp8_e4m3", "fp8_e5m2")


def x(*rows, dtype=torch.float32):
    return torch.tensor(rows, device=DEVICE, dtype=dtype)


def bits(values):
    return values.contiguous().view(torch.uint8)


def around_every_code(format):
    """Every value of the format and every middle of two, and the fp32 numbers next to these; beyond the largest, too."""
    made = FORMATS[format]
    if made.mantissa:
        codes = torch.arange(256, dtype=torch.uint8).view(made.dtype).float()
        codes = codes[codes.isfinite()]
    else:
        codes = torch.arange(-made.largest, made.largest + 1)
    codes = codes.unique()
    points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, codes * 1.001, x(1e-30, -1e-42, 1e30, -3e38).cpu()])
    word = points.view(torch.int32)
    return torch.cat([points, *((word + step).view(torch.float32) for step in (-2, -1, 1, 2))]).to(DEVICE)


@pytest.mark.parametrize("format", FORMATS)
def test_every_tie_and_its_neighbours_round_as_pytorch_casts(format):
    made, points = FORMATS[format], around_every_code(format)
    points = torch.cat([points[points.isfinite()], x(math.inf, -math.inf, math.nan)])
    points = points[: points.numel() // 16 * 16].view(16, -1)
    values, scale = ops.quantize(points, format, "tensor", scale=1.0)
    assert float(scale) == 1.0
    bounded = points.clamp(-made.largest, made.largest)
    if made.mantissa:
        want = bounded.to(made.dtype)
        assert bits(values).equal(bits(want)) or bool((values.float() == want.float()).logical_or(points.isnan()).all())
        return
    want = bounded.nan_to_num(0.0).round().to(torch.int8)
    got = unpacked(values, points.shape[1]) if format == "int4" else values
    assert got.equal(want)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FP8)
def test_the_hardware_rounds_every_bfloat16_and_many_floats_as_pytorch_casts(format):
    made = FORMATS[format]
    g = torch.Generator("cuda").manual_seed(1)
    every = torch.arange(2**16, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    some = torch.randint(-(2**31), 2**31, (4096, 4096), generator=g, device="cuda", dtype=torch.int64)
    for points in (every, some.to(torch.int32).view(torch.float32)):
        values, _ = ops.quantize(points, format, "tensor", scale=1.0)
        want = points.float().clamp(-made.largest, made.largest).to(made.dtype)
        assert bool(((values.float() == want.float()) | points.isnan() & values.float().isnan()).all())


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_is_dequantised_exactly(format):
    made = FORMATS[format]
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 128)
    out = ops.dequantize(codes.view(made.dtype), 1.0, "tensor")
    want = unpacked(codes, 256).float() if format == "int4" else codes.view(made.dtype).float()
    assert bool(((out == want) | out.isnan() & want.isnan()).all())


def test_int4_has_the_even_column_in_the_lower_half():
    values, scale = ops.quantize(x([7.0, -1.0, 3.0]), "int4")
    assert scale.item() == 1.0 and values.tolist() == [[0xF7, 0x03]]
    assert ops.dequantize(values, scale, columns=3).tolist() == [[7.0, -1.0, 3.0]]
    q = torch.randint(-8, 8, (3, 17), dtype=torch.int8)
    assert unpacked(packed(q), 17).equal(q)


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_is_unbiased(format):
    """Of numbers all over the format, small ones too: the mean of n draws is within 5 standard deviations of the number."""
    made, n = FORMATS[format], 1024
    least = 2.0 ** -(made.bias + made.mantissa) if made.mantissa else 0.25
    points = torch.logspace(math.log2(least), math.log2(made.largest), 24, base=2.0, device=DEVICE)
    points = torch.cat([points, -points[::5], x(0.3, made.largest)])
    numbers = points[:, None].expand(-1, n).contiguous()
    values, scale = ops.quantize(numbers, format, "tensor", scale=1.0, rounding="stochastic", seed=11)
    drawn = ops.dequantize(values, scale, "tensor").double()
    neighbours = drawn.amin(1), drawn.amax(1)
    step = (neighbours[1] - neighbours[0]).clamp_min(1e-30)
    assert bool((neighbours[0] <= points).logical_and(points <= neighbours[1]).all() or (step < 1e-29).any())
    spread = drawn.std(1) / n**0.5 + step * 2.0**-17 + points.abs().double() * 1e-6
    share = (drawn.mean(1) - points.double()).abs() / spread
    undrawn = step < 1e-29  # every draw the same: the number is a value of the format
    assert bool((share[~undrawn] < 5).all()), share
    off = (drawn[undrawn, 0] - points[undrawn]).abs()
    assert not undrawn.any() or bool(off.max() <= points.abs().max() * 1e-6)
    assert int((~undrawn).sum()) > 15


def test_stochastic_rounding_depends_on_seed_offset_and_place_alone():
    wide = torch.randn(6, 90, device=DEVICE)

    def of(t=wide[:, :80], seed=3, offset=0, **options):
        return ops.quantize(t, "int8", rounding="stochastic", seed=seed, offset=offset, **options)[0]

    want = of()
    assert of().equal(want) and of(wide[:, :80].clone()).equal(want) and of(wide[:, :80].t().clone().t()).equal(want)
    assert of(seed=torch.tensor(3, device=DEVICE)).equal(want) and of(seed=3 + 2**64 - 2**64).equal(want)
    assert not of(seed=4).equal(want) and not of(offset=1).equal(want) and not of(seed=3 + 2**40).equal(want)
    torch.manual_seed(5)
    first, second = of(seed=None), of(seed=None)
    torch.manual_seed(5)
    assert of(seed=None).equal(first) and not first.equal(second)


@pytest.mark.share(2)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_of_a_scale_becomes_the_formats_largest(format, granularity):
    rows = 130 if granularity == "block" else 4
    a = torch.randn(2, rows, 20, device=DEVICE)
    values, scale = ops.quantize(a, format, granularity, group_size=16)
    shapes = {"tensor": (), "row": (2, 4, 1), "column": (1, 1, 20), "group": (2, 4, 2), "block": (2, 2, 1)}
    assert scale.shape == shapes[granularity] and scale.dtype == torch.float32
    assert values.shape == (2, rows, 10 if format == "int4" else 20) and values.dtype == FORMATS[format].dtype
    largest = (scale * FORMATS[format].largest).amax()
    torch.testing.assert_close(largest, a.abs().amax())
    back = ops.dequantize(values, scale, granularity, group_size=16)
    half = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}[format]
    assert float((back - a).abs().amax()) <= half * float(a.abs().amax()) * 1.001


def test_a_power_of_two_is_rounded_up():
    a = x([448.0], [449.0], [447.0], [1e-3], [0.0], [2.0**-126])
    _, scale = ops.quantize(a, "fp8_e4m3", power_of_two=True)
    assert scale.flatten().tolist() == [1.0, 2.0, 1.0, 2.0**-18, 2.0**-126, 2.0**-126]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_what_is_documented_of_odd_numbers(format, granularity):
    made = FORMATS[format]
    nan, inf = math.nan, math.inf
    rows = [[nan, 1.0, -2.0, 2.0], [0.0] * 4, [inf, 1.0, -inf, nan], [nan] * 4, [1e-40, 0, 0, 0]]
    for row in rows:
        values, scale = ops.quantize(x(row), format, granularity)
        back = ops.dequantize(values, scale, granularity).flatten().tolist()
        assert bool(scale.isfinite().all()) and float(scale.min()) >= 2.0**-126
        for number, got in zip(row, back, strict=True):
            if math.isnan(number):
                assert math.isnan(got) if made.mantissa else got == 0
            elif math.isinf(number):
                assert abs(got) > 3.4e38 and (got > 0) == (number > 0)
            elif math.inf in row:
                assert got == 0
            elif abs(number) < 1e-37:
                assert abs(got - number) <= 2.0**-127  # scales end there
            else:
                assert abs(got - number) < 0.1 * abs(number) + 0.15
    sixteen = ops.dequantize(*ops.quantize(x(rows[2][:3]), format), columns=3, dtype=torch.float16)
    assert sixteen.tolist() == [[math.inf, 0.0, -math.inf]]


def test_blocks_with_given_scales_are_found_below_the_first():
    a = torch.randn(2, 130, 9, device=DEVICE)
    scale = torch.rand(2, 2, 1, device=DEVICE) + 0.01
    values, same = ops.quantize(a, "int8", "block", scale=scale)
    over = scale.repeat_interleave(128, 1)[:, :130]
    assert values.equal((a * (1 / over)).clamp(-127, 127).round().to(torch.int8)) and same.equal(scale)
    assert ops.dequantize(values, scale, "block").equal(values.float() * over)


def test_quantising_a_parameter_gives_constants():
    weight = torch.nn.Parameter(torch.randn(4, 32, device=DEVICE))
    values, scale = ops.quantize(weight, "fp8_e4m3")
    assert not values.requires_grad and not scale.requires_grad
    assert not ops.dequantize(values, scale).requires_grad


def test_division_in_double_is_true_division():
    g = torch.Generator().manual_seed(1)
    word = torch.randint(0x00800000, 0x7F800000, (2**18,), generator=g, dtype=torch.int32)
    largest = word.view(torch.float32)
    for format, made in FORMATS.items():
        scale = formats.scale_of(largest, formats.Scheme(format, "row"))
        assert scale.equal((largest / made.largest).clamp_min(formats.SMALLEST_SCALE))
        assert formats.inverse_of(scale).equal(torch.ones_like(scale) / scale)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("format", FORMATS)
def test_a_compiler_gives_the_same_bits(format):
    a = torch.randn(300, 1000, device="cuda", dtype=torch.bfloat16)
    for granularity in GRANULARITIES:
        torch._dynamo.reset()
        compiled = torch.compile(lambda t, by=granularity: ops.quantize(t, format, by), fullgraph=True, dynamic=False)
        (values, scale), (want, of) = compiled(a), ops.quantize(a, format, granularity)
        assert scale.equal(of) and bits(values).equal(bits(want))


X, COLUMN = torch.ones(2, 5, device=DEVICE), torch.ones(2, 1, device=DEVICE)
wrong = functools.partial(bad, "quantize", x=X, format="int8")
CODES = torch.zeros(2, 5, dtype=torch.int8, device=DEVICE)
wrong_codes = functools.partial(bad, "dequantize", values=CODES, scale=COLUMN)
BAD_SCALES = (0.0, -1.0, math.inf, math.nan)
REFUSED = [
    wrong(EITHER, "'format' is 'fp8'; expected 'int8', 'int4', 'fp8_e4m3' or 'fp8_e5m2'", format="fp8"),
    wrong(EITHER, "'format' is torch.int8", format=torch.int8),
    wrong(EITHER, "'granularity' is 'rows'; expected 'tensor', 'row'", granularity="rows"),
    wrong(EITHER, "'group_size' is 0; expected an int of at least 1", group_size=0),
    wrong(EITHER, "'group_size' is 2.0", group_size=2.0),
    wrong(EITHER, "is 3; expected an even number", format="int4", granularity="group", group_size=3),
    wrong(EITHER, "'x' is a scalar; expected at least one dimension", x=X[0, 0], granularity="tensor"),
    wrong(EITHER, "'x' is of shape (5,); expected at least two dimensions", x=X[0], granularity="block"),
    wrong(EITHER, "'x'; int32", x=X.int()),
    wrong(EITHER, "'power_of_two' is 1; expected True or False", power_of_two=1),
    wrong(EITHER, "'rounding' is 'up'; expected 'nearest' or 'stochastic'", rounding="up"),
    wrong(EITHER, "'seed' is 3 and 'rounding' 'nearest'", seed=3),
    wrong(EITHER, "'seed' is 1.5", rounding="stochastic", seed=1.5),
    wrong(EITHER, "'scale' is a number; expected a tensor of shape (2, 1)", scale=1.0),
    wrong(EITHER, "'scale' has shape (2,); expected (2, 1)", scale=COLUMN[:, 0]),
    wrong(EITHER, "'scale'; float16; float32", scale=COLUMN.half()),
    wrong(EITHER, "'scale' is on meta", scale=COLUMN.to("meta")),
    wrong(EITHER, "'scale' wants a gradient; detach", scale=COLUMN.clone().requires_grad_()),
    wrong(EITHER, "'power_of_two' is True and 'scale' is given", scale=COLUMN, power_of_two=True),
    *(wrong(EITHER, "'scale' is ; expected a positive, finite", scale=s, granularity="tensor") for s in (*BAD_SCALES, 1e-40)),
    *(wrong(EITHER, "'scale' has ; at (1, 0) (1 such in all)", scale=x([1.0], [s]), check_scale=True) for s in BAD_SCALES),
    wrong_codes(EITHER, "'values'; float32; int8", values=X),
    wrong_codes(EITHER, "'scale' has shape (1, 2); expected (2, 1)", scale=COLUMN.T),
    wrong_codes(EITHER, "'columns' is 4; expected 5 for 'values' of shape (2, 5)", columns=4),
    wrong_codes(EITHER, "'columns' is 11; expected 9 or 10", values=X.to(torch.uint8), columns=11),
    wrong_codes(EITHER, "'columns' is True", columns=True),
    wrong_codes(EITHER, "'dtype' is torch.float64; expected float32, float16 or bfloat16", dtype=torch.float64),
    wrong_codes(EITHER, "'scale' has shape (2, 1); expected (1, 1)", granularity="block"),
]  # fmt: skip


def test_the_report_is_what_the_definitions_say():
    a = x([0.4, -127.0, 3.0, math.nan])
    report = round_trip_error(a, "int8")
    assert report.largest == pytest.approx(0.4) and report.zeros == 0.25 and report.saturated == 0
    assert report.relative_rms == pytest.approx(0.4 / math.sqrt(0.16 + 127**2 + 9))
    assert report.snr_db == pytest.approx(-20 * math.log10(report.relative_rms))
    assert report.bits == (4 * 8 + 32) / 4
    assert round_trip_error(x([1.0, 2.0]), "fp8_e5m2", "tensor", scale=1.0).snr_db == math.inf
    assert round_trip_error(x([0.0, 0.0]), "int4").relative_rms == 0


@pytest.mark.parametrize(
    ("format", "inside", "beyond"),
    [("int8", 127.5, 127.6), ("int4", 7.5, 7.6), ("fp8_e4m3", 464.0, 464.1), ("fp8_e5m2", 61440.0, 61450.0)],
)
def test_what_rounding_does_not_bring_back_is_saturated(format, inside, beyond):
    assert round_trip_error(x([inside, beyond, -beyond, 1.0]), format, "tensor", scale=1.0).saturated == 0.5


def test_a_models_weight_is_reported_on_without_a_warning():
    weight = torch.nn.Linear(64, 8, device=DEVICE).weight
    assert round_trip_error(weight, "int4", "group", group_size=32).bits == 5


def test_noise_is_what_theory_says():
    """Uniform numbers have an error of step / sqrt(12)."""
    a = torch.linspace(-1, 1, 4001, device=DEVICE)[None]
    report = round_trip_error(a, "int8")
    assert report.relative_rms == pytest.approx(1 / 127 / 12**0.5 * 3**0.5, rel=0.02)


def test_rounding_to_nearest_of_the_reference_is_pytorchs_cast():
    a = torch.randn(1000) * 100
    assert rounded(a, "fp8_e4m3").float().equal(a.clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("granularity", ["tensor", "row", "group"])
def test_float64_is_rounded_to_float32(granularity):
    x = torch.randn(3, 256, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE, dtype=torch.float64)
    found = zip(ops.quantize(x, "int8", granularity), ops.quantize(x.float(), "int8", granularity), strict=True)
    assert all(got.equal(want) for got, want in found)


@triton.jit
def write_quotients(x_ptr, out_ptr, factor, shift, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N), divided(tl.load(x_ptr + tl.arange(0, N)), factor, shift))


@pytest.mark.parametrize("divisor", [2, 17, 1025, 2**30 + 1])
def test_a_quotient_in_triton_is_exact_beyond_2_to_the_30(divisor):
    x = torch.tensor([0, divisor - 1, divisor, 2**30 - 1, 2**30, 2**31 - 2**16, 2**31 - 2, 2**31 - 1], device=DEVICE)
    out, numbers = torch.empty(8, dtype=torch.int32, device=DEVICE), dispatch.quotient(divisor)
    write_quotients[(1,)](x.int(), out, numbers & 2**32 - 1, numbers >> 32, 8)
    assert out.tolist() == (x // divisor).tolist()
