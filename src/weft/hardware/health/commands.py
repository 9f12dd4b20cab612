"""``weft health``: the catalogue, the log, the daemon, drills and active checks."""

import contextlib
import os
import shlex
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from weft.console import Json, note, out, print_json, print_line
from weft.hardware.health import catalogue
from weft.hardware.health.event import pci_address

PANEL = "Health"
State = Annotated[Path | None, typer.Option(help="folder of the state (WEFT_HEALTH_STATE)")]


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    for function in (codes, explain, scan, check, run, status, inject, evidence, release):
        app.command(f"health {function.__name__}", rich_help_panel=PANEL)(function)


def state_folder(given: Path | None) -> Path:
    """The option's, the variable's, or the system's usual folder."""
    if given or os.environ.get("WEFT_HEALTH_STATE"):
        return given or Path(os.environ["WEFT_HEALTH_STATE"])
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/weft/health")
    return Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local/state")) / "weft/health"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def codes(as_json: Json = False) -> None:
    """List every fault that is known: class, action, meaning."""
    listed = [catalogue.find(kind) for kind in catalogue.faults()]
    if as_json:
        print_json({"source": catalogue.source(), "faults": [_as_dict(f) for f in listed]})
        return
    table = _table("fault", "class", "action", "meaning")
    for f in listed:
        table.add_row(f.kind.replace("xid:", "XID "), f.category, f.action + ("" if f.published else "*"), f.meaning)
    out.print(table)
    print_line(f"Actions of XIDs without a * are NVIDIA's: {catalogue.source()}")


def _as_dict(f: catalogue.Fault) -> dict[str, Any]:
    rule = f.escalation
    return {
        "kind": f.kind, "name": f.name, "class": f.category, "action": f.action, "meaning": f.meaning,
        "action_by": "NVIDIA" if f.published else "weft",
        "escalation": rule and {"incidents": rule.count, "within_hours": rule.within_s / 3600, "action": rule.action},
    }  # fmt: skip


def explain(
    fault: Annotated[str, typer.Argument(help="79, row-remap-failure, or a line of the kernel's log")],
    as_json: Json = False,
) -> None:
    """Say what a fault means and what to do."""
    from weft.hardware.health.kernel_log import Parser

    event = Parser().parse(fault)
    kind = event.kind if event else f"xid:{int(fault)}" if fault.strip().isdecimal() else fault.strip()
    f = catalogue.find(kind)
    details = event.details if event else {}
    action = f.act(details) if event or f.action not in catalogue.DEPENDS else f.action
    if as_json:
        print_json({**_as_dict(f), "action": action, "details": details})
        return
    print_line(
        f"{f.kind.replace('xid:', 'XID ')} {f.name if f.name != f.kind else ''}({f.category})".replace("(", " (")
    )
    print_line(f.meaning)
    print_line(f"Action: {action}: {catalogue.MEANING.get(action) or catalogue.DEPENDS[action]}")
    if rule := f.escalation:
        print_line(f"{rule.count} incidents of one GPU within {rule.within_s / 3600:g} h: {rule.action}")
    if "sub_code" in details:
        print_line(
            f"{details['unit']}, sub-code {details['sub_code']}, error status {details['status']:#x}, link {details['link']}, "
            f"{details['severity'].lower()}"
        )
        if details["unit"].startswith("NETIR_LINK"):
            print_line(f"Who took the link down: {catalogue.link_down_reason(details['sub_code'])}")
    elif f.action == "sub-code":
        _units(kind)
    if kind == "xid:154" and not event:
        for number, (name, what) in enumerate(catalogue.recovery_actions()):
            print_line(f"  {number:#x} {name}: {what}")
    if f.kind.startswith("xid:"):
        print_line(f"Action by {'NVIDIA: ' + catalogue.source() if f.published else 'weft: NVIDIA lists none'}")


