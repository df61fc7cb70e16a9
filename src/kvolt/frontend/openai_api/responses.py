"""Responses in OpenAI's format. Used for schemas: `/openapi.json` is generated from these structs, and some whole
responses are encoded from them. Stream events are defined for the schema only; on the wire they are composed of
prepared bytes.

Clients distinguish an absent field (`UNSET`) from `null`; the choice follows OpenAI's responses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

FinishReasonName = Literal["stop", "length", "tool_calls", "content_filter"]
_Count = Annotated[int, Meta(ge=0)]
_TokenId = Annotated[int, Meta(ge=0)]


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: _Count = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: _Count = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request, over all its choices."""

    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


# log probabilities


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a chat response, and the most likely tokens at its position."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists with one entry per token. The first token of an echoed prompt has no probability."""

    text_offset: list[_Count]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A likely token at a position of the prompt; the key is its id."""

    logprob: float
    decoded_token: str


# nvext of a response


class WorkerIds(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that computed the response."""

    prefill_worker_id: str | UnsetType = UNSET
    prefill_dp_rank: _Count | UnsetType = UNSET
    decode_worker_id: str | UnsetType = UNSET
    decode_dp_rank: _Count | UnsetType = UNSET


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Duration of each stage; unknown values are absent."""

    request_received_ms: float | UnsetType = UNSET
    prefill_wait_time_ms: float | UnsetType = UNSET
    prefill_time_ms: float | UnsetType = UNSET
    decode_wait_time_ms: float | UnsetType = UNSET
    """Wait for a decode worker, with remote prefill."""
    ttft_ms: float | UnsetType = UNSET
    total_time_ms: float | UnsetType = UNSET
    kv_hit_rate: float | UnsetType = UNSET
    router_queue_depth: _Count | UnsetType = UNSET
    kv_transfer_estimated_latency_ms: float | UnsetType = UNSET
    retries: _Count | UnsetType = UNSET
    """Workers that failed the request before others computed it; absent if none."""


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction for the worker that a query-only request was routed to."""

    overlap_blocks: _Count = 0
    """Leading blocks of the prompt that the worker has cached."""
    predicted_ttft_ms: float | UnsetType = UNSET


class EndedBy(msgspec.Struct, frozen=True, kw_only=True):
    """Why the response was truncated; its `finish_reason` is `length`."""

    reason: Literal["deadline"]
    stage: str | None
    """The time limit that expired: `total` for the whole response, `between` for one token."""


class NvExtResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Fields requested with `nvext.extra_fields`; for a query-only request also prompt tokens and prediction.

    `ended_by` is always included when a response was truncated.
    """

    ended_by: EndedBy | UnsetType = UNSET
    token_ids: list[_TokenId] | UnsetType = UNSET
    routed: Routed | UnsetType = UNSET
    worker_id: WorkerIds | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET
    stop_reason: int | str | UnsetType | None = UNSET
    completion_token_ids: list[_TokenId] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


# chat


class ChatCompletionFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str
    """A JSON object as text."""


class ChatCompletionToolCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    id: str
    function: ChatCompletionFunction


class ChatCompletionMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    """The assistant's message."""

    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatCompletionToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: _Count
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReasonName
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion"):
    """A complete chat response."""

    id: str
    created: _Count
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    nvext: NvExtResponse | UnsetType = UNSET


class ChatCompletionFunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ChatCompletionToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a tool call: the first has id, type and name, the following ones parts of the arguments."""

    index: _Count
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: ChatCompletionFunctionDelta | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatCompletionToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: _Count
    delta: ChatDelta
    logprobs: ChatLogprobs | UnsetType | None = UNSET
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatCompletionChunk(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion.chunk"
):
    """An event of a streamed chat. The last one may have usage but no choices."""

    id: str
    created: _Count
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    nvext: NvExtResponse | UnsetType = UNSET


# completions


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: _Count
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReasonName | None
    """`null` only in a stream, before the last chunk of the choice."""
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="text_completion"):
    """A complete completion, or an event of a streamed one."""

    id: str
    created: _Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    nvext: NvExtResponse | UnsetType = UNSET


# models


class Model(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="model"):
    """A model or LoRA adapter that can serve requests now."""

    id: str
    created: _Count
    owned_by: str = "kvolt"
    root: str | UnsetType = UNSET
    """Name under which the model, of an adapter its base model, was loaded: a name, a folder or a file."""
    alias_of: str | UnsetType = UNSET
    """The name of the model of which `id` is another name."""
    parent: str | UnsetType | None = UNSET
    """The base model of an adapter; `null` for a model."""
    context_window: _Count | UnsetType = UNSET
    max_output_tokens: _Count | UnsetType = UNSET
    max_model_len: _Count | UnsetType = UNSET
    """`context_window` under vLLM's name."""
    default_sampling_params: dict[str, Any] | UnsetType = UNSET
    """Values of what a request does not set, such as `temperature`; OpenAI's defaults are left out."""
    workers: dict[str, _Count] | UnsetType = UNSET
    """Reachable workers by role."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    data: list[Model]


class NamespaceReady(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one namespace by role."""

    ready: bool
    workers: dict[str, _Count] = {}
    missing: list[str] = []
    """Missing roles that are required for serving."""


class ModelReady(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests for this model can be routed now, and what is missing otherwise."""

    model: str
    ready: bool
    namespaces: dict[str, NamespaceReady] = {}


# text and tokens


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: _Count
    max_model_len: _Count
    tokens: list[_TokenId]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


# the server itself


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Ready means routable: `no_models` until a request can be served."""

    status: Literal["ready", "no_models", "draining"]
    models: list[str] = []
    workers: dict[str, _Count] = {}
    """Reachable workers that generate output, by model."""
    roles: dict[str, dict[str, _Count]] = {}
    """Reachable workers by model and role."""
    missing: dict[str, list[str]] = {}
    """Missing roles of models that cannot be served now."""


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """GET /version"""

    version: str


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """GET /: what answers here, and its routes."""

    name: str = "kvolt"
    version: str
    docs: str = "/docs"
    openapi: str = "/openapi.json"
    routes: tuple[str, ...]


class Live(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["live"] = "live"


_Fraction = Annotated[float, Meta(ge=0, le=1)]


class BusyThreshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load above which a worker of this model counts as busy; `null`: never.

    In a request, a threshold that is absent or `null` is unchanged: a body with only `model` returns the thresholds.
    """

    model: Annotated[str, Meta(min_length=1)]
    active_decode_blocks_threshold: _Fraction | None = None
    """Fraction of a worker's KV blocks in use."""
    active_prefill_tokens_threshold: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    active_prefill_tokens_threshold_frac: Annotated[float, Meta(ge=0)] | None = None
    """In batches: 1.0 is the worker's `max_batch_tokens`."""


class BusyThresholds(msgspec.Struct, frozen=True, kw_only=True):
    thresholds: list[BusyThreshold]


# errors


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None
    gpu_work: Literal["none", "unknown", "some"] | None = None
    """Whether a retry would repeat GPU work, if known."""


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every error response; in a stream, the last event."""

    error: ErrorDetail
