"""Registers as 64 bits each, and values of PTX's types of them; where the ranges of addresses begin."""

from typing import Any

import numpy as np

SHARED, LOCAL, CONST, BUFFERS = 1 << 24, 1 << 28, 1 << 30, 1 << 40
SPAN = 36  # a buffer of global memory has 2**36 addresses
POISON = 0x7FC0_7FC0_7FC0_7FC0  # what was never written: NaN as float and half, no small integer
TYPES: dict[str, Any] = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16,
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip


class Unsupported(Exception):
    """An instruction that this interpreter does not know."""


def bits(values: Any) -> Any:
    """Values as 64 bits each, small ones in the low bits."""
    if values.dtype == bool:
        return values.astype(np.uint64)
    return (
        values.view(f"u{values.itemsize}").astype(np.uint64) if values.dtype.kind in "fiu" else values.astype(np.uint64)
    )


def typed(register: Any, kind: str) -> Any:
    of = np.dtype(TYPES[kind])
    return register.astype(f"u{of.itemsize}").view(of)
