"""`nvext`: the request extension of Dynamo, and which parts of it are supported.

Defines the fields, their limits and vocabularies; `headers` combines them with headers.

An unknown name is a 400 that lists the known ones; a known name that kvolt does not support is a 501 (see `NOT_YET`);
a value out of range is a 400. Requirements that cannot be met are rejected; hints (a preference, an expected length,
a timestamp) never are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.core.errors import InvalidRequest, Unsupported

ANNOTATIONS = ("request_id", "formatted_prompt", "token_ids", "query_instance_id")
"""Events that a stream can contain besides its chunks, by name."""

EXTRA_FIELDS = (
    "worker_id",
    "timing",
    "stop_reason",
    "completion_token_ids",
    "prompt_logprobs",
    "routed_experts",
    "engine_data",
)
"""Fields that the `nvext` object of a response can contain."""

_NO_TARGETS = "no router supports latency targets per request"

NOT_YET: dict[str, str] = {
    "nvext.prefill_dp_rank": "a data-parallel rank can only be specified for the decode worker",
    "nvext.router.ttft_target": _NO_TARGETS,
    "nvext.router.itl_target": _NO_TARGETS,
    "nvext.agent_hints.strict_priority": "the router has no strict queue tiers",
    "nvext.agent_hints.speculative_prefill": "the router does not prefill ahead",
    "nvext.max_thinking_tokens": "no engine can limit the reasoning length",
    "nvext.metadata_upload": "engine metadata is not uploaded",
    "nvext.extra_fields.routed_experts": "no engine reports its expert selection",
    "nvext.extra_fields.engine_data": "no engine reports data of its own",
}
"""Fields answered with 501: the field as written by a client, and the reason."""

UNSET_RANK = 2**32 - 1
"""Dynamo's endpoint picker sends this rank for none."""

_NEUTRAL: dict[str, int] = {
    "nvext.agent_hints.strict_priority": 0,
    "nvext.prefill_dp_rank": UNSET_RANK,
}
"""Values that have no effect."""

_U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_InstanceId = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(min_length=1, max_length=256)]
_Taint = Annotated[str, Meta(min_length=1, max_length=128)]
_TargetMs = Annotated[float, Meta(gt=0, le=1e9)]
_TaintWeight = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Weight = Annotated[float, Meta(ge=0, le=1e6)]

SALT_PATTERN = r"^[^\u0000-\u001f]*$"
"""No control characters: a line break separates tenant and salt (see `headers`)."""
MAX_SALT_CHARS = 1024
Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS, pattern=SALT_PATTERN)]

_Annotation = Annotated[str, Meta(max_length=256, extra_json_schema={"enum": list(ANNOTATIONS)})]
_ExtraField = Annotated[str, Meta(max_length=64, extra_json_schema={"enum": list(EXTRA_FIELDS)})]


class AgentHints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hints of an agent about its request."""

    priority: _I32 | None = None
    """A higher priority is served earlier."""
    strict_priority: _U32 | None = None
    osl: _U32 | None = None
    """Expected output length in tokens."""
    speculative_prefill: bool | None = None
    latency_sensitivity: Annotated[float, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Legacy name of `priority`, used if that is absent."""


class RoutingConstraints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Required and preferred taints of the worker."""

    required_taints: Annotated[tuple[_Taint, ...], Meta(max_length=32)] | None = None
    preferred_taints: Annotated[dict[_Taint, _TaintWeight], Meta(max_length=32)] | None = None
    """Weight by taint."""


class RouterOverrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Router settings for this request. Names with `target`, `router_` or `score` are Dynamo's."""

    ttft_target: _TargetMs | None = None
    """Milliseconds, like `itl_target`."""
    itl_target: _TargetMs | None = None
    temperature: _Weight | None = None
    """0 selects the worker with the lowest cost; higher values randomize the selection."""
    router_temperature: _Weight | None = None
    """Alias of `temperature`."""
    overlap_weight: _Weight | None = None
    """Policy `classic`: weight of a block to prefill relative to a block in use."""
    overlap_score_weight: _Weight | None = None
    """Alias of `overlap_weight`."""
    room_weight: _Weight | None = None
    """Policy `latency`: weight of a second spent waiting for free KV blocks."""
    affinity_weight: _Weight | None = None
    """Bonus for the worker that last served the session, in seconds (`latency`) or blocks (`classic`)."""
    allowed_worker_ids: Annotated[tuple[_InstanceId, ...], Meta(min_length=1, max_length=1024)] | None = None
    """Only these workers may serve the request."""


class NvExt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dynamo's request extension."""

    greed_sampling: bool | None = None
    """Greedy sampling, whatever else the request specifies."""
    use_raw_prompt: bool | None = None
    """Do not apply the chat template."""
    annotations: Annotated[tuple[_Annotation, ...], Meta(max_length=16)] | None = None
    extra_fields: Annotated[tuple[_ExtraField, ...], Meta(max_length=16)] | None = None
    token_data: Annotated[tuple[_U32, ...], Meta(min_length=1)] | None = None
    """Prompt as token ids; replaces the text."""
    cache_salt: Salt | None = None
    agent_hints: AgentHints | None = None
    request_timestamp_ms: Annotated[float, Meta(ge=0)] | None = None
    routing_constraints: RoutingConstraints | None = None
    router: RouterOverrides | None = None
    max_thinking_tokens: _U32 | None = None
    backend_instance_id: _InstanceId | None = None
    """The only worker that may serve the request."""
    prefill_worker_id: _InstanceId | None = None
    """The only prefill worker that may compute the prompt."""
    decode_worker_id: _InstanceId | None = None
    """Alias of `backend_instance_id`, which takes precedence."""
    dp_rank: _U32 | None = None
    """The only data-parallel rank that may serve the request."""
    prefill_dp_rank: _U32 | None = None
    metadata_upload: dict[str, Any] | None = None


def check_nvext(nvext: NvExt) -> None:
    """Raise InvalidRequest for an unknown name, Unsupported for one of `NOT_YET`."""
    if nvext.annotations:
        _check_names(nvext.annotations, ANNOTATIONS, "nvext.annotations")
    if nvext.extra_fields:
        _check_names(nvext.extra_fields, EXTRA_FIELDS, "nvext.extra_fields")
    for field, value in _fields_with_effect(nvext, "nvext"):
        refuse_not_yet(field, value, param=field)


def refuse_not_yet(field: str, value: object, param: str) -> None:
    """Raise Unsupported if `field` is in `NOT_YET` and `value` has an effect."""
    if field in NOT_YET and value != _NEUTRAL.get(field):
        raise Unsupported(f"{param} is not supported: {NOT_YET[field]}", feature=field, param=param)


def _check_names(names: tuple[str, ...], known: tuple[str, ...], param: str) -> None:
    for name in names:
        if name.partition(":")[0] not in known:
            served = ", ".join(item for item in known if f"{param}.{item}" not in NOT_YET)
            raise InvalidRequest(f"{param}: unknown value {name!r}; known: {served}", param=param)


def _fields_with_effect(struct: msgspec.Struct, prefix: str) -> Iterator[tuple[str, object]]:
    """All fields with an effect, by full name; of a list of names, each name."""
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        field = f"{prefix}.{name}"
        if isinstance(value, msgspec.Struct):
            yield from _fields_with_effect(value, field)
        elif name in ("annotations", "extra_fields"):
            yield from ((f"{field}.{item.partition(':')[0]}", item) for item in value or ())
        elif value is not None and value is not False and value != ():
            yield field, value
