"""What CUDA C++ kernels become on Hopper: their machine code as nvdisasm writes it."""

import re
from pathlib import Path

import pytest

from weft.bench import instructions
from weft.bench.compile_check import resource_usage
from weft.operators.cuda import CudaPlan, compile_cubin
from weft.operators.hopper import gemm


def sass(source: Path, expression: str) -> str:
    """The machine code of a kernel on sm_90, which spills no registers."""
    pytest.importorskip("cuda.bindings")
    text = instructions._disassemble(compile_cubin(source, expression, 90)[0])
    assert not re.search(r"\b(STL|LDL)\b", text), "registers are spilled"
    return text


def spills_nothing(kernel: CudaPlan, sm: int = 90) -> bool:
    return resource_usage(compile_cubin(kernel.source, kernel.expression, sm)[0])["STACK"] == 0


def parts(text: str) -> list[str]:
    """What stands between labels."""
    return re.split(r"^\.L_x_\d+:", text, flags=re.M)


def names(part: str) -> list[str]:
    """Its instructions with their modifiers, such as "LDG.E.128"."""
    return re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P[T\d] )?([A-Z0-9_.]+)", part)


def rounds(text: str) -> list[list[str]]:
    """The instructions of the shortest way round each loop, so that what is rarely executed is left out."""
    marks = re.findall(r"^(\.L_x_\d+):|/\*[0-9a-f]{4,5}\*/\s+((?:@!?U?P[T\d] )?[A-Z0-9_.]+[^;]*);", text, flags=re.M)
    lines: list[str] = []
    labels: dict[str, int] = {}
    for label, line in marks:
        if label:
            labels[label] = len(lines)
        else:
            lines.append(line)
    targets = [re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line) for line in lines]
    after: list[list[int]] = []
    for i, (line, target) in enumerate(zip(lines, targets, strict=True)):
        leaves = re.match(r"(BRA `|EXIT|RET)", line)
        after.append(([] if leaves else [i + 1]) + ([labels[target[1]]] if target else []))
    found = []
    for end, target in enumerate(targets):
        if not target or labels[target[1]] > end:
            continue
        begin = labels[target[1]]
        came, ways = {begin: begin}, [begin]
        for at in ways:
            for to in after[at]:
                if to < len(lines) and to not in came:
                    came[to] = at
                    ways.append(to)
        way, at = [], end
        while at != begin and at in came:
            way.append(lines[at])
            at = came[at]
        found.append([*way, lines[begin]][::-1])
    return [[re.sub(r"^@!?U?P[T\d] ", "", line).split()[0] for line in way] for way in found]


def longest_loop(launch: CudaPlan) -> list[str]:
    """The instructions of a kernel's longest loop."""
    text = re.split(r"^\$\S+:", sass(launch.source, launch.expression), flags=re.M)[0]
    labels = {found[1]: found.start() for found in re.finditer(r"^\.(L_x_\d+):", text, flags=re.M)}
    jumps = [(found.start(), labels[found[1]]) for found in re.finditer(r"BRA [^;]*`\(\.(L_x_\d+)\)", text)]
    end, begin = max((jump for jump in jumps if jump[0] > jump[1]), key=lambda jump: jump[0] - jump[1])
    return names(text[begin:end])


def assembly(expression: str) -> str:
    return sass(gemm.SOURCE, expression)


def check_inner_loop(text: str, product: str, fetches: int, streamed: bool = False) -> None:
    """Products run in pairs of stages, not one after another; neither sums nor descriptors pass through other registers."""
    found = re.findall(r"\w*GMMA\S*|WARPGROUP\.DEPBAR.*?;", text)
    products, waits = [f for f in found if "GMMA" in f], [f for f in found if "DEPBAR" in f]
    assert products and set(products) == {product} and len(products) % 4 == 0
    assert len(re.findall(r"GMMA.*gsb0", text)) == len(products) // 4, "ptxas makes products wait for each other"
    assert sorted(set(waits)) == ["WARPGROUP.DEPBAR.LE gsb0, 0x0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"]
    assert waits.count("WARPGROUP.DEPBAR.LE gsb0, 0x0 ;") == 1 and len(waits) == len(products) // 4 + 1
    inner = text[text.index(product) : text.rindex(product)]
    assert "R2UR" not in inner, "descriptors are made in registers of threads"
    assert len(re.findall(r"\bMOV|IMAD\.MOV", inner)) < 20, "sums are moved"
    assert text.count("MEMBAR.ALL.GPU") == streamed, "a stage is released behind all stores of the block"
    producer = text[text.rindex("ELECT") :]
    assert "BRA.U.ANY" not in producer, "the producer's operands are sought lane by lane"
    assert producer.count("UTMALDG") and producer.count("UTMALDG") % fetches == 0
