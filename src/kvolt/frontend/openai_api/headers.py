"""Request headers combined with `nvext`: tenant, session, priority, deadline, routing hints.

Each header has the name `x-kvolt-NAME`, and `x-dynamo-NAME` if Dynamo has it too; the first one present in its list
below is used.

A header overrides the body. Headers are set by a gateway for clients that may not choose their own priority or
tenant, and a client must not be able to override them in the body. Dynamo has the same precedence. Tenant and the
body's salt are combined into one salt: a client can partition its tenant's cache further, but never reach another
tenant's.

`x-dynamo-meta-*`, parent sessions and the end of a session are not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Protocol, TypeVar

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import InstanceId
from kvolt.core.request import Role, RoutingHints
from kvolt.frontend.openai_api.errors import UnsupportedMediaType
from kvolt.frontend.openai_api.nvext import (
    MAX_SALT_CHARS,
    SALT_PATTERN,
    UNSET_RANK,
    NvExt,
    RouterOverrides,
    RoutingConstraints,
    check_nvext,
    refuse_not_yet,
)

REQUEST_ID = ("x-request-id", "x-dynamo-request-id")
TENANT = ("x-kvolt-tenant-id", "x-tenant-id")
PRIORITY = ("x-kvolt-request-priority", "x-dynamo-request-priority")
TIMEOUT_MS = ("x-kvolt-timeout-ms", "x-request-timeout-ms")
TIMING = ("x-kvolt-timing",)
TRACEPARENT = ("traceparent",)

SESSION: tuple[tuple[str, str | None], ...] = (
    ("x-kvolt-session-id", None),
    ("x-dynamo-session-id", None),
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("thread-id", None),  # Codex
    ("x-session-id", None),  # OpenCode, Ray, AIBrix
)
"""Header of a conversation, and the header of the sub-agent's own id for agents with sub-agents."""

WORKER = ("x-kvolt-worker-instance-id", "x-dynamo-worker-instance-id", "x-worker-instance-id")
PREFILL_WORKER = ("x-kvolt-prefill-instance-id", "x-dynamo-prefill-instance-id", "x-prefill-instance-id")
DP_RANK = ("x-kvolt-dp-rank", "x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank")
ALLOWED = ("x-kvolt-allowed-instance-ids",)
REQUIRED_TAINTS = ("x-kvolt-required-taints",)
QUERY_ONLY = ("x-kvolt-query-only",)

UNSUPPORTED_HEADERS: dict[str, tuple[str, ...]] = {
    "nvext.prefill_dp_rank": ("x-kvolt-prefill-dp-rank", "x-dynamo-prefill-dp-rank", "x-prefill-dp-rank"),
    "nvext.agent_hints.strict_priority": (
        "x-kvolt-request-strict-priority",
        "x-dynamo-request-strict-priority",
    ),
}
"""Headers with the same meaning as an unsupported field of `nvext`; whole numbers."""

FLAGS = {"1": True, "true": True, "0": False, "false": False}
MAX_TIMEOUT_MS = 24 * 3600 * 1000
MAX_NAME_CHARS = 256
MAX_LISTED = 1024

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_NAME = re.compile(r"[\x21-\x7e]{1,256}")
_SALT = re.compile(SALT_PATTERN)
_JSON = re.compile(
    r"application/(?:[\w.+-]+\+)?json\s*(?:;\s*charset\s*=\s*\"?utf-?8\"?\s*)?;?", re.IGNORECASE
)


