"""Keeps tables in Markdown files current: the pages of ``docs/measured``, and tables between two markers in other
files.

    <!-- weft:table operator=softmax direction=forward gpu=nvidia-h200 dtype=bf16 -->
    <!-- weft:end -->

The text between the markers is replaced; all other text stays, and so does a marker inside a code fence. The kinds:

    weft:headlines gpu=… points=softmax:bf16:M=8,N=8;softmax:fp32:M=8,N=8:backward     chosen points, one row each; by default
                                                                                       HEADLINES
    weft:table operator=… gpu=… direction=… dtype=… rungs=only                         all points of an operator
    weft:ceilings gpu=…                                                                what the machine gives
    weft:host gpu=…                                                                    what a call costs on the host
    weft:comm gpu=… backend=nccl|gloo|mpi                                              collectives, a table a run
    weft:simulator cpu=… of=speed|growth                                               the cluster simulator's speed

Nothing here imports PyTorch, so lint runs anywhere.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from weft import records, registry
from weft.definition import BYTES, UnknownName
from weft.drawing.quantities import is_ceiling, is_rung
from weft.records import Store
from weft.report import collectives, measured, simulator, tables

PLACES = ("*.md", "docs/**/*.md", "src/weft/**/*.md", "tests/**/*.md")
MEASURED = "docs/measured"
WORDS = {  # of each kind of table, the required ones first
    "headlines": ("gpu", "points"),
    "table": ("operator", "gpu", "direction", "dtype", "rungs"),
    "ceilings": ("gpu",),
    "host": ("gpu",),
    "comm": ("gpu", "backend"),
    "simulator": ("cpu", "of"),
}
OPTIONAL = {"points", "direction", "dtype", "rungs"}
HEADLINES = (  # of both READMEs
    "softmax:bf16:M=65536,N=4096",
    "rms_norm:bf16:M=16384,N=16384",
    "rms_norm:bf16:M=32768,N=8192:backward",
    "cross_entropy_with_gradient:bf16:M=8192,V=128256",
    "matmul:bf16:M=4096,N=4096,K=14336,layout=NT",
    "matmul:bf16:M=512,N=28672,K=4096,layout=NT",
    "linear:bf16:M=4096,N=14336,K=4096,activation=gelu,plus=bias",
    "skinny_matmul:bf16:M=1,N=8192,K=8192,bias=False",
    "sum:bf16:M=1,N=268435456,dim=all",
    "adamw:bf16:T=145,P=8522844,shapes=language_model",
    "newton_schulz:bf16:B=16,M=2048,N=2048",
)
_START = re.compile(r"\s*<!--\s*weft:(?P<kind>\w+)(?P<words>(\s+[\w-]+=[^\s>]+)*)\s*-->\s*$")
_END = "<!-- weft:end -->"


def refresh_all(root: Path, check: bool, say: Callable[[str], None]) -> int:
    """Makes a project's tables anew from the records in ``root/results``.

    Args:
        root: the project's folder.
        check: write nothing, and name the files that are out of date.
        say: receives a line for each file that is written or out of date, then the outcome.

    Returns:
        1 when ``check`` finds a file that is out of date, else 0.

    Raises:
        FileNotFoundError: there is no Markdown file below ``root``.
        ValueError: a wrong marker; the message has the file, the line and what would be right.
    """
    files = markdown_files(root)
    if not files:
        raise FileNotFoundError(f"no Markdown file in {root}: run `weft tables` in the project's folder")
    store = Store(root / "results")
    folder = root / MEASURED
    wanted: dict[Path, str | None] = {folder / name: text for name, text in measured.pages(store).items()}
    for path in files:
        if path not in wanted:
            try:
                generated = path.parent == folder and measured.GENERATED in path.read_text(encoding="utf-8")
                wanted[path] = None if generated else refresh(path, store)  # None: of a family that is gone
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: {error}") from None
    changed = 0
    for path, text in sorted(wanted.items()):
        if text == (path.read_text(encoding="utf-8") if path.is_file() else None):
            continue
        changed += 1
        name = path.relative_to(root).as_posix()
        if check:
            say(f"{name}: a table is out of date; fix: weft tables")
        elif text is None:
            path.unlink()
            say(f"removed {name}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            records.write_whole(path, text)
            say(f"wrote {name}")
    say(f"{len(wanted)} Markdown files, {changed} {'out of date' if check else 'changed'}")
    return 1 if check and changed else 0


def markdown_files(root: Path) -> list[Path]:
    """The Markdown files that may hold tables, sorted."""
    return sorted({path for place in PLACES for path in root.glob(place) if path.is_file()})


def refresh(path: Path, store: Store) -> str:
    """The text of a Markdown file with every table between markers made anew.

    Raises:
        ValueError: a marker that is unknown, lacks a word, names something that does not exist (a GPU without records,
            say) or has no end; the message has file and line.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(_refreshed(path, lines, store))


