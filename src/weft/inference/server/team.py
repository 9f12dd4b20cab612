"""Commands on several ranks. Without a launcher rank 0 starts the others itself, with its own command line. Of ``weft serve``
it has the HTTP server and sends the others each step's calls, which they repeat. A rank that fails, ends the job.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import IO, Any

from weft.comm import ranks as launched
from weft.comm.worker import end_with_parent
from weft.inference.engine import Engine
from weft.inference.parallel import Ranks
from weft.inference.parameters import SamplingParameters
from weft.inference.server.driver import Driver

LOOK_S = 0.2
GRACE_S = 10.0  # for requests to get their errors, and for ranks to end
KEY = "serve/link"  # of the store
Started = list[tuple["subprocess.Popen[bytes]", IO[bytes]]]  # ranks 1 …, and what they wrote as errors


class Team:
    """Rank 0's view of the others.

    Args:
        started: processes that this one started.
    """

    def __init__(self, started: Started):
        self.started = started
        self.links: list[Connection] = []  # of ranks 1 …
        self.driver: Driver | None = None
        self.lost: str | None = None  # why the server ends
        self.on_loss: Callable[[], None] = lambda: None
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="weft-team", daemon=True).start()

    def link(self, ranks: Ranks) -> None:
        """Waits for the other ranks' connections."""
        key, host = secrets.token_bytes(32), os.environ.get("MASTER_ADDR", "127.0.0.1")
        with Listener((host, 0), backlog=ranks.ranks, authkey=key) as listener:
            address: Any = listener.address
            ranks.store.set(KEY, json.dumps([address[0], address[1], key.hex()]))
            found = {}
            for _ in range(1, ranks.ranks):
                link = listener.accept()
                _at_once(link)
                found[json.loads(link.recv_bytes())] = link
        self.links = [found[r] for r in range(1, ranks.ranks)]

    def repeat(self, calls: list[list[Any]] | None) -> None:
        """Has the other ranks make the same calls of their engines, and then a step; None ends them."""
        if calls is None:
            self._ended.set()
        message = json.dumps(calls).encode()
        for link in self.links:
            with contextlib.suppress(OSError) if calls is None else contextlib.nullcontext():
                link.send_bytes(message)

    def guard(self, driver: Driver, on_loss: Callable[[], None]) -> None:
        """From now on a rank that ends gives the engine up and calls ``on_loss``, which has a while to end this process."""
        self.driver, self.on_loss = driver, on_loss

    def end(self) -> None:
        """Ends the processes that were started here; those that the server ran with have a while to end themselves."""
        self._ended.set()
        until = time.monotonic() + (GRACE_S if self.links else 0)
        for process, said in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.01))
            process.kill()
            said.close()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            why, driver = self._lost(), self.driver
            failed = driver and driver.failure and (driver.fault or driver.failure)
            if why is None and not failed:
                continue
            if self._ended.wait(1.0):  # this rank says the cause itself
                return
            why = self._lost() or f"rank 0: {failed}"  # a rank that ends may fail the others' step before it is missed
            self.lost = why
            sys.stderr.write(f"weft: {why}; the other ranks end too\n")
            sys.stderr.flush()
            for process, _ in self.started:
                process.kill()
            if self.driver is not None:
                self.driver.lose()
                self.on_loss()
                time.sleep(GRACE_S)
            os._exit(1)  # this rank may wait for another one in a collective

    def _lost(self) -> str | None:
        """Which rank has ended, and what it said last."""
        for rank, (process, said) in enumerate(self.started, 1):
            if status := process.poll():
                how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
                said.seek(0)
                last = said.read().decode(errors="replace").strip().splitlines()[-1:]
                return f"rank {rank} ended {how}" + "".join(f": {line}" for line in last)
        for rank, link in enumerate(self.links, 1):
            try:
                ended = link.poll()  # the others send nothing
            except OSError:
                ended = True
            if ended:
                return f"rank {rank} ended"
        return None


@contextlib.contextmanager
def team(ranks: int) -> Iterator[Team | None]:
    """The team of a job that a launcher started, or whose other processes start here; None on ranks but the first."""
    who = launched.started()
    if who is not None and who.by == "weft":
        end_with_parent(signal.SIGKILL)
    if who is not None and who.rank:
        yield None
        return
    store, started = _start(ranks) if who is None else (None, [])
    made = Team(started)
    try:
        yield made
    finally:
        made.end()
        del store  # is there until the end


def _start(ranks: int) -> tuple[Any, Started]:
    """Starts ranks 1 … of a job whose rank 0 is this process, with its own command line; and the job's store."""
    import torch
    import torch.distributed as dist

    if "OMP_NUM_THREADS" not in os.environ:  # ranks share this machine's cores
        threads = max(1, torch.get_num_threads() // ranks)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {
        launched.STARTED_BY_WEFT: "serve", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0",
    }  # fmt: skip
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine, whose name need not resolve
    found: Started = []
    for r in range(1, ranks):
        said = tempfile.TemporaryFile()  # noqa: SIM115, is read when the process has ended
        process = subprocess.Popen(
            [sys.executable, "-m", "weft", *sys.argv[1:]], env=os.environ | {"RANK": str(r), "LOCAL_RANK": str(r)},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
        )  # fmt: skip
        found.append((process, said))
    return store, found


def follow(engine: Engine, ranks: Ranks) -> None:
    """Makes the calls that rank 0 sends until it sends its last one.

    Raises:
        ConnectionError: rank 0 ended without one.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 says when
        signal.signal(number, signal.SIG_IGN)
    ranks.store.wait([KEY])
    host, port, key = json.loads(ranks.store.get(KEY))
    with Client((host, port), authkey=bytes.fromhex(key)) as link:
        link.send_bytes(json.dumps(ranks.rank).encode())
        while True:
            try:
                calls = json.loads(link.recv_bytes())
            except EOFError:
                raise ConnectionError("rank 0 of the server has ended") from None
            if calls is None:
                return
            for call, name, *more in calls:
                if call == "add":
                    prompt, parameters = more
                    if biases := parameters["logit_bias"]:  # whose keys JSON made texts
                        parameters["logit_bias"] = {int(token): value for token, value in biases.items()}
                    engine.add(name, prompt, SamplingParameters(**parameters))
                else:
                    engine.abort(name)
            engine.step()


def _at_once(link: Connection) -> None:
    """Small messages do not wait for the receipt of earlier ones."""
    with socket.socket(fileno=os.dup(link.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
