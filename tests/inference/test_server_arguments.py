"""What clients of OpenAI's and vLLM's servers send: served, or refused by name."""

import asyncio
import json
import sys
import time
import types

import httpx
import jsonschema
import pytest
import tiny
import torch

import weft
from weft.inference.outputs import TokenLogprobs
from weft.inference.parameters import SamplingParameters
from weft.inference.sampling import Row, sample
from weft.inference.server.app import Choice, Text, make_app
from weft.inference.server.driver import Driver

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "x"}]
SLOW = "{% for i in range(9999) %}{% for i in range(9999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if messages[0].content == 'slow' %}" + SLOW + "{% endif %}" + tiny.TEMPLATE


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("arguments")
    tiny.folder(path, eos_token_id=299)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return weft.LLM(path, device="cpu")


@pytest.fixture(scope="module")
def ask(llm):
    """Sends bodies to one server at once; answers in their order."""
    driver = Driver(llm.engine)
    app = make_app(driver, llm.tokenizer, "tiny", key="k", seconds=0.5)
    loop = asyncio.new_event_loop()

    def send(*bodies, key="k"):
        async def run():
            transport = httpx.ASGITransport(app)
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://x", timeout=60, headers=headers
            ) as client:

                async def count():
                    send.ticks = 0
                    while True:
                        await asyncio.sleep(0.01)
                        send.ticks += 1

                ticks = asyncio.create_task(count())
                try:
                    return await asyncio.gather(
                        *[
                            client.get(path) if body is None else client.post(path, content=json.dumps(body))
                            for path, body in bodies
                        ]
                    )
                finally:
                    ticks.cancel()

        return loop.run_until_complete(run())

    send.driver = driver
    yield send
    loop.close()
    driver.stop()


def texts(found):
    assert found.status_code == 200, found.text
    return [c["message"]["content"] if "message" in c else c["text"] for c in found.json()["choices"]]


def tokens(llm, prompt, **more):
    return llm.generate([prompt], SamplingParameters(**{"temperature": 0, "max_tokens": 8, **more}))[0].token_ids


def test_biases_and_the_least_number_of_tokens(llm):
    plain = tokens(llm, [1, 2, 3], max_tokens=20)
    assert tokens(llm, [1, 2, 3], logit_bias={7: 100}) == (7,) * 8
    assert plain[0] not in tokens(llm, [1, 2, 3], logit_bias={plain[0]: -100})
    p = SamplingParameters(temperature=0, logit_bias={1: 5, 2: 4.0}, presence_penalty=2)
    rows = [Row(p, 0, counts={1: 1}), Row(p, 0, counts={}), Row(p, 0, counts={}, banned=(1, 3))]
    assert sample(torch.tensor([[0.0, 0, 0, 3.5]] * 3), rows).tokens.tolist() == [2, 1, 2]
    assert tokens(llm, [1, 2, 3], logit_bias={299: 100}) == (299,)
    assert tokens(llm, [1, 2, 3], logit_bias={299: 100}, min_tokens=5, max_tokens=20)[5:] == (299,)
    assert tokens(llm, [1, 2, 3], stop_token_ids=(plain[2],), max_tokens=20) == plain[:3]
    more = tokens(llm, [1, 2, 3], stop_token_ids=(plain[2],), min_tokens=9, max_tokens=20)
    assert len(more) >= 9 and plain[2] not in more[:9] and more[:2] == plain[:2]
    for temperature in (0.0, 1.0):  # alone and beside a request without any
        p = SamplingParameters(max_tokens=6, seed=1, temperature=temperature)
        biased = SamplingParameters(max_tokens=6, seed=1, temperature=temperature, logit_bias={7: 3.0}, min_tokens=2)
        alone = [llm.generate([[1, 2]], each)[0] for each in (p, biased)]
        assert llm.generate([[1, 2], [1, 2]], [p, biased]) == alone


