"""``weft bench-llm``: its arithmetic by hand, and runs of a tiny model."""

import asyncio
import itertools
import json
import math
import re

import pytest
from tiny import folder
from typer.testing import CliRunner

from weft.inference.bench.command import _url
from weft.inference.bench.figures import Bound, Slo, model_flops, percentile, rows, summary
from weft.inference.bench.load import Http, InProcess, Load, Timeline, run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny"
    return path, folder(path)


def test_the_load_is_what_was_asked_for():
    load = Load(400, 20.0, (10, 30), (3, 5), shared=8, seed=1)
    asked = load.asked(100)
    assert asked == load.asked(100) != Load(400, 20.0, (10, 30), (3, 5), shared=8, seed=2).asked(100)
    lengths = {len(p) for p, *_ in asked}
    assert (min(lengths), max(lengths)) == (10, 30) and {c for _, c, _ in asked} == {3, 4, 5}
    assert len({tuple(p[:8]) for p, *_ in asked}) == 1 and len({tuple(p[8:]) for p, *_ in asked}) > 390
    gaps = [b - a for (*_, a), (*_, b) in itertools.pairwise(asked)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 20, rel=0.15) and spread == pytest.approx(mean, rel=0.2)  # exponential
    assert {at for *_, at in Load(5).asked(10)} == {0.0}


LINES = [
    Timeline(100, 0.0, [(1.0, 1), (1.5, 1), (2.5, 2)]),  # gaps 0.5 0.5 0.5
    Timeline(200, 1.0, [(4.0, 1), (5.0, 1)]),  # first after 3, gap 1
    Timeline(300, 0.5, [(1.0, 1)], error="lost"),
]


def test_figures_by_hand():
    found = summary(LINES, Slo(ttft=2.0, itl=0.6))
    expected = {
        "requests": 3, "failed": 1, "errors": ["lost"], "seconds": 5.0, "requests_per_s": 0.4, "output_tokens": 6,
        "input_tokens": 300, "output_tokens_per_s": 1.2, "total_tokens_per_s": 61.2, "ttft_p50_s": 1.0, "ttft_p99_s": 3.0,
        "itl_p50_s": 0.5, "itl_p99_s": 1.0, "e2e_p50_s": 2.5, "e2e_p99_s": 4.0, "mean_batch": 1.3,
        "goodput_requests_per_s": 0.2, "met_slo": pytest.approx(1 / 3),
    }  # fmt: skip
    assert found == expected
    assert summary(LINES[2:]) == {"requests": 1, "failed": 1, "errors": ["lost"]}
    assert [percentile(range(1, 101), p) for p in (0.5, 0.99, 1.0)] == [50, 99, 100] and percentile([7], 0.99) == 7


def test_bounds_by_hand():
    memory = Bound(weights=1000, token=10, layers=50.0, head=20.0, bandwidth=1000.0, matrix=math.inf)
    assert memory.step(2, 30) == 1.6 and memory.prompt(10**6) == 1.0
    # 4 steps read the weights; 4 tokens behind 102 and 2 behind 201 of cache
    assert memory.whole(LINES[:2]) == pytest.approx((4 * 1000 + (4 * 102 + 2 * 201) * 10) / 1000)
    compute = Bound(1, 0, 50.0, 20.0, math.inf, 100.0)
    assert compute.step(3, 30) == 2.1 and compute.prompt(10) == 5.2
    assert compute.whole(LINES[:2]) == pytest.approx((306 * 50 + 6 * 20) / 100)
    found = summary(LINES[:2], bound=memory)
    assert "throughput_share" not in summary(LINES[:2], bound=memory, at_once=False)
    assert found["throughput_share"] == pytest.approx(12.1 / 5) and found["ttft_share"] == 1.0
    assert found["itl_share"] == pytest.approx(memory.step(1.0, 151.5) / 0.5)


