"""What each instruction does: ``EXECUTE[name](machine, instruction, threads)``."""

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from weft.learn.ptx import problems
from weft.learn.ptx.module import Instruction
from weft.learn.ptx.values import CONST, LOCAL, POISON, TYPES, Unsupported, bits

EXECUTE: dict[str, Callable[[Any, Instruction, Any], None]] = {}
WARP_WIDE = {"shfl", "vote", "redux", "match"}


def executes(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for name in names:
            EXECUTE[name] = function
        return function

    return register


@executes("mov", "cvta")
def _mov(m: Any, i: Instruction, at: Any) -> None:
    to, of = i.operands[:2]
    kind = i.mods[-1]
    if to.startswith("{"):
        parts = [p.strip() for p in to.strip("{}").split(",")]
        whole, width = bits(m.get(of, kind, at)), 8 * np.dtype(TYPES[kind]).itemsize // len(parts)
        for n, part in enumerate(parts):
            m.set(part, (whole >> np.uint64(n * width)) & np.uint64((1 << width) - 1), at)
    elif of.startswith("{"):
        parts = [p.strip() for p in of.strip("{}").split(",")]
        width = 8 * np.dtype(TYPES[kind]).itemsize // len(parts)
        whole = np.zeros(len(at), np.uint64)
        for n, part in enumerate(parts):
            whole |= bits(m.get(part, f"u{width}", at)) << np.uint64(n * width)
        m.set(to, whole, at)
    else:
        m.set(to, m.get(of, "pred" if kind == "pred" else kind, at), at)


def _spread(operand: str) -> list[str]:
    return [p.strip() for p in operand.strip("{}").split(",")]


@executes("ld", "ldu")
def _ld(m: Any, i: Instruction, at: Any) -> None:
    kind, registers = i.mods[-1], _spread(i.operands[0])
    if "param" in i.mods:
        name = i.operands[1].strip("[]").split("+")[0]
        m.set(registers[0], np.full(len(at), m.params.get(name, 0), np.uint64), at)  # 0: what a call returns
        return
    width = np.dtype(TYPES[kind]).itemsize
    address = m.addresses(i.operands[1], at)
    if "local" in i.mods or (LOCAL <= int(address[0]) < CONST):
        for n, register in enumerate(registers):
            lanes = (address - LOCAL + n * width)[:, None] + np.arange(width)
            m.set(register, np.ascontiguousarray(m.local[at[:, None], lanes]).view(TYPES[kind])[:, 0], at)
        return
    inside, memory, offset = m.access(i, at, address, width * len(registers), "read")
    for n, register in enumerate(registers):
        m.set(register, np.full(len(at), POISON, np.uint64) & np.uint64((1 << 8 * width) - 1), at)
        if memory is not None and len(inside):
            lanes = (offset + n * width)[:, None] + np.arange(width)
            values = np.ascontiguousarray(memory.data[lanes]).view(TYPES[kind])[:, 0]
            m.set(register, values.astype(np.int64) if kind[0] == "s" else values, inside)


@executes("st")
def _st(m: Any, i: Instruction, at: Any) -> None:
    kind, registers = i.mods[-1], _spread(i.operands[1])
    if "param" in i.mods:
        m.passed.setdefault(i.operands[0].strip("[]").split("+")[0], np.zeros(m.T, np.uint64))[at] = bits(
            m.get(registers[0], kind, at)
        )
        return
    width = np.dtype(TYPES[kind]).itemsize
    address = m.addresses(i.operands[0], at)
    if "local" in i.mods or (LOCAL <= int(address[0]) < CONST):
        for n, register in enumerate(registers):
            lanes = (address - LOCAL + n * width)[:, None] + np.arange(width)
            m.local[at[:, None], lanes] = m.get(register, kind, at)[:, None].view(np.uint8)
        return
    inside, memory, offset = m.access(i, at, address, width * len(registers), "write")
    if memory is None or not len(inside):
        return
    for n, register in enumerate(registers):
        lanes = (offset + n * width)[:, None] + np.arange(width)
        memory.data[lanes] = m.get(register, kind, inside)[:, None].view(np.uint8)


_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda c, v: c + v, "min": min, "max": max, "and": lambda c, v: c & v, "or": lambda c, v: c | v,
    "xor": lambda c, v: c ^ v, "exch": lambda c, v: v, "inc": lambda c, v: 0 if c >= v else c + 1,
    "dec": lambda c, v: v if c == 0 or c > v else c - 1,
}  # fmt: skip


