"""Requests whose clients have some of the answer already."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvolt.core.errors import Unsupported
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Grammar, GrammarKind, Handoff, Request, Sampling, StopConditions
from kvolt.engines.external.answers import Choice
from kvolt.engines.external.requests import (
    OUTPUT_PENALTIES,
    check_resumable,
    input_tokens,
    is_resumed,
    needs_prompt_logprobs,
)

REQUEST = Request(request_id=RequestId("r"), model="m", token_ids=(5, 6), stop=StopConditions(max_tokens=10))
HANDOFF = Handoff(ticket=b"", prefill_instance=InstanceId(""), expires_in_s=1.0, first_tokens=(9,))
TWO = replace(REQUEST, sampling=Sampling(num_choices=2, prompt_logprobs=1))


def test_tokens_before_the_next_one() -> None:
    assert input_tokens(REQUEST, 0) == [5, 6]
    assert input_tokens(replace(REQUEST, prior_tokens=(1, 2)), 0) == [5, 6, 1, 2]
    assert input_tokens(replace(REQUEST, handoff=HANDOFF), 0) == [5, 6, 9]
    assert input_tokens(replace(REQUEST, handoff=HANDOFF, prior_tokens=(9, 8)), 0) == [5, 6, 9, 8]
    several = replace(HANDOFF, first_tokens=(9, 8))
    assert input_tokens(replace(TWO, handoff=several), 1) == [5, 6, 8]
    untold = replace(HANDOFF, first_tokens=None)
    assert input_tokens(replace(REQUEST, handoff=untold), 0) == [5, 6]


@pytest.mark.parametrize(
    ("request_", "is_so"),
    [
        (REQUEST, False),
        (replace(REQUEST, handoff=replace(HANDOFF, first_tokens=None)), False),
        (replace(REQUEST, prior_tokens=(1,)), True),
        (replace(REQUEST, handoff=HANDOFF), True),
    ],
)
def test_who_has_tokens_already(request_: Request, is_so: bool) -> None:
    assert is_resumed(request_) is is_so


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"grammar": Grammar(GrammarKind.REGEX, "a+")}, "resume with a grammar"),
        ({"sampling": Sampling(presence_penalty=1)}, "resume with penalties"),
        ({"sampling": Sampling(frequency_penalty=1)}, "resume with penalties"),
        ({"sampling": Sampling(repetition_penalty=2)}, "resume with penalties"),
    ],
)
def test_requests_that_cannot_resume_are_refused(fields: dict[str, object], feature: str) -> None:
    with pytest.raises(Unsupported) as refused:
        check_resumable(replace(REQUEST, prior_tokens=(1,), **fields), "X", "X counts anew")
    assert refused.value.fields["feature"] == feature
    check_resumable(replace(REQUEST, prior_tokens=(1,)), "X", "X counts anew")


def test_penalty_that_is_unchanged_by_a_resume() -> None:
    """One that counts the prompt as well."""
    repeated = replace(REQUEST, prior_tokens=(1,), sampling=Sampling(repetition_penalty=2))
    check_resumable(repeated, "X", "X counts anew", OUTPUT_PENALTIES)
    absent = replace(REQUEST, prior_tokens=(1,), sampling=Sampling(presence_penalty=2))
    with pytest.raises(Unsupported):
        check_resumable(absent, "X", "X counts anew", OUTPUT_PENALTIES)


def test_logprobs_of_a_prompt_are_asked_for_once() -> None:
    assert [needs_prompt_logprobs(Choice(TWO, index, "")) for index in (0, 1)] == [True, False]
    assert not needs_prompt_logprobs(Choice(REQUEST, 0, ""))
    first_is_over = replace(TWO, prior_tokens_by_choice=(None, (3,)))
    assert not needs_prompt_logprobs(Choice(first_is_over, 1, "")), "its client has them"
