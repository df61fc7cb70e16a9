"""Requests in SGLang's words, and what is refused because it has none for it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.sampling_lab import ignored_fields
from tests.unit.engines.sglang.lab import FACTS, request

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import (
    Grammar,
    GrammarKind,
    MediaSpan,
    Request,
    RoutingHints,
    Sampling,
    StopConditions,
)
from kvolt.engines.external.answers import Answers
from kvolt.engines.sglang.engine import SglangEngine
from kvolt.engines.sglang.host.messages import Generate
from kvolt.engines.sglang.requests import check_supported, generation


def made(asked: Request, index: int = 0, **facts: Any) -> Generate:
    choice = next(each for each in Answers().open(asked) if each.index == index)
    return generation(choice, replace(FACTS, **facts), 99)


def test_every_field_has_its_place() -> None:
    sampling = Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        logit_bias={7: 2.0},
        seed=5,
        logprobs=2,
        prompt_logprobs=4,
    )
    stop = StopConditions(max_tokens=10, min_tokens=3, stop_token_ids=(9, 8))
    asked = made(
        request(sampling=sampling, stop=stop, salt="tenant", lora="a", routing=RoutingHints(priority=3)),
        has_priorities=True,
    )
    assert asked.sampling == {
        "max_new_tokens": 10,
        "min_new_tokens": 3,
        "stop_token_ids": [8, 9],
        "ignore_eos": False,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 2.0},
        "sampling_seed": 5,
        "skip_special_tokens": False,
    }
    assert asked.fields == {
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 4,
        "cache_salt": "tenant",
        "routed_dp_rank": None,
        "priority": 3,
        "lora_name": "a",
    }


@pytest.mark.parametrize("is_seeded", [False, True])
def test_every_declared_sampling_field_reaches_sglang(is_seeded: bool) -> None:
    facts = replace(FACTS, is_seeded=is_seeded)

    def mapped(sampling: Sampling) -> list[Generate]:
        asked = request(sampling=sampling)
        check_supported(asked, facts)
        return [generation(choice, facts, 99) for choice in Answers().open(asked)]

    assert ignored_fields(SglangEngine.sampling_fields, mapped) == set()


def test_names_are_no_beginnings_of_each_other() -> None:
    """SGLang aborts by the beginning of a name: choice 1 is not to take choice 10 with it."""
    rids = [f"{choice.engine_id}." for choice in Answers().open(request(sampling=Sampling(num_choices=11)))]
    assert made(request()).rid.endswith(".")
    assert not any(a != b and b.startswith(a) for a in rids for b in rids)


def test_choices_draw_apart() -> None:
    seeds = [
        made(request(sampling=Sampling(seed=5, num_choices=2)), index).sampling["sampling_seed"]
        for index in (0, 1)
    ]
    assert seeds == [5, 6]
    assert made(request(sampling=Sampling())).sampling["sampling_seed"] == 99
    assert made(request(sampling=Sampling()), is_seeded=False).sampling["sampling_seed"] is None


def test_resumed_request_continues() -> None:
    stop = StopConditions(max_tokens=10, min_tokens=3)
    asked = made(
        request(stop=stop, prior_tokens=(70, 71), sampling=Sampling(temperature=0.0, prompt_logprobs=1))
    )
    assert asked.input_ids[-3:] == [59, 70, 71]
    assert (asked.sampling["max_new_tokens"], asked.sampling["min_new_tokens"]) == (8, 1)
    assert not asked.fields["return_logprob"], "its client has the logprobs of the prompt"


def test_where_eos_is_ignored_nothing_is_asked_of_ends() -> None:
    stop = StopConditions(max_tokens=10, min_tokens=3, stop_token_ids=(9,), ignore_eos=True)
    assert made(request(stop=stop)).sampling["min_new_tokens"] == 0


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (GrammarKind.JSON_SCHEMA, "{}", {"json_schema": "{}"}),
        (GrammarKind.JSON_OBJECT, "", {"json_schema": '{"type": "object"}'}),
        (GrammarKind.REGEX, "a+", {"regex": "a+"}),
        (GrammarKind.EBNF, "root ::= 'a'", {"ebnf": "root ::= 'a'"}),
        (GrammarKind.STRUCTURAL_TAG, "{}", {"structural_tag": "{}"}),
    ],
)
def test_grammars(kind: GrammarKind, text: str, expected: dict[str, str]) -> None:
    sampling = made(request(grammar=Grammar(kind, text))).sampling
    assert expected.items() <= sampling.items()


def test_choices_are_taken_by_the_letter() -> None:
    words = ["a.b", "(c)", "d|e", r"\f", "plain"]
    regex = made(request(grammar=Grammar(GrammarKind.CHOICE, json.dumps(words)))).sampling["regex"]
    for word in words:
        assert re.fullmatch(regex, word)
    assert not re.fullmatch(regex, "axb")


@pytest.mark.parametrize(
    ("asked", "feature"),
    [
        (request(media=(MediaSpan(0, 1, b"0" * 16),)), "media"),
        (request(extra={"logits_processors": ["a"]}), "logits_processors"),
        (request(sampling=Sampling(min_p=0.1)), "min_p"),
        (
            request(sampling=Sampling(presence_penalty=1.0, seed=1), prior_tokens=(5,)),
            "resume with penalties",
        ),
        (
            request(sampling=Sampling(repetition_penalty=1.2, seed=1), prior_tokens=(5,)),
            "resume with penalties",
        ),
        (request(grammar=Grammar(GrammarKind.REGEX, "a"), prior_tokens=(5,)), "resume with a grammar"),
    ],
)
def test_unsupported(asked: Request, feature: str) -> None:
    with pytest.raises(Unsupported) as caught:
        check_supported(asked, FACTS)
    assert caught.value.fields["feature"] == feature


def test_a_seed_needs_an_sglang_that_follows_it() -> None:
    unseeded = replace(FACTS, is_seeded=False)
    with pytest.raises(Unsupported, match="enable_deterministic_inference"):
        check_supported(request(sampling=Sampling(seed=1)), unseeded)
    check_supported(request(sampling=Sampling(seed=1, temperature=0.0)), unseeded)
    check_supported(request(sampling=Sampling(min_p=0.1)), unseeded)


def test_no_grammars_without_a_backend() -> None:
    with pytest.raises(Unsupported):
        check_supported(request(grammar=Grammar(GrammarKind.REGEX, "a")), replace(FACTS, has_grammars=False))


@pytest.mark.parametrize(
    "asked",
    [
        request(sampling=Sampling(top_p=0.0)),
        request(sampling=Sampling(repetition_penalty=3.0)),
        request(sampling=Sampling(presence_penalty=-3.0)),
        request(token_ids=(5,) * 2042),
    ],
)
def test_invalid(asked: Request) -> None:
    with pytest.raises(InvalidRequest):
        check_supported(asked, FACTS)