@pytest.mark.parametrize("given, error, why", [
    ({"min_tokens": -1}, ValueError, "'min_tokens' is -1; expected 0 … 256"),
    ({"min_tokens": 300}, ValueError, "'min_tokens' is 300"),
    ({"logit_bias": {"1": 2}}, TypeError, "token ids to numbers"), ({"logit_bias": {1: 101}}, ValueError, "-100 … 100"),
    ({"logit_bias": {1: float("nan")}}, ValueError, "-100 … 100"), ({"logit_bias": [1]}, TypeError, "token ids"),
    ({"logit_bias": dict.fromkeys(range(2000), 1)}, ValueError, "at most 1024"),
    ({"min_tokens": 2, "json_schema": {}}, ValueError, "beside json_schema"),
    ({"stop": ""}, ValueError, "'stop' is .*; expected texts that are not empty"),
    ({"stop": ["a", 1]}, TypeError, "'stop' is .*; expected a tuple of texts"),
    ({"stop_token_ids": [1] * 2000}, ValueError, "'stop_token_ids' has 2000 ids; expected at most 1024"),
])  # fmt: skip
def test_parameters_out_of_range(given, error, why):
    with pytest.raises(error, match=why):
        SamplingParameters(**given)


def test_a_request_without_tokens_ends_with_an_error(llm):
    p = SamplingParameters(temperature=0, min_tokens=3, stop_token_ids=tuple(range(300)))
    (found,) = llm.generate([[1]], p)
    assert found.finish_reason == "error" and found.token_ids == () and "min_tokens" in found.error


def test_seeds_of_choices_go_round(ask):
    body = {"prompt": "one", "max_tokens": 4, "n": 2, "seed": 2**64 - 1}
    several, last, first, beyond = ask(*[
        ("/v1/completions", each) for each in (body, {**body, "n": 1}, {**body, "n": 1, "seed": 0}, {**body, "seed": 2**64})
    ])  # fmt: skip
    assert texts(several) == [*texts(last), *texts(first)]
    assert beyond.status_code == 400 and "'seed' is 18446744073709551616" in beyond.text


def test_errors_name_the_argument_that_came(ask):
    for name in ("max_tokens", "max_completion_tokens"):
        (found,) = ask((CHAT, {"messages": USER, name: 0}))
        error = found.json()["error"]
        assert error["param"] == name and error["message"] == f"argument '{name}' is 0; expected at least 1"


def test_more_tokens_than_there_is_room_for(ask, llm):
    room = 256 - len(llm.tokenizer.encode(llm.tokenizer.chat_text(USER), False))
    for path, base, name, most in (
        (TEXT, {"prompt": [[5], [5] * 7]}, "max_tokens", 249), (CHAT, {"messages": USER}, "max_tokens", room),
        (CHAT, {"messages": USER, "max_tokens": 1}, "max_completion_tokens", room),
    ):  # fmt: skip
        over, all_of_it = ask((path, {**base, name: most + 1}), (path, {**base, name: most, "stop_token_ids": [0]}))
        why = f"argument '{name}' is {most + 1} behind a prompt of {256 - most} tokens; expected at most {most}, "
        assert over.status_code == 400 and all_of_it.status_code == 200, all_of_it.text
        assert over.json()["error"]["message"].startswith(why) and over.json()["error"]["param"] == name
    asked = {"ignore_eos": True, "max_tokens": None}
    default, rest = ask((TEXT, {**asked, "prompt": [5] * 250}), (CHAT, {**asked, "messages": USER}))
    assert [each.json()["usage"]["completion_tokens"] for each in (default, rest)] == [6, room]


def test_a_token_has_one_bias(ask):
    (found,) = ask(("/v1/completions", {"prompt": "one", "logit_bias": {"065": 100, "65": -100}}))
    assert found.status_code == 400 and "'logit_bias' has token 65 twice" in found.text


def test_minus_one_takes_all_tokens():
    assert SamplingParameters(top_k=-1) == SamplingParameters(top_k=0)


def test_tokens_out_of_the_vocabulary(llm):
    for given in (
        {"logit_bias": {300: 1}},
        {"stop_token_ids": (99999999,)},
        {"min_tokens": 2, "stop_token_ids": (300,)},
        {"min_tokens": 2, "stop_token_ids": (-1,)},
    ):
        with pytest.raises(ValueError, match="expected ids 0 … 299"):
            tokens(llm, [1], **given)
    assert not llm.engine.busy()


