"""Dequantisation in CUDA C++ on the CPU emulator; what it compiles to and declines."""

import dataclasses
import math
import re

import pytest
import torch
from cuda_as_cpp import whole
from cuda_on_cpu import BF16, FP16, FP32, FRAME, Launched, Suite, frame_is_whole, framed, job, tensor_of
from emulated import *  # noqa: F403
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import names, sass

from weft.definition import Declined
from weft.operators.cuda import CudaPlan
from weft.operators.launch import compiling_for
from weft.operators.quantization import dispatch
from weft.operators.quantization.dequantize import reference
from weft.operators.quantization.formats import FORMATS, GRANULARITIES, scale_shape


@dataclasses.dataclass(frozen=True)
class Case:
    """Values of the elements [*shape], rows ``apart`` bytes further from each other than they are long."""

    format: str
    dtype: torch.dtype
    granularity: str
    shape: tuple[int, ...]
    group: int = 128
    apart: int = 0
    kernel: str = "cuda"
    begin: int = 0  # bytes beyond 16 bytes that values begin at


CASES = {
    "one scale": Case("fp8_e4m3", BF16, "tensor", (5, 264)),
    "one scale, rows apart": Case("int8", FP16, "tensor", (9, 40), apart=8),
    "rows": Case("fp8_e5m2", FP16, "row", (13, 88)),
    "rows apart, fp32": Case("fp8_e4m3", FP32, "row", (3, 5, 36), apart=4),
    "groups, fp32": Case("int8", FP32, "group", (7, 96), 24),
    "groups of int4": Case("int4", BF16, "group", (12, 96), 32),
    "groups of int4, the last shorter": Case("int4", FP16, "group", (9, 104), 32),
    "rows of int4, fp32": Case("int4", FP32, "row", (9, 52)),
    "blocks of a batch": Case("fp8_e4m3", BF16, "block", (2, 130, 136)),
    "columns, rows apart": Case("fp8_e4m3", BF16, "column", (11, 72), apart=16),
    "columns of int4, fp32": Case("int4", FP32, "column", (9, 20)),
    "columns of int8": Case("int8", BF16, "column", (4, 24)),
    "one scale, odd rows apart": Case("fp8_e4m3", BF16, "tensor", (9, 43), apart=3, kernel="cuda-unaligned"),
    "odd rows": Case("fp8_e4m3", FP16, "row", (13, 61), kernel="cuda-unaligned", begin=1),
    "rows shorter than a vector": Case("int8", BF16, "row", (50, 3), kernel="cuda-unaligned", begin=2),
    "groups of 33": Case("int8", FP16, "group", (7, 99 + 8), 33, kernel="cuda-unaligned", begin=3),
    "groups of 7, fp32": Case("int8", FP32, "group", (7, 95), 7, kernel="cuda-unaligned", begin=3),
    "groups of int4, even rows apart": Case("int4", BF16, "group", (9, 106), 6, apart=1, kernel="cuda-unaligned"),
    "groups of int4, fp32, anywhere": Case("int4", FP32, "group", (9, 106), 32, kernel="cuda-unaligned", begin=1),
    "odd blocks of a batch": Case("fp8_e5m2", BF16, "block", (2, 131, 141), kernel="cuda-unaligned", begin=1),
    "odd columns": Case("fp8_e4m3", BF16, "column", (11, 73), kernel="cuda-unaligned"),
}

