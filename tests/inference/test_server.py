"""``weft serve`` in a process of its own, and the ``openai`` client."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from tiny import folder
from where import plain_environment

KEY = "key-of-a-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "tiny"
    folder(path)
    return path


class Server:
    def __init__(self, path, *options):
        command = [sys.executable, "-m", "weft", "serve", str(path), "--port", "0", "--device", "cpu", *options]
        settings = plain_environment(WEFT_API_KEY=KEY, OMP_NUM_THREADS="1")
        self.process = subprocess.Popen(
            command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        if " at http://" not in line:
            self.process.kill()
            raise AssertionError(self.process.communicate()[1])
        self.url = line.split(" at ")[1].strip()
        self.client = openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

    def root(self, path):
        return httpx.get(self.url.removesuffix("/v1") + path, timeout=60)

    def metric(self, name):
        page = self.root("/metrics").text
        return float(next(line for line in page.splitlines() if line.startswith(f"vllm:{name}{{")).split()[-1])

    def idle(self):
        end = time.monotonic() + 20
        while self.metric("num_requests_running") + self.metric("num_requests_waiting"):
            assert time.monotonic() < end, "a request goes on"
            time.sleep(0.05)

    def close(self):
        self.client.close()
        self.http.close()

    def end(self):
        self.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            _, errors = self.process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert "Traceback" not in errors, errors


@pytest.fixture(scope="module")
def server(model):
    made = Server(model, "--most-bytes", "200000")
    yield made
    made.end()


def test_completions_are_the_models(server, model):
    from weft import LLM
    from weft.inference.parameters import SamplingParameters

    expected = LLM(model, device="cpu").generate(
        "one two", SamplingParameters(max_tokens=12, temperature=0, ignore_eos=True)
    )
    asked = {
        "model": "tiny",
        "prompt": "one two",
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    found = server.client.completions.create(**asked, logprobs=2)
    assert found.choices[0].text == expected[0].text
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (7, 12)
    assert found.choices[0].finish_reason == "length"
    assert len(found.choices[0].logprobs.tokens) == 12 and len(found.choices[0].logprobs.top_logprobs[0]) == 2
    pieces = list(server.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in pieces if p.choices) == expected[0].text
    assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == 12
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == "length"


def test_chat(server):
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    asked = {"model": "tiny", "max_completion_tokens": 9, "temperature": 0, "extra_body": {"ignore_eos": True}}
    one = server.client.chat.completions.create(messages=[{"role": "user", "content": "Hello"}], **asked)
    two = server.client.chat.completions.create(messages=[{"role": "user", "content": parts}], **asked)
    assert one.choices[0].message.content == two.choices[0].message.content and one.usage.completion_tokens == 9
    streamed = list(
        server.client.chat.completions.create(messages=[{"role": "user", "content": parts}], stream=True, **asked)
    )
    assert streamed[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in streamed) == one.choices[0].message.content
    several = server.client.chat.completions.create(
        messages=[{"role": "user", "content": "x"}],
        n=3,
        max_tokens=5,
        seed=3,
        logprobs=True,
        top_logprobs=2,
        model="tiny",
    )
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert len({tuple(bytes(t.bytes or []) for t in c.logprobs.content) for c in several.choices}) == 3
    unlimited = server.http.post(
        "chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": None}
    )
    assert unlimited.status_code == 200 and unlimited.json()["choices"][0]["finish_reason"] in ("length", "stop")
    assert server.client.models.list().data[0].id == "tiny"


CHAT, TEXT = "chat/completions", "completions"
USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("path, body, status", [
    (TEXT, {"prompt": "x", "max_tokens": 0}, 400),
    (TEXT, {"prompt": "x", "max_tokens": "3"}, 400),
    (TEXT, {"prompt": "x", "temperature": -1}, 400),
    (TEXT, b'{"prompt": "x", "temperature": NaN}', 400),
    (TEXT, b'{"prompt": "x", "top_p": 1e999}', 400),
    (TEXT, b'{"prompt": "\\ud800"}', 400),
    (TEXT, b'{"prompt": "x", "stop": ["\\ud800"]}', 400),
    (TEXT, b'{"prompt": "x", "\\ud800": 1, "max_tokens": "\\ud800"}', 400),
    (TEXT, b"\xff\xfe", 400),
    (TEXT, b"[" * 100_000, 400),
    (TEXT, {"prompt": ""}, 400),
    (TEXT, {"prompt": []}, 400),
    (TEXT, {"prompt": [1, 100_000]}, 400),
    (TEXT, {"prompt": "x" * 5000}, 400),
    (TEXT, {"prompt": "x", "n": 1000}, 400),
    (TEXT, {"prompt": "x", "logprobs": 21}, 400),
    (TEXT, {"prompt": "x", "seed": 2**70}, 400),
    (TEXT, {"prompt": "x", "echo": True}, 400),
    (TEXT, {"prompt": "x", "logit_bias": {"3": 400}}, 400),
    (TEXT, {"prompt": "x", "model": "other"}, 404),
    (TEXT, {"prompt": "x" * 300_000}, 413),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, 400),
    (CHAT, {"messages": USER, "top_logprobs": 3}, 400),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, 400),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}, 400),
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, 400),
    ("nothing", {}, 404),
])  # fmt: skip
def test_what_is_refused_is_named(server, path, body, status):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert found.status_code == status, found.text
    assert found.json()["error"]["message"]


def test_the_key(server):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        assert httpx.get(server.url + "/models", headers=headers).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0).models.list()
    assert server.root("/health").status_code == 200


def test_unknown_arguments_that_change_nothing_are_left_out(server):
    body = {"prompt": "x", "max_tokens": 2, "user": "me", "metadata": {"a": "b"}, "store": False}
    assert server.http.post("completions", json=body).status_code == 200


def test_many_at_once_lose_none(server):
    def one(i):
        text = server.client.completions.create(
            model="tiny", prompt=f"number {i}", max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
        )
        return text.usage.completion_tokens

    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(one, range(200))) == [4] * 200
    server.idle()


def test_bench_llm_counts_the_tokens_of_a_server(server):
    """Random bytes are seldom whole characters: some chunks are of several tokens."""
    from weft.inference.bench.load import Http, Load, run

    async def measure():
        client = Http(server.url, KEY)
        async with client.http:
            assert await client.find_model() == "tiny"
            return await run(client, Load(8, 100.0, (5, 20), (10, 30)))

    made = server.metric("generation_tokens_total")
    lines = asyncio.run(measure())
    assert [(line.error, line.tokens) for line in lines] == [
        (None, c) for _, c, _ in Load(8, 100.0, (5, 20), (10, 30)).asked(256)
    ]
    assert server.metric("generation_tokens_total") - made == sum(line.tokens for line in lines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", ["the request", "the first text"])
def test_a_client_that_leaves_ends_its_generation(server, stream, after):
    host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps({"prompt": "go on", "max_tokens": 200, "stream": stream, "ignore_eos": True, "n": 3}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    made = server.metric("generation_tokens_total")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if after == "the first text" and stream:
            assert b"data: " in b"".join(connection.recv(4096) for _ in range(2))
    server.idle()
    assert server.metric("generation_tokens_total") - made < 600
    assert server.root("/health").status_code == 200


def test_overload_is_said(model):
    """In this process, since it needs another server."""
    from weft import LLM
    from weft.inference.server.app import make_app
    from weft.inference.server.driver import Driver

    llm = LLM(model, device="cpu")
    driver = Driver(llm.engine, most_requests=2)
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}

    async def run():
        transport = httpx.ASGITransport(make_app(driver, llm.tokenizer, "tiny"))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as client:
            found = await asyncio.gather(*[client.post("/v1/completions", json=body) for _ in range(12)])
            return found, await client.post("/v1/completions", json=body)

    try:
        found, later = asyncio.run(run())
    finally:
        driver.stop()
    assert sorted(f.status_code for f in found) == [200] * 2 + [429] * 10
    assert all(f.headers["retry-after"] for f in found if f.status_code == 429)
    assert later.status_code == 200


def test_a_body_that_does_not_come_is_given_up():
    from weft.inference.server.limits import Guard

    sent = []

    async def never():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(Guard(None, seconds=0.05)(scope, never, send))
    assert sent[0]["status"] == 408 and b"0.05 s" in sent[1]["body"]


def test_a_step_that_raises_ends_its_requests_and_not_the_server(model, monkeypatch):
    from weft import LLM
    from weft.inference.parameters import SamplingParameters
    from weft.inference.server.driver import Driver, Failed

    llm = LLM(model, device="cpu")
    driver, step, broken = Driver(llm.engine), llm.engine.step, [True]

    def sometimes():
        if broken:
            broken.pop()
            raise RuntimeError("a fault of the device")
        return step()

    monkeypatch.setattr(llm.engine, "step", sometimes)

    async def run():
        async for output in driver.outputs([1, 2, 3], SamplingParameters(max_tokens=4, ignore_eos=True)):
            last = output
        return last

    try:
        with pytest.raises(Failed, match="a fault of the device"):
            asyncio.run(run())
        assert asyncio.run(run()).finish_reason == "length" and driver.failure is None and driver.live == 0
    finally:
        driver.stop()


def test_an_engine_without_a_token_between_faults_is_given_up(model, monkeypatch):
    """A request's fault is followed by a step that only says that it was ended."""
    from weft import LLM
    from weft.inference.parameters import SamplingParameters
    from weft.inference.server.driver import Driver, Failed
    from weft.inference.server.worker import Worker

    llm = LLM(model, device="cpu")
    driver = Driver(llm.engine)
    monkeypatch.setattr(llm.engine, "_launch", lambda _: 1 / 0)

    async def run():
        async for _ in driver.outputs([1, 2, 3], SamplingParameters(max_tokens=4)):
            pass

    try:
        for _ in range(Worker.FAULTS):
            assert driver.failure is None
            with pytest.raises(Failed, match="ZeroDivisionError"):
                asyncio.run(run())
        assert "ZeroDivisionError" in driver.failure
    finally:
        driver.stop()


