"""Runs the threads of a kernel, and looks at each access."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.learn.language import Text
from weft.learn.ptx import problems
from weft.learn.ptx.instructions import EXECUTE, WARP_WIDE
from weft.learn.ptx.memory import SEVERAL, Marks, Memory
from weft.learn.ptx.module import Entry, Instruction, Module
from weft.learn.ptx.values import BUFFERS, CONST, LOCAL, POISON, SHARED, SPAN, TYPES, Unsupported, bits, typed


@dataclass
class Counts:
    """Of a launch. ``sectors``: 32 bytes of global memory, a warp's access at a time; ``conflicts``: extra passes over shared
    memory; ``constant_replays``: extra passes over constant memory, which gives a warp one word at a time; ``issued``:
    instructions of warps, ``lanes``: of threads (equal to 32 · issued without divergence)."""

    sectors_read: int = 0
    sectors_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    shared_accesses: int = 0
    conflicts: int = 0
    constant_replays: int = 0
    atomics_global: int = 0
    atomics_shared: int = 0
    flops: int = 0
    barriers: int = 0
    issued: int = 0
    lanes: int = 0


@dataclass
class Launch:
    """What a launch did: the first problems, and counts."""

    problems: list[Text]
    counts: Counts
    printed: str  # by printf
    trace: list[dict[str, Any]]  # accesses of global memory by the first warps


class Stopped(Exception):
    """The kernel did not end within the time limit; ``line`` says where it was."""

    def __init__(self, line: int) -> None:
        super().__init__(f"the kernel did not end; it was at line {line}")
        self.line = line


class Machine:
    """Runs one kernel."""

    def __init__(
        self, module: Module, entry: Entry, args: Sequence[Any], names: Sequence[str], grid: tuple[int, int, int],
        block: tuple[int, int, int], dynamic_bytes: int, seed: int, time_limit_s: float, traced: int,
    ) -> None:  # fmt: skip
        self.module, self.entry, self.grid, self.block = module, entry, grid, block
        self.counts = Counts()
        self.problems: list[Text] = []
        self.said: set[tuple[Any, ...]] = set()
        self.printed = ""
        self.trace: list[dict[str, Any]] = []
        self.passed: dict[str, Any] = {}  # parameters of the next call, by name, of all threads
        self.rng = np.random.default_rng(seed)
        self.ends = time.monotonic() + time_limit_s
        self.traced = traced
        self.forced = False  # whether a warp goes on without lanes that never come
        self.T = block[0] * block[1] * block[2]
        self.threads = np.arange(self.T)
        self.warps = self.threads // 32
        self.lane = self.threads % 32
        self.buffers: list[Memory] = []
        self.params: dict[str, int] = {}
        if len(args) != len(entry.params):
            raise TypeError(f"the kernel has {len(entry.params)} parameters, and {len(args)} arguments came")
        for (param, kind), value, name in zip(entry.params, args, names, strict=True):
            if isinstance(value, np.ndarray):
                self.params[param] = BUFFERS + (len(self.buffers) << SPAN)
                if not value.flags.c_contiguous:
                    raise ValueError(f"{name} is not contiguous; pass numpy.ascontiguousarray({name})")
                data = value.reshape(-1).view(np.uint8)
                self.buffers.append(Memory(name, data, value.itemsize, value.itemsize, value.shape))
            else:
                self.params[param] = int(bits(np.array([value], TYPES[kind]))[0])
        shared = entry.shared_bytes
        if entry.dynamic:
            shared = -(-shared // 16) * 16
            entry.shared[entry.dynamic] = SHARED + shared
        self.shared_bytes = shared + dynamic_bytes
        self.symbols = {**entry.shared, **entry.local, **{n: a for n, (a, _) in module.constants.items()}}
        end = max((a + len(d) for a, d in module.constants.values()), default=CONST)
        constants = bytearray(end - CONST)
        for address, content in module.constants.values():
            constants[address - CONST : address - CONST + len(content)] = content
        self.constants = Memory("constant memory", np.frombuffer(constants, np.uint8).copy(), 1, 1)

    def run(self) -> Launch:
        order = np.arange(self.grid[0] * self.grid[1] * self.grid[2])
        self.rng.shuffle(order)  # a GPU promises no order of blocks
        for number in order:
            self.run_block(int(number))
        return Launch(self.problems, self.counts, self.printed, self.trace)

    def run_block(self, number: int) -> None:
        gx, gy, _ = self.grid
        bx, by, _ = self.block
        self.number = number
        self.at_block = (number % gx, number // gx % gy, number // gx // gy)
        self.special = {
            "%tid.x": self.threads % bx, "%tid.y": self.threads // bx % by, "%tid.z": self.threads // bx // by,
            "%laneid": self.lane, "%warpid": self.warps,
        }  # fmt: skip
        for axis, name in enumerate("xyz"):
            self.special[f"%ntid.{name}"] = np.full(self.T, self.block[axis])
            self.special[f"%ctaid.{name}"] = np.full(self.T, self.at_block[axis])
            self.special[f"%nctaid.{name}"] = np.full(self.T, self.grid[axis])
        self.registers: dict[str, Any] = {}
        self.pc = np.zeros(self.T, np.int64)
        self.state = np.zeros(self.T, np.int8)  # 0 runs, 1 waits at a barrier, 2 waits for its warp, 3 has ended
        self.epoch = 0
        self.warp_epoch = np.zeros(self.T, np.int64)
        poison = np.full(-(-self.shared_bytes // 8) or 1, POISON, np.uint64).view(np.uint8)[: self.shared_bytes].copy()
        self.shared = Memory("shared memory", poison, 1, 4)
        self.local = np.zeros((self.T, self.entry.local_bytes), np.uint8)
        code = self.entry.code
        steps = 0
        while True:
            running = self.state == 0
            if not running.any():
                if not self.release():
                    return
                continue
            pc = int(self.pc[running].min())
            here = (self.pc == pc) & (running | (self.state == 2))
            self.state[here] = 0
            steps += 1
            if steps % 512 == 0 and time.monotonic() > self.ends:
                raise Stopped(code[pc].line if pc < len(code) else 0)
            if pc >= len(code):
                self.state[here] = 3
                continue
            self.step(code[pc], np.flatnonzero(here))

    def release(self) -> bool:
        """Lets waiting threads go on; False when all have ended."""
        waiting = self.state != 3
        if not waiting.any():
            return False
        stuck = self.state == 2
        if stuck.any():
            first = int(np.flatnonzero(stuck)[0])
            instruction = self.entry.code[int(self.pc[first])]
            self.problem(("mask", instruction.line), problems.lanes_never_come(instruction.line, first))
            self.forced = True
            self.state[stuck] = 0
            pc = int(self.pc[first])
            self.step(instruction, np.flatnonzero(stuck & (self.pc == pc)))
            self.forced = False
            return True
        at = {int(p) for p in self.pc[waiting]}
        line = self.entry.code[min(at)].line
        if len(at) > 1:
            lines = sorted({self.entry.code[p].line for p in at})
            self.problem(("barriers", line), problems.different_barriers(lines))
        elif not waiting.all():
            gone, stays = int(np.flatnonzero(~waiting)[0]), int(np.flatnonzero(waiting)[0])
            self.problem(("left", line), problems.left_before_barrier(line, stays, gone))
        self.pc[waiting] += 1
        self.state[waiting] = 0
        self.epoch += 1
        self.counts.barriers += 1
        return True

    def problem(self, key: tuple[Any, ...], text: Text) -> None:
        """Notes a problem, once for each line; five are enough."""
        if key not in self.said and len(self.problems) < 5:
            self.said.add(key)
            self.problems.append(text)

    # ---- operands

    def get(self, operand: str, kind: str, at: Any) -> Any:
        """Values of an operand, as the type, for the threads ``at``."""
        if operand.startswith("%") and operand not in self.special:
            register = self.registers.get(operand)
            values = np.zeros(len(at), np.uint64) if register is None else register[at]
            return values.astype(bool) if kind == "pred" else typed(values, kind)
        if operand in self.special:
            return typed(self.special[operand][at].astype(np.uint64), kind)
        if operand in self.symbols:
            value = self.symbols[operand]
        elif re.match(r"0[fF][0-9a-fA-F]{8}$", operand):
            return np.full(len(at), np.frombuffer(bytes.fromhex(operand[2:])[::-1], np.float32)[0])
        elif re.match(r"0[dD][0-9a-fA-F]{16}$", operand):
            return np.full(len(at), np.frombuffer(bytes.fromhex(operand[2:])[::-1], np.float64)[0])
        elif operand in ("WARP_SZ", "%WARP_SZ"):
            value = 32
        elif re.match(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$", operand):
            value = int(operand.rstrip("U"), 0)
        else:
            raise Unsupported(f"the operand {operand}")
        if kind == "pred":
            return np.full(len(at), bool(value))
        return typed(np.full(len(at), value % (1 << 64), np.uint64), kind)

    def set(self, name: str, values: Any, at: Any) -> None:
        """Sets a register for the threads ``at``."""
        if name == "_":
            return
        register = self.registers.get(name)
        if register is None:
            register = self.registers[name] = np.zeros(self.T, np.uint64)
        register[at] = bits(np.asarray(values))

    def string(self, address: int) -> str:
        """A text constant."""
        rest = self.constants.data[address - CONST :].tobytes()
        return rest.split(b"\0")[0].decode(errors="replace")

    # ---- a step

    def step(self, i: Instruction, at: Any) -> None:
        counts = self.counts
        counts.issued += len(np.unique(self.warps[at]))
        counts.lanes += len(at)
        everyone = at
        if i.guard:
            taken = self.get(i.guard.lstrip("!"), "pred", at) ^ i.guard.startswith("!")
            at = at[taken]
        if i.op == "bra":
            target = self.entry.labels[i.operands[0]]
            self.pc[everyone] += 1
            self.pc[at] = target
            return
        if i.op in ("ret", "exit"):
            self.pc[everyone] += 1
            self.state[at] = 3
            return
        if i.op in ("bar", "barrier") and "warp" not in i.mods:
            if "red" in i.mods:
                raise Unsupported(f"line {i.line}: __syncthreads_count, _and, _or")
            self.pc[np.setdiff1d(everyone, at)] += 1
            self.state[at] = 1
            return
        if len(at):
            if i.op in WARP_WIDE or (i.op == "bar" and "warp" in i.mods):
                at = self.together(i, at)
                everyone = np.setdiff1d(everyone, np.flatnonzero(self.state == 2))
            if len(at):
                run = EXECUTE.get(i.op)
                if run is None:
                    raise Unsupported(f"line {i.line}: the instruction {'.'.join((i.op, *i.mods))}")
                with np.errstate(all="ignore"):
                    run(self, i, at)
        self.pc[everyone] += 1

    def together(self, i: Instruction, at: Any) -> Any:
        """Of threads at a warp-wide instruction those whose warp is complete, as the mask says; the others wait."""
        masks = self.get(i.operands[-1], "u32", at)
        ready = []
        for warp in np.unique(self.warps[at]):
            inside = self.warps[at] == warp
            here = at[inside]
            named = {lane for lane in range(32) if int(masks[inside][0]) >> lane & 1}
            missing = named - set(self.lane[here].tolist())
            missing = {lane for lane in missing if warp * 32 + lane < self.T}
            if not missing or self.forced:
                ready.append(here)
                self.warp_epoch[self.warps == warp] += 1
            else:
                self.state[here] = 2
        return np.concatenate(ready) if ready else np.array([], np.int64)

    # ---- memory

    def memory_of(self, address: int) -> tuple[Memory | None, int]:
        if address >= BUFFERS - (1 << (SPAN - 1)):
            number = (address - BUFFERS + (1 << (SPAN - 1))) >> SPAN  # also a little before its begin
            if number < len(self.buffers):
                return self.buffers[number], BUFFERS + (number << SPAN)
        elif address >= CONST:
            return self.constants, CONST
        elif SHARED - (1 << 20) <= address < LOCAL:
            return self.shared, SHARED
        return None, 0

    def addresses(self, operand: str, at: Any) -> Any:
        inner = operand.strip("[]").replace(" ", "")
        base, _, offset = inner.partition("+")
        kind = "u32" if re.match(r"%r\d", base) else "u64"
        found = self.get(base, kind, at).astype(np.int64)
        return found + (int(offset) if offset else 0)

    def access(self, i: Instruction, at: Any, address: Any, size: int, what: str) -> tuple[Any, Memory | None, Any]:
        """Checks and counts one access of ``size`` bytes a thread; returns (threads within bounds, their memory, offsets)."""
        memory, base = self.memory_of(int(address[0]))
        if memory is None:
            self.problem(
                ("outside", i.line, ""), problems.outside(i.line, self.where(at[0]), what, problems.no_memory())
            )
            return at[:0], None, address[:0]
        if memory in self.buffers and len(np.unique((address - BUFFERS + (1 << (SPAN - 1))) >> SPAN)) > 1:
            raise Unsupported(f"line {i.line}: threads that access different arrays by one instruction")
        offset = address - base
        inside = (offset >= 0) & (offset + size <= len(memory.data))
        if not inside.all():
            bad = int(np.flatnonzero(~inside)[0])
            self.outside(i, at[bad], memory, int(offset[bad]), what)
        self.count(memory, at[inside], address[inside], size, what)
        at, offset = at[inside], offset[inside]
        if len(at) and (offset % size).any():
            bad = int(np.flatnonzero(offset % size)[0])
            text = problems.misaligned(i.line, self.where(at[bad]), size, int(offset[bad]), memory.name)
            self.problem(("aligned", i.line), text)
        if self.traced and memory in self.buffers:
            self.keep(i, memory, at, offset, size, what)
        if len(at) and memory is not self.constants:
            self.races(i, memory, at, offset, size, what)
        return at, memory, offset

    def keep(self, i: Instruction, memory: Memory, at: Any, offset: Any, size: int, what: str) -> None:
        warps = self.number * -(-self.T // 32) + self.warps[at]
        each = max(1, size // memory.itemsize)
        for warp in np.unique(warps):
            if warp < self.traced:
                first = offset[warps == warp] // memory.itemsize
                kind = {"read": "load", "write": "store"}.get(what, what)
                elements = (first[:, None] + np.arange(each)).reshape(-1).tolist()
                seen = {"tensor": memory.name, "shape": list(memory.shape), "kind": kind, "elements": elements}
                self.trace.append({**seen, "program": int(warp), "line": i.line})

    def outside(self, i: Instruction, thread: int, memory: Memory, offset: int, what: str) -> None:
        if memory is self.shared:
            place = problems.shared_byte(offset, len(memory.data))
        else:
            place = problems.array_element(memory.name, offset // memory.itemsize, len(memory.data) // memory.itemsize)
        self.problem(("outside", i.line, memory.name), problems.outside(i.line, self.where(thread), what, place))

    def where(self, thread: int, block: int | None = None) -> Text:
        """``(3, 0) of block (1, 0)``."""

        def written(number: int, of: tuple[int, int, int]) -> str:
            at = (number % of[0], number // of[0] % of[1], number // of[0] // of[1])
            used = 3 if of[2] > 1 else 2 if of[1] > 1 else 1
            return f"({', '.join(str(int(x)) for x in at[:used])})"

        t, b = written(thread, self.block), written(self.number if block is None else block, self.grid)
        return Text(f"{t} of block {b}", f"{t}（线程块 {b}）")

    def count(self, memory: Memory, at: Any, address: Any, size: int, what: str) -> None:
        if not len(at):
            return
        counts, warps = self.counts, self.warps[at]
        if memory is self.shared:
            phases = max(1, size // 4)
            group = warps * phases + self.lane[at] // (32 // phases)
            word = np.unique(group << 32 | address // 4)
            per_bank = np.unique((word >> 32) * 32 + word % 32, return_counts=True)
            counts.shared_accesses += len(np.unique(group))
            worst: dict[int, int] = {}
            for key, n in zip((per_bank[0] // 32).tolist(), per_bank[1].tolist(), strict=True):
                worst[key] = max(worst.get(key, 0), n)
            counts.conflicts += sum(worst.values()) - len(worst)
            if what == "atomic":
                counts.atomics_shared += len(at)
        elif memory is self.constants:
            counts.constant_replays += len(np.unique(warps << 40 | address // 4)) - len(np.unique(warps))
        else:
            sectors = len(np.unique(warps << 48 | address // 32)) if size <= 32 else len(at) * size // 32
            if what == "atomic":
                counts.atomics_global += len(at)
            elif what == "read":
                counts.sectors_read += sectors
                counts.bytes_read += len(at) * size
            else:
                counts.sectors_written += sectors
                counts.bytes_written += len(at) * size

    def races(self, i: Instruction, memory: Memory, at: Any, offset: Any, size: int, what: str) -> None:
        units = max(1, size // memory.grain)
        unit = (offset // memory.grain)[:, None] + np.arange(units)
        thread = np.repeat(at, units)
        unit = unit.reshape(-1)
        warp, warp_epoch = self.warps[thread], self.warp_epoch[thread]
        now = (self.number, self.epoch, thread, warp, warp_epoch)
        against = {"read": ("write", "atomic"), "write": ("write", "read", "atomic"), "atomic": ("write", "read")}[what]
        for kind in against:
            marks: Marks = getattr(memory, kind)
            found = marks.races(unit, *now)
            if found.any():
                bad = int(np.flatnonzero(found)[0])
                at_unit = int(unit[bad])
                self.race(i, memory, at_unit, int(thread[bad]), what, kind, marks)
                break
        if what == "write" and len(np.unique(unit)) < len(unit):  # by one instruction
            values, times = np.unique(unit, return_counts=True)
            at_unit = int(values[times > 1][0])
            both = thread[unit == at_unit]
            text = problems.written_at_once(
                i.line, self.where(both[0]), self.where(both[1]), self.element(memory, at_unit)
            )
            self.problem(("race", i.line, i.line), text)
        getattr(memory, what).mark(unit, *now, i.line, joins=what != "write")

    def element(self, memory: Memory, unit: int) -> str:
        if memory is self.shared:
            for name, begin in sorted(self.entry.shared.items(), key=lambda p: -p[1]):
                if unit >= begin - SHARED:
                    return f"{_plain(name)} (shared), byte {unit - (begin - SHARED)}"
            return f"byte {unit} of shared memory"
        return f"{memory.name}[{unit * memory.grain // memory.itemsize}]"

    def race(self, i: Instruction, memory: Memory, unit: int, thread: int, what: str, kind: str, marks: Marks) -> None:
        before, line = int(marks.thread[unit]), int(marks.line[unit])
        block = int(marks.block[unit])
        other = None if SEVERAL in (before, block) else self.where(before, block)
        text = problems.race(i.line, self.where(thread), what, self.element(memory, unit), other, kind, line)
        self.problem(("race", *sorted((i.line, line))), text)


def _plain(mangled: str) -> str:
    """``tile`` of ``_ZZ9transposePKfPfiiE4tile``."""
    found = re.search(r"E(\d+)(\w+)$", mangled)
    return found[2][: int(found[1])] if found else mangled
