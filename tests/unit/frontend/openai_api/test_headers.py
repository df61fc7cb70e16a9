from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Role, RoutingHints
from kvolt.frontend.openai_api import headers as header_names
from kvolt.frontend.openai_api.errors import UnsupportedMediaType
from kvolt.frontend.openai_api.headers import (
    DP_RANK,
    NAMES,
    NO_HINTS,
    PREFILL_WORKER,
    UNSUPPORTED_HEADERS,
    WORKER,
    RequestHints,
    check_json_type,
    parse_hints,
)
from kvolt.frontend.openai_api.nvext import AgentHints, NvExt, RouterOverrides, RoutingConstraints
from kvolt.frontend.tenants.records import Tenant
from kvolt.router.policy.policy import WEIGHTS

ORDINARY = {
    "host": "127.0.0.1:1234",
    "content-type": "application/json",
    "user-agent": "OpenAI/Python",
    "authorization": "Bearer x",
    "x-stainless-lang": "python",
}


def read(
    headers: dict[str, str] | None = None,
    nvext: NvExt | None = None,
    salt: str | None = None,
    priority: int | None = None,
) -> RequestHints:
    return parse_hints({**ORDINARY, **(headers or {})}, nvext, salt, priority)


def refused(headers: dict[str, str]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(headers)
    return caught.value


def test_an_ordinary_request_gets_the_one_shared_object() -> None:
    assert read() is NO_HINTS
    assert read(salt="") is NO_HINTS
    assert RequestHints() == NO_HINTS


def test_every_part_of_the_hints_has_a_source() -> None:
    got = read(
        {
            "x-request-id": "req-1",
            "traceparent": "00-1-2-01",
            "x-kvolt-session-id": "chat-9",
            "x-kvolt-request-priority": "+7",
            "x-kvolt-timeout-ms": "1500",
            "x-kvolt-timing": "1",
        },
        NvExt(
            annotations=("token_ids",),
            extra_fields=("timing",),
            token_data=(1, 2),
            use_raw_prompt=True,
            agent_hints=AgentHints(osl=50),
            routing_constraints=RoutingConstraints(preferred_taints={"gpu": 0.5}),
        ),
        "blue",
    )
    assert got == RequestHints(
        request_id="req-1",
        traceparent="00-1-2-01",
        routing=RoutingHints(
            session="chat-9", priority=7, expected_output_tokens=50, preferred_taints={"gpu": 0.5}
        ),
        salt="blue",
        annotations=("token_ids",),
        extra_fields=("timing",),
        token_data=(1, 2),
        use_raw_prompt=True,
        deadline_s=1.5,
        timing=True,
    )


@pytest.mark.parametrize("name", ["x-request-id", "x-dynamo-request-id"])
def test_a_client_may_name_its_request(name: str) -> None:
    assert read({name: "a" * 128}).request_id == "a" * 128


@pytest.mark.parametrize("text", ["", "a" * 129, "a b", "a, b", "é", "a\x7f"])
def test_an_unfit_request_id_is_replaced_not_refused(text: str) -> None:
    assert read({"x-request-id": text}).request_id is None


# header against body


def test_a_header_beats_the_body_and_our_name_beats_the_alias() -> None:
    nvext = NvExt(agent_hints=AgentHints(priority=2, latency_sensitivity=1.0))
    body = {"nvext": nvext, "priority": 3}
    both = {"x-kvolt-request-priority": "4", "x-dynamo-request-priority": "5"}
    assert read(both, **body).routing.priority == 4
    assert read({"x-dynamo-request-priority": "5"}, **body).routing.priority == 5
    assert read({"x-dynamo-request-priority": "0"}, **body).routing.priority == 0
    assert read(**body).routing.priority == 2
    assert read(priority=3).routing.priority == 3


def test_latency_sensitivity_is_the_last_word_on_priority() -> None:
    old = NvExt(agent_hints=AgentHints(latency_sensitivity=4.9))
    assert read(nvext=old).routing.priority == 4
    assert read(nvext=old, priority=3).routing.priority == 3


# tenants and salts


@pytest.mark.parametrize("name", ["x-tenant-id", "x-kvolt-tenant-id"])
def test_a_tenant_is_part_of_the_salt(name: str) -> None:
    got = read({name: "acme"})
    assert got.routing.tenant == "acme"
    assert got.salt
    assert got.salt != read({name: "other"}).salt
    assert got.salt != read({name: "acme"}, salt="blue").salt


def test_the_salt_of_nvext_goes_before_the_root_one() -> None:
    assert read(nvext=NvExt(cache_salt="a"), salt="b").salt == "a"
    assert read(nvext=NvExt(cache_salt=""), salt="b").salt == "b"


names = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=8)
salts = st.text(max_size=12) | names


@given(tenant=names, other=st.none() | names, salt=salts, other_salt=salts, in_nvext=st.booleans())
def test_no_salt_of_a_body_reaches_another_tenant(
    tenant: str, other: str | None, salt: str, other_salt: str, in_nvext: bool
) -> None:
    mine = _salt(tenant, salt, in_nvext)
    theirs = _salt(other, other_salt, in_nvext)
    if mine is not None and mine == theirs:
        assert (tenant, salt) == (other, other_salt)


