"""Requests made from the server's OpenAPI schema: right, almost right and wrong ones. None is an error of the server."""

import json
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from tiny import folder

PATHS = {
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}",
    "/tokenize", "/detokenize", "/health", "/metrics",
}  # fmt: skip


@pytest.fixture
def schema(tmp_path):
    from weft import LLM
    from weft.inference.server.app import make_app
    from weft.inference.server.driver import Driver

    folder(tmp_path)
    llm = LLM(tmp_path, device="cpu", max_length=48)
    driver = Driver(llm.engine)
    yield schemathesis.openapi.from_asgi("/openapi.json", make_app(driver, llm.tokenizer, "tiny"))
    assert driver.failure in (None, "the server is stopping") and driver.live == 0
    driver.stop()


@pytest.mark.parametrize("examples", [12, pytest.param(500, marks=pytest.mark.long)])
def test_no_request_is_an_error_of_the_server(schema, examples):
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {each.path for each in operations} == PATHS
    asked = settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    statuses = Counter()

    def run(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # else almost all are of a model that is not served
        answer = case.call(timeout=60)  # seconds; machines may be busy
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert json.loads(answer.text)["error"]["message"]

    for operation in operations:
        asked(given(case=operation.as_strategy())(run))()
    assert statuses[200] > 4 and statuses[400] > 4, statuses  # it is not that all are refused at the door