def test_the_bound_of_a_model_counts_its_weights(model):
    from weft import LLM
    from weft.hardware.ceilings import Ceilings

    path, reference = model
    llm = LLM(path, device="cpu")
    linear = sum(p.numel() for n, p in reference.named_parameters() if "proj" in n)
    head = reference.lm_head.weight.numel()
    assert model_flops(llm.engine.model.config) == (2 * linear, 2 * head)
    rates = Ceilings("cpu", {(1, 0): 5.0, (0, 1): 9.0, (1, 1): 4.0}, {"fp32": 7.0})
    bound = Bound.of(llm.engine.model, 512, rates)
    norms = sum(p.numel() for n, p in reference.named_parameters() if "layernorm" in n)
    assert (bound.bandwidth, bound.matrix, bound.weights) == (5.0, 7.0, 4 * (linear + head + norms))


def test_the_bound_of_codes_counts_what_a_step_reads(model):
    """On a CPU they are dequantised once."""
    from weft import LLM
    from weft.inference.server.worker import Facts

    plain, codes = (LLM(model[0], device="cpu", quantize=q).engine for q in (None, "int8"))
    assert Facts.of(plain).bytes == Facts.of(codes).bytes
    layer = codes.model.layers[0][1].out
    assert layer.bytes == layer.dense.nbytes != layer.weight.nbytes
    layer.dense = None  # as on a GPU
    assert layer.bytes == layer.weight.nbytes


def test_requests_of_a_model_here(model):
    from weft import LLM
    from weft.inference.server.driver import Driver

    driver = Driver(LLM(model[0], device="cpu", max_length=64).engine)
    try:
        lines = asyncio.run(run(InProcess(driver), Load(6, 200.0, (4, 90), (1, 9), seed=4)))
    finally:
        driver.stop()
    asked = Load(6, 200.0, (4, 90), (1, 9), seed=4).asked(300)
    fits = [len(p) + c <= 64 for p, c, _ in asked]
    assert any(fits) and not all(fits)
    for line, (prompt, count, arrival), ok in zip(lines, asked, fits, strict=True):
        assert line.input_tokens == len(prompt) and line.sent >= arrival
        assert (line.error is None) == ok
        if ok:
            together = line.came[0][1]  # the first tokens, where the loop was busy
            assert line.tokens == count and line.first > 0 and len(line.gaps) == count - together


