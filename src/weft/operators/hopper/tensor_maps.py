"""Tensor maps: what Hopper's copy engine (TMA) must know of a matrix, made on the host and passed with a launch."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.operators.cuda import CudaError, driver, pointer_aligned

PAST = 2**30  # the same in hopper_groups.cuh
KEPT = 256  # addresses that a map is remembered for: allocators hand the same ones out again
NAMES = {torch.float32: "FLOAT32", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.int32: "INT32"}
NAMES |= dict.fromkeys((torch.float8_e4m3fn, torch.int8), "UINT8")


class TensorMap(ctypes.Structure):
    """The 128 opaque bytes."""

    _fields_ = (("opaque", ctypes.c_ulonglong * 16),)


class Maps:
    """The maps of matrices of one form at any address; call with a tensor. ``like`` is a matrix of that form, or [matrices,
    rows, columns]; one of its last two dimensions is contiguous, the map's inner one; ``across``: it is the last but one. A
    box has so many elements along the inner and the other dimension, of the inner at most 128 bytes."""

    def __init__(self, like: Tensor, across: bool, box: tuple[int, int]):
        if like.ndim == 2:
            like = like.unsqueeze(0)
        outer, inner = (2, 1) if across else (1, 2)
        size = like.element_size()
        self.dtype, self.box = like.dtype, tuple[int, ...]((*box, 1))
        self.sizes: tuple[int, ...] = (like.shape[inner], like.shape[outer], like.shape[0])
        # of a dimension of one element the stride is never used, but must be one that TMA could take
        least = -(-like.shape[inner] * size // 16) * 16
        steps = (like.stride(outer) * size, like.stride(0) * size)
        self.steps: tuple[int, ...] = tuple(s if n > 1 else least for s, n in zip(steps, self.sizes[1:], strict=True))
        self.known: dict[int, TensorMap] = {}

    def __call__(self, t: Tensor) -> TensorMap:
        address = t.data_ptr()
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= KEPT:
                self.known.clear()
            found = self.known[address] = encode(address, self.dtype, self.sizes, self.steps, self.box)
        return found


class LastRows(Maps):
    """The map of a row-major matrix of which boxes of 64 rows are loaded that have fewer: both last dimensions step from row
    to row, and what is too much lies outside of the second one, which has 64.

    ``count`` rows from ``row`` on are the last of the box at (x, count - 64, row); zeros come before them.
    """

    def __init__(self, like: Tensor, box: tuple[int, int]):
        (rows, columns), step = like.shape, _step(like)
        form = torch.empty_strided((rows, 64, columns), (step, step, 1), dtype=like.dtype, device="meta")
        super().__init__(form, False, box)


class FirstRows(Maps):
    """The map of a row-major matrix to which the first rows of boxes are stored: of a store no coordinate may be negative.

    ``count`` rows from ``row`` on are the first of the box at (x, PAST - count, row + count, PAST): the second dimension ends
    after them, and addresses are counted modulo 2⁶⁴.
    """

    def __init__(self, like: Tensor, box: tuple[int, int]):
        (rows, columns), step = like.shape, _step(like) * like.element_size()
        self.dtype, self.box = like.dtype, (*box, 1, 1)
        self.sizes, self.steps = (columns, PAST, rows + 1, PAST + 1), (step, step, 2**64 // PAST - step)
        self.known = {}


class Heads(Maps):
    """The map of [B, H, S, D], its last dimension contiguous, in boxes of 64 columns by ``rows`` of S."""

    def __init__(self, like: Tensor, rows: int):
        size = like.element_size()
        self.dtype, self.box = like.dtype, (64, rows, 1, 1)
        self.sizes = tuple(reversed(like.shape))
        least = -(-like.shape[-1] * size // 16) * 16
        steps = zip(reversed(like.stride()[:3]), self.sizes[1:], strict=True)
        self.steps = tuple(step * size if n > 1 else least for step, n in steps)
        self.known = {}


class PackedHeads(Heads):
    """That of the rows of packed sequences, [1, H, tokens, D], in boxes of 64 columns by ``rows`` rows of one sequence: both
    middle dimensions step from row to row, and zeros come for rows ahead of the third one's.

    Rows from ``row`` on are the last ``count`` of the box at (x, count - rows, row, head).
    """

    def __init__(self, like: Tensor, rows: int):
        super().__init__(like, rows)
        columns, tokens, heads, _ = self.sizes
        self.sizes = (columns, rows, tokens, heads)
        self.steps = (self.steps[0], self.steps[0], self.steps[1])


def _step(like: Tensor) -> int:
    """Elements from row to row; of a single row, as many as TMA could take."""
    rows, columns = like.shape
    return like.stride(0) if rows > 1 else -(-columns * like.element_size() // 16) * 16 // like.element_size()


def encode(
    address: int, dtype: torch.dtype, sizes: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    """The tensor map of a tensor that is moved in boxes, swizzled by 128 bytes (by 64, if rows of a box have that many);
    dimensions from the innermost on. The address, and the steps (bytes from one element to the next along every dimension but
    the first), are multiples of 16. Raises CudaError for what the driver refuses.

    L2 fetches 256 bytes at a time, or 128 where rows do not begin on lines: 231 µs in place of 245 for 4104³.

    Source: CUDA Driver API, ``cuTensorMapEncodeTiled``. It is called by its address, since what ``cuda-bindings`` wraps lies
    on 16 bytes in some versions where the driver's compiler assumed 64 (NVIDIA/cuda-python, pull request 1692).
    """
    kind = driver()
    room = (ctypes.c_ubyte * 256)()  # a structure that lies on 128 bytes has to be looked for
    made = TensorMap.from_buffer(room, -ctypes.addressof(room) % 128)
    rank, many, number = len(sizes), ctypes.c_uint64, ctypes.c_uint32
    status = _encode_tiled()(
        ctypes.addressof(made),
        int(getattr(kind.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{NAMES[dtype]}")),
        rank,
        address,
        (many * rank)(*sizes),
        (many * (rank - 1))(*steps),
        (number * rank)(*box),
        (number * rank)(*[1] * rank),
        int(kind.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(kind.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{64 if box[0] * dtype.itemsize == 64 else 128}B")),
        int(getattr(kind.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{128 if steps[0] % 128 else 256}B")),
        int(kind.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    if status:
        shape = " × ".join(map(str, reversed(sizes)))
        raise CudaError(f"cuTensorMapEncodeTiled of a {shape} matrix: {kind.CUresult(status).name}")
    return made


@functools.cache
def _encode_tiled() -> Callable[..., int]:
    status, address, _ = driver().cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0)
    if int(status) or not address:
        raise CudaError(f"the driver has no cuTensorMapEncodeTiled: {status.name}")
    number, pointer = ctypes.c_uint32, ctypes.c_void_p
    return ctypes.CFUNCTYPE(ctypes.c_int, pointer, number, number, *[pointer] * 5, *[number] * 4)(int(address))


def map_why_not(name: str, t: Tensor, size: int, across: bool) -> str:
    """Why TMA cannot take a matrix [rows, columns], or [matrices, rows, columns] (an empty string when it can). Matrices may
    be one and the same, 0 bytes apart."""
    inner = -2 if across else -1
    if t.stride(inner) != 1 and t.shape[inner] > 1:
        return f"'{name}' has no contiguous dimension"
    steps: list[Any] = [t.stride(d) for d in range(t.ndim) if d % t.ndim != inner % t.ndim and t.shape[d] > 1]
    if any(s * size % 16 for s in steps) or not pointer_aligned(t):
        return f"'{name}' has rows that do not begin on 16 bytes, which TMA wants"
    rows = -3 - inner
    if min(steps, default=0) < 0 or (t.stride(rows) == 0 and t.shape[rows] > 1) or max(t.shape) > 2**31 - 2**10:
        return f"'{name}' has strides or sizes that TMA cannot take"
    return ""
