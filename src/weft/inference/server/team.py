"""Commands on several processes. Those of ``weft serve`` are the engine's, one a rank, and this process has HTTP and text. Of
other commands with several ranks this process is rank 0 and starts the others with its own command line. A process that fails
ends the job.
"""

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from weft.inference.server.worker import RANK_ENDED, Call, Facts, unpacked

LOOK_S = 0.2
LOAD_GRACE_S = 5.0  # for this process to say itself what keeps the model from being loaded
GRACE_S = 10.0  # for requests to get their errors, and for processes to end
ENGINE_ENDED = "the engine's process ended, so the server ends"  # what clients read


class Team:
    """Processes that this one starts and that end with it.

    Args:
        ranks: of the job.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.started: dict[int, tuple[subprocess.Popen[bytes], IO[bytes] | None]] = {}  # rank: and its errors
        self.lost: str | None = None  # why the job ends
        self.driver: Any = None  # of ranks that serve; is to be given up then
        self.on_loss: Callable[[], None] = lambda: None  # has a while to end this process
        self._ended = threading.Event()

    def launch(self, rank: int, command: list[str], link: Connection | None = None) -> None:
        """Starts a rank. With a ``link`` to it, what it writes as errors is this process's."""
        env = os.environ | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.ranks > 1 else {})
        said = tempfile.TemporaryFile() if link is None else None  # noqa: SIM115, is read when the process has ended
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
            pass_fds=() if link is None else (link.fileno(),), start_new_session=True,  # a terminal's Ctrl-C is for this one
        )  # fmt: skip
        self.started[rank] = (process, said)

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="weft-team", daemon=True).start()

    def end(self, seconds: float = 0.0) -> None:
        """Ends the processes; they have a while to end themselves."""
        self._ended.set()
        until = time.monotonic() + seconds
        for process, said in self.started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.01))
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a device may hold it for a while
                process.wait(5.0)
            if said is not None:
                said.close()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            if self._failed() is None:
                continue
            if self._ended.wait(LOAD_GRACE_S if self.driver is None else 1.0):  # this process says the cause itself
                return
            self.lost = self._failed()
            sys.stderr.write(f"weft: {self.lost}; the {'other ranks end' if self.ranks > 1 else 'server ends'} too\n")
            sys.stderr.flush()
            for process, _ in self.started.values():
                process.kill()
            if self.driver is not None:
                self.driver.lose(RANK_ENDED if self.ranks > 1 else ENGINE_ENDED)
                self.on_loss()
                time.sleep(GRACE_S)
            os._exit(1)  # this process may wait for another one in a collective

    def _failed(self) -> str | None:
        """Why the job cannot go on: a process has ended, which may have failed the others' step first; or a step has raised,
        which several ranks cannot follow."""
        d = self.driver
        raised = self.ranks > 1 and d is not None and d.failure
        return self.dead() or (f"rank 0: {d.fault or d.failure}" if raised else None)

    def dead(self) -> str | None:
        """Which process has ended, and what it said last."""
        for rank, (process, said) in self.started.items():
            if status := process.poll():
                how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
                last: list[str] = []
                if said is not None:
                    said.seek(0)
                    last = said.read().decode(errors="replace").strip().splitlines()[-1:]
                who = f"rank {rank}" if self.ranks > 1 else "the engine's process"
                return f"{who} ended {how}" + "".join(f": {line}" for line in last)
        return None


class EngineProcess(Team):
    """An engine in processes of its own, one a rank, as a :class:`~weft.inference.server.driver.Driver` takes it.

    Args:
        arguments: of :class:`weft.LLM`.
        ranks: of the job.
    """

    def __init__(self, arguments: dict[str, Any], ranks: int = 1):
        super().__init__(ranks)
        self.link, theirs = Pipe()
        self._calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None is the last one
        self._reader: threading.Thread | None = None
        here = 1
        if ranks > 1:
            from weft.comm import ranks as launched

            if launched.started() is None:
                here = ranks
                self._store, env = _job(ranks)
                os.environ |= env
        for rank in range(here):
            link = theirs if rank == 0 else None
            number = "-1" if link is None else str(link.fileno())
            self.launch(rank, ["weft.inference.server.worker", number, json.dumps(arguments)], link)
        theirs.close()
        threading.Thread(target=self._send, name="weft-calls", daemon=True).start()
        self.watch()

    def loaded(self) -> None:
        """Waits for the model.

        Raises:
            what kept it from being loaded.
            ChildProcessError: the process ended without a word.
        """
        try:
            found = self.link.recv()
        except EOFError:
            self.started[0][0].wait(GRACE_S)
            why = self.dead() or "the engine's process ended"
            raise ChildProcessError(f"{why} while it loaded the model") from None
        if isinstance(found, Exception):
            raise found
        self.facts: Facts = found

    def close(self) -> None:
        """Ends the processes, one that loads a model at once."""
        self.put(None)
        self.end(0.0 if self._reader is None else GRACE_S)
        self.link.close()

    # ---- of the driver -------------------------------------------------------------------------------------------

    def start(self, driver: Any) -> None:
        """Gives the driver reports from now on."""

        def receive() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    driver.report(unpacked(self.link.recv()))
            if not self._ended.is_set():
                driver.lose(RANK_ENDED if self.ranks > 1 else ENGINE_ENDED)

        self.driver, self._reader = driver, threading.Thread(target=receive, name="weft-engine", daemon=True)
        self._reader.start()

    def put(self, call: Call) -> None:
        if call is not None and call[0] == "add":
            call = call[:4]  # a grammar is made again there
        self._calls.put(None if call is None else pickle.dumps(call))

    def _send(self) -> None:
        """In a thread of its own, so that an engine which does not read holds up no event loop."""
        with contextlib.suppress(OSError):  # if it has ended, the reader says so
            for call in iter(self._calls.get, None):
                self.link.send_bytes(call)
            self.link.send(None)

    def stop(self, seconds: float) -> None:
        self._ended.set()
        self.put(None)
        if self._reader is not None:
            self._reader.join(seconds)


@contextlib.contextmanager
def team(ranks: int) -> Iterator[None]:
    """A job of which this process is a rank: one that a launcher started, or whose other processes start here."""
    from weft.comm import ranks as launched
    from weft.comm.worker import end_with_parent

    who = launched.started()
    if who is not None:
        if who.by == "weft":
            end_with_parent(signal.SIGKILL)
        yield
        return
    import torch

    store, env = _job(ranks)
    os.environ |= env | {"RANK": "0", "LOCAL_RANK": "0"}
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", torch.get_num_threads())))
    made = Team(ranks)
    for rank in range(1, ranks):
        made.launch(rank, ["weft", *sys.argv[1:]])
    made.watch()
    try:
        yield
    finally:
        made.end()
        del store  # is there until the end


def _job(ranks: int) -> tuple[Any, dict[str, str]]:
    """The store of a job of this machine, and the environment of its ranks."""
    import torch
    import torch.distributed as dist

    from weft.comm import ranks as launched

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        launched.STARTED_BY_WEFT: "serve", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(ranks),
    }  # fmt: skip
    if "OMP_NUM_THREADS" not in os.environ:  # ranks share this machine's cores
        env["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // ranks))
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # one machine, whose name need not resolve
    return store, env
