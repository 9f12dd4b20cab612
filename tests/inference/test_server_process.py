"""``weft serve`` as a process: killed and started again on its port, without its folder, and ended while it answers."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection

import openai
import pytest
import tiny
from test_server import Server

import weft
from weft.inference.parameters import SamplingParameters
from weft.inference.server import team
from weft.inference.server.command import NoFilesLeft, allow_connections

LONG = {"model": "tiny", "max_tokens": 230, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}


def begun(server):
    """The first text of a stream, and the others, which are still to come."""
    pieces = iter(server.client.completions.create(prompt="a prompt", **LONG))
    return next(pieces).choices[0].text, (piece.choices[0].text for piece in pieces if piece.choices)


@pytest.mark.long  # two servers are started
def test_killed_and_ended_while_it_answers(tmp_path):
    from weft.inference.server.command import bind

    tiny.folder(tmp_path / "tiny")
    server = Server(tmp_path / "tiny")
    port = server.url.removesuffix("/v1").rsplit(":", 1)[1]
    try:
        with pytest.raises(
            ValueError, match=f"--port {port}: Address already in use; expected an address that is free"
        ):
            bind("127.0.0.1", int(port))
        first, rest = begun(server)
        expected = first + "".join(rest)
        _, rest = begun(server)
    finally:
        server.process.kill()
    with pytest.raises(openai.APIError):
        list(rest)
    server.process.communicate(timeout=30)
    server.close()

    again = Server(tmp_path / "tiny", "--port", port, "--draft", "ngram")
    try:
        shutil.rmtree(tmp_path / "tiny")  # nothing is read from it any more
        answer = again.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=5,
            response_format={"type": "json_object"},
        )
        assert answer.choices[0].message.content
        first, rest = begun(again)
        again.process.send_signal(signal.SIGTERM)
        assert first + "".join(rest) == expected  # what is in work ends first
        _, errors = again.process.communicate(timeout=40)
        assert again.process.returncode in (0, -signal.SIGTERM) and "Traceback" not in errors, errors
        with pytest.raises(openai.APIConnectionError):
            again.client.models.list()
    finally:
        again.process.kill()
        again.close()


def test_a_request_that_does_not_end_in_time_is_answered(tmp_path, monkeypatch, capsys):
    from weft.inference.server import shutdown
    from weft.inference.server.app import make_app
    from weft.inference.server.command import bind
    from weft.inference.server.driver import Driver

    monkeypatch.setattr(shutdown, "ANSWER_S", 20.0)
    tiny.folder(tmp_path / "tiny")
    llm = weft.LLM(tmp_path / "tiny", device="cpu")
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.1), step())[1])  # 230 tokens take 23 s
    driver = Driver(llm.engine)
    made = bind("127.0.0.1", 0)
    made.listen()
    server = shutdown.Server(make_app(driver, llm.tokenizer, "tiny"), driver, seconds=20)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [made]})
    thread.start()
    try:
        port = made.getsockname()[1]
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        pieces = iter(client.completions.create(prompt="a prompt", **LONG))
        assert next(pieces).choices
        server.should_exit = True
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(pieces)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive() and "Traceback" not in capsys.readouterr().err


def test_an_engine_that_does_not_read_holds_up_no_one(monkeypatch):
    """A pipe holds some 200 KB; what is more waits, in its order, and not in the event loop."""
    ends = []
    monkeypatch.setattr(team.Team, "launch", lambda self, rank, command, link: ends.append(os.dup(link.fileno())))
    monkeypatch.setattr(team.Team, "watch", lambda self: None)
    engine = team.EngineProcess({})
    calls = [("add", str(i), [7] * 5000, SamplingParameters()) for i in range(200)]
    for call in calls:
        engine.put((*call, "a grammar"))
    with pytest.raises(AttributeError):
        engine.put(("add", "x", lambda: None, SamplingParameters(), None))  # belongs to its request alone
    engine.put(None)
    with Connection(ends[0]) as there:
        assert [there.recv() for _ in range(201)] == [*calls, None]
    engine.close()


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_a_server_may_have_as_many_connections_as_the_system_lets_it():
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (900, before[1]))
        allow_connections()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1] and 900 < soft <= 65536
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_no_file_for_a_connection_is_said_once_a_second(caplog, monkeypatch):
    import resource

    lines = NoFilesLeft()
    monkeypatch.setattr(logging.getLogger("asyncio"), "filters", [lines])

    async def lasts(clients):
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, backlog=50)
        for client in clients:
            client.connect(server.sockets[0].getsockname())
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        await asyncio.sleep(0.1)
        logging.getLogger("asyncio").error("another line")
        server.close()

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(3)]
        try:
            asyncio.run(lasts(clients))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    said = [each.getMessage() for each in caplog.records if each.name == "asyncio"]
    assert said == ["connections wait: [Errno 24] Too many open files", "another line"]
    lines.last -= 1
    assert lines.filter(logging.LogRecord("asyncio", 40, "", 0, "socket.accept() out of system resource", (), None))