MISTAKES = {
    "halves of a pair exchanged": ("one scale", "codes[i / 2] >> i % 2 * 16", "codes[i / 2] >> (1 - i % 2) * 16"),
    "e5m2's bytes": ("rows", "0x3424", "0x2434"),
    "unsigned bytes": ("groups, fp32", "codes[i / 4] ^ 0x80808080u", "codes[i / 4]"),
    "another byte": ("groups, fp32", "0x7440 | i % 4", "0x7440 | i % 2"),
    "int4 off by one": ("groups of int4", "0xe408e408", "0xe407e407"),
    "upper four bits unsigned": ("groups of int4", "0x64806480", "0x64006400"),
    "int4's upper half twice": ("groups of int4", "float((unsigned short)two)", "float((unsigned short)(two >> 16))"),
    "a short's second byte left out": ("rows of int4, fp32", "codes[0] | codes[0] << 8;", "codes[0];"),
    "a scale of fewer bits": (
        "rows",
        "f[i] *= scale[SCALES == 1 ? 0 : i];",
        "f[i] *= __uint_as_float(__float_as_uint(scale[SCALES == 1 ? 0 : i]) & 0xffff0000u);",
    ),
    "a column's scale for all": ("columns of int8", "scale[SCALES == 1 ? 0 : i]", "scale[0]"),
    "the first line's scale": ("rows", "BY == LINES ? Quotient", "false ? Quotient"),
    "the next vector's scale": ("groups, fp32", "Quotient(of_row).of(vector) : 0", "Quotient(of_row).of(vector + 1) : 0"),
    "a quotient too large": ("groups, fp32", "u32(u64(2 * x) * factor", "u32(u64(2 * x + 2) * factor"),
    "rows without gaps": ("rows apart, fp32", "row * v_row + i64(column) * BYTES, codes[e]", "i64(vector) * BYTES, codes[e]"),
    "groups of the row before": ("groups of int4, the last shorter", "= scale[line * s_row + group]", "= scale[group]"),
    "the first matrix's blocks": ("blocks of a batch", "m * ((matrix + 127) / 128) +", ""),
    "the last vector for the one before": ("one scale", "u32(vectors) - 1, first", "u32(vectors) - 2, first"),
    "past the last vector": ("one scale", "if (vector <= last) write", "write"),
    "past the last row": ("columns of int4, fp32", "if (first + e < rows) write", "write"),
    "a row left out": ("columns, rows apart", "i64(group) * EACH;", "i64(group) * (EACH + 1);"),
    "words without a shift": ("odd rows", "shift = u32(u64(p) & 3) * 8", "shift = 0"),
    "the last word left out": ("odd rows", "if (shift) load_codes", "if (false) load_codes"),
    "rows apart as if dense": ("one scale, odd rows apart", "(dense || column + V <= width)", "true"),
    "a piece's scale for the vector": ("groups of int4, even rows apart", "if (k >= i && k < end) f[k]", "if (k >= i) f[k]"),
    "groups that go on in the next row": (
        "groups of int4, even rows apart",
        "i + min(width, (group + 1) * u32(length))",
        "i + (group + 1) * u32(length)",
    ),
    "the row before": ("rows shorter than a vector", "== width) column = 0, row++;", "== width) column = 0;"),
    "beyond the row's last column": ("odd columns", "++column == width", "false"),
    "the first of two scales": ("odd rows", "i < pieces[e]", "true"),
    "the second scale too early": ("odd blocks of a batch", "i < pieces[e]", "i + 1 < pieces[e]"),
    "the second scale of the row before": ("odd rows", "scale_of(row + down,", "scale_of(row,"),
    "no last elements": ("odd rows", "if (there < V && i < there)", "if (false)"),
    "the same row again": ("columns, rows apart", "min(first + e, rows - 1)", "min(first, rows - 1)"),
}  # fmt: skip


def vectors_plan(*call, kernel: str = "cuda"):
    """The launch, for an architecture that has the kernel."""
    with compiling_for(90, lambda *kernel: None):
        return dispatch.DEQUANTIZE.kernel(kernel).of(call[:2], *call[2:])[0]