def test_schemas_that_python_takes_for_equal(model):
    from weft import LLM
    from weft.inference.parameters import SamplingParameters
    from weft.inference.server.driver import Driver

    llm = LLM(model, device="cpu")
    driver = Driver(llm.engine)

    async def text(schema):
        parameters = SamplingParameters(json_schema=schema, max_tokens=40, temperature=0)
        return "".join([output.text async for output in driver.outputs([1, 2, 3], parameters)])

    async def texts():
        return [await text(schema) for schema in ({"const": 1}, {"const": True}, {"enum": [True]}, {"enum": [1]})]

    try:
        assert asyncio.run(texts()) == ["1", "true", "true", "1"]
    finally:
        driver.stop()


def test_json_of_a_schema(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    found = server.client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=100, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )  # fmt: skip
    assert json.loads(found.choices[0].message.content)["a"] in (1, 2)


def test_outputs_that_wait_come_together():
    from weft.inference.outputs import Output
    from weft.inference.server.driver import Failed, Request

    async def run(came):
        request = Request("a", asyncio.get_running_loop())
        waiting = asyncio.create_task(request.get())
        await asyncio.sleep(0)
        for each in came:
            request.put(each)
        found = [await waiting]
        while request._came:
            found.append(await request.get())
        return found

    one, two = Output("a", (1,), "x"), Output("a", (2, 3), "yz", finish_reason="stop", prompt_tokens=4)
    wrong, failed = Output("a", (), "", finish_reason="error", error="why"), Failed("gone")
    assert asyncio.run(run([one, two])) == [Output("a", (1, 2, 3), "xyz", finish_reason="stop", prompt_tokens=4)]
    assert asyncio.run(run([one, one, wrong])) == [Output("a", (1, 1), "xx"), wrong]
    assert asyncio.run(run([one, failed])) == [one, failed]


