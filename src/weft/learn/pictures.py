"""Which elements a kernel's programs load and store, drawn as text and as a page.

Each tensor is drawn once for loads and once for stores: a cell is an element (or several, where the tensor is large), its
letter the program that touched it, ``*`` several programs, ``.`` none.
"""

import html
import math
from collections import defaultdict
from typing import Any, NamedTuple

from weft.learn.course import Exercise
from weft.learn.language import Text

PROGRAMS = 26  # that are drawn, a letter each
ROWS = 8
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red")
COLOURS = ("#4477aa", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#ee6677")


class Unit(NamedTuple):
    """What a letter stands for, and what a grid counts."""

    one: Text
    many: Text


UNITS = {
    "program": Unit(Text("program", "实例"), Text("programs", "个实例")),
    "warp": Unit(Text("warp", "warp"), Text("blocks", "个线程块")),
}
KINDS = {"load": Text("loads", "加载"), "store": Text("stores", "存储"), "atomic": Text("atomics", "原子操作")}


def cells(launch: dict[str, Any]) -> dict[tuple[str, str], tuple[list[int], dict[int, set[int]], list[int]]]:
    """By tensor and kind: the tensor's shape, the programs that touched each element, and the lines that did."""
    found: dict[tuple[str, str], tuple[list[int], dict[int, set[int]], list[int]]] = {}
    for access in launch["trace"]:
        key = (access["tensor"], access["kind"])
        if not access["tensor"]:
            continue
        _, touched, lines = found.setdefault(key, (access["shape"], defaultdict(set), []))
        for element in access["elements"]:
            touched[element].add(access["program"])
        if access["line"] not in lines:
            lines.append(access["line"])
    return found


def grid(shape: list[int], columns: int) -> tuple[int, int, int]:
    """Rows and columns of cells to draw, and elements a cell: a matrix row by row, a vector folded."""
    total = math.prod(shape)
    width = shape[-1] if len(shape) > 1 else min(total, 32)
    each = -(-width // max(1, columns))
    across = -(-width // each)
    return -(-total // width), across, each


def _cell(touched: dict[int, set[int]], first: int, count: int) -> set[int]:
    return set().union(*(touched.get(e, set()) for e in range(first, first + count)))


def terminal(launch: dict[str, Any], language: str, width: int) -> list[tuple[str, str]]:
    """Lines and their styles."""
    counts = launch["counts"]
    size = "×".join(str(n) for n in launch["grid"] if n > 1) or "1"
    unit = UNITS[launch.get("unit", "program")]
    lines = [
        (f"  {launch['kernel']}: {Text(f'{size} {unit.many.en}', f'{size} {unit.many.zh}')[language]}", "bold"),
        (
            Text(
                f"  {counts['bytes_read']:,} bytes read in {counts['sectors_read']:,} sectors of 32, "
                f"{counts['bytes_written']:,} written in {counts['sectors_written']:,}; {counts['flops']:,} FLOPs",
                f"  读 {counts['bytes_read']:,} 字节（{counts['sectors_read']:,} 个 32 字节扇区），"
                f"写 {counts['bytes_written']:,} 字节（{counts['sectors_written']:,} 个扇区）；{counts['flops']:,} FLOPs",
            )[language],
            "dim",
        ),
    ]
    if "conflicts" in counts:
        shared, more = f"{counts['shared_accesses']:,}", f"{counts['conflicts']:,}"
        said = Text(
            f"  {shared} accesses of warps to shared memory, {more} more for bank conflicts",
            f"  warp 访问共享内存 {shared} 次，bank 冲突另加 {more} 次",
        )
        lines.append((said[language], "dim"))
    for (tensor, kind), (shape, touched, at) in cells(launch).items():
        rows, across, each = grid(shape, max(8, (width - 12) // 2))
        row_elements = shape[-1] if len(shape) > 1 else min(32, max(1, shape[0]) if shape else 1)
        numbers = ", ".join(map(str, sorted(at)))
        where = Text(f"line {numbers}", f"第 {numbers} 行")[language]
        per = Text(f", {each} elements a cell", f"，每格 {each} 个元素")[language] if each > 1 else ""
        lines += [("", ""), (f"  {tensor}{shape} {KINDS[kind][language]} ({where}){per}", "bold")]
        for row in range(min(rows, ROWS)):
            text = ""
            for column in range(across):
                first = row * row_elements + column * each
                if first >= math.prod(shape):
                    break
                who = _cell(touched, first, min(each, row_elements - column * each))
                text += " " + ("." if not who else "*" if len(who) > 1 else LETTERS[min(who) % 26])
            lines.append((f"  {row * row_elements:>6} {text}", ""))
        if rows > ROWS:
            lines.append(
                (Text(f"         … {rows - ROWS} more rows", f"         … 还有 {rows - ROWS} 行")[language], "dim")
            )
    lines += [
        ("", ""),
        (
            Text(
                f"  A is {unit.one.en} 0, B {unit.one.en} 1 …; * is several, . none",
                f"  A 为 {unit.one.zh} 0，B 为 {unit.one.zh} 1……；* 为多个，. 为无",
            )[language],
            "dim",
        ),
    ]
    return lines


def page(launch: dict[str, Any], exercise: Exercise, language: str) -> str:
    """One self-contained page: the same pictures in colour; pointing at a cell tells its element and programs."""
    unit = UNITS[launch.get("unit", "program")].one
    parts = [
        "<!doctype html>",
        f'<html lang="{language}"><meta charset="utf-8"><title>{exercise.id}</title>',
        "<style>body{font:16px system-ui,sans-serif;margin:2em;max-width:70em;color:#222}table{border-collapse:collapse;"
        "margin-bottom:1.5em}td{width:14px;height:14px;border:1px solid #fff;background:#e8e8e8;font-size:9px;"
        "text-align:center;color:#fff;padding:0}h2{font-size:1em}</style>",
        f"<h1>{html.escape(exercise.id)} · {html.escape(exercise.title[language])}</h1>",
    ]
    for line, _ in terminal({**launch, "trace": []}, language, 80)[:2]:
        parts.append(f"<p>{html.escape(line.strip())}</p>")
    for (tensor, kind), (shape, touched, _) in cells(launch).items():
        rows, across, each = grid(shape, 64)
        row_elements = shape[-1] if len(shape) > 1 else min(32, max(1, shape[0]) if shape else 1)
        parts.append(f"<h2>{html.escape(tensor)}{shape} {KINDS[kind][language]}</h2><table>")
        for row in range(min(rows, 64)):
            cells_of_row = []
            for column in range(across):
                first = row * row_elements + column * each
                if first >= math.prod(shape):
                    break
                who = sorted(_cell(touched, first, min(each, row_elements - column * each)))
                colour = (
                    ""
                    if not who
                    else ' style="background:#222"'
                    if len(who) > 1
                    else f' style="background:{COLOURS[who[0] % 6]}"'
                )
                programs = ", ".join(map(str, who[:8])) or "–"
                title = f"{Text('element', '元素')[language]} {first}: {unit[language]} {programs}"
                letter = "" if not who else "*" if len(who) > 1 else LETTERS[who[0] % 26]
                cells_of_row.append(f'<td title="{title}"{colour}>{letter}</td>')
            parts.append(f"<tr>{''.join(cells_of_row)}</tr>")
        parts.append("</table>")
    parts.append("</html>")
    return "\n".join(parts) + "\n"
