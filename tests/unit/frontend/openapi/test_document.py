from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvolt.core.errors import KvoltError, Unsupported
from kvolt.frontend.openai_api.checks import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from kvolt.frontend.openai_api.errors import openai_error
from kvolt.frontend.openai_api.grammar import request_grammar
from kvolt.frontend.openai_api.headers import parse_hints
from kvolt.frontend.openai_api.nvext import NOT_YET
from kvolt.frontend.openai_api.responses import BusyThreshold
from kvolt.frontend.openapi.document import openapi
from kvolt.frontend.openapi.operations import ERRORS, EVERYWHERE, OPERATIONS
from kvolt.frontend.openapi.schemas import NOT_SERVED, NOT_SERVED_PARTS

DOCUMENT = openapi()
SCHEMAS = DOCUMENT["components"]["schemas"]

PATHS = {
    "/": {"get"},
    "/ping": {"get", "post"},
    "/version": {"get"},
    "/v1/chat/completions": {"post"},
    "/v1/completions": {"post"},
    "/v1/models": {"get"},
    "/v1/models/{model}": {"get"},
    "/v1/models/{model}/ready": {"get"},
    "/tokenize": {"post"},
    "/detokenize": {"post"},
    "/health": {"get"},
    "/live": {"get"},
    "/ready": {"get"},
    "/metrics": {"get"},
    "/busy_threshold": {"get", "post"},
    "/openapi.json": {"get"},
    "/docs": {"get"},
}


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from nodes(inner)


def test_every_endpoint_is_there() -> None:
    assert {path: set(methods) for path, methods in DOCUMENT["paths"].items()} == PATHS
    assert DOCUMENT["openapi"].startswith("3.1")


def test_it_is_json_and_new_with_each_call() -> None:
    assert msgspec.json.decode(msgspec.json.encode(DOCUMENT)) == DOCUMENT
    other = openapi("9.9")
    assert other["info"]["version"] == "9.9"
    other["components"]["schemas"].clear()
    assert openapi() == DOCUMENT


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    used: set[str] = set()
    for node in nodes(DOCUMENT):
        refs = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        refs += node["discriminator"]["mapping"].values() if "discriminator" in node else []
        for ref in refs:
            target = DOCUMENT
            for step in ref.removeprefix("#/").split("/"):
                target = target[step]
            used.add(ref)
    assert {f"#/components/schemas/{name}" for name in SCHEMAS} <= used


def test_ids_and_tags_are_sound() -> None:
    ids = [operation["operationId"] for _, operation in operations()]
    assert len(ids) == len(set(ids))
    known = {tag["name"] for tag in DOCUMENT["tags"]}
    assert all(set(operation["tags"]) <= known for _, operation in operations())


def test_path_parameters_are_declared() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            declared = {item["name"] for item in operation.get("parameters", ()) if item["in"] == "path"}
            assert declared == {part[1:-1] for part in path.split("/") if part.startswith("{")}


# statuses


def test_every_operation_lists_what_the_server_itself_can_answer() -> None:
    for name, operation in operations():
        statuses = {int(status) for status in operation["responses"]}
        assert set(EVERYWHERE) < statuses, name
        assert ("requestBody" in operation) == (415 in statuses), name


def kinds(root: type[KvoltError] = KvoltError) -> Iterator[type[KvoltError]]:
    yield root
    for child in root.__subclasses__():
        yield from kinds(child)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_error_that_can_be_raised_is_listed(path: str) -> None:
    listed = DOCUMENT["paths"][path]["post"]["responses"]
    for kind in kinds():
        if kind.__module__.startswith("kvolt."):
            response = openai_error(kind("x"))
            assert str(response.status) in listed, kind
            name = listed[str(response.status)]["$ref"].rpartition("/")[2]
            documented = DOCUMENT["components"]["responses"][name]["headers"]
            assert response.headers.keys() <= documented.keys(), kind


def test_error_examples_have_the_shape_of_errors() -> None:
    for status, (name, *_) in ERRORS.items():
        media = DOCUMENT["components"]["responses"][name]["content"]["application/json"]
        assert media["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
        kind = media["example"]["error"]["type"]
        assert kind in SCHEMAS["ErrorDetail"]["properties"]["type"]["enum"], status


# examples


PARSERS = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/tokenize": parse_tokenize,
    "/detokenize": parse_detokenize,
    "/busy_threshold": lambda body: msgspec.json.decode(body, type=BusyThreshold),
}