def _refreshed(path: Path, lines: list[str], store: Store) -> Iterator[str]:
    fence = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        yield line
        at += 1
        if mark := re.match(r"\s*(```+|~~~+)", line):
            if not fence:
                fence = mark[1]
            elif mark[1].startswith(fence):
                fence = ""
        elif not fence and _opens(line):
            start = at
            while at < len(lines) and _END not in lines[at]:
                if _opens(lines[at]):
                    raise ValueError(f"{path}:{at + 1}: a table opens before the table of line {start} has its {_END}")
                at += 1
            if at == len(lines):
                raise ValueError(f"{path}:{start}: this table has no end; write {_END} after it")
            try:
                yield f"\n{_table(line, store)}\n\n"
            except ValueError as error:
                raise ValueError(f"{path}:{start}: {error}") from None
    if fence:
        raise ValueError(f"{path}: a code fence ({fence}) is never closed, so tables after it would not be made anew")


def _opens(line: str) -> bool:
    return bool(re.match(r"\s*<!--\s*weft:(?!end\b)", line))


def _table(line: str, store: Store) -> str:
    """The table that a marker asks for."""
    found = _START.match(line)
    if not found:
        raise ValueError(f"marker '{line.strip()}' should read <!-- weft:table operator=NAME gpu=NAME -->")
    kind, words = found["kind"], dict(word.split("=", 1) for word in found["words"].split())
    if kind not in WORDS:
        raise UnknownName("table", kind, WORDS)
    for word in words:
        if word not in WORDS[kind]:
            raise UnknownName(f"word of 'weft:{kind}'", word, WORDS[kind])
    if missing := [word for word in WORDS[kind] if word not in OPTIONAL and word not in words]:
        raise ValueError(f"'weft:{kind}' lacks {' and '.join(f'{word}=…' for word in missing)}")
    machines = store.machines()
    values = {
        "operator": registry.names(), "gpu": machines, "cpu": machines, "dtype": BYTES,
        "backend": ("nccl", "gloo", "mpi"),
        "direction": ("forward", "backward"), "rungs": ("only",), "of": ("speed", "growth"),
    }  # fmt: skip
    for word, value in words.items():
        if word in values and value not in values[word]:
            raise UnknownName(f"{word} of 'weft:{kind}'", value, values[word])

    if kind == "comm":
        timed_runs = collectives.runs(store.lines(words["gpu"], collectives.FILE))
        return "\n\n".join(collectives.table(run) for run in timed_runs if run.backend == words["backend"])
    if kind == "simulator":
        timed = simulator.read(store.lines(words["cpu"], simulator.FILE))
        return (simulator.speed_table if words["of"] == "speed" else simulator.growth_table)(timed)
    measurements = store.read(words["gpu"], "ceiling" if kind == "ceilings" else words.get("operator"))
    if kind == "ceilings":
        return tables.ceilings_table(m for m in measurements if is_ceiling(m))
    if kind == "host":
        return tables.host_table(m for m in measurements if m.metric == "host time")
    if kind == "headlines":
        return tables.headlines_table(measurements, words["points"].split(";") if "points" in words else HEADLINES)
    rungs = words.get("rungs") == "only"
    chosen = [
        m
        for m in measurements
        if m.metric == "time" and m.cache == "cold" and is_rung(m) == rungs
        if m.direction == words.get("direction", "forward") and m.dtype == words.get("dtype", m.dtype)
    ]
    return (tables.rungs_table if rungs else tables.points_table)(chosen)
