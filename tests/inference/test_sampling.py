"""Tokens are drawn from the distribution that the parameters say, and what a request gets is its own."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
import tiny
import torch
from test_llm_engine import alone, engine_of, prompts_of, run

import weft
from weft.inference.checkpoint import Folder
from weft.inference.config import read_config
from weft.inference.model import Decoder
from weft.inference.sampling import Row, sample, uniforms
from weft.inference.scheduler import Sequence, Work
from weft.inference.speculation import DraftModel, NGram
from weft.inference.tokenizer import Tokenizer

P = weft.SamplingParameters


def expected(logits, p):
    """The distribution, written as the formulas have it."""
    keep = np.full(len(logits), True)
    order = np.argsort(-logits, kind="stable")
    z = logits / p.temperature
    weights = np.exp(z - z.max())
    if p.top_k:
        keep[order[p.top_k :]] = False
    weights = np.where(keep, weights, 0) / weights[keep].sum()
    if p.min_p:
        weights = np.where(weights >= p.min_p * weights.max(), weights, 0)
    if p.top_p < 1:
        before = np.concatenate([[0], np.cumsum(weights[order])[:-1]])
        weights[order[before >= p.top_p * weights.sum()]] = 0
    return weights / weights.sum()


SHAPES = [
    P(), P(temperature=0.5), P(temperature=2.0, top_k=5), P(top_p=0.6), P(min_p=0.2), P(top_k=1), P(top_p=1e-6),
    P(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
]  # fmt: skip


def test_draws_follow_the_distribution_in_one_batch():
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, 40).astype(np.float32)
    draws = 3000
    rows = [Row(p, (i + 0.5) / draws) for p in SHAPES for i in range(draws)]  # evenly spread numbers: no chance in it
    tokens = sample(torch.from_numpy(logits).expand(len(rows), -1), rows).tokens.view(len(SHAPES), draws)
    for p, found in zip(SHAPES, tokens, strict=True):
        share = np.bincount(found.numpy(), minlength=40) / draws
        assert np.abs(share - expected(logits, p)).max() < 1.5 / draws, p


@pytest.mark.parametrize("p", [
    P(temperature=1e-38), P(temperature=1e-46), P(temperature=1e-29, min_p=0.5), P(temperature=1e-29, top_k=2), P(top_p=1e-46),
    P(top_k=3, top_p=1e-45), P(repetition_penalty=1e-40), P(repetition_penalty=1e-46, temperature=0), P(min_p=1),
    P(repetition_penalty=1e-40, temperature=0.1, top_p=0.5),
])  # fmt: skip
def test_tiny_parameters_leave_the_best_token(p):
    for scale in (1.0, 1e30):
        logits = torch.tensor([[0.5, 3.0, -1.0, -torch.inf, 2.0], [-4.0, 0.25, -9.0, -torch.inf, -5.0]]) * scale
        rows = [Row(p, u, prompt={1, 3}, counts=Counter()) for u in (0.0, 0.999)]
        assert sample(logits, rows).tokens.tolist() == [1, 1]


@pytest.mark.parametrize("p", [P(min_tokens=1, temperature=0), P(min_tokens=1), P(min_tokens=1, top_k=2, logprobs=1)])
def test_a_row_without_tokens_has_none(p):
    rows = [Row(p, 0.5, banned=range(3)), Row(p, 0.5, banned=(0, 2))]
    assert sample(torch.tensor([[1.0, 2.0, 3.0]] * 2), rows).tokens.tolist() == [-1, 1]


def uniform(seed, index):
    """SplitMix64 as its paper has it, of whole numbers."""
    mask = 2**64 - 1
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1342543DE82EF95) & mask
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return (z >> 11) * 2.0**-53


def test_numbers_are_uniform_and_independent():
    seeds = np.array([0, 1, 2, -5 % 2**64, 2**63, 7919], dtype=np.uint64)
    u = uniforms(seeds[:, None], np.arange(200))
    assert ((u >= 0) & (u < 1)).all() and len(np.unique(u)) == u.size
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 60) ** 2 / 60).sum() < 45  # chi squared of 19: below it but for 1 in 1000
    assert np.abs(np.corrcoef(u) - np.eye(6)).max() < 0.25


def test_penalties():
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0, 0.0]])
    p = P(temperature=0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logprobs=5)
    # token 3 was generated twice, token 1 once, token 0 is in the prompt
    row = Row(p, 0.0, prompt={0}, counts=Counter({3: 2, 1: 1}))
    found = sample(logits, [row])
    adjusted = [2.0 / 2, -1.0 * 2 - 0.75, 0.5, 3.0 / 2 - 1.0, 0.0]
    assert found.tokens.tolist() == [int(np.argmax(adjusted))]
    assert found.logprobs.best[0].tolist() == [3, 0, 2, 4, 1]  # log-probabilities are the model's own
    torch.testing.assert_close(found.logprobs.of_best, logits.log_softmax(-1).sort(descending=True).values)
    assert sample(logits, [Row(P(temperature=0), 0.0)]).tokens.tolist() == [3]


def test_repetition_penalty_is_that_of_transformers(model, folder):
    prompt = prompts_of(12)[0]
    tokens = torch.tensor([prompt])
    out = folder[1].generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, repetition_penalty=1.7,
        pad_token_id=0,
    )  # fmt: skip
    got = run(engine_of(model, overlap=True), [prompt], P(max_tokens=20, temperature=0, repetition_penalty=1.7))
    assert got == [out[0, 12:].tolist()]


def test_a_seed_gives_the_same_whatever_the_batch(model):
    prompts = prompts_of(5, 17, 30, 9, 33)
    each = [
        P(max_tokens=12, seed=5), P(max_tokens=12, seed=5, top_p=0.8), P(max_tokens=12, seed=6, top_k=3, temperature=1.3),
        P(max_tokens=12, temperature=0), P(max_tokens=12, seed=-1, min_p=0.1, frequency_penalty=1.0),
    ]  # fmt: skip
    wanted = alone(model, prompts, each)
    for sizes in ({"overlap": True}, {"overlap": False}, {"overlap": True, "cache_tokens": 128, "most_tokens": 20}):
        assert run(engine_of(model, **sizes), prompts, each) == wanted
    assert run(engine_of(model), prompts[:1], P(max_tokens=12, seed=6)) != wanted[:1]
    unseeded = [run(engine_of(model), prompts[:1], P(max_tokens=12)) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("kind", ["ngram", "the model itself", "another model"])
@pytest.mark.parametrize("cache", [4096, 256])
def test_speculation_changes_nothing(model, tmp_path, kind, cache):
    prompts = [p * 3 for p in prompts_of(5, 9, 11)] + prompts_of(40)
    each = [P(max_tokens=n, **more) for n, more in zip(
        (24, 20, 1, 17), ({"temperature": 0}, {"seed": 3, "temperature": 0.4}, {"temperature": 0}, {"seed": 4, "logprobs": 2}),
        strict=True)]  # fmt: skip
    wanted = alone(model, prompts, each)
    engine = engine_of(model, cache_tokens=cache)
    draft = NGram(4)
    if kind != "ngram":
        small = model
        if kind == "another model":
            tiny.folder(tmp_path, seed=1, num_hidden_layers=1)
            small = Decoder(read_config(tmp_path), Folder(tmp_path), torch.device("cpu"), torch.float32)
        draft = DraftModel(engine.config.runner(small, 3), 3)
    engine = engine_of(model, cache_tokens=cache, draft=draft)
    assert run(engine, prompts, each) == wanted
    assert run(engine, prompts, each) == wanted and engine.stats.draft_tokens > 0
    if kind == "the model itself":
        before = engine.stats.draft_tokens - engine.stats.accepted_tokens
        assert run(engine, prompts[:1], each[:1]) == wanted[:1]
        assert engine.stats.draft_tokens - engine.stats.accepted_tokens == before  # all were right


def test_random_numbers_of_arrays():
    seeds, indices = [0, 7, 2**63 + 5, 2**64 - 1], [0, 1, 300, 2**31]
    found = uniforms(np.array(seeds, dtype=np.uint64)[:, None], np.array(indices))
    assert found.tolist() == [[uniform(seed, index) for index in indices] for seed in seeds]


def test_ngrams():
    ngram, choose = NGram(3), random.Random(0)

    def guess(tokens):
        work = Work(Sequence("a", 1, tokens, P(), 99, 0), 0, 1, True)
        return ngram.guess([work])[0]

    assert guess([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1]
    assert guess([7, 1, 7]) == [1, 7, 1]
    assert guess([1, 2, 3]) == [] and guess([4]) == []
    assert guess([1, 1]) == [1, 1, 1]  # it goes on as it began
    growing = Work(Sequence("b", 1, [0], P(), 99, 0), 0, 1, True)
    for _ in range(200):  # what is remembered gives what is found in the whole sequence
        growing.sequence.tokens += choose.choices(range(4), k=choose.randrange(1, 4))
        assert ngram.guess([growing])[0] == guess(list(growing.sequence.tokens))


def test_log_probabilities(model, folder):
    prompt = prompts_of(20)[0]
    llm = weft.LLM(folder[0], device="cpu")
    (got,) = llm.generate([prompt], P(max_tokens=5, temperature=0.7, seed=1, logprobs=3))
    tokens = torch.tensor([prompt + list(got.token_ids)])
    with torch.no_grad():
        log = folder[1](tokens).logits[0, 19:-1].log_softmax(-1)
    for entry, row in zip(got.logprobs, log, strict=True):
        assert math.isclose(entry.logprob, row[entry.token], abs_tol=1e-4)
        best = row.topk(3)
        assert [t for t, _ in entry.best] == best.indices.tolist()
        assert np.allclose([v for _, v in entry.best], best.values, atol=1e-4)


# ---- text ------------------------------------------------------------------------------------------------------------


def tokens_of(text: str) -> list[int]:
    return tiny.tokenizer().encode(text).ids


@pytest.mark.parametrize(
    "text", ["plain", "naïve 日本語 🎉", "🎉" * 3, "e\u0301\u200d\U0001f469\u200d\U0001f467", "\x00\x7f"]
)
def test_streams_have_whole_characters_alone(text):
    stream = Tokenizer(tiny.tokenizer()).stream()
    parts = [stream.add(t) for t in tokens_of(text)]
    assert "".join(parts) + stream.finish() == text
    assert not any("\ufffd" in part for part in parts)
    cut = Tokenizer(tiny.tokenizer()).stream()
    for t in tokens_of("a🎉")[:-1]:
        cut.add(t)
    assert "a" + cut.finish() in ("a\ufffd", "a\ufffd\ufffd\ufffd")


def test_streams_go_on_behind_bytes_that_are_no_text():
    from tokenizers import decoders, models

    vocabulary = {**{f"<0x{b:02X}>": b for b in range(256)}, "\u2581a": 256, "b": 257, "<end>": 258}
    backend = type(tiny.tokenizer())(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<end>"])
    stream = Tokenizer(backend).stream()
    parts = [stream.add(token) for token in (256, ord("j"), 0xFF, 258, 257, 0xC3, 0xA9, 256, 0xE2)]
    assert "".join(parts) == " aj\ufffdb\u00e9 a" and stream.finish() == "\ufffd"


@pytest.mark.parametrize("stop, shown", [
    (("END",), "abEcENab"), (("cEN", "xyz"), "abE"), (("NEVER",), "abEcENabENDxyz"), (("z",), "abEcENabENDxy"),
    (("ENDx", "Da"), "abEcENab"), (("ab",), ""), (("b", "ENa"), "a"),
])  # fmt: skip
def test_stop_texts_across_tokens(stop, shown):
    stream, seen = Tokenizer(tiny.tokenizer()).stream(stop), ""
    for t in tokens_of("abEcENabENDxyz"):
        seen += stream.add(t)
        assert shown.startswith(seen)  # nothing is taken back
        if stream.stopped:
            break
    assert seen + stream.finish() == shown
    assert stream.stopped == (stop != ("NEVER",))


def test_stop_texts_end_a_request(model, folder):
    llm = weft.LLM(folder[0], device="cpu", overlap=True)
    (free,) = llm.generate(["abc"], P(max_tokens=30, temperature=0))
    stop = free.text[7:9]
    (got,) = llm.generate(["abc"], P(max_tokens=30, temperature=0, stop=stop))
    assert got.text == free.text[: free.text.index(stop)] and got.finish_reason == "stop"
    streamed = list(llm.stream("abc", P(max_tokens=30, temperature=0, stop=stop)))
    assert "".join(o.text for o in streamed) == got.text and streamed[-1].finish_reason == "stop"
    assert not llm.engine.busy()


# ---- JSON ------------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "size", "tags"],
    "properties": {
        "name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
}  # fmt: skip


def test_output_of_a_schema_is_of_it(folder):
    pytest.importorskip("llguidance")
    llm = weft.LLM(folder[0], device="cpu", overlap=True)
    each = [P(max_tokens=120, temperature=t, seed=s, json_schema=SCHEMA) for s, t in ((0, 0.0), (1, 1.0), (2, 1.5))]
    for got in llm.generate(["x", "y", "z"], each):
        value = json.loads(got.text)
        assert {*value} == {"name", "size", "tags"} and got.finish_reason == "stop"
        assert len(value["name"]) <= 8 and 0 <= value["size"] <= 99 and {*value["tags"]} <= {"a", "b"} and value["tags"]
    with pytest.raises(ValueError, match="json_schema"):
        llm.generate(["x"], P(json_schema={"type": "nonsense"}))


@pytest.mark.parametrize("name, value, error", [
    ("temperature", -1, ValueError), ("temperature", float("nan"), ValueError), ("temperature", "hot", TypeError),
    ("top_p", 0, ValueError), ("top_p", 1.1, ValueError), ("top_k", -2, ValueError), ("top_k", 1.5, TypeError),
    ("min_p", 2, ValueError), ("max_tokens", 0, ValueError), ("max_tokens", True, TypeError), ("seed", 2**64, ValueError),
    ("repetition_penalty", 0, ValueError), ("presence_penalty", 3, ValueError), ("stop", ("",), ValueError),
    ("stop", (1,), TypeError), ("stop", ("a",) * 99, ValueError), ("stop_token_ids", ("a",), TypeError),
    ("logprobs", 99, ValueError),
    ("json_schema", "{}", TypeError), ("ignore_eos", 1, TypeError),
])  # fmt: skip
def test_parameters_out_of_range(name, value, error):
    with pytest.raises(error, match=f"'{name}'"):
        P(**{name: value})
