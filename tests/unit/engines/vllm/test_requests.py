"""What vLLM is asked for one of ours, field by field; what it cannot follow is refused before it has anything of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.sampling_lab import ignored_fields
from tests.unit.engines.vllm.stand_in import RequestOutputKind

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import (
    Grammar,
    GrammarKind,
    Handoff,
    MediaSpan,
    Request,
    Sampling,
    StopConditions,
)
from kvolt.engines.external.answers import Answers, Choice
from kvolt.engines.external.requests import input_tokens
from kvolt.engines.vllm.engine import VllmEngine
from kvolt.engines.vllm.requests import check_supported, prompt_input, sampling_params

pytestmark = pytest.mark.usefixtures("model")

PLAIN = Request(
    request_id=RequestId("r"), model="m", token_ids=(11, 12, 13), stop=StopConditions(max_tokens=20)
)
HANDOFF = Handoff(ticket=b"", prefill_instance=InstanceId("p"), first_tokens=(7, 8))


def choices(request: Request) -> list[Choice]:
    return Answers().open(request)


def params(request: Request, index: int = 0, **more: Any) -> Any:
    return sampling_params(choices(request)[index], **more)


def with_sampling(**fields: Any) -> Request:
    return replace(PLAIN, sampling=Sampling(**fields))


def test_what_is_not_asked_for_is_vllms_default() -> None:
    made = params(PLAIN)
    assert (made.temperature, made.top_p, made.top_k, made.min_p, made.seed) == (1.0, 1.0, 0, 0.0, None)
    assert (made.max_tokens, made.min_tokens, made.stop_token_ids, made.ignore_eos) == (20, 0, [], False)
    assert (made.logprobs, made.prompt_logprobs, made.logit_bias, made.allowed_token_ids) == (None,) * 4
    assert (made.structured_outputs, made.extra_args) == (None, None)
    assert (made.n, made.detokenize, made.output_kind) == (1, False, RequestOutputKind.DELTA)
    assert made.skip_clone, "it is nobody else's"


def test_every_declared_sampling_field_reaches_vllm() -> None:
    def mapped(sampling: Sampling) -> list[Any]:
        request = replace(PLAIN, sampling=sampling)
        check_supported(request)
        return [sampling_params(choice) for choice in choices(request)]

    assert ignored_fields(VllmEngine.sampling_fields, mapped) == set()


def test_all_that_can_be_asked_for() -> None:
    asked = replace(
        PLAIN,
        sampling=Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            logit_bias={5: 2.0},
            allowed_token_ids=(5, 6),
            seed=9,
            logprobs=3,
            prompt_logprobs=2,
        ),
        stop=StopConditions(max_tokens=30, min_tokens=4, stop_token_ids=(4, 5), ignore_eos=True),
        extra={"vllm_xargs": {"custom": 1}},
    )
    made = params(asked)
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (0.5, 0.9, 40, 0.1)
    assert (made.presence_penalty, made.frequency_penalty, made.repetition_penalty) == (0.2, 0.3, 1.1)
    assert (made.logit_bias, made.allowed_token_ids, made.seed) == ({5: 2.0}, [5, 6], 9)
    assert (made.logprobs, made.prompt_logprobs) == (3, 2)
    assert (made.max_tokens, made.min_tokens, made.stop_token_ids, made.ignore_eos) == (30, 4, [4, 5], True)
    assert made.extra_args == {"custom": 1}


def test_extra_arguments_stay_the_requests_own() -> None:
    own = {"custom": 1}
    asked = replace(with_sampling(seed=1), extra={"vllm_xargs": own}, prior_tokens=(1,))
    assert params(asked, kv_transfer={"a": 1}).extra_args == {
        "custom": 1,
        "kv_transfer_params": {"a": 1},
        "kvolt_resumed": 1,
    }
    assert own == {"custom": 1}


def test_each_choice_has_a_seed_of_its_own() -> None:
    asked = with_sampling(seed=5, num_choices=3, prompt_logprobs=1)
    made = [sampling_params(choice) for choice in choices(asked)]
    assert [each.seed for each in made] == [5, 6, 7]
    assert [each.n for each in made] == [1, 1, 1]
    assert [each.prompt_logprobs for each in made] == [1, None, None], "told once"
    assert params(with_sampling(num_choices=2), 1).seed is None


@pytest.mark.parametrize("seed", [3, None])
def test_a_resumed_request_has_less_left(seed: int | None) -> None:
    asked = replace(
        with_sampling(seed=seed, prompt_logprobs=1),
        stop=StopConditions(max_tokens=20, min_tokens=6),
        prior_tokens=(1, 2, 3, 4),
    )
    made = params(asked)
    assert (made.max_tokens, made.min_tokens, made.prompt_logprobs) == (16, 2, None)
    assert made.extra_args == (None if seed is None else {"kvolt_resumed": 4})
    assert input_tokens(asked, 0) == [11, 12, 13, 1, 2, 3, 4]
    assert params(replace(asked, prior_tokens=tuple(range(9)))).min_tokens == 0


def test_each_choice_resumes_after_its_own() -> None:
    asked = replace(with_sampling(num_choices=3, seed=1), prior_tokens_by_choice=((1, 2), None, ()))
    one, other = choices(asked)
    assert [input_tokens(asked, choice.index) for choice in (one, other)] == [
        [11, 12, 13, 1, 2],
        [11, 12, 13],
    ]
    assert (sampling_params(one).max_tokens, sampling_params(other).max_tokens) == (18, 20)
    assert (sampling_params(one).seed, sampling_params(other).seed) == (1, 3)
    assert sampling_params(other).extra_args is None


def test_what_was_handed_over_comes_after_the_prompt() -> None:
    asked = replace(with_sampling(num_choices=2, seed=1), handoff=HANDOFF)
    assert [input_tokens(asked, index) for index in (0, 1)] == [[11, 12, 13, 7], [11, 12, 13, 8]]
    assert (params(asked).max_tokens, params(asked).extra_args) == (19, {"kvolt_resumed": 1})
    untold = replace(asked, handoff=replace(HANDOFF, first_tokens=None))
    assert (input_tokens(untold, 0), params(untold).max_tokens) == ([11, 12, 13], 20)


def test_of_a_prompt_alone_one_token_comes() -> None:
    asked = replace(
        with_sampling(seed=1, logprobs=2, prompt_logprobs=2),
        stop=StopConditions(max_tokens=20, min_tokens=5, stop_token_ids=(4,)),
    )
    made = params(asked, kv_transfer={"do_remote_decode": True}, only_prompt=True)
    assert (made.max_tokens, made.min_tokens, made.logprobs, made.prompt_logprobs) == (1, 0, None, None)
    assert (made.seed, made.stop_token_ids) == (1, [4])
    assert made.extra_args == {"kv_transfer_params": {"do_remote_decode": True}}


@pytest.mark.parametrize(
    ("kind", "text", "field", "value"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "object"}', "json", '{"type": "object"}'),
        (GrammarKind.JSON_OBJECT, "", "json_object", True),
        (GrammarKind.REGEX, "a+", "regex", "a+"),
        (GrammarKind.CHOICE, json.dumps(["a", "b"]), "choice", ["a", "b"]),
        (GrammarKind.EBNF, "root ::= 'a'", "grammar", "root ::= 'a'"),
        (GrammarKind.STRUCTURAL_TAG, "{}", "structural_tag", "{}"),
    ],
)
def test_grammars(kind: GrammarKind, text: str, field: str, value: Any) -> None:
    made = params(replace(PLAIN, grammar=Grammar(kind, text))).structured_outputs
    kinds = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    assert {name: getattr(made, name) for name in kinds if getattr(made, name) is not None} == {field: value}


def test_every_kind_of_grammar_is_known() -> None:
    for kind in GrammarKind:
        assert params(replace(PLAIN, grammar=Grammar(kind, '["a"]'))).structured_outputs is not None


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 3.0}, {"top_p": 0.0}, {"presence_penalty": 5.0}, {"min_p": 2.0}, {"top_k": "many"}],
)
def test_what_vllm_refuses_is_the_callers_fault(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="vLLM refuses the request") as caught:
        params(with_sampling(**fields))
    assert caught.value.fields["param"] == "sampling"


def test_salts_are_marked() -> None:
    """Among what else blocks are made of a salt is a string like others."""
    salted = prompt_input(replace(PLAIN, salt="tenant"), 0)
    assert salted == {
        "type": "token",
        "prompt_token_ids": [11, 12, 13],
        "cache_salt": "kvolt-salt:tenant",
    }
    assert prompt_input(PLAIN, 0) == {"type": "token", "prompt_token_ids": [11, 12, 13]}


GRAMMAR = Grammar(GrammarKind.JSON_OBJECT, "")


@pytest.mark.parametrize(
    ("request_", "feature"),
    [
        (replace(PLAIN, media=(MediaSpan(0, 1, b"0123456789abcdef"),)), "media"),
        (replace(PLAIN, grammar=GRAMMAR, prior_tokens=(1,)), "resume with a grammar"),
        (replace(PLAIN, grammar=GRAMMAR, handoff=HANDOFF), "resume with a grammar"),
        (replace(with_sampling(presence_penalty=0.1), prior_tokens=(1,)), "resume with penalties"),
        (replace(with_sampling(frequency_penalty=0.1), handoff=HANDOFF), "resume with penalties"),
    ],
    ids=["media", "grammar", "grammar-handoff", "presence", "frequency-handoff"],
)
def test_what_would_be_answered_otherwise_is_refused(request_: Request, feature: str) -> None:
    with pytest.raises(Unsupported) as caught:
        check_supported(request_)
    assert caught.value.fields["feature"] == feature


@pytest.mark.parametrize(
    "request_",
    [
        PLAIN,
        replace(PLAIN, grammar=GRAMMAR),
        with_sampling(presence_penalty=0.1),
        replace(PLAIN, prior_tokens=(1,)),
        replace(with_sampling(repetition_penalty=1.2), prior_tokens=(1,)),
        replace(PLAIN, grammar=GRAMMAR, handoff=replace(HANDOFF, first_tokens=None)),
    ],
    ids=["plain", "grammar", "penalty", "resume", "repetition", "untold"],
)
def test_what_is_not_refused(request_: Request) -> None:
    check_supported(request_)