def test_reports_between_processes_have_their_order():
    from weft.inference.outputs import Output, Stats, TokenLogprobs
    from weft.inference.server.worker import Report, packed, unpacked

    outputs = [
        Output("a", (1, 2)), Output("a", (3,)), Output("b", (4,), "", (TokenLogprobs(4, -1.0, ()),)), Output("c", (5,)),
        Output("a", (), finish_reason="stop"), Output("d", finish_reason="failed", error="why"),
    ]  # fmt: skip
    report = Report(outputs, Stats(running=3), None, "a fault")
    assert unpacked(packed(report)) == report


def test_text_and_grammars_beside_an_engine_that_has_tokens_alone(model):
    """A stop text ends the engine's request too; a grammar is made while others go on, and not for clients that have left."""
    from weft import LLM
    from weft.inference.parameters import SamplingParameters
    from weft.inference.server.driver import Driver

    llm = LLM(model, device="cpu")
    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    text = llm.generate("one two", SamplingParameters(**greedy))[0].text
    stops = SamplingParameters(stop=(text[9:12],), **greedy)
    expected = llm.generate("one two", stops)[0]
    driver = Driver(llm.engine)
    schema = SamplingParameters(json_schema={"enum": ["a"]}, max_tokens=40, temperature=0)
    wrong = SamplingParameters(json_schema={"type": 7}, max_tokens=40)
    prompt = llm.tokenizer.encode("one two")

    async def all_of(parameters):
        found = [output async for output in driver.outputs(prompt, parameters)]
        return "".join(o.text for o in found), sum((o.token_ids for o in found), ()), found[-1].finish_reason

    async def leave():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(all_of(schema), 1e-4)

    async def together():
        return await asyncio.gather(*map(all_of, (stops, schema, wrong, stops)), return_exceptions=True)

    try:
        asyncio.run(leave())
        one, json_text, refused, two = asyncio.run(together())
        assert one == two == (expected.text, expected.token_ids, "stop")
        assert json_text[0] == '"a"' and isinstance(refused, ValueError) and "json_schema" in str(refused)
        end = time.monotonic() + 20
        while llm.engine.busy():
            assert time.monotonic() < end, "the engine goes on"
            time.sleep(0.01)
        assert driver.live == 0 and driver.stats.running == 0
    finally:
        driver.stop()
