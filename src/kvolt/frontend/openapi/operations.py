"""The public HTTP interface as data: operations with parameters, responses and examples.

`document` converts it to OpenAPI. Schemas are generated from the structs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvolt.frontend.openai_api import headers, requests, responses
from kvolt.frontend.openapi import examples

EVERYWHERE = (400, 405, 408, 413, 431, 500, 503, 505)
"""Statuses that any path can return before a handler is called."""
_TAKES_JSON = (415,)
_OF_MODEL = (*_TAKES_JSON, 404, 429, 501, 504)

ERRORS: dict[int, tuple[str, str, str]] = {
    400: ("BadRequest", "Invalid request; `param` names the field or header.", "invalid_request"),
    401: ("Unauthorized", "The API key is missing, unknown or expired.", "invalid_api_key"),
    403: ("Forbidden", "The API key does not allow the request or the model.", "insufficient_permissions"),
    404: ("NotFound", "Unknown model; the message lists the models there are.", "model_not_found"),
    405: (
        "MethodNotAllowed",
        "Method not supported; `allow` lists the supported ones.",
        "method_not_allowed",
    ),
    408: ("RequestTimeout", "The request was not received in time.", "request_timeout"),
    413: ("PayloadTooLarge", "The body exceeds the limit.", "payload_too_large"),
    415: (
        "UnsupportedMediaType",
        "The content type is not JSON, or the content encoding is unknown.",
        "unsupported_media_type",
    ),
    429: (
        "TooManyRequests",
        "A queue is full, or a limit of the tenant is reached; `retry-after` has the delay before a retry.",
        "overloaded",
    ),
    431: ("HeadersTooLarge", "The headers exceed the limit.", "headers_too_large"),
    500: ("InternalError", "Internal error; logged under the request id.", "internal"),
    501: ("NotImplemented", "Valid, but not supported; the message names the feature.", "unsupported"),
    503: (
        "Unavailable",
        "No worker is available; `retry-after` has the delay before a retry.",
        "unavailable",
    ),
    504: ("Timeout", "The response was not complete within the time limit.", "timeout"),
    505: ("HttpVersion", "Only HTTP/1.1 and HTTP/1.0 are supported.", "http_version"),
}
"""Name, description and example code by status."""

ERRORS_OF_NO_OPERATION: tuple[tuple[int, str, str], ...] = (
    (403, "Preflight request of a web page whose origin is not one of `frontend.cors_origins`.", "forbidden"),
    (404, "Unknown path; the message suggests a similar one.", "not_found"),
)
"""Status, description and code of errors before an operation is found."""


class DocumentedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A success, or an error status whose body is not an error object."""

    description: str
    schemas: tuple[Any, ...] = ()
    """Types of the body; empty for text."""
    media_type: str = "application/json"
    """Empty: no body."""
    event: Any = None
    """Struct of one event, for operations that can stream."""
    example: Any = None
    traced: bool = False
    """Whether `x-request-id` is always present."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    route: str
    """Method and path."""
    tag: str
    name: str
    summary: str
    description: str = ""
    request: Any = None
    examples: dict[str, Any] = {}
    parameters: tuple[dict[str, Any], ...] = ()
    answers: dict[int, DocumentedResponse]
    errors: tuple[int, ...] = ()

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0].lower()

    @property
    def path(self) -> str:
        return self.route.partition(" ")[2]


_VISIBLE = {"type": "string", "pattern": f"^[!-~]{{1,{headers.MAX_NAME_CHARS}}}$"}


def _header(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": description, "schema": schema}


_REQUEST_ID = _header(
    "x-request-id",
    "Returned with the response and logged. If it is missing or not 1 to 128 visible ASCII characters, a new id is "
    "generated.",
    {"type": "string"},
)
_HEADERS = (
    _REQUEST_ID,
    _header("x-tenant-id", "Tenant of the request. Tenants do not share cached prompts.", _VISIBLE),
    _header("x-kvolt-session-id", "Conversation; also `x-dynamo-session-id`, `x-session-id`.", _VISIBLE),
    _header(
        "x-kvolt-request-priority",
        "Higher is served earlier, up to `router.max_priority`; also `x-dynamo-request-priority`. Overrides the body.",
        {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    ),
    _header(
        "x-kvolt-timing",
        "`1` returns timing in response headers.",
        {"type": "string", "enum": list(headers.FLAGS)},
    ),
)
# The timeout is described in text only: a client generated from a schema would try small values and only see 504.
_HEADER_NOTE = (
    f"`{headers.TIMEOUT_MS[0]}` (or `{headers.TIMEOUT_MS[1]}`) limits the time for the whole response, in whole "
    "milliseconds. `traceparent` is propagated to logs and traces."
)
_MODEL = {
    "name": "model",
    "in": "path",
    "required": True,
    "description": "Name of a model or adapter.",
    "schema": {"type": "string", "minLength": 1},
    "example": "my-model",
}


def _json(description: str, schema: Any, example: Any = None) -> DocumentedResponse:
    return DocumentedResponse(description=description, schemas=(schema,), example=example)


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        route="POST /v1/chat/completions",
        tag="Inference",
        name="create_chat_completion",
        summary="Create a chat completion",
        description="With `stream` the response is a sequence of server-sent events that ends with `data: [DONE]`. An "
        f"error after the first event is an event with `error`. {_HEADER_NOTE}",
        request=requests.ChatRequest,
        examples=examples.CHATS,
        parameters=_HEADERS,
        answers={
            200: DocumentedResponse(
                description="The response, whole or streamed.",
                schemas=(responses.ChatCompletion,),
                event=responses.ChatCompletionChunk,
                example=examples.CHAT_ANSWER,
                traced=True,
            )
        },
        errors=_OF_MODEL,
    ),
    Operation(
        route="POST /v1/completions",
        tag="Inference",
        name="create_completion",
        summary="Create a completion",
        description="The prompt is a text, token ids, or a list of either. With `stream` the response is a sequence of "
        f"server-sent events that ends with `data: [DONE]`. {_HEADER_NOTE}",
        request=requests.CompletionRequest,
        examples=examples.COMPLETIONS,
        parameters=_HEADERS,
        answers={
            200: DocumentedResponse(
                description="The completion, whole or streamed.",
                schemas=(responses.Completion,),
                event=responses.Completion,
                example=examples.COMPLETION_ANSWER,
                traced=True,
            )
        },
        errors=_OF_MODEL,
    ),
    Operation(
        route="POST /tokenize",
        tag="Tokens",
        name="tokenize",
        summary="Tokenize a text or a chat",
        request=requests.TokenizeRequest,
        examples={"text": {"model": "my-model", "prompt": "Hello"}},
        answers={
            200: _json(
                "The tokens.",
                responses.TokenizeResponse,
                {"count": 1, "max_model_len": 4096, "tokens": [9906], "token_strs": None},
            )
        },
        errors=_OF_MODEL,
    ),
    Operation(
        route="POST /detokenize",
        tag="Tokens",
        name="detokenize",
        summary="Convert token ids to text",
        request=requests.DetokenizeRequest,
        examples={"tokens": {"model": "my-model", "tokens": [9906]}},
        answers={200: _json("The text.", responses.DetokenizeResponse, {"prompt": "Hello"})},
        errors=_OF_MODEL,
    ),
    Operation(
        route="GET /v1/models",
        tag="Models",
        name="list_models",
        summary="List available models",
        description="Models first, then LoRA adapters, whose `parent` is their base model. Requests select either by "
        "its `id`.",
        answers={
            200: _json(
                "All models and adapters that can serve requests now.",
                responses.ModelList,
                {"object": "list", "data": [examples.MODEL_ANSWER, examples.ADAPTER_ANSWER]},
            )
        },
    ),
    Operation(
        route="GET /v1/models/{model}",
        tag="Models",
        name="get_model",
        summary="Show a model or adapter",
        parameters=(_MODEL,),
        answers={200: _json("The model.", responses.Model, examples.MODEL_ANSWER)},
        errors=(404,),
    ),
    Operation(
        route="GET /v1/models/{model}/ready",
        tag="Models",
        name="get_model_ready",
        summary="Show whether a model is ready, and what is missing",
        parameters=(_MODEL,),
        answers={
            200: _json("The model is ready.", responses.ModelReady, examples.MODEL_READY),
            503: DocumentedResponse(
                description="Workers are missing, or the server is draining.",
                schemas=(responses.ModelReady, responses.ErrorBody),
            ),
        },
        errors=(404,),
    ),
    Operation(
        route="GET /health",
        tag="Server",
        name="get_health",
        summary="Models and workers",
        answers={
            200: _json(
                "At least one model is ready.",
                responses.Health,
                {"status": "ready", "models": ["my-model"], "workers": {"my-model": 2}},
            ),
            503: DocumentedResponse(
                description="No model is ready.", schemas=(responses.Health, responses.ErrorBody)
            ),
        },
    ),
    Operation(
        route="GET /live",
        tag="Server",
        name="get_live",
        summary="Liveness of the process",
        answers={200: _json("Live.", responses.Live, {"status": "live"})},
    ),
    Operation(
        route="GET /ready",
        tag="Server",
        name="get_ready",
        summary="Readiness of the server",
        answers={
            200: _json("Ready.", responses.Health),
            503: DocumentedResponse(
                description="Not ready.", schemas=(responses.Health, responses.ErrorBody)
            ),
        },
    ),
    Operation(
        route="GET /metrics",
        tag="Server",
        name="get_metrics",
        summary="Prometheus metrics",
        answers={200: DocumentedResponse(description="Prometheus text format.", media_type="text/plain")},
    ),
    Operation(
        route="GET /busy_threshold",
        tag="Server",
        name="list_busy_thresholds",
        summary="List busy thresholds",
        answers={
            200: _json("One entry per model.", responses.BusyThresholds, {"thresholds": [examples.THRESHOLD]})
        },
        errors=(501,),
    ),
    Operation(
        route="POST /busy_threshold",
        tag="Server",
        name="set_busy_threshold",
        summary="Set or show the busy thresholds of a model",
        request=responses.BusyThreshold,
        examples={"set": examples.THRESHOLD, "ask": {"model": "my-model"}},
        answers={200: _json("Current thresholds.", responses.BusyThreshold, examples.THRESHOLD)},
        errors=(*_TAKES_JSON, 404, 501),
    ),
    Operation(
        route="GET /openapi.json",
        tag="Server",
        name="get_openapi",
        summary="OpenAPI document",
        answers={200: DocumentedResponse(description="OpenAPI 3.1.", schemas=(dict[str, Any],))},
    ),
    Operation(
        route="GET /docs",
        tag="Server",
        name="get_docs",
        summary="Documentation page",
        answers={200: DocumentedResponse(description="Self-contained HTML page.", media_type="text/html")},
    ),
    Operation(
        route="GET /version",
        tag="Server",
        name="get_version",
        summary="Version of the server",
        answers={200: _json("The version.", responses.Version, {"version": "1.2.3"})},
    ),
    Operation(
        route="GET /ping",
        tag="Server",
        name="get_ping",
        summary="Readiness for SageMaker",
        answers={200: DocumentedResponse(description="A model is ready; no body.", media_type="")},
    ),
    Operation(
        route="POST /ping",
        tag="Server",
        name="post_ping",
        summary="The same as GET",
        answers={200: DocumentedResponse(description="A model is ready; no body.", media_type="")},
    ),
    Operation(
        route="GET /",
        tag="Server",
        name="get_server",
        summary="Name, version and routes of the server",
        answers={200: _json("The server.", responses.Server)},
    ),
)