@pytest.fixture
def compiled(monkeypatch):
    """Processes that start in the test do not interpret kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.share(2)
@pytest.mark.parametrize("as_json", [True, False])
def test_command(model, tmp_path, monkeypatch, compiled, as_json):
    from weft.cli import app
    from weft.hardware import ceilings

    monkeypatch.setenv("WEFT_RESULTS", str(tmp_path))
    fixed = ceilings.Ceilings("cpu", {(1, 0): 1e9, (1, 1): 1e9}, {"fp32": 1e9})
    monkeypatch.setattr(ceilings, "measure", lambda *_, **__: fixed)
    # 32 tokens: a busy loop joins a few to one message
    options = ["--requests", "3", "--input", "8:12", "--output", "32", "--slo", "ttft=60,itl=60", "--device", "cpu"]
    words = ["bench-llm", str(model[0]), "--rate", "inf", "--rate", "50", *options]
    if not as_json:
        shown = CliRunner().invoke(app, words)
        assert shown.exit_code == 0 and "within the SLO" in shown.output and "failed requests" not in shown.output
        return
    result = CliRunner().invoke(app, [*words, "--save", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (saved,) = [json.loads(line) for line in next(tmp_path.glob("*/serving.jsonl")).read_text().splitlines()]
    assert {k: saved[k] for k in found} == found and saved["commit"] is not None
    assert [r["load"]["rate"] for r in found["runs"]] == [None, 50.0]
    for each in found["runs"]:
        figures = each["figures"]
        assert figures["failed"] == 0 and figures["output_tokens"] == 96 and figures["met_slo"] == 1
        assert 0 < figures["itl_share"] < 1 and figures["ttft_p50_s"] <= figures["e2e_p50_s"]
    assert found["draft"] is None
    head, body = rows(found["runs"])
    assert head == ["arrivals a second", "all at once", "50.0"] and all(len(row) == 3 for row in body)


@pytest.mark.share(2)
def test_a_draft_reaches_the_engine(model, monkeypatch, compiled):
    from weft.cli import app
    from weft.inference.server import team

    began, given = team.EngineProcess.__init__, []
    monkeypatch.setattr(team.EngineProcess, "__init__", lambda self, *a: given.append(a[0]) or began(self, *a))
    words = ["--requests", "2", "--input", "8", "--output", "4", "--device", "cpu", "--draft", "ngram", "--json"]
    result = CliRunner().invoke(app, ["bench-llm", str(model[0]), *words])
    assert result.exit_code == 0 and given[0]["draft"] == "ngram", result.output
    found = json.loads(result.stdout)
    (figures,) = [each["figures"] for each in found["runs"]]
    assert found["draft"] == "ngram" and found["bound"] is None
    assert figures["output_tokens"] == 8 and not any(name.endswith("_share") for name in figures)


@pytest.mark.parametrize("words, message", [
    (["--rate", "0"], "--rate is 0"), (["--rate", "x"], "--rate is 'x'"), (["--rate", "nan"], "--rate is nan"),
    (["--input", "9:3"], "--input is '9:3'"), (["--output", "0"], "--output is '0'"), (["--input", "1:2:3"], "LEAST:MOST"),
    (["--shared", "128"], "--shared is 128"), (["--slo", "ttft=-1"], "--slo is"), (["--slo", "e2e=1"], "ttft=0.5"),
    (["--peer", "vlm"], "vllm"), (["--peer", "transformers", "--rate", "3"], "--rate inf"),
    (["--peer", "transformers", "--input", "3:4"], "pad"), (["--input", "200", "--output", "100"], "at most 256"),
])  # fmt: skip
def test_what_is_wrong_is_named(model, words, message, compiled):
    from weft.cli import app

    result = CliRunner().invoke(app, ["bench-llm", str(model[0]), "--device", "cpu", *words])
    said = re.sub(r"\s+", " ", f"{result.exception}")
    assert result.exit_code and message in said, said
    assert isinstance(result.exception, (ValueError, LookupError))


def test_a_server_that_is_not_there():
    from weft.cli import app

    for given in ("http://127.0.0.1:9/v1", "http://127.0.0.1:9", "127.0.0.1:9", "127.0.0.1:9/v1/"):
        result = CliRunner().invoke(app, ["bench-llm", given])
        assert isinstance(result.exception, ConnectionError)
        assert str(result.exception).startswith("http://127.0.0.1:9/v1/models: "), result.exception


def test_what_is_a_url_and_what_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "host:80").mkdir()
    assert _url("host:80") is None and _url("smollm2") is None
    assert _url("host:81") == "http://host:81/v1" == _url("http://host:81/")
    assert _url("[::1]:8000/api") == "http://[::1]:8000/api" and _url("https://host") == "https://host/v1"
    for neither in ("none", "none.gguf", "a/b:8", "host:", "host:x"):
        with pytest.raises(
            FileNotFoundError, match=rf"no model at {neither}; expected a folder, .* HOST:PORT or http:"
        ):
            _url(neither)


async def asked(answer, ask):
    """What the client of a server with that answer says."""
    import httpx

    client = Http("http://x/v1", "wrong", None)
    await client.http.aclose()
    transport = httpx.MockTransport(lambda _: answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://x/v1/") as client.http:
        return await ask(client)


@pytest.mark.parametrize(
    "status, why", [(401, "status 401; .*--api-key"), (404, "status 404; .*--name one without a list")]
)
def test_a_server_without_a_list_of_models_or_that_wants_a_key(status, why):
    import httpx

    with pytest.raises(ConnectionError, match=rf"^http://x/v1/models: {why}[^\n]*$"):
        asyncio.run(asked(httpx.Response(status), lambda client: client.find_model()))


@pytest.mark.parametrize("space", ["", " "])
def test_events_may_have_a_space(space):
    import httpx

    async def counts(client):
        return [n async for n in client.tokens([1, 2], 3)]

    text = "".join(f"data:{space}{line}\n\n" for line in ['{"choices": [{"text": "a"}]}'] * 3 + ["[DONE]"])
    assert asyncio.run(asked(httpx.Response(200, text=text), counts)) == [1, 2, 3]
