"""Several callers of one ``weft.LLM``: each gets its own outputs, whole, whatever the others do."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import weft
from weft.inference.parameters import SamplingParameters

GREEDY = SamplingParameters(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[1, 2, 3], [9, 8, 7, 6], [5] * 20]


@pytest.fixture(scope="module")
def llm(folder):
    return weft.LLM(folder[0], device="cpu")


@pytest.fixture(scope="module")
def expected(llm):
    return [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]


def test_streams_side_by_side(llm, expected):
    found = [[] for _ in PROMPTS]
    for outputs in zip(*(llm.stream(prompt, GREEDY) for prompt in PROMPTS), strict=True):
        for mine, output in zip(found, outputs, strict=True):
            mine.append(output)
    for mine, whole in zip(found, expected, strict=True):
        assert sum((o.token_ids for o in mine), ()) == whole.token_ids
        assert "".join(o.text for o in mine) == whole.text and mine[-1].finish_reason == "length"


def test_generate_in_the_middle_of_a_stream(llm, expected):
    stream = llm.stream(PROMPTS[0], GREEDY)
    tokens = next(stream).token_ids
    assert llm.generate(PROMPTS[1:], GREEDY) == expected[1:]
    assert tokens + sum((o.token_ids for o in stream), ()) == expected[0].token_ids
    left = llm.stream(PROMPTS[0], GREEDY)
    next(left)
    left.close()
    assert llm.generate(PROMPTS, GREEDY) == expected and not llm._parts and not llm.engine.busy()


def test_threads(llm, expected):
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda i: llm.generate(PROMPTS[i % 3], GREEDY)[0], range(18)))
    assert found == expected * 6 and not llm._parts and not llm.engine.busy()


@pytest.mark.parametrize("given, why", [
    (([PROMPTS[0], 5],), "'prompts' has 5; expected texts or lists"), ((None,), "'prompts' has None"),
    ((iter(PROMPTS),), "'prompts' has <list_iterator"), (("x", {"max_tokens": 3}), "'parameters' is {'max_t.*; expected Sam"),
    (("x", 5), "'parameters' is 5; expected SamplingParameters, or a list"), ((5,), "'prompts' has 5"), ((b"x",), "has b'x'"),
    ((PROMPTS[:1], [None]), "'parameters' has None"),
])  # fmt: skip
def test_what_is_no_prompt_is_named(llm, given, why):
    with pytest.raises(TypeError, match=why):
        llm.generate(*given)


def test_what_is_refused_leaves_no_request(llm):
    for wrong in (None, 5, [400], [1.5]):
        with pytest.raises((TypeError, ValueError)):
            llm.generate([PROMPTS[0], wrong], GREEDY)
        assert not llm._parts and not llm.engine.requests
