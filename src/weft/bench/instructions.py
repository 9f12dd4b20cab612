"""Tensor cores seen plainly: which matrix instructions PTX has, what each becomes on an architecture, and which a kernel uses.

    python -m weft.bench.instructions [OPERATOR] [sm_80 …]

prints both as Markdown, of the operator ``matmul`` and all architectures where none is named; no GPU is needed. An instruction
that PTX accepts need not be one that the machine has: where the assembler plays it with others, or calls a subroutine, the
table says so.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft import registry
from weft.bench.compile_check import tool
from weft.definition import ARCHITECTURES, Declined, Operator, UnknownName
from weft.operators.launch import INTERPRETING, compiling_for

BITS = {
    "f64": 64,
    "f32": 32,
    "s32": 32,
    "tf32": 32,
    "f16": 16,
    "bf16": 16,
    "e4m3": 8,
    "e5m2": 8,
    "s8": 8,
    "s4": 4,
    "b1": 1,
}

# SASS: matrix instructions, what brings their operands, and spilled registers.
MATRIX = r"(?:[HIQBDO]MMA|[HIQB]GMMA|UTC[HIQO]MMA)"
SHOWN = re.compile(rf"\b((?:{MATRIX}|UTMALDG|UTMASTG|LDGSTS|LDSM|STSM|STL|LDL)\b[.A-Zx0-9]*)")


@dataclass(frozen=True)
class MatrixInstruction:
    """A kind of matrix instruction in PTX, by the type of its operands.

    Source: PTX ISA 8.7, "Matrix Shape" of ``mma``, of ``wgmma.mma_async`` (N is a multiple of 8 up to 256; of s8 only of 16
    from 32 on) and of ``tcgen05.mma`` (M is 64 or 128, for a pair of blocks 128 or 256; N is a multiple of 8 or 16 up to 256).
    """

    name: str  # ``mma.sync`` (a warp), ``wgmma`` (four warps) or ``tcgen05`` (one thread, sums in tensor memory)
    operands: str  # type of A and B; of tcgen05 its ``kind``
    sums: str  # type of C and D
    shapes: tuple[str, ...]  # M, N and K of one instruction


INSTRUCTIONS = (
    MatrixInstruction("mma.sync", "f16", "f32", ("m16n8k8", "m16n8k16")),
    MatrixInstruction("mma.sync", "bf16", "f32", ("m16n8k8", "m16n8k16")),
    MatrixInstruction("mma.sync", "tf32", "f32", ("m16n8k4", "m16n8k8")),
    MatrixInstruction("mma.sync", "e4m3", "f32", ("m16n8k32",)),
    MatrixInstruction("mma.sync", "e5m2", "f32", ("m16n8k32",)),
    MatrixInstruction("mma.sync", "f64", "f64", ("m8n8k4", "m16n8k16")),
    MatrixInstruction("mma.sync", "s8", "s32", ("m16n8k16", "m16n8k32")),
    MatrixInstruction("mma.sync", "s4", "s32", ("m16n8k32", "m16n8k64")),
    MatrixInstruction("mma.sync", "b1", "s32", ("m16n8k256",)),
    MatrixInstruction("wgmma", "f16", "f32", ("m64n8k16", "m64n256k16")),
    MatrixInstruction("wgmma", "bf16", "f32", ("m64n8k16", "m64n256k16")),
    MatrixInstruction("wgmma", "tf32", "f32", ("m64n8k8", "m64n256k8")),
    MatrixInstruction("wgmma", "e4m3", "f32", ("m64n8k32", "m64n256k32")),
    MatrixInstruction("wgmma", "e5m2", "f32", ("m64n8k32", "m64n256k32")),
    MatrixInstruction("wgmma", "s8", "s32", ("m64n8k32", "m64n256k32")),
    MatrixInstruction("tcgen05", "f16", "f32", ("m128n256k16",)),
    MatrixInstruction("tcgen05", "tf32", "f32", ("m128n256k8",)),
    MatrixInstruction("tcgen05", "f8f6f4", "f32", ("m128n256k32",)),
    MatrixInstruction("tcgen05", "i8", "s32", ("m128n256k32",)),
)


def used(cubin: bytes) -> Counter[str]:
    """How often each matrix instruction, and each instruction that loads its operands, occurs in the SASS of a cubin.

    Shapes are in the names: ``HMMA.16816.F32.BF16`` multiplies 16 × 16 by 16 × 8, ``HGMMA.64x256x16.F32.BF16`` 64 × 16 by
    16 × 256, ``UTMALDG.2D.MULTICAST`` is a TMA load to several blocks. STL and LDL are spilled registers.
    """
    return Counter(SHOWN.findall(_disassemble(cubin)))


def becomes(instruction: MatrixInstruction, shape: str, sm: int) -> str:
    """What one PTX instruction becomes: SASS instructions, ``a subroutine``, or nothing where the architecture has it not.

    Args:
        shape: one of ``instruction.shapes``.
        sm: an architecture, such as 90 (taken as sm_90a).
    """
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(_ptx(instruction, shape, sm))
        assembler = tool("ptxas-blackwell")
        if sm < 100 or not assembler.exists():
            assembler = tool("ptxas")
        done = subprocess.run([assembler, f"-arch={_target(sm)}", source, "-o", cubin], capture_output=True, text=True)
        if done.returncode:
            return ""
        sass = _disassemble(cubin.read_bytes())
    if re.search(r"\bCALL\b", sass):
        return "a subroutine"
    found = Counter(re.findall(rf"\b({MATRIX}\b[.A-Zx0-9]*)", sass))
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in sorted(found.items()))


def kernels(op: Operator, sm: int) -> Iterator[tuple[str, Counter[str]]]:
    """An operator's implementations that are ours and its ladder, each compiled for the first workload ``quick`` that it takes:
    its name and what :func:`used` finds."""
    for made in op.implementations.values():
        for w in op.cases("quick"):
            if sm not in made.architectures or (made.dtypes and w.dtype not in made.dtypes):
                continue
            cubins: list[bytes] = []
            try:
                with compiling_for(sm, lambda name, cubin, *_, into=cubins: into.append(cubin)):
                    made.function(**op.inputs(w, None, "meta"))
            except Declined:
                continue
            yield made.name, sum((used(cubin) for cubin in cubins), Counter())
            break


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True, errors="replace"
        ).stdout


def _target(sm: int) -> str:
    return f"sm_{sm}a" if sm in (90, 100, 120) else f"sm_{sm}"


def _ptx(instruction: MatrixInstruction, shape: str, sm: int) -> str:
    """A kernel of one matrix instruction, on operands from memory so that nothing is left out."""
    m, n, k = (int(size) for size in re.findall(r"\d+", shape))
    name, operands, sums = instruction.name, instruction.operands, instruction.sums
    word = "f64" if sums == "f64" else "f32" if sums == "f32" else "b32"
    lanes = 32 if name == "mma.sync" else 128

    def registers(letter: str, count: int, kind: str) -> str:
        lines.append(f".reg .{kind} {letter}<{count}>;")
        for i in range(count):
            lines.append(f"ld.global.{kind} {letter}{i}, [q + {8 * len(lines)}];")
        return "{" + ", ".join(f"{letter}{i}" for i in range(count)) + "}"

    def fragment(rows: int, columns: int, kind: str) -> int:
        return max(1, rows * columns * BITS[kind] // lanes // (64 if kind == "f64" else 32))

    lines = [".reg .u64 q;", ".reg .pred p;", "ld.param.u64 q, [memory];", "setp.ne.u64 p, q, 0;"]
    if name == "tcgen05":
        registers("r", 2, "b32")
        registers("w", 2, "b64")
        lines.append(f"tcgen05.mma.cta_group::1.kind::{operands} [r0], w0, w1, r1, p;")
    else:
        d = registers("d", fragment(m, n, sums), word)
        if name == "wgmma":
            registers("w", 2, "b64")
            more = {"f16": "1, 1, 0, 0", "bf16": "1, 1, 0, 0", "tf32": "1, 1", "e4m3": "1, 1", "e5m2": "1, 1"}.get(
                operands, ""
            )
            lines.append(
                f"wgmma.mma_async.sync.aligned.{shape}.{sums}.{operands}.{operands} {d}, w0, w1, p{', ' * bool(more)}{more};"
            )
            lines.append("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;")
        else:
            kind = "f64" if operands == "f64" else "b32"
            a = registers("a", fragment(m, k, operands), kind)
            b = registers("b", fragment(k, n, operands), kind)
            how = ".and.popc" if operands == "b1" else ""
            lines.append(
                f"mma.sync.aligned.{shape}.row.col.{sums}.{operands}.{operands}.{sums}{how} {d}, {a}, {b}, {d};"
            )
        lines += [f"st.global.{word} [q + {8 * i}], d{i};" for i in range(fragment(m, n, sums))]
    body = "\n".join(lines)
    return (
        f".version 8.7\n.target {_target(sm)}\n.address_size 64\n"
        f".visible .entry k(.param .u64 memory) {{\n{body}\nret;\n}}\n"
    )


def main(words: list[str]) -> None:
    """Prints both tables.

    Raises:
        UnknownName: no such operator or architecture.
        ValueError: more than one operator, or Triton is to interpret in this process, so it cannot compile.
    """
    if INTERPRETING:
        raise ValueError("TRITON_INTERPRET is set, and a process that interprets kernels cannot compile them: unset it")
    archs = [int(word[3:]) for word in words if re.fullmatch(r"sm_\d+", word)] or list(ARCHITECTURES)
    for sm in archs:
        if sm not in ARCHITECTURES:
            raise UnknownName("architecture", f"sm_{sm}", [f"sm_{a}" for a in ARCHITECTURES])
    named = [word for word in words if not re.fullmatch(r"sm_\d+", word)] or ["matmul"]
    if len(named) > 1:
        raise ValueError(f"{len(named)} operators, {', '.join(named)}; expected one at a time")
    (op,) = registry.select(named)
    out = [f"| PTX | operands | sums | shape | {' | '.join(f'sm_{sm}' for sm in archs)} |"]
    out.append("| --- " * (4 + len(archs)) + "|")
    for made in INSTRUCTIONS:
        for shape in made.shapes:
            cells = (becomes(made, shape, sm) or "–" for sm in archs)
            out.append(f"| `{made.name}` | {made.operands} | {made.sums} | {shape} | {' | '.join(cells)} |")
    for sm in archs:
        out += ["", f"| {op.name} on sm_{sm} | instructions |", "| --- | --- |"]
        for name, counts in kernels(op, sm):
            seen = ", ".join(f"{count} × `{sass}`" for sass, count in sorted(counts.items()))
            out.append(f"| {name} | {seen or 'none of these'} |")
    sys.stdout.write("\n".join(out) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.stderr.write(f"weft.bench.instructions: {error}\n")
        sys.exit(2)
