"""The OpenAPI 3.1 document, built from `operations` and the structs of requests and responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvolt.frontend.openai_api.nvext import ANNOTATIONS, NOT_YET
from kvolt.frontend.openai_api.responses import ErrorBody
from kvolt.frontend.openapi.operations import ERRORS, EVERYWHERE, OPERATIONS, DocumentedResponse, Operation
from kvolt.frontend.openapi.schemas import SCHEMAS, Json, schemas_of
from kvolt.frontend.tenants.records import needed_scope
from kvolt.runtime.http.server import json_error
from kvolt.version import __version__

_RESPONSES = "#/components/responses/"
_DESCRIPTION = """\
OpenAI's chat and completions, with common extensions of vLLM and Dynamo.

Unknown fields are ignored and listed in the `x-kvolt-warning` response header, unless the server is strict. Every
header `x-kvolt-NAME` is also accepted as `x-dynamo-NAME` if Dynamo has it. A header overrides the body."""

_TAGS = {
    "Inference": "Text generation.",
    "Tokens": "A model's tokenizer.",
    "Models": "Served models.",
    "Server": "State of the server.",
}

_RESPONSE_HEADERS: Json = {
    "RequestId": {"description": "Id of this request.", "schema": {"type": "string"}},
    "RetryAfter": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}},
    "WwwAuthenticate": {"description": "`Bearer`.", "schema": {"type": "string"}},
    "Allow": {"description": "Methods supported by the path.", "schema": {"type": "string"}},
    "ShouldRetry": {
        "description": "`false` if a retry cannot help; respected by OpenAI's SDKs.",
        "schema": {"type": "string", "enum": ["false"]},
    },
}


_SECURITY_SCHEMES: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "API key, if the server requires one."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}


def openapi(version: str = __version__) -> Json:
    """Build the document."""
    schema_of, schemas = schemas_of(_types())
    paths: Json = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvolt", "version": version, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": {ERRORS[status][0]: _error_response(status) for status in ERRORS},
            "headers": _RESPONSE_HEADERS,
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


# operations


def _operation(operation: Operation, schema_of: dict[Any, Json]) -> Json:
    built: Json = {
        "tags": [operation.tag],
        "operationId": operation.name,
        "summary": operation.summary,
    }
    if operation.description:
        built["description"] = operation.description
    if operation.parameters:
        built["parameters"] = list(operation.parameters)
    if operation.request is not None:
        examples = {name: {"value": value} for name, value in operation.examples.items()}
        body = {"schema": schema_of[operation.request], "examples": examples}
        built["requestBody"] = {"required": True, "content": {"application/json": body}}
    answers: Json = {
        str(status): _answer(answer, schema_of) for status, answer in sorted(operation.answers.items())
    }
    errors = {*operation.errors, *EVERYWHERE}
    if needed_scope(operation.path) is not None:
        errors |= {401, 403}
        built["security"] = [{}, *({name: []} for name in _SECURITY_SCHEMES)]  # {}: a server without keys
    for status in sorted(errors - operation.answers.keys()):
        answers[str(status)] = {"$ref": f"{_RESPONSES}{ERRORS[status][0]}"}
    built["responses"] = answers
    return built


def _answer(answer: DocumentedResponse, schema_of: dict[Any, Json]) -> Json:
    media: Json = {"schema": _one_of(answer.schemas, schema_of)}
    if answer.example is not None:
        media["example"] = answer.example
    content: Json = {answer.media_type: media} if answer.media_type else {}
    if answer.event is not None:
        content["text/event-stream"] = {"schema": _event(schema_of[answer.event])}
    request_id: Json = {"$ref": "#/components/headers/RequestId"}
    if answer.traced:
        request_id = {**_RESPONSE_HEADERS["RequestId"], "required": True}
    return {"description": answer.description, "headers": {"x-request-id": request_id}, "content": content}


def _event(schema: Json) -> Json:
    """Stream events have no representation in OpenAPI 3.1; tools apply the schema to each event."""
    chunk: Json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [schema, {"$ref": f"{SCHEMAS}ErrorBody"}]},
    }
    data = {"description": "A chunk, an error, or the end.", "anyOf": [chunk, {"const": "[DONE]"}]}
    annotations = [name for name in ANNOTATIONS if f"nvext.annotations.{name}" not in NOT_YET]
    return {
        "anyOf": [
            {"type": "object", "properties": {"event": {"const": "message"}, "data": data}},
            {"type": "object", "properties": {"event": {"enum": annotations}}, "required": ["event"]},
        ]
    }


def _one_of(types: tuple[Any, ...], schema_of: dict[Any, Json]) -> Json:
    if not types:
        return {"type": "string"}
    return schema_of[types[0]] if len(types) == 1 else {"anyOf": [schema_of[kind] for kind in types]}


def _error_response(status: int) -> Json:
    _, description, code = ERRORS[status]
    names = {"x-request-id": "RequestId"}
    if status in (429, 503):
        names["retry-after"] = "RetryAfter"
    if status == 401:
        names["www-authenticate"] = "WwwAuthenticate"
    if status == 405:
        names["allow"] = "Allow"
    if status in (500, 501, 504):
        names["x-should-retry"] = "ShouldRetry"
    example = msgspec.json.decode(json_error(status, description.partition(";")[0], code).body)
    return {
        "description": description,
        "headers": {name: {"$ref": f"#/components/headers/{header}"} for name, header in names.items()},
        "content": {"application/json": {"schema": {"$ref": f"{SCHEMAS}ErrorBody"}, "example": example}},
    }


def _types() -> Iterator[Any]:
    yield ErrorBody
    for operation in OPERATIONS:
        for answer in operation.answers.values():
            yield from answer.schemas
            if answer.event is not None:
                yield answer.event
        if operation.request is not None:
            yield operation.request
