"""What a request brings for vLLM alone: it is heard, or refused; nothing is passed over."""

from __future__ import annotations

from typing import Any

import pytest

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, StopConditions
from kvolt.engines.vllm.extras import check_extra, extra_args, loaded_processors

KNOWN = frozenset({"Force", "site.force:Force"})


class Inner:
    class Processor:
        pass


def asked(**extra: Any) -> Request:
    return Request(
        request_id=RequestId("r"),
        model="m",
        token_ids=(1,),
        stop=StopConditions(max_tokens=1),
        extra=extra,
    )


def processor(name: str = "Force", **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args}


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, {}),
        ({"vllm_xargs": None}, {}),
        ({"vllm_xargs": {"a": 1}}, {"a": 1}),
        ({"logits_processors": []}, {}),
        ({"logits_processors": [processor(token=5)]}, {"token": 5}),
        (
            {"logits_processors": [processor("site.force:Force", token=5)], "vllm_xargs": {"a": [1]}},
            {"a": [1], "token": 5},
        ),
    ],
    ids=["none", "null", "arguments", "empty", "processor", "both"],
)
def test_what_is_heard(extra: dict[str, Any], told: dict[str, Any]) -> None:
    request = asked(**extra)
    check_extra(request, KNOWN)
    assert extra_args(request) == told


def test_it_is_the_callers_own() -> None:
    own = {"a": 1}
    extra_args(asked(vllm_xargs=own))["b"] = 2
    assert own == {"a": 1}


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"vllm_xargs": [1]}, "vllm_xargs", "must be an object"),
        ({"vllm_xargs": {1: 2}}, "vllm_xargs", "must be an object"),
        ({"vllm_xargs": {"kv_transfer_params": {}}}, "vllm_xargs", "is reserved"),
        ({"vllm_xargs": {"kvolt_resumed": 10**9}}, "vllm_xargs", "is reserved"),
        (
            {"logits_processors": [processor(kvolt_resumed=1)]},
            "logits_processors",
            "is reserved",
        ),
        (
            {"logits_processors": [processor("Other", a=1)]},
            "logits_processors",
            r"loaded: Force, site\.force",
        ),
        ({"logits_processors": ["Force"]}, "logits_processors", "needs args"),
        ({"logits_processors": "Force"}, "logits_processors", "logits_processors"),
        ({"logits_processors": [7]}, "logits_processors", "logits_processors"),
        ({"logits_processors": [{"name": "Force", "arguments": {}}]}, "logits_processors", "arguments"),
        (
            {"logits_processors": [processor(token=5), processor(token=6)]},
            "logits_processors",
            "set twice",
        ),
        (
            {"logits_processors": [processor(token=5)], "vllm_xargs": {"token": 6}},
            "logits_processors",
            "set twice",
        ),
    ],
)
def test_what_cannot_be_said(extra: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_extra(asked(**extra), KNOWN)
    assert caught.value.fields["param"] == param


def test_without_processors_it_is_said_how_to_have_them() -> None:
    with pytest.raises(InvalidRequest, match=r"loaded: none\).*engine_args.logits_processors"):
        check_extra(asked(logits_processors=[processor(a=1)]), frozenset())


def test_unsupported_extras_are_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        check_extra(asked(vllm_xargs={"a": 1}, custom_params={}), KNOWN)
    assert caught.value.fields["feature"] == "custom_params"


def test_processors_by_their_names() -> None:
    assert loaded_processors(["site.force:Force"]) == KNOWN
    assert loaded_processors([Inner.Processor]) == {f"{__name__}:Inner.Processor", "Inner.Processor"}
    assert loaded_processors([]) == frozenset()
