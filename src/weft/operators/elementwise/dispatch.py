"""Which kernel an element-wise call takes, forward and backward, and how it is launched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from weft.definition import Declined
from weft.operators.checks import check_alike, check_tensor
from weft.operators.configs import Configurations, bucket, tiles
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.elementwise.kernels import (
    map_one,
    map_three,
    map_three_to_three,
    map_two,
    relu_backward,
    relu_with_bits,
)
from weft.operators.launch import Plan
from weft.operators.layout import dense, overlapping, rows_of

KERNELS = {(1, 1): map_one, (2, 1): map_two, (3, 2): map_three, (3, 3): map_three_to_three}  # by inputs and outputs
SMALL, LARGE = 2**20, 2**26  # elements between which configurations depend on the size
SHORT = 2048  # columns up to which a program takes several rows


candidates = tiles({"BLOCK": (512, 1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)}, 4, 64, of=("BLOCK",))
# By the number of inputs, and whether the arithmetic takes about as long as the bytes: then a thread has more elements, which
# share what a program does once.
CONFIGURATIONS = {
    (inputs, heavy): Configurations(
        __file__, f"{kind}_{word}", lambda *key, block=block: {"BLOCK": block, "num_warps": 4}, candidates
    )
    for heavy, kind, block in ((False, "map", 1024), (True, "heavy", 2048))
    for inputs, word in ((1, "one"), (2, "two"), (3, "three"))
}


@dataclass(frozen=True, eq=False)
class Formula:
    """What an element-wise operator computes, the option of a call that says which one it is."""

    name: str
    arguments: tuple[str, ...]
    forward: Any  # Triton function ``(a, [b,] PRECISE) -> result``
    # Triton function ``(a, [b,] gradient, PRECISE) -> gradient of a, [of b]``; None where no gradient is computed from the
    # inputs: that of a sum is the result's own
    backward: Any
    reference: Callable[..., Tensor]  # in PyTorch; its autograd serves where a gradient of the gradient is wanted
    heavy: bool = False  # whether its arithmetic takes about as long as its bytes
    # Triton function ``(a, b, gradient, PRECISE) -> gradient of a, of b, result``, for who did not keep the result
    again: Any = None


class Map(Call):
    """``(*inputs, formula, in_place=False, bits=False)``: the result goes into a tensor like the first input, or over it;
    ``bits`` asks for the sign bits that relu's gradient needs."""

    def __init__(self, *arguments: Any):
        at = next(i for i, a in enumerate(arguments) if isinstance(a, Formula))
        self.inputs, self.formula = arguments[:at], arguments[at]
        self.in_place, self.bits = (*arguments[at + 1 :], False, False)[:2]
        name, (first, *_), self.x = self.formula.name, self.formula.arguments, self.inputs[0]
        for argument, value in zip(self.formula.arguments, self.inputs, strict=True):
            check_tensor(name, argument, value)
            check_alike(name, argument, value, first, self.x)
        self.outputs = (self.x if self.in_place else like(self.x),)


class Gradient(Call):
    """``(*saved inputs, dy, formula, 0)``; of relu ``(dx, dy, formula, rows of the saved bits)``."""

    def __init__(self, *arguments: Any):
        *tensors, self.formula, self.rows = arguments
        self.inputs, self.x = tuple(tensors), tensors[0]
        self.outputs = tuple(like(self.x) for _ in self.formula.arguments)


class GradientAgain(Gradient):
    """``(*saved inputs, dy, formula)``: the gradients and once more the result."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments, 0)
        self.outputs = (*self.outputs, like(self.x))


def no_rows(c: Map | Gradient) -> str:
    return NO_ROWS if laid_out(*c.inputs, *c.outputs) is None else ""


NO_ROWS = "strides that do not collapse into rows: a copy would be needed"


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


def laid_out(*tensors: Tensor) -> tuple[int, int, tuple[int, ...]] | None:
    """Tensors of one shape as rows: ``(rows, columns, two strides of each)``; one row where all tensors allow it. None where
    their strides do not collapse into rows."""
    first = tensors[0]
    if dense(first) and all(t.stride() == first.stride() for t in tensors):
        return 1, first.numel(), (0, 1) * len(tensors)
    found = [view for view in map(rows_of, tensors) if view is not None]
    if len(found) < len(tensors):
        return None
    m, n = found[0][:2]
    if m == 1 or all(row == n * col for _, _, row, col in found):
        return 1, m * n, tuple(stride for view in found for stride in (0, view[3]))
    return m, n, tuple(stride for view in found for stride in view[2:])


def turned(m: int, n: int, strides: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Rows, or columns as rows where most tensors are contiguous along them: blocks that share a line of memory follow each
    other then, and it is written once."""
    pairs = list(zip(strides[::2], strides[1::2], strict=True))
    if 2 * sum(0 < row < col for row, col in pairs) > sum(row != 0 for row, _ in pairs):
        return n, m, tuple(stride for row, col in pairs for stride in (col, row))
    return m, n, strides


def has_tail(x: Tensor, n: int, strides: tuple[int, ...]) -> bool:
    """Whether rows of n columns, with these two strides each, begin at whole vectors of 16 bytes and do not end so: a mask for
    their ends would have all of them read element by element."""
    vector = 16 // x.element_size()
    starts = [row % vector for row, col in zip(strides[::2], strides[1::2], strict=True) if col == 1]
    return bool(starts) and not any(starts) and n % vector != 0


