"""``weft comm``."""

import os
from typing import Annotated, Any

import typer

from weft.console import Json, note, print_json, print_line, told

PANEL = "Communication"


def register(app: typer.Typer) -> None:
    """Adds the command to the ``weft`` command."""
    app.command(rich_help_panel=PANEL)(comm)


def comm(
    collectives: Annotated[
        list[str] | None, typer.Argument(help="all_reduce, all_gather, …, or mine.py with a Collective; none: all")
    ] = None,
    ranks: Annotated[
        int, typer.Option(help="processes to start on this machine (default: one a GPU, else 2)", show_default=False)
    ] = 0,
    gpus: Annotated[int, typer.Option(help="the same, one GPU each, over NCCL", show_default=False)] = 0,
    backend: Annotated[str, typer.Option(help="nccl, gloo or mpi (default: nccl with GPUs, else gloo)")] = "",
    least: Annotated[str, typer.Option("--min", "-b", help="least size in bytes; K = 1024")] = "1K",
    most: Annotated[str, typer.Option("--max", "-e", help="greatest size (default: 64M on GPUs, else 4M)")] = "",
    factor: Annotated[float, typer.Option("--factor", "-f", help="each size is so many times the last")] = 2.0,
    dtype: Annotated[str, typer.Option(help="fp32, fp64, fp16, bf16, fp8_e4m3, int8, int32, …")] = "fp32",
    op: Annotated[str, typer.Option(help="sum, prod, min, max; avg on NCCL")] = "sum",
    root: Annotated[int, typer.Option(help="of broadcast, reduce, gather, scatter")] = 0,
    place: Annotated[
        str,
        typer.Option(help="in or out: of place (default: in where PyTorch's call has no other)", show_default=False),
    ] = "default",
    mode: Annotated[str, typer.Option(help="stream, blocking, async or graph (CUDA graph)")] = "stream",
    iterations: Annotated[
        int, typer.Option(help="a point (default: what 0.3 s hold, 10 to 500)", show_default=False)
    ] = 0,
    subgroups: Annotated[int, typer.Option(help="groups of so many consecutive ranks run at once")] = 0,
    registered: Annotated[
        bool, typer.Option("--registered", help="buffers in NCCL's registered symmetric memory")
    ] = False,
    checked: Annotated[
        bool, typer.Option("--checked/--unchecked", help="ranks compare calls before they make them (not while timing)")
    ] = True,
    deadline: Annotated[float, typer.Option(help="seconds after which a missing or hanging rank is named")] = 30.0,
    port: Annotated[int, typer.Option(help="of the rendezvous of the processes started here; 0: any")] = 0,
    save: Annotated[bool, typer.Option("--save", help="append records to results/<machine>/comm.jsonl")] = False,
    compare: Annotated[str, typer.Option(help="an earlier run: a file of --json, or 'last' saved")] = "",
    plot: Annotated[str, typer.Option(help="write bus bandwidth and time over size: FILE.png or .svg")] = "",
    as_json: Json = False,
) -> None:
    """Time collectives on several ranks: bus bandwidth, wrong elements, the alpha-beta model, a verdict on the link.

    Starts its processes itself, or joins those of torchrun, mpirun or srun. (torchrun takes --max for one of its own: use -e.)
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read as PyTorch is imported; its errors are raised too
    from weft.comm import ranks as launched
    from weft.comm import settings as s
    from weft.words import byte_count

    who = launched.started()
    wanted = gpus or ranks
    if gpus and ranks and gpus != ranks:
        raise ValueError(f"gpus is {gpus} and ranks {ranks}; expected one of them, or the same number")
    if who is not None and wanted not in (0, who.size):
        raise ValueError(f"{who.by} started {who.size} ranks and {wanted} are asked for; leave --ranks and --gpus out")
    backend = _backend(backend, gpus)
    ranks = who.size if who else _ranks(backend, wanted)
    largest = byte_count(most or ("64M" if backend == "nccl" else "4M"), "max")
    settings = s.Settings(
        bytes=s.sizes(byte_count(least, "min"), largest, factor), dtype=dtype, op=op, root=root, place=place, mode=mode,
        iterations=iterations, subgroups=subgroups, registered=registered, checked=checked, deadline_s=deadline,
    )  # fmt: skip
    settings.check_ranks(ranks)
    _check_backend(settings, backend)
    from weft.comm import collectives as known
    from weft.comm import environment, verdict
    from weft.comm.checked import CollectiveFailed
    from weft.comm.terminal import Table, print_changes

    names = collectives or []
    if mode == "graph" and "barrier" in names:
        raise ValueError("barrier has no CUDA graph: its host waits; leave it out")
    names = names or [n for n in known.COLLECTIVES if mode != "graph" or n != "barrier"]
    found = known.find(names)
    if not 0 <= port < 1 << 16:
        raise ValueError(f"port is {port}; expected 1 to 65535, or 0 for any")
    if plot:
        from weft.comm.plot import check, draw

        check(plot)
    if who is None or who.rank == 0:
        earlier = _earlier(compare, backend, ranks) if compare else None
        if warning := environment.shm_warning(ranks):
            told(f"weft: {warning}")
    table = Table(as_json)
    saver = _Saver(backend, ranks) if save else None

    def begin(about: dict[str, Any]) -> None:
        table.begin(about)
        if saver:
            saver.begin(about)

    def add(record: dict[str, Any]) -> None:
        table.add(record)
        if saver:
            saver.add(record)

    def finish() -> None:
        """Prints what there is: all of it, or what was finished before a failure."""
        table.finish()
        if earlier is not None:
            print_changes(verdict.changes(table.records, earlier), told if as_json else print_line)
        if as_json:
            print_json({"records": table.records})
        if plot and table.records:
            told(f"# {draw(table.records, table.about, plot)}")

    if who is not None:
        _join(settings, found, backend, who, begin, add, finish)
    else:
        from weft.comm import processes

        try:
            processes.start(settings, names, backend, ranks, port=port, on_about=begin, on_record=add)
        except (CollectiveFailed, KeyboardInterrupt):
            finish()
            raise
        finish()
    if any(r["wrong"] for r in table.records):
        raise typer.Exit(1)


def _join(settings: Any, found: Any, backend: str, who: Any, begin: Any, add: Any, finish: Any) -> None:
    """As one of the ranks that a launcher started: rank 0 prints."""
    import sys

    from weft.comm.checked import CollectiveFailed
    from weft.comm.run import run

    shown = finish if who.rank == 0 else (lambda: None)
    try:
        run(settings, found, backend, who, lambda _, about: begin(about), lambda _, record: add(record), shown)
    except (CollectiveFailed, ValueError, MemoryError, RuntimeError) as error:
        shown()
        text = str(error) if str(error).startswith("rank ") else f"rank {who.rank}: {error}"
        note.print(f"weft: {text}", style="bold red", soft_wrap=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a backend's own threads may wait for ranks that are gone
    shown()


def _backend(asked: str, gpus: int) -> str:
    from weft.comm.settings import BACKENDS
    from weft.definition import UnknownName
    from weft.hardware.query import has_gpu

    if asked and asked not in BACKENDS:
        raise UnknownName("backend", asked, BACKENDS)
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("weft comm needs PyTorch: pip install 'weft[gpu]'", name="torch") from missing
    found = asked or ("nccl" if gpus or has_gpu() else "gloo")
    if gpus and found != "nccl":
        raise ValueError(f"gpus is {gpus} and backend '{found}', which runs on CPUs; expected --ranks {gpus}")
    if found == "nccl" and (not torch.cuda.is_available() or not torch.distributed.is_nccl_available()):
        raise ValueError(
            "backend nccl needs a CUDA build of PyTorch that sees a GPU; there is none here: --backend gloo --ranks 4 "
            "runs on CPUs"
        )
    return found


def _ranks(backend: str, wanted: int) -> int:
    """How many ranks to start."""
    if wanted < 0:
        raise ValueError(f"ranks is {wanted}; expected 2 or more")
    if backend != "nccl":
        return wanted or 2
    import torch

    seen = torch.cuda.device_count()
    if (wanted or seen) > seen:
        raise ValueError(
            f"{wanted} ranks want a GPU each; PyTorch sees {seen}: --gpus {seen}, or --backend gloo on CPUs"
        )
    return wanted or seen


def _check_backend(settings: Any, backend: str) -> None:
    operators = ("sum", "prod", "min", "max") + ("avg",) * (backend == "nccl")
    if settings.op not in operators:
        raise ValueError(
            f"op is '{settings.op}', which {backend} does not have; expected one of {', '.join(operators)}"
        )
    if backend != "nccl" and (settings.mode == "graph" or settings.registered):
        what = "mode graph" if settings.mode == "graph" else "--registered"
        raise ValueError(f"{what} is NCCL's; backend is '{backend}'")
    if settings.dtype.startswith("int") and settings.op == "avg":
        raise ValueError(f"op is 'avg' and dtype '{settings.dtype}'; expected a floating-point dtype")


def _earlier(compare: str, backend: str, ranks: int) -> list[dict[str, Any]]:
    from weft.comm import verdict
    from weft.records import Store

    if compare != "last":
        return verdict.read(compare)
    lines = [
        line for line in Store().lines(name=_Saver.FILE) if (line.get("backend"), line.get("ranks")) == (backend, ranks)
    ]
    if not lines:
        raise ValueError(f"no earlier run of {ranks} {backend} ranks is saved; run once with --save")
    return [line for line in lines if line.get("run") == lines[-1].get("run")]


class _Saver:
    """Appends records to ``results/<machine>/comm.jsonl`` as they come; each names its run, and a run's first line tells its
    environment."""

    FILE = "comm"

    def __init__(self, backend: str, ranks: int):
        from weft.hardware import query
        from weft.records import Store, commit, now

        self.store, self.machine = Store(), query.name("cuda" if backend == "nccl" else "cpu")
        self.run, self.head = (
            now(),
            {"commit": commit(), "versions": query.versions(), "backend": backend, "ranks": ranks},
        )
        self.store.probe(self.machine)

    def begin(self, about: dict[str, Any]) -> None:
        self.store.append(self.machine, self.FILE, {"run": self.run, "about": about, **self.head})

    def add(self, record: dict[str, Any]) -> None:
        kept = {k: v for k, v in record.items() if k not in ("late_us", "rank_us")}
        self.store.append(self.machine, self.FILE, {"run": self.run, **kept})