@pytest.mark.parametrize("given, why", [
    ({"cache_dtype": "int8"}, "'cache_dtype' is 'int8'; expected one of float32, float16, bfloat16, float8_e4m3fn"),
    ({"cache_tokens": 15}, "'cache_tokens' is 15; expected an int of at least 16"),
    ({"cache_tokens": 0}, "'cache_tokens' is 0"), ({"most_sequences": 0}, "'most_sequences' is 0"),
    ({"tensor_parallel": 0}, "'tensor_parallel' is 0"), ({"memory": 2}, "'memory' is 2"),
    ({"draft": "ngram", "batch_invariant": True}, "'draft' beside batch_invariant"),
])  # fmt: skip
def test_arguments_are_checked_before_anything_is_read(tmp_path, given, why):
    with pytest.raises(ValueError, match=why):
        weft.LLM(tmp_path / "none", device="cpu", **given)


def test_a_draft_is_checked_before_weights_are_loaded(tmp_path, monkeypatch):
    tiny.folder(tmp_path / "model")
    tiny.folder(tmp_path / "draft", vocab_size=310)
    monkeypatch.setattr("weft.inference.llm.Decoder", None)
    with pytest.raises(ValueError, match="'draft' has a vocabulary of 310; expected 300"):
        weft.LLM(tmp_path / "model", device="cpu", draft=tmp_path / "draft")


@pytest.mark.parametrize("messages", ["Hi", {"role": "user", "content": "Hi"}, ["Hi"]])
def test_a_conversation_is_a_list_of_messages(llm, messages):
    with pytest.raises(ValueError, match=r"argument 'messages' is .*; expected a list of"):
        llm.chat(messages)


def test_served_arguments(ask, llm):
    base = {"prompt": "one", "max_tokens": 6, "temperature": 0}
    ids = llm.tokenizer.encode("one")
    same = [
        base,
        {**base, "prompt": ids},
        {**base, "prompt": [ids]},
        {**base, "best_of": 1},
        {**base, "add_special_tokens": False},
    ]
    found = [texts(answer) for answer in ask(*[(TEXT, body) for body in same])]
    assert found == [found[0]] * len(same)
    several, bias, least, chat, kwargs = ask(
        (TEXT, {**base, "prompt": [ids, [5, 6]], "n": 2, "best_of": 2, "temperature": 1, "seed": 1}),
        (TEXT, {**base, "logit_bias": {"7": 100}}),
        (TEXT, {**base, "logit_bias": {"299": 100}, "min_tokens": 4, "return_token_strs": True}),
        (
            CHAT,
            {"messages": USER, "max_tokens": 5, "chat_template_kwargs": {"enable_thinking": False}, "ignore_eos": True},
        ),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}),
    )
    assert len(texts(several)) == 4 and several.json()["usage"]["prompt_tokens"] == len(ids) + 2
    assert texts(bias) == [llm.tokenizer.decode([7] * 6)] and least.json()["usage"]["completion_tokens"] == 5
    assert chat.json()["usage"]["completion_tokens"] == 5 and kwargs.status_code == 400


def test_an_answer_goes_on_from_the_last_message(ask, llm):
    begun = [*USER, {"role": "assistant", "content": "It is "}]
    asked = {"messages": begun, "max_tokens": 6, "temperature": 0, "continue_final_message": True}
    goes_on, plain, both, tools = ask(
        (CHAT, asked), (TEXT, {"prompt": "<user>x\n<assistant>It is ", "max_tokens": 6, "temperature": 0}),
        (CHAT, {**asked, "add_generation_prompt": True}),
        (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}),
    )  # fmt: skip
    assert texts(goes_on) == texts(plain)
    assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"
    assert tools.status_code == 400 and "no JSON" in tools.json()["error"]["message"]


