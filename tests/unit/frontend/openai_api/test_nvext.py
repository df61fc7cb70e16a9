from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.frontend.openai_api.nvext import ANNOTATIONS, EXTRA_FIELDS, NOT_YET, NvExt, check_nvext


def read(**fields: Any) -> NvExt:
    nvext = msgspec.json.decode(msgspec.json.encode(fields), type=NvExt)
    check_nvext(nvext)
    return nvext


def test_what_works_is_taken_as_it_is() -> None:
    nvext = read(
        greed_sampling=True,
        use_raw_prompt=True,
        annotations=["request_id", "formatted_prompt", "token_ids"],
        extra_fields=["worker_id", "timing", "stop_reason", "completion_token_ids", "prompt_logprobs"],
        token_data=[1, 2, 2**32 - 1],
        cache_salt="blue",
        agent_hints={"priority": -5, "osl": 100, "latency_sensitivity": 1.5},
        request_timestamp_ms=12.5,
        routing_constraints={"preferred_taints": {"gpu=h100": 0.5}, "required_taints": ["eu"]},
        backend_instance_id=2**64 - 1,
        dp_rank=0,
        router={"temperature": 0.5, "overlap_weight": 2, "allowed_worker_ids": ["a", 7]},
    )
    assert nvext.token_data == (1, 2, 2**32 - 1)
    assert nvext.agent_hints is not None
    assert nvext.agent_hints.priority == -5


def test_null_is_a_field_left_out() -> None:
    nulls = dict.fromkeys(NvExt.__struct_fields__)
    assert read(**nulls) == NvExt()


@pytest.mark.parametrize(
    "fields",
    [
        {"colour": "blue"},
        {"agent_hints": {"mood": 1}},
        {"router": {"p99": 1}},
        {"routing_constraints": {"taints": []}},
        {"token_data": []},
        {"token_data": [-1]},
        {"token_data": [2**32]},
        {"agent_hints": {"priority": 2**31}},
        {"agent_hints": {"osl": -1}},
        {"cache_salt": "x" * 1025},
        {"cache_salt": "a\nb"},
        {"annotations": ["request_id"] * 17},
        {"router": {"ttft_target": 0}},
        {"router": {"temperature": -1}},
        {"router": {"allowed_worker_ids": []}},
        {"routing_constraints": {"preferred_taints": {"gpu": 1e9}}},
        {"routing_constraints": {"required_taints": [""]}},
        {"request_timestamp_ms": -1},
        {"dp_rank": 2**32},
    ],
)
def test_unknown_fields_and_values_out_of_bounds_do_not_decode(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        read(**fields)


@pytest.mark.parametrize(
    ("fields", "param", "known"),
    [
        ({"annotations": ["colour"]}, "nvext.annotations", "request_id, formatted_prompt, token_ids"),
        ({"annotations": ["query_instance_ids:x"]}, "nvext.annotations", "query_instance_id"),
        ({"extra_fields": ["timing", "colour"]}, "nvext.extra_fields", "worker_id, timing, stop_reason"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    fields: dict[str, Any], param: str, known: str
) -> None:
    with pytest.raises(InvalidRequest, match=known) as caught:
        read(**fields)
    assert caught.value.fields["param"] == param


ASKING: dict[str, dict[str, Any]] = {
    "nvext.prefill_dp_rank": {"prefill_dp_rank": 1},
    "nvext.router.ttft_target": {"router": {"ttft_target": 100}},
    "nvext.router.itl_target": {"router": {"itl_target": 10}},
    "nvext.agent_hints.strict_priority": {"agent_hints": {"strict_priority": 1}},
    "nvext.agent_hints.speculative_prefill": {"agent_hints": {"speculative_prefill": True}},
    "nvext.max_thinking_tokens": {"max_thinking_tokens": 0},
    "nvext.metadata_upload": {"metadata_upload": {"url": "http://example.org"}},
    "nvext.extra_fields.routed_experts": {"extra_fields": ["routed_experts"]},
    "nvext.extra_fields.engine_data": {"extra_fields": ["worker_id", "engine_data"]},
}


def test_every_row_of_the_table_has_a_case() -> None:
    assert ASKING.keys() == NOT_YET.keys()


@pytest.mark.parametrize("field", ASKING)
def test_what_has_no_mechanism_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(Unsupported, match=NOT_YET[field]) as caught:
        read(**ASKING[field])
    assert caught.value.fields == {"feature": field, "param": field}


@pytest.mark.parametrize(
    "fields",
    [
        {"agent_hints": {"strict_priority": 0, "speculative_prefill": False}},
        {"dp_rank": 2**32 - 1, "prefill_dp_rank": 2**32 - 1},
        {"routing_constraints": {"required_taints": []}},
        {"annotations": [], "extra_fields": []},
    ],
)
def test_a_value_that_asks_for_nothing_passes(fields: dict[str, Any]) -> None:
    read(**fields)


def test_the_table_names_only_what_exists() -> None:
    for field in NOT_YET:
        first, *rest = field.removeprefix("nvext.").split(".")
        assert first in NvExt.__struct_fields__
        if first in ("annotations", "extra_fields"):
            assert rest[0] in (*ANNOTATIONS, *EXTRA_FIELDS)
