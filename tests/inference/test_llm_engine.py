"""The engine: what is in the batch, the cache and the queue changes nothing of what a request gets."""

import random
from dataclasses import replace

import pytest
import tiny
import torch

import weft
from weft.inference.cache import Blocks
from weft.inference.checkpoint import Folder
from weft.inference.config import read_config
from weft.inference.engine import Engine, EngineConfig
from weft.inference.model import Decoder
from weft.inference.speculation import NGram

JOBS = 24
GREEDY = weft.SamplingParameters(max_tokens=12, temperature=0, ignore_eos=True)


def engine_of(model, tokenizer=None, draft=None, **sizes):
    sizes = {"cache_tokens": 4096, "most_sequences": 16, "most_tokens": 64, **sizes}
    return Engine(model, tokenizer, EngineConfig(**sizes), draft=draft)


def run(engine, prompts, parameters=GREEDY, most_steps=2000):
    """Tokens of each prompt."""
    each = parameters if isinstance(parameters, list) else [parameters] * len(prompts)
    for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
        engine.add(str(i), prompt, p)
    found = {str(i): [] for i in range(len(prompts))}
    for _ in range(most_steps):
        for output in engine.step():
            found[output.request_id] += output.token_ids
        if not engine.busy():
            assert engine.blocks.used == 0 and not engine.scheduler.running and len(engine.scheduler.slots) == 16
            return [found[str(i)] for i in range(len(prompts))]
    raise AssertionError("the engine does not come to an end")


def alone(model, prompts, parameters=GREEDY):
    each = parameters if isinstance(parameters, list) else [parameters] * len(prompts)
    plain = {"overlap": False, "most_tokens": 4096}
    return [run(engine_of(model, **plain), [prompt], p)[0] for prompt, p in zip(prompts, each, strict=True)]


def prompts_of(*lengths, seed=0):
    choose = random.Random(seed)
    return [[choose.randrange(300) for _ in range(n)] for n in lengths]


def test_a_warm_engine_has_counted_nothing(model):
    for draft in (None, NGram(3)):
        engine = engine_of(model, draft=draft)
        engine.warm()
        assert not engine.busy() and engine.blocks.used == 0
        assert engine.stats == engine_of(model).stats
        assert run(engine, prompts_of(5, 40)) == alone(model, prompts_of(5, 40))
    engine_of(model, max_length=4).warm()  # no room for a prompt and two tokens


@pytest.fixture(scope="module")
def mixed(model):
    """Prompts of all lengths around a block's, some with a common beginning, and what each gets alone."""
    prompts = prompts_of(1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 100)
    prompts += [prompts[9], prompts[9][:32], [*prompts[9][:33], 5], prompts[10][:64] + prompts[2]]
    return prompts, alone(model, prompts)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [7, 64, 4096])