def test_tokenize(ask, llm):
    text, chat, ids, back, neither, out, keyless, embeddings = ask(
        ("/tokenize", {"prompt": "añ", "return_token_strs": True}), ("/tokenize", {"messages": USER}),
        ("/tokenize", {"messages": USER, "add_generation_prompt": False, "model": "tiny"}), ("/detokenize", {"tokens": [1, 2]}),
        ("/tokenize", {}), ("/detokenize", {"tokens": [300]}), ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}),
        ("/v1/embeddings", {"input": "x"}),
    )  # fmt: skip
    assert text.json() == {
        "count": 3, "max_model_len": 256, "tokens": llm.tokenizer.encode("añ"),
        "token_strs": ["a", "bytes:\\xc3", "bytes:\\xb1"],
    }  # fmt: skip
    assert llm.tokenizer.decode(chat.json()["tokens"]) == "<user>x\n<assistant>"
    assert llm.tokenizer.decode(ids.json()["tokens"]) == "<user>x\n" and back.json()["prompt"] == llm.tokenizer.decode(
        [1, 2]
    )
    assert [neither.status_code, out.status_code, keyless.status_code, embeddings.status_code] == [400, 400, 400, 404]
    assert "/v1/chat/completions" in embeddings.json()["error"]["message"]
    assert [each.status_code for each in ask(("/tokenize", {"prompt": "x"}), ("/health", None), key="no")] == [401, 200]


@pytest.mark.parametrize("name, value", [
    ("tools", [{"type": "function"}]), ("tool_choice", "auto"), ("echo", True), ("suffix", "x"), ("best_of", 3),
    ("prompt_logprobs", 1), ("include_stop_str_in_output", True), ("bad_words", ["x"]), ("allowed_token_ids", [1]),
    ("guided_regex", "a"), ("chat_template", "x"), ("use_beam_search", True), ("structured_outputs", {"regex": "a"}),
    ("guided_json", "{"), ("min_tokens", 17), ("logit_bias", {"1": 200}), ("logit_bias", {"1000": 1}), ("logit_bias", {"³": 1}),
])  # fmt: skip
def test_what_is_not_served_is_named(ask, name, value):
    for path, base in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": USER, "max_tokens": 16})):
        (found,) = ask((path, {**base, name: value}))
        assert found.status_code == 400 and name in found.json()["error"]["message"], found.text


