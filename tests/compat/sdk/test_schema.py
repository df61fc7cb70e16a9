"""schemathesis over `/openapi.json`: whatever it thinks of, the answer is one that the document promises.

Its cases go to the edges of every field and over them, so most are refused. That each operation has also
served some of them is checked too.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.schemas import BaseSchema
from tests.compat.sdk.server import Server
from tests.integration.processes import until

from kvolt.frontend.openapi.operations import OPERATIONS

MODEL = "sim-short"
"""Its context is so short that no case makes it talk for long."""

Json = dict[str, Any]


# the document


@pytest.fixture(scope="module")
def short(server: Server) -> Server:
    """The server, with the model that these tests ask for."""
    arguments = ("context_length=1024", "answer_from_prompt=true", "answer_text=Hello.", "speed=1000")
    given = [part for argument in arguments for part in ("--arg", argument)]
    server.bench.start("worker", MODEL, "--name", MODEL, *given, name=MODEL)
    urls = (server.url, server.narrow_url)

    def known() -> bool:
        return all(MODEL in httpx.get(f"{url}/health").json()["models"] for url in urls)

    asyncio.run(until(known, what="the model"))
    return server


@pytest.fixture(scope="module")
def document(short: Server) -> Json:
    """The one that is served, made so that a good part of the cases reaches the model, and each of them quickly."""
    text = httpx.get(f"{short.url}/openapi.json").text
    # The examples' model, and its token ids, which are those of a larger vocabulary.
    found: Json = json.loads(text.replace('"my-model"', f'"{MODEL}"').replace("9906", "600"))
    schemas = found["components"]["schemas"]
    schemas["BusyThresholdRequest"] = copy.deepcopy(schemas["BusyThreshold"])  # an answer may have any model
    bodies = found["paths"]["/busy_threshold"]["post"]["requestBody"]["content"]
    bodies["application/json"]["schema"]["$ref"] += "Request"
    for name, schema in schemas.items():
        if name.endswith("Request"):
            schema["properties"]["model"] = {"enum": [MODEL, "nobody"]}
    # A case over a bound of thousands takes seconds to make; unit tests know those bounds.
    for schema in nodes(found):
        if schema.get("maxItems", 0) > 100:
            del schema["maxItems"]
    # Every case begins with the shortest values. An empty prompt would refuse all that came with it.
    schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"][0]["minLength"] = 1
    return found


def nodes(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(inner)


def loaded(document: Json, mode: str) -> BaseSchema:
    """A schema whose cases are the same in every run."""
    checks = {
        # What has no mechanism yet is answered with 501 and its name, a pin to who is not there with 503.
        "not_a_server_error": {"expected-statuses": ["2xx", "4xx", "501", "503"]},
        "negative_data_rejection": {"expected-statuses": ["400", "404", "405", "413", "415"]},
        # Rules between fields (either prompt or messages, not both) stand in no schema.
        "positive_data_acceptance": {"enabled": False},
    }
    generation = {
        "mode": mode,
        "max-examples": 12,
        "deterministic": True,
        "allow-extra-parameters": False,  # a header that nobody knows is no error in HTTP
    }
    config = {
        "generation": generation,
        "checks": checks,
        "max-stream-events": 10_000,
        "cache": {"enabled": False},
    }
    return schemathesis.openapi.from_dict(document, config=schemathesis.Config.from_dict(config))


# the cases


class Caller:
    """Sends cases. schemathesis judges the answers."""

    def __init__(self, server: Server, session: requests.Session) -> None:
        self._server = server
        self._session = session
        self.seen: Counter[int] = Counter()
        """How often each status came."""

    def send(self, case: schemathesis.Case) -> schemathesis.Response:
        # A threshold would refuse the cases of the other operations; but each frontend has its own.
        url = self._server.narrow_url if case.path == "/busy_threshold" else self._server.url
        response = case.call_and_validate(base_url=url, session=self._session, timeout=20)
        self.seen[response.status_code] += 1
        return response

    def stream(self, case: schemathesis.Case) -> None:
        """schemathesis judges each event."""
        case.body["stream"] = True
        response = self.send(case)
        if response.status_code == 200:
            assert response.headers["content-type"] == ["text/event-stream"]
            assert response.text.endswith("data: [DONE]\n\n")


@pytest.fixture
def caller(short: Server) -> Iterator[Caller]:
    with requests.Session() as session:
        session.trust_env = False  # proxies and passwords would be looked for with every request
        caller = Caller(short, session)
        yield caller
    assert caller.seen[200], f"no case was served: {caller.seen}"


def for_all_cases(
    schema: BaseSchema, method: str, path: str, check: Callable[[schemathesis.Case], object]
) -> None:
    """What `schema.parametrize` does, but not while pytest collects: making the cases takes seconds."""
    operation = schema[path][method]
    config = HypothesisTestConfig(
        project=schema.config,
        modes=list(HypothesisTestMode),
        settings=schema.config.get_hypothesis_settings(operation=operation),
    )

    def judge(case: schemathesis.Case) -> None:
        check(case)

    create_test(operation=operation, test_func=judge, config=config)()


@pytest.mark.parametrize(("method", "path"), [(operation.method, operation.path) for operation in OPERATIONS])
def test_operation(document: Json, caller: Caller, method: str, path: str) -> None:
    for_all_cases(loaded(document, "all"), method, path, caller.send)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streamed(document: Json, caller: Caller, path: str) -> None:
    for_all_cases(loaded(document, "positive"), "post", path, caller.stream)


def test_every_operation_is_tested(document: Json) -> None:
    served = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert served == {(operation.method, operation.path) for operation in OPERATIONS}


def test_examples(short: Server, document: Json) -> None:
    """A reader who copies an example gets an answer."""
    num_examples = 0
    for path, operations in document["paths"].items():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            for name, example in content.get("application/json", {}).get("examples", {}).items():
                url = short.narrow_url if path == "/busy_threshold" else short.url
                answer = httpx.post(url + path, json=example["value"])
                assert answer.status_code == 200, (path, name, answer.text)
                num_examples += 1
    assert num_examples > 5
