"""Which kernels quantisation and its inverse take, and how they are launched."""

import ctypes
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weft.operators.call import FLOATS
from weft.operators.checks import check_device, check_flag, check_shape, check_tensor, either
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.contiguous import contiguous
from weft.operators.cuda import CTYPES, CudaPlan, flags, pointer_aligned
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.dropout.philox import GROUP
from weft.operators.launch import INTERPRETING, Plan, target_sm
from weft.operators.layout import rows_of
from weft.operators.quantization import kernels
from weft.operators.quantization.formats import (
    BLOCK,
    FORMATS,
    GRANULARITIES,
    Scheme,
    format_of,
    scale_shape,
    values_shape,
)
from weft.operators.quotient import quotient
from weft.operators.row_programs import ONE_PASS, candidates, heuristic, in_pieces

VECTORS = Path(__file__).parent / "vectors.cu"
WRAP = 8192  # columns that a tensor without gaps is read by where rows do not matter
LONGEST_TILE = 4096  # columns of a tile where nothing needs a whole line
POSITIVE = "a positive, finite fp32 number of at least 2**-126"


def check_scheme(operator: str, scheme: Scheme, name: str, x: Tensor) -> None:
    """Raises TypeError or ValueError unless x, the argument ``name``, can be quantised by it."""
    format, granularity, group_size, power_of_two = scheme
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"{operator}: argument 'format' is {format!r:.40}; expected {_either(FORMATS)}")
    if granularity not in GRANULARITIES or not isinstance(granularity, str):
        expected = _either(GRANULARITIES)
        raise ValueError(f"{operator}: argument 'granularity' is {granularity!r:.40}; expected {expected}")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or not 1 <= group_size < 2**31:
        raise ValueError(f"{operator}: argument 'group_size' is {group_size!r:.40}; expected an int of at least 1")
    least = 2 if granularity == "block" else 1
    if x.ndim < least:
        shape = "a scalar" if not x.ndim else f"of shape {tuple(x.shape)}"
        dimensions = "one dimension" if least == 1 else "two dimensions for granularity 'block'"
        raise ValueError(f"{operator}: argument '{name}' is {shape}; expected at least {dimensions}")
    if scheme.of.per_byte > 1 and granularity == "group" and group_size % 2:
        raise ValueError(
            f"{operator}: argument 'group_size' is {group_size}; expected an even number for int4, which has two to a byte"
        )
    check_flag(operator, "power_of_two", power_of_two)


def check_scale(operator: str, scale: Any, name: str, x: Tensor, shape: tuple[int, ...], scheme: Scheme) -> None:
    """Raises TypeError or ValueError unless ``scale`` fits elements of a shape, which the argument ``name`` holds."""
    wanted = scale_shape(shape, scheme.granularity, scheme.group_size)
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        if scheme.granularity != "tensor":
            raise TypeError(
                f"{operator}: argument 'scale' is a number; expected a tensor of shape {wanted} for granularity "
                f"'{scheme.granularity}'"
            )
        if not (math.isfinite(scale) and 2.0**-126 <= scale <= torch.finfo(torch.float32).max):
            raise ValueError(f"{operator}: argument 'scale' is {scale}; expected {POSITIVE}")
        return
    check_tensor(operator, "scale", scale, (torch.float32,))
    check_device(operator, "scale", scale, name, x)
    expected = f"{wanted} for '{name}' of shape {tuple(x.shape)} and granularity '{scheme.granularity}'"
    check_shape(operator, "scale", scale, tuple(scale.shape) == wanted, expected)
    if torch.is_grad_enabled() and scale.requires_grad:
        raise ValueError(
            f"{operator}: argument 'scale' wants a gradient, which there is none of; expected scale.detach()"
        )


def _either(names: Any) -> str:
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}"


class Lines(NamedTuple):
    """Lines of ``length`` elements, so many of each of ``outer`` rows of n (the last may be shorter); ``whole``: rows;
    ``beside``: a stretch of each of so many rows, which lie side by side, and ``outer`` such stretches."""

    outer: int
    lines: int
    length: int
    n: int
    whole: bool = False
    beside: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.lines, self.length, self.n

    @property
    def ragged(self) -> bool:
        return not self.whole and (self.outer if self.beside else self.lines) * self.length != self.n

    def steps(self, row: int, column: int = 1, per: int = 1) -> tuple[int, int]:
        """From one outer index to the next and from one line to the next, in a tensor of these strides that holds ``per``
        elements in one."""
        along = self.length // per * column
        return (0, row) if self.whole else (along, row) if self.beside else (row, along)