def tile_of(item: int, m: int, n: int, strides: tuple[int, ...], least: int = 0) -> tuple[int, int, int]:
    """TILE, at least ``least`` where there are several rows, BLOCK and warps: for rows that are short, or contiguous in one
    tensor and not in another; else zeros."""
    if m > 1 and any(0 < row < col for row, col in zip(strides[::2], strides[1::2], strict=True)):
        aligned = not any(stride * item % 16 for stride in strides if stride > 1)
        return (64, 64, 8) if aligned else (16, 256 // item, 4)
    if m == 1 or (n > SHORT and not least):
        return 0, 0, 0
    padded = {block: triton.cdiv(n, block) * block for block in (1024, 512, 256, 128, 64, 32)}
    block = next(b for b in padded if padded[b] <= max(1.125 * n, min(padded.values())))
    return min(2048 // block, 16), block, 4


def rows_plan(
    kernel: Any, x: Tensor, laid: tuple[Any, ...], inputs: int = 1, heavy: bool = False, tiled: bool = True,
    least: int = 0, **own: Any,
) -> Plan:  # fmt: skip
    """The launch of a kernel over tensors like x, laid out as :func:`laid_out` says; a BLOCK is no longer than rows need."""
    m, n, strides = laid
    config = CONFIGURATIONS[inputs, heavy](x.device, x.dtype, min(max(bucket(x.numel()), SMALL), LARGE))
    tile, block, warps = tile_of(x.element_size(), m, n, strides, least) if tiled else (0, 0, 0)
    block, warps = (block, warps) if tile else (min(config["BLOCK"], bucket(n, 128)), config["num_warps"])
    grid = (triton.cdiv(m, max(tile, 1)) * triton.cdiv(n, block),)
    own |= {"BLOCK": block, "TILE": tile, "TAIL": not tile and has_tail(x, n, strides)}
    return Plan(kernel, grid, (m, n, *strides), own, warps)


def map_plan(formula: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], heavy: bool = False) -> Plan:
    """The launch of a Triton formula over inputs and outputs of one shape. Raises Declined for strides that are no rows."""
    if (laid := laid_out(*inputs, *outputs)) is None:
        raise Declined(NO_ROWS)
    return rows_plan(KERNELS[len(inputs), len(outputs)], inputs[0], turned(*laid), len(inputs), heavy, F=formula)


def bits_plan(c: Map) -> tuple[Plan, tuple[int, int], tuple[int, ...]]:
    """The launch of ``(x, y, bits)``, the shape of the bits, and the strides of the gradient dx.

    Bits of a dense x lie in the order of its memory, as one row; dy is then read in that order."""
    rows, columns, strides = laid_out(*c.inputs, *c.outputs) or (0, 0, ())
    launch = rows_plan(relu_with_bits, c.x, (rows, columns, strides), tiled=False)
    return launch, (rows, triton.cdiv(columns, 8)), like(c.x).stride()


def relu_backward_plan(c: Gradient) -> Plan:
    """``(dy, bits, dx)``"""
    dx, dy = c.inputs
    if c.rows == 1:  # bits in the order of dx's memory
        return rows_plan(relu_backward, dy, turned(*laid_out(dy, dx) or (0, 0, ())), least=1)
    (m, n, *dy_strides), (_, _, *dx_strides) = rows_of(dy) or (0, 0), rows_of(dx) or (0, 0)
    return rows_plan(relu_backward, dy, (m, n, (*dy_strides, *dx_strides)), tiled=False)


FORWARD = Dispatch(
    Map, ON_CPU, TRACED, EMPTY,
    Route("torch", lambda c: c.in_place and overlapping(c.x),
          "elements share memory: PyTorch refuses to write over them"),
    Route("triton", lambda c: c.bits, "one bit an element is saved for backward", bits_plan, no_rows),
    Route("triton", lambda c: True, "dense or row-strided tensors",
          lambda c: map_plan(c.formula.forward, c.inputs, c.outputs, c.formula.heavy), no_rows),
    Route("torch", lambda c: True, NO_ROWS),
)  # fmt: skip

BACKWARD = Dispatch(
    Gradient, ON_CPU, TRACED, EMPTY,
    Route("triton", lambda c: c.rows > 0, "dy and one bit an element are read", relu_backward_plan),
    Route("torch", lambda c: c.formula.backward is None, "the gradient is the result's own: nothing is computed"),
    Route("triton", lambda c: True, "the inputs and dy are read",
          lambda c: map_plan(c.formula.backward, c.inputs, c.outputs, c.formula.heavy), no_rows),
    Route("torch", lambda c: True, NO_ROWS),
)  # fmt: skip

AGAIN = Dispatch(
    GradientAgain, ON_CPU, TRACED, EMPTY,
    Route("triton", lambda c: True, "the inputs and dy are read once for both",
          lambda c: map_plan(c.formula.again, c.inputs, c.outputs, c.formula.heavy), no_rows),
    Route("torch", lambda c: True, NO_ROWS),
)  # fmt: skip
