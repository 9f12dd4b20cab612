"""``weft exporter``: a thread reads GPUs at an interval, and a scrape is answered from its last reading.

So a driver that hangs makes no scrape wait: GPUs' series end, and ``weft_nvml_up`` is 0.
"""

import argparse
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from weft.hardware.telemetry import pods, quarantines
from weft.hardware.telemetry.attribution import Attributor
from weft.hardware.telemetry.metrics import State, render
from weft.hardware.telemetry.nvml import Gpu, Snapshot, Xid
from weft.hardware.telemetry.reader import Reader

PORT = 9400  # dcgm-exporter's
INTERVAL_S = 15.0  # Prometheus' usual one; a reading of an H200 takes 11 ms of processor time


class Exporter:
    """Collects in a thread of its own, and serves; ``with`` starts and stops both.

    Args:
        host: the address to listen on; loopback by default, since metrics name users, pods and jobs.
        port: 0 for any free one.
        interval_s: between readings.
        pods_at: the kubelet's socket or a mapping file.
        jobs_at: the folder of Slurm jobs by GPU.
        health_at: the folder of ``weft health``'s state.
        say: receives each new problem, once.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = PORT,
        interval_s: float = INTERVAL_S,
        pods_at: Path | None = None,
        jobs_at: Path | None = None,
        health_at: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
        timeout_s: float = 5.0,
    ) -> None:
        if not 0 < interval_s <= 86400:
            raise ValueError(f"interval: {interval_s:g} s; expected more than 0, at most a day")
        if not 0 <= port <= 65535:
            raise ValueError(f"port: {port}; expected 0 to 65535")
        self.host, self.port, self.interval_s, self.say = host, port, interval_s, say
        self.health_at = health_at
        self.attributor = Attributor(pods.source(pods_at) if pods_at else None, jobs_at)
        self.state = State(os.environ.get("NODE_NAME") or socket.gethostname())
        self.reader = Reader(timeout_s, self._xid)
        self.stopped = threading.Event()
        self.said: set[str] = set()
        self.read_at = time.monotonic()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.server: ThreadingHTTPServer

    def __enter__(self) -> "Exporter":
        self.read()
        try:
            self.server = ThreadingHTTPServer((self.host, self.port), _handler(self.page))
        except OSError as error:
            self.reader.close()
            why = error.strerror or str(error)
            other = "--host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "--port"
            raise OSError(f"cannot listen on {self.host}:{self.port}: {why}; choose another {other}") from None
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(timeout=1)
        self.reader.close()

    def page(self) -> bytes:
        """Every metric of the last reading, unless that is too old to be true."""
        state = self.state
        if time.monotonic() - self.read_at > 3 * self.interval_s + self.reader.timeout_s:
            state = replace(state, snapshot=Snapshot(state.snapshot.time, problem="the last reading is too old"))
        return render(state, time.time()).encode()

    def read(self) -> None:
        """One reading."""
        snapshot = self.reader.read()
        attribution = self.attributor.read(snapshot)
        if self.health_at is not None:
            try:
                self.state.quarantines = quarantines.read(self.health_at)
                attribution.up["health"] = True
            except OSError as error:
                self.state.quarantines, attribution.up["health"] = None, False
                attribution.problems.append(str(error))
        named = {gpu.index for gpu in self.state.seen.values() if gpu.uuid}
        for gpu in snapshot.gpus:
            if not gpu.uuid and gpu.index in named:  # lost, and read by a process that never saw its name
                continue
            self.state.seen[gpu.uuid or f"GPU {gpu.index}"] = Gpu(
                index=gpu.index, uuid=gpu.uuid, name=gpu.name, pci=gpu.pci, minor=gpu.minor
            )
            if gpu.uuid:  # before, it may have been lost without a name
                self.state.seen.pop(f"GPU {gpu.index}", None)
        self.state.snapshot, self.state.attribution, self.read_at = snapshot, attribution, time.monotonic()
        self._tell(snapshot, attribution.problems)

    def _run(self) -> None:
        while not self.stopped.wait(self.interval_s):
            try:
                self.read()
            except Exception as error:  # the next reading may go well; till then the last one grows old
                self.say(f"a reading failed: {type(error).__name__}: {error}")

    def _xid(self, xid: Xid) -> None:
        self.state.xids.add(xid)

    def _tell(self, snapshot: Snapshot, problems: list[str]) -> None:
        lost = [f"GPU {gpu.index}, {gpu.uuid or '?'}: {gpu.problem}" for gpu in snapshot.gpus if gpu.problem]
        now = {*filter(None, [snapshot.problem]), *lost, *problems}
        for problem in sorted(now - self.said):
            self.say(problem)
        self.said = now


def _handler(page: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # Prometheus goes on using its connection
        timeout = 60  # of a client that says nothing

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path not in ("/", "/metrics"):
                self.send_error(404, "metrics are at /metrics")
                return
            body = page() if path == "/metrics" else b'<a href="/metrics">metrics</a>\n'
            kind = "text/plain; version=0.0.4" if path == "/metrics" else "text/html"
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def main(argv: Sequence[str] | None = None) -> int:
    """``weft exporter`` without the rest of the command line; returns the exit status when it is stopped."""
    parser = argparse.ArgumentParser(prog="weft exporter", description="Serve Prometheus metrics of every GPU.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines scrape")
    parser.add_argument("--port", type=int, default=PORT, help="0 takes a free one")
    parser.add_argument("--interval", type=float, default=INTERVAL_S, help="seconds between readings")
    parser.add_argument("--pods", default="", help="the kubelet's pod-resources socket, or a JSON file of pods")
    parser.add_argument("--jobs", default="", help="folder with a file of Slurm job ids for each GPU")
    parser.add_argument("--health", default="", help="folder of weft health's state: quarantines and open incidents")
    options = parser.parse_args(argv)
    try:
        _serve(options)
    except (ValueError, ImportError, FileNotFoundError) as error:
        _say(str(error))
        return 2
    except OSError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _serve(options: argparse.Namespace) -> None:
    pods_at = Path(options.pods) if options.pods else pods.default(_say)
    if pods_at is not None and not pods_at.exists():
        raise FileNotFoundError(f"--pods {pods_at}: neither a socket nor a file is there")
    jobs_at = Path(options.jobs) if options.jobs else None
    if jobs_at is not None and not jobs_at.is_dir():
        raise FileNotFoundError(f"--jobs {jobs_at}: no such folder")
    health_at = Path(options.health) if options.health else None
    if health_at is not None and not health_at.is_dir():
        raise FileNotFoundError(f"--health {health_at}: no such folder")
    stopped = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with Exporter(options.host, options.port, options.interval, pods_at, jobs_at, health_at, say=_say) as running:
        _say(f"metrics of {len(running.state.snapshot.gpus)} GPUs at http://{options.host}:{running.port}/metrics")
        stopped.wait()


def _say(text: str) -> None:
    sys.stderr.write(f"weft exporter: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