@pytest.mark.parametrize("path", PARSERS)
def test_request_examples_are_accepted(path: str) -> None:
    examples = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"]
    assert examples
    for example in examples.values():
        parsed: Any = PARSERS[path](msgspec.json.encode(example["value"]))
        assert not getattr(parsed, "unknown", ())
        nvext = getattr(getattr(parsed, "request", None), "nvext", None)
        parse_hints({}, nvext, None, None)


def test_answer_examples_are_what_the_structs_say() -> None:
    for operation in OPERATIONS:
        for answer in operation.answers.values():
            if answer.example is not None:
                msgspec.convert(answer.example, answer.schemas[0])


# what is documented works


def test_nvext_shows_only_what_has_a_mechanism() -> None:
    shown = SCHEMAS["NvExt"]["properties"]
    for field in NOT_YET:
        assert field in SCHEMAS["NvExt"]["description"]
        assert field.removeprefix("nvext.") not in shown
    assert "temperature" in SCHEMAS["RouterOverrides"]["properties"]
    assert "ttft_target" not in SCHEMAS["RouterOverrides"]["properties"]
    assert {"priority", "osl"} <= SCHEMAS["AgentHints"]["properties"].keys()
    assert "strict_priority" not in SCHEMAS["AgentHints"]["properties"]
    extra_fields = shown["extra_fields"]["anyOf"][0]["items"]["enum"]
    assert "timing" in extra_fields
    assert "engine_data" not in extra_fields


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TOKENS = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
VALUES: dict[str, Any] = {
    "audio": {},
    "best_of": 2,
    "chat_template": "{{ x }}",
    "function_call": "auto",
    "functions": [],
    "guided_whitespace_pattern": " ",
    "modalities": ["audio"],
    "suffix": "x",
    "web_search_options": {},
}


@pytest.mark.parametrize(
    ("struct", "field"), [(struct, field) for struct, fields in NOT_SERVED.items() for field in fields]
)
def test_what_is_left_out_is_really_not_served(struct: str, field: str) -> None:
    """Fails when a mechanism comes and the row must go."""
    assert field not in SCHEMAS[struct]["properties"]
    assert f"`{field}`" in SCHEMAS[struct]["description"]
    with pytest.raises(Unsupported):
        _ask(struct, field)


def _ask(struct: str, field: str) -> None:
    match struct:
        case "CompletionRequest":
            body = {"model": "m", "prompt": "x", field: VALUES[field]}
            request_grammar(parse_completion(msgspec.json.encode(body)).request)
        case "TokenizeRequest":
            parse_tokenize(msgspec.json.encode({**TOKENS, field: VALUES[field]}))
        case "Thinking":
            parse_chat(msgspec.json.encode({**CHAT, "thinking": {"type": "enabled", field: 1}}))
        case "StructuredOutputs":
            _ask_chat({"structured_outputs": {"json_object": True, field: " "}})
        case _:
            _ask_chat({field: VALUES[field]})


def _ask_chat(more: dict[str, Any]) -> None:
    request_grammar(parse_chat(msgspec.json.encode({**CHAT, **more})).request)


def test_parts_that_are_left_out_are_really_not_served() -> None:
    tags = {"image_url", "input_audio", "audio_url", "video_url", "file"}
    assert len(tags) == len(NOT_SERVED_PARTS)
    for tag in tags:
        with pytest.raises(Unsupported):
            _ask_chat({"messages": [{"role": "user", "content": [{"type": tag}]}]})
    assert not set(NOT_SERVED_PARTS) & SCHEMAS.keys()


def test_docstrings_of_structs_and_fields_come_along() -> None:
    assert SCHEMAS["Usage"]["description"].startswith("Token counts")
    assert (
        SCHEMAS["AgentHints"]["properties"]["priority"]["description"]
        == "A higher priority is served earlier."
    )
    assert "\n    " not in SCHEMAS["BusyThreshold"]["description"]


def test_a_stream_is_described_event_by_event() -> None:
    content = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    refs = {node["$ref"] for node in nodes(content["text/event-stream"]) if "$ref" in node}
    assert refs == {"#/components/schemas/ChatCompletionChunk", "#/components/schemas/ErrorBody"}
