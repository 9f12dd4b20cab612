"""Steps as graphs, whose replays are emulated on a CPU: padded batches, checks of guesses, a draft's steps in a row, and steps
with prompts; on a GPU beside steps that are launched one by one."""

import copy

import pytest
import tiny
import torch
from test_llm_engine import engine_of, prompts_of, run

import weft
from weft.inference import runner
from weft.inference.checkpoint import Folder
from weft.inference.config import read_config
from weft.inference.model import Decoder
from weft.inference.quantized import Quantise, Scheme
from weft.inference.speculation import DraftModel, NGram


class Emulated:
    """Calls the function again and copies its results to where the first call left them."""

    replays = 0

    def __init__(self, launch, pool):
        self.launch, self.results = launch, launch()

    def pool(self):
        return 0

    @torch.inference_mode()
    def replay(self):
        Emulated.replays += 1
        for to, of in zip(self.results, self.launch(), strict=True):
            to.copy_(of)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = []
    for seed in (0, 1):
        path = tmp_path_factory.mktemp(f"model{seed}")
        tiny.folder(path, seed=seed, num_hidden_layers=1)
        made.append(Decoder(read_config(path), Folder(path), torch.device("cpu"), torch.float32))
    return made


def captured(launch, pool, warm=False):
    with torch.inference_mode():
        graph = Emulated(launch, pool)
    return graph, graph.results


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"temperature": 0.3, "seed": 3}])
@pytest.mark.parametrize("kind", [None, "ngram", "the model itself", "another model"])
def test_replays_give_the_same_tokens(models, monkeypatch, kind, parameters):
    model, other = models
    prompts = [p * 3 for p in prompts_of(5, 9, 11)] + prompts_of(1, 40)
    p = [weft.SamplingParameters(max_tokens=n, **parameters) for n in (12, 14, 18, 3, 9)]
    wanted = run(engine_of(model), prompts, p)
    monkeypatch.setattr(runner, "captured", captured)
    monkeypatch.setattr(runner, "GRAPHS", (1, 2, 4))
    monkeypatch.setattr(runner, "DECODING", (0, 1, 4))
    monkeypatch.setattr(runner, "TOKENS", (32, 64))
    monkeypatch.setattr(runner, "KEYS", 64)
    for cache in (4096, 176):  # the second one is too small for all
        engine = engine_of(model, cache_tokens=cache)
        if kind == "ngram":
            draft = NGram(3)
        else:
            draft = kind and DraftModel(engine.config.runner(model if kind == "the model itself" else other, 3), 3)
        engine = engine_of(model, cache_tokens=cache, draft=draft, overlap=False)
        engine.capture(4)  # the fifth sequence does not fit
        before = Emulated.replays
        assert run(engine, prompts, p) == wanted
        assert Emulated.replays - before >= 5


def test_a_longer_engine_leaves_what_a_shorter_one_s_graphs_read(models):
    model = copy.copy(models[0])
    model.angles = tuple(t[:0] for t in model.angles)  # as before other tests' engines
    short = engine_of(model, max_length=32).runner
    there = short.angles
    engine_of(model, max_length=16)
    assert model.angles is there
    long = engine_of(model, max_length=64).runner
    assert short.angles is there and len(there[0]) < len(long.angles[0])
    assert long.angles[0][: len(there[0])].equal(there[0])


def test_steps_with_prompts_are_captured_the_second_time(models, monkeypatch):
    """By rounded sizes, with and without cached beginnings; what does not fit runs as it is."""
    monkeypatch.setattr(runner, "captured", captured)
    engine = engine_of(models[0], most_tokens=4096)
    engine.capture(4)
    made = engine.runner.mixed_graphs
    plain = runner.Sizes(0, 64, 4, 0)
    for seed in range(3):
        run(engine, prompts_of(40, 20, seed=seed), weft.SamplingParameters(max_tokens=1))
        assert (plain in made) and (made[plain] is not None) == (seed > 0)
    run(engine, prompts_of(40, 20), weft.SamplingParameters(max_tokens=1))  # the beginning of the first one is cached
    assert [*made] == [plain, runner.Sizes(0, 64, 4, runner.KEYS)]
    run(engine, prompts_of(65, seed=3), weft.SamplingParameters(max_tokens=1))
    assert [*made][2:] == [runner.Sizes(0, 128, 8, 0)]
    run(engine, prompts_of(*[210] * 11), weft.SamplingParameters(max_tokens=1))
    assert len(made) == 3


def test_warm_captures_every_size_and_changes_nothing(models, monkeypatch):
    prompts, parameters = prompts_of(5, 40, 17, 23, 64), weft.SamplingParameters(max_tokens=5, temperature=0)
    wanted = run(engine_of(models[0]), prompts, parameters)
    for name, value in {"captured": captured, "DECODING": (0, 4), "TOKENS": (32, 64), "KEYS": 64}.items():
        monkeypatch.setattr(runner, name, value)
    engine = engine_of(models[0], most_tokens=70)
    engine.capture(4)
    engine.warm()
    made = engine.runner.mixed_graphs
    assert len(made) == 8 and None not in made.values()
    assert run(engine, prompts, parameters) == wanted and len(made) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mistral", "dynamic", "fp8 cache", "int4"])
def test_graphs_of_steps_with_prompts_change_nothing(tmp_path, kind):
    """Requests that come one after another, some of which begin alike. Of codes an ulp may be a step, so there the first
    tokens' log-probabilities are compared alone."""
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "moe" in kind else {}
    if kind == "dynamic":
        rope = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}
        more = {"rope_parameters": rope, "max_position_embeddings": 64}
    if kind == "mistral":
        more = {"sliding_window": 24}
    family = kind if kind in ("qwen3_moe", "mistral") else "llama"
    tiny.folder(tmp_path, family, num_hidden_layers=2, hidden_size=128, head_dim=32, **more)
    quantise = Quantise(Scheme.of("int4")) if kind == "int4" else None
    dtype = torch.float16 if kind == "int4" else torch.float32
    model = Decoder(read_config(tmp_path), Folder(tmp_path), torch.device("cuda"), dtype, quantise=quantise)
    prompts = prompts_of(5, 100, 17, 230, 64, 33, 1, 48, 90, 16) * 2
    prompts += [[*p[:32], *q] for p, q in zip(prompts, prompts_of(3, 30, 7, 9, seed=1), strict=False)]
    parameters = weft.SamplingParameters(max_tokens=9, temperature=0, ignore_eos=True, logprobs=1)
    found = []
    for graphs in (False, True):
        sizes = {"graphs": graphs, "cache_dtype": torch.float8_e4m3fn if "fp8" in kind else None}
        engine = engine_of(model, cache_tokens=16384, most_tokens=600, **sizes)
        tokens, logprobs = [[] for _ in prompts], torch.zeros(len(prompts))
        waiting = list(enumerate(prompts))
        while waiting or engine.busy():
            for i, prompt in waiting[:2]:
                engine.add(str(i), prompt, parameters)
            del waiting[:2]
            for output in engine.step():
                if not tokens[i := int(output.request_id)] and output.logprobs:
                    logprobs[i] = output.logprobs[0].best[0][1]
                tokens[i] += output.token_ids
        found.append((tokens, logprobs))
    made = [sizes for sizes, graph in engine.runner.mixed_graphs.items() if graph is not None]
    assert {sizes.keys > 0 for sizes in made} == {False, True} and any(sizes.decoding for sizes in made)
    exact = kind not in ("fp8 cache", "int4")
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=1e-3 if exact else 0.2)
    assert found[0][0] == found[1][0] or not exact
