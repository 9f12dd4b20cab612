"""``weft device``, ``weft ceilings``, ``weft bandwidth``, ``weft topology``, ``weft top`` and
``weft exporter``."""

import json
import sys
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from weft.console import Json, out, print_json, print_line, told
from weft.hardware.health import commands as health


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    for function in (device, ceilings, bandwidth, topology, top, exporter):
        app.command(rich_help_panel="Hardware")(function)
    health.register(app)


def device(as_json: Json = False) -> None:
    """What each GPU is: units, clocks, caches, memory, limits, links, MIG instances, and peak rates derived from them."""
    from weft.hardware import device as devices

    found = devices.query()
    if as_json:
        print_json(found.to_dict())
    else:
        for line in devices.lines(found):
            print_line(line)
    raise typer.Exit(int(found.broken))


def ceilings(
    as_json: Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="smaller arrays, fewer configurations, as the report does")
    ] = False,
) -> None:
    """Measure what this machine gives: bandwidth by mix of reads and writes, matrix rate by dtype."""
    from weft.hardware import ceilings, query

    device = query.choose_device()
    measured = ceilings.as_records(ceilings.measure(device, quick=quick, say=told), query.context(device))
    if as_json:
        print_json({"records": [json.loads(m.to_json()) for m in measured]})
        return
    table = Table(title="Measured ceilings", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("ceiling")
    table.add_column("rate", justify="right")
    for m in measured:
        scale, unit = (1e12, "T" + m.unit) if m.details["value"] > 1e12 else (1e9, "G" + m.unit)
        table.add_row(m.implementation, f"{m.details['value'] / scale:.2f} {unit}")
    out.print(table)


def bandwidth(
    size: Annotated[str, typer.Option(help="bytes of a copy; K = 1024")] = "256M",
    as_json: Json = False,
) -> None:
    """Measure every link: host to device, device to device by copy engine and by SM, latency, managed memory."""
    from weft.hardware import bandwidth as links
    from weft.words import byte_count

    found = links.measure(size=byte_count(size, "size"), say=told)
    if as_json:
        print_json(found)
        return
    table = Table(title="Measured links", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for name in ("test", "from", "to"):
        table.add_column(name)
    table.add_column("rate", justify="right")
    for r in found["records"]:
        table.add_row(r["test"], r["from"], r["to"], f"{r['value']:,.4g} {r['unit']}")
    out.print(table)
    for note in found["notes"]:
        print_line(note)


def topology(
    picture: Annotated[str, typer.Option(help="also draw it: FILE.png or .svg")] = "",
    as_json: Json = False,
) -> None:
    """Show how GPUs, NVLinks, PCIe, NUMA nodes and network cards hang together, and what is not as it should be."""
    from weft.hardware import topology as links

    found = links.read()
    if picture:
        from weft.hardware.topology_picture import draw

        told(str(draw(found, picture)))
    if as_json:
        print_json(found.to_dict())
        return
    rows = found.matrix()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in rows[0]:
        table.add_column(head)
    for row in rows[1:]:
        table.add_row(*row)
    if len(rows) > 1:
        out.print(table)
    for n in found.nodes:
        print_line(
            f"NUMA {n.index}: CPUs {n.cpus}, {n.memory_gib:,.1f} GiB, distances {' '.join(map(str, n.distances))}"
        )
    for note in found.notes:
        print_line(note)


def top(
    once: Annotated[bool, typer.Option("--once", help="print one reading and end")] = False,
    as_json: Json = False,
    interval: Annotated[float, typer.Option(help="seconds between readings")] = 2.0,
) -> None:
    """Watch every GPU: use, memory, power, heat, clocks and why they are lowered, MIG, processes with user and container."""
    from weft.hardware.telemetry import view
    from weft.hardware.telemetry.reader import Reader, read_once

    if not 0.1 <= interval <= 86400:
        raise ValueError(f"interval: {interval:g} s; expected at least 0.1, at most a day")
    if once or as_json or not sys.stdout.isatty():
        found = view.View.of(read_once(pause_s=0.2))
        if as_json:
            print_json(found.to_dict())
        else:
            out.print(view.head(found))
            if not found.snapshot.problem:
                out.print(view.gpu_table(found), view.process_table(found))
        raise typer.Exit(int(bool(found.snapshot.problem)))
    from weft.hardware.telemetry.top import Top

    known: dict = {}
    with Reader(timeout_s=3.0) as reader:
        Top(lambda: view.View.of(reader.read(), known), interval).run()


def exporter(
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 lets other machines scrape")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0 takes a free one")] = 9400,
    interval: Annotated[float, typer.Option(help="seconds between readings")] = 15.0,
    pods: Annotated[
        str, typer.Option(help="the kubelet's pod-resources socket, or a JSON file that maps pods to GPUs")
    ] = "",
    jobs: Annotated[str, typer.Option(help="folder with a file of Slurm job ids for each GPU")] = "",
    health: Annotated[str, typer.Option(help="folder of weft health's state: quarantines and open incidents")] = "",
) -> None:
    """Serve Prometheus metrics of every GPU under dcgm-exporter's names, with pods, Slurm jobs and XID errors by code."""
    from weft.hardware.telemetry import exporter

    words = ["--host", host, "--port", str(port), "--interval", str(interval), "--pods", pods, "--jobs", jobs]
    words += ["--health", health]
    raise typer.Exit(exporter.main(words))
