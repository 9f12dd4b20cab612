"""Decoding as graphs, whose replays are emulated on a CPU: padded batches, checks of guesses, a draft's steps in a row."""

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


def captured(launch, pool):
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