def test_batches_and_chunks_change_nothing(model, mixed, overlap, budget):
    prompts, expected = mixed
    engine = engine_of(model, overlap=overlap, most_tokens=budget)
    assert run(engine, prompts) == expected
    hits = engine.stats.prefix_hits
    assert run(engine, prompts) == expected  # all beginnings are cached now
    assert engine.stats.prefix_hits - hits >= sum((len(p) - 1) // 16 * 16 for p in prompts)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cache", [128, 160, 256])
def test_preempted_sequences_get_what_they_would_have(model, mixed, overlap, cache):
    prompts, expected = mixed
    engine = engine_of(model, overlap=overlap, cache_tokens=cache)
    assert run(engine, prompts) == expected
    assert engine.stats.preemptions > 0
    assert run(engine, prompts) == expected


def test_what_the_cache_held_before_changes_nothing(model, mixed):
    prompts, expected = mixed
    engine = engine_of(model, draft=NGram(3))
    for pages in (*engine.runner.pages.k, *engine.runner.pages.v):
        pages.fill_(torch.nan)
    assert run(engine, prompts[:8]) == expected[:8]


def test_preempted_sequences_hit_the_cache(model):
    prompts = prompts_of(48, 48)
    expected = alone(model, prompts, weft.SamplingParameters(max_tokens=40, temperature=0))
    engine = engine_of(model, cache_tokens=8 * 16)  # both fit, until each needs a fifth block
    assert run(engine, prompts, weft.SamplingParameters(max_tokens=40, temperature=0)) == expected
    assert engine.stats.preemptions >= 1 and engine.stats.prefix_hits > 0


def test_a_cached_block_is_found_by_its_tokens_and_what_is_before_it():
    blocks = Blocks(4, 2)
    (a, b) = blocks.take((), 2)
    blocks.publish(a, None, (1, 2))
    blocks.publish(b, a, (3, 4))
    assert blocks.match([1, 2, 3, 4, 5]) == [a, b]
    assert blocks.match([1, 2, 3, 4]) == [a]  # the last token is always computed
    assert blocks.match([3, 4, 3, 4, 5]) == [] and blocks.match([1, 2, 3, 5, 5]) == [a]
    assert blocks.match([1, 2, 3, 4, 5], root=7) == []
    blocks.give_back([a, b])
    assert blocks.take((), 5) is None and blocks.used == 0
    assert blocks.take([a, b], 3) is None and blocks.take([a, b], 2) is not None
    blocks.give_back([0, 1, 2, 3])
    blocks.take((), 3)  # of two that hold something the one behind goes first: without its beginning it is worthless
    assert blocks.match([1, 2, 3, 4, 5]) == [a]


def test_random_operations_keep_the_books():
    choose, blocks, held = random.Random(0), Blocks(12, 2), []
    for _ in range(2000):
        if held and choose.random() < 0.5:
            blocks.give_back(held.pop(choose.randrange(len(held))))
        else:
            tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 9))]
            shared = blocks.match(tokens)
            got = blocks.take(shared, blocks.blocks_for(len(tokens)) - len(shared))
            if got is not None:
                held.append(got)
                for i in range(len(shared), len(tokens) // 2):
                    blocks.publish(got[i], got[i - 1] if i else None, tuple(tokens[2 * i : 2 * i + 2]))
        owners = [sum(block in each for each in held) for block in range(12)]
        assert owners == blocks.owners and {b for b in range(12) if not owners[b]} == {*blocks.free}
        assert {b: k for k, b in blocks.found.items()} == {b: k for b, k in enumerate(blocks.key) if k is not None}


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_in_every_state(model, overlap):
    prompts = prompts_of(100, 20, 20, 20)
    expected = alone(model, prompts)
    for steps in range(8):  # waiting, in the middle of a prompt, decoding, with a step in flight
        engine = engine_of(model, overlap=overlap, most_sequences=16, cache_tokens=256, most_tokens=32)
        for i, prompt in enumerate(prompts):
            engine.add(str(i), prompt, GREEDY)
        found = {str(i): [] for i in range(4)}
        reasons = {}
        for step in range(200):
            if step == steps:
                for gone in ("0", "2", "nonsense"):
                    engine.abort(gone)
                    engine.abort(gone)
            for output in engine.step():
                assert reasons.get(output.request_id) is None
                found[output.request_id] += output.token_ids
                reasons[output.request_id] = output.finish_reason
        assert not engine.busy() and engine.blocks.used == 0
        assert reasons == {"0": "abort", "1": "length", "2": "abort", "3": "length"}
        assert [found["1"], found["3"]] == [expected[1], expected[3]]
        assert all(expected[i][: len(found[str(i)])] == found[str(i)] for i in (0, 2))
        engine.add("0", prompts[0], GREEDY)  # its name is free


def test_a_step_that_raises_loses_no_outputs(model, monkeypatch):
    """A request ends in it, before another one's launch raises: the next step says so."""
    prompts, p = prompts_of(5, 7), replace(GREEDY, repetition_penalty=1.1)
    expected = alone(model, prompts[:1], p)[0]
    engine, found = engine_of(model, overlap=True), []
    engine.add("ends", prompts[0], p)
    engine.add("goes on", prompts[1], replace(p, max_tokens=50))
    while len(found) < len(expected) - 1:
        found += [t for output in engine.step() if output.request_id == "ends" for t in output.token_ids]
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.runner, "launch", lambda *_: 1 / 0)
        engine.step()
    assert [*engine.requests] == ["goes on"]
    engine.abort("goes on")
    ended = {output.request_id: output for output in engine.step()}
    assert [*found, *ended["ends"].token_ids] == expected and ended["ends"].finish_reason == "length"
    assert ended["goes on"].finish_reason == "abort" and not engine.busy() and engine.blocks.used == 0