@executes("atom", "red")
def _atom(m: Any, i: Instruction, at: Any) -> None:
    kind = i.mods[-1]
    operation = next(o for o in i.mods if o == "cas" or o in _ATOMIC)
    operands = list(i.operands)
    to = operands.pop(0) if i.op == "atom" else "_"
    width = np.dtype(TYPES[kind]).itemsize
    address = m.addresses(operands[0], at)
    inside, memory, offset = m.access(i, at, address, width, "atomic")
    if memory is None or not len(inside):
        return
    values = [m.get(o, kind, inside) for o in operands[1:]]
    old = np.zeros(len(inside), TYPES[kind])
    for n in m.rng.permutation(len(inside)):  # in any order
        cell = memory.data[offset[n] : offset[n] + width].view(TYPES[kind])
        old[n] = cell[0]
        v = values[0][n]
        new = (values[1][n] if cell[0] == v else cell[0]) if operation == "cas" else _ATOMIC[operation](cell[0], v)
        cell[0] = new
    m.set(to, old, inside)
    if kind.startswith("f"):
        m.counts.flops += len(inside)


def _two(m: Any, i: Instruction, at: Any, function: Callable[[Any, Any], Any], flops: int = 0) -> None:
    kind = i.mods[-1]
    result = function(m.get(i.operands[1], kind, at), m.get(i.operands[2], kind, at))
    if "sat" in i.mods:
        result = np.clip(result, 0, 1)
    m.set(i.operands[0], result, at)
    if kind.startswith("f"):
        m.counts.flops += flops * len(at)


def _quotient(a: Any, b: Any) -> Any:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    q = np.floor_divide(a, safe)
    if a.dtype.kind == "i":
        q = q + ((a % safe != 0) & ((a < 0) != (b < 0))).astype(a.dtype)
    return np.where(b == 0, np.array(-1).astype(a.dtype), q)


@executes("add")
def _add(m: Any, i: Instruction, at: Any) -> None:
    _two(m, i, at, lambda a, b: a + b, 1)


@executes("sub")
def _sub(m: Any, i: Instruction, at: Any) -> None:
    _two(m, i, at, lambda a, b: a - b, 1)


@executes("div")
def _div(m: Any, i: Instruction, at: Any) -> None:
    _two(m, i, at, _quotient, 1)


@executes("rem")
def _rem(m: Any, i: Instruction, at: Any) -> None:
    _two(m, i, at, lambda a, b: (a - _quotient(a, b) * b).astype(a.dtype))


@executes("min", "max")
def _minmax(m: Any, i: Instruction, at: Any) -> None:
    kind = i.mods[-1]
    pick: Any = {("min", True): np.fmin, ("min", False): np.minimum, ("max", True): np.fmax, ("max", False): np.maximum}
    _two(m, i, at, pick[i.op, kind.startswith("f") and "NaN" not in i.mods], 1)


_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _product(m: Any, i: Instruction, at: Any) -> Any:
    kind = i.mods[-1]
    a, b = (m.get(o, kind, at) for o in i.operands[1:3])
    if "wide" in i.mods:
        return a.astype(TYPES[_WIDE[kind]]) * b.astype(TYPES[_WIDE[kind]])
    if "hi" in i.mods:
        bits = 8 * a.itemsize
        return np.array([(int(x) * int(y)) >> bits for x, y in zip(a, b, strict=True)], dtype=object).astype(
            TYPES[kind]
        )
    return a * b


@executes("mul", "mul24")
def _mul(m: Any, i: Instruction, at: Any) -> None:
    result = _product(m, i, at)
    m.set(i.operands[0], np.clip(result, 0, 1) if "sat" in i.mods else result, at)
    if i.mods[-1].startswith("f"):
        m.counts.flops += len(at)


