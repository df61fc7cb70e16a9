"""`nvext`: the request extension that Dynamo's clients send, and which parts of it work here.

Owns the fields, their bounds and their vocabularies. What they mean for one request, together with
headers, is `headers`' business.

Three things can be wrong with a name: it is unknown (400, with the known ones), it is known but kvolt has
no mechanism for it yet (501, see `NOT_YET`), or its value is out of bounds (400). A demand that cannot be
met is refused; what a caller merely knows (a preference, an expected length, a timestamp) never is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.core.errors import InvalidRequest, Unsupported

ANNOTATIONS = ("request_id", "formatted_prompt", "token_ids", "query_instance_id")
"""What a stream can tell beside its chunks, each as an event of that name."""

EXTRA_FIELDS = (
    "worker_id",
    "timing",
    "stop_reason",
    "completion_token_ids",
    "prompt_logprobs",
    "routed_experts",
    "engine_data",
)
"""What the `nvext` object of a response can hold."""

_NO_TARGETS = "no router here aims at latency targets per request"

NOT_YET: dict[str, str] = {
    "nvext.prefill_dp_rank": "a data-parallel rank can be named of the worker that answers",
    "nvext.router.ttft_target": _NO_TARGETS,
    "nvext.router.itl_target": _NO_TARGETS,
    "nvext.agent_hints.strict_priority": "queue tiers need the router's queue",
    "nvext.agent_hints.speculative_prefill": "prefilling the next turn ahead needs the router",
    "nvext.max_thinking_tokens": "no engine here can end its reasoning at a given length",
    "nvext.metadata_upload": "nothing here uploads what an engine recorded",
    "nvext.extra_fields.routed_experts": "no engine here reports its expert choices",
    "nvext.extra_fields.engine_data": "no engine here sends data of its own",
}
"""Known, but answered with 501: the field as a client would write it, and why."""

UNSET_RANK = 2**32 - 1
"""Dynamo's endpoint picker sends this rank when it means none."""

_NEUTRAL: dict[str, int] = {
    "nvext.agent_hints.strict_priority": 0,
    "nvext.prefill_dp_rank": UNSET_RANK,
}
"""Values that ask for nothing."""

_U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_InstanceId = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(min_length=1, max_length=256)]
_Taint = Annotated[str, Meta(min_length=1, max_length=128)]
_TargetMs = Annotated[float, Meta(gt=0, le=1e9)]
_TaintWeight = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Weight = Annotated[float, Meta(ge=0, le=1e6)]

SALT_PATTERN = r"^[^\u0000-\u001f]*$"
"""No control characters: the line break is what parts a tenant from a salt (see `headers`)."""
MAX_SALT_CHARS = 1024
Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS, pattern=SALT_PATTERN)]

_Annotation = Annotated[str, Meta(max_length=256, extra_json_schema={"enum": list(ANNOTATIONS)})]
_ExtraField = Annotated[str, Meta(max_length=64, extra_json_schema={"enum": list(EXTRA_FIELDS)})]


class AgentHints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent knows of its request."""

    priority: _I32 | None = None
    """Higher is sooner."""
    strict_priority: _U32 | None = None
    osl: _U32 | None = None
    """Expected output length in tokens."""
    speculative_prefill: bool | None = None
    latency_sensitivity: Annotated[float, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """The old name of `priority`, used when that one is absent."""


class RoutingConstraints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which workers may, or should rather, take the request."""

    required_taints: Annotated[tuple[_Taint, ...], Meta(max_length=32)] | None = None
    preferred_taints: Annotated[dict[_Taint, _TaintWeight], Meta(max_length=32)] | None = None
    """Weight by taint."""


class RouterOverrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the router shall decide about this request. Names with `target`, `router_` or `score` are Dynamo's."""

    ttft_target: _TargetMs | None = None
    """In milliseconds, and so is the next."""
    itl_target: _TargetMs | None = None
    temperature: _Weight | None = None
    """0 takes the least costly worker, more others too."""
    router_temperature: _Weight | None = None
    """The same."""
    overlap_weight: _Weight | None = None
    """Of the policy `classic`: what a block to compute counts beside a block in use."""
    overlap_score_weight: _Weight | None = None
    """The same."""
    room_weight: _Weight | None = None
    """Of the policy `latency`: what a second counts of waiting for room in a worker's cache."""
    affinity_weight: _Weight | None = None
    """Seconds (`latency`) or blocks (`classic`) by which the worker that served the session last is favoured."""
    allowed_worker_ids: Annotated[tuple[_InstanceId, ...], Meta(min_length=1, max_length=1024)] | None = None
    """No other worker may take it."""


class NvExt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dynamo's request extension."""

    greed_sampling: bool | None = None
    """Take the most likely token each time, whatever else the request says."""
    use_raw_prompt: bool | None = None
    """Leave the chat template out."""
    annotations: Annotated[tuple[_Annotation, ...], Meta(max_length=16)] | None = None
    extra_fields: Annotated[tuple[_ExtraField, ...], Meta(max_length=16)] | None = None
    token_data: Annotated[tuple[_U32, ...], Meta(min_length=1)] | None = None
    """The prompt as token ids; takes the place of the text."""
    cache_salt: Salt | None = None
    agent_hints: AgentHints | None = None
    request_timestamp_ms: Annotated[float, Meta(ge=0)] | None = None
    routing_constraints: RoutingConstraints | None = None
    router: RouterOverrides | None = None
    max_thinking_tokens: _U32 | None = None
    backend_instance_id: _InstanceId | None = None
    """The only worker that may take it."""
    prefill_worker_id: _InstanceId | None = None
    """The only worker that may compute its prompt for the one that answers."""
    decode_worker_id: _InstanceId | None = None
    """The same as `backend_instance_id`, which goes before it."""
    dp_rank: _U32 | None = None
    """The only data-parallel rank that may take it."""
    prefill_dp_rank: _U32 | None = None
    metadata_upload: dict[str, Any] | None = None


def check_nvext(nvext: NvExt) -> None:
    """InvalidRequest for a name outside its vocabulary, Unsupported for one of `NOT_YET`."""
    if nvext.annotations:
        _check_names(nvext.annotations, ANNOTATIONS, "nvext.annotations")
    if nvext.extra_fields:
        _check_names(nvext.extra_fields, EXTRA_FIELDS, "nvext.extra_fields")
    for field, value in _asked(nvext, "nvext"):
        refuse_not_yet(field, value, param=field)


def refuse_not_yet(field: str, value: object, param: str) -> None:
    """Unsupported when `field` stands in `NOT_YET` and `value` asks for something."""
    if field in NOT_YET and value != _NEUTRAL.get(field):
        raise Unsupported(f"{param} is not supported yet: {NOT_YET[field]}", feature=field, param=param)


def _check_names(names: tuple[str, ...], known: tuple[str, ...], param: str) -> None:
    for name in names:
        if name.partition(":")[0] not in known:
            served = ", ".join(item for item in known if f"{param}.{item}" not in NOT_YET)
            raise InvalidRequest(f"{param} does not know {name!r}; it knows {served}", param=param)


def _asked(struct: msgspec.Struct, prefix: str) -> Iterator[tuple[str, object]]:
    """Every field that asks for something, by its full name; of a list of names, each name."""
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        field = f"{prefix}.{name}"
        if isinstance(value, msgspec.Struct):
            yield from _asked(value, field)
        elif name in ("annotations", "extra_fields"):
            yield from ((f"{field}.{item.partition(':')[0]}", item) for item in value or ())
        elif value is not None and value is not False and value != ():
            yield field, value