def _units(kind: str) -> None:
    for row in catalogue.nvlink5_units():
        if f"xid:{row['xid']}" == kind:
            if row.get("always"):
                free = ", but for sub-codes " + ", ".join(map(str, row["sub_codes"])) if "sub_codes" in row else ""
                print_line(f"  {row['unit']}: reset{free}")
            elif "values" in row:
                print_line(f"  {row['unit']}: reset at error status {', '.join(map(str, row['values']))}")
            elif row["reset"] == "0x0" and "driver" not in row:
                print_line(f"  {row['unit']}: no reset")
            else:
                driver = f"; the driver decides at {row['driver']}" if "driver" in row else ""
                print_line(f"  {row['unit']}: reset at the bits {row['reset']} of the error status{driver}")


def scan(
    log: Annotated[str, typer.Argument(help="a file of dmesg, journalctl or syslog; - for standard input")],
    as_json: Json = False,
) -> None:
    """Find faults in a kernel log, repeats counted once. Status 1 when the node is to be taken out of service."""
    from weft.hardware.health.kernel_log import scan as read
    from weft.hardware.health.ledger import Ledger

    ledger = Ledger()
    if log == "-":
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        ledger.take(read(sys.stdin))
    else:
        with open(log, errors="replace") as file:
            ledger.take(read(file))
    found = ledger.incidents()
    active = ledger.active()
    if as_json:
        print_json({
            "incidents": [
                {"gpu": i.gpu, "kind": i.kind, "action": i.action, "count": i.count, "first": i.first, "last": i.last,
                 "details": i.details}
                for i in found
            ],
            "quarantine": active is not None,
        })  # fmt: skip
    elif not found:
        print_line("no fault found")
    else:
        table = _table("GPU", "fault", "times", "action", "meaning")
        for i in found:
            f = catalogue.find(i.kind)
            table.add_row(i.gpu or "node", i.kind.replace("xid:", "XID "), f"{i.count:,}", i.action, f.meaning)
        out.print(table)
        if active:
            print_line(f"Take the node out of service: {active.reason().partition(': ')[2]}")
    raise typer.Exit(int(active is not None))