@executes("mad", "fma")
def _mad(m: Any, i: Instruction, at: Any) -> None:
    kind = i.mods[-1]
    if kind.startswith("f"):
        a, b, c = (m.get(o, kind, at) for o in i.operands[1:4])
        exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)  # one rounding, nearly always
        result = exact.astype(TYPES[kind])
        if "rm" in i.mods:
            result = np.where(result > exact, np.nextafter(result, np.array(-np.inf, result.dtype)), result)
        m.set(i.operands[0], np.clip(result, 0, 1) if "sat" in i.mods else result, at)
        m.counts.flops += 2 * len(at)
    else:
        product = _product(m, i, at)
        m.set(i.operands[0], product + m.get(i.operands[3], _WIDE[kind] if "wide" in i.mods else kind, at), at)


@executes("and", "or", "xor")
def _bitwise(m: Any, i: Instruction, at: Any) -> None:
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[i.op]
    kind = i.mods[-1]
    m.set(i.operands[0], function(m.get(i.operands[1], kind, at), m.get(i.operands[2], kind, at)), at)


@executes("not")
def _not(m: Any, i: Instruction, at: Any) -> None:
    a = m.get(i.operands[1], i.mods[-1], at)
    m.set(i.operands[0], ~a, at)


@executes("shl", "shr")
def _shift(m: Any, i: Instruction, at: Any) -> None:
    kind = i.mods[-1]
    a, by = m.get(i.operands[1], kind, at), m.get(i.operands[2], "u32", at).astype(np.int64)
    bits = 8 * a.itemsize
    if i.op == "shl":
        result = np.where(by >= bits, 0, a << np.minimum(by, bits - 1).astype(a.dtype))
    else:
        result = a >> np.minimum(by, bits - 1).astype(a.dtype)
        if a.dtype.kind == "u":
            result = np.where(by >= bits, 0, result)
    m.set(i.operands[0], result.astype(a.dtype), at)


@executes("shf")
def _funnel(m: Any, i: Instruction, at: Any) -> None:
    low, high, by = (m.get(o, "u32", at).astype(np.uint64) for o in i.operands[1:4])
    by = by % 32 if "wrap" in i.mods else np.minimum(by, 32)
    whole = high << np.uint64(32) | low
    result = (whole << by) >> np.uint64(32) if "l" in i.mods else whole >> by
    m.set(i.operands[0], result.astype(np.uint32), at)


@executes("lop3")
def _lop3(m: Any, i: Instruction, at: Any) -> None:
    a, b, c = (m.get(o, "u32", at) for o in i.operands[1:4])
    table, result = int(i.operands[4], 0), np.zeros(len(at), np.uint32)
    for n in range(8):
        if table >> n & 1:
            result |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    m.set(i.operands[0], result, at)


@executes("bfe")
def _bfe(m: Any, i: Instruction, at: Any) -> None:
    kind = i.mods[-1]
    a = m.get(i.operands[1], kind, at)
    first, length = (m.get(o, "u32", at).astype(np.int64) & 255 for o in i.operands[2:4])
    result = (a.astype(np.int64) >> first) & ((1 << length) - 1)
    if kind.startswith("s"):
        result = np.where((length > 0) & (result >> np.maximum(length - 1, 0) & 1 == 1), result - (1 << length), result)
    m.set(i.operands[0], result.astype(a.dtype), at)


@executes("bfi")
def _bfi(m: Any, i: Instruction, at: Any) -> None:
    a, b = (m.get(o, i.mods[-1], at).astype(np.uint64) for o in i.operands[1:3])
    first, length = (m.get(o, "u32", at).astype(np.uint64) for o in i.operands[3:5])
    mask = ((np.uint64(1) << length) - np.uint64(1)) << first
    m.set(i.operands[0], (((a << first) & mask) | (b & ~mask)).astype(TYPES[i.mods[-1]]), at)