def _salt(tenant: str | None, salt: str, in_nvext: bool) -> str | None:
    headers = {"x-tenant-id": tenant} if tenant is not None else {}
    try:
        return read(headers, NvExt(cache_salt=salt), None).salt if in_nvext else read(headers, salt=salt).salt
    except InvalidRequest:
        return None


@pytest.mark.parametrize("salt", ["a\nb", "a\n", "\x00", "x" * 1025])
def test_a_salt_with_control_characters_or_too_long_is_refused(salt: str) -> None:
    with pytest.raises(InvalidRequest, match="1024") as caught:
        read(salt=salt)
    assert caught.value.fields["param"] == "cache_salt"
    with pytest.raises(InvalidRequest) as caught:
        read(nvext=NvExt(cache_salt=salt))
    assert caught.value.fields["param"] == "nvext.cache_salt"


# sessions


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"x-kvolt-session-id": "k", "x-dynamo-session-id": "d"}, "k"),
        ({"x-dynamo-session-id": "d", "x-session-id": "s"}, "d"),
        ({"x-session-id": "s"}, "s"),
        ({"thread-id": "t"}, "t"),
        ({"x-claude-code-session-id": "c"}, "c"),
        ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "sub"}, "sub"),
        ({"x-claude-code-agent-id": "sub"}, None),
    ],
)
def test_a_session_by_any_of_its_names(headers: dict[str, str], session: str | None) -> None:
    assert read(headers).routing.session == session


# bad values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x-kvolt-request-priority", "high"),
        ("x-kvolt-request-priority", "1.5"),
        ("x-dynamo-request-priority", "2147483648"),
        ("x-dynamo-request-priority", ""),
        ("x-kvolt-request-priority", "٣"),
        ("x-kvolt-request-priority", "1_0"),
        ("x-kvolt-request-priority", "9" * 5000),
        ("x-kvolt-timeout-ms", "0"),
        ("x-kvolt-timeout-ms", "-1"),
        ("x-kvolt-timeout-ms", "86400001"),
        ("x-request-timeout-ms", "10s"),
        ("x-kvolt-timing", "yes"),
        ("x-tenant-id", ""),
        ("x-tenant-id", "a b"),
        ("x-tenant-id", "theirs, mine"),
        ("x-tenant-id", "x" * 257),
        ("x-session-id", "\x01"),
        ("x-claude-code-session-id", "é"),
        ("x-kvolt-dp-rank", "first"),
        ("x-dynamo-request-strict-priority", "-1"),
        ("x-worker-instance-id", "a b"),
        ("x-kvolt-dp-rank", "-1"),
        ("x-kvolt-allowed-instance-ids", ""),
        ("x-kvolt-allowed-instance-ids", "a,,b"),
        ("x-kvolt-required-taints", "a b"),
        ("x-kvolt-required-taints", ",".join(map(str, range(2000)))),
        ("x-kvolt-query-only", "perhaps"),
    ],
)
def test_a_bad_value_names_its_header(name: str, text: str) -> None:
    error = refused({name: text})
    assert error.fields["param"] == name
    assert name in error.message
    assert len(error.message) < 400


def test_both_names_of_the_timeout_work() -> None:
    assert read({"x-kvolt-timeout-ms": "1"}).deadline_s == 0.001
    assert read({"x-request-timeout-ms": "86400000"}).deadline_s == 86400.0
    assert read({"x-kvolt-timing": "false"}).timing is False


# demands without a mechanism


@pytest.mark.parametrize(
    ("field", "name"), [(field, name) for field, group in UNSUPPORTED_HEADERS.items() for name in group]
)
def test_a_demand_that_cannot_be_met_is_named(field: str, name: str) -> None:
    with pytest.raises(Unsupported, match=name) as caught:
        read({name: "3"})
    assert caught.value.fields == {"feature": field, "param": name}


# where it goes


@pytest.mark.parametrize("name", WORKER)
def test_a_request_may_be_pinned_to_a_worker(name: str) -> None:
    pins = {Role.AGGREGATED: "w-1", Role.DECODE: "w-1"}
    assert read({name: "w-1"}, NvExt(backend_instance_id="other")).routing.pins == pins
    assert read(nvext=NvExt(backend_instance_id="w-1", decode_worker_id="other")).routing.pins == pins
    assert read(nvext=NvExt(decode_worker_id="w-1")).routing.pins == pins
    assert read(nvext=NvExt(decode_worker_id=7)).routing.pins[Role.AGGREGATED] == "7"


@pytest.mark.parametrize("name", PREFILL_WORKER)
def test_who_computes_the_prompt_is_pinned_by_itself(name: str) -> None:
    assert read({name: "p-1"}, NvExt(prefill_worker_id="other")).routing.pins == {Role.PREFILL: "p-1"}
    assert read(nvext=NvExt(prefill_worker_id=7)).routing.pins == {Role.PREFILL: "7"}
    both = {Role.AGGREGATED: "d-1", Role.DECODE: "d-1", Role.PREFILL: "p-1"}
    assert read({name: "p-1"}, NvExt(decode_worker_id="d-1")).routing.pins == both