class Tensors(Launched):
    """Values that are any codes of the format, their scales, and a plan for blocks of 64 threads."""

    cpp = """
const Any v{static_cast<char *>(job.buffers[0]) + job.scales[1]}, s{job.buffers[1]};
const Any out{static_cast<char *>(job.buffers[4]) + job.scales[0]};
job.run([&] { KERNEL(v, s, out, SCALARS); });
"""

    def planned(self, case: Case, g: torch.Generator, patch) -> CudaPlan:
        *rows, n = case.shape
        stored = n // FORMATS[case.format].per_byte
        row = stored + case.apart
        codes = torch.randint(256, (math.prod(rows) * row + case.begin,), generator=g, dtype=torch.uint8)
        self.values = codes[case.begin :].view(*rows, row)[..., :stored]
        scale = torch.randn(scale_shape(case.shape, case.granularity, case.group), generator=g).abs() + 0.01
        if scale.numel() > 3:
            scale.view(-1)[1:4] = torch.tensor([2.0**-126, 3e38, 2.0**-20 / 3])  # results that are denormal or infinite
        self.scale = scale
        as_format = self.values.view(FORMATS[case.format].dtype)
        self.want = reference(as_format, scale, case.granularity, group_size=case.group, columns=n, dtype=case.dtype)
        patch.setattr(dispatch, "THREADS", 64)
        return vectors_plan(as_format, scale, case.granularity, case.group, n, case.dtype, kernel=case.kernel)

    def job(self) -> bytes:
        buffers = {0: self.values, 1: self.scale, 4: framed(self.want.nbytes)}
        return job(self.plan, self.seed, buffers, scales=(FRAME, self.case.begin))

    def what_is_wrong(self, found: bytes) -> str:
        if not frame_is_whole(found):
            return "something beside the result was written"
        got = tensor_of(found[FRAME:-FRAME], self.case.dtype).view(self.want.shape)
        bits = torch.int32 if self.case.dtype == FP32 else torch.int16
        far = ((got.view(bits) != self.want.view(bits)) & ~(got.isnan() & self.want.isnan())).nonzero()
        return f"{far[0].tolist()} is {got[tuple(far[0])]}, not {self.want[tuple(far[0])]}" if len(far) else ""


SUITES = {"vectors.cu": Suite(whole(dispatch.VECTORS), Tensors, CASES, MISTAKES)}


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 2047, 2048, 2049, 715827883, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1])
def test_a_quotient_is_exact_to_the_last_number(divisor):
    packed = dispatch.quotient(divisor)
    factor, shift = packed & 0xFFFFFFFF, packed >> 32
    multiples = [k * divisor for k in (1, 2, 3, (2**31 - 1) // divisor)]
    for x in (0, 1, 2**31 - 1, *(m + d for m in multiples for d in (-1, 0))):
        if x < 2**31:
            assert (2 * x * factor >> 32) >> shift == x // divisor
    assert factor < 2**32 and shift < 32


def planned(format: str, dtype: torch.dtype, granularity: str, shape=(2**14, 2**14), group=128, at=slice(None)):
    made = FORMATS[format]
    values = torch.empty(*shape[:-1], -(-shape[-1] // made.per_byte), dtype=torch.uint8, device="meta")[at]
    scale = torch.empty(scale_shape(shape, granularity, group), device="meta")
    columns = shape[-1] if shape[-1] % made.per_byte else None
    return vectors_plan(values.view(made.dtype), scale, granularity, group, columns, dtype)


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("format", "granularity", "most"),
    [*(("fp8_e4m3", g, m) for g, m in zip(GRANULARITIES, (5.5, 6.0, 7.5, 6.0, 9.0), strict=True)),
     ("fp8_e5m2", "group", 6.0), ("int8", "group", 7.0), ("int4", "group", 7.5)],
)  # fmt: skip
def test_an_element_takes_few_instructions(format, granularity, most):
    """In bf16 on sm_90, those of a vector's scale and addresses included; every store is of 16 bytes."""
    plan = planned(format, BF16, granularity)
    text = sass(plan.source, plan.expression)
    each = int(re.search(r"(\d+)>", plan.expression)[1])
    found = [name for name in names(text) if name != "NOP"]
    assert len(found) / (8 * each) <= most
    assert [name for name in found if name.startswith("STG")] == ["STG.E.128"] * each


REFUSED = [
    bad(planned, Declined, "rows of 20 elements", "int8", BF16, "row", (4, 20)),
    bad(planned, Declined, "rows of 33 elements", "int4", FP32, "row", (4, 33)),
    bad(planned, Declined, "groups of 6", "int4", FP32, "group", (4, 48), 6),
    bad(planned, Declined, "dense along rows", "int8", FP32, "row", (4, 16), at=(..., slice(0, 16, 2))),
    bad(planned, Declined, "32 bits", "int8", FP32, "row", (2**20, 2**13)),
]
