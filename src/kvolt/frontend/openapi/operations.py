"""The public HTTP interface as data: each operation with what it takes, all that it can answer, and examples.

`openapi` turns this into a document. Schemas are not written here: they are the structs themselves.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvolt.frontend.openai_api import headers, requests, responses
from kvolt.frontend.openapi import examples

EVERYWHERE = (400, 405, 408, 413, 431, 500, 503, 505)
"""Statuses that any path can answer with, since they come before any handler."""
_TAKES_JSON = (415,)
_INFERENCE = (*_TAKES_JSON, 404, 429, 501, 504)
_TOKENS = (*_TAKES_JSON, 404, 429, 501, 504)

ERRORS: dict[int, tuple[str, str, str]] = {
    400: ("BadRequest", "The request is wrong; `param` names the field or header.", "invalid_request"),
    404: ("NotFound", "There is no such model, or nothing at this path.", "model_not_found"),
    405: ("MethodNotAllowed", "Another method is needed; `allow` lists them.", "method_not_allowed"),
    408: ("RequestTimeout", "The request did not arrive in time.", "request_timeout"),
    413: ("PayloadTooLarge", "The body is over the limit.", "payload_too_large"),
    415: ("UnsupportedMediaType", "The body is not declared as JSON.", "unsupported_media_type"),
    429: ("TooManyRequests", "A queue is full; `retry-after` says when to try again.", "overloaded"),
    431: ("HeadersTooLarge", "The headers are over the limit.", "headers_too_large"),
    500: ("InternalError", "Our failure; the log has it under the request id.", "internal"),
    501: ("NotImplemented", "Valid, but without a mechanism yet; the message names it.", "unsupported"),
    503: ("Unavailable", "No worker can take it now; `retry-after` says when to try again.", "unavailable"),
    504: ("Timeout", "The answer was not complete within the request's time.", "timeout"),
    505: ("HttpVersion", "Only HTTP/1.1 and HTTP/1.0 are spoken here.", "http_version"),
}
"""Name, description and an example of a code, by status."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A success, or another status whose body is not an error."""

    description: str
    schemas: tuple[Any, ...] = ()
    """The body is one of these; none for text."""
    media_type: str = "application/json"
    event: Any = None
    """The struct of one event, for an operation that can stream."""
    example: Any = None
    traced: bool = False
    """Whether `x-request-id` is always there."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    tag: str
    name: str
    summary: str
    description: str = ""
    request: Any = None
    examples: dict[str, Any] = {}
    parameters: tuple[dict[str, Any], ...] = ()
    answers: dict[int, Answer]
    errors: tuple[int, ...] = ()


_VISIBLE = {"type": "string", "pattern": f"^[!-~]{{1,{headers.MAX_NAME_CHARS}}}$"}


def _header(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": description, "schema": schema}


_REQUEST_ID = _header(
    "x-request-id",
    "Comes back with the answer and stands in the logs. When absent, or not 1 to 128 visible ASCII characters, "
    "a new one is made.",
    {"type": "string"},
)
_HEADERS = (
    _REQUEST_ID,
    _header("x-tenant-id", "Whose request it is. Tenants share no cached prompt.", _VISIBLE),
    _header("x-kvolt-session-id", "The conversation; also `x-dynamo-session-id`, `x-session-id`.", _VISIBLE),
    _header(
        "x-kvolt-request-priority",
        "Higher is sooner, up to `router.max_priority`; also `x-dynamo-request-priority`. Beats the body.",
        {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    ),
    _header(
        "x-kvolt-timing",
        "`1` for response headers that say where the time went.",
        {"type": "string", "enum": list(headers.FLAGS)},
    ),
)
# The timeout is told in words: a client generated from the schema that tries small values only sees 504.
_HEADER_NOTE = (
    f"`{headers.TIMEOUT_MS[0]}` (or `{headers.TIMEOUT_MS[1]}`), a whole number of milliseconds, bounds the time for "
    "the whole answer. `traceparent` is taken over into logs and traces."
)
_MODEL = {
    "name": "model",
    "in": "path",
    "required": True,
    "description": "The name of a model or an adapter.",
    "schema": {"type": "string", "minLength": 1},
    "example": "my-model",
}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        tag="Inference",
        name="create_chat_completion",
        summary="Answer a chat",
        description="With `stream` the answer comes as server-sent events, the last one `data: [DONE]`. An error "
        f"after the first event is an event with `error`. {_HEADER_NOTE}",
        request=requests.ChatRequest,
        examples=examples.CHATS,
        parameters=_HEADERS,
        answers={
            200: Answer(
                description="The answer, whole or streamed.",
                schemas=(responses.ChatCompletion,),
                event=responses.ChatCompletionChunk,
                example=examples.CHAT_ANSWER,
                traced=True,
            )
        },
        errors=_INFERENCE,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        tag="Inference",
        name="create_completion",
        summary="Continue a text",
        description="The prompt is a text, token ids, or a list of either. With `stream` the answer comes as "
        f"server-sent events, the last one `data: [DONE]`. {_HEADER_NOTE}",
        request=requests.CompletionRequest,
        examples=examples.COMPLETIONS,
        parameters=_HEADERS,
        answers={
            200: Answer(
                description="The completion, whole or streamed.",
                schemas=(responses.Completion,),
                event=responses.Completion,
                example=examples.COMPLETION_ANSWER,
                traced=True,
            )
        },
        errors=_INFERENCE,
    ),
    Operation(
        method="post",
        path="/tokenize",
        tag="Tokens",
        name="tokenize",
        summary="Token ids of a text or a chat",
        request=requests.TokenizeRequest,
        examples={"text": {"model": "my-model", "prompt": "Hello"}},
        answers={
            200: Answer(
                description="The tokens.",
                schemas=(responses.TokenizeResponse,),
                example={"count": 1, "max_model_len": 4096, "tokens": [9906], "token_strs": None},
            )
        },
        errors=_TOKENS,
    ),
    Operation(
        method="post",
        path="/detokenize",
        tag="Tokens",
        name="detokenize",
        summary="Text of token ids",
        request=requests.DetokenizeRequest,
        examples={"tokens": {"model": "my-model", "tokens": [9906]}},
        answers={
            200: Answer(
                description="The text.", schemas=(responses.DetokenizeResponse,), example={"prompt": "Hello"}
            )
        },
        errors=_TOKENS,
    ),
    Operation(
        method="get",
        path="/v1/models",
        tag="Models",
        name="list_models",
        summary="Models that can be asked now",
        description="Models come first, then LoRA adapters, whose `parent` names the model that they change. A request "
        "chooses either by its `id`.",
        answers={
            200: Answer(
                description="Every model and adapter that a request would reach now.",
                schemas=(responses.ModelList,),
                example={"object": "list", "data": [examples.MODEL_ANSWER, examples.ADAPTER_ANSWER]},
            )
        },
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        tag="Models",
        name="get_model",
        summary="One model, or one adapter",
        parameters=(_MODEL,),
        answers={
            200: Answer(description="The model.", schemas=(responses.Model,), example=examples.MODEL_ANSWER)
        },
        errors=(404,),
    ),
    Operation(
        method="get",
        path="/v1/models/{model}/ready",
        tag="Models",
        name="get_model_ready",
        summary="Whether a model can be asked now, and what is missing",
        parameters=(_MODEL,),
        answers={
            200: Answer(
                description="It can.",
                schemas=(responses.ModelReady,),
                example=examples.MODEL_READY,
            ),
            503: Answer(
                description="Workers are missing, or the server is.",
                schemas=(responses.ModelReady, responses.ErrorBody),
            ),
        },
        errors=(404,),
    ),
    Operation(
        method="get",
        path="/health",
        tag="Server",
        name="get_health",
        summary="Models and workers",
        answers={
            200: Answer(
                description="A request could be served now.",
                schemas=(responses.Health,),
                example={"status": "ready", "models": ["my-model"], "workers": {"my-model": 2}},
            ),
            503: Answer(description="No request could.", schemas=(responses.Health, responses.ErrorBody)),
        },
    ),
    Operation(
        method="get",
        path="/live",
        tag="Server",
        name="get_live",
        summary="Whether the process runs",
        answers={200: Answer(description="It does.", schemas=(responses.Live,), example={"status": "live"})},
    ),
    Operation(
        method="get",
        path="/ready",
        tag="Server",
        name="get_ready",
        summary="Whether a request could be served now",
        answers={
            200: Answer(description="It could.", schemas=(responses.Health,)),
            503: Answer(description="It could not.", schemas=(responses.Health, responses.ErrorBody)),
        },
    ),
    Operation(
        method="get",
        path="/metrics",
        tag="Server",
        name="get_metrics",
        summary="Metrics for Prometheus",
        answers={200: Answer(description="The text that Prometheus scrapes.", media_type="text/plain")},
    ),
    Operation(
        method="get",
        path="/busy_threshold",
        tag="Server",
        name="list_busy_thresholds",
        summary="From what load on workers count as busy",
        answers={
            200: Answer(
                description="One entry per model.",
                schemas=(responses.BusyThresholds,),
                example={"thresholds": [examples.THRESHOLD]},
            )
        },
        errors=(501,),
    ),
    Operation(
        method="post",
        path="/busy_threshold",
        tag="Server",
        name="set_busy_threshold",
        summary="Set, or ask for, a model's thresholds",
        request=responses.BusyThreshold,
        examples={"set": examples.THRESHOLD, "ask": {"model": "my-model"}},
        answers={
            200: Answer(
                description="As they are now.", schemas=(responses.BusyThreshold,), example=examples.THRESHOLD
            )
        },
        errors=(*_TAKES_JSON, 404, 501),
    ),
    Operation(
        method="get",
        path="/openapi.json",
        tag="Server",
        name="get_openapi",
        summary="This document",
        answers={200: Answer(description="OpenAPI 3.1.", schemas=(dict[str, Any],))},
    ),
    Operation(
        method="get",
        path="/docs",
        tag="Server",
        name="get_docs",
        summary="This document as a page",
        answers={
            200: Answer(description="A page that needs nothing from elsewhere.", media_type="text/html")
        },
    ),
)