@pytest.mark.parametrize("name, more", [
    ("logit_bias", {"logit_bias": {"60000": 1}}), ("stop_token_ids", {"stop_token_ids": [99999999]}),
    ("temperature", {"temperature": -1}), ("top_k", {"top_k": -2}), ("prompt", {"prompt": [300]}),
    ("guided_json", {"guided_json": {"type": "zork"}}), ("structured_outputs", {"structured_outputs": {"json": {"enum": []}}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": []}}}}),
])  # fmt: skip
def test_an_error_says_which_argument_it_is_of(ask, name, more):
    (found,) = ask((TEXT, {"prompt": "x", **more}))
    error = found.json()["error"]
    assert found.status_code == 400 and error["param"] == name and f"'{name}'" in error["message"], found.text


def test_the_content_type_of_a_body(llm):
    """curl -d sends a form's."""
    driver = Driver(llm.engine)
    app = make_app(driver, llm.tokenizer, "tiny")

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            kinds = ("application/x-www-form-urlencoded", None, "application/json", "application/json; charset=utf-8")
            headers = [{} if kind is None else {"Content-Type": kind} for kind in kinds]
            bodies = ('{"prompt": "x", "max_tokens": 1}',) * 2 + ('"x"', '{"prompt": "x", "max_tokens": 1}')
            return [await client.post(TEXT, content=c, headers=h) for c, h in zip(bodies, headers, strict=True)]

    try:
        *wrong, right = asyncio.run(send())
    finally:
        driver.stop()
    assert right.status_code == 200
    assert [each.status_code for each in wrong] == [400] * 3
    form, none, text = [each.json()["error"]["message"] for each in wrong]
    assert form == "the header Content-Type is 'application/x-www-form-urlencoded'; expected 'application/json'"
    assert none.startswith("the header Content-Type is ''") and text.startswith("the body is no JSON object")


def test_requests_that_can_never_fit_are_no_overload(ask, llm, monkeypatch):
    monkeypatch.setattr(ask.driver, "most_requests", 2)
    prompts, n, fits = ask(
        (TEXT, {"prompt": ["a", "b", "c"], "max_tokens": 1}), (CHAT, {"messages": USER, "n": 3, "stream": True}),
        (TEXT, {"prompt": ["a", "b"], "max_tokens": 1, "top_k": -1}),
    )  # fmt: skip
    assert [each.status_code for each in (prompts, n, fits)] == [400, 400, 200]
    assert [each.json()["error"]["param"] for each in (prompts, n)] == ["prompt", "n"]
    assert "3 requests; expected at most 2" in prompts.json()["error"]["message"]


def test_an_unknown_argument_is_warned_of_once(ask, caplog):
    body = {"prompt": "x", "max_tokens": 1, "temprature": 0, "user": "me"}
    assert [each.status_code for each in ask((TEXT, body), (TEXT, body))] == [200, 200]
    assert [each.getMessage() for each in caplog.records if each.name == "weft.serve"] == [
        "unknown argument 'temprature' of a request is left out"
    ]


def test_offsets_of_tokens_in_the_text(ask, llm):
    """Characters before each token; one of several tokens is counted with its last one."""
    word = llm.tokenizer.encode("aé€b")
    asked = {"prompt": "x", "max_tokens": 6, "temperature": 0, "logprobs": 0, "logit_bias": {str(word[0]): 100}}
    whole, stream = ask((TEXT, asked), (TEXT, {**asked, "stream": True}))
    assert whole.json()["choices"][0]["logprobs"]["text_offset"] == list(range(6))
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert [o for e in events for o in e["choices"][0]["logprobs"]["text_offset"]] == list(range(6))
    choice = Choice([1], SamplingParameters(logprobs=0))
    found = Text("", "", "", llm.tokenizer).logprobs(choice, [TokenLogprobs(t, 0.0, ()) for t in word])
    assert found["text_offset"] == [0, 1, 1, 2, 2, 2, 3]


def test_a_template_that_takes_long_holds_up_no_one_else(ask):
    slow = (CHAT, {"messages": [{"role": "user", "content": "slow"}]})
    begin = time.monotonic()
    *late, fine = ask(slow, slow, ("/tokenize", slow[1]), (CHAT, {"messages": USER, "max_tokens": 4}))
    assert [each.status_code for each in late] == [400] * 3, late[0].text
    assert all(each.json()["error"]["code"] == "too_long" for each in late)
    assert fine.status_code == 200 and ask.ticks > 5  # the event loop went on
    assert time.monotonic() - begin < 20
    assert [each.status_code for each in ask((TEXT, {"prompt": "x"}), ("/health", None))] == [200, 200]


def test_a_text_that_cannot_fit_is_not_looked_at(ask, llm, monkeypatch):
    assert llm.tokenizer.longest == 1 and len(llm.tokenizer.encode("é" * 128, most=256)) == 256
    monkeypatch.setattr(llm.tokenizer, "backend", None)
    with pytest.raises(ValueError, match="has 258 bytes, more than 256 tokens hold"):
        llm.tokenizer.encode("é" * 129, most=256)
    long = [{"role": "user", "content": "é" * 200}]
    for found in ask((TEXT, {"prompt": "é" * 129}), (CHAT, {"messages": long}), ("/tokenize", {"messages": long})):
        assert found.status_code == 400 and "more than 256 tokens hold" in found.json()["error"]["message"]


def test_tokens_that_cannot_fit_are_not_sent_to_the_engine(ask, monkeypatch):
    monkeypatch.setattr(ask.driver.engine, "put", lambda call: pytest.fail("sent"))
    for given in ([1] * 300, [[1], [1] * 300]):
        (found,) = ask((TEXT, {"prompt": given, "n": 4}))
        assert found.status_code == 400 and "300 tokens; expected at most 255" in found.json()["error"]["message"]


def test_a_request_that_is_refused_counts_as_no_failure(ask):
    """The engine refuses it: the server alone knows that its tokens are one too many."""
    before, found, after = (
        ask(each)[0] for each in (("/metrics", None), (TEXT, {"prompt": "é" * 128}), ("/metrics", None))
    )
    assert found.status_code == 400 and "256 tokens; expected at most 255" in found.json()["error"]["message"]
    errors = [[x for x in page.text.splitlines() if 'finished_reason="error"' in x] for page in (before, after)]
    assert errors[0] == errors[1]


TREE = {
    "type": "object", "properties": {"v": {"enum": [1]}, "c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
    "required": ["v"], "additionalProperties": False,
}  # fmt: skip
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
DEEP: dict = {"type": "integer"}
for _ in range(400):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}


@pytest.mark.parametrize("schema", [
    {}, {"type": "number"}, {"type": ["integer", "null"]}, {"type": "null"}, {"const": {"a": [1, None, "é"]}}, TREE,
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, {"type": "string", "maxLength": 3}, ENDLESS,
    {"type": "string", "format": "date"}, {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30},
    {"enum": [f"value {i}" for i in range(3000)]}, {"type": "string", "pattern": "^(a|b)+c$"},
    {"type": "array", "minItems": 10**6},
    {"anyOf": [{"type": "object", "properties": {f"k{i}": {"const": 1}}, "required": [f"k{i}"]} for i in range(200)]},
])  # fmt: skip
def test_output_of_a_schema_is_of_it(ask, schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for sampled in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        (found,) = ask((CHAT, {"messages": USER, "max_tokens": 60, "response_format": form, **sampled}))
        (text,), reason = texts(found), found.json()["choices"][0]["finish_reason"]
        assert reason == "length" or (reason == "stop" and jsonschema.validate(json.loads(text), schema) is None)


@pytest.mark.parametrize("schema", [
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/$defs/no"},
    {"$ref": "http://127.0.0.1:1/x.json"}, {"$ref": "file:///etc/passwd"}, {"not": {}}, {"enum": []}, {"type": "zork"},
    {"type": "integer", "minimum": 5, "maximum": 3}, {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "string", "format": "zork"}, {"type": "string", "pattern": "(("}, {"uniqueItems": True, "type": "array"}, DEEP,
    {"enum": list(range(100_000))}, {"x-guidance": {"lenient": True}}, {"const": "\ud800"},
])  # fmt: skip
def test_schemas_that_cannot_be_followed_are_refused(ask, schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (found,) = ask((CHAT, {"messages": USER, "max_tokens": 60, "response_format": form}))
    assert found.status_code == 400 and found.json()["error"]["message"], found.text


def test_schemas_by_other_names(ask):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    same = [
        {"guided_json": schema}, {"guided_json": json.dumps(schema)}, {"structured_outputs": {"json": schema, "regex": None}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ]  # fmt: skip
    for path, base in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": USER})):
        base |= {"max_tokens": 200, "temperature": 0}
        for found in ask(
            *[(path, {**base, **more}) for more in same], (path, {**base, **same[0], "n": 2, "temperature": 1.0})
        ):
            assert all(json.loads(text) == {"a": 1} for text in texts(found))
        objects, twice = ask(
            (path, {**base, "response_format": {"type": "json_object"}}), (path, {**base, **same[0], **same[3]})
        )
        assert texts(objects)[0].lstrip().startswith("{") and twice.status_code == 400


@pytest.mark.parametrize("there", ["nothing", "an older one"])
def test_a_schema_without_its_package_is_refused_with_the_install_line(llm, ask, monkeypatch, there):
    def older(*_, **__):
        raise TypeError("argument 'eos_token': 'list' object cannot be interpreted as an integer")

    package = None if there == "nothing" else types.SimpleNamespace(LLTokenizer=older)
    monkeypatch.setitem(sys.modules, "llguidance", package)
    monkeypatch.setattr(llm.tokenizer, "grammar", None)
    (found,) = ask((CHAT, {"messages": USER, "guided_json": {"enum": ["a"]}}))
    assert found.status_code == 400 and "pip install 'weft[json]'" in found.json()["error"]["message"]
    with pytest.raises(ModuleNotFoundError, match=r"llguidance, 1\.7 or newer"):
        llm.generate(["x"], SamplingParameters(json_schema={"enum": ["a"]}))