@executes("prmt")
def _prmt(m: Any, i: Instruction, at: Any) -> None:
    a, b, choose = (m.get(o, "u32", at).astype(np.uint64) for o in i.operands[1:4])
    whole, result = b << np.uint64(32) | a, np.zeros(len(at), np.uint64)
    for n in range(4):
        picked = choose >> np.uint64(4 * n) & np.uint64(15)
        byte = whole >> ((picked & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
        byte = np.where(picked & np.uint64(8), np.where(byte & np.uint64(128), 255, 0).astype(np.uint64), byte)
        result |= byte << np.uint64(8 * n)
    m.set(i.operands[0], result.astype(np.uint32), at)


@executes("popc", "clz", "brev")
def _bits_of(m: Any, i: Instruction, at: Any) -> None:
    a = m.get(i.operands[1], i.mods[-1], at)
    bits = 8 * a.itemsize
    function = {
        "popc": lambda x: bin(x).count("1"),
        "clz": lambda x: bits - x.bit_length(),
        "brev": lambda x: int(f"{x:0{bits}b}"[::-1], 2),
    }[i.op]
    m.set(i.operands[0], np.array([function(int(x)) for x in a.view(f"u{a.itemsize}")], np.uint64), at)


_FUNCTIONS: dict[str, Any] = {
    "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x,
    "ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip


@executes("neg", "abs", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh", "copysign")
def _one(m: Any, i: Instruction, at: Any) -> None:
    kind = i.mods[-1]
    a = m.get(i.operands[1], kind, at)
    if i.op == "copysign":
        m.set(i.operands[0], np.copysign(m.get(i.operands[2], kind, at), a), at)
        return
    m.set(i.operands[0], _FUNCTIONS[i.op](a).astype(a.dtype), at)
    if i.op not in ("neg", "abs"):
        m.counts.flops += len(at)


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b,
    "equ": lambda a, b: ~(a < b) & ~(a > b), "neu": lambda a, b: ~(a == b), "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b), "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip


@executes("setp")
def _setp(m: Any, i: Instruction, at: Any) -> None:
    kind = i.mods[-1]
    result = _COMPARE[i.mods[0]](m.get(i.operands[1], kind, at), m.get(i.operands[2], kind, at))
    if len(i.operands) > 3:
        with_ = i.operands[3]
        other = m.get(with_.lstrip("!"), "pred", at) ^ with_.startswith("!")
        result = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[i.mods[1]](result, other)
    yes, _, no = i.operands[0].partition("|")
    m.set(yes, result, at)
    if no:
        m.set(no, ~result, at)


@executes("selp")
def _selp(m: Any, i: Instruction, at: Any) -> None:
    kind = i.mods[-1]
    yes, no = (m.get(o, kind, at) for o in i.operands[1:3])
    m.set(i.operands[0], np.where(m.get(i.operands[3], "pred", at), yes, no), at)


def _clamped(a: Any, to: Any) -> Any:
    """Whole numbers as integers; NaN is 0, what is out of range the nearest."""
    low, high = np.iinfo(to).min, np.iinfo(to).max
    inside = (a > low) & (a < float(high))
    return np.where(
        inside,
        np.where(inside, a, 0).astype(to),
        np.where(a >= float(high), high, np.where(a <= low, low, 0)).astype(to),
    )


@executes("cvt")
def _cvt(m: Any, i: Instruction, at: Any) -> None:
    to, of = i.mods[-2:]
    a = m.get(i.operands[1], of, at)
    for mod, function in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        if mod in i.mods and a.dtype.kind == "f":
            a = function(a)
    if a.dtype.kind == "f" and to[0] in "usb":
        result = _clamped(a.astype(np.float64), TYPES[to])
    elif "sat" in i.mods and to.startswith("f"):
        result = np.clip(np.nan_to_num(a), 0, 1).astype(TYPES[to])
    elif "sat" in i.mods:
        result = np.clip(a, np.iinfo(TYPES[to]).min, np.iinfo(TYPES[to]).max).astype(TYPES[to])
    else:
        result = a.astype(TYPES[to])
    m.set(i.operands[0], result.astype(np.int32) if to in ("s8", "s16") else result, at)


_FORMAT = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(hh|h|ll|l|z|j)?([diouxXcsfFeEgGp%])")
PRINTED = 20_000  # characters of a launch


@executes("call")
def _call(m: Any, i: Instruction, at: Any) -> None:
    """printf, the one function that is not inlined; its arguments lie in local memory, each aligned to its size."""
    words = [o.strip("()") for o in i.operands]
    if "vprintf" not in words:
        raise Unsupported(f"line {i.line}: a call of {words[1] if len(words) > 1 else 'a function'}")
    text, where = (m.passed[word] for word in [w for w in words if w][2:4])
    for thread in at.tolist():
        place = int(where[thread]) - LOCAL

        def take(code: str, thread: int = thread) -> Any:
            nonlocal place
            size = struct.calcsize(code)
            place = -(-place // size) * size + size
            return struct.unpack(code, m.local[thread, place - size : place].tobytes())[0]

        def one(found: re.Match[str]) -> str:
            flags, length, kind = found.groups()
            if kind == "%":
                return "%"
            if kind in "fFeEgG":
                return f"%{flags}{kind}" % take("d")
            if kind == "s":
                return f"%{flags}s" % m.string(take("Q"))
            if kind == "p":
                return hex(take("Q"))
            code = "q" if length in ("l", "ll", "z", "j") else "i"
            value = take(code.upper() if kind in "ouxX" else code)
            return f"%{flags}{'d' if kind in 'iu' else kind}" % (
                value % (1 << 32) if kind == "u" and code == "i" else value
            )

        if len(m.printed) < PRINTED:
            m.printed += _FORMAT.sub(one, m.string(int(text[thread])))


@executes("membar", "fence", "nanosleep", "griddepcontrol", "bar")
def _nothing(m: Any, i: Instruction, at: Any) -> None:
    pass


@executes("activemask")
def _activemask(m: Any, i: Instruction, at: Any) -> None:
    mask = np.zeros(m.T, np.uint32)
    for warp in np.unique(m.warps[at]):
        mask[m.warps == warp] = sum(1 << int(lane) for lane in m.lane[at[m.warps[at] == warp]])
    m.set(i.operands[0], mask[at], at)


@executes("shfl")
def _shfl(m: Any, i: Instruction, at: Any) -> None:
    mode = next(x for x in i.mods if x in ("up", "down", "bfly", "idx"))
    to, _, valid_to = i.operands[0].partition("|")
    values, by, clamp = (m.get(o, "u32", at).astype(np.int64) for o in i.operands[1:4])
    lane = m.lane[at]
    segment = clamp >> 8 & 31
    first = lane & segment
    last = first | (clamp & 31 & ~segment)
    source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
    valid = source >= (lane & segment) if mode == "up" else source <= last
    source = np.where(valid, source, lane)
    table = np.full(m.T, -1, np.int64)
    table[at] = np.arange(len(at))
    thread = m.warps[at] * 32 + source
    there = table[np.minimum(thread, m.T - 1)]
    absent = (thread >= m.T) | (there < 0)
    if absent.any():
        bad = int(np.flatnonzero(absent)[0])
        m.problem(("absent", i.line), problems.absent_lane(i.line, m.where(at[bad]), int(source[bad])))
    m.set(to, np.where(absent, POISON & 0xFFFFFFFF, values[np.where(absent, 0, there)]).astype(np.uint32), at)
    if valid_to:
        m.set(valid_to, valid, at)


_REDUCE: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@executes("vote", "redux")
def _vote(m: Any, i: Instruction, at: Any) -> None:
    kind = i.mods[-1]
    values = m.get(i.operands[1].lstrip("!"), "pred" if i.op == "vote" else kind, at)
    if i.operands[1].startswith("!"):
        values = ~values
    result = np.zeros(m.T, np.uint64)
    for warp in np.unique(m.warps[at]):
        inside = m.warps[at] == warp
        lanes, of = m.lane[at[inside]], values[inside]
        if i.op == "redux":
            how = next(x for x in i.mods if x in ("add", "min", "max", "and", "or", "xor"))
            found: Any = bits(np.array([_REDUCE[how].reduce(of)], of.dtype))[0]
        elif "ballot" in i.mods:
            found = sum(1 << int(lane) for lane, v in zip(lanes, of, strict=True) if v)
        else:
            found = int(of.all() if "all" in i.mods else of.any() if "any" in i.mods else of.all() or not of.any())
        result[m.warps == warp] = found
    m.set(i.operands[0], result[at] if kind != "pred" else result[at].astype(bool), at)
