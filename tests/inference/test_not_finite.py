"""Weights that are finite and activations that overflow: the request ends with an error, and others go on."""

import asyncio
import itertools
import json

import httpx
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import weft
from weft.inference.outputs import Output
from weft.inference.parameters import SamplingParameters
from weft.inference.perplexity import perplexity
from weft.inference.sampling import best, uniforms

BAD, GOOD = 7, [1, 2, 3, 4]  # behind the first token the residual overflows float16
GREEDY = SamplingParameters(max_tokens=6, temperature=0)


def scaled(path, factors):
    """Saves a tiny model of which weights are multiplied."""
    tiny.folder(path)
    tensors = load_file(path / "model.safetensors")
    for name, t in tensors.items():
        for part, factor in factors.items():
            if part in name:
                t.mul_(factor)
        if "embed" in name and "embed" not in factors:
            t[BAD] = 60_000 * t[BAD].sign()
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return scaled(tmp_path_factory.mktemp("overflow") / "tiny", {"layers.0.mlp.down_proj": 3000})


def llm(path, **more):
    return weft.LLM(path, device="cpu", dtype="fp16", max_length=128, **more)


@pytest.mark.parametrize("row, token", [
    ([1.0, 3.0, 2.0], 1), ([-3.0, -1.0, 0.0], 2), ([0.0, -1.0, -2.0], 0), ([0.0, 5.0, 0.0], 1), ([0.0, 0.0, 1e-7], 2),
    ([6e4, 6e4, 6e4], 0), ([1.0, torch.nan, 2.0], -1), ([1.0, torch.inf, 2.0], -1), ([-torch.inf] * 3, -1),
    ([0.0] * 3, -1), ([0.0, -0.0, 0.0], -1), ([-torch.inf, 3.0, 2.0], 1), ([1.0, 3.0, -torch.inf], 1), ([0.0, -1.0, 0.0], 0),
    ([0.0, -torch.inf, 0.0], 0),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_logit(row, token, dtype):
    assert best(torch.tensor([row, [1.0, 2.0, 0.0]], dtype=dtype)).tolist() == [token, 1]


@pytest.mark.parametrize("parameters", [
    GREEDY, SamplingParameters(max_tokens=6, seed=1), SamplingParameters(max_tokens=6, seed=1, top_p=0.9, top_k=5, logprobs=2),
    SamplingParameters(max_tokens=6, temperature=0, repetition_penalty=1.2),
])  # fmt: skip
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_others_go_on_in_the_same_batch_and_in_its_blocks(model, parameters, draft):
    made = llm(model, cache_tokens=128, draft=draft, overlap=True)
    alone = made.generate([GOOD], parameters)[0]
    assert len(alone.token_ids) == 6 and alone.error is None
    for _ in range(2):
        found = made.generate([[BAD] * 20, GOOD, [*GOOD, BAD]], parameters)
        assert [f.finish_reason for f in found] == ["error", "length", "error"]
        assert found[1] == alone and found[0].token_ids == ()
        assert "not finite" in found[0].error and "float16" in found[0].error and "behind 20 tokens" in found[0].error
    assert torch.cat([v.isnan().any((1, 2, 3)) for v in made.engine.runner.pages.v]).sum() > 2  # blocks were dirty
    assert made.generate([GOOD], parameters)[0] == alone and not made.engine.busy()


@pytest.mark.parametrize("factors, dtype", [
    ({"down_proj": 1e30}, "fp32"), ({"down_proj": 1e38}, "bf16"), ({"q_proj": 1e38}, "fp32"), ({"embed": 1e38}, "fp32"),
])  # fmt: skip
def test_huge_weights(tmp_path, factors, dtype):
    made = weft.LLM(scaled(tmp_path, factors), device="cpu", dtype=dtype)
    found = made.generate([GOOD, GOOD], [GREEDY, SamplingParameters(max_tokens=6, seed=1)])
    assert [f.finish_reason for f in found] == ["error", "error"], found


def test_perplexity_and_the_command(model):
    with pytest.raises(ValueError, match="not finite"):
        perplexity(llm(model).engine.model, [*GOOD, BAD, *GOOD])
    text = tiny.tokenizer().decode([BAD])
    asked = ["generate", str(model), text, "--plain", "--device", "cpu", "--dtype", "fp16"]
    from weft.cli import app

    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 1 and "not finite" in str(found.exception)


def test_what_is_said_behind_a_part_of_an_output_has_a_line_of_its_own(model, monkeypatch):
    from weft.cli import app

    def some(*_):
        yield Output("0", (1,), text="some")
        raise KeyboardInterrupt

    monkeypatch.setattr(weft.LLM, "stream", some)
    found = CliRunner().invoke(app, ["generate", str(model), "hi", "--plain", "--device", "cpu"])
    assert found.exit_code and found.stdout.startswith("some\n"), found.output


def test_options_of_generate_reach_the_sampler(model, monkeypatch):
    from weft.cli import app

    given = {"min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.75}
    found = []
    monkeypatch.setattr(weft.LLM, "stream", lambda *args: found.append(args[2]) or [])
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = CliRunner().invoke(app, ["generate", str(model), "hi", "--plain", "--device", "cpu", *words])
    assert done.exit_code == 0 and {name: getattr(found[0], name) for name in given} == given


def test_a_server_ends_that_request_alone(model):
    from weft.inference.server.app import make_app
    from weft.inference.server.driver import Driver

    made = llm(model)
    driver = Driver(made.engine)
    # at this temperature tokens are almost equally probable, so BAD comes when the random number is that of its share
    seed = next(
        s for s in itertools.count()
        if any(abs(uniforms(np.array(s, dtype=np.uint64), np.arange(4, 20)) * 300 - (BAD + 0.5)) < 0.1)
    )  # fmt: skip
    bad = {"prompt": [BAD], "max_tokens": 5}
    late = {"prompt": GOOD, "max_tokens": 100, "temperature": 100, "seed": seed, "stream": True}
    good = {"prompt": GOOD, "max_tokens": 6, "temperature": 0}

    async def run():
        transport = httpx.ASGITransport(make_app(driver, made.tokenizer, "tiny"))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as client:
            bodies = [bad, {**bad, "stream": True}, late, good, {**bad, "n": 3}]
            return await asyncio.gather(*[client.post("/v1/completions", json=body) for body in bodies])

    try:
        whole, first, later, fine, several = asyncio.run(run())
    finally:
        driver.stop()
    for found in (whole, first, several):
        assert found.status_code == 500 and found.json()["error"]["code"] == "generation_failed", found.text
        assert "not finite" in found.json()["error"]["message"]
    events = [e.removeprefix("data: ") for e in later.text.strip().split("\n\n")]
    assert later.status_code == 200 and events[-1] == "[DONE]" and "choices" in json.loads(events[0])
    assert "not finite" in json.loads(events[-2])["error"]["message"]
    assert fine.status_code == 200 and fine.json()["usage"]["completion_tokens"] == 6
    assert driver.failure == "the server is stopping" and driver.live == 0