def test_what_can_never_run_is_refused(model):
    engine = engine_of(model, cache_tokens=64)
    for prompt, why in (
        ([], "at least one"),
        ([1, -1], "token -1"),
        ([300], "0 … 299"),
        ([True], "token True"),
        ([1] * 64, "64 tokens; expected at most 63"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.add("a", prompt, GREEDY)
    engine.add("a", [1], GREEDY)
    with pytest.raises(ValueError, match="there already"):
        engine.add("a", [1], GREEDY)
    engine.abort("a")
    assert not engine.scheduler.waiting
    (tokens,) = run(
        engine_of(model, cache_tokens=64), [[1] * 50], weft.SamplingParameters(max_tokens=None, temperature=0)
    )
    assert len(tokens) == 14  # the cache is full then
    (tokens,) = run(engine_of(model), [[1] * 250], weft.SamplingParameters(max_tokens=None, temperature=0))
    assert len(tokens) == 6  # the model's longest sequence


def test_end_tokens(model, folder, mixed):
    prompts, expected = mixed
    end = expected[0][5]
    p = replace(GREEDY, stop_token_ids=(end,))
    for overlap in (False, True):
        got = run(engine_of(model, overlap=overlap), prompts[:3], p)
        assert got == [e[: e.index(end) + 1] if end in e else e for e in expected[:3]]


def logprobs_of(decoder, prompts, which, cache, count):
    """Of one of the prompts, in a batch; and how often the batch preempted."""
    engine = Engine(decoder, None, EngineConfig(cache, most_sequences=len(prompts), most_tokens=300, invariant=True))
    p = weft.SamplingParameters(max_tokens=count, temperature=0, ignore_eos=True, logprobs=5)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, p)
    found = []
    while engine.busy():
        found += [x for o in engine.step() if o.request_id == str(which) for x in o.logprobs]
    assert len(found) == count
    return found, engine.stats.preemptions


@pytest.fixture(scope="module")
def invariant(folder):
    return Decoder(read_config(folder[0]), Folder(folder[0]), torch.device("cpu"), torch.float32, invariant=True)


@pytest.mark.parametrize("others", [3, 255, *(pytest.param(n, marks=pytest.mark.long) for n in (256, 257))])
def test_batch_invariant_logits_do_not_depend_on_the_batch(invariant, others):
    choose = random.Random(others)
    watched = prompts_of(1, 2, 15, 33, 70)[choose.randrange(5)]
    prompts = prompts_of(*(choose.randrange(1, 24) for _ in range(others)), seed=1)
    at = choose.randrange(others)
    prompts.insert(at, watched)
    alone, _ = logprobs_of(invariant, [watched], 0, 4096, 5)
    assert logprobs_of(invariant, prompts, at, 4096, 5) == (alone, 0)  # to the last bit
    crowded, preemptions = logprobs_of(invariant, prompts, at, max(128, 4 * others), 5)
    assert crowded == alone and (preemptions or others == 3)


def test_batch_invariant_logits_do_not_depend_on_preemption(invariant):
    prompts = prompts_of(33, 20)
    alone, _ = logprobs_of(invariant, prompts[1:], 0, 4096, 40)
    assert logprobs_of(invariant, prompts, 1, 96, 40) == (alone, 1)


@pytest.mark.parametrize("kind, seed", [
    ("overlap", 0), ("ngram", 0),
    *(pytest.param(kind, seed, marks=pytest.mark.long)
      for seed in (1, 2) for kind in ("overlap", "plain", "ngram", "invariant")),
])  # fmt: skip
def test_any_order_of_requests_and_aborts(model, invariant, seed, kind):
    choose = random.Random(seed)
    decoder = invariant if kind == "invariant" else model
    kinds = [
        {"temperature": 0}, {"seed": 1, "top_p": 0.9}, {"temperature": 0, "repetition_penalty": 1.3},
        {"seed": 2, "logprobs": 1},
    ]  # fmt: skip
    pool = prompts_of(1, 16, 31, 40, 64, seed=seed)
    pool += [p[:16] + p[:7] for p in pool[2:]]
    jobs = [(choose.choice(pool), weft.SamplingParameters(max_tokens=choose.randrange(1, 24), **choose.choice(kinds)))
            for _ in range(JOBS)]  # fmt: skip
    wanted = {}
    for prompt, p in jobs:
        key = tuple(prompt), p
        if key not in wanted:
            one = Engine(
                decoder, None, EngineConfig(4096, most_sequences=16, overlap=False, invariant=kind == "invariant")
            )
            wanted[key] = run(one, [prompt], p)[0]
    sizes = EngineConfig(256, most_sequences=6, most_tokens=48, overlap=kind != "plain", invariant=kind == "invariant")
    engine = Engine(decoder, None, sizes, draft=NGram(3) if kind == "ngram" else None)
    found, ends, queue = {str(i): [] for i in range(JOBS)}, {}, list(range(JOBS))
    for _ in range(3000):
        if queue and choose.random() < 0.3:
            i = queue.pop(0)
            engine.add(str(i), *jobs[i])
        if choose.random() < 0.05:
            engine.abort(str(choose.randrange(JOBS)))
        for output in engine.step():
            found[output.request_id] += output.token_ids
            if output.finish_reason:
                assert output.request_id not in ends
                ends[output.request_id] = output.finish_reason
        if not queue and not engine.busy():
            break
    assert len(ends) == JOBS and engine.blocks.used == 0 and len(engine.scheduler.slots) == 6
    for i, (prompt, p) in enumerate(jobs):
        whole = wanted[tuple(prompt), p]
        assert found[str(i)] == (whole if ends[str(i)] == "length" else whole[: len(found[str(i)])])


@pytest.mark.gpu
@pytest.mark.parametrize("draft", [None, "ngram", "the model itself"])
def test_graphs_on_a_gpu_generate_what_a_cpu_does(folder, model, mixed, draft):
    prompts, expected = mixed
    seeded = replace(GREEDY, temperature=0.5, seed=7)
    drawn = alone(model, prompts, seeded)
    small = folder[0] if draft == "the model itself" else draft
    for tokens in (2048, 256):  # the second preempts
        llm = weft.LLM(folder[0], device="cuda", dtype="fp32", cache_tokens=tokens, most_sequences=8, draft=small)
        for _ in range(2):
            assert [list(c.token_ids) for c in llm.generate(prompts, GREEDY)] == expected
            assert [list(c.token_ids) for c in llm.generate(prompts, seeded)] == drawn
        assert draft != "the model itself" or llm.engine.stats.accepted_tokens > 0


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_batch_invariant_experts(tmp_path, family):
    more = {"shared_expert_intermediate_size": 32} if family == "qwen2_moe" else {}
    tiny.folder(tmp_path, family, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, **more)
    made = Decoder(read_config(tmp_path), Folder(tmp_path), torch.device("cpu"), torch.float32, invariant=True)
    prompts = prompts_of(14, 3, 9, 1, 6, 2)
    alone, _ = logprobs_of(made, prompts[:1], 0, 4096, 4)
    assert logprobs_of(made, prompts, 0, 4096, 4) == (alone, 0)  # to the last bit
    assert logprobs_of(made, prompts[::-1], 5, 64, 4)[0] == alone