class Lined(Call):
    """A call on a tensor of rows, read by lines. ``n``: elements of a row, of which a byte of int4 holds two."""

    scheme: Scheme
    n: int
    given = True  # scales are there
    random = "none"  # or where the seed is: ``number``, ``memory``

    @functools.cached_property
    def found(self) -> tuple[int, int, int, int] | None:
        return rows_of(self.x)

    @property
    def rows(self) -> tuple[int, int, int, int]:
        assert self.found is not None  # the table looked
        return self.found

    @functools.cached_property
    def lines(self) -> Lines:
        m, n, scheme = self.rows[0], self.n, self.scheme
        # whether rows of x, of their values and of their random numbers follow each other without a gap
        whole_bytes = n % GROUP == 0 or not (self.random != "none" or scheme.of.per_byte > 1)
        flat = self.x.is_contiguous() and whole_bytes
        if scheme.granularity == "tensor" and flat:
            return Lines(1, 1, m * n, m * n, whole=True)
        length = {"group": min(scheme.group_size, n), "block": min(BLOCK, n)}.get(scheme.granularity, n)
        if length == n and scheme.granularity != "block":
            return Lines(1, m, n, n, whole=True)
        if scheme.granularity == "group" and flat and n % length == 0:
            return Lines(1, m * n // length, length, m * n)
        if self.given and self.beside and (scheme.granularity != "block" or m == self.x.shape[-2]):
            return Lines(-(-n // length), m, length, n, beside=True)
        return Lines(m, -(-n // length), length, n)

    @property
    def beside(self) -> bool:
        """Whether rows lie side by side, as those of a transposed matrix do."""
        m, _, row, column = self.rows
        return m > 1 and 0 < row < column


class QuantizeCall(Lined):
    """``(x, [scale,] format, granularity, group_size, power_of_two, random="none")``: the plan is one of
    ``(x, values, scale, seed tensor, seed, offset)``, values contiguous bytes, scale contiguous fp32; without a seed in memory
    any tensor is passed."""

    def __init__(self, x: Tensor, *options: Any):
        self.x, self.given = x, isinstance(options[0], Tensor)
        format, granularity, group_size, power, *random = options[self.given :]
        check_tensor("quantize", "x", x)
        self.scheme, self.n = Scheme(format, granularity, group_size, power), x.shape[-1] if x.ndim else 1
        check_scheme("quantize", self.scheme, "x", x)
        self.random = random[0] if random else "none"

    @property
    def cuts_random_groups(self) -> bool:
        """Whether lines begin within a group of eight elements, which share a call of the random-number generator."""
        by_blocks = self.scheme.granularity == "block" and not self.given
        return self.random != "none" and not by_blocks and not self.lines.whole and self.lines.length % GROUP > 0

    @property
    def apart(self) -> bool:
        """Whether loads of x are narrower than stores of lines of values."""
        over, (_, _, x_row, x_col), vector = self.lines, self.rows, 16 // self.x.element_size()
        begin = (over.outer > 1, over.lines > 1)
        steps = [step for step, several in zip(over.steps(x_row, x_col), begin, strict=True) if several]
        loose = not pointer_aligned(self.x) or any(step % vector for step in steps)
        in_bytes = values_shape((over.length,), self.scheme.format)[0]
        return x_col == 1 and loose and not over.ragged and in_bytes % 4 == 0

    @property
    def split_rows(self) -> bool:
        """Whether rows of values begin anywhere and all elements have one scale: then values are one stretch of bytes."""
        (m, n, _, _), scheme = self.rows, self.scheme
        alike = scheme.granularity == "tensor" and scheme.of.per_byte == 1 and self.random == "none"
        return alike and n % 16 > 0 and self.lines.length == n < m * n < MOST and not self.beside

    @functools.cached_property
    def matrices(self) -> tuple[int, int] | None:
        """x as a batch of matrices: how many, and the stride from one to the next."""
        found = rows_of(torch.select(self.x, -2, 0) if self.x.shape[-2] else self.x)
        return None if found is None else (found[0], found[2])


class DequantizeCall(Lined):
    """``(values, scale, granularity, group_size, columns, dtype)``: the plan is one of ``(values as bytes, scale, out)``, scale
    contiguous fp32, out contiguous [..., n]."""

    def __init__(
        self, values: Tensor, scale: float | Tensor, granularity: str = "row", group_size: int = BLOCK,
        columns: int | None = None, dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        check_tensor("dequantize", "values", values, tuple(made.dtype for made in FORMATS.values()))
        self.x, self.scale, self.dtype = values, scale, dtype
        self.scheme = Scheme(format_of(values.dtype), granularity, group_size)
        check_scheme("dequantize", self.scheme, "values", values)
        if dtype not in FLOATS:
            raise TypeError(f"dequantize: argument 'dtype' is {dtype!r:.40}; expected {either(FLOATS)}")
        per, stored = self.scheme.of.per_byte, values.shape[-1]
        if columns is not None and (isinstance(columns, bool) or not isinstance(columns, int)):
            raise TypeError(f"dequantize: argument 'columns' is {columns!r:.40}; expected an int or None")
        if columns is not None and -(-columns // per) != stored:
            most = f"{per * stored - 1} or {per * stored}" if per > 1 and stored else str(stored)
            raise ValueError(
                f"dequantize: argument 'columns' is {columns}; expected {most} for 'values' of shape {tuple(values.shape)}"
            )
        self.n = per * stored if columns is None else columns
        self.shape = (*values.shape[:-1], self.n)  # of the result
        check_scale("dequantize", scale, "values", values, self.shape, self.scheme)

    @property
    def ragged(self) -> bool:
        """Whether a row ends in a group that is not whole."""
        return (
            self.scheme.granularity == "group"
            and self.n > self.scheme.group_size
            and self.n % self.scheme.group_size > 0
        )


def no_rows(c: Lined) -> str:
    return "" if c.found else NO_ROWS


def no_lines(c: QuantizeCall) -> str:
    return no_rows(c) or (CUT_GROUPS if c.cuts_random_groups else "")


def no_blocks(c: QuantizeCall) -> str:
    return no_lines(c) if c.scheme.granularity != "block" else "" if c.matrices else NO_ROWS


NO_ROWS = "strides that do not collapse into rows: a copy would be needed"
CUT_GROUPS = "stochastic rounding by groups of a number of columns that is no multiple of 8"

# ---- launches of quantize --------------------------------------------------------------------------------------------


def line_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """As for every family's rows; of long ones 32 elements a thread, which share what a thread does once."""
    config = heuristic(sm, dtype, n)
    return {**config, "num_warps": 16} if 16384 <= n <= ONE_PASS // 2 else config


def strip_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """A tile of 8192 elements, 32 a thread: four accesses of 16 bits in flight."""
    block = min(n, 1024)
    return {"STRIP": 64, "ROWS": max(1, 8192 // block), "BLOCK": block, "num_warps": 8}


def tile_heuristic(sm: int, dtype: torch.dtype, n: int, by: str = "line") -> Config:
    """16 elements a thread; of columns' scales 64 in four rows, which share the columns' divisions."""
    elements, widest = (8192, 256) if by == "column" else (2048, 2048)
    block = min(n, widest)
    return {"ROWS": max(1, elements // block), "BLOCK": block, "num_warps": 4}


def tiles(n: int, choices: dict[str, tuple[int, ...]]) -> list[Config]:
    """Choices of no more than n columns, of 8 to 64 elements a thread."""
    every = grid_of({**choices, "BLOCK": [b for b in choices["BLOCK"] if b <= n] or [n]})
    return [c for c in every if 8 <= c["ROWS"] * c["BLOCK"] // (32 * c["num_warps"]) <= 64]


BLOCKS = (128, 256, 512, 1024, 2048, 4096)
STRIPS = {"STRIP": (32, 64, 128, 256), "ROWS": (4, 8, 16, 32), "BLOCK": BLOCKS[:-1], "num_warps": (4, 8, 16)}
TILES = {"ROWS": (1, 2, 4, 8, 16, 32, 64), "BLOCK": BLOCKS, "num_warps": (2, 4, 8, 16)}
line_configuration = Configurations(__file__, "lines", line_heuristic, candidates)
BESIDE = {"ROWS": 32, "BLOCK": 128, "num_warps": 4}  # for rows that lie side by side
BESIDE_COLUMNS = 512  # of rows that lie side by side, of which a program holds several
FLAT = 1024  # elements of a program that takes rows as one stretch
block_configuration = Configurations(
    __file__, "blocks", lambda *_: {"num_warps": 8}, lambda *_: grid_of({"num_warps": (4, 8, 16, 32)})
)
strip_configuration = Configurations(__file__, "strips", strip_heuristic, lambda sm, dtype, n: tiles(n, STRIPS))
scaled_configuration = Configurations(__file__, "scaled", tile_heuristic, lambda sm, dtype, n, by: tiles(n, TILES))
inverse_configuration = Configurations(__file__, "dequantize", tile_heuristic, lambda sm, dtype, n: tiles(n, TILES))


def launch(kernel: Any, c: Lined, grid: tuple[int], scalars: tuple[int, ...], warps: int, **own: Any) -> Plan:
    """Of a kernel with the constants of its own and what it needs of those that follow from the call."""
    made = c.scheme.of
    hardware = target_sm(c.x.device) >= 89 and not INTERPRETING and made.mantissa > 0
    ragged, apart = "RAGGED" in kernel.arg_names and c.lines.ragged, isinstance(c, QuantizeCall) and c.apart
    known = {
        "FORMAT": c.scheme.format,
        "PER_BYTE": made.per_byte,
        "LARGEST": made.largest,
        "POWER": c.scheme.power_of_two,
    }
    known |= {"RANDOM": c.random, "PER": 16 // c.x.element_size(), "HARDWARE": hardware, "BY": by(c)}
    known |= {"RAGGED": ragged, "BESIDE": c.lines.beside, "APART": apart, "TAIL": False, **own}
    return Plan(kernel, grid, scalars, {name: known[name] for name in kernel.arg_names if name in known}, warps)


def steps(c: QuantizeCall) -> tuple[int, ...]:
    """Steps in x, in values (the second is also the bytes of a line) and in random groups."""
    over = c.lines
    _, _, x_row, x_col = c.rows
    of_row = values_shape((over.length if over.whole else c.n,), c.scheme.format)[0]
    return (
        *over.steps(x_row, x_col),
        x_col,
        *over.steps(of_row, per=c.scheme.of.per_byte),
        *over.steps(-(-c.n // GROUP), per=GROUP),
    )


def lines_plan(c: QuantizeCall) -> Plan:
    """Whole lines in registers, or long ones that are walked twice."""
    over, config = c.lines, line_configuration(c.x.device, c.x.dtype, bucket(c.lines.length))
    if c.beside and over.whole:
        rows = 64 // c.x.element_size()
        config = {"ROWS": rows, "num_warps": min(max(rows * bucket(over.length) // 1024, 1), 32)}
    elif over.whole and over.length <= 512 // (c.x.element_size() // 2) and in_pieces(c.x):
        block = bucket(over.length, 16)  # few warps: threads load single elements (row_programs.fitted)
        config = {"ROWS": 1024 // block, "num_warps": 2 if block == 512 else 1}
    scalars, warps = (*over.sizes, *steps(c)), config["num_warps"]
    if over.length > ONE_PASS:
        grid = (over.outer * over.lines,)
        return launch(kernels.quantize_long_lines, c, grid, scalars, warps, BLOCK=config["BLOCK"])
    lines = min(config["ROWS"], bucket(over.lines))
    grid = (over.outer * triton.cdiv(over.lines, lines),)
    tile = {"ROWS": lines, "BLOCK": bucket(over.length, 16)}
    return launch(kernels.quantize_lines, c, grid, scalars, warps, **tile, NESTED=over.outer > 1)


def block_plan(c: QuantizeCall) -> Plan:
    x, (m, n) = c.x, c.x.shape[-2:]
    count, stride = c.matrices or (0, 0)
    config = block_configuration(x.device, x.dtype)
    scalars = (m, n, stride, *x.stride()[-2:], values_shape((n,), c.scheme.format)[0], -(-n // GROUP))
    grid = (count * triton.cdiv(m, BLOCK) * triton.cdiv(n, BLOCK),)
    return launch(kernels.quantize_blocks, c, grid, scalars, config["num_warps"], BLOCK=BLOCK)


def scaled_plan(c: QuantizeCall, backwards: bool = False) -> Plan:
    """With scales that are there."""
    (m, n, x_row, x_col), over = c.rows, c.lines
    if c.split_rows:
        factor, shift = quotient(n) & 2**32 - 1, quotient(n) >> 32
        scalars = (m * n, n, factor, shift, x_row, x_col)
        return launch(
            kernels.quantize_flat, c, (triton.cdiv(m * n, FLAT),), scalars, 4, BLOCK=FLAT, BACKWARDS=backwards
        )
    config = scaled_configuration(c.x.device, c.x.dtype, min(bucket(over.length, 16), LONGEST_TILE), by(c))
    tail = over.whole and over.length % 16 > 0 and over.length > config["BLOCK"]
    config = BESIDE if c.beside else config
    return tiled_plan(kernels.quantize_by_scale, c, config, steps(c), BACKWARDS=backwards, TAIL=tail)


def tiled_plan(kernel: Any, c: Lined, config: Config, steps: tuple[int, ...], **own: Any) -> Plan:
    """The launch of a kernel that takes tiles of lines and their scales."""
    over, block = c.lines, min(config["BLOCK"], bucket(c.lines.length, 16))
    lines = min(config["ROWS"], bucket(over.lines))
    grid = (over.outer * triton.cdiv(over.lines, lines) * triton.cdiv(over.length, block),)
    of_scales = (1, over.outer) if over.beside else (0, 1) if over.whole else (over.lines, 1)
    of_scales = (0, 0) if c.scheme.granularity == "tensor" else of_scales
    scalars = (*over.sizes, c.x.shape[-2] if c.x.ndim > 1 else 1, *steps, *of_scales)
    # as many elements a thread where a row has fewer lines
    warps = max(config["num_warps"] * lines * block // (config["ROWS"] * config["BLOCK"]), 1)
    return launch(kernel, c, grid, scalars, min(warps, config["num_warps"]), ROWS=lines, BLOCK=block, **own)


def by(c: Lined) -> str:
    """What a scale belongs to, as the kernels call it."""
    return c.scheme.granularity if c.scheme.granularity in ("column", "block") else "line"


class TwoPasses:
    """Scales that span rows: two reads of x, and launches for absmax, scales and values."""

    def __init__(self, c: QuantizeCall):
        x, scheme = c.x, c.scheme
        m, n, x_row, x_col = c.rows
        per_column, wrapped, total = scheme.granularity == "column", False, m * n
        if not per_column and (x.is_contiguous() or (x.ndim > 1 and x.mT.is_contiguous())):
            wrapped, m, n = True, triton.cdiv(total, WRAP), WRAP
            x_row, x_col = WRAP, 1
        config = strip_configuration(x.device, x.dtype, min(bucket(n, 16), WRAP))
        config = config if wrapped or not c.beside else {"STRIP": 256, **BESIDE, "ROWS": 64}
        rows = config["ROWS"] if pointer_aligned(x) else max(config["ROWS"] // 2, 1)  # loads of one element each
        block, strip = min(config["BLOCK"], bucket(n, 16)), max(config["STRIP"], rows)
        tile = {"STRIP": strip, "ROWS": rows, "BLOCK": block}
        across, down = triton.cdiv(n, block), triton.cdiv(m, strip)
        scalars, constants = (m, n, total, x_row, x_col), {**tile, "PER_COLUMN": per_column, "WRAPPED": wrapped}
        constants["TAIL"] = wrapped and total % 16 > 0
        self.shape = (down, n) if per_column else (across * down, 1)
        self.absmax = Plan(kernels.absmax_strips, (across * down,), scalars, constants, config["num_warps"])
        block = 64 if per_column else 1
        grid, rows = (triton.cdiv(self.shape[1], block),), min(bucket(self.shape[0], 16), 4096 // block)
        self.scales = launch(kernels.scales_of_strips, c, grid, self.shape, 4, ROWS=rows, BLOCK=block)
        self.values = scaled_plan(c, backwards=True)

    def __call__(self, x: Tensor, values: Tensor, scale: Tensor, seeds: Tensor, seed: int, offset: int) -> None:
        partial = torch.empty(self.shape, dtype=torch.float32, device=x.device)
        self.absmax(x, partial)
        self.scales(partial, scale)
        self.values(x, values, scale, seeds, seed, offset)


class Copied:
    """Rows that lie side by side, too long for a tile of several: a copy by rows first."""

    def __init__(self, c: QuantizeCall):
        like = torch.empty_like(c.x, memory_format=torch.contiguous_format)
        self.plan = lines_plan(QuantizeCall(like, *c.scheme, c.random))

    def __call__(self, x: Tensor, *rest: Any) -> None:
        self.plan(contiguous(x), *rest)


# ---- launches of dequantize ------------------------------------------------------------------------------------------


Dequantize = tuple[Any, tuple[int, ...]]  # a launch, and the shape of its result


def inverse_plan(c: DequantizeCall) -> Dequantize:
    over, (_, _, v_row, v_col) = c.lines, c.rows
    config = inverse_configuration(c.x.device, c.dtype, min(bucket(over.length, 16), LONGEST_TILE))
    if c.beside:
        config = BESIDE
    elif v_col != 1 and over.length >= 512:  # bytes one by one: less padding, and scales of columns for four rows
        config = {"ROWS": 4, "BLOCK": 512, "num_warps": 4}
    steps = (*over.steps(v_row, v_col, c.scheme.of.per_byte), v_col, *over.steps(c.n))
    return tiled_plan(kernels.dequantize_lines, c, config, steps), c.shape


THREADS = 256
MOST = 2**31 - 2**16  # vectors and rows that 32 bits count, the last block's included
NAMES = {"int8": "Int8", "int4": "Int4", "fp8_e4m3": "E4m3", "fp8_e5m2": "E5m2"}


def no_vectors(c: DequantizeCall) -> str:
    """Why vectors.cu does not take a call (an empty string when it does)."""
    if c.found is None:
        return NO_ROWS
    m, _, v_row, v_col = c.found
    vector, scheme = 16 // c.dtype.itemsize, c.scheme
    in_bytes = vector // scheme.of.per_byte
    if c.n % vector:
        return f"rows of {c.n} elements; the kernel writes {vector} of {c.dtype} at a time"
    if v_col != 1 or v_row % in_bytes or not pointer_aligned(c.x):
        return f"values that are not dense along rows, on 16 bytes, in rows of a multiple of {in_bytes} bytes"
    if scheme.granularity == "group" and scheme.group_size < c.n and scheme.group_size % vector:
        return f"groups of {scheme.group_size} elements; a vector of {vector} of {c.dtype} has one scale"
    if scheme.granularity == "column" and isinstance(c.scale, Tensor) and not pointer_aligned(c.scale):
        return "columns' scales that do not begin on 16 bytes"
    if max(m, m * (c.n // vector)) > MOST:
        return f"{m * (c.n // vector)} vectors; the kernel counts them in 32 bits"
    return ""


def no_unaligned(c: DequantizeCall) -> str:
    """Why the kernel for rows of any length does not take a call (an empty string when it does)."""
    if c.found is None:
        return NO_ROWS
    m, _, _, v_col = c.found
    if c.beside:
        return "values of rows that lie side by side"
    if v_col != 1 and c.n * c.dtype.itemsize % 16 == 0:
        return "values that are no neighbours, in rows that whole stores fit"
    if c.n % c.scheme.of.per_byte:
        return f"rows of {c.n} elements, two to a byte"
    return f"{m * c.n} elements; the kernel counts them in 32 bits" if m * c.n > MOST else ""


def unaligned_plan(c: DequantizeCall) -> Dequantize:
    (m, _, v_row, v_col), n, scheme = c.rows, c.n, c.scheme
    vector = 16 // c.dtype.itemsize
    each = min(8, 32 * scheme.of.per_byte // vector)
    by = {"tensor": "TENSOR", "column": "COLUMNS", "block": "BLOCKS"}.get(scheme.granularity, "GROUPS")
    length = min({"group": scheme.group_size, "block": BLOCK}.get(scheme.granularity, n), n)
    matrix = c.x.shape[-2] if scheme.granularity == "block" else 1
    two = scheme.granularity not in ("tensor", "column") and min(length, n % length or length) >= vector
    kernel = f"dequantize_unaligned<{CTYPES[c.dtype]}, {NAMES[scheme.format]}, {by}, {flags(two)}, {THREADS}, {each}>"
    rows = n, quotient(n), length, quotient(length), matrix, quotient(matrix), -(-n // length), v_row, v_col
    grid = -(-m * n // (THREADS * each * vector)), 1
    return CudaPlan(VECTORS, kernel, grid, THREADS, _scalars(m * n, *rows)), c.shape


def vectors_plan(c: DequantizeCall) -> Dequantize:
    (m, _, v_row, _), n, out, scheme = c.rows, c.n, CTYPES[c.dtype], c.scheme
    vector, name = 16 // c.dtype.itemsize, NAMES[scheme.format]
    in_bytes, per_row = vector // scheme.of.per_byte, n // vector
    each = min(8, 32 // in_bytes)  # 32 bytes of a thread in flight
    if scheme.granularity == "column":
        kernel = f"dequantize_columns<{out}, {name}, {THREADS}, {each}>"
        threads, scalars = -(-m // each) * per_row, _scalars(m, per_row, quotient(per_row), v_row)
        return CudaPlan(VECTORS, kernel, (-(-threads // THREADS), 1), THREADS, scalars), c.shape
    by, of_row, of_group, matrix, s_row = "GROUPS", per_row, per_row, 1, 0
    dense = v_row == per_row * in_bytes or m == 1
    if scheme.granularity == "block":
        by, of_group, matrix = "BLOCKS", BLOCK // vector, c.x.shape[-2]
        s_row = scale_shape((n,), "group", BLOCK)[-1]
    elif scheme.granularity == "tensor":
        by = "TENSOR" if dense else by
    else:
        length = min(scheme.group_size, n) if scheme.granularity == "group" else n
        if dense and n % length == 0:
            by, of_row = "LINES", length // vector
        else:
            of_group, s_row = length // vector, -(-n // length)
    kernel = f"dequantize_vectors<{out}, {name}, {by}, {THREADS}, {each}>"
    vectors, quotients = m * per_row, (quotient(of_row), quotient(of_group))
    scalars = _scalars(vectors, per_row, *quotients, matrix, quotient(matrix), s_row, v_row)
    return CudaPlan(VECTORS, kernel, (-(-vectors // (THREADS * each)), 1), THREADS, scalars), c.shape


def _scalars(*numbers: int) -> tuple[ctypes.c_longlong, ...]:
    return tuple(map(ctypes.c_longlong, numbers))


QUANTIZE = Dispatch(
    QuantizeCall, ON_CPU, TRACED, EMPTY,
    Route("torch", lambda c: not c.found, NO_ROWS),
    Route("torch", lambda c: c.cuts_random_groups, CUT_GROUPS),
    Route("triton", lambda c: c.given, "scales that are given: one pass over memory", scaled_plan, no_lines),
    Route("triton", lambda c: c.scheme.granularity in ("tensor", "column"), "scales that span rows: x is read twice",
          TwoPasses, no_lines),
    Route("triton", lambda c: c.scheme.granularity == "block", "scales by block: x is read once", block_plan, no_blocks),
    Route("triton", lambda c: c.beside and not (c.lines.whole and c.n <= BESIDE_COLUMNS),
          "scales by long rows or groups of a transposed tensor: a copy by rows", Copied, no_lines),
    Route("triton", lambda c: True, "scales by row or group: x is read once", lines_plan, no_lines),
)  # fmt: skip

PACKED = ("fp8_e4m3", "int4")  # formats that packed conversions are faster for: docs/notes/quantization.md

DEQUANTIZE = Dispatch(
    DequantizeCall, ON_CPU, TRACED, EMPTY,
    Route("torch", lambda c: not c.found, NO_ROWS),
    Route("cuda", lambda c: c.sm == 90 and c.dtype != torch.float32 and c.scheme.format in PACKED,
          "packed conversions: one pass over memory", vectors_plan, no_vectors, sm=90),
    Route("cuda", lambda c: c.sm == 90 and c.ragged,
          "groups that do not divide a row: vectors, where a tile is a group",
          vectors_plan, no_vectors, sm=90),
    Route("cuda-unaligned", lambda c: c.sm == 90 and bool(no_vectors(c)),
          "rows or views that no vector fits: shifted loads of values, whole stores", unaligned_plan, no_unaligned, sm=90),
    Route("triton", lambda c: True, "one pass over memory", inverse_plan, no_rows),
)  # fmt: skip