class RequestHints(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one request's headers and `nvext`."""

    request_id: str | None = None
    """Id sent by the client; None if it is missing or not 1 to 128 visible ASCII characters."""
    traceparent: str | None = None
    """As sent; validated by `logs.bind`."""
    routing: RoutingHints = RoutingHints()
    salt: str | None = None
    annotations: tuple[str, ...] = ()
    extra_fields: tuple[str, ...] = ()
    token_data: tuple[int, ...] | None = None
    use_raw_prompt: bool = False
    deadline_s: float | None = None
    """Time limit of the whole response from now."""
    timing: bool = False
    """Whether to return timing headers."""


class TenantScope(Protocol):
    """Tenant of a request, the salt of its KV namespace, and its share of the queue."""

    @property
    def name(self) -> str: ...

    @property
    def salt(self) -> str: ...

    @property
    def share(self) -> float: ...


NO_HINTS = RequestHints()
"""Hints of most requests; shared because it is immutable."""


def _names() -> Iterable[str]:
    own = (REQUEST_ID, TENANT, PRIORITY, TIMEOUT_MS, TIMING, TRACEPARENT)
    routing = (WORKER, PREFILL_WORKER, DP_RANK, ALLOWED, REQUIRED_TAINTS, QUERY_ONLY)
    for group in (*own, *routing, *UNSUPPORTED_HEADERS.values()):
        yield from group
    for root, child in SESSION:
        yield root
        if child is not None:
            yield child


@lru_cache(maxsize=1024)
def _tenant_hints(name: str, salt: str, share: float) -> RequestHints:
    """Hints of most requests of a tenant."""
    return RequestHints(routing=RoutingHints(tenant=name, tenant_share=share), salt=_salt(salt, None))


NAMES = frozenset(_names())
"""All headers that are read here."""


def parse_hints(
    headers: Mapping[str, str],
    nvext: NvExt | None,
    body_salt: str | None,
    priority: int | None,
    tenant: TenantScope | None = None,
) -> RequestHints:
    """Combine headers and body; `body_salt` and `priority` are root-level fields. An authenticated `tenant` replaces
    the header. Raises InvalidRequest for a bad header."""
    if nvext is None and priority is None and not body_salt and NAMES.isdisjoint(headers):
        return NO_HINTS if tenant is None else _tenant_hints(tenant.name, tenant.salt, tenant.share)
    share = 1.0
    if tenant is None:
        name = salt = _name(headers, TENANT)
    else:
        name, salt, share = tenant.name, tenant.salt, tenant.share
    if nvext is None:
        nvext = _NO_NVEXT
    else:
        check_nvext(nvext)
    _refuse_unsupported(headers)
    request_id = _first(headers, REQUEST_ID)[1]
    return RequestHints(
        request_id=request_id if request_id and _REQUEST_ID.fullmatch(request_id) else None,
        traceparent=headers.get("traceparent"),
        routing=_routing(headers, nvext, name, share, priority),
        salt=_salt(salt, _body_salt(nvext.cache_salt, body_salt)),
        annotations=nvext.annotations or (),
        extra_fields=nvext.extra_fields or (),
        token_data=nvext.token_data,
        use_raw_prompt=nvext.use_raw_prompt or False,
        deadline_s=_deadline_s(headers),
        timing=_flag(headers, TIMING),
    )


def check_json_type(headers: Mapping[str, str]) -> None:
    """Raise UnsupportedMediaType unless the body is declared as JSON; a missing content type counts as JSON.

    Not from a web page: a browser asks for permission (CORS) before it sends JSON, but not before it sends a body
    without a type.
    """
    content_type = headers.get("content-type", "" if "origin" in headers else "application/json")
    if content_type != "application/json" and not _JSON.fullmatch(content_type.strip()):
        raise UnsupportedMediaType(
            f"the content type is {content_type[:100]!r}; send the header 'content-type: application/json'",
            content_type=content_type,
        )


T = TypeVar("T")

_NO_NVEXT = NvExt()
_NO_ROUTING = RoutingHints()
_NO_CONSTRAINTS = RoutingConstraints()
_NO_OVERRIDE = RouterOverrides()


def _routing(
    headers: Mapping[str, str], nvext: NvExt, tenant: str | None, share: float, body_priority: int | None
) -> RoutingHints:
    agent = nvext.agent_hints
    constraints = nvext.routing_constraints or _NO_CONSTRAINTS
    override = nvext.router or _NO_OVERRIDE
    required = _list_of(headers, REQUIRED_TAINTS)
    hints = RoutingHints(
        tenant=tenant,
        tenant_share=share,
        session=_session(headers),
        priority=_priority(headers, nvext, body_priority),
        pins=_pins(headers, nvext),
        pinned_dp_rank=_dp_rank(headers, nvext),
        allowed=_allowed(headers, override),
        required_taints=required if required is not None else constraints.required_taints or (),
        preferred_taints=constraints.preferred_taints or {},
        expected_output_tokens=agent.osl if agent is not None else None,
        weights=_weights(override),
        temperature=_first_set(override.temperature, override.router_temperature),
        query_only=_flag(headers, QUERY_ONLY) or _is_query_only(nvext),
    )
    return _NO_ROUTING if hints == _NO_ROUTING else hints


def _pins(headers: Mapping[str, str], nvext: NvExt) -> dict[Role, InstanceId]:
    """Pinned workers by role."""
    answers = _first_set(
        _name(headers, WORKER), _first_set(nvext.backend_instance_id, nvext.decode_worker_id)
    )
    prefill = _first_set(_name(headers, PREFILL_WORKER), nvext.prefill_worker_id)
    named = {Role.AGGREGATED: answers, Role.DECODE: answers, Role.PREFILL: prefill}
    return {role: InstanceId(str(each)) for role, each in named.items() if each is not None}


def _priority(headers: Mapping[str, str], nvext: NvExt, of_body: int | None) -> int:
    agent = nvext.agent_hints
    priority_value = _integer(headers, PRIORITY, -(2**31), 2**31 - 1)
    if priority_value is None and agent is not None:
        priority_value = agent.priority
    if priority_value is None:
        priority_value = of_body
    if priority_value is None and agent is not None and agent.latency_sensitivity is not None:
        priority_value = int(agent.latency_sensitivity)
    return priority_value or 0


def _dp_rank(headers: Mapping[str, str], nvext: NvExt) -> int | None:
    rank = _first_set(_integer(headers, DP_RANK, 0, UNSET_RANK), nvext.dp_rank)
    return None if rank == UNSET_RANK else rank


def _allowed(headers: Mapping[str, str], override: RouterOverrides) -> tuple[InstanceId, ...]:
    named: Iterable[str | int] | None = _list_of(headers, ALLOWED)
    if named is None:
        named = override.allowed_worker_ids or ()
    return tuple(dict.fromkeys(InstanceId(str(each)) for each in named))


def _weights(override: RouterOverrides) -> dict[str, float]:
    weights_by_name = {
        "overlap": _first_set(override.overlap_weight, override.overlap_score_weight),
        "room": override.room_weight,
        "affinity": override.affinity_weight,
    }
    return {name: weight for name, weight in weights_by_name.items() if weight is not None}


def _is_query_only(nvext: NvExt) -> bool:
    return any(name.partition(":")[0] == "query_instance_id" for name in nvext.annotations or ())


def _first_set(first: T | None, second: T | None) -> T | None:
    return second if first is None else first


def _refuse_unsupported(headers: Mapping[str, str]) -> None:
    for field, names in UNSUPPORTED_HEADERS.items():
        name, text = _first(headers, names)
        if text is not None:
            refuse_not_yet(field, _to_integer(name, text, 0, 2**32 - 1), param=name)


def _salt(tenant: str | None, salt: str | None) -> str | None:
    # Neither may contain a line break, so a salt from a body never equals a tenant's.
    return salt or None if tenant is None else f"{tenant}\n{salt or ''}"


def _body_salt(nvext_salt: str | None, root_salt: str | None) -> str | None:
    salt, param = (nvext_salt, "nvext.cache_salt") if nvext_salt else (root_salt, "cache_salt")
    if salt and (len(salt) > MAX_SALT_CHARS or not _SALT.fullmatch(salt)):
        raise InvalidRequest(
            f"{param} must be at most {MAX_SALT_CHARS} characters without control characters",
            param=param,
        )
    return salt


def _session(headers: Mapping[str, str]) -> str | None:
    for root, child in SESSION:
        if root in headers:
            session = _to_name(root, headers[root])
            return _to_name(child, headers[child]) if child is not None and child in headers else session
    return None


def _deadline_s(headers: Mapping[str, str]) -> float | None:
    timeout_ms = _integer(headers, TIMEOUT_MS, 1, MAX_TIMEOUT_MS)
    return timeout_ms / 1000 if timeout_ms is not None else None


def _flag(headers: Mapping[str, str], names: tuple[str, ...]) -> bool:
    name, text = _first(headers, names)
    if text is None:
        return False
    if text not in FLAGS:
        raise _header_error(name, text, " or ".join(FLAGS))
    return FLAGS[text]


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str | None]:
    for name in names:
        if name in headers:
            return name, headers[name]
    return names[0], None


def _name(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    name, text = _first(headers, names)
    return _to_name(name, text) if text is not None else None


def _integer(headers: Mapping[str, str], names: tuple[str, ...], low: int, high: int) -> int | None:
    name, text = _first(headers, names)
    return _to_integer(name, text, low, high) if text is not None else None


def _list_of(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Comma-separated names; None without the header."""
    name, text = _first(headers, names)
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_LISTED or not all(map(_NAME.fullmatch, parts)):
        raise _header_error(name, text, f"1 to {MAX_LISTED} comma-separated names without spaces")
    return tuple(dict.fromkeys(parts))


def _to_name(name: str, text: str) -> str:
    if not _NAME.fullmatch(text):
        raise _header_error(name, text, f"1 to {MAX_NAME_CHARS} visible ASCII characters without spaces")
    return text


_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")


def _to_integer(name: str, text: str, low: int, high: int) -> int:
    value = int(text) if _INTEGER.fullmatch(text) else None
    if value is None or not low <= value <= high:
        raise _header_error(name, text, f"a whole number from {low} to {high}")
    return value


def _header_error(name: str, text: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"the header {name} is {text[:100]!r}; it must be {expected}", param=name)