def run(
    on: Annotated[str, typer.Option(help="kubernetes, slurm, or none: decide and report alone")] = "none",
    node: Annotated[str, typer.Option(help="the scheduler's name of this node (NODE_NAME, else the host's)")] = "",
    state: State = None,
    kernel_log: Annotated[str, typer.Option(help="/dev/kmsg, a file that is appended to, or none")] = "/dev/kmsg",
    nvml: Annotated[bool, typer.Option(help="read NVML's state and events")] = True,
    budget: Annotated[int, typer.Option(min=0, help="Kubernetes: nodes drained at once in the cluster; 0: any")] = 0,
    check: Annotated[str, typer.Option(help="command that verifies a repaired GPU (WEFT_GPU)")] = "",
    repair: Annotated[str, typer.Option(help="command that resets or reboots (WEFT_ACTION, WEFT_GPU)")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be done, touch nothing")] = False,
) -> None:
    """Watch this node, take it out of service on a fault, return it when a check passes."""
    from weft.hardware.health.daemon import DEFAULT_CHECK, Commands, Daemon
    from weft.hardware.health.ledger import Ledger
    from weft.hardware.health.node import DryRun, Node
    from weft.hardware.health.sources import Socket

    def say(text: str) -> None:
        note.print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", soft_wrap=True)

    name = node or os.environ.get("NODE_NAME") or socket.gethostname().partition(".")[0]
    folder = state_folder(state)
    if on not in ("kubernetes", "slurm", "none"):
        raise ValueError(f"--on: expected kubernetes, slurm or none, got {on!r}")
    if kernel_log != "none" and not Path(kernel_log).exists():
        raise FileNotFoundError(f"--kernel-log: there is no {kernel_log}; give a file, or none")
    if kernel_log != "none" and not os.access(kernel_log, os.R_OK):
        raise PermissionError(f"--kernel-log: {kernel_log} may not be read: run as root, or give none")
    watch = None
    scheduler: Node
    if dry_run or on == "none":
        scheduler = DryRun(say)
    elif on == "kubernetes":
        from weft.hardware.health.kubernetes_node import KubernetesNode, connect

        kubernetes = KubernetesNode(connect(), name, budget)
        scheduler, watch = kubernetes, kubernetes.watch
    else:
        from weft.hardware.health.slurm_node import SlurmNode

        scheduler = SlurmNode(name)
    commands = Commands(_words("--check", check) or DEFAULT_CHECK, _words("--repair", repair))
    with contextlib.closing(Ledger(folder / ("dry-run.db" if dry_run else "state.db"))) as ledger:
        ledger.lock()
        daemon = Daemon(ledger, scheduler, commands, say)
        control = Socket(folder / "health.sock", daemon.batches)
        threading.Thread(target=control.run, args=(daemon.stop,), daemon=True).start()
        _start_sources(daemon, ledger, kernel_log, nvml, say)
        if watch:
            threading.Thread(target=watch, args=(daemon.changed.set, daemon.stop), daemon=True).start()
        _stop_on_signals(daemon.stop)
        say(f"watching node {name}; state in {folder}; on {'a dry run' if dry_run else on}")
        daemon.run()
        control.path.unlink(missing_ok=True)


def _words(option: str, command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{option}: {command!r}: {error}; expected a command as a shell takes it") from None


def _start_sources(daemon: Any, ledger: Any, kernel_log: str, nvml: bool, say: Any) -> None:
    import json
    from importlib.util import find_spec

    from weft.hardware.health.sources import Conditions, KernelLog, NvmlSource

    def thread(name: str, source: Any) -> None:
        def guarded() -> None:
            while not daemon.stop.is_set():
                try:
                    source.run(daemon.stop)
                except Exception as error:
                    say(f"ERROR {name}: {type(error).__name__}: {error}; tried again in a minute")
                    daemon.stop.wait(60)

        threading.Thread(target=guarded, daemon=True).start()

    if kernel_log != "none":
        log = KernelLog(kernel_log, daemon.batches, ledger.remembered(KernelLog.KEY), say)
        thread("kernel log", log)
    if nvml and find_spec("pynvml") is None:
        say("NVML is not read: pip install 'weft[telemetry]'")
    elif nvml:

        def open_faults() -> set[tuple[str, str]]:
            active = ledger.active()
            return {(i.gpu, i.kind) for i in active.incidents if i.state == "open"} if active else set()

        known = json.loads(ledger.remembered("gpus") or "{}")
        conditions = Conditions(known, open_faults)
        daemon.released = conditions.forget
        thread("NVML", NvmlSource(daemon.batches, conditions))


def _stop_on_signals(stop: threading.Event) -> None:
    import signal

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def inject(
    fault: Annotated[str, typer.Argument(help="79, or a name of weft health codes")],
    gpu: Annotated[str, typer.Option(help="index or PCI address; none for the whole node")] = "",
    state: State = None,
    as_json: Json = False,
) -> None:
    """A drill: the daemon treats the fault as real. End it with weft health release."""
    kind = f"xid:{fault}" if fault.isdecimal() else fault
    catalogue.find(kind)
    request: dict[str, Any] = {"do": "inject", "kind": kind, "gpu": _address(gpu)}
    if kind in ("xid:154", "recovery-action"):
        request["details"] = {"recovery": 1}
    _ask(state, request, as_json)


def evidence(
    what: Annotated[str, typer.Argument(help="reset (a GPU was reset) or passed (a check passed)")],
    gpu: Annotated[str, typer.Option(help="index or PCI address; none for the whole node")] = "",
    state: State = None,
    as_json: Json = False,
) -> None:
    """Tell the daemon that a GPU was reset, or that a check of another tool passed."""
    _ask(state, {"do": "evidence", "kind": what, "gpu": _address(gpu)}, as_json)


def release(
    why: Annotated[str, typer.Argument(help="for the record: card replaced, drill over")],
    state: State = None,
    as_json: Json = False,
) -> None:
    """A person returns the node: accepts its open faults; later ones take it out again."""
    _ask(state, {"do": "release", "why": why}, as_json)


def status(state: State = None, as_json: Json = False) -> None:
    """Show the quarantine, what it waits for, and the newest incidents."""
    from weft.hardware.health.sources import ask

    found = ask(state_folder(state) / "health.sock", {"do": "status"})
    if as_json:
        print_json(found)
        return
    _say_status(found)
    table = _table("GPU", "fault", "times", "action", "state")
    for i in found["incidents"]:
        state_word = f"{i['state']} {i['how']}".strip()
        table.add_row(i["gpu"] or "node", i["kind"].replace("xid:", "XID "), f"{i['count']:,}", i["action"], state_word)
    if found["incidents"]:
        out.print(table)


def _ask(state: Path | None, request: dict[str, Any], as_json: bool) -> None:
    from weft.hardware.health.sources import ask

    found = ask(state_folder(state) / "health.sock", request)
    if as_json:
        print_json(found)
        return
    for line in found["said"]:
        print_line(line)
    _say_status(found)


def _say_status(found: dict[str, Any]) -> None:
    if found["scheduler"] != "answers":
        print_line(f"The scheduler: {found['scheduler']}")
    quarantine = found["quarantine"]
    if not quarantine:
        print_line("No quarantine: the node is in service as far as weft is concerned.")
        return
    applied = "out of service" if quarantine["applied"] else "to be taken out of service"
    print_line(f"{quarantine['reason']}: {applied}, {'empty' if quarantine['drained'] else 'not empty yet'}")
    if quarantine["waiting"]:
        print_line(f"Waits: {quarantine['waiting']}")
    for i in quarantine["incidents"]:
        print_line(f"  {i['what']}, {i['count']:,} time{'s' * (i['count'] != 1)}, needs: {i['needs']}")


def _address(gpu: str) -> str:
    """An index as the PCI address that the driver lists in that place (NVML's order is that of PCI)."""
    if not gpu or pci_address(gpu):
        return pci_address(gpu)
    if not gpu.isdecimal():
        raise ValueError(f"--gpu: expected an index or a PCI address such as 0000:9b:00, got {gpu!r}")
    folder = Path("/proc/driver/nvidia/gpus")
    here = sorted(filter(None, map(pci_address, os.listdir(folder)))) if folder.is_dir() else []
    if int(gpu) >= len(here):
        raise ValueError(f"--gpu: the driver lists {len(here)} GPUs here, so there is no GPU {gpu}; give a PCI address")
    return here[int(gpu)]


def check(
    level: Annotated[
        str, typer.Option(help="quick (seconds), medium (under 2 minutes), long (tens of minutes)")
    ] = "quick",
    gpu: Annotated[list[str] | None, typer.Option(help="index or PCI address; may be repeated; all by default")] = None,
    state: State = None,
    prolog: Annotated[
        bool, typer.Option("--prolog", help="in Slurm's Prolog or Epilog: the job's GPUs; fails on a fault only")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check GPUs: copies, exact matrix products, memory, links. Status 0 passed, 1 a fault, 3 cannot tell."""
    from weft.hardware.health import checks

    wanted = gpu or list(filter(None, [os.environ.get("WEFT_GPU", "")]))
    if prolog and not wanted:
        wanted = list(
            filter(None, os.environ.get("SLURM_JOB_GPUS", os.environ.get("GPU_DEVICE_ORDINAL", "")).split(","))
        )
    if level not in checks.LEVELS:
        raise ValueError(f"--level: expected one of {', '.join(checks.LEVELS)}, got {level!r}")
    results = []
    try:
        found = checks.devices(wanted)
    except (ImportError, ValueError) as error:
        if not prolog:
            raise
        note.print(f"weft health check: {error}; the job is not stopped for it", soft_wrap=True)
        raise typer.Exit(0) from error
    records = state_folder(state) / "links.jsonl"
    for name, device in found.items():
        for result in checks.run(level, device, name, records if state or device != "cpu" else None):
            results.append(result)
            if not as_json:
                mark = {True: "passed", False: "FAILED", None: "cannot tell"}[result.passed]
                print_line(f"{name} {result.check}: {mark}: {result.found} ({result.seconds:.1f} s)")
    on_gpu = any(device != "cpu" for device in found.values())
    failed = any(r.passed is False for r in results)
    unsure = any(r.passed is None for r in results) or not on_gpu
    if as_json:
        print_json({"level": level, "gpu": on_gpu, "failed": failed, "results": [checks.as_dict(r) for r in results]})
    if not on_gpu:
        note.print("no GPU that PyTorch sees: no GPU was checked", soft_wrap=True)
    raise typer.Exit(1 if failed else 0 if prolog or not unsure else 3)