@pytest.mark.parametrize("name", DP_RANK)
def test_a_request_may_be_pinned_to_a_rank(name: str) -> None:
    assert read({name: "3"}, NvExt(dp_rank=1)).routing.pinned_dp_rank == 3
    assert read({name: "4294967295"}, NvExt(dp_rank=1)).routing == RoutingHints()
    assert read(nvext=NvExt(dp_rank=0)).routing.pinned_dp_rank == 0
    assert read(nvext=NvExt(dp_rank=2**32 - 1)).routing == RoutingHints()


def test_workers_and_taints_may_be_listed() -> None:
    headers = {"x-kvolt-allowed-instance-ids": "a, b,a", "x-kvolt-required-taints": "gpu=h100,eu"}
    nvext = NvExt(
        router=RouterOverrides(allowed_worker_ids=("c", 5)),
        routing_constraints=RoutingConstraints(required_taints=("cpu",)),
    )
    both = read(headers, nvext).routing
    assert (both.allowed, both.required_taints) == (("a", "b"), ("gpu=h100", "eu"))
    body = read(nvext=nvext).routing
    assert (body.allowed, body.required_taints) == (("c", "5"), ("cpu",))


def test_a_request_may_weigh_for_itself() -> None:
    ours = RouterOverrides(overlap_weight=2.0, room_weight=3.0, affinity_weight=0.0, temperature=0.25)
    routing = read(nvext=NvExt(router=ours)).routing
    assert routing.weights == {"overlap": 2.0, "room": 3.0, "affinity": 0.0}
    assert set(routing.weights) == set(WEIGHTS)
    assert routing.temperature == 0.25
    theirs = read(
        nvext=NvExt(router=RouterOverrides(overlap_score_weight=4.0, router_temperature=0.0))
    ).routing
    assert (theirs.weights, theirs.temperature) == ({"overlap": 4.0}, 0.0)


def test_a_request_may_only_be_asked_about() -> None:
    assert read({"x-kvolt-query-only": "1"}).routing.query_only
    assert read(nvext=NvExt(annotations=("query_instance_id:",))).routing.query_only
    assert not read({"x-kvolt-query-only": "0"}).routing.query_only


def test_a_demand_for_nothing_passes() -> None:
    assert read({"x-dynamo-prefill-dp-rank": "4294967295"}).routing == RoutingHints()
    assert read({"x-dynamo-request-strict-priority": "0"}).routing == RoutingHints()


def test_nvext_is_checked_too() -> None:
    with pytest.raises(Unsupported):
        read(nvext=NvExt(max_thinking_tokens=5))
    with pytest.raises(InvalidRequest):
        read(nvext=NvExt(annotations=("colour",)))


@given(st.dictionaries(st.sampled_from(sorted(NAMES)), st.text(max_size=20) | st.integers().map(str)))
def test_no_header_does_worse_than_a_refusal(headers: dict[str, str]) -> None:
    try:
        got = read(headers)
    except (InvalidRequest, Unsupported) as error:
        named = error.fields["param"]
    else:
        named = None
        assert got.request_id is None or got.request_id.isprintable()
    assert named is None or named in headers


def test_header_names_are_lower_case_as_the_server_gives_them() -> None:
    assert all(name == name.lower() for name in NAMES)
    assert set(header_names.TIMEOUT_MS) <= NAMES


# content types


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON;charset=UTF-8",
        'application/json; charset="utf8"',
        "application/vnd.api+json",
        " application/json ",
    ],
)
def test_json_is_taken_by_any_of_its_names(content_type: str | None) -> None:
    check_json_type({"content-type": content_type} if content_type is not None else {})


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonx",
        "application/json; charset=latin-1",
        "application/json, text/plain",
        "a" * 30_000,
        "application/" + "+" * 30_000,
    ],
)
def test_anything_else_is_an_unsupported_media_type(content_type: str) -> None:
    with pytest.raises(UnsupportedMediaType) as caught:
        check_json_type({"content-type": content_type})
    assert len(caught.value.message) < 300
    assert "send the header 'content-type: application/json'" in caught.value.message


def test_a_web_page_must_declare_json() -> None:
    """A browser sends a body without a type to any server, before the server could refuse its page."""
    page = {"origin": "https://page.example"}
    with pytest.raises(UnsupportedMediaType, match="application/json"):
        check_json_type(page)
    check_json_type({**page, "content-type": "application/json"})


@pytest.mark.parametrize("headers", [{}, {"x-kvolt-session-id": "s"}], ids=["plain", "with hints"])
def test_an_authenticated_tenant_has_its_share_and_namespace(headers: dict[str, str]) -> None:
    tenant = Tenant(name="acme", share=3.0, cache_salt="common")
    hints = parse_hints(headers, None, None, None, tenant)
    assert (hints.routing.tenant, hints.routing.tenant_share, hints.salt) == ("acme", 3.0, "common\n")
